"""One attempt as lines for a terminal: the turns, the reward, and what of it would be trained. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from seamless_verl.agents.contract import AgentReport
from seamless_verl.trajectory.rows import Row
from seamless_verl.watch.transcript import Decode

_INDENT = "    "


def told(
    turns: Sequence[Mapping[str, Any]],
    rows: Sequence[Row],
    decode: Decode,
    *,
    report: AgentReport | None,
    failure: str,
    seconds: float,
    every_token: bool,
) -> Iterator[str]:
    """Args:
    turns: as `transcript.conversation` makes them.
    report: None where there is none, of which ``failure`` says why.
    every_token: a line per token instead of one per stretch of equal mask.
    """
    for turn in turns:
        yield from _turn(turn)
    yield ""
    yield _outcome(report, failure, seconds)
    if not any(row.num_trained for row in rows):
        yield "nothing to train: no answer of the model. The agent must send its requests to the base URL it is given"
    for number, row in enumerate(rows, 1):
        yield f"row {number} of {len(rows)}: {len(row.token_ids)} tokens, {sum(row.mask)} of them trained (mask 1)"
        yield from _tokens(row, decode) if every_token else _stretches(row, decode)


def _turn(turn: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield (
        f"turn {turn['ordinal'] + 1}: {turn['prompt_tokens']} tokens of prompt, {turn['generated_tokens']} generated, "
        f"ended by {turn['finish_reason']}"
    )
    if turn["kind"] == "fork" and turn["ordinal"]:
        reasons = ", ".join(reason["name"] for reason in turn["reasons"]) or "it continues no earlier turn"
        yield f"  begins a row of its own ({reasons})"
    yield from (f"  < {line}" for line in turn["given"].splitlines())
    yield from (f"  > {line}" for line in turn["text"].splitlines() or [""])
    answer = turn["answer"]
    for call in answer["tool_calls"] if answer else ():
        yield f"  as a tool call: {call['name']}({call['arguments']})"
    if answer and answer["overrides"]:
        yield f"  decided by the trainer, not by the agent: {', '.join(answer['overrides'])}"


def _outcome(report: AgentReport | None, failure: str, seconds: float) -> str:
    if report is None:
        return f"no reward after {seconds:.1f} s: {failure}"
    parts = [f"reward {report.reward:g}", *(f"{name} {value:g}" for name, value in report.rewards.items())]
    detail = f": {report.detail}" if report.detail else ""
    return f"{'  '.join(parts)}  (the agent {_ENDED[report.status.value]} after {seconds:.1f} s{detail})"


_ENDED = {"finished": "finished", "timed_out": "ran out of time", "failed": "failed"}


def _stretches(row: Row, decode: Decode) -> Iterator[str]:
    for mask, pairs in groupby(zip(row.mask, row.token_ids, strict=True), key=lambda pair: pair[0]):
        ids = [token for _, token in pairs]
        yield f"{_INDENT}{mask} x {len(ids):<5} {decode(ids)!r}"


def _tokens(row: Row, decode: Decode) -> Iterator[str]:
    yield f"{_INDENT}{'at':>6} {'id':>7} mask  log-prob  text"
    for at, (token, mask, log_prob) in enumerate(zip(row.token_ids, row.mask, row.log_probs, strict=True)):
        value = f"{log_prob:9.4f}" if mask else " " * 9
        yield f"{_INDENT}{at:>6} {token:>7} {mask:>4} {value}  {decode([token])!r}"
