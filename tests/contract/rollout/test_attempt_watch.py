"""What a rollout worker knows of attempts that fail or hang, and how the trainer hears of it."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from seamless_verl.agents.contract import RewardRefused
from seamless_verl.observe.failures import AttemptNews, HangingAttempt
from seamless_verl.verl_adapter.rollout import attempt_watch
from seamless_verl.verl_adapter.rollout.attempt_watch import (
    LoopWatch,
    attempt_log,
    places_of_threads,
    task_name,
    with_blocked,
)

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def worker() -> Any:
    """A rollout worker that was not started."""
    from seamless_verl.verl_adapter.dataloader.rollout_workers import NotifyingWorker

    return object.__new__(NotifyingWorker)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), "0.5", None], ids=str)
async def test_a_score_that_is_no_finite_number_fails_its_attempt(
    monkeypatch: pytest.MonkeyPatch, worker: Any, score: Any
) -> None:
    async def scored(self: Any, outputs: list[Any], kwargs: Any) -> None:
        outputs[-1].reward_score = score

    monkeypatch.setattr(type(worker).__mro__[1], "_compute_score", scored)
    worker.reward_loop_worker_handles = [object()]
    with pytest.raises(RewardRefused, match="no finite number"):
        await worker._compute_score([SimpleNamespace(reward_score=None)], kwargs={})


@pytest.mark.parametrize("validates", [True, False])
async def test_what_a_reward_calls_reward_is_left_out_where_verl_would_take_it_for_a_score(
    monkeypatch: pytest.MonkeyPatch, worker: Any, validates: bool
) -> None:
    async def scored(self: Any, outputs: list[Any], kwargs: Any) -> None:
        outputs[-1].reward_score = 0.5
        outputs[-1].extra_fields["reward_extra_info"] = {"score": 0.5, "reward": 7.0}

    monkeypatch.setattr(type(worker).__mro__[1], "_compute_score", scored)
    worker.reward_loop_worker_handles = [object()]
    output = SimpleNamespace(reward_score=None, extra_fields={})
    with attempt_log.attempt("val/1", validation=validates, where=tuple):
        await worker._compute_score([output], kwargs={})
    assert ("reward" in output.extra_fields["reward_extra_info"]) is not validates


async def test_without_reward_workers_the_score_may_come_later(worker: Any) -> None:
    worker.reward_loop_worker_handles = None
    output = SimpleNamespace(reward_score=None)
    await worker._compute_score([output], kwargs={})
    assert output.reward_score is None


LATE = (HangingAttempt(task="train/1", seconds=99.0, reward=False, places=("agent.py:1 in act",)),)
NEWS = AttemptNews(ended=(0, 0), failed=(0, 0), failures=(), hanging=LATE)


def test_a_blocked_event_loop_is_found_with_the_line_that_blocks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watches: list[LoopWatch] = []
    ready, release = threading.Event(), threading.Event()

    async def block() -> None:
        watches.append(LoopWatch())
        ready.set()
        release.wait(30)

    thread = threading.Thread(target=lambda: asyncio.run(block()))
    thread.start()
    try:
        assert ready.wait(10)
        assert with_blocked(NEWS, watches[0]) is NEWS, "it was not asked before"
        soon = with_blocked(NEWS, watches[0])
        assert (soon.blocked, soon.hanging) == (None, ()), "too early to tell, but attempts are late for its sake"
        monkeypatch.setattr(attempt_watch, "_BLOCKED_S", 0.0)
        found = with_blocked(NEWS, watches[0]).blocked
        assert found is not None
        assert found[1][-1].endswith("in block: release.wait(30)")
    finally:
        release.set()
        thread.join()


async def test_an_event_loop_that_turns_is_not_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_watch, "_BLOCKED_S", 0.0)
    watch = LoopWatch()
    for _ in range(3):
        assert with_blocked(NEWS, watch) is NEWS
        await asyncio.sleep(0)  # it answers


def test_a_thread_in_the_users_code_is_found_beside_those_that_are_not() -> None:
    release = threading.Event()
    thread = threading.Thread(target=lambda: release.wait(30))
    thread.start()
    try:
        while not (found := places_of_threads()):
            time.sleep(0)
        assert any("release.wait(30)" in place for place in found)
    finally:
        release.set()
        thread.join()


def test_a_validation_of_which_nothing_is_left_ends_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    from seamless_verl.verl_adapter.dataloader.woken_buffer import RolloutFailed, WokenReplayBuffer

    empty = KVBatchMeta(partition_id="val", keys=[], tags=[])
    monkeypatch.setattr(ReplayBuffer, "_materialize_batch", lambda *_: empty)
    buffer = object.__new__(WokenReplayBuffer)
    buffer.desk = attempt_watch.AttemptDesk([], print)
    with pytest.raises(RolloutFailed, match="no rollout of the validation can be used; why is in the logs"):
        buffer._materialize_batch("val", [], {})


def test_a_task_is_called_what_the_data_calls_it() -> None:
    assert task_name({"extra_info": {"split": "train", "index": 7}}) == "train/7"
    assert task_name({"index": 7}) == "/7"
