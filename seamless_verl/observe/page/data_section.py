"""The section on data: staleness, lengths, rows per rollout, drift, requests and attempts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from seamless_verl.observe.digest import RunDigest
from seamless_verl.observe.numbers import duration, quantile, share, si
from seamless_verl.observe.page import charts
from seamless_verl.observe.page.blocks import DRIFT, facts, figure
from seamless_verl.trajectory.segments import DriftReason


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
        figure("rows per rollout", charts.lines(per_rollout, x_label="step", y_format=lambda v: f"{v:.2f}"), ""),
    ]
    parts = [f'<div class="figures">{"".join(figures)}</div>', '<div class="columns">']
    parts.append(f"<div><h3>Drift reasons</h3>{_drift(run)}</div>")
    parts.append(f"<div><h3>Requests</h3>{facts(_request_facts(run))}</div>")
    parts.append(f"<div><h3>Attempts of agents</h3>{facts(_session_facts(run))}</div></div>")
    return "".join(parts)


def _drift(run: RunDigest) -> str:
    reasons = run.sessions.drift.most_common()
    if not run.sessions.ended:
        return "<p>No session of an agent was recorded; verl's own agent loops have none.</p>"
    if not reasons:
        return f"<p>None in {run.sessions.turns} turns: every request continued its session token for token.</p>"
    most = reasons[0][1]
    rows = "".join(
        f'<li><span>{escape(reason.replace("_", " "))}</span><i class="c-sync" '
        f'style="width:{30 * count / most:.1f}%"></i>{count}<p>{escape(_explained(reason))}</p></li>'
        for reason, count in reasons
    )
    return f'<ul class="ranks">{rows}</ul><p>in {run.sessions.turns} turns</p>'


def _explained(reason: str) -> str:
    try:
        return DRIFT[DriftReason(reason)]
    except ValueError:  # of a later version, or a made-up recording
        return ""


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
    if not sessions.ended:
        return [("ended", "0")]
    return [
        ("ended", str(sessions.ended)),
        ("turns per attempt", f"{sessions.turns / sessions.ended:.2f}"),
        ("of their time, waiting for the model", share(_waiting_share(run))),
        *[(f"status {status}", str(count)) for status, count in sessions.statuses.most_common()],
    ]


def _waiting_share(run: RunDigest) -> float | None:
    """Of all seconds of attempts; nobody knows where requests overlap, or come from other agent loops as well."""
    waited, total = sum(run.requests.seconds), sum(run.sessions.seconds)
    return waited / total if 0 < waited <= total else None


def _histogram(title: str, values: Sequence[float], unit: str, style: str, number: Any) -> str:
    if not values:
        return ""
    middle, tail, top = quantile(values, 0.5), quantile(values, 0.95), max(values)
    caption = f"median {number(middle)} · 95 % {number(tail)} · most {number(top)} · {len(values)} in all"
    return figure(title, charts.histogram(values, x_label=unit, style=style), caption)


def _plain(value: float) -> str:
    return f"{value:g}"
