"""The lanes as compact JSON for the script of the page: columns instead of objects, times in units of ``tick_s``."""

from __future__ import annotations

import json
from typing import Any

from seamless_verl.observe.digest import RunDigest
from seamless_verl.observe.lanes import Lane, thin
from seamless_verl.observe.page.labels import LABELS, style_of
from seamless_verl.observe.time_ledger import Category
from seamless_verl.scheduling.slices import ACTIVE_TAG

# About 1 MB of text; a laptop draws that many rectangles in a few milliseconds.
_BUDGET = 60_000
_TAGS = ("", "train", "rollout")


def lane_data(run: RunDigest) -> dict[str, Any]:
    """Keys: ``tick_s``, ``span`` (ticks), ``grain_s``, ``categories``, ``pools``, ``steps``, ``versions``,
    ``decisions``. A lane has ``start``, ``stop``, ``category``, ``tag`` of each stretch, and the ``load`` as two
    columns; ``category`` and ``tag`` are indices.
    """
    lanes, grain_s = thin(run.lanes, budget=_BUDGET)
    tick_s = max(run.span_s / 1e6, 1e-4)

    def ticks(at: float) -> int:
        return round(at / tick_s)

    order = list(Category)

    def columns(lane: Lane) -> dict[str, Any]:
        tags = [ACTIVE_TAG[stretch.state] for stretch in lane.stretches]
        return {
            "name": lane.slice,
            "devices": lane.devices,
            "start": [ticks(stretch.start) for stretch in lane.stretches],
            "stop": [ticks(stretch.stop) for stretch in lane.stretches],
            "category": [order.index(stretch.category) for stretch in lane.stretches],
            "tag": [_TAGS.index(tag.value if tag is not None else "") for tag in tags],
            "state": [stretch.state.value for stretch in lane.stretches],
            "load": [[ticks(at) for at, _ in lane.load], [level for _, level in lane.load]],
        }

    pools: dict[str, list[dict[str, Any]]] = {}
    for lane in lanes:
        pools.setdefault(lane.pool, []).append(columns(lane))
    return {
        "tick_s": tick_s,
        "span": ticks(run.span_s),
        "grain_s": grain_s,
        "categories": [{"style": style_of(category), "label": LABELS[category]} for category in order],
        "pools": [{"name": name, "lanes": members} for name, members in pools.items()],
        "steps": [[span.step, ticks(span.start), ticks(span.stop)] for span in run.step_spans],
        "versions": [[ticks(at), version] for at, version in run.versions],
        "decisions": [
            [ticks(row.made.at), row.made.action, ", ".join(row.made.slices), row.made.reason] for row in run.decisions
        ],
    }


def as_script(data: Any) -> str:
    """JSON that may stand inside of a ``<script>`` element, whatever strings it holds."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
