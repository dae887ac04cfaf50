"""A session under anything that may happen to it: requests side by side, clients that leave, restarts in between."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from seamless_verl.trajectory.messages import transcript_of
from seamless_verl.trajectory.rows import build_rows
from seamless_verl.trajectory.tokens import Segment, TurnRecord
from seamless_verl.trajectory.tree import PendingTurn, SessionTree
from tests.fakes import ScriptedEdge, user

_TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=3)  # few, so that conversations meet


class AnySession(RuleBasedStateMachine):
    """Knows every conversation as a flat list of ids, and nothing of trees."""

    @initialize()
    def start(self) -> None:
        self.edge = ScriptedEdge()
        self.waiting: list[tuple[PendingTurn, list[int]]] = []
        self.answered: dict[str, list[int]] = {}  # name -> prompt and answer
        self.num_generated = 0
        self.records: list[TurnRecord] = []

    @rule(data=st.data(), more=_TOKENS)
    def ask(self, data: st.DataObject, more: list[int]) -> None:
        """Continue any known conversation from anywhere."""
        known = data.draw(st.sampled_from([[], *self.answered.values()]))
        prompt = [*known[: data.draw(st.integers(0, len(known)))], *more]
        pending = self.edge.tree.prepare_ids(transcript_of((user("ids"),)), prompt)
        assert list(pending.prompt_ids) == prompt
        assert [*pending.anchor.path, *pending.context_ids] == prompt
        self.waiting.append((pending, prompt))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), ids=_TOKENS, samples=st.integers(1, 2))
    def answer(self, data: st.DataObject, ids: list[int], samples: int) -> None:
        """The engine answers one of the requests, whichever was first."""
        at = data.draw(st.integers(0, len(self.waiting) - 1))
        self.commit(*self.waiting.pop(at), ids, samples)

    def commit(self, pending: PendingTurn, prompt: list[int], ids: list[int], samples: int) -> None:
        for _ in range(samples):
            record = self.edge.seal(pending, "x", ids=ids)
            segment = self.edge.tree.commit(record)
            assert list(segment.path) == [*prompt, *ids]
            self.answered[record.generation_id] = [*prompt, *ids]
            self.num_generated += len(ids)
            self.records.append(record)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A client goes away before its answer."""
        before = (self.edge.tree.num_stored_tokens, build_rows(self.edge.tree))
        self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        assert before == (self.edge.tree.num_stored_tokens, build_rows(self.edge.tree))

    @rule()
    def restart(self) -> None:
        """The process died; records bring the tree back, and what was asked before may still be answered."""
        again = SessionTree()
        for record in self.records:
            again.commit(record)
        assert build_rows(again) == build_rows(self.edge.tree)
        assert (again.kinds, again.drift) == (self.edge.tree.kinds, self.edge.tree.drift)
        self.edge.tree = again

    @invariant()
    def rows_are_what_the_engine_said(self) -> None:
        if not hasattr(self, "edge"):
            return
        rows = self.edge.rows()  # audited
        assert sum(sum(row.mask) for row in rows) == self.num_generated
        for row in rows:
            for turn in row.turns:
                assert list(row.token_ids[: turn.stop]) == self.answered[turn.generation_id]
            assert row.turns[-1].stop == len(row.token_ids)
        assert {turn.generation_id for row in rows for turn in row.turns} == set(self.answered)

    @invariant()
    def what_is_stored_is_what_hangs_in_the_tree(self) -> None:
        if not hasattr(self, "edge"):
            return
        segments: list[Segment] = [self.edge.tree.root]
        for segment in segments:
            segments += segment.children
        assert self.edge.tree.num_stored_tokens == sum(len(segment.tokens) for segment in segments)
        assert self.edge.tree.num_turns == len(self.answered) == sum(self.edge.tree.kinds.values())

    def teardown(self) -> None:
        """Liveness: every request can still be answered, and every answer continued with all of its tokens."""
        if not hasattr(self, "edge"):
            return
        while self.waiting:
            self.commit(*self.waiting.pop(), [9], 1)
        self.rows_are_what_the_engine_said()
        for ids in self.answered.values():
            pending = self.edge.tree.prepare_ids(transcript_of((user("ids"),)), [*ids, 8])
            assert list(pending.prompt_ids) == [*ids, 8]
            assert pending.anchor.is_leaf or list(pending.anchor.path) == ids  # a shorter leaf goes before


AnySession.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestAnySession = AnySession.TestCase
