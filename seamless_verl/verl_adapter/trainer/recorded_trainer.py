"""The trainer's side of the flight recorder: phases, slices, weights and progress of verl's ``separate_async``.

verl's trainer offers no hook around its phases, so each is overridden, recorded and passed on. The same events go
into a ledger, from which the idle share on the step line is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import verl.trainer.ppo.v1.trainer_separate_async as separate_async
from omegaconf import DictConfig

from seamless_verl.config import SeamlessConfig
from seamless_verl.observe.flight import (
    BatchProgress,
    FlightEvent,
    Phase,
    PhaseBegan,
    PhaseEnded,
    RunEnded,
    RunStarted,
    SliceAdded,
    SliceMoved,
    SliceRemoved,
    SliceState,
    StepBegan,
    StepEnded,
    WeightsPublished,
)
from seamless_verl.observe.time_ledger import Ledger, SliceSeconds
from seamless_verl.verl_adapter.rollout.request_log import recorder_of_process
from seamless_verl.verl_adapter.trainer.memory_flight import MemoryFlight

TRAINER, ROLLOUT = "trainer", "rollout"

_Method = TypeVar("_Method", bound=Callable[..., Any])


class TrainerFlight:
    """Events of the trainer's process, into the recording and into the live ledger of the trainer's slices."""

    def __init__(self, run_dir: str | None) -> None:
        self.recorder = recorder_of_process(run_dir, "trainer")
        self._step = 0
        self._progress = (0, 0)
        self._ledger = Ledger()
        self._trainers: list[SliceAdded] = []
        self._rollouts: list[SliceAdded] = []
        self._places: dict[str, SliceAdded] = {}  # by address; a slice that was restarted has had several
        # Whose death is behind an error; set by whoever watches over the run.
        self.blame: Callable[[BaseException], str | None] = lambda error: None
        self._memory = MemoryFlight()
        self._lent: set[str] = set()  # followed slices that are in the router's books, not in ours

    def begin(self, start: RunStarted, trainers: list[SliceAdded], rollouts: list[SliceAdded]) -> None:
        self._trainers, self._rollouts = trainers, rollouts
        self._places |= {added.address: added for added in (*trainers, *rollouts)}
        for event in (start, *trainers, *rollouts):
            self.recorder.record(event)
        self._memory.begin(start.at)
        for added in (*trainers, *rollouts):
            self._memory.add(added)
        for added in trainers:  # while they roll out, their seconds are counted where their requests pass
            if added.state is SliceState.TRAINING:
                self._ledger.handle(added)

    def follow(self, event: FlightEvent) -> None:
        """Record what a scheduler says; its slices are those of the step line, too.

        A slice that can train is off the router, and in the trainer's own books, from the time it drains until it is
        lent again.
        """
        self.recorder.record(event)
        if isinstance(event, SliceAdded):
            self._memory.add(event)
            pool = TRAINER if "train" in event.capabilities else ROLLOUT
            known = self._trainers if pool == TRAINER else self._rollouts
            known[:] = [other for other in known if other.slice != event.slice] + [replace(event, pool=pool)]
            self._places[event.address] = known[-1]
            if pool == TRAINER and event.state is SliceState.ROLLOUT:
                self._lent.add(event.slice)
            elif pool == TRAINER:
                self._ledger.handle(known[-1])
        elif isinstance(event, SliceMoved):
            self._follow_move(event)

    def _follow_move(self, event: SliceMoved) -> None:
        for added in self._trainers:
            if added.slice != event.slice:
                continue
            if event.state is SliceState.WAKING:
                self._lent.add(event.slice)
                self._ledger.handle(SliceRemoved(at=event.at, slice=event.slice))
            elif event.slice not in self._lent:
                self._ledger.handle(event)
            elif event.state not in (SliceState.ROLLOUT, SliceState.SYNCING):
                self._lent.discard(event.slice)
                self._ledger.handle(replace(added, at=event.at, state=event.state))

    def follow_memory(self) -> None:
        """Record what has moved on the devices since the last call, with the times at which it did."""
        for event in self._memory.news(self.recorder.now()):
            self.recorder.record(event)

    def end(self, outcome: str) -> None:
        self.follow_memory()
        self._note(RunEnded(at=self.recorder.now(), outcome=outcome))
        self.recorder.close()

    def broke(self, error: BaseException) -> None:
        self.follow_memory()
        story = self.blame(error)
        lines = (story or str(error)).strip().splitlines()  # the end of a remote traceback is what tells
        outcome = "RunBroken" if story else type(error).__name__
        self._note(RunEnded(at=self.recorder.now(), outcome=outcome, detail=lines[-1][:200] if lines else ""))
        self.recorder.close()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """An error leaves the phase open: the recording then shows what the run died in."""
        self.began(phase)
        yield
        self.ended(phase)

    def began(self, phase: Phase) -> None:
        self.follow_memory()
        self._note(PhaseBegan(at=self.recorder.now(), phase=phase, step=self._step))

    def ended(self, phase: Phase) -> None:
        self._note(PhaseEnded(at=self.recorder.now(), phase=phase, step=self._step))

    def step_began(self, step: int) -> None:
        self._step = step
        self._note(StepBegan(at=self.recorder.now(), step=step))

    def step_ended(self) -> None:
        self.follow_memory()
        self._note(StepEnded(at=self.recorder.now(), step=self._step))

    def progress(self, ready: int, needed: int) -> None:
        """Groups of the batch that the trainer waits for; written when they change."""
        if (ready, needed) != self._progress:
            self._progress = ready, needed
            self._note(BatchProgress(at=self.recorder.now(), ready=ready, needed=needed))

    @contextmanager
    def publishing(self, version: int, *, lent: bool) -> Iterator[None]:
        """Weights go to the rollout slices (and to lent trainers), which generate nothing meanwhile."""
        receivers = [*self._rollouts, *(self._trainers if lent else [])]
        self._move(receivers, SliceState.SYNCING)
        with self.phase(Phase.SYNC_WEIGHTS):
            yield
        self._move(receivers, SliceState.ROLLOUT)
        self._note(WeightsPublished(at=self.recorder.now(), version=version))

    def lent(self) -> None:
        """The trainer's slices roll out from now on."""
        self._move(self._trainers, SliceState.ROLLOUT)
        for added in self._trainers:
            self._ledger.handle(SliceRemoved(at=self.recorder.now(), slice=added.slice))

    def reclaimed(self) -> None:
        self._move(self._trainers, SliceState.TRAINING)
        for added in self._trainers:
            self._ledger.handle(replace(added, at=self.recorder.now(), state=SliceState.TRAINING))

    def books(self, of_servers: Iterable[SliceSeconds]) -> tuple[SliceSeconds, ...]:
        """Up to now, of the whole run: the trainer's own and those of the load balancer, which knows addresses only."""
        known = [(self._places[books.slice], books) for books in of_servers if books.slice in self._places]
        of_slices = [replace(books, slice=it.slice, pool=it.pool, devices=it.devices) for it, books in known]
        return (*self._ledger.books(self.recorder.now()), *of_slices)

    def _move(self, slices: Iterable[SliceAdded], state: SliceState) -> None:
        tag = "train" if state is SliceState.TRAINING else "rollout"
        for added in slices:
            self.recorder.record(SliceMoved(at=self.recorder.now(), slice=added.slice, state=state, tag=tag))

    def _note(self, event: FlightEvent) -> None:
        self.recorder.record(event)
        self._ledger.handle(event)


def _in_phase(phase: Phase) -> Callable[[_Method], _Method]:
    def wrap(method: Any) -> Any:
        @functools.wraps(method)
        def recorded(self: RecordedTrainer, *args: Any, **kwargs: Any) -> Any:
            with self.flight.phase(phase):
                return method(self, *args, **kwargs)

        return recorded

    return wrap


_BASE = separate_async.PPOTrainerSeparateAsync


class RecordedTrainer(_BASE):
    """verl's trainer, recorded; what it does is unchanged. `seamless` is set by the subclass before ``__init__``."""

    seamless: SeamlessConfig

    def __init__(self, config: DictConfig) -> None:
        self.flight = TrainerFlight(self.seamless.run_dir)
        super().__init__(config)

    _compute_reward_colocate = _in_phase(Phase.REWARD)(_BASE._compute_reward_colocate)
    _compute_old_log_prob = _in_phase(Phase.OLD_LOG_PROB)(_BASE._compute_old_log_prob)
    _compute_ref_log_prob = _in_phase(Phase.REF_LOG_PROB)(_BASE._compute_ref_log_prob)
    _compute_values = _in_phase(Phase.VALUES)(_BASE._compute_values)
    _compute_advantage = _in_phase(Phase.ADVANTAGE)(_BASE._compute_advantage)
    _update_critic = _in_phase(Phase.UPDATE_CRITIC)(_BASE._update_critic)
    _update_actor = _in_phase(Phase.UPDATE_ACTOR)(_BASE._update_actor)
    _save_checkpoint = _in_phase(Phase.CHECKPOINT)(_BASE._save_checkpoint)
    _validate = _in_phase(Phase.VALIDATE)(_BASE._validate)

    def fit(self, agent_loop_manager: Any) -> None:
        self._declare_slices()
        try:
            super().fit(agent_loop_manager)
        except BaseException as error:
            self.flight.broke(error)
            raise
        self.flight.end("finished")

    def _declare_slices(self) -> None:
        """The trainer's devices and every replica, in the state that initialization left them in."""
        rollout, trainer = self.config.actor_rollout_ref.rollout, self.config.trainer
        replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
        now = self.flight.recorder.now()
        if self._enable_hybrid_replicas:
            state = SliceState.ROLLOUT if self._is_lent() else SliceState.TRAINING
            trainers = [
                _slice(now, TRAINER, rank, replica, ("train", "rollout"), state, address)
                for rank, address in enumerate(self.llm_server_manager.server_addresses)
            ]
        else:
            devices = trainer.nnodes * trainer.n_gpus_per_node
            trainers = [_slice(now, TRAINER, 0, devices, ("train",), SliceState.TRAINING)]
        rollouts = [
            _slice(now, ROLLOUT, rank, replica, ("rollout",), SliceState.ROLLOUT, address)
            for rank, address in enumerate(self.standalone_server_manager.server_addresses)
        ]
        policy = "verl_gate" if self.hybrid_rollout_config.enable_switch else "disaggregated"
        self.flight.begin(self._run_started(now, policy), trainers, rollouts)

    def _run_started(self, at: float, policy: str) -> RunStarted:
        """``at`` is not after the slices': a recording is read in the order of time, and a run ends what was before."""
        return RunStarted(
            at=at,
            name=self.seamless.recipe or self.config.trainer.experiment_name,
            policy=policy,
            eta=self.seamless.staleness.eta,
            total_steps=self.total_training_steps,
        )

    def _is_lent(self) -> bool:
        return self.current_mode == separate_async.HybridEngineMode.ROLLOUT

    def on_step_begin(self) -> None:
        self.flight.step_began(self.global_steps)
        super().on_step_begin()

    def on_step_end(self) -> None:
        with self.flight.publishing(self.global_steps, lent=self._is_lent()):
            super().on_step_end()
        self.flight.step_ended()

    def on_sample_begin(self) -> None:
        self.flight.began(Phase.WAIT_FOR_BATCH)
        super().on_sample_begin()

    def on_sample_end(self) -> None:
        super().on_sample_end()
        self.flight.ended(Phase.WAIT_FOR_BATCH)

    def switch_to_rollout(self, **kwargs: Any) -> None:
        if self._enable_hybrid_replicas:  # without them verl calls it all the same, and nothing happens
            with self.flight.phase(Phase.SWITCH):
                super().switch_to_rollout(**kwargs)
            self.flight.lent()

    def switch_to_trainer(self) -> None:
        if self._enable_hybrid_replicas:
            with self.flight.phase(Phase.SWITCH):
                super().switch_to_trainer()
            self.flight.reclaimed()


def _slice(
    at: float, pool: str, rank: int, devices: int, capabilities: tuple[str, ...], state: SliceState, address: str = ""
) -> SliceAdded:
    return SliceAdded(
        at=at,
        slice=f"{pool}/{rank}",
        pool=pool,
        devices=int(devices),
        capabilities=capabilities,
        state=state,
        address=address,
    )
