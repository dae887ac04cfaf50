"""Puts the page together: style, sections, the data of the lanes and the script that draws them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from datetime import datetime, timezone
from html import escape
from importlib.resources import files

from seamless_verl.observe.digest import RunDigest
from seamless_verl.observe.numbers import duration, share, si
from seamless_verl.observe.page import data_section, memory_section, sections
from seamless_verl.observe.page.blocks import validation_sets
from seamless_verl.observe.page.findings import Finding, findings
from seamless_verl.observe.page.lane_data import as_script, lane_data
from seamless_verl.observe.time_ledger import IDLE, Category

# Nothing may be fetched, whatever a task's name or an agent's text contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

_LANES_HELP = (
    "Drag to choose a stretch of time, double click for everything; Ctrl and wheel zoom, Shift and wheel move, as do "
    "+ − ← → when the lanes have the focus. The strip above a lane is its active tag (train, rollout); in a generating "
    "lane, the filled height is the number of requests on the slice. Upper marks: weights published."
)


def render(run: RunDigest) -> str:
    """The whole page as text."""
    title = run.start.name if run.start is not None else "run without a recording"
    body = [
        _header(run, title),
        _section("next", "Look at this next", "", _next_steps(run)),
        _section("lanes", "What every slice did", "", _lanes(run)),
        _section("memory", "What was in each slice's memory", memory_section.LEAD, memory_section.memory(run)),
        _section(
            "ledger",
            "Where the device time went",
            "At any moment a slice is in exactly one category, so each column adds up to wall time × devices.",
            sections.ledger(run),
        ),
        _section(
            "steps",
            "Step by step",
            "Device time of each step: its wall time times the devices of the pool.",
            sections.steps(run),
        ),
        _section("decisions", "Decisions of the scheduler", "", sections.decisions(run)),
        _section("learning", "Learning", "", sections.learning(run)),
        _section("data", "What was generated and trained", "", data_section.data(run)),
        _section("about", "About this recording", "", sections.about(run)),
    ]
    here = files("seamless_verl.observe.page")
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "lanes.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} – report</title><style>{style}</style></head>\n<body>{''.join(body)}"
        f'<script type="application/json" id="lane-data">{as_script(lane_data(run))}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def _header(run: RunDigest, title: str) -> str:
    state, style = _state(run)
    facts = []
    if run.recording.virtual:
        facts.append("simulated time")
    elif run.recording.events:
        facts.append(datetime.fromtimestamp(run.recording.origin_s, timezone.utc).strftime("%d %B %Y, %H:%M UTC"))
    facts.append(duration(run.span_s))
    if run.start_up_s:
        facts[-1] += f" after {duration(sum(run.start_up_s.values()))} of start-up"
    if run.start is not None:
        facts.append(f"{len(run.step_spans)} of {run.start.total_steps} steps")
        devices = sum({entry.slice: entry.devices for entry in run.books}.values())
        facts.append(f"{devices} devices in {len(run.lanes)} slices")
        facts.append(f"policy {run.start.policy}")
        facts.append(f"staleness bound {run.start.eta}")
    return (
        f'<header><h1>{escape(title)} <span class="badge {style}">{escape(state)}</span></h1>'
        f"<p>{escape(' · '.join(facts))}</p>{_cards(run)}</header>"
    )


def _state(run: RunDigest) -> tuple[str, str]:
    if run.start is None:
        return "no recording", "open"
    if run.running:
        return "running", "open"
    if run.outcome is None:
        return "no end recorded", "bad"
    if run.outcome == "KeyboardInterrupt":
        return "interrupted", "open"
    return (run.outcome, "good") if run.outcome == "finished" else (f"ended by {run.outcome}", "bad")


def _lanes(run: RunDigest) -> str:
    if not run.lanes:
        return '<p class="absent">This folder has no recording (flight/*.jsonl), so there is nothing to draw.</p>'
    return (
        '<div class="buttons"><output id="lane-range"></output>'
        '<button id="lane-left" title="earlier">←</button><button id="lane-out" title="zoom out">−</button>'
        '<button id="lane-in" title="zoom in">+</button><button id="lane-right" title="later">→</button>'
        '<button id="lane-all" title="everything">all</button></div>'
        '<div class="lanes"><canvas id="lane-axis"></canvas><div id="lane-scroll">'
        '<canvas id="lane-canvas" tabindex="0" role="img" aria-label="lanes of all slices over time"></canvas></div>'
        '<div id="lane-tip" hidden></div></div><div id="lane-legend" class="legend"></div>'
        f'<p class="lead">{escape(_LANES_HELP)}</p>'
        "<noscript><p>The lanes need JavaScript; everything else on this page does not.</p></noscript>"
    )


def _section(anchor: str, title: str, lead: str, body: str) -> str:
    text = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>{text}{body}</section>'


# ---------------------------------------------------------------- the top: cards, and what to look at next


def _cards(run: RunDigest) -> str:
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
    for name, records in validation_sets(run).items():
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


def _next_steps(run: RunDigest) -> str:
    items = "".join(_finding(finding) for finding in findings(run))
    return f'<ul class="findings">{items}</ul>' if items else "<p>Nothing stands out.</p>"


def _finding(finding: Finding) -> str:
    return (
        f'<li class="{finding.weight.value}"><a href="#{finding.anchor}">{escape(finding.title)}</a>'
        f"<p>{escape(finding.advice)}</p></li>"
    )


def _sum(pools: Mapping[str, Mapping[Category, float]]) -> dict[Category, float]:
    return {category: sum(seconds[category] for seconds in pools.values()) for category in Category}
