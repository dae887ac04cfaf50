"""The charts of a run with their titles and captions, by section of the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seamless_verl.memory.book import size
from seamless_verl.observe.digest import RunDigest
from seamless_verl.observe.memory import Part, SliceMemory
from seamless_verl.observe.page import charts
from seamless_verl.observe.page.lane_data import peaks
from seamless_verl.observe.page.words import LABELS, duration, quantile, si, style_of
from seamless_verl.observe.time_ledger import Category

_MEMORY: Mapping[Part, tuple[str, str]] = {  # name and style of each part, in the order of the bands
    ("trainer", "parameters"): ("trainer: parameters", "c-train"),
    ("trainer", "gradients"): ("trainer: gradients", "c-switch"),
    ("trainer", "optimizer"): ("trainer: optimizer state", "c-validation"),
    ("engine", "weights"): ("engine: weights", "c-generate"),
    ("engine", "kv_cache"): ("engine: cache of contexts (KV)", "c-prefill-again"),
}
_MOST_SLICES, _MOST_LEVELS = 12, 600
_STYLES = ("s-generate", "s-train", "s-sync", "s-switch", "s-prefill-again")


@dataclass(frozen=True, slots=True)
class Figure:
    """``chart`` is SVG; empty where there is nothing to draw."""

    title: str
    chart: str
    caption: str = ""


def memory(run: RunDigest) -> list[Figure]:
    """What trainer and engine of a slice held over time; of the first slices only."""
    return [_bands(one, run.span_s) for one in run.memory[:_MOST_SLICES]]


def _bands(one: SliceMemory, span_s: float) -> Figure:
    unit, length = _unit(span_s)
    parts = {part: _MEMORY.get(part, (f"{part[0]}: {part[1]}", "c-other")) for part in one.parts}
    known = list(_MEMORY)
    order = sorted(parts, key=lambda part: known.index(part) if part in _MEMORY else len(known))
    chart = charts.bands(
        [
            (at / length, {parts[part][0]: nbytes for part, nbytes in held.items()})
            for at, held in thinned(one.levels, span_s, _MOST_LEVELS)
        ],
        stop=span_s / length,
        styles=dict(parts[part] for part in order),
        x_label=unit,
        number=size,
    )
    held = f"at most {size(one.peak)} at a time" + (f" of {size(one.capacity)} that it has" if one.capacity else "")
    return Figure(one.slice, chart, f"{held}; weights came {one.wakes} times and left {one.sleeps} times")


def thinned(
    levels: Sequence[tuple[float, Mapping[Part, int]]], stop: float, most: int
) -> list[tuple[float, Mapping[Part, int]]]:
    """About ``most`` levels: of each stretch of time the fullest, and the one that it ends with."""
    if len(levels) <= most:
        return list(levels)
    grain = 2 * (stop - levels[0][0]) / most
    return peaks(levels, grain, lambda parts: sum(parts.values()), grain / 2)


def steps(run: RunDigest) -> list[Figure]:
    """One column per step and pool: what its device time went into."""
    styles = {LABELS[category]: f"{style_of(category)} bar" for category in Category}
    found = []
    for pool in run.pools():
        spans = [span for span in run.step_spans if pool in span.pools]
        unit, length = _unit(max((sum(span.pools[pool].values()) for span in spans), default=0.0))
        stacks = [
            (str(span.step), {LABELS[category]: value / length for category, value in span.pools[pool].items()})
            for span in spans
        ]
        found.append(Figure(f"pool {pool}", charts.columns(stacks, styles=styles, x_label="step", y_unit=unit)))
    return found


def decisions(run: RunDigest) -> Figure:
    """Realised over predicted benefit of those that have both."""
    points = [
        (row.made.predicted_s, row.outcome.realised_s, f"{row.made.action}: {row.made.reason}")
        for row in run.decisions
        if row.made.predicted_s is not None and row.outcome is not None and row.outcome.realised_s is not None
    ]
    chart = charts.scatter(
        points, x_label="predicted benefit", y_label="realised benefit", number=lambda value: f"{value:g} s"
    )
    return Figure("predicted and realised benefit", chart)


def learning(run: RunDigest) -> list[Figure]:
    rewards = [charts.Series(label="reward", points=_curve(run, "reward"), style="s-train")]
    if passed := _curve(run, "pass_rate"):
        rewards.append(charts.Series(label="pass rate in training", points=passed, style="s-generate"))
    validated = [
        charts.Series(
            label=name.replace("_", " "),
            points=[(record["step"], record["mean"]) for record in records],
            intervals=[(r["low"], r["high"]) if r["low"] is not None else None for r in records],
            style=style,
        )
        for (name, records), style in zip(run.validation_sets().items(), _STYLES, strict=False)
    ]
    return [
        Figure("reward per step", charts.lines(rewards, x_label="step", y_format=_hundredths)),
        Figure(
            "validation, with 95 % intervals by task", charts.lines(validated, x_label="step", y_format=_hundredths)
        ),
    ]


def data(run: RunDigest) -> list[Figure]:
    """Staleness, lengths, times and rows per rollout."""
    stale = [age for age, count in sorted(run.tallies.rows.staleness.items()) for _ in range(count)]
    per_rollout = [charts.Series(label="rows per rollout", points=run.tallies.rows.per_rollout, style="s-sync")]
    return [
        _histogram("staleness of trained rows", stale, "weight versions", "s-sync", lambda value: f"{value:g}"),
        _histogram("response tokens of trained rows", run.tallies.rows.response_tokens, "tokens", "s-generate", si),
        _histogram("prompt tokens of trained rows", run.tallies.rows.prompt_tokens, "tokens", "s-train", si),
        _histogram("attempts of agents", run.tallies.sessions.seconds, "seconds", "s-prefill-again", duration),
        _histogram("requests to replicas", run.tallies.requests.seconds, "seconds", "s-switch", duration),
        Figure("rows per rollout", charts.lines(per_rollout, x_label="step", y_format=_hundredths)),
    ]


def sharing(run: RunDigest) -> list[Figure]:
    """What was computed once; nothing where every row was computed by itself."""
    if not (computed := _curve(run, "computed_tokens")):
        return []
    tokens = [
        charts.Series(label="in rows", points=_curve(run, "row_tokens"), style="s-train"),
        charts.Series(label="computed", points=computed, style="s-generate"),
    ]
    saved = [charts.Series(label="seconds saved", points=_curve(run, "sharing_saved_s"), style="s-sync")]
    return [
        Figure("tokens per step", charts.lines(tokens, x_label="step", y_format=si)),
        Figure("seconds saved per step, estimated", charts.lines(saved, x_label="step", y_format=_hundredths)),
    ]


def _histogram(title: str, values: Sequence[float], unit: str, style: str, number: Callable[[float], str]) -> Figure:
    if not values:
        return Figure(title, "")
    middle, tail, top = quantile(values, 0.5), quantile(values, 0.95), max(values)
    caption = f"median {number(middle)} · 95 % {number(tail)} · most {number(top)} · {len(values)} in all"
    return Figure(title, charts.histogram(values, x_label=unit, style=style), caption)


def _curve(run: RunDigest, key: str) -> list[tuple[float, Any]]:
    return [(record["step"], record[key]) for record in run.steps if record.get(key) is not None]


def _unit(seconds: float) -> tuple[str, float]:
    """The unit in which to show a time of this length, and how many seconds it has."""
    return ("h", 3600.0) if seconds > 9000 else ("min", 60.0) if seconds > 150 else ("s", 1.0)


def _hundredths(value: float) -> str:
    return f"{value:.2f}"
