"""The session tree: messages decide what a request continues, token ids decide what is trained.

::

    match(transcript)        which recorded answer does this request continue?     pure look-up
      .render(renderer)      token ids of whatever is new                          may be slow, touches no state
    prepare(match, ids)      the exact prompt for the engine                       does not mutate
      .seal(generation)      one record, ready for the journal                     does not mutate
    commit(record)           the answer joins the tree                             the only move that mutates

A client that goes away between any two of these leaves no trace. Restoring a session is committing its records again.

Invariant: the prompt handed to the engine is, id for id, the path in the tree that its answer is committed under.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from seamless_verl.trajectory.generation import FinishReason, Generation, TrajectoryError
from seamless_verl.trajectory.matching import HistoryIndex, HistoryMatch, Rendering, system_of
from seamless_verl.trajectory.messages import Message, Transcript, key_of, link
from seamless_verl.trajectory.tokens import (
    DriftReason,
    MatchKind,
    Segment,
    TokenPath,
    TurnRecord,
    deepest_token_match,
    pack_ids,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTurn:
    """A request with its prompt, not yet answered."""

    match: HistoryMatch
    anchor: Segment
    num_cut: int
    context_ids: array[int]
    prompt_ids: TokenPath
    forked: DriftReason | None
    detail: str

    def seal(self, *, generation_id: str, generation: Generation, answer: Message) -> TurnRecord:
        """Join request and answer into a record.

        Args:
            generation_id: unique in the session.
            generation: what the engine returned for ``prompt_ids``.
            answer: the assistant message as the client will see it; how the next request will name this turn.

        Raises:
            TrajectoryError: the generation is empty, aborted, or contradicts itself.
        """
        story = f"generation {generation_id}"
        generation.check(story)
        if not generation.token_ids:
            raise TrajectoryError(f"{story}: the engine returned no token, so there is nothing to train or to continue")
        if generation.finish_reason is FinishReason.ABORTED:
            raise TrajectoryError(f"{story}: aborted after {len(generation.token_ids)} tokens; it is not an answer")
        transcript = self.match.transcript
        # A fresh prompt owes nothing to earlier turns, so its spelling is compared as a whole next time.
        num_before = 0 if self.anchor is not self.match.known else self.match.num_known
        key = key_of(answer)
        owner = self.anchor if self.anchor.turn is not None else _answer_below(self.anchor)
        return TurnRecord(
            generation_id=generation_id,
            request_digest=transcript.digest,
            anchor=owner.turn.generation_id if owner is not None and owner.turn is not None else "",
            anchor_is_given=owner is not None and self.anchor.turn is None,
            num_cut=self.num_cut,
            context_ids=self.context_ids,
            token_ids=pack_ids(generation.token_ids),
            log_probs=array("d", generation.log_probs),
            version_spans=generation.version_spans,
            finish_reason=generation.finish_reason,
            tools_digest=transcript.tools_digest,
            chain=link(transcript.chain[-1], key.identity),
            spelled=link(transcript.spelled[-1], key.spelling),
            spelled_before=transcript.spelled[num_before],
            keys=(*transcript.keys[num_before:], key),
            system=system_of(transcript),
            forked=self.forked,
            realigned=self.match.realigned,
            detail=self.detail,
        )


class SessionTree:
    """All turns of one session."""

    def __init__(self) -> None:
        self.root = Segment(parent=None, tokens=pack_ids(()))
        self._index = HistoryIndex()
        self._answers: list[Segment] = []
        self._by_generation: dict[str, Segment] = {}
        self._kinds: Counter[MatchKind] = Counter()
        self._drift: Counter[DriftReason] = Counter()
        self._num_stored_tokens = 0

    @property
    def answers(self) -> tuple[Segment, ...]:
        """Generated segments in commit order."""
        return tuple(self._answers)

    @property
    def num_turns(self) -> int:
        return len(self._answers)

    @property
    def kinds(self) -> dict[MatchKind, int]:
        """How many turns matched in which way."""
        return dict(self._kinds)

    @property
    def drift(self) -> dict[DriftReason, int]:
        """How often each reason kept a turn from being clean."""
        return dict(self._drift)

    @property
    def num_stored_tokens(self) -> int:
        """Tokens that the tree keeps in memory."""
        return self._num_stored_tokens

    def dissolve(self) -> None:
        """Let the segments go one by one: they know each other both ways, so that all of a session that is over would
        wait for the garbage collector."""
        segments = [self.root]
        while segments:
            segment = segments.pop()
            segments += segment.children
            segment.children.clear()

    def has(self, generation_id: str) -> bool:
        """Whether an answer was committed."""
        return generation_id in self._by_generation

    def match(self, transcript: Transcript) -> HistoryMatch:
        """What a request continues; does not mutate."""
        return self._index.match(transcript)

    def prepare(self, match: HistoryMatch, rendering: Rendering) -> PendingTurn:
        """Fix the prompt and the place of the answer-to-be; does not mutate.

        Raises:
            TrajectoryError: the prompt is empty.
        """
        forked = DriftReason.TEMPLATE_MISMATCH if rendering.refusal else match.forked
        anchor, num_cut, context_ids = self._place(match, rendering)
        if num_cut:
            forked = forked or DriftReason.BOUNDARY_TRIMMED
        prompt_ids = anchor.path.without(num_cut).then(context_ids)
        if not prompt_ids:
            raise TrajectoryError("the template rendered this request to no token at all")
        return PendingTurn(
            match=match,
            anchor=anchor,
            num_cut=num_cut,
            context_ids=context_ids,
            prompt_ids=prompt_ids,
            forked=forked,
            detail=rendering.refusal or match.spelled,
        )

    def _place(self, match: HistoryMatch, rendering: Rendering) -> tuple[Segment, int, array[int]]:
        """What the prompt hangs under, how much of that it leaves out, and what it adds.

        A known answer that is a leaf is continued as it is: such a turn costs what it adds. Only one that would fork
        is compared with the whole tree, for a leaf that it continues token by token.
        """
        ids = pack_ids(rendering.token_ids)
        if rendering.fresh:
            anchor = deepest_token_match(self.root, ids)
            return anchor, 0, ids[anchor.end :]
        assert match.known is not None
        if rendering.num_dropped or not match.known.is_leaf:
            prompt_ids = match.known.path.without(rendering.num_dropped).then(ids).flat()
            leaf = deepest_token_match(self.root, prompt_ids)
            if leaf.is_leaf:
                return leaf, 0, prompt_ids[leaf.end :]
        return match.known, rendering.num_dropped, ids

    def prepare_ids(self, transcript: Transcript, prompt_ids: Sequence[int]) -> PendingTurn:
        """A prompt that is token ids already (text completions): only tokens route it. Does not mutate.

        Raises:
            TrajectoryError: the prompt is empty.
        """
        match = HistoryMatch(transcript=transcript, known=None, num_known=0, respelled=(), forked=None)
        pending = self.prepare(match, Rendering(token_ids=prompt_ids, fresh=True))
        return replace(pending, forked=DriftReason.ROOT_CHANGED) if pending.anchor is self.root else pending

    def commit(self, record: TurnRecord) -> Segment:
        """Add an answer; returns its segment.

        Raises:
            TrajectoryError: the generation is already in the tree, or its anchor is not.
        """
        known = self._by_generation.get(record.generation_id)
        if known is not None:
            raise TrajectoryError(
                f"generation {record.generation_id} is already committed as turn {known.ordinal}; "
                f"the session has {self.num_turns} turns"
            )
        anchor = self._find_anchor(record)
        given, reused = self._find_given(anchor, record)
        kind, reasons = self._classify(record, anchor, reused)
        if given is not anchor and not reused:
            anchor.children.append(given)
            self._num_stored_tokens += len(given.tokens)
        elif reused and record.context_ids:
            record = replace(record, context_ids=given.tokens)  # the same ids, kept once
        answer = Segment(
            parent=given, tokens=record.token_ids, turn=record, ordinal=len(self._answers), kind=kind, reasons=reasons
        )
        self._num_stored_tokens += len(record.token_ids)
        given.children.append(answer)
        self._answers.append(answer)
        self._by_generation[record.generation_id] = answer
        self._index.add(answer)
        self._kinds[kind] += 1
        self._drift.update(reasons)
        return answer

    def _find_anchor(self, record: TurnRecord) -> Segment:
        if not record.anchor:
            return self.root
        answer = self._by_generation.get(record.anchor)
        if answer is None or answer.parent is None:
            raise TrajectoryError(
                f"generation {record.generation_id} continues {record.anchor}, which is not among the session's "
                f"{self.num_turns} turns"
            )
        return answer.parent if record.anchor_is_given else answer

    def _find_given(self, anchor: Segment, record: TurnRecord) -> tuple[Segment, bool]:
        """The segment to answer under, and whether it stood in the tree before."""
        if not record.context_ids and not record.num_cut:
            return anchor, anchor.turn is None and anchor.parent is not None
        for child in anchor.children:
            if child.turn is None and child.num_cut == record.num_cut and child.tokens == record.context_ids:
                return child, True
        return Segment(parent=anchor, tokens=record.context_ids, num_cut=record.num_cut), False

    def _classify(self, record: TurnRecord, anchor: Segment, reused: bool) -> tuple[MatchKind, tuple[DriftReason, ...]]:
        """What the answer's place in the tree makes of the match: only a leaf, or an empty tree, is extended."""
        if not self._answers:
            return MatchKind.CLEAN, ()
        if anchor.is_leaf and not record.num_cut:
            reasons = (*record.realigned, *((record.forked,) if record.forked is not None else ()))
            return (MatchKind.REALIGN, reasons) if reasons else (MatchKind.CLEAN, ())
        branched = DriftReason.RESAMPLED if reused else (record.forked or DriftReason.BRANCHED)
        return MatchKind.FORK, (branched, *record.realigned)


def _answer_below(given: Segment) -> Segment | None:
    """An answer directly under a given segment; there is one, since a given segment joins the tree with its answer."""
    return next((child for child in given.children if child.turn is not None), None)
