"""Our port of verl's lending rule decides as the installed verl does, step by step, on the same inputs.

verl's trainer is built without its workers, as its own tests do; its clock is ours, and its switches cost what we say.
"""

from __future__ import annotations

import json
import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seamless_verl.scheduling import commands as cm
from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.commands import Verb
from seamless_verl.scheduling.scheduler import Scheduler
from seamless_verl.scheduling.slices import Gpu, Slice, SliceId, SliceState, Tag
from seamless_verl.scheduling.verl_gate import GateConfig, GateRule, VerlGate

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

BATCH, MINI = 64, 16


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Buffer:
    """Says how many groups are ready; waiting for more takes time."""

    poll_interval = 2.0

    def __init__(self) -> None:
        self.ready = 0
        self.waited_for: list[int] = []

    def get_sampleable_count(self, global_steps: int, partition_id: str) -> int:
        return self.ready

    def wait_for_sampleable(self, global_steps: int, partition_id: str, target: int) -> tuple[set[str], dict[str, Any]]:
        self.waited_for.append(target)
        self.ready = max(self.ready, target)
        return set(), {}


class Weights:
    """verl's checkpoint manager, of which only the time matters here."""

    def __init__(self, clock: Clock, cost: Any) -> None:
        self._clock, self._cost = clock, cost

    def update_weights(self, global_steps: int) -> dict[str, Any]:
        self._clock.now += self._cost.wake_s
        return {}

    def resume_generation_replicas(self) -> None:
        pass

    def abort_replicas(self, **kwargs: Any) -> None:
        self._clock.now += self._cost.back_s

    def sleep_replicas(self) -> None:
        pass


def verl_trainer(monkeypatch: pytest.MonkeyPatch, clock: Clock, cost: Any, config: GateConfig, nodes: int) -> Any:
    import verl.trainer.ppo.v1.trainer_separate_async as module
    from omegaconf import OmegaConf
    from verl.trainer.config import HybridRolloutSwitchConfig

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    trainer = object.__new__(module.PPOTrainerSeparateAsync)
    rollout = {"nnodes": nodes, "n_gpus_per_node": 8}
    trainer.config = OmegaConf.create(
        {
            "data": {"train_batch_size": BATCH},
            "trainer": {"nnodes": 2, "n_gpus_per_node": 8},
            "actor_rollout_ref": {"rollout": rollout},
        }
    )
    trainer.parameter_sync_step = BATCH // MINI
    trainer.global_steps, trainer.total_training_steps = 1, 10**6
    trainer.timing_raw = {}
    trainer.prev_step_profile = False
    trainer.current_mode = module.HybridEngineMode.ROLLOUT
    trainer.replay_buffer = Buffer()
    trainer.checkpoint_manager = Weights(clock, cost)
    trainer.standalone_checkpoint_manager = Weights(clock, SimpleNamespace(wake_s=0.0, back_s=0.0))
    for name in ("add_replicas_to_balancer", "remove_replicas_from_balancer", "clear_sticky_cache"):
        setattr(trainer, name, lambda: None)
    trainer.hybrid_rollout_config = HybridRolloutSwitchConfig(
        enable_switch=True,
        switch_threshold_ratio=config.switch_threshold_ratio,
        adaptive_switch_threshold=config.adaptive_switch_threshold,
        switch_threshold_step_up=config.switch_threshold_step_up,
        switch_threshold_step_down=config.switch_threshold_step_down,
        switch_threshold_release_steps=config.switch_threshold_release_steps,
        switch_cost_window_size=config.switch_cost_window_size,
    )
    trainer._init_hybrid_rollout_state()
    return trainer


class Ours:
    """The scheduler under `VerlGate`, with one slice of 16 GPUs to lend and one standing."""

    def __init__(self, config: GateConfig, nodes: int) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(VerlGate(batch=BATCH, mini_batch=MINI, config=config))
        self.commands: list[cm.Command] = []
        self.tell(ev.WeightsPublished(at=0.0, version=0))
        for name, tags, gpus in (("a", frozenset(Tag), 16), ("b", frozenset({Tag.ROLLOUT}), 8 * nodes)):
            slice_ = Slice(
                id=SliceId(name), pool=name, gpus=tuple(Gpu(node=name, index=i) for i in range(gpus)), capabilities=tags
            )
            self.tell(ev.SliceAdded(at=0.0, slice=slice_, state=SliceState.ROLLOUT, version=0))

    def tell(self, event: ev.Event) -> list[cm.Command]:
        given = list(self.scheduler.handle(event))
        self.commands += given
        return given

    @property
    def lent(self) -> bool:
        return self.scheduler.cluster[SliceId("a")].lent

    def answer(self, commands: list[cm.Command], took: float) -> None:
        self.now += took
        for command in commands:
            if isinstance(command, (cm.LendSlice, cm.SyncWeights)):
                ready = ev.SliceReady(
                    at=self.now, slice=command.slice, command=command.command, version=command.version
                )
                self.tell(ready)
            elif isinstance(command, cm.DrainSlice):
                self.tell(ev.SliceDrained(at=self.now, slice=command.slice, command=command.command))


@pytest.mark.parametrize("seed", range(30))
def test_the_same_decisions_as_the_installed_verl(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    config = GateConfig(
        switch_threshold_ratio=rng.choice([0.1, 0.25, 0.4, 0.7, 1.0]),
        adaptive_switch_threshold=rng.random() < 0.8,
        switch_threshold_release_steps=rng.choice([1, 2, 3]),
        switch_cost_window_size=rng.choice([1, 3]),
    )
    nodes = rng.choice([1, 2, 4])
    clock, cost = Clock(), SimpleNamespace(wake_s=0.0, back_s=0.0)
    theirs = verl_trainer(monkeypatch, clock, cost, config, nodes)
    ours = Ours(config, nodes)
    lent_steps = 0
    for step in range(1, 40):
        cost.wake_s, cost.back_s = rng.uniform(0.1, 30), rng.uniform(0.1, 10)
        theirs.global_steps = step
        ready = rng.choice([0, rng.randrange(MINI), rng.randrange(BATCH + 1)])

        # the step begins; the trainer wants its GPUs
        theirs.replay_buffer.ready = ready
        theirs.replay_buffer.waited_for.clear()
        theirs.on_step_begin()
        theirs._wait_for_sampleable_and_switch()
        threshold = theirs._step_threshold

        assert ours.lent == bool(threshold), step  # verl computes one only when it is lent
        ours.tell(ev.GroupsReady(at=ours.now, ready=ready, in_flight=2 * BATCH))
        request = f"step-{step}"
        asked = ev.AcquireRequested(at=ours.now, request=request, tag=Tag.TRAIN, count=1, minimum=MINI, batch=BATCH)
        given = ours.tell(asked)
        if ours.lent:
            assert theirs.replay_buffer.waited_for == [threshold], step
            given = ours.tell(ev.GroupsReady(at=ours.now, ready=threshold - 1, in_flight=2 * BATCH))
            assert not any(isinstance(c, cm.DrainSlice) for c in given), step
            given = ours.tell(ev.GroupsReady(at=ours.now, ready=threshold, in_flight=2 * BATCH))
        elif threshold:
            assert theirs.replay_buffer.waited_for == [], step
        ours.answer(given, cost.back_s)
        ours.tell(ev.GroupsReady(at=ours.now, ready=max(ready, MINI), in_flight=2 * BATCH))
        assert any(isinstance(c, cm.GrantAcquire) and c.request == request for c in ours.commands)

        # the local updates wait for groups, or not
        waited_groups = 0
        waited_s = 0.0
        for _ in range(BATCH // MINI):
            theirs.replay_buffer.ready = rng.choice([0, 7, MINI, 2 * MINI])
            waited_groups += max(0, MINI - theirs.replay_buffer.ready)
            theirs.on_sample_begin()
            pause = rng.choice([0.0, rng.uniform(0, 8)])
            clock.now += pause
            waited_s += pause
            theirs.on_sample_end()

        # the step ends: lend or not
        left = rng.choice([0, rng.randrange(MINI), rng.randrange(BATCH + 1)])
        last = step == 39
        theirs.replay_buffer.ready = left
        theirs.total_training_steps = step if last else 10**6
        theirs.on_step_end()
        shown = theirs._pending_sync_metrics

        ours.now += 100.0
        ours.tell(ev.GroupsReady(at=ours.now, ready=left, in_flight=2 * BATCH))
        ended = ev.StepEnded(at=ours.now, step=step, waited_s=waited_s, waited_groups=waited_groups, last=last)
        ours.tell(ended)
        given = ours.tell(ev.Released(at=ours.now, request=request))
        lend = any(isinstance(c, cm.LendSlice) for c in given)
        assert lend == bool(shown["separate_async/decision/should_switch_to_rollout"]), step
        # a decision to go on holding is recorded once, not at every step
        assert all((c.decision.verb is Verb.LEND) == lend for c in given if isinstance(c, cm.RecordDecision)), step
        lent_steps += lend
        ours.answer(given, cost.wake_s)
        theirs._pending_sync_metrics = {}
    assert 0 < lent_steps < 39  # both answers occurred


# Facts stated by verl's own unit tests of the switch (tests/trainer/ppo/v1/test_separate_async_step_switch_on_cpu.py).


@pytest.mark.parametrize(("ratio", "updates", "expected"), [(0.5, 4, 32), (1.0, 4, 64), (0.01, 4, 16), (0.25, 1, 64)])
def test_threshold_between_one_mini_batch_and_the_batch(ratio: float, updates: int, expected: int) -> None:
    config = GateConfig(switch_threshold_ratio=ratio)
    assert GateRule(config, batch=64, mini_batch=64 // updates, scaling=2.0).threshold() == expected


def a_rule(**changes: Any) -> GateRule:
    config = GateConfig(switch_threshold_ratio=0.25, adaptive_switch_threshold=False, **changes)
    return GateRule(config, batch=64, mini_batch=16, scaling=2.0)


@pytest.mark.parametrize(("per_sample_s", "lends"), [(2.0, False), (16.0, True)])
def test_one_missing_group_against_a_switch_of_seven_seconds(per_sample_s: float, lends: bool) -> None:
    rule = a_rule()
    rule.step_ended(per_sample_s, 1)
    rule.to_rollout.append(3.0)
    rule.to_train.append(4.0)
    assert rule.cost_s() == 7.0
    assert rule.benefit_s(15) == per_sample_s / 2
    assert rule.should_lend(15, last_step=False) is lends


def test_no_history_lends_what_is_missing_and_never_after_the_last_step() -> None:
    assert a_rule().should_lend(0, last_step=False)
    assert not a_rule().should_lend(16, last_step=False)
    assert not a_rule().should_lend(0, last_step=True)


def test_the_cost_window_forgets_a_cold_start() -> None:
    rule = a_rule()
    rule.to_rollout.extend([100.0, 2.0, 4.0, 6.0])
    rule.to_train.extend([50.0, 1.0, 3.0, 5.0])
    assert rule.cost_s() == pytest.approx(7.0)


def test_the_threshold_rises_after_idle_steps() -> None:
    rule = GateRule(GateConfig(switch_threshold_ratio=0.5, poll_interval_s=1.0), 64, 16, 2.0)
    ratios = []
    for _ in range(3):
        rule.step_ended(2.0, 0)
        ratios.append(rule.ratio)
    assert ratios == pytest.approx([0.5, 0.55, 0.6])


def test_a_recorded_run_of_verl_is_decided_alike() -> None:
    """What verl 0.9.1 put into its rule in a whole run, and what came out (`golden/gate_trace.py` says how)."""
    steps = [json.loads(line) for line in (Path(__file__).parent / "golden" / "verl_gate.jsonl").open()]
    rule = GateRule(GateConfig(), batch=8, mini_batch=4, scaling=2.0)
    for step in steps:
        assert rule.ratio == step["ratio"], step
        rule.to_rollout, rule.to_train = deque(step["to_rollout"]), deque(step["to_train"])
        rule.step_ended(step["waited_s"], step["waited_groups"])
        assert max(0, rule.threshold() - step["ready"]) == step["remaining"], step
        assert rule.cost_s() == step["cost_s"], step
        if step["per_group_s"] is not None:
            assert rule.waited_s / rule.waited_groups == step["per_group_s"], step
        assert rule.should_lend(step["ready"], last_step=step["last"]) is step["lends"], step
    held = [step for step in steps if not step["lends"] and not step["last"]]
    assert {step["remaining"] > 0 for step in held} == {True, False}  # not worth it; nothing missing
    assert len(steps) == 24
    assert sum(step["lends"] for step in steps) == 14
