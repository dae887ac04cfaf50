"""The page as text: the figures of a run put into the template, with its style and the script that draws the lanes.

Everything printed goes through the template's escaping, whatever a task's name or an agent's text contains.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib.resources import files
from itertools import pairwise
from typing import Any

from seamless_verl.observe.digest import RunDigest
from seamless_verl.observe.page import figures
from seamless_verl.observe.page.findings import Finding, findings
from seamless_verl.observe.page.lane_data import as_script, lane_data
from seamless_verl.observe.page.words import DRIFT, LABELS, duration, ended, share, si, style_of
from seamless_verl.observe.tallies import DecisionRow
from seamless_verl.observe.time_ledger import IDLE, Category
from seamless_verl.scheduling.slices import ACTIVE_TAG
from seamless_verl.trajectory.tokens import DriftReason

_MOST_DECISIONS = 200
_Pairs = list[tuple[str, str]]
_Card = tuple[str, str, str]
"""Label, value, detail."""


def render(run: RunDigest, also: Sequence[Finding] = ()) -> str:
    """The whole page; ``also``: what to look at that the recording does not say."""
    import jinja2  # as the template engine of chat templates it comes with the trainer
    from markupsafe import Markup

    def drawn(one: figures.Figure) -> figures.Figure:
        return replace(one, chart=Markup(one.chart))

    here = files("seamless_verl.observe.page")
    page, style, script = (
        (here / name).read_text(encoding="utf-8") for name in ("page.html.jinja", "page.css", "lanes.js")
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "duration": duration,
        "share": share,
        "label": LABELS.__getitem__,
        "style": style_of,
        "realised": _realised,
    }
    whole = run.pools()
    whole_page = environment.from_string(page).render(
        run=run,
        title=run.tallies.start.name if run.tallies.start is not None else "run without a recording",
        state=_state(run),
        subtitle=_subtitle(run),
        cards=list(_cards(run)),
        findings=findings(run, also),
        memory=list(map(drawn, figures.memory(run))),
        whole=whole,
        inside=run.pools_in_steps(),
        used=[category for category in Category if any(seconds[category] for seconds in whole.values())],
        steps=list(map(drawn, figures.steps(run))),
        decisions=_decisions(run) | {"chart": drawn(figures.decisions(run))},
        learning=list(map(drawn, figures.learning(run))),
        data=list(map(drawn, figures.data(run))),
        sharing=list(map(drawn, figures.sharing(run))),
        drift=[(reason, count, _explained(reason)) for reason, count in run.tallies.sessions.drift.most_common()],
        requests=_requests(run),
        sessions=_sessions(run),
        about=_about(run),
        start_up=[(part.replace("_", " "), duration(seconds)) for part, seconds in run.start_up_s.items()],
        style=Markup(style),
        script=Markup(script),
        lanes=Markup(as_script(lane_data(run))),
    )
    return whole_page.encode("utf-8", "replace").decode()  # an agent's error may hold half of a surrogate pair


# ---------------------------------------------------------------- the top


def _state(run: RunDigest) -> tuple[str, str]:
    """In words, and its style."""
    if run.tallies.start is None:
        return "no recording", "open"
    if run.running:
        return "running", "open"
    return ended(run.outcome)


def _subtitle(run: RunDigest) -> list[str]:
    """What stands under the title."""
    subtitle = []
    if run.recording.virtual:
        subtitle.append("simulated time")
    elif run.recording.events:
        subtitle.append(datetime.fromtimestamp(run.recording.origin_s, timezone.utc).strftime("%d %B %Y, %H:%M UTC"))
    start_up = f" after {duration(sum(run.start_up_s.values()))} of start-up" if run.start_up_s else ""
    subtitle.append(duration(run.span_s) + start_up)
    if run.tallies.start is not None:
        devices = {entry.slice: entry.devices for entry in run.books}
        subtitle += [
            f"{len(run.whole_steps)} of {run.tallies.start.total_steps} steps",
            f"{sum(devices.values())} devices in {len(devices)} slices",
            f"policy {run.tallies.start.policy}",
            "staleness not bounded" if run.bound is None else f"staleness bound {run.bound}",
        ]
    return subtitle


def _cards(run: RunDigest) -> Iterator[_Card]:
    """What one wants to know first."""
    pools = {pool: seconds for pool, seconds in run.pools_in_steps().items() if sum(seconds.values())}
    if pools:
        total = sum(sum(seconds.values()) for seconds in pools.values())
        useful = sum(seconds[Category.TRAIN] + seconds[Category.GENERATE] for seconds in pools.values()) / total
        yield "device time at work", share(useful), f"training or generating, of {duration(total)} in steps"
        shares = {pool: sum(v[c] for c in IDLE) / sum(v.values()) for pool, v in pools.items()}
        others = " · ".join(f"{pool} {share(value)}" for pool, value in shares.items())
        yield "idle in steps", share(max(shares.values())), others
    lengths = [record["step_s"] for record in run.steps] or [span.stop - span.start for span in run.whole_steps]
    if lengths:
        tokens = sum(record["tokens_per_s"] * record["step_s"] for record in run.steps)
        speed = f" · {si(tokens / sum(lengths))} trained tokens/s" if run.steps and sum(lengths) else ""
        detail = f"{duration(min(lengths))} to {duration(max(lengths))}{speed}"
        yield "step time, median", duration(statistics.median(lengths)), detail
    yield from _per_token_and_rollout(run)
    yield from _computed_once(run)
    yield from [*_validated(run)][:2]
    if run.steps:
        audited, rows = (sum(record[key] for record in run.steps) for key in ("rows_audited", "rows"))
        violations = sum(record["audit_violations"] for record in run.steps)
        stale = max(record["staleness_max"] for record in run.steps)
        bound = f" (bound {run.bound})" if run.bound is not None else ""
        compared = f"of {audited} compared ({share(audited / rows) if rows else '–'})"
        detail = f"rows differ from the engine's record, {compared} · staleness ≤ {stale}{bound}"
        yield "token audit", str(violations), detail


def _per_token_and_rollout(run: RunDigest) -> Iterator[_Card]:
    if (cost := run.device_s_per_token()) is not None:
        detail = f"device time in steps, idle or not, over tokens that carried a gradient: {cost:.2g} s for each"
        yield "GPU-seconds per 1,000 trained tokens", f"{1000 * cost:.3g} s", detail
    if run.tallies.rows.per_rollout:
        (step, last), ratios = run.tallies.rows.per_rollout[-1], [ratio for _, ratio in run.tallies.rows.per_rollout]
        detail = f"in step {step}; median {statistics.median(ratios):.2f}, most {max(ratios):.2f}"
        yield "rows per rollout", f"{last:.2f}", detail


def _computed_once(run: RunDigest) -> Iterator[_Card]:
    shared = [record for record in run.steps if record.get("computed_tokens")]
    if shared:
        computed, tokens = (sum(record[key] for record in shared) for key in ("computed_tokens", "row_tokens"))
        saved = statistics.fmean(record["sharing_saved_s"] for record in shared)
        detail = f"of {si(tokens)} tokens in rows, the others shared · {duration(saved)} saved per step, estimated"
        yield "tokens computed", share(computed / tokens), detail


def _validated(run: RunDigest) -> Iterator[_Card]:
    """Validation before and after where there is one, else the training reward of the first and last steps."""
    for name, records in run.validation_sets().items():
        first, last = records[0], records[-1]
        bounds = f"95 % interval {last['low']:.3f} to {last['high']:.3f}" if last["low"] is not None else ""
        if first["step"] != last["step"]:
            bounds = f"{first['mean']:.3f} at step {first['step']}, {last['mean']:.3f} at step {last['step']}; {bounds}"
        metric = "pass rate" if last["metric"] == "passed" else last["metric"]
        yield f"{metric}, {name.replace('_', ' ')}", f"{last['mean']:.3f}", bounds
    if run.steps and not run.validations:
        first, last = run.steps[0], run.steps[-1]
        detail = f"in step {last['step']}; {first['reward']:.3f} in step {first['step']}"
        yield "reward", f"{last['reward']:.3f}", detail


# ---------------------------------------------------------------- decisions


def _decisions(run: RunDigest) -> dict[str, Any]:
    policy = f" (policy {run.tallies.start.policy})" if run.tallies.start is not None else ""
    moves = _tag_changes(run)
    moved = f"slices changed their tag {moves} times, for reasons not recorded" if moves else "every slice kept its tag"
    return {
        "shown": run.decisions[-_MOST_DECISIONS:],
        "counts": Counter(row.made.action for row in run.decisions).most_common(),
        "why_none": f"No scheduling decision was recorded{policy}: {moved}.",
    }


def _tag_changes(run: RunDigest) -> int:
    changes = 0
    for lane in run.lanes:
        tags = [tag for stretch in lane.stretches if (tag := ACTIVE_TAG[stretch.state]) is not None]
        changes += sum(before is not after for before, after in pairwise(tags))
    return changes


def _realised(row: DecisionRow) -> str:
    """What came of a decision."""
    outcome = row.outcome
    if outcome is None:
        return "–"
    came = ["–" if outcome.realised_s is None else duration(outcome.realised_s)]
    came += [f"{si(outcome.lent_tokens)} tokens"] if outcome.lent_tokens else []
    came += [f"{duration(outcome.late_s)} late"] if outcome.late_s else []
    return ", ".join(came)


# ---------------------------------------------------------------- facts


def _explained(reason: str) -> str:
    try:
        return DRIFT[DriftReason(reason)]
    except ValueError:  # of a later version, or a made-up recording
        return ""


def _requests(run: RunDigest) -> _Pairs:
    requests = run.tallies.requests
    again = "not told by the engine" if requests.prefilled_again is None else f"{si(requests.prefilled_again)} tokens"
    return [
        ("started", str(requests.started)),
        ("generated", f"{si(requests.tokens)} tokens"),
        ("interrupted, tokens kept", str(requests.interrupted)),
        ("resumed with tokens", str(requests.resumed)),
        ("of them on another slice", str(requests.moved.total())),
        ("prefilled again", again if requests.resumed else "nothing"),
        ("abandoned by the agent", str(requests.abandoned)),
        ("ended with an error", str(requests.failed)),
    ]


def _sessions(run: RunDigest) -> _Pairs:
    sessions = run.tallies.sessions
    if not sessions.ended:
        return [("ended", "0")]
    waited, total = sum(run.tallies.requests.seconds), sum(sessions.seconds)
    # Nobody knows where requests overlap, or come from other agent loops as well.
    waiting = waited / total if 0 < waited <= total else None
    return [
        ("ended", str(sessions.ended)),
        ("turns per attempt", f"{sessions.turns / sessions.ended:.2f}"),
        ("of their time, waiting for the model", share(waiting)),
        *[(f"status {status}", str(count)) for status, count in sessions.statuses.most_common()],
    ]


def _about(run: RunDigest) -> _Pairs:
    """What this page is made from and what it does not know."""
    recording = run.recording
    facts = [("events", str(len(recording.events)))]
    facts += [(f"from {writer}", str(count)) for writer, count in recording.writers.items()]
    facts += [("dropped by the recorder", str(run.tallies.lost))] if run.tallies.lost else []
    facts += [("last line cut short in", ", ".join(recording.torn))] if recording.torn else []
    facts += [(f"unknown kind {kind}, left out", str(count)) for kind, count in recording.unknown.items()]
    return facts
