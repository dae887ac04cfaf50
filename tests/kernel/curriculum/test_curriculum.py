"""Which prompts come, in which order, when an epoch or a stage ends, and what survives a restart."""

from __future__ import annotations

import json
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.curriculum.curriculum import Curriculum, CurriculumError, Draw, EpochEnded, StageEntered
from seamless_verl.curriculum.prompt_pool import Outcome, Resampling
from seamless_verl.curriculum_config import CurriculumConfig
from seamless_verl.curriculum_config import PlateauConfig as Plateau
from seamless_verl.curriculum_config import StageConfig as Stage
from seamless_verl.errors import ConfigError

RIGHT, MIXED, WRONG = [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]


def run_epoch(curriculum: Curriculum, accuracies: dict[int, list[float]], size: int) -> list[object]:
    """Draw ``size`` prompts one by one, each finished before the next is drawn."""
    events: list[object] = []
    for _ in range(size):
        draw = curriculum.draw()
        events += curriculum.finish(draw, accuracies.get(draw.prompt, MIXED))
    return events


def drawn(curriculum: Curriculum, count: int) -> list[int]:
    return [curriculum.draw().prompt for _ in range(count)]


def test_an_epoch_hands_out_every_prompt_once_in_an_order_of_its_own() -> None:
    curriculum = Curriculum(sources=["a"] * 50, seed=3)
    first, second = drawn(curriculum, 50), drawn(curriculum, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert drawn(Curriculum(sources=["a"] * 50, seed=3), 50) == first
    assert drawn(Curriculum(sources=["a"] * 50, seed=4), 50) != first
    assert drawn(Curriculum(sources=["a"] * 5, seed=None), 7) == [0, 1, 2, 3, 4, 0, 1]


def test_all_correct_leaves_and_mixed_all_wrong_and_failed_stay() -> None:
    curriculum = Curriculum(sources=["a"] * 4, resampling=Resampling())
    (ended,) = run_epoch(curriculum, {0: RIGHT, 1: MIXED, 2: WRONG, 3: []}, 4)
    assert isinstance(ended, EpochEnded)
    assert (ended.epoch, ended.removed, ended.pool) == (0, (0,), 3)
    assert ended.outcomes == {
        Outcome.ALL_CORRECT: 1,
        Outcome.MIXED: 1,
        Outcome.ALL_WRONG: 1,
        Outcome.FAILED: 1,
    }
    assert sorted(drawn(curriculum, 3)) == [1, 2, 3]
    assert curriculum.num_left == 1


def test_without_history_resampling_nothing_leaves() -> None:
    curriculum = Curriculum(sources=["a"] * 2)
    run_epoch(curriculum, {0: RIGHT, 1: RIGHT}, 2)
    assert sorted(drawn(curriculum, 2)) == [0, 1]


def test_the_epoch_ends_when_its_last_prompt_is_consumed_not_when_it_is_drawn() -> None:
    curriculum = Curriculum(sources=["a"] * 3, resampling=Resampling(), seed=None)
    draws = [curriculum.draw() for _ in range(3)]
    assert curriculum.finish(draws[0], RIGHT) == []
    ahead = curriculum.draw()
    assert (ahead.prompt, ahead.epoch) == (1, 1), "prompt 0 is solved so far, so it comes last in the next epoch"
    assert curriculum.finish(draws[2], MIXED) == []
    assert curriculum.epochs_ended == 0
    (ended,) = curriculum.finish(draws[1], MIXED)
    assert isinstance(ended, EpochEnded)
    assert (ended.epoch, ended.removed) == (0, (0,))
    assert curriculum.epochs_ended == 1
    assert [curriculum.draw() for _ in range(2)] == [Draw(prompt=2, epoch=1), Draw(prompt=1, epoch=2)]


def test_the_floor_keeps_the_pool_and_removed_prompts_come_back() -> None:
    curriculum = Curriculum(sources=["a"] * 4, resampling=Resampling(floor=2, readmit_after=2), seed=None)
    (ended,) = run_epoch(curriculum, dict.fromkeys(range(4), RIGHT), 4)
    assert isinstance(ended, EpochEnded)
    assert (ended.removed, ended.pool) == ((0, 1), 2)
    assert drawn(curriculum, 2) == [2, 3]
    for prompt in (2, 3):
        events = curriculum.finish(Draw(prompt=prompt, epoch=1), MIXED)
    assert isinstance(events[0], EpochEnded)
    assert events[0].readmitted == ()
    (ended,) = run_epoch(curriculum, {}, 2)
    assert isinstance(ended, EpochEnded)
    assert (ended.epoch, ended.readmitted, ended.pool, curriculum.num_left) == (2, (0, 1), 4, 0)


def test_an_epoch_under_way_ends_without_what_left_and_takes_what_came_back() -> None:
    curriculum = Curriculum(sources=["a"] * 4, resampling=Resampling(readmit_after=1), seed=None)
    run_epoch(curriculum, {0: RIGHT, 1: RIGHT}, 4)
    (ended,) = run_epoch(curriculum, {}, 2)  # 0 and 1 left before they were drawn: its last finish ends it
    assert isinstance(ended, EpochEnded)
    assert (ended.epoch, ended.readmitted) == (1, (0, 1))
    assert [curriculum.draw() for _ in range(4)] == [Draw(prompt=prompt, epoch=2) for prompt in range(4)]


def test_what_leaves_and_comes_back_while_rollout_runs_ahead_is_drawn_once() -> None:
    """Epoch 1 is begun before 0 ends: 0 was drawn in it already, and 1, which comes back with its end, in epoch 2."""
    curriculum = Curriculum(sources=["a"] * 3, resampling=Resampling(readmit_after=1), seed=None)
    first = [curriculum.draw() for _ in range(4)]
    assert first[3] == Draw(prompt=0, epoch=1)
    curriculum.finish(first[3], RIGHT)
    curriculum.finish(first[0], RIGHT)
    curriculum.finish(first[2], MIXED)
    (ended,) = curriculum.finish(first[1], RIGHT)
    assert isinstance(ended, EpochEnded)
    assert (ended.removed, ended.pool) == ((0, 1), 1)
    last = curriculum.draw()
    assert last == Draw(prompt=2, epoch=1)
    ahead = curriculum.draw()
    assert ahead == Draw(prompt=2, epoch=2)
    (ended,) = curriculum.finish(last, MIXED)
    assert isinstance(ended, EpochEnded)
    assert (ended.epoch, ended.readmitted) == (1, (0, 1))
    assert [curriculum.draw() for _ in range(2)] == [Draw(prompt=prompt, epoch=2) for prompt in (0, 1)]
    assert curriculum.draw().epoch == 3


def test_no_stage_to_come_loses_its_last_prompts() -> None:
    stages = [Stage(name="both", sources=("a", "b"), until_epoch=1), Stage(name="b", sources=("b",))]
    curriculum = Curriculum(sources=["a", "b", "a"], stages=stages, resampling=Resampling())
    run_epoch(curriculum, dict.fromkeys(range(3), RIGHT), 3)
    assert curriculum.stage == "b"
    assert curriculum.draw().prompt == 1


def test_a_failed_prompt_is_drawn_once_more_and_then_given_up_until_the_next_epoch() -> None:
    curriculum = Curriculum(sources=["a"] * 2, seed=None)
    first = curriculum.draw()
    curriculum.fail(first)
    other = curriculum.draw()
    assert other.prompt == 1
    curriculum.finish(other, MIXED)
    again = curriculum.draw()
    assert again == first
    (ended,) = curriculum.fail(again)
    assert isinstance(ended, EpochEnded)
    assert ended.outcomes[Outcome.FAILED] == 1
    assert drawn(curriculum, 2) == [0, 1]


def test_a_straggler_that_fails_does_not_hold_its_epoch_open_for_another_one() -> None:
    curriculum = Curriculum(sources=["a"] * 3, seed=None)
    draws = [curriculum.draw() for _ in range(4)]
    assert draws[3].epoch == 1
    curriculum.fail(draws[0])
    assert curriculum.draw() == draws[0]


def test_what_is_not_in_flight_is_refused() -> None:
    curriculum = Curriculum(sources=["a"])
    with pytest.raises(CurriculumError, match="not in flight"):
        curriculum.finish(Draw(prompt=0, epoch=0), MIXED)


STAGES = [Stage(name="math", sources=("math",), until_step=3), Stage(name="math+code", sources=("math", "code"))]


def test_a_step_ends_a_stage_and_the_next_draw_is_of_the_new_one() -> None:
    curriculum = Curriculum(sources=["math"] * 4 + ["code"] * 4, stages=STAGES, seed=None)
    assert drawn(curriculum, 2) == [0, 1]
    assert curriculum.step_ended(2) == []
    assert curriculum.step_ended(3) == [StageEntered(stage="math+code", epoch=1)]
    assert drawn(curriculum, 8) == list(range(8))
    events = curriculum.finish(Draw(prompt=0, epoch=0), RIGHT) + curriculum.finish(Draw(prompt=1, epoch=0), RIGHT)
    assert [type(event) for event in events] == [EpochEnded]
    assert curriculum.step_ended(4) == [], "the last stage never ends"


def test_a_stage_that_ends_with_an_epoch_leaves_no_empty_epoch_behind() -> None:
    stages = [Stage(name="one", sources=("a",), until_epoch=1), Stage(name="two", sources=("a", "b"))]
    curriculum = Curriculum(sources=["a", "a", "b"], stages=stages)
    events = run_epoch(curriculum, {}, 2)
    assert [type(event) for event in events] == [EpochEnded, StageEntered]
    assert events[1] == StageEntered(stage="two", epoch=1)
    assert curriculum.epochs_ended == 1
    assert [curriculum.draw().epoch for _ in range(3)] == [1, 1, 1]


def test_epochs_and_plateaus_end_stages() -> None:
    stages = [
        Stage(name="one", sources=("a",), until_epoch=2),
        Stage(name="two", sources=("a",), until_plateau=Plateau(epochs=2, min_gain=0.1)),
        Stage(name="three", sources=("a",)),
    ]
    curriculum = Curriculum(sources=["a"] * 2, stages=stages)
    names = []
    for accuracies in (WRONG, WRONG, WRONG, MIXED, MIXED, MIXED, MIXED):
        run_epoch(curriculum, dict.fromkeys(range(2), accuracies), 2)
        names.append(curriculum.stage)
    assert names == ["one", "two", "two", "two", "two", "three", "three"]


def test_removing_what_is_solved_does_not_look_like_a_loss_of_accuracy() -> None:
    stages = [
        Stage(name="one", sources=("a",), until_plateau=Plateau(epochs=1, min_gain=0.1)),
        Stage(name="two", sources=("a",)),
    ]
    curriculum = Curriculum(sources=["a"] * 4, stages=stages, resampling=Resampling())
    run_epoch(curriculum, {0: RIGHT, 1: RIGHT, 2: WRONG, 3: WRONG}, 4)  # 2 of 4
    run_epoch(curriculum, {2: RIGHT, 3: WRONG}, 2)  # 3 of 4, though only half of those asked
    assert (curriculum.epochs_ended, curriculum.stage) == (2, "one")


def test_taking_back_what_was_solved_does_not_look_like_a_loss_of_accuracy() -> None:
    stages = [
        Stage(name="one", sources=("a",), until_plateau=Plateau(epochs=1, min_gain=0.1)),
        Stage(name="two", sources=("a",)),
    ]
    curriculum = Curriculum(sources=["a"] * 4, stages=stages, resampling=Resampling(readmit_after=1))
    run_epoch(curriculum, {0: RIGHT, 1: RIGHT, 2: WRONG, 3: WRONG}, 4)  # 2 of 4
    events = run_epoch(curriculum, {2: RIGHT, 3: WRONG}, 2)  # 3 of 4; 0 and 1 come back with its end
    assert isinstance(events[0], EpochEnded)
    assert (events[0].readmitted, curriculum.stage) == ((0, 1), "one")


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([Stage(name="x", sources=("maths",))], r"stages\[0\]\.sources=maths.*did you mean math\?"),
        ([Stage(name="x", sources=())], r"names no data source"),
        ([Stage(name="x", sources=("math",)), Stage(name="y", sources=("math",))], "x never|never ends, so stage y"),
        ([Stage(name="x", sources=("math",), until_step=1), Stage(name="x", sources=("math",))], "used twice"),
    ],
)
def test_stages_that_cannot_work_are_refused(stages: list[Stage], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Curriculum(sources=["math", "code"], stages=stages)


def test_pools_that_would_be_empty_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train_files"):
        Curriculum(sources=[])
    with pytest.raises(ConfigError, match=r"pool_floor=0"):
        CurriculumConfig(pool_floor=0)
    with pytest.raises(ConfigError, match=r"pool_floor=3.*has only 2 prompts"):
        Curriculum(sources=["a"] * 2, resampling=Resampling(floor=3))
    with pytest.raises(ConfigError, match=r"readmit_after_epochs=0"):
        CurriculumConfig(readmit_after_epochs=0)


def test_a_state_of_other_data_stages_or_version_is_refused() -> None:
    state = Curriculum(sources=["math", "code"], stages=STAGES, dataset="abc").state()
    with pytest.raises(ConfigError, match=r"data\.train_files.*'abc'"):
        Curriculum(sources=["math", "code"], stages=STAGES, dataset="xyz").restore(state)
    with pytest.raises(ConfigError, match=r"data\.train_files"):
        Curriculum(sources=["math", "code", "code"], stages=STAGES, dataset="abc").restore(state)
    with pytest.raises(ConfigError, match=r"stages"):
        Curriculum(sources=["math", "code"], dataset="abc").restore(state)
    with pytest.raises(ConfigError, match=r"resume_mode.*version: 99"):
        Curriculum(sources=["math", "code"], stages=STAGES, dataset="abc").restore(state | {"version": 99})


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.sampled_from(["draw", "finish", "fail", "step"]), min_size=60, max_size=120),
    st.integers(0, 59),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_a_restored_curriculum_goes_on_as_if_nothing_had_happened(
    operations: list[str], crash: int, rng: object, resample: bool
) -> None:
    """Also: within an epoch, no prompt is drawn twice unless it failed in between."""

    def make() -> Curriculum:
        return Curriculum(
            sources=["math", "code"] * 4,
            stages=[
                Stage(name="math", sources=("math",), until_step=2, until_epoch=2),
                Stage(name="math+code", sources=("math", "code")),
            ],
            resampling=Resampling(floor=2, readmit_after=3) if resample else None,
        )

    curriculum, restored = make(), None
    in_flight: deque[Draw] = deque()
    times: Counter[Draw] = Counter()
    failures: Counter[Draw] = Counter()
    step = 0
    for number, operation in enumerate(operations):
        if number == crash:
            restored = make()
            restored.restore(json.loads(json.dumps(curriculum.state())))
        both = [curriculum, *([restored] if restored else [])]
        if operation == "draw" or (operation in ("finish", "fail") and not in_flight):
            (draw,) = {one.draw() for one in both}
            assert draw not in in_flight
            times[draw] += 1
            assert times[draw] <= 1 + failures[draw] <= 2
            in_flight.append(draw)
        elif operation == "step":
            step += 1
            assert len({str(one.step_ended(step)) for one in both}) == 1
        else:
            in_flight.rotate(rng.randrange(len(in_flight)))  # type: ignore[attr-defined]
            draw = in_flight.popleft()
            accuracies = rng.choice([RIGHT, MIXED, WRONG])  # type: ignore[attr-defined]
            if operation == "finish":
                assert len({str(one.finish(draw, accuracies)) for one in both}) == 1
            else:
                failures[draw] += 1
                assert len({str(one.fail(draw)) for one in both}) == 1
        assert len({json.dumps(one.state()) for one in both}) == 1
        assert curriculum.pool_size >= 2
