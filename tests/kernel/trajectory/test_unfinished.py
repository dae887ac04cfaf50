"""Who goes on with an unfinished answer, and with which of its tokens."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.trajectory.generation import FinishReason, Generation, UnfinishedAnswers, UnfinishedPart
from tests.fakes import scripted_generation

TOKENS = scripted_generation(range(100, 130), num_versions=3, finish=FinishReason.ABORTED)
ASKED, PROMPT = b"request", b"prompt"


def _parts(sizes: list[int]) -> list[UnfinishedPart]:
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    known = UnfinishedAnswers()
    return [
        known.progressed("a", ASKED, PROMPT, _between(end - size, end)) for size, end in zip(sizes, ends, strict=True)
    ]


def _between(start: int, end: int) -> Generation:
    rest = TOKENS.after(start)
    spans, left = [], end - start
    for span in rest.version_spans:
        taken = min(left, span.num_tokens)
        left -= taken
        spans += [replace(span, num_tokens=taken)] if taken else []
    ids, log_probs = rest.token_ids[: end - start], rest.log_probs[: end - start]
    return replace(rest, token_ids=ids, log_probs=log_probs, version_spans=tuple(spans))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 5))
def test_what_is_claimed_is_what_was_told_up_to_the_first_hole(sizes: list[int], lost: int) -> None:
    later = UnfinishedAnswers()
    for number, part in enumerate(_parts(sizes)):
        if number != lost:
            later.add(part)
    known = sum(sizes[:lost])
    answer, begun = later.claim(ASKED, PROMPT, new="new")
    if not known:
        assert (answer, begun) == ("new", None)
        return
    assert begun is not None
    begun.check("begun")
    assert (answer, list(begun.token_ids)) == ("a", list(TOKENS.token_ids[:known]))
    assert list(begun.log_probs) == list(TOKENS.log_probs[:known])
    assert later.num_tokens == known


def test_an_answer_has_one_holder_and_only_its_own_prompt() -> None:
    answers = UnfinishedAnswers()
    answers.progressed("a", ASKED, PROMPT, TOKENS)
    assert answers.claim(ASKED, b"another prompt", new="b") == ("b", None)
    assert answers.claim(b"another request", PROMPT, new="c") == ("c", None)
    assert answers.claim(ASKED, PROMPT, new="d", is_whole=True) == ("d", None)
    assert answers.claim(ASKED, PROMPT, new="e")[0] == "a"
    assert answers.claim(ASKED, PROMPT, new="f") == ("f", None), "somebody has it"
    answers.progressed("f", ASKED, PROMPT, TOKENS)
    assert answers.claim(ASKED, PROMPT, new="g") == ("g", None), "whoever began it has it"
    answers.release("a", is_over=False)
    assert answers.claim(ASKED, PROMPT, new="h")[0] == "a"
    for answer in "af":
        answers.release(answer, is_over=True)
    assert answers.claim(ASKED, PROMPT, new="i") == ("i", None)
    assert answers.num_tokens == 0


def test_what_was_given_up_long_ago_leaves_and_what_somebody_holds_stays() -> None:
    answers = UnfinishedAnswers()
    answers.progressed("held", ASKED, PROMPT, TOKENS)
    assert answers.claim(ASKED, PROMPT, new="a")[0] == "held"
    for number in range(1000):
        answers.progressed(f"{number}", b"other", PROMPT, TOKENS)
    assert answers.num_tokens <= 64 * len(TOKENS.token_ids)
    answers.release("held", is_over=False)
    assert answers.claim(ASKED, PROMPT, new="a")[0] == "held"


def test_answers_that_somebody_holds_keep_their_beginnings_however_many_there_are() -> None:
    answers = UnfinishedAnswers()
    for number in range(65):
        assert answers.claim(ASKED, PROMPT, new=f"{number}") == (f"{number}", None)
    sizes = [7, 1, 4]
    for number in range(65):
        assert [answers.progressed(f"{number}", ASKED, PROMPT, part.tokens) for part in _parts(sizes)] == [
            replace(part, answer=f"{number}") for part in _parts(sizes)
        ]
    assert answers.num_tokens == 65 * sum(sizes)
    answers.progressed("nobody's", b"other", PROMPT, TOKENS)
    assert answers.num_tokens == 65 * sum(sizes), "it may go"
    answers.release("3", is_over=False)
    answer, begun = answers.claim(ASKED, PROMPT, new="new")
    assert begun is not None
    assert (answer, list(begun.token_ids)) == ("3", list(TOKENS.token_ids[: sum(sizes)]))


def test_whole_answers_of_a_dead_workers_agents_wait_to_be_asked_for_however_many_there_are() -> None:
    answers, whole = UnfinishedAnswers(), replace(TOKENS, finish_reason=FinishReason.STOP)
    for number in range(100):
        digest = f"{number}".encode()
        answers.add(UnfinishedPart(answer=f"{number}", digest=digest, prompt=PROMPT, start=0, tokens=whole))
    for number in range(100):
        answers.progressed(f"begun {number}", b"other", PROMPT, TOKENS)
    for number in range(100):
        answer, begun = answers.claim(f"{number}".encode(), PROMPT, new="new")
        assert begun is not None
        assert (answer, begun.finish_reason) == (f"{number}", FinishReason.STOP)
