"""One attempt as people read it: its turns in words, its rows token by token, where a history parted, and where the
attempts of a group do. Pure.

Texts are decoded from the recorded tokens, special tokens included: it is what the model saw. Answers are shown as the
agent got them, too. Nothing here is escaped: the page puts every string in as text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from seamless_verl.observe.page.words import DRIFT
from seamless_verl.observe.token_signals import TokenSignals
from seamless_verl.proxy.calls import Answer
from seamless_verl.proxy.session.sessions import Session
from seamless_verl.trajectory.matching import place_of, written
from seamless_verl.trajectory.rows import Row
from seamless_verl.trajectory.tokens import DriftReason, MatchKind, Segment

Decode = Callable[[Sequence[int]], str]
_AROUND = 60  # tokens that are shown before a parting
_AFTER = 400  # and after it
_PICTURE = "⟦picture⟧"
_PARTED_BEFORE, _PARTED_AFTER = 12, 40  # tokens, of attempts of a group
_LETTERS = 4  # of a token, about


def conversation(session: Session, answers: Sequence[Answer], decode: Decode) -> list[dict[str, Any]]:
    """The turns of a session in the order in which they were answered."""
    by_id = {answer.id: answer for answer in answers}
    views = {view["ordinal"]: view for view in session.view()["turns"]}
    return [
        {
            **views[segment.ordinal],
            "reasons": [_reason(reason) for reason in segment.reasons],
            "given": decode(_given(segment)),
            "num_cut": segment.num_cut,
            "answer": _answer(by_id.get(views[segment.ordinal]["generation_id"])),
            "text": decode(segment.tokens),
            "parting": parting(session, segment, decode),
            "respelled": respelling(segment, by_id),
        }
        for segment in session.tree.answers
    ]


def _reason(reason: DriftReason) -> dict[str, str]:
    return {"name": reason.value.replace("_", " "), "explained": DRIFT[reason]}


def _answer(answer: Answer | None) -> dict[str, Any] | None:
    if answer is None:
        return None
    message = answer.message
    return {
        "content": message.content,
        "reasoning": message.reasoning,
        "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls],
        "overrides": list(answer.overrides),
    }


def _given(segment: Segment) -> list[int]:
    """Tokens between an answer and the one that it continues."""
    found: list[int] = []
    walk = segment.parent
    while walk is not None and walk.turn is None:
        found[:0] = walk.tokens
        walk = walk.parent
    return found


def parting(session: Session, segment: Segment, decode: Decode) -> dict[str, Any] | None:
    """Where the prompt of a turn that began a branch leaves what was recorded before, both sides in text.

    The other side is the earlier answer's path that shares the most tokens with the prompt. ``None``: the turn began no
    branch, or nothing came before it.
    """
    if segment.kind is not MatchKind.FORK or segment.turn is None:
        return None
    sent = list(segment.path)[: segment.end - len(segment.tokens)]
    others = [list(answer.path) for answer in session.tree.answers if answer.ordinal < segment.ordinal]
    if not others:
        return None
    at, recorded = max(((shared(sent, other), other) for other in others), key=lambda pair: pair[0])
    return {
        "at": at,
        "before": decode(sent[max(0, at - _AROUND) : at]),
        "recorded": decode(recorded[at : at + _AFTER]),
        "sent": decode(sent[at : at + _AFTER]),
        "recorded_tokens": len(recorded) - at,
        "sent_tokens": len(sent) - at,
    }


def respelling(segment: Segment, answers: Mapping[str, Answer]) -> dict[str, str] | None:
    """What a request spelled otherwise than it was recorded, both spellings; ``None``: nothing.

    Recorded are answers only: of another message stands what the model was given.
    """
    turn = segment.turn
    if turn is None or not turn.realigned or turn.forked is DriftReason.TEMPLATE_MISMATCH:
        return None
    recorded, above = [], segment.answer_above()
    while above is not None and above.turn is not None:
        place, answer = place_of(above), answers.get(above.turn.generation_id)
        if answer is not None and f"\n{place}" in f"\n{turn.detail}":
            recorded.append(place + written(answer.message, turn.realigned))
        above = above.answer_above()
    return {"sent": turn.detail, "recorded": "\n".join(reversed(recorded))}


def shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of what both begin with; by halves, since slices are compared quickly."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def told_by_rows(rows: Sequence[Row], decode: Decode) -> list[dict[str, Any]]:
    """The turns of rows whose session is gone: what each answer was given and what it said, each answer once."""
    turns: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(rows):
        before, parent = 0, None
        for turn in row.turns:
            versions = [
                [span.version, span.stop - span.start]
                for span in row.version_spans
                if turn.start <= span.start < turn.stop
            ]
            if turn.generation_id not in turns:
                turns[turn.generation_id] = {
                    "ordinal": len(turns),
                    "generation_id": turn.generation_id,
                    "parent": parent,
                    "kind": MatchKind.CLEAN.value if number == 0 else MatchKind.FORK.value,
                    "reasons": [],
                    "detail": "",
                    "prompt_tokens": turn.start,
                    "generated_tokens": turn.stop - turn.start,
                    "versions": versions,
                    "finish_reason": turn.finish_reason.value,
                    "given": decode(row.token_ids[before : turn.start]),
                    "num_cut": turn.num_cut,
                    "answer": None,
                    "text": decode(row.token_ids[turn.start : turn.stop]),
                    "parting": None,
                    "respelled": None,
                }
            before, parent = turn.stop, turns[turn.generation_id]["ordinal"]
    return list(turns.values())


def token_view(row: Row, text_of: Callable[[int], str], signals: TokenSignals | None) -> dict[str, Any]:
    """A row in columns, one entry per token; ``versions`` is -1 where nothing was generated.

    Args:
        signals: of its response, once it is trained.
    """
    versions = [-1] * len(row.token_ids)
    for span in row.version_spans:
        versions[span.start : span.stop] = [span.version] * (span.stop - span.start)
    return {
        "token_ids": list(row.token_ids),
        "texts": [text_of(token) for token in row.token_ids],
        "mask": list(row.mask),
        "log_probs": [round(value, 5) for value in row.log_probs],
        "versions": versions,
        "seams": seams(row),
        "prompt_len": row.prompt_len,
        "turns": [[turn.start, turn.stop, turn.trained, turn.finish_reason.value, turn.num_cut] for turn in row.turns],
        "signals": None if signals is None else _columns(signals, row),
    }


def _columns(signals: TokenSignals, row: Row) -> dict[str, Any] | None:
    """For all tokens of the row, as the page draws them; None: they are of another row than the one that is shown."""
    given = row.prompt_len
    if len(row.token_ids) != given + len(signals.mask):
        return None
    found: dict[str, Any] = {"counted": [0] * given + signals.mask.tolist()}
    ratio = None if signals.log_ratio is None else np.exp(signals.log_ratio.astype(np.float32))
    for name, values in (("advantage", signals.advantage), ("ratio", ratio), ("weight", signals.weight)):
        found[name] = None if values is None else [None] * given + [round(float(value), 4) for value in values]
    return found


def seams(row: Row) -> list[int]:
    """Tokens at which an answer went on with other weights."""
    begins = {turn.start for turn in row.turns}
    return [span.start for span in row.version_spans if span.start not in begins]


def with_pictures(decode: Decode) -> Decode:
    """Decodes ids of the tree, in which the placeholders of pictures are negative and the first of each is odd."""

    def shown(token_ids: Sequence[int]) -> str:
        texts: list[str] = []
        run: list[int] = []
        for token in token_ids:
            if token >= 0:
                run.append(token)
            elif token % 2:
                texts += [decode(run), _PICTURE]
                run = []
        return "".join([*texts, decode(run)])

    return shown


def numbers_for_text(token_ids: Sequence[int]) -> str:
    """What stands for a text where the tokenizer is not at hand."""
    return " ".join(str(token) for token in token_ids)


def facts(attempt: Mapping[str, Any], session: Session | None) -> dict[str, Any]:
    """The facts of an attempt that the page shows above its conversation."""
    if session is None:
        return dict(attempt)
    return {
        **attempt,
        "rewards": dict(session.rewards),
        "metadata": dict(session.spec.metadata),
        "sampling": dict(session.spec.sampling),
        "damage": session.damage,
    }


def why_nothing(attempt: Mapping[str, Any]) -> str:
    """Why no turn of an attempt is left."""
    if attempt["session"] is None:
        return (
            "Of this attempt only the text of its rows was recorded: verl's own dump of the step. Turns and tokens "
            "are kept by runs with seamless.proxy.keep_mib above 0."
        )
    return (
        "The turns of this attempt are not there any more: the run kept none (seamless.proxy.keep_mib=0, or "
        "seamless.proxy.journal=false), keeps its journals on another disk, or newer attempts have taken the place."
    )


# ---------------------------------------------------------------- where the attempts of a group part

# Attempts are compared by the tokens of their rows, or, where those are gone, by the text that verl wrote down. Of
# several rows the two that share most are compared: a sub-agent's row says nothing about another attempt's main row.


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Of one attempt, one of its rows.

    Attributes:
        units: its tokens, or letters where tokens are gone.
        answers: ``(first unit, one after the last, turn)`` of each answer in it.
    """

    units: Sequence[Any]
    answers: tuple[tuple[int, int, int], ...] = ()


def of_rows(rows: Sequence[Row], ordinals: Mapping[str, int]) -> list[Said]:
    """What an attempt's rows say, with the places of the answers in them.

    Args:
        ordinals: of each answer, by its id.
    """
    return [
        Said(
            units=row.token_ids,
            answers=tuple((turn.start, turn.stop, ordinals[turn.generation_id]) for turn in row.turns),
        )
        for row in rows
    ]


def ordinals_of(rows: Sequence[Row]) -> dict[str, int]:
    """Turns of rows whose session is gone, numbered as they come."""
    found: dict[str, int] = {}
    for row in rows:
        for turn in row.turns:
            found.setdefault(turn.generation_id, len(found))
    return found


def parted(attempts: Sequence[tuple[str, Sequence[Said]]], decode: Callable[[Any], str], unit: str) -> dict[str, Any]:
    """Find where the attempts of a group part from the first of them.

    Args:
        attempts: keys, and what is left of each; in the order of the group.
        decode: units to text.
        unit: ``token`` or ``character``.

    Returns:
        ``unit``, ``first`` (its key; ``None``: nothing is left of any), ``parted`` (an entry per other attempt of which
        something is left), ``missing`` (keys of those of which nothing is).
    """
    known = [(key, said) for key, said in attempts if said]
    missing = [key for key, said in attempts if not said]
    if not known:
        return {"unit": unit, "first": None, "parted": [], "missing": missing}
    (first, base), *others = known
    per_token = 1 if unit == "token" else _LETTERS
    around = (_PARTED_BEFORE * per_token, _PARTED_AFTER * per_token)
    return {
        "unit": unit,
        "first": first,
        "parted": [{"key": key, **_parting(base, said, decode, around)} for key, said in others],
        "missing": missing,
    }


def _parting(
    base: Sequence[Said], other: Sequence[Said], decode: Callable[[Any], str], around: tuple[int, int]
) -> dict[str, Any]:
    pairs = [(shared(one.units, two.units), one, two) for one in base for two in other]
    at, one, two = max(pairs, key=lambda pair: pair[0])
    before, after = around
    place, turn, into = _place(at, two)
    if at == len(one.units) == len(two.units):
        place = "same"
    return {
        "at": at,
        "place": place,
        "turn": turn,
        "into": into,
        "before": decode(two.units[max(0, at - before) : at]),
        "first": decode(one.units[at : at + after]),
        "this": decode(two.units[at : at + after]),
    }


def _place(at: int, said: Said) -> tuple[str, int | None, int]:
    """Whether that unit is in an ``answer`` or in what was ``given`` before one; of which turn, and how far in it."""
    begin = 0
    for start, stop, turn in said.answers:
        if at < start:
            return "given", turn, at - begin
        if at < stop:
            return "answer", turn, at - start
        begin = stop
    return "end", said.answers[-1][2] if said.answers else None, 0


def of_texts(texts: Sequence[Mapping[str, Any]]) -> list[Said]:
    """Of verl's dump: what was answered and observed, without the prompt that all of a group share."""
    return [Said(units=text["output"]) for text in texts if text.get("output")]
