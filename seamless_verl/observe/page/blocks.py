"""Small pieces of HTML that several sections use, and what they share of the run's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from seamless_verl.observe.digest import RunDigest


def facts(facts: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts) + "</dl>"


def figure(title: str, chart: str, caption: str) -> str:
    if not chart:
        return ""
    return f"<figure><h3>{escape(title)}</h3>{chart}<figcaption>{escape(caption)}</figcaption></figure>"


def absent(text: str) -> str:
    return f'<p class="absent">{escape(text)}</p>'


def validation_sets(run: RunDigest) -> dict[str, list[Mapping[str, Any]]]:
    sets: dict[str, list[Mapping[str, Any]]] = {}
    for record in sorted(run.validations, key=lambda record: record["step"]):
        sets.setdefault(record["name"], []).append(record)
    return sets
