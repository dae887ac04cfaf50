"""verl's own paths while replicas have unlike weights: a validation, and a run that goes on from a checkpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.contract.dataloader.test_replaced_workers import prompts
from tests.contract.weights.test_rolling_weights import FakeRay
from tests.contract.weights.unlike_world import SOON_S, World
from tests.fakes import ScriptedTransferQueue

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., World]]:
    import transfer_queue
    import verl.trainer.ppo.v1  # noqa: F401  (brings our trainer in; to begin with a module of ours is a cycle)

    from seamless_verl.verl_adapter.dataloader import replaced_workers
    from seamless_verl.verl_adapter.rollout import attempt_watch
    from seamless_verl.verl_adapter.weights import rolling_weights

    async def put(**_: object) -> None:
        """A worker's word of a prompt, which nobody here reads."""

    queue = ScriptedTransferQueue().install(monkeypatch)
    monkeypatch.setattr(transfer_queue, "async_kv_put", put)
    for module in (replaced_workers, attempt_watch, rolling_weights):
        monkeypatch.setattr(module, "ray", FakeRay())
    monkeypatch.setattr(rolling_weights, "_ANSWER_S", SOON_S)
    made: list[World] = []

    def begin(policy: str = "least_requests") -> World:
        made.append(World(monkeypatch, queue, tmp_path / "published", policy))
        return made[-1]

    yield begin
    for world in made:
        world.weights.close()


@contextmanager
def reserved(**floors: int) -> Iterator[None]:
    from seamless_verl.verl_adapter.rollout.request_log import request_log

    request_log.reserve(floors)
    yield
    for group in floors:
        request_log.release(group)


@pytest.mark.parametrize("policy", ["least_requests", "cache_aware"])
async def test_a_validation_waits_for_one_pull_and_training_goes_on_beside_it(
    life: Callable[..., World], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Both replicas lag, and are busy enough to go on so: nobody has the weights that verl validates."""
    world = life(policy)
    await asyncio.to_thread(world.weights.update_weights, 0)
    await asyncio.to_thread(world.step)
    with reserved(a=0, b=0, c=0, d=0):
        training = [world.train(group, turns=2, prompt=number) for number, group in enumerate("abcd")]
        await world.until(lambda: [len(each.running) for each in world.replicas] == [2, 2])
        await asyncio.to_thread(world.weights.publish, 1)
        await world.looks_again()
        assert [each.taken for each in world.replicas] == [[0], [0]], "the validation would find the newest by itself"
        for each in world.replicas:
            each.asked.clear()
            each.may_load.clear()
        trainer = world.trainer(monkeypatch, world.validate)
        fit = asyncio.ensure_future(asyncio.to_thread(trainer.fit, world.manager))
        await world.until(lambda: any(each.asked.is_set() for each in world.replicas))
        await world.looks_again()
        puller, other = sorted(world.replicas, key=lambda each: not each.asked.is_set())
        assert not other.asked.is_set()
        assert world.answers == {}, "nothing is begun by older weights"
        goes_on = min(other.running)
        other.running[goes_on].set()  # the next turn of its session is served meanwhile
        await world.until(lambda: len(world.answers) == 1 and goes_on in other.running)
        assert not fit.done()
        puller.may_load.set()
        await asyncio.wait_for(fit, SOON_S)
        of_training = {f"{group}/0" for group in "abcd"}
        validated = [told for name, all_told in world.answers.items() if name not in of_training for told in all_told]
        assert validated == [(1, 1)] * 4
        assert (puller.taken, other.taken) == ([0, 1], [0]), "one pull is all that it waited for"
        assert not puller.aborted
        assert not other.aborted
        while not all(call.done() for call in training):
            for each in world.replicas:
                for ends in each.running.values():
                    ends.set()
            await asyncio.sleep(0.001)
    assert {group: len(world.answers[f"{group}/0"]) for group in "abcd"} == dict.fromkeys("abcd", 2)


async def test_where_one_replica_has_the_newest_weights_a_validation_goes_there_at_once(
    life: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = life()
    await asyncio.to_thread(world.weights.update_weights, 0)
    await asyncio.to_thread(world.step)
    with reserved(a=0):
        training = world.train("a", turns=1, prompt=0)
        await world.until(lambda: any(each.running for each in world.replicas))
        busy, idle = sorted(world.replicas, key=lambda each: not each.running)
        await asyncio.to_thread(world.weights.publish, 1)
        await world.until(lambda: idle.taken == [0, 1])
        busy.may_load.clear()
        trainer = world.trainer(monkeypatch, world.validate)
        await asyncio.wait_for(asyncio.to_thread(trainer.fit, world.manager), SOON_S)
        assert list(world.answers.values()) == [[(1, 1)]] * 4
        assert busy.taken == [0]
        next(iter(busy.running.values())).set()
        await asyncio.wait_for(training, SOON_S)
    assert world.answers["a/0"] == [(0, 0)]


async def test_from_a_checkpoint_taken_while_a_replica_was_behind_all_begin_with_its_version_and_floors_hold(
    life: Callable[..., World], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run was killed two publications later: what lay in shared memory then is newer than what it goes on from."""
    first = life()
    await asyncio.to_thread(first.weights.update_weights, 0)
    first.rows.buffer.follow_versions(first.balancer.oldest_version, max_lag=2)
    with reserved(a=0, b=0):
        behind = [first.train("a", 1, prompt=0), first.train("b", 1, prompt=1)]
        await first.until(lambda: [len(each.running) for each in first.replicas] == [1, 1])
        first.replicas[1].may_load.clear()
        await asyncio.to_thread(first.step)
        await asyncio.to_thread(first.weights.publish, 1)
        next(iter(first.replicas[0].running.values())).set()  # it idles, and takes them
        await first.until(lambda: first.replicas[0].taken == [0, 1])
        await asyncio.to_thread(first.step)
        assert first.balancer.oldest_version() == 0
        floors = {uid: first.rows.buffer.floor_of(uid) for uid in first.rows.running}
        assert set(floors.values()) == {0, 1}, "of both versions that serve"
        first.rows.buffer.save(tmp_path / "global_step_2")
        tags = json.loads(json.dumps(first.rows.queue.tags))
        for version in (2, 3):
            await asyncio.to_thread(first.weights.publish, version)
        first.replicas[1].may_load.set()
        next(iter(first.replicas[1].running.values())).set()
        await asyncio.wait_for(asyncio.gather(*behind), SOON_S)
    first.weights._open = False  # killed: nobody cleans up

    again = life()
    again.rows.queue.tags = tags
    assert again.rows.buffer.load(tmp_path / "global_step_2", 2)
    again.rows.step, again.rows.version = 3, 2
    again.rows.submitted = list(first.rows.submitted)
    await asyncio.to_thread(again.weights.update_weights, 2)  # verl's `on_init_end`
    assert [each.taken for each in again.replicas] == [[2], [2]], "not what an earlier life had published"
    assert {uid: again.rows.buffer.floor_of(uid) for uid in floors} == floors
    trainer = again.trainer(monkeypatch, lambda trainer: trainer.agent_loop_manager.generate_sequences(prompts(floors)))
    weights = again.weights
    trainer.standalone_checkpoint_manager = SimpleNamespace(
        close=lambda: None, oldest_version=weights.oldest_version, raise_broken=weights.raise_broken
    )
    await asyncio.wait_for(asyncio.to_thread(trainer.fit, again.manager), SOON_S)
    await again.until(lambda: len(again.answers) == 2 * len(floors))
    assert {told for all_told in again.answers.values() for told in all_told} == {(2, 2)}
    again.rows.running = {uid: again.answers[f"{uid}/0"][0][0] for uid in floors}
    await asyncio.to_thread(again.step)  # a restored group that began with other weights than it may is refused here
    await asyncio.to_thread(weights.update_weights, 3)
    await again.until(lambda: [each.taken for each in again.replicas] == [[2, 3], [2, 3]])
    await asyncio.to_thread(weights.close)
