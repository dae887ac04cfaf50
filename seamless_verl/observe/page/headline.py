"""The top of the page: cards with what one wants to know first, and what to look at next."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from html import escape

from seamless_verl.observe.digest import RunDigest
from seamless_verl.observe.numbers import duration, share, si
from seamless_verl.observe.page.blocks import validation_sets
from seamless_verl.observe.page.findings import Finding, findings
from seamless_verl.observe.time_ledger import IDLE, Category


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


def next_steps(run: RunDigest) -> str:
    items = "".join(_finding(finding) for finding in findings(run))
    return f'<ul class="findings">{items}</ul>' if items else "<p>Nothing stands out.</p>"


def _finding(finding: Finding) -> str:
    return (
        f'<li class="{finding.weight.value}"><a href="#{finding.anchor}">{escape(finding.title)}</a>'
        f"<p>{escape(finding.advice)}</p></li>"
    )


def _sum(pools: Mapping[str, Mapping[Category, float]]) -> dict[Category, float]:
    return {category: sum(seconds[category] for seconds in pools.values()) for category in Category}
