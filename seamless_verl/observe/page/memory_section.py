"""The section on memory: what trainer and engine of a slice held over time, one chart per slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seamless_verl.memory.book import size
from seamless_verl.observe.digest import RunDigest
from seamless_verl.observe.memory import Part, SliceMemory
from seamless_verl.observe.page import charts
from seamless_verl.observe.page.blocks import absent, figure
from seamless_verl.observe.page.lane_data import peaks

LEAD = (
    "A slice that trains and generates has one memory for both: the trainer's state leaves while the slice is lent, "
    "and the engine's weights and cache leave while it trains. A band shows when something was there, and its height "
    "how much of it."
)
_NAMES: Mapping[Part, str] = {
    ("trainer", "parameters"): "trainer: parameters",
    ("trainer", "gradients"): "trainer: gradients",
    ("trainer", "optimizer"): "trainer: optimizer state",
    ("engine", "weights"): "engine: weights",
    ("engine", "kv_cache"): "engine: cache of contexts (KV)",
}
_STYLES: Mapping[Part, str] = {
    ("trainer", "parameters"): "c-train",
    ("trainer", "gradients"): "c-switch",
    ("trainer", "optimizer"): "c-validation",
    ("engine", "weights"): "c-generate",
    ("engine", "kv_cache"): "c-prefill-again",
}
_MOST_SLICES, _MOST_LEVELS = 12, 600


def memory(run: RunDigest) -> str:
    if not run.memory:
        return absent("The memory of devices was not counted in this run; the CPU platform does it.")
    charts_ = [_chart(one, run.span_s) for one in run.memory[:_MOST_SLICES]]
    rest = len(run.memory) - _MOST_SLICES
    more = f"<p>And {rest} more slices.</p>" if rest > 0 else ""
    checked = sum(run.weights_checked.values())
    wrong = run.weights_checked.get(False, 0)
    told = f"<p>Weights of {checked} loans were compared with the published ones: {wrong} differed.</p>"
    return f'{told if checked else ""}<div class="figures">{"".join(charts_)}</div>{more}'


def _chart(one: SliceMemory, span_s: float) -> str:
    unit, length = ("h", 3600.0) if span_s > 9000 else ("min", 60.0) if span_s > 150 else ("s", 1.0)
    levels = [
        (at / length, {_name(part): nbytes for part, nbytes in parts.items()})
        for at, parts in thinned(one.levels, span_s, _MOST_LEVELS)
    ]
    chart = charts.bands(
        levels,
        stop=span_s / length,
        styles={_name(part): _STYLES.get(part, "c-other") for part in sorted(one.parts, key=_place)},
        x_label=unit,
        number=size,
    )
    held = f"at most {size(one.peak)} at a time" + (f" of {size(one.capacity)} that it has" if one.capacity else "")
    return figure(one.slice, chart, f"{held}; weights came {one.wakes} times and left {one.sleeps} times")


def _place(part: Part) -> int:
    known = list(_NAMES)
    return known.index(part) if part in known else len(known)


def _name(part: Part) -> str:
    return _NAMES.get(part, f"{part[0]}: {part[1]}")


def thinned(
    levels: Sequence[tuple[float, Mapping[Part, int]]], stop: float, most: int
) -> list[tuple[float, Mapping[Part, int]]]:
    """About ``most`` levels: of each stretch of time the fullest, and the one that it ends with."""
    if len(levels) <= most:
        return list(levels)
    grain = 2 * (stop - levels[0][0]) / most
    return peaks(levels, grain, lambda parts: sum(parts.values()), grain / 2)
