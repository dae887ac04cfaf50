"""Where a request continues: message identity routes.

The history of every committed turn is known by a chained digest, so the deepest known prefix of a request is found by
one dictionary look-up per assistant message, longest prefix first.

Where several turns share one history (parallel samples with the same text), the rule is: same spelling before other
spelling, then the answer whose tokens compare lowest, then the earliest commit. The order in which parallel branches
arrive decides only between candidates whose tokens are equal; there it is meant to: what comes later moves nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from seamless_verl.trajectory.generation import pack_ids
from seamless_verl.trajectory.messages import MessageKey, Role, Transcript
from seamless_verl.trajectory.renderer import ExtensionRefused, Renderer
from seamless_verl.trajectory.segments import DriftReason, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """Token ids for a route: ``fresh`` means that the whole prompt was rendered, else ``token_ids`` are appended."""

    token_ids: array[int]
    fresh: bool
    num_dropped: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The match of one request: what is known, what is new, and what differs.

    Immutable and detached from the tree's future, so that :meth:`render` may run in another thread. ``forked`` says
    why the match is not deeper; a route without ``known`` always has one, which a session's first turn may ignore.
    """

    transcript: Transcript
    known: Segment | None
    num_known: int
    realigned: tuple[DriftReason, ...]
    forked: DriftReason | None

    def render(self, renderer: Renderer) -> Rendering:
        """Ask the template for the rest; fall back to a fresh prompt where it refuses to extend."""
        messages, tools = self.transcript.messages, self.transcript.tools
        refusal = ""
        if self.known is not None:
            previous, new, known_ids = messages[: self.num_known], messages[self.num_known :], self.known.path
            try:
                extension = renderer.render_extension(previous, new, tools, known_ids)
            except ExtensionRefused as error:
                refusal = str(error)
            else:
                added, num_dropped = pack_ids(extension.token_ids), extension.num_dropped
                # Dropping a stop token only to write it again is no edit of the history.
                if num_dropped > 0 and known_ids[-num_dropped:] == added[:num_dropped]:
                    added, num_dropped = added[num_dropped:], 0
                if 0 <= num_dropped <= len(self.known.tokens):
                    return Rendering(token_ids=added, fresh=False, num_dropped=num_dropped)
                refusal = f"{num_dropped} dropped tokens reach beyond the answer's {len(self.known.tokens)}"
        ids = pack_ids(renderer.render_initial(messages, tools))
        return Rendering(token_ids=ids, fresh=True, refusal=refusal)


class HistoryIndex:
    """Committed answers by the identity of their history."""

    def __init__(self) -> None:
        self._by_chain: dict[bytes, list[Segment]] = {}
        self._systems: set[bytes] = set()

    def add(self, answer: Segment, *, system: bytes) -> None:
        """Make an answer findable. ``system`` is :func:`system_of` the request it answered."""
        assert answer.turn is not None
        self._by_chain.setdefault(answer.turn.chain, []).append(answer)
        self._systems.add(system)

    def route(self, transcript: Transcript) -> Route:
        """Match a request against everything committed so far."""
        keys, chain = transcript.keys, transcript.chain
        tools_changed = rewritten = False
        for length in range(len(keys), 0, -1):
            if not keys[length - 1].is_assistant:
                continue
            candidates = self._by_chain.get(chain[length])
            if candidates is None:
                rewritten = True
                continue
            best = _choose(candidates, transcript, length)
            if best is None:
                same_tools = [c for c in candidates if c.turn and c.turn.tools_digest == transcript.tools_digest]
                tools_changed, rewritten = tools_changed or not same_tools, rewritten or bool(same_tools)
                continue
            answer, realigned = best
            forked = DriftReason.HISTORY_REWRITTEN if rewritten else None
            return Route(
                transcript=transcript,
                known=answer,
                num_known=length,
                realigned=realigned,
                forked=DriftReason.TOOLS_CHANGED if tools_changed else forked,
            )
        if tools_changed:
            forked = DriftReason.TOOLS_CHANGED
        elif system_of(transcript) not in self._systems:
            forked = DriftReason.SYSTEM_CHANGED
        else:
            forked = DriftReason.HISTORY_REWRITTEN if rewritten else DriftReason.ROOT_CHANGED
        return Route(transcript=transcript, known=None, num_known=0, realigned=(), forked=forked)


def system_of(transcript: Transcript) -> bytes:
    """Names the leading system message of a request, or its absence."""
    if transcript.messages and transcript.messages[0].role is Role.SYSTEM:
        return transcript.keys[0].identity
    return b""


def _choose(
    candidates: Sequence[Segment], transcript: Transcript, length: int
) -> tuple[Segment, tuple[DriftReason, ...]] | None:
    """The best of several answers with the same history, or None when none is really the same."""
    fitting: list[tuple[Segment, tuple[DriftReason, ...]]] = []
    for segment in candidates:
        assert segment.turn is not None
        if segment.turn.tools_digest != transcript.tools_digest:
            continue
        reasons = _respelled(segment, transcript, length)
        if reasons is not None:
            fitting.append((segment, reasons))
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    return min(fitting, key=_by_rule)


def _by_rule(candidate: tuple[Segment, tuple[DriftReason, ...]]) -> tuple[int, list[int], int]:
    segment, reasons = candidate
    assert segment.turn is not None
    return len(reasons), list(segment.path), segment.turn.ordinal


def _respelled(answer: Segment, transcript: Transcript, length: int) -> tuple[DriftReason, ...] | None:
    """How the request's spelling of a known history differs: () for not at all, None when it is no longer the same.

    Walks towards the root only until the spelling was last agreed upon: a difference is reported once, not every turn.
    """
    reasons: set[DriftReason] = set()
    segment: Segment | None = answer
    end = length
    while segment is not None and segment.turn is not None:
        turn = segment.turn
        if turn.spelled == transcript.spelled[end]:
            break
        start = end - len(turn.keys)
        for known, sent in zip(turn.keys, transcript.keys[start:end], strict=True):
            difference = _difference(known, sent)
            if difference is None:
                return None
            reasons |= difference
        if turn.spelled_before == transcript.spelled[start]:
            break
        segment, end = segment.answer_above(), start
    return tuple(sorted(reasons, key=lambda reason: reason.value))


def _difference(known: MessageKey, sent: MessageKey) -> set[DriftReason] | None:
    if known == sent:
        return set()
    if sent.reasoning and sent.reasoning != known.reasoning and not sent.may_have_lost(known):
        return None  # somebody else's thoughts
    pairs = (
        (DriftReason.CONTENT_WHITESPACE, known.content, sent.content),
        (DriftReason.ARGUMENTS_RESPELLED, known.arguments, sent.arguments),
        (DriftReason.CALL_IDS_CHANGED, known.call_ids, sent.call_ids),
        (DriftReason.REASONING_DROPPED, known.reasoning, sent.reasoning),
    )
    return {reason for reason, ours, theirs in pairs if ours != theirs}
