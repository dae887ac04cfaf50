"""Answers that stay small, whatever agents wrote: of a long text its beginning, of what was seen nothing. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

MOST = 20_000
"""Characters of a text that are sent before somebody asks for all of it."""


def cut(told: Any, at: str) -> Any:
    """``told`` with ``{"part": its beginning, "of": its length, "at": where it stands}`` for every longer text.

    Args:
        at: where ``told`` stands; keys and numbers with dots between them.
    """
    if isinstance(told, str):
        return told if len(told) <= MOST else {"part": told[:MOST], "of": len(told), "at": at}
    if isinstance(told, Mapping):
        return {key: cut(held, f"{at}.{key}") for key, held in told.items()}
    if isinstance(told, (list, tuple)):
        return [cut(held, f"{at}.{number}") for number, held in enumerate(told)]
    return told


def found(told: Any, at: str) -> str | None:
    """The text at that place of what `cut` was given a part of; ``None``: there is none."""
    for name in at.split("."):
        if isinstance(told, Mapping):
            told = told.get(name)
        elif isinstance(told, (list, tuple)) and name.isdecimal() and int(name) < len(told):
            told = told[int(name)]
        else:
            return None
    return told if isinstance(told, str) else None


def mark_of(told: Any) -> str:
    """A short name of these facts: the same as long as none of them changes."""
    return blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=8).hexdigest()
