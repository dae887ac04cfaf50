"""Writes ``docs/configuration.md`` from the dataclasses of `seamless_verl.config` (``make docs``).

Each key is described once, in the docstring of its dataclass; `tests.kernel.test_docs` fails where the page differs.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seamless_verl.config import SeamlessConfig

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
_HEAD = """# Configuration: every key under `seamless`

Everything else is verl's. On the command line write `KEY=VALUE`; under verl's own entry point with a plus
(`+seamless.staleness.eta=2`). An unknown key, a value that cannot work and keys that do not go together are refused
before anything starts, with what to write instead.

Keys in a file: write them into `conf/recipe/mine.yaml`, whose first line is `# @package _global_`, and start with
`--config-dir conf +recipe=mine`.

This page is made from [config.py](../seamless_verl/config.py) by `make docs`; a test fails where the two differ.
"""


def page() -> str:
    parts = [_HEAD]
    for path, section in sections(SeamlessConfig, "seamless"):
        parts += [f"\n## `{path}`\n", _summary(section), "\n| key | default | what it means |\n|---|---|---|"]
        described = _described(section)
        for field in dataclasses.fields(section):
            if dataclasses.is_dataclass(field.default_factory):
                continue  # always there; its heading below says all
            parts.append(f"| `{field.name}` | {_default(field)} | {described[field.name]} |")
    return "\n".join(parts) + "\n"


def sections(cls: type, path: str) -> Iterator[tuple[str, type]]:
    """Every dataclass under a key, the outer one first; ``[]`` marks an entry of a list."""
    yield path, cls
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if (inner := _section_of(hints[field.name])) is not None:
            yield from sections(inner, f"{path}.{field.name}{'[]' if _is_listed(cls, field) else ''}")


def _section_of(hint: Any) -> type | None:
    inner = [hint, *typing.get_args(hint)]
    return next((typing.cast(type, part) for part in inner if dataclasses.is_dataclass(part)), None)


def _is_listed(cls: type, field: dataclasses.Field[Any]) -> bool:
    return typing.get_origin(typing.get_type_hints(cls)[field.name]) is tuple


def _summary(cls: type) -> str:
    return _plain(inspect.getdoc(cls).partition("\nAttributes:")[0])  # type: ignore[union-attr]


def _described(cls: type) -> dict[str, str]:
    """What a docstring says below ``Attributes:``, by attribute; ``a, b: …`` describes both."""
    entries: dict[str, str] = {}
    for entry in re.split(r"\n    (?! )", inspect.getdoc(cls).partition("Attributes:")[2]):  # type: ignore[union-attr]
        names, _, text = entry.partition(": ")
        entries |= {name.strip(): _plain(text) for name in names.split(",")}
    return entries


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return "`{}`" if field.default_factory is dict else ""
    if field.default is dataclasses.MISSING:
        return "required"
    return f"`{json.dumps(field.default)}`".replace('"', "")


def _plain(text: str) -> str:
    text = re.sub(r"``([^`]*)``", r"`\1`", " ".join(text.split())).replace("|", "\\|")
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", re.sub(r"\bNone\b", "`null`", text))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
