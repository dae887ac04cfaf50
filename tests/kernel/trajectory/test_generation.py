"""Answers in several attempts: the same tokens as in one, whatever the seams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from seamless_verl.trajectory.generation import GRAMMAR_PREFIX, FinishReason, Generation, PartialGeneration, VersionSpan

_TEXTS = ["a", "b", "S", "T", "OP", "STO", "P"]  # of token ids 0 to 6


def _decode(ids: Sequence[int]) -> str:
    return "".join(_TEXTS[token] for token in ids)


def _attempt(
    script: Sequence[int], known: int, sampling: dict[str, Any], *, version: int, patience: int | None
) -> Generation:
    """What an engine answers that would write ``script`` and has ``known`` tokens of it in its prompt.

    It sees stop strings only in what it generates itself, and is interrupted after ``patience`` tokens.
    """
    ids: list[int] = []
    finish = FinishReason.STOP
    for token in script[known:]:
        if patience is not None and len(ids) >= patience:
            finish = FinishReason.ABORTED
            break
        ids.append(token)
        if any(stop in _decode(ids) for stop in sampling.get("stop", ())):
            break
        if len(ids) >= sampling["max_tokens"]:
            finish = FinishReason.LENGTH
            break
    return Generation(
        token_ids=ids,
        log_probs=[-0.1 * (known + at) for at in range(len(ids))],
        version_spans=(VersionSpan(version=version, num_tokens=len(ids)),) if ids else (),
        finish_reason=finish,
    )


@settings(max_examples=150, deadline=None)
@example(script=[0, 5, 6, 1, 1], cuts=[2], stops=["STOP"], max_tokens=9)  # STO|P and two tokens too many
@example(script=[2, 3, 4, 0], cuts=[1, 1], stops=["STOP", "a"], max_tokens=3)
@given(
    script=st.lists(st.integers(0, 6), min_size=1, max_size=14),
    cuts=st.lists(st.integers(0, 5), max_size=5),
    stops=st.lists(st.sampled_from(["STOP", "ab", "PS", "a"]), max_size=2),
    max_tokens=st.integers(1, 16),
)
def test_seams_change_nothing(script: list[int], cuts: list[int], stops: list[str], max_tokens: int) -> None:
    sampling = {"max_tokens": max_tokens, "stop": stops, "temperature": 0.5}
    whole = _attempt(script, 0, sampling, version=0, patience=None)
    partial = PartialGeneration(sampling, _decode)
    attempts: list[Generation] = []
    for version, patience in enumerate([*cuts, None]):
        asked = partial.sampling()
        assert asked["temperature"] == 0.5
        assert asked["max_tokens"] == max_tokens - len(partial.token_ids) >= 1
        attempts.append(_attempt(script, len(partial.token_ids), asked, version=version, patience=patience))
        if partial.add(attempts[-1]):
            break
    merged = partial.generation()
    merged.check("merged")
    assert list(merged.token_ids) == list(whole.token_ids)
    assert list(merged.log_probs) == list(whole.log_probs)
    assert merged.finish_reason is whole.finish_reason
    made_by = [version for version, attempt in enumerate(attempts) for _ in attempt.token_ids]
    told = [span.version for span in merged.version_spans for _ in range(span.num_tokens)]
    assert told == made_by[: len(told)]
    versions = [span.version for span in merged.version_spans]
    assert versions == sorted(set(versions))


def test_noise_is_not_drawn_twice_and_is_the_same_every_time() -> None:
    def seeds() -> list[int]:
        partial = PartialGeneration({"max_tokens": 9, "seed": 5}, _decode)
        asked = [partial.sampling()["seed"]]
        for known in (0, 2):
            partial.add(_attempt([0] * 9, known, partial.sampling(), version=0, patience=2))
            asked.append(partial.sampling()["seed"])
        return asked

    assert seeds() == seeds()
    assert seeds()[0] == 5
    assert len(set(seeds())) == 3


def test_under_a_grammar_an_interrupted_attempt_is_given_up() -> None:
    partial = PartialGeneration({"max_tokens": 3, "structured_outputs": {"json": {}}}, _decode)
    assert not partial.add(_attempt([0, 1, 0], 0, partial.sampling(), version=1, patience=2))
    assert partial.sampling()["max_tokens"] == 3
    assert partial.add(_attempt([1, 1], 0, partial.sampling(), version=2, patience=None))
    assert partial.generation().token_ids == [1, 1]
    assert partial.generation().version_spans == (VersionSpan(version=2, num_tokens=2),)


def test_where_the_engine_moves_grammars_the_kept_tokens_are_counted_out_for_it() -> None:
    sampling = {"max_tokens": 6, "structured_outputs": {"json": {}}, "extra_args": {"mine": 1}}
    partial = PartialGeneration(sampling, _decode, moves_grammars=True)
    assert partial.sampling()["extra_args"] == {"mine": 1}
    assert not partial.add(_attempt([0, 1, 0], 0, partial.sampling(), version=1, patience=2))
    kept = list(partial.token_ids)
    assert kept
    asked = partial.sampling()
    assert asked["extra_args"] == {"mine": 1, GRAMMAR_PREFIX: len(kept)}
    assert asked["max_tokens"] == 6 - len(kept)
    assert partial.add(_attempt([0, 1, 0], len(kept), asked, version=2, patience=None))
    assert partial.generation().token_ids == [0, 1, 0]
    assert [span.version for span in partial.generation().version_spans] == [1, 2]


def test_without_a_decoder_a_stop_across_a_seam_is_not_found() -> None:
    partial = PartialGeneration({"max_tokens": 9, "stop": ["STOP"]}, None)
    assert not partial.add(_attempt([5, 6, 0], 0, partial.sampling(), version=1, patience=1))
    assert partial.add(_attempt([5, 6, 0], 1, partial.sampling(), version=1, patience=None))
    assert _decode(partial.generation().token_ids) == "STOPa"


def _said(ids: list[int], *, version: int = 0, finish: FinishReason = FinishReason.ABORTED) -> Generation:
    spans = (VersionSpan(version=version, num_tokens=len(ids)),) if ids else ()
    return Generation(token_ids=ids, log_probs=[-1.0] * len(ids), version_spans=spans, finish_reason=finish)


def test_tokens_of_one_version_are_one_span_whatever_the_seams() -> None:
    partial = PartialGeneration({"max_tokens": 9}, _decode)
    for version, ids in ((3, [0]), (3, [1, 1]), (4, []), (4, [0]), (3, [1])):
        assert not partial.add(_said(ids, version=version))
    spans = [(span.version, span.num_tokens) for span in partial.generation().version_spans]
    assert spans == [(3, 3), (4, 1), (3, 1)]


def test_an_answer_interrupted_with_its_last_token_is_complete_by_length() -> None:
    partial = PartialGeneration({"max_tokens": 3}, _decode)
    assert not partial.add(_said([0, 1]))
    assert partial.generation().finish_reason is FinishReason.ABORTED
    assert partial.add(_said([0]))
    assert partial.generation().finish_reason is FinishReason.LENGTH


def test_a_stop_across_a_seam_takes_log_probs_and_versions_of_what_it_cuts_along() -> None:
    partial = PartialGeneration({"max_tokens": 9, "stop": ["STOP"]}, _decode)
    assert not partial.add(_said([1, 5], version=7))  # b STO
    assert partial.add(_said([6, 0, 0], version=8))  # P a a
    generation = partial.generation()
    assert (generation.token_ids, generation.finish_reason) == ([1, 5, 6], FinishReason.STOP)
    assert len(generation.log_probs) == 3
    assert [(span.version, span.num_tokens) for span in generation.version_spans] == [(7, 2), (8, 1)]


def test_an_answer_is_cut_short_where_it_is_and_an_empty_one_after_one_token() -> None:
    partial = PartialGeneration({"max_tokens": 9}, _decode)
    partial.add(_said([0, 1]))
    assert partial.cut_short()
    assert (partial.generation().token_ids, partial.generation().finish_reason) == ([0, 1], FinishReason.LENGTH)
    empty = PartialGeneration({"max_tokens": 9}, _decode)
    assert not empty.cut_short()
    assert empty.sampling()["max_tokens"] == 1
    assert empty.add(_said([0]))
    done = PartialGeneration({"max_tokens": 9}, _decode)
    done.add(_said([0], finish=FinishReason.STOP))
    assert done.cut_short()
    assert done.generation().finish_reason is FinishReason.STOP


def _cut_into(attempt: Generation, sizes: list[int]) -> list[Generation]:
    """What is told of an attempt before its end."""
    parts, start = [], 0
    for size in sizes:
        if start + size < len(attempt.token_ids):
            rest = attempt.after(start)
            spans = (VersionSpan(version=rest.version_spans[0].version, num_tokens=size),)
            parts.append(
                replace(rest, token_ids=rest.token_ids[:size], log_probs=rest.log_probs[:size], version_spans=spans)
            )
            start += size
    return parts


@settings(max_examples=300, deadline=None)
@example(script=[0, 1, 0, 1], stops=[], lives=[([1, 1], True), ([1], False)], begins=1, max_tokens=3)
@example(script=[5, 6, 0, 0, 0], stops=["STOP"], lives=[([], False), ([1, 1], False)], begins=0, max_tokens=9)
@example(script=[2, 3, 4, 0, 0, 0], stops=["STOP"], lives=[([1], True), ([3], True)], begins=1, max_tokens=9)
@given(
    script=st.lists(st.integers(0, 6), min_size=1, max_size=14),
    stops=st.lists(st.sampled_from(["STOP", "ab", "PS", "a"]), max_size=2),
    lives=st.lists(st.tuples(st.lists(st.integers(1, 3), max_size=4), st.booleans()), max_size=5),
    begins=st.integers(0, 4),
    max_tokens=st.integers(1, 16),
)
def test_what_an_attempt_told_survives_it_and_is_handed_out_once(
    script: list[int], stops: list[str], lives: list[tuple[list[int], bool]], begins: int, max_tokens: int
) -> None:
    """Attempts tell parts; some are interrupted, some die; once their holder dies, and another has what was told."""
    sampling = {"max_tokens": max_tokens, "stop": stops}
    whole = _attempt(script, 0, sampling, version=0, patience=None)
    partial, handed = PartialGeneration(sampling, _decode), PartialGeneration({}, None)
    is_complete = False
    for version, (sizes, dies) in enumerate([*lives, ([], False)]):
        patience = sum(sizes) + 1 if version < len(lives) else None
        attempt = _attempt(script, len(partial.token_ids), partial.sampling(), version=version, patience=patience)
        for part in _cut_into(attempt, sizes):
            partial.part(part)
            _hand_out(partial, handed)
        if version == begins:
            partial = PartialGeneration(sampling, _decode)
            is_complete = partial.resume(handed.generation())
        else:
            is_complete = partial.break_off() if dies else partial.add(attempt)
        if is_complete:
            break
        _hand_out(partial, handed)
    if not is_complete:  # the last one's holder died
        attempt = _attempt(script, len(partial.token_ids), partial.sampling(), version=99, patience=None)
        assert partial.add(attempt)
    made = partial.generation()
    made.check("made")
    assert (list(made.token_ids), list(made.log_probs)) == (list(whole.token_ids), list(whole.log_probs))
    assert made.finish_reason is whole.finish_reason
    told = handed.token_ids[: len(made.token_ids)]
    assert told == list(made.token_ids)[: len(told)]


def _hand_out(partial: PartialGeneration, handed: PartialGeneration) -> None:
    if (news := partial.progress()) is not None:
        handed.resume(news)


def test_a_whole_answer_is_taken_over_as_it_was() -> None:
    whole = _attempt([0, 1, 2], 0, {"max_tokens": 9}, version=1, patience=None)
    assert whole.finish_reason is FinishReason.STOP
    partial = PartialGeneration({"max_tokens": 9, "stop": [_decode([1])]}, _decode)
    assert partial.resume(whole), "its holder has looked for stop strings"
    assert replace(partial.generation(), alternatives=()) == whole
    cut = PartialGeneration({"max_tokens": 2}, _decode)
    assert cut.resume(whole)
    assert (cut.generation().token_ids, cut.generation().finish_reason) == ([0, 1], FinishReason.LENGTH)
    again = PartialGeneration({"max_tokens": 9}, _decode)
    assert again.resume(cut.generation()), "its length ended it, and it stays as it was recorded"
    assert (again.generation().token_ids, again.generation().finish_reason) == ([0, 1], FinishReason.LENGTH)


def test_who_goes_on_with_more_than_there_is_room_for_has_all() -> None:
    partial = PartialGeneration({"max_tokens": 2}, None)
    assert partial.resume(_attempt([0, 1, 0], 0, {"max_tokens": 9}, version=1, patience=3))
    assert (partial.generation().token_ids, partial.generation().finish_reason) == ([0, 1], FinishReason.LENGTH)
