"""Which recorded answer a request continues, what is said of a difference, and what counts as a retry."""

from __future__ import annotations

import pytest

from seamless_verl.trajectory.matching import Rendering
from seamless_verl.trajectory.messages import Message, ToolCall, transcript_of
from seamless_verl.trajectory.tokens import DriftReason, MatchKind
from tests.fakes import ScriptedEdge, ScriptedRenderer, assistant, system, tool, user

CALL = ToolCall(id="c1", name="run", arguments="{}")
RENAMED = ToolCall(id="other", name="run", arguments="{}")
CALLED = [user("hi"), assistant("", CALL), tool("out", "c1")]
RECALLED = [user("hi"), assistant("", RENAMED), tool("out", "c1")]


def _called() -> ScriptedEdge:
    """Turn 0 was a tool call; turn 1 answered ``fine`` to a request that named the call otherwise."""
    edge = ScriptedEdge()
    edge.ask(CALLED[:1], CALLED[1])
    second = edge.ask(RECALLED, assistant("fine \n"))
    assert (second.kind, second.reasons) == (MatchKind.REALIGN, (DriftReason.CALL_IDS_CHANGED,))
    return edge


def test_a_difference_that_was_told_is_not_told_again_beside_a_new_one() -> None:
    turn = _called().ask([*RECALLED, assistant("fine"), user("next")], "done")
    assert (turn.kind, turn.reasons) == (MatchKind.REALIGN, (DriftReason.CONTENT_WHITESPACE,))


def test_going_back_to_the_first_spelling_is_no_difference() -> None:
    turn = _called().ask([*CALLED, assistant("fine \n"), user("next")], "done")
    assert (turn.kind, turn.reasons) == (MatchKind.CLEAN, ())


def test_a_third_spelling_is_told() -> None:
    third = [user("hi"), assistant("", ToolCall(id="third", name="run", arguments="{}")), tool("out", "c1")]
    turn = _called().ask([*third, assistant("fine \n"), user("next")], "done")
    assert (turn.kind, turn.reasons) == (MatchKind.REALIGN, (DriftReason.CALL_IDS_CHANGED,))


def test_after_a_fresh_prompt_the_whole_history_is_compared() -> None:
    """The template refused to extend turn 0, so turn 1 hangs at the root: nothing above it tells how turn 0 read."""
    renderer = ScriptedRenderer()
    edge = ScriptedEdge(renderer)
    history = [user("hi"), assistant("yes", reasoning="since")]
    edge.ask(history[:1], history[1])
    renderer.refuses = True
    history += [user("go on"), assistant("fine")]
    fresh = edge.ask(history[:3], history[3])
    renderer.refuses = False
    assert fresh.reasons == (DriftReason.TEMPLATE_MISMATCH,)
    assert fresh.turn is not None
    assert len(fresh.turn.keys) == 4
    dropped = edge.ask([history[0], assistant("yes"), *history[2:], user("next")], "done")
    assert (dropped.parent_ordinal, dropped.reasons) == (1, (DriftReason.REASONING_DROPPED,))
    forged = edge.ask([history[0], assistant("yes", reasoning="no"), *history[2:], user("next")], "done")
    assert (forged.kind, forged.parent_ordinal) == (MatchKind.FORK, None)


@pytest.mark.parametrize("num_dropped", [-1, 3])
def test_a_renderer_may_drop_tokens_of_the_answer_only(num_dropped: int) -> None:
    class Wrong(ScriptedRenderer):
        def render_extension(self, previous_messages, new_messages, tools, known_ids) -> Rendering:  # type: ignore[no-untyped-def]
            return Rendering(token_ids=[1], num_dropped=num_dropped)

    edge = ScriptedEdge(Wrong())
    edge.ask([user("a")], "one", ids=[60, 61])
    turn = edge.ask([user("a"), assistant("one"), user("b")], "two")
    assert turn.reasons == (DriftReason.TEMPLATE_MISMATCH,)
    assert turn.turn is not None
    assert turn.turn.detail == f"{num_dropped} dropped tokens reach beyond the answer's 2"
    assert len(edge.rows()) == 2


def test_a_second_answer_to_a_later_prompt_hangs_under_the_same_context() -> None:
    edge = ScriptedEdge()
    edge.ask([user("a")], "one", ids=[60])
    before = edge.tree.num_stored_tokens
    history = [user("a"), assistant("one"), user("b")]
    edge.ask(history, "two", ids=[70])
    context = edge.ledger[1].prompt_len - edge.ledger[0].prompt_len - 1
    assert edge.tree.num_stored_tokens == before + context + 1
    again = edge.ask(history, "three", ids=[80, 81])
    assert (again.kind, again.reasons, again.parent_ordinal) == (MatchKind.FORK, (DriftReason.RESAMPLED,), 0)
    assert edge.tree.num_stored_tokens == before + context + 3
    first, second, third = edge.tree.answers
    assert len(first.children) == 1, "one context, with two answers"
    assert second.parent is third.parent
    assert again.turn is not None
    assert third.parent is not None
    assert again.turn.context_ids is third.parent.tokens, "ids of one context are kept once"


def test_two_contexts_that_cut_their_answer_differently_are_two() -> None:
    class Dropping(ScriptedRenderer):
        num_dropped = 0

        def render_extension(self, previous_messages, new_messages, tools, known_ids) -> Rendering:  # type: ignore[no-untyped-def]
            return Rendering(token_ids=[99], num_dropped=self.num_dropped)

    renderer = Dropping()
    edge = ScriptedEdge(renderer)
    edge.ask([user("a")], "one", ids=[60, 61])
    start = edge.ledger[0].prompt_len
    for renderer.num_dropped in (0, 1, 2):
        edge.ask([user("a"), assistant("one"), user("b")], "two", ids=[70 + renderer.num_dropped])
    assert {row.token_ids[start:] for row in edge.rows()} == {(60, 61, 99, 70), (60, 99, 71), (99, 72)}


@pytest.mark.parametrize(
    ("messages", "known"),
    [
        ([system("s"), user("a")], None),
        ([system("s"), user("a"), assistant("one")], 0),
        ([system("s"), user("a"), assistant("one"), user("b"), user("c")], 0),
        ([system("s"), user("a"), assistant("one"), user("b"), assistant("two"), user("c")], 1),
        ([system("s"), user("a"), assistant("one"), user("c"), assistant("two"), user("c")], 0),
        ([system("t"), user("a"), assistant("one"), user("b")], None),
        ([user("a"), assistant("one"), user("b")], None),
    ],
)
def test_the_longest_known_history_is_continued(messages: list[Message], known: int | None) -> None:
    edge = ScriptedEdge()
    edge.ask([system("s"), user("a")], "one")
    edge.ask([system("s"), user("a"), assistant("one"), user("b")], "two")
    match = edge.tree.match(transcript_of(tuple(messages)))
    assert (match.known.ordinal if match.known is not None else None) == known
    assert match.num_known == {None: 0, 0: 3, 1: 5}[known]
    assert edge.tree.num_turns == 2, "matching changes nothing"
