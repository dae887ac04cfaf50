"""Rows worked out by hand: token ids, masks, log-probs and weight versions of small trees."""

from __future__ import annotations

from itertools import permutations

import msgspec
import pytest

from seamless_verl.trajectory.generation import FinishReason, Generation, VersionSpan
from seamless_verl.trajectory.matching import Rendering
from seamless_verl.trajectory.messages import transcript_of
from seamless_verl.trajectory.rows import Row, RowSpan, RowTurn, build_rows
from seamless_verl.trajectory.tokens import Segment
from seamless_verl.trajectory.tree import SessionTree
from tests.fakes import ScriptedEdge, ScriptedRenderer, assistant, user

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def answer(
    tree: SessionTree,
    name: str,
    prompt: list[int],
    ids: list[int],
    *,
    log_probs: list[float] | None = None,
    versions: tuple[tuple[int, int], ...] = (),
    finish: FinishReason = STOP,
) -> Segment:
    """Commit an answer; ``versions`` are (version, number of tokens), by default version 0 for all."""
    spans = versions or ((0, len(ids)),)
    generation = Generation(
        token_ids=ids,
        log_probs=log_probs or [-1.0] * len(ids),
        version_spans=tuple(VersionSpan(version=version, num_tokens=count) for version, count in spans),
        finish_reason=finish,
    )
    pending = tree.prepare_ids(transcript_of((user("ids"),)), prompt)
    return tree.commit(pending.seal(generation_id=name, generation=generation, answer=assistant("x")))


def test_two_turns_in_one_row() -> None:
    tree = SessionTree()
    answer(tree, "a", [1, 2], [10, 11, 12], log_probs=[-0.1, -0.2, -0.3], versions=((4, 1), (5, 2)))
    answer(tree, "b", [1, 2, 10, 11, 12, 3], [13], log_probs=[-0.4], versions=((5, 1),), finish=LENGTH)
    assert build_rows(tree) == (
        Row(
            token_ids=(1, 2, 10, 11, 12, 3, 13),
            mask=(0, 0, 1, 1, 1, 0, 1),
            log_probs=(0.0, 0.0, -0.1, -0.2, -0.3, 0.0, -0.4),
            prompt_len=2,
            turns=(
                RowTurn(generation_id="a", start=2, stop=5, trained=True, finish_reason=STOP),
                RowTurn(generation_id="b", start=6, stop=7, trained=True, finish_reason=LENGTH),
            ),
            version_spans=(
                RowSpan(start=2, stop=3, version=4),
                RowSpan(start=3, stop=5, version=5),
                RowSpan(start=6, stop=7, version=5),
            ),
        ),
    )


def test_a_row_as_clients_and_files_have_it() -> None:
    tree = SessionTree()
    answer(tree, "a", [1, 2], [10], log_probs=[-0.5], versions=((4, 1),))
    (row,) = build_rows(tree)
    written = (
        b'{"token_ids":[1,2,10],"mask":[0,0,1],"log_probs":[0.0,0.0,-0.5],"prompt_len":2,'
        b'"turns":[["a",2,3,true,"stop",0]],"version_spans":[[2,3,4]]}'
    )
    assert msgspec.json.encode(row) == written
    pictured = msgspec.structs.replace(row, images=("digest",))
    assert msgspec.json.encode(pictured) == written[:-1] + b',"images":["digest"]}'


def test_the_picture_of_the_module_about_segments() -> None:
    """One answer, continued twice: both rows hold it, the one with more generated tokens trains it."""
    tree = SessionTree()
    answer(tree, "shared", [1], [10, 11], log_probs=[-0.1, -0.2])
    answer(tree, "short", [1, 10, 11, 2], [20], log_probs=[-0.3])
    answer(tree, "long", [1, 10, 11, 3], [30, 31], log_probs=[-0.4, -0.5])
    long, short = build_rows(tree)
    assert (long.token_ids, long.mask) == ((1, 10, 11, 3, 30, 31), (0, 1, 1, 0, 1, 1))
    assert long.log_probs == (0.0, -0.1, -0.2, 0.0, -0.4, -0.5)
    assert (short.token_ids, short.mask) == ((1, 10, 11, 2, 20), (0, 0, 0, 0, 1))
    assert short.log_probs == (0.0, 0.0, 0.0, 0.0, -0.3)
    assert [(turn.generation_id, turn.trained) for turn in short.turns] == [("shared", False), ("short", True)]
    assert (short.prompt_len, short.num_trained, long.num_trained) == (1, 1, 4)
    assert short.version_spans == (RowSpan(start=1, stop=3, version=0), RowSpan(start=4, stop=5, version=0))
    assert tree.num_stored_tokens == 8, "1 | 10 11 | 2 | 20 | 3 | 30 31: the shared answer is stored once"


def test_a_row_that_cuts_an_answer_does_not_train_it() -> None:
    """A template whose stop token is the header of the next role: the next prompt leaves it out."""

    class Dropping(ScriptedRenderer):
        def render_extension(self, previous_messages, new_messages, tools, known_ids) -> Rendering:  # type: ignore[no-untyped-def]
            return Rendering(token_ids=[99], num_dropped=1)

    edge = ScriptedEdge(Dropping())
    edge.ask([user("a")], "one", ids=[60, 61, 62])
    prompt = edge.ledger[0].prompt_len
    edge.ask([user("a"), assistant("one"), user("b")], "two", ids=[70])
    whole, cut = edge.rows()
    assert whole.token_ids[prompt:] == (60, 61, 62)
    assert whole.mask[prompt:] == (1, 1, 1)
    assert cut.token_ids[prompt:] == (60, 61, 99, 70)
    assert cut.mask[prompt:] == (0, 0, 0, 1)
    assert cut.log_probs[prompt : prompt + 3] == (0.0, 0.0, 0.0)
    shown = [(turn.start - prompt, turn.stop - prompt, turn.trained, turn.num_cut) for turn in cut.turns]
    assert shown == [(0, 2, False, 1), (3, 4, True, 0)]
    covered = [(span.start - prompt, span.stop - prompt) for span in cut.version_spans]
    assert covered[-1] == (3, 4)
    assert sum(stop - start for start, stop in covered) == 3, "what was cut has no version"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"ids": [9, 9]}, {"ids": [1]}, id="more generated tokens"),
        pytest.param({"ids": [1, 9]}, {"ids": [2, 0]}, id="lower ids"),
        pytest.param({"log_probs": [-2.0, -1.0]}, {"log_probs": [-1.0, -2.0]}, id="lower log-probs"),
        pytest.param({"versions": ((1, 2),)}, {"versions": ((2, 2),)}, id="lower version"),
        pytest.param({"versions": ((1, 1), (2, 1))}, {"versions": ((1, 2),)}, id="fewer tokens of the lower version"),
        pytest.param({}, {}, id="lower name"),
    ],
)
def test_which_row_comes_first_and_trains_what_both_hold(first: dict[str, object], second: dict[str, object]) -> None:
    for turn_order in permutations(("a", "b")):
        tree = SessionTree()
        answer(tree, "shared", [1], [5])
        for name in turn_order:
            options = {"ids": [7, 7]} | (first if name == "a" else second)
            answer(tree, name, [1, 5, 2], **options)  # type: ignore[arg-type]
        rows = build_rows(tree)
        assert [row.turns[-1].generation_id for row in rows] == ["a", "b"]
        assert [row.turns[0].trained for row in rows] == [True, False]


def test_of_three_rows_with_two_shared_answers_each_answer_is_trained_once() -> None:
    tree = SessionTree()
    answer(tree, "root", [1], [10])
    answer(tree, "left", [1, 10, 2], [20])
    answer(tree, "leaf 1", [1, 10, 2, 20, 3], [30, 31, 32])
    answer(tree, "leaf 2", [1, 10, 2, 20, 4], [40, 41])
    answer(tree, "right", [1, 10, 5], [50, 51, 52, 53])
    trained = [[turn.generation_id for turn in row.turns if turn.trained] for row in build_rows(tree)]
    # 5 generated tokens in the path of leaf 1 and of right; ids 1 10 2 … come before 1 10 5 ….
    assert trained == [["root", "left", "leaf 1"], ["right"], ["leaf 2"]]


def test_a_session_without_an_answer_has_no_row() -> None:
    assert build_rows(SessionTree()) == ()
