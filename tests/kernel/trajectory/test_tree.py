"""How requests find their place: clean, realigned, forked; and what the rows then hold."""

from __future__ import annotations

import pytest

from seamless_verl.trajectory.generation import FinishReason, Generation, TrajectoryError, VersionSpan
from seamless_verl.trajectory.matching import Rendering
from seamless_verl.trajectory.messages import Message, ToolCall, transcript_of
from seamless_verl.trajectory.rows import build_rows
from seamless_verl.trajectory.tokens import DriftReason, MatchKind
from seamless_verl.trajectory.tree import SessionTree
from tests.fakes import ScriptedEdge, ScriptedRenderer, assistant, prepare_with, scripted_generation, system, tool, user


def test_a_linear_conversation_is_one_row_of_what_the_engine_saw() -> None:
    edge = ScriptedEdge()
    history: list[Message] = [system("be good"), user("hi")]
    for number in range(4):
        assert edge.ask(history, f"answer {number}").kind is MatchKind.CLEAN
        history += [assistant(f"answer {number}"), user(f"more {number}")]
    (row,) = edge.rows()
    last = edge.ledger[-1]
    assert list(row.token_ids[-len(last.token_ids) :]) == last.token_ids.tolist()
    assert row.prompt_len == edge.ledger[0].prompt_len
    assert sum(row.mask) == sum(len(entry.token_ids) for entry in edge.ledger)
    versions = [span.version for entry in edge.ledger for span in entry.version_spans]
    assert [span.version for span in row.version_spans] == versions
    assert edge.tree.num_stored_tokens == len(row.token_ids)
    assert edge.tree.drift == {}


CALL = ToolCall(id="c1", name="run", arguments='{"a": 1, "b": 2}')


@pytest.mark.parametrize(
    ("answered", "sent", "reason", "detail"),
    [
        (
            assistant("", CALL),
            assistant("", ToolCall(id="c1", name="run", arguments='{"b":2,"a":1}')),
            "arguments_respelled",
            r'answer of turn 0: {"arguments": ["{\"b\":2,\"a\":1}"]}',
        ),
        (
            assistant("", CALL),
            assistant("", ToolCall(id="x", name="run", arguments=CALL.arguments)),
            "call_ids_changed",
            'answer of turn 0: {"ids": ["x"]}',
        ),
        (assistant("yes \n"), assistant("yes"), "content_whitespace", 'answer of turn 0: {"content": "yes"}'),
        (
            assistant("yes", reasoning="since"),
            assistant("yes"),
            "reasoning_dropped",
            'answer of turn 0: {"reasoning": ""}',
        ),
        (
            assistant("yes", reasoning="I see, so"),
            assistant("yes", reasoning=" so"),
            "reasoning_dropped",
            'answer of turn 0: {"reasoning": " so"}',
        ),
        (
            assistant("yes", reasoning="a" * 3000),
            assistant("yes", reasoning="a" * 2500),
            "reasoning_dropped",
            'answer of turn 0: {"reasoning": "' + "a" * 1985 + "…",
        ),
    ],
)
def test_another_spelling_keeps_the_generated_tokens_and_is_reported_once_as_it_was_written(
    answered: Message, sent: Message, reason: str, detail: str
) -> None:
    edge = ScriptedEdge()
    edge.ask([user("hi")], answered, ids=[50, 51, ScriptedRenderer.END])
    history = [user("hi"), sent, tool("out", sent.tool_calls[0].id if sent.tool_calls else "")]
    second = edge.ask(history, "fine")
    assert (second.kind, second.reasons) == (MatchKind.REALIGN, (DriftReason(reason),))
    third = edge.ask([*history, assistant("fine"), user("next")], "done")
    assert third.kind is MatchKind.CLEAN
    assert second.turn is not None
    assert third.turn is not None
    assert (second.turn.detail, third.turn.detail) == (detail, "")
    (row,) = edge.rows()
    assert edge.tree.drift == {DriftReason(reason): 1}
    assert 50 in row.token_ids


def test_each_respelled_message_is_named_by_the_answer_that_it_is_or_that_came_after_it() -> None:
    edge = ScriptedEdge()
    edge.ask([user("hi")], "one ")
    edge.ask([user("hi"), assistant("one "), user("and \ud83d")], "two ")
    turn = edge.ask([user(" hi"), assistant("one "), user("and \ud83d "), assistant("two"), user("on")], "three").turn
    assert turn is not None
    assert turn.detail.splitlines() == [
        'before the answer of turn 0: {"content": " hi"}',
        'before the answer of turn 1: {"content": "and ? "}',
        'answer of turn 1: {"content": "two"}',
    ]


def test_other_reasoning_is_another_history() -> None:
    edge = ScriptedEdge()
    edge.ask([user("hi")], assistant("yes", reasoning="since"))
    turn = edge.ask([user("hi"), assistant("yes", reasoning="a forged thought"), user("go on")], "ok")
    assert (turn.kind, turn.reasons) == (MatchKind.FORK, (DriftReason.HISTORY_REWRITTEN,))
    assert len(edge.rows()) == 2


def test_a_rewind_branches_and_shares_the_common_tokens() -> None:
    edge = ScriptedEdge()
    start = [user("hi"), assistant("one")]
    edge.ask([user("hi")], "one")
    edge.ask([*start, user("left")], "l l l")
    turn = edge.ask([*start, user("right")], "r")
    assert (turn.kind, turn.reasons) == (MatchKind.FORK, (DriftReason.BRANCHED,))
    long, short = edge.rows()
    assert long.num_trained == sum(
        len(entry.token_ids) for entry in edge.ledger[:2]
    )  # the longer row trains the answer
    shared = edge.ledger[1].prompt_len - 5
    assert long.token_ids[:shared] == short.token_ids[:shared]
    assert [t.trained for t in long.turns] == [True, True]
    assert [t.trained for t in short.turns] == [False, True]
    assert short.prompt_len == long.prompt_len == edge.ledger[0].prompt_len
    assert edge.tree.num_stored_tokens < len(long.token_ids) + len(short.token_ids)


def test_the_same_question_twice_shares_its_prompt() -> None:
    edge = ScriptedEdge()
    edge.ask([user("hi")], "one")
    turn = edge.ask([user("hi")], "two")
    assert turn.reasons == (DriftReason.RESAMPLED,)
    assert len(edge.rows()) == 2
    assert edge.tree.num_stored_tokens == edge.ledger[0].prompt_len + 4


@pytest.mark.parametrize(
    ("messages", "tools", "reason"),
    [
        ([system("you search"), user("hi")], (), DriftReason.SYSTEM_CHANGED),
        ([system("s"), user("summary of all that")], (), DriftReason.ROOT_CHANGED),
        ([system("s"), user("hi"), assistant("never said"), user("go")], (), DriftReason.HISTORY_REWRITTEN),
        ([system("s"), user("hi"), assistant("one"), user("go")], ('{"name": "t"}',), DriftReason.TOOLS_CHANGED),
    ],
)
def test_other_histories_fork_with_their_reason(
    messages: list[Message], tools: tuple[str, ...], reason: DriftReason
) -> None:
    edge = ScriptedEdge()
    edge.ask([system("s"), user("hi")], "one")
    turn = edge.ask(messages, "two", tools=tools)
    assert (turn.kind, turn.reasons) == (MatchKind.FORK, (reason,))
    assert len(edge.rows()) == 2


def test_rewriting_a_later_answer_branches_at_the_last_true_one() -> None:
    edge = ScriptedEdge()
    edge.ask([user("a")], "one")
    edge.ask([user("a"), assistant("one"), user("b")], "two")
    turn = edge.ask([user("a"), assistant("one"), user("b"), assistant("forged"), user("c")], "three")
    assert (turn.kind, turn.reasons, turn.parent_ordinal) == (MatchKind.FORK, (DriftReason.HISTORY_REWRITTEN,), 0)


def test_words_put_into_the_models_mouth_are_context_and_reported() -> None:
    edge = ScriptedEdge()
    edge.ask([user("a")], "one")
    turn = edge.ask([user("a"), assistant("one"), user("b"), assistant("not mine"), user("c")], "two")
    assert (turn.kind, turn.reasons) == (MatchKind.REALIGN, (DriftReason.HISTORY_REWRITTEN,))
    (row,) = edge.rows()
    assert sum(row.mask) == 4


def test_a_refused_extension_is_rendered_afresh_and_still_shares_what_it_can() -> None:
    renderer = ScriptedRenderer()
    edge = ScriptedEdge(renderer)
    edge.ask([user("a")], "one", ids=[60, 61, ScriptedRenderer.END])
    edge.ask([user("a"), assistant("one"), user("b")], "two")
    renderer.refuses = True
    turn = edge.ask([user("a"), assistant("one"), user("b"), assistant("two"), user("c")], "three")
    assert (turn.kind, turn.reasons) == (MatchKind.FORK, (DriftReason.TEMPLATE_MISMATCH,))
    assert turn.turn.detail == "told to refuse"
    assert len(edge.rows()) == 2


def test_a_fresh_prompt_with_the_recorded_tokens_extends_them() -> None:
    renderer = ScriptedRenderer()
    edge = ScriptedEdge(renderer)
    edge.ask([user("a")], "one", ids=[ScriptedRenderer.PROMPT])
    renderer.refuses = True
    tree = edge.tree
    pending = prepare_with(tree, renderer, transcript_of((user("a"),)))
    assert pending.anchor is tree.answers[0].parent
    assert not pending.context_ids


class DroppingRenderer(ScriptedRenderer):
    """Stands at the boundary of a template whose stop token is the next role's header."""

    def render_extension(self, previous_messages, new_messages, tools, known_ids) -> Rendering:  # type: ignore[no-untyped-def]
        return Rendering(token_ids=[self.word(new_messages[0].content), self.PROMPT], num_dropped=1)


def test_a_dropped_stop_token_stays_in_its_own_row() -> None:
    edge = ScriptedEdge(DroppingRenderer())
    edge.ask([user("a")], "one", ids=[60, 61])
    turn = edge.ask([user("a"), assistant("one"), user("b")], "two", ids=[70])
    assert (turn.kind, turn.reasons) == (MatchKind.FORK, (DriftReason.BOUNDARY_TRIMMED,))
    rows = edge.rows()
    assert {tuple(t.num_cut for t in row.turns) for row in rows} == {(0,), (1, 0)}


def test_a_stop_token_dropped_only_to_be_written_again_is_no_edit() -> None:
    renderer = DroppingRenderer()
    edge = ScriptedEdge(renderer)
    edge.ask([user("a")], "one", ids=[60, renderer.word("b")])
    history = [user("a"), assistant("one"), user("b")]
    assert edge.ask(history, "two").kind is MatchKind.CLEAN
    assert len(edge.rows()) == 1
    assert edge.ask(history, "three").reasons == (DriftReason.RESAMPLED,)


def test_dropping_more_than_the_answer_is_refused() -> None:
    class Greedy(ScriptedRenderer):
        def render_extension(self, previous_messages, new_messages, tools, known_ids) -> Rendering:  # type: ignore[no-untyped-def]
            return Rendering(token_ids=[1], num_dropped=3)

    edge = ScriptedEdge(Greedy())
    edge.ask([user("a")], "one", ids=[60, 61])
    assert edge.ask([user("a"), assistant("one"), user("b")], "x").reasons == (DriftReason.TEMPLATE_MISMATCH,)


def test_of_answers_with_one_text_the_spelling_then_the_tokens_decide() -> None:
    for order in ([60, 70], [70, 60]):
        edge = ScriptedEdge()
        for first in order:
            edge.ask([user("a")], "same", ids=[first, ScriptedRenderer.END])
        turn = edge.ask([user("a"), assistant("same"), user("b")], "next")
        assert turn.parent_ordinal is not None
        assert edge.tree.answers[turn.parent_ordinal].tokens[0] == 60
    edge = ScriptedEdge()
    edge.ask([user("a")], "same ", ids=[60])
    edge.ask([user("a")], "same", ids=[70])
    assert edge.ask([user("a"), assistant("same"), user("b")], "next").parent_ordinal == 1


def test_of_answers_with_the_same_tokens_the_first_is_continued_whatever_comes_later() -> None:
    edge = ScriptedEdge()
    pending = prepare_with(edge.tree, edge.renderer, transcript_of((user("a"),)))
    records = [edge.seal(pending, "same", ids=[60, ScriptedRenderer.END]) for _ in range(2)]
    for record in reversed(records):
        edge.tree.commit(record)
        for again in (user("b"), user("c")):
            pending = prepare_with(edge.tree, edge.renderer, transcript_of((user("a"), assistant("same"), again)))
            assert pending.anchor is edge.tree.answers[0]
        ids = [*pending.anchor.path, 5]
        assert edge.tree.prepare_ids(transcript_of((user("ids"),)), ids).anchor is edge.tree.answers[0]


@pytest.mark.parametrize("answer_first", [True, False])
def test_of_equal_tokens_those_that_were_generated_are_continued(answer_first: bool) -> None:
    """An answer, and a prompt that somebody wrote with the same tokens."""
    edge = ScriptedEdge()
    empty = transcript_of((user("ids"),))
    asked, given = edge.tree.prepare_ids(empty, [5]), edge.tree.prepare_ids(empty, [5, 60])
    records = [edge.seal(asked, "x", ids=[60]), edge.seal(given, "y", ids=[70])]
    for record in records if answer_first else reversed(records):
        edge.tree.commit(record)
    for word in (61, 62):  # as a leaf, and when it has gone on
        pending = edge.tree.prepare_ids(empty, [5, 60, word])
        assert pending.anchor.turn is not None
        assert pending.anchor.turn.generation_id == "g0"
        edge.tree.commit(edge.seal(pending, "z", ids=[80]))


def test_an_answer_cut_by_length_is_closed_by_the_template() -> None:
    edge = ScriptedEdge()
    edge.ask([user("a")], "one", ids=[60], finish=FinishReason.LENGTH)
    edge.ask([user("a"), assistant("one"), user("b")], "two")
    (row,) = edge.rows()
    at = row.turns[0].stop
    assert row.token_ids[at : at + 2] == (ScriptedRenderer.END, ScriptedRenderer.SEPARATOR)
    assert row.mask[at : at + 2] == (0, 0)
    assert row.turns[0].finish_reason is FinishReason.LENGTH


def test_prepare_and_seal_leave_no_trace() -> None:
    edge = ScriptedEdge()
    edge.ask([user("a")], "one")
    before = (build_rows(edge.tree), edge.tree.num_stored_tokens, edge.tree.kinds)
    pending = prepare_with(edge.tree, edge.renderer, transcript_of((user("b"),)))
    edge.seal(pending, "two")
    edge.ledger.pop()
    assert (build_rows(edge.tree), edge.tree.num_stored_tokens, edge.tree.kinds) == before


def test_two_answers_prepared_at_once_branch_whichever_comes_first() -> None:
    edge = ScriptedEdge()
    edge.ask([user("a")], "one")
    history = [user("a"), assistant("one")]
    left = prepare_with(edge.tree, edge.renderer, transcript_of((*history, user("l"))))
    right = prepare_with(edge.tree, edge.renderer, transcript_of((*history, user("r"))))
    first, second = edge.tree.commit(edge.seal(right, "rr")), edge.tree.commit(edge.seal(left, "ll"))
    assert (first.kind, second.kind) == (MatchKind.CLEAN, MatchKind.FORK)
    assert second.reasons == (DriftReason.BRANCHED,)
    assert len(edge.rows()) == 2


def test_committing_twice_or_under_a_stranger_tells_the_story() -> None:
    edge = ScriptedEdge()
    record = edge.seal(prepare_with(edge.tree, edge.renderer, transcript_of((user("a"),))), "one")
    edge.tree.commit(record)
    with pytest.raises(TrajectoryError, match="already committed as turn 0; the session has 1 turns"):
        edge.tree.commit(record)
    follow = edge.seal(prepare_with(edge.tree, edge.renderer, transcript_of((user("a"), assistant("one")))), "two")
    with pytest.raises(TrajectoryError, match="continues g0, which is not among the session's 0 turns"):
        SessionTree().commit(follow)


@pytest.mark.parametrize(
    ("generation", "story"),
    [
        (scripted_generation([1], finish=FinishReason.ABORTED), "aborted after 1 tokens"),
        (Generation(token_ids=(), log_probs=(), version_spans=(), finish_reason=FinishReason.STOP), "no token"),
        (
            Generation(token_ids=(1,), log_probs=(), version_spans=(), finish_reason=FinishReason.STOP),
            "1 tokens but 0 log-probs",
        ),
        (
            Generation(
                token_ids=(1, 2),
                log_probs=(0.0, 0.0),
                version_spans=(VersionSpan(version=1, num_tokens=1),),
                finish_reason=FinishReason.STOP,
            ),
            "weight versions for 1",
        ),
        (scripted_generation([-1]), "negative token id"),
        (
            Generation(
                token_ids=(1,),
                log_probs=(float("nan"),),
                version_spans=(VersionSpan(version=1, num_tokens=1),),
                finish_reason=FinishReason.STOP,
            ),
            "not finite",
        ),
    ],
)
def test_generations_that_contradict_themselves_are_refused(generation: Generation, story: str) -> None:
    edge = ScriptedEdge()
    pending = prepare_with(edge.tree, edge.renderer, transcript_of((user("a"),)))
    with pytest.raises(TrajectoryError, match=story):
        pending.seal(generation_id="g", generation=generation, answer=assistant("x"))


def test_an_empty_prompt_is_refused() -> None:
    class Silent(ScriptedRenderer):
        def render_initial(self, messages, tools) -> list[int]:  # type: ignore[no-untyped-def]
            return []

    with pytest.raises(TrajectoryError, match="no token at all"):
        prepare_with(SessionTree(), Silent(), transcript_of((user("a"),)))
