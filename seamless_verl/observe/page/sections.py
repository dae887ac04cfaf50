"""The sections of the page, each from the digest to HTML. Every text from outside goes through ``escape``."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from seamless_verl.observe.digest import DecisionRow, RunDigest
from seamless_verl.observe.ledger import IDLE, Category
from seamless_verl.observe.numbers import duration, quantile, share, si
from seamless_verl.observe.page import charts
from seamless_verl.observe.page.findings import Finding, findings
from seamless_verl.observe.page.labels import LABELS, style_of

_MOST_DECISIONS = 200


def headline(run: RunDigest) -> str:
    """Cards: what one wants to know first."""
    cards = [_useful_card(run), _idle_card(run), _step_card(run), *_result_cards(run), _audit_card(run)]
    return f'<div class="cards">{"".join(card for card in cards if card)}</div>'


def _card(label: str, value: str, detail: str) -> str:
    return f'<div class="card"><h3>{escape(label)}</h3><b>{escape(value)}</b><p>{escape(detail)}</p></div>'


def _useful_card(run: RunDigest) -> str:
    seconds = _sum(run.pools_in_steps())
    total = sum(seconds.values())
    if not total:
        return ""
    useful = (seconds[Category.TRAIN] + seconds[Category.GENERATE]) / total
    return _card("device time at work", share(useful), f"training or generating, of {duration(total)} in steps")


def _idle_card(run: RunDigest) -> str:
    pools = run.pools_in_steps()
    if not pools:
        return ""
    shares = {pool: sum(v[c] for c in IDLE) / sum(v.values()) for pool, v in pools.items() if sum(v.values())}
    worst = max(shares, key=lambda pool: shares[pool])
    others = " · ".join(f"{pool} {share(value)}" for pool, value in shares.items())
    return _card("idle in steps", share(shares[worst]), others)


def _step_card(run: RunDigest) -> str:
    lengths = [record["step_s"] for record in run.steps] or [span.stop - span.start for span in run.step_spans]
    if not lengths:
        return ""
    tokens = [record["tokens_per_s"] for record in run.steps]
    speed = f" · {si(statistics.fmean(tokens))} trained tokens/s" if tokens else ""
    return _card(
        "step time, median",
        duration(statistics.median(lengths)),
        f"{duration(min(lengths))} to {duration(max(lengths))}{speed}",
    )


def _result_cards(run: RunDigest) -> list[str]:
    """Validation before and after where there is one, else the training reward of the first and last steps."""
    cards = []
    for name, records in _validation_sets(run).items():
        first, last = records[0], records[-1]
        label = f"{'pass rate' if last['metric'] == 'passed' else last['metric']}, {name.replace('_', ' ')}"
        bounds = f"95 % interval {last['low']:.3f} to {last['high']:.3f}" if last["low"] is not None else ""
        if first["step"] != last["step"]:
            bounds = f"{first['mean']:.3f} at step {first['step']}, {last['mean']:.3f} at step {last['step']}; {bounds}"
        cards.append(_card(label, f"{last['mean']:.3f}", bounds))
    if not cards and run.steps:
        first, last = run.steps[0], run.steps[-1]
        detail = f"in step {last['step']}; {first['reward']:.3f} in step {first['step']}"
        cards.append(_card("reward", f"{last['reward']:.3f}", detail))
    return cards[:2]


def _audit_card(run: RunDigest) -> str:
    if not run.steps:
        return ""
    audited, rows = (sum(record[key] for record in run.steps) for key in ("rows_audited", "rows"))
    violations = sum(record["audit_violations"] for record in run.steps)
    stale = max((record["staleness_max"] for record in run.steps), default=0)
    bound = f" (bound {run.start.eta})" if run.start is not None else ""
    detail = f"rows differ from the engine's record, of {audited} compared ({share(audited / rows) if rows else '–'})"
    return _card("token audit", str(violations), f"{detail} · staleness ≤ {stale}{bound}")


def next_steps(run: RunDigest) -> str:
    items = "".join(_finding(finding) for finding in findings(run))
    return f'<ul class="findings">{items}</ul>' if items else "<p>Nothing stands out.</p>"


def _finding(finding: Finding) -> str:
    return (
        f'<li class="{finding.weight.value}"><a href="#{finding.anchor}">{escape(finding.title)}</a>'
        f"<p>{escape(finding.advice)}</p></li>"
    )


def ledger(run: RunDigest) -> str:
    """Bars and a table; each pool's categories add up to its wall time times its devices."""
    if not run.books:
        return _absent("No slice was recorded.")
    whole, inside = run.pools(), run.pools_in_steps()
    bars = [f"<h3>In training steps</h3>{_bars(inside)}" if inside else "", f"<h3>Whole recording</h3>{_bars(whole)}"]
    used = [category for category in Category if any(seconds[category] for seconds in whole.values())]
    legend = "".join(f'<span><i class="key {style_of(c)}"></i>{escape(LABELS[c])}</span>' for c in used)
    return f'{"".join(bars)}<p class="legend">{legend}</p>{_ledger_table(whole, used)}'


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


def steps(run: RunDigest) -> str:
    """One column per step and pool: what its device time went into."""
    if not run.step_spans:
        return _absent("No training step was recorded.")
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
        figures.append(_figure(f"pool {pool}", chart, ""))
    return f'<div class="figures">{"".join(figures)}</div>'


def decisions(run: RunDigest) -> str:
    if not run.decisions:
        policy = f" (policy {run.start.policy})" if run.start is not None else ""
        return _absent(f"This run made no scheduling decisions{policy}: every slice kept its tag.")
    counts = Counter(row.made.action for row in run.decisions)
    text = ", ".join(f"{count} × {action}" for action, count in counts.most_common())
    known = [row for row in run.decisions if _benefit(row) is not None and row.made.predicted_s is not None]
    points = [
        (row.made.predicted_s or 0.0, _benefit(row) or 0.0, f"{row.made.action}: {row.made.reason}") for row in known
    ]
    chart = charts.scatter(points, x_label="predicted benefit", y_label="realised benefit", number=_seconds)
    figure = f'<div class="figures">{_figure("predicted and realised benefit", chart, "")}</div>' if chart else ""
    shown = run.decisions[-_MOST_DECISIONS:]
    left_out = f"<p>The last {len(shown)} of {len(run.decisions)}.</p>" if len(shown) < len(run.decisions) else ""
    rows = "".join(_decision_row(row) for row in shown)
    return (
        f"<p>{escape(text)}</p>{figure}<details open><summary>Every decision and its reason</summary>{left_out}"
        '<div class="scroll"><table><thead><tr><th>at</th><th>action</th><th>slices</th><th>reason</th>'
        f"<th>predicted</th><th>realised</th></tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _decision_row(row: DecisionRow) -> str:
    made, realised = row.made, _benefit(row)
    predicted = duration(made.predicted_s) if made.predicted_s is not None else "–"
    names = ", ".join(made.slices[:3]) + (f" and {len(made.slices) - 3} more" if len(made.slices) > 3 else "")
    return (
        f"<tr><td>{duration(made.at)}</td><td>{escape(made.action)}</td><td>{escape(names)}</td>"
        f"<td>{escape(made.reason)}</td><td>{predicted}</td>"
        f"<td>{duration(realised) if realised is not None else '–'}</td></tr>"
    )


def _benefit(row: DecisionRow) -> float | None:
    return row.outcome.realised_s if row.outcome is not None else None


def learning(run: RunDigest) -> str:
    if not run.steps:
        return _absent("No step has ended yet.")
    rewards = [charts.Series(label="reward", points=_curve(run, "reward"), style="s-train")]
    passed = _curve(run, "pass_rate")
    if passed:
        rewards.append(charts.Series(label="pass rate in training", points=passed, style="s-generate"))
    figures = [_figure("reward per step", charts.lines(rewards, x_label="step", y_format=lambda v: f"{v:.2f}"), "")]
    sets = [
        charts.Series(
            label=name.replace("_", " "),
            points=[(record["step"], record["mean"]) for record in records],
            intervals=[(r["low"], r["high"]) if r["low"] is not None else None for r in records],
            style=style,
        )
        for (name, records), style in zip(_validation_sets(run).items(), _STYLES, strict=False)
    ]
    if sets:
        chart = charts.lines(sets, x_label="step", y_format=lambda v: f"{v:.2f}")
        figures.append(_figure("validation, with 95 % intervals by task", chart, ""))
    return f'<div class="figures">{"".join(figures)}</div>'


_STYLES = ("s-generate", "s-train", "s-sync", "s-switch", "s-prefill-again")


def data(run: RunDigest) -> str:
    """Staleness, lengths, rows per rollout, drift, requests and sessions."""
    rows, sessions, requests = run.rows, run.sessions, run.requests
    stale = [age for age, count in sorted(rows.staleness.items()) for _ in range(count)]
    per_rollout = [charts.Series(label="rows per rollout", points=rows.per_rollout, style="s-sync")]
    figures = [
        _histogram("staleness of trained rows", stale, "weight versions", "s-sync", _plain),
        _histogram("response tokens of trained rows", rows.response_tokens, "tokens", "s-generate", si),
        _histogram("prompt tokens of trained rows", rows.prompt_tokens, "tokens", "s-train", si),
        _histogram("attempts of agents", sessions.seconds, "seconds", "s-prefill-again", duration),
        _histogram("requests to replicas", requests.seconds, "seconds", "s-switch", duration),
        _figure("rows per rollout", charts.lines(per_rollout, x_label="step", y_format=lambda v: f"{v:.2f}"), ""),
    ]
    parts = [f'<div class="figures">{"".join(figures)}</div>', '<div class="columns">']
    parts.append(f"<div><h3>Drift reasons</h3>{_drift(run)}</div>")
    parts.append(f"<div><h3>Requests</h3>{_facts(_request_facts(run))}</div>")
    parts.append(f"<div><h3>Attempts of agents</h3>{_facts(_session_facts(run))}</div></div>")
    return "".join(parts)


def _drift(run: RunDigest) -> str:
    reasons = run.sessions.drift.most_common()
    if not reasons:
        return f"<p>None in {run.sessions.turns} turns: every request continued its session token for token.</p>"
    most = reasons[0][1]
    rows = "".join(
        f'<li><span>{escape(reason)}</span><i class="c-sync" style="width:{50 * count / most:.1f}%"></i>{count}</li>'
        for reason, count in reasons
    )
    return f'<ul class="ranks">{rows}</ul><p>in {run.sessions.turns} turns</p>'


def _request_facts(run: RunDigest) -> list[tuple[str, str]]:
    requests = run.requests
    again = "not told by the engine" if requests.prefilled_again is None else f"{si(requests.prefilled_again)} tokens"
    return [
        ("started", str(requests.started)),
        ("generated", f"{si(requests.tokens)} tokens"),
        ("interrupted, tokens kept", str(requests.interrupted)),
        ("resumed with tokens", str(requests.resumed)),
        ("prefilled again", again if requests.resumed else "nothing"),
        ("abandoned by the agent", str(requests.abandoned)),
        ("ended with an error", str(requests.failed)),
    ]


def _session_facts(run: RunDigest) -> list[tuple[str, str]]:
    sessions = run.sessions
    turns = f"{sessions.turns / sessions.ended:.2f}" if sessions.ended else "–"
    return [
        ("ended", str(sessions.ended)),
        ("turns per attempt", turns),
        *[(f"status {status}", str(count)) for status, count in sessions.statuses.most_common()],
    ]


def about(run: RunDigest) -> str:
    """What this page is made from and what it does not know."""
    recording = run.recording
    facts = [("events", str(len(recording.events)))]
    facts += [(f"from {writer}", str(count)) for writer, count in recording.writers.items()]
    facts += [("dropped by the recorder", str(run.lost))] if run.lost else []
    facts += [("last line cut short in", ", ".join(recording.torn))] if recording.torn else []
    facts += [(f"unknown kind {kind}, left out", str(count)) for kind, count in recording.unknown.items()]
    return _facts(facts)


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts) + "</dl>"


def _histogram(title: str, values: Sequence[float], unit: str, style: str, number: Any) -> str:
    if not values:
        return ""
    middle, tail, top = quantile(values, 0.5), quantile(values, 0.95), max(values)
    caption = f"median {number(middle)} · 95 % {number(tail)} · most {number(top)} · {len(values)} in all"
    return _figure(title, charts.histogram(values, x_label=unit, style=style), caption)


def _figure(title: str, chart: str, caption: str) -> str:
    if not chart:
        return ""
    return f"<figure><h3>{escape(title)}</h3>{chart}<figcaption>{escape(caption)}</figcaption></figure>"


def _absent(text: str) -> str:
    return f'<p class="absent">{escape(text)}</p>'


def _sum(pools: Mapping[str, Mapping[Category, float]]) -> dict[Category, float]:
    return {category: sum(seconds[category] for seconds in pools.values()) for category in Category}


def _curve(run: RunDigest, key: str) -> list[tuple[float, float]]:
    return [(record["step"], record[key]) for record in run.steps if record[key] is not None]


def _validation_sets(run: RunDigest) -> dict[str, list[Mapping[str, Any]]]:
    sets: dict[str, list[Mapping[str, Any]]] = {}
    for record in sorted(run.validations, key=lambda record: record["step"]):
        sets.setdefault(record["name"], []).append(record)
    return sets


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if part and whole else "–"


def _amount(seconds: float) -> str:
    return duration(seconds) if seconds else "–"


def _seconds(value: float) -> str:
    return f"{value:g} s"


def _plain(value: float) -> str:
    return f"{value:g}"
