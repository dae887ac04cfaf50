"""Which groups teach nothing, drifted, are stale; in which order they are shown."""

from __future__ import annotations

from typing import Any

import pytest

from seamless_verl.observe import flight
from seamless_verl.watch.watched_groups import FLAGS, SORTS, chosen, groups_of, summary, with_record


def _attempt(group: str, index: int | None, reward: float | None, **told: Any) -> dict[str, Any]:
    return {"group": group, "index": index, "key": f"{group}-{index}", "reward": reward, "drift": {}, "step": 3, **told}


def _flags(*attempts: dict[str, Any]) -> list[str]:
    (group,) = groups_of(attempts)
    return group["flags"]


def test_a_group_whose_rewards_are_equal_has_zero_variance() -> None:
    assert _flags(_attempt("a", 0, 1.0), _attempt("a", 1, 1.0)) == ["zero variance"]
    assert _flags(_attempt("a", 0, 1.0), _attempt("a", 1, 0.0)) == []


def test_zero_variance_is_not_said_before_all_rewards_are_known() -> None:
    assert _flags(_attempt("a", 0, 1.0), _attempt("a", 1, None, state="open")) == ["under way"]
    assert _flags(_attempt("a", 0, 1.0)) == []


@pytest.mark.parametrize(
    ("told", "flag"),
    [
        ({"cut": 1}, "cut off"),
        ({"drift": {"history_rewritten": 1}}, "drifted"),
        ({"seams": 2}, "interrupted"),
        ({"oldest": 0}, "stale"),
        ({"state": "open"}, "under way"),
        ({"status": "timeout"}, "not finished"),
    ],
)
def test_what_is_odd_about_an_attempt_marks_its_group(told: dict[str, Any], flag: str) -> None:
    assert _flags(_attempt("a", 0, 0.0), _attempt("a", 1, 1.0, **told)) == [flag]


@pytest.mark.parametrize(
    "told",
    [
        {"cut": 0},
        {"cut": None},
        {"drift": {"branched": 2, "content_whitespace": 1}},  # by design, or kept in its row
        {"oldest": 1},  # one version: how every run that overlaps works
        {"oldest": 0, "step": None},
        {"status": "finished", "state": "closed"},
    ],
)
def test_what_is_usual_marks_nothing(told: dict[str, Any]) -> None:
    assert _flags(_attempt("a", 0, 0.0), _attempt("a", 1, 1.0, **told)) == []


def test_attempts_stand_in_their_order_and_those_without_a_number_last() -> None:
    (group,) = groups_of([_attempt("a", None, 0.0), _attempt("a", 2, 0.0), _attempt("a", 0, 1.0)])
    assert [attempt["index"] for attempt in group["attempts"]] == [0, 2, None]


def test_every_order_puts_what_it_does_not_know_last() -> None:
    known = groups_of([_attempt("a", 0, 1.0, seconds=9.0, tokens=5), _attempt("a", 1, 0.0, seconds=1.0, tokens=4)])
    quick = groups_of([_attempt("b", 0, 0.9, seconds=2.0, tokens=90), _attempt("b", 1, 0.9, seconds=2.0, tokens=9)])
    unknown = groups_of([_attempt("c", 0, None)])
    found = {sort: "".join(g["group"] for g in chosen([*unknown, *quick, *known], sort=sort)) for sort in SORTS}
    assert found == {
        "as begun": "cba",
        "reward, lowest first": "abc",
        "reward, highest first": "bac",
        "slowest first": "abc",
        "most tokens first": "bac",
        "largest spread first": "abc",
    }


def test_filters_by_mark_and_by_any_name() -> None:
    groups = groups_of([_attempt("alpha", 0, 0.0, cut=1), _attempt("beta", 0, 1.0, status="Timeout")])
    assert [g["group"] for g in chosen(groups, flag="cut off")] == ["alpha"]
    assert [g["group"] for g in chosen(groups, text="ALPH")] == ["alpha"]
    assert [g["group"] for g in chosen(groups, text="timeout")] == ["beta"]
    assert chosen(groups, text="gamma") == []


def test_a_step_counts_groups_and_prefers_its_record() -> None:
    attempts = [_attempt("a", 0, 0.0), _attempt("a", 1, 0.0), _attempt("b", 0, 1.0, cut=1)]
    told = with_record(summary(3, attempts), {"reward": 0.25, "step_s": 7.0})
    assert (told["groups"], told["attempts"], told["reward"], told["step_s"]) == (2, 3, 0.25, 7.0)
    assert told["flags"] == {"zero variance": 1, "cut off": 1}
    assert with_record(summary("none", attempts), {})["reward"] == pytest.approx(1 / 3)
    assert all(FLAGS[flag] for flag in told["flags"])


def test_an_attempt_that_was_not_needed_is_told_from_one_that_began_anew_and_one_of_a_lost_group() -> None:
    kept, other = _attempt("a", 0, 1.0), _attempt("a", 1, 1.0)
    cut = _attempt("a", 2, None, state="given up", status=flight.SURPLUS)
    (group,) = groups_of([kept, other, cut])
    assert group["flags"] == ["zero variance", "cut off by redundancy"]
    assert [attempt["flags"] for attempt in group["attempts"]] == [[], [], ["cut off by redundancy"]]
    anew = _attempt("a", 0, None, state="given up", status=flight.BEGUN_ANEW) | {"key": "a-first"}
    assert _flags(_attempt("a", 0, 1.0), _attempt("a", 1, 0.0), anew) == ["given up"]
    assert [g["group"] for g in chosen(groups_of([kept, cut]), flag="cut off by redundancy")] == ["a"]


def test_the_recording_says_why_an_attempt_was_given_up() -> None:
    other = _attempt("a", 0, 1.0)
    said = {
        status: _flags(other, _attempt("a", 1, None, state="given up", status=status))
        for status in (flight.SURPLUS, flight.BEGUN_ANEW, flight.GROUP_FAILED, flight.GIVEN_UP, "failed")
    }
    assert said.pop(flight.SURPLUS) == ["cut off by redundancy"]
    assert said.pop("failed") == ["given up", "not finished"]
    assert set(map(tuple, said.values())) == {("given up",)}


def test_an_attempt_without_an_answer_for_five_minutes_is_silent_while_it_is_under_way() -> None:
    waits = _attempt("a", 0, None, state="open", latest=1000.0)
    found = {now: groups_of([waits], now)[0]["flags"] for now in (0.0, 1300.0, 1301.0)}
    assert found == {0.0: ["under way"], 1300.0: ["under way"], 1301.0: ["silent", "under way"]}
    (group,) = groups_of([waits | {"state": "closed", "reward": 1.0}], 9000.0)
    assert group["flags"] == []
