"""Keeps answers to the page small: a long text is cut, and what the page has seen already is not sent again. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

MOST = 20_000
"""Characters of a text that are sent before somebody asks for all of it."""


def cut(content: Any, at: str) -> Any:
    """``content`` with ``{"part": its beginning, "of": its length, "at": where it stands}`` for every longer text.

    Args:
        at: where ``content`` stands; keys and numbers with dots between them.
    """
    if isinstance(content, str):
        return content if len(content) <= MOST else {"part": content[:MOST], "of": len(content), "at": at}
    if isinstance(content, Mapping):
        return {key: cut(held, f"{at}.{key}") for key, held in content.items()}
    if isinstance(content, (list, tuple)):
        return [cut(held, f"{at}.{number}") for number, held in enumerate(content)]
    return content


def found(content: Any, at: str) -> str | None:
    """The whole text that `cut` named with this ``at``; ``None``: there is none."""
    for name in at.split("."):
        if isinstance(content, Mapping):
            content = content.get(name)
        elif isinstance(content, (list, tuple)) and name.isdecimal() and int(name) < len(content):
            content = content[int(name)]
        else:
            return None
    return content if isinstance(content, str) else None


def mark_of(content: Any) -> str:
    """A digest of the content, by which the page knows that nothing has changed."""
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()
