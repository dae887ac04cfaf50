"""The sections of the page, each from the digest to HTML. Every text from outside goes through ``escape``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from seamless_verl.observe.digest import RunDigest
from seamless_verl.observe.numbers import duration, share, si
from seamless_verl.observe.page import charts
from seamless_verl.observe.page.blocks import LABELS, absent, facts, figure, style_of, validation_sets
from seamless_verl.observe.tallies import DecisionRow
from seamless_verl.observe.time_ledger import Category
from seamless_verl.scheduling.slices import ACTIVE_TAG

_MOST_DECISIONS = 200


def ledger(run: RunDigest) -> str:
    """Bars and tables; each pool's categories add up to its wall time times its devices."""
    if not run.books:
        return absent("No slice was recorded.")
    whole, inside = run.pools(), run.pools_in_steps()
    bars = [f"<h3>In training steps</h3>{_bars(inside)}" if inside else "", f"<h3>Whole recording</h3>{_bars(whole)}"]
    used = [category for category in Category if any(seconds[category] for seconds in whole.values())]
    legend = "".join(f'<span><i class="key {style_of(c)}"></i>{escape(LABELS[c])}</span>' for c in used)
    tables = f'<div class="columns">{_ledger_table(whole, used)}{_phase_table(run)}</div>'
    return f'{"".join(bars)}<p class="legend">{legend}</p>{tables}'


def _bars(pools: Mapping[str, Mapping[Category, float]]) -> str:
    rows = []
    for pool, seconds in pools.items():
        total = sum(seconds.values())
        parts = "".join(
            f'<i class="{style_of(category)}" style="width:{100 * value / total:.3f}%" '
            f'title="{escape(f"{LABELS[category]}: {share(value / total)}, {duration(value)}")}">'
            f"{share(value / total) if value / total > 0.06 else ''}</i>"
            for category, value in seconds.items()
            if value > 0
        )
        rows.append(f'<div class="stack"><span>{escape(pool)}</span><div>{parts}</div></div>')
    return "".join(rows)


def _ledger_table(pools: Mapping[str, Mapping[Category, float]], used: Sequence[Category]) -> str:
    totals = {pool: sum(seconds.values()) for pool, seconds in pools.items()}
    head = "".join(f"<th>{escape(pool)}</th><th></th>" for pool in pools)
    body = "".join(
        f'<tr><td><i class="key {style_of(category)}"></i>{escape(LABELS[category])}</td>'
        + "".join(
            f"<td>{_amount(seconds[category])}</td><td>{_percent(seconds[category], totals[pool])}</td>"
            for pool, seconds in pools.items()
        )
        + "</tr>"
        for category in used
    )
    foot = "".join(f"<td>{duration(total)}</td><td>{_percent(total, total)}</td>" for total in totals.values())
    return (
        f'<table class="ledger"><thead><tr><th>device time</th>{head}</tr></thead><tbody>{body}</tbody>'
        f"<tfoot><tr><td>wall time × devices</td>{foot}</tr></tfoot></table>"
    )


def _phase_table(run: RunDigest) -> str:
    """Wall time of the trainer by phase: what training consists of, and what it waited for."""
    if not run.phases:
        return ""
    rows = "".join(
        f"<tr><td>{escape(phase.value.replace('_', ' '))}</td><td>{_amount(seconds)}</td>"
        f"<td>{_percent(seconds, run.span_s)}</td></tr>"
        for phase, seconds in sorted(run.phases.items(), key=lambda item: -item[1])
    )
    return (
        '<table class="ledger"><thead><tr><th>phase of the trainer</th><th>wall time</th><th></th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def steps(run: RunDigest) -> str:
    """One column per step and pool: what its device time went into."""
    if not run.step_spans:
        return absent("No training step was recorded.")
    styles = {LABELS[category]: f"{style_of(category)} bar" for category in Category}
    figures = []
    for pool in run.pools():
        spans = [span for span in run.step_spans if pool in span.pools]
        longest = max((sum(span.pools[pool].values()) for span in spans), default=0.0)
        unit, length = ("h", 3600) if longest > 9000 else ("min", 60) if longest > 150 else ("s", 1)
        stacks = [
            (str(span.step), {LABELS[category]: value / length for category, value in span.pools[pool].items()})
            for span in spans
        ]
        chart = charts.columns(stacks, styles=styles, x_label="step", y_unit=unit)
        figures.append(figure(f"pool {pool}", chart, ""))
    return f'<div class="figures">{"".join(figures)}</div>'


def decisions(run: RunDigest) -> str:
    if not run.decisions:
        policy = f" (policy {run.start.policy})" if run.start is not None else ""
        moves = _tag_changes(run)
        told = (
            f"slices changed their tag {moves} times, for reasons not recorded" if moves else "every slice kept its tag"
        )
        return absent(f"No scheduling decision was recorded{policy}: {told}.")
    counts = Counter(row.made.action for row in run.decisions)
    text = ", ".join(f"{count} × {action}" for action, count in counts.most_common())
    known = [row for row in run.decisions if _benefit(row) is not None and row.made.predicted_s is not None]
    points = [
        (row.made.predicted_s or 0.0, _benefit(row) or 0.0, f"{row.made.action}: {row.made.reason}") for row in known
    ]
    chart = charts.scatter(points, x_label="predicted benefit", y_label="realised benefit", number=_seconds)
    shown_chart = f'<div class="figures">{figure("predicted and realised benefit", chart, "")}</div>' if chart else ""
    shown = run.decisions[-_MOST_DECISIONS:]
    left_out = f"<p>The last {len(shown)} of {len(run.decisions)}.</p>" if len(shown) < len(run.decisions) else ""
    rows = "".join(_decision_row(row) for row in shown)
    return (
        f"<p>{escape(text)}</p>{shown_chart}<details open><summary>Every decision and its reason</summary>{left_out}"
        '<div class="scroll"><table><thead><tr><th>at</th><th>action</th><th>slices</th><th>reason</th>'
        f"<th>predicted</th><th>realised</th></tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _tag_changes(run: RunDigest) -> int:
    changes = 0
    for lane in run.lanes:
        tags = [tag for stretch in lane.stretches if (tag := ACTIVE_TAG[stretch.state]) is not None]
        changes += sum(before is not after for before, after in pairwise(tags))
    return changes


def _decision_row(row: DecisionRow) -> str:
    made, realised = row.made, _benefit(row)
    predicted = duration(made.predicted_s) if made.predicted_s is not None else "–"
    names = ", ".join(made.slices[:3]) + (f" and {len(made.slices) - 3} more" if len(made.slices) > 3 else "")
    came = "–" if realised is None else duration(realised)
    if row.outcome is not None and row.outcome.lent_tokens:
        came += f", {si(row.outcome.lent_tokens)} tokens"
    if row.outcome is not None and row.outcome.late_s:
        came += f", {duration(row.outcome.late_s)} late"
    return (
        f"<tr><td>{duration(made.at)}</td><td>{escape(made.action)}</td><td>{escape(names)}</td>"
        f"<td>{escape(made.reason)}</td><td>{predicted}</td>"
        f"<td>{came}</td></tr>"
    )


def _benefit(row: DecisionRow) -> float | None:
    return row.outcome.realised_s if row.outcome is not None else None


def learning(run: RunDigest) -> str:
    if not run.steps:
        return absent("No rewards were recorded (steps.jsonl)." if run.step_spans else "No step has ended yet.")
    rewards = [charts.Series(label="reward", points=_curve(run, "reward"), style="s-train")]
    passed = _curve(run, "pass_rate")
    if passed:
        rewards.append(charts.Series(label="pass rate in training", points=passed, style="s-generate"))
    figures = [figure("reward per step", charts.lines(rewards, x_label="step", y_format=lambda v: f"{v:.2f}"), "")]
    sets = [
        charts.Series(
            label=name.replace("_", " "),
            points=[(record["step"], record["mean"]) for record in records],
            intervals=[(r["low"], r["high"]) if r["low"] is not None else None for r in records],
            style=style,
        )
        for (name, records), style in zip(validation_sets(run).items(), _STYLES, strict=False)
    ]
    if sets:
        chart = charts.lines(sets, x_label="step", y_format=lambda v: f"{v:.2f}")
        figures.append(figure("validation, with 95 % intervals by task", chart, ""))
    return f'<div class="figures">{"".join(figures)}</div>'


_STYLES = ("s-generate", "s-train", "s-sync", "s-switch", "s-prefill-again")


def about(run: RunDigest) -> str:
    """What this page is made from and what it does not know."""
    recording = run.recording
    told = [("events", str(len(recording.events)))]
    told += [(f"from {writer}", str(count)) for writer, count in recording.writers.items()]
    told += [("dropped by the recorder", str(run.lost))] if run.lost else []
    told += [("last line cut short in", ", ".join(recording.torn))] if recording.torn else []
    told += [(f"unknown kind {kind}, left out", str(count)) for kind, count in recording.unknown.items()]
    started = [(part.replace("_", " "), duration(seconds)) for part, seconds in run.start_up_s.items()]
    if not started:
        return facts(told)
    return (
        f'<div class="columns"><div><h3>Events</h3>{facts(told)}</div>'
        f"<div><h3>Start-up, before the recording</h3>{facts(started)}</div></div>"
    )


def _curve(run: RunDigest, key: str) -> list[tuple[float, float]]:
    return [(record["step"], record[key]) for record in run.steps if record[key] is not None]


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if part and whole else "–"


def _amount(seconds: float) -> str:
    return duration(seconds) if seconds else "–"


def _seconds(value: float) -> str:
    return f"{value:g} s"
