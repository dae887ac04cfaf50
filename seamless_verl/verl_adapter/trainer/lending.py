"""The trainer's side of the scheduler: when it wants its GPUs, when it is done with them, and how it waits.

    step begins ─► admit prompts ─► acquire gang ──(lent slices generate)──► granted ─► mini-batch … ─► publish, release
                                         ▲                                       │
                                         └── release, acquire ◄── starves for the next mini-batch

Nothing here exists unless ``seamless.scheduler.policy`` is set; then verl's own switch is off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from omegaconf import DictConfig

from seamless_verl.config import SchedulerConfig
from seamless_verl.errors import SeamlessError
from seamless_verl.observe.flight import Phase
from seamless_verl.observe.scheduler_flight import RecordedScheduler
from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.declaration import policy_of
from seamless_verl.scheduling.scheduler import Scheduler
from seamless_verl.scheduling.slices import SERVING_SOON, Slice, SliceState, Tag
from seamless_verl.verl_adapter.dataloader.woken_buffer import RowBuffer
from seamless_verl.verl_adapter.rollout.request_reports import RequestReports
from seamless_verl.verl_adapter.slices.replica_slices import ReplicaSlices
from seamless_verl.verl_adapter.slices.slice_driver import SliceDriver
from seamless_verl.verl_adapter.trainer.trainer_flight import TrainerFlight
from seamless_verl.verl_adapter.weights.rolling_weights import RollingWeights
from seamless_verl.verl_adapter.weights.weight_checks import weight_checks_of

_LOOK_S = 10.0  # without any news, look again: a killed worker tells nobody
_LOOK_AT_RESTARTS_S = 1.0  # nobody rings when a replica is back, and the gang may wait for it
_PUBLISHED = 0  # verl's key for the weights that a step began with
_LIVE = -1  # beside verl's keys, which count mini-batches


class GangRefused(SeamlessError):
    """The scheduler says that the trainer can never have its GPUs, or that nobody is left to generate."""


class SavesWeights(Protocol):
    """What is called of the trainer's workers (verl's `DetachActorWorker`)."""

    def save_model_to_cpu(self, key: int) -> Any: ...

    def restore_model_from_cpu(self, key: int) -> Any: ...

    def clear_cpu_model(self, key: int) -> Any: ...


class PublishedWeights:
    """The weights that were published last, in the trainer's workers while they are lent.

    A token's version says which weights made it, so half-trained ones must not serve under the published number.

    Attributes:
        newer: the workers' own weights are newer; the published ones were saved when the step began.
    """

    def __init__(self, workers: SavesWeights) -> None:
        self.workers = workers
        self.newer = False

    def save(self) -> None:
        """Save what a step begins with; verl does so itself unless it bypasses old log-probs."""
        self.workers.save_model_to_cpu(_PUBLISHED)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, what was saved stands in for the newer weights."""
        if not self.newer:
            yield
            return
        self.workers.save_model_to_cpu(_LIVE)
        self.workers.restore_model_from_cpu(_PUBLISHED)
        try:
            yield
        finally:
            self.workers.restore_model_from_cpu(_LIVE)
            self.workers.clear_cpu_model(_LIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """One training step.

    Attributes:
        batch: prompts.
        mini_batch: prompts per update of the weights.
        rollouts: per prompt.
        saves: verl bypasses old log-probs, so nobody saves the weights that a step of several updates begins with.
    """

    batch: int
    mini_batch: int
    rollouts: int
    saves: bool


class Lending:
    """Called by the trainer at the edges of its steps, in order: `submitted`, `begin_step`, `acquire_gang`,
    `before_sample` per mini-batch, `close_batch`, `publish`.

    Args:
        driver: carries out what ``scheduler`` says.
        replicas: by slice, as ``driver`` knows them.
        rows: where groups that ended are found.
        step: the version that training starts from.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        driver: SliceDriver,
        replicas: ReplicaSlices,
        weights: PublishedWeights,
        rows: RowBuffer,
        flight: TrainerFlight,
        shape: StepShape,
        gang: int,
        step: int,
    ) -> None:
        self.driver = driver
        self.replicas = replicas
        self.weights = weights
        self.step = step
        self._scheduler = scheduler
        self._rows = rows
        self._flight = flight
        self._shape = shape
        self._gang = gang
        self._request = ""  # the grant that the trainer holds
        self._asked = 0
        self._starved_s = 0.0
        self._starved_groups = 0
        rows.attend(self._attend)

    def introduce(self, slices: Sequence[Slice]) -> None:
        """verl's initialization leaves all replicas awake and on the router; those that only train go off it."""
        train = [s for s in slices if Tag.TRAIN in s.capabilities]
        only_train = [s.id for s in train if not s.lendable]
        if only_train:
            self.replicas.unregister(only_train)
            self.replicas.interrupt(only_train)
        lent = [s.id for s in train if s.lendable]
        self.replicas.publish(self.step)
        self.replicas.check(lent, self.step)
        at, version = self.driver.now(), self.step
        self.driver.tell(ev.WeightsPublished(at=at, version=version))
        for slice_ in slices:
            serves = slice_.id not in only_train
            state = SliceState.ROLLOUT if serves else SliceState.IDLE
            self.driver.tell(ev.SliceAdded(at=at, slice=slice_, state=state, version=version if serves else None))

    # ---------------------------------------------------------------- prompts and requests

    def submitted(self, uids: Sequence[str]) -> None:
        event = ev.GroupsSubmitted(at=self.driver.now(), groups=tuple(uids), sessions=self._shape.rollouts)
        self.driver.tell(event)

    def _tell_news(self) -> int:
        """Requests and groups, as of now; returns how many groups could be taken."""
        self.driver.tell_requests()
        ready, on_their_way = self._rows.take_stock(self.step)
        self.driver.tell(ev.GroupsReady(at=self.driver.now(), ready=ready, in_flight=on_their_way))
        return ready

    def _attend(self) -> None:
        """What happens to slices while the trainer waits for rows: deaths, returns, deadlines."""
        self.driver.tell_requests()
        self.driver.tell_restarts()
        self.driver.tick()

    # ---------------------------------------------------------------- a step

    def begin_step(self, step: int) -> None:
        self.step = step
        self._starved_s = 0.0
        self._starved_groups = 0

    def acquire_gang(self) -> None:
        """The trainer's GPUs, when a batch can be had.

        Raises:
            GangRefused: they can never be had.
        """
        self._acquire(Tag.TRAIN, self._gang, minimum=self._shape.mini_batch, batch=self._shape.batch)

    def before_sample(self, mini_batch: int) -> None:
        """The trainer is about to wait for mini-batch number ``mini_batch`` of its step, with its gang.

        Raises:
            GangRefused: it had not enough groups, gave its GPUs back, and can never have them again.
        """
        if mini_batch == 0:
            if self._shape.saves:
                self.weights.save()
            return
        self.weights.newer = True
        if self._tell_news() < self._shape.mini_batch:  # the gang may be of use elsewhere meanwhile
            left = self._shape.batch - mini_batch * self._shape.mini_batch
            self._release()
            self._acquire(Tag.TRAIN, self._gang, minimum=self._shape.mini_batch, batch=left)

    def close_batch(self) -> None:
        """Called when the step has trained: tell the scheduler for which groups the next batch waits."""
        self._tell_news()  # without replicas that are back: the weights to be had here are not the published ones
        awaited = self._rows.awaited()
        if awaited is not None:
            self.driver.tell(ev.BatchOpened(at=self.driver.now(), awaited=awaited))

    def publish(self, *, waited_s: float, waited_groups: int, last: bool) -> dict[str, Any]:
        """Send the step's weights to every replica that generates, and release the gang.

        Args:
            waited_s: seconds that the trainer waited for rows with its gang.
            waited_groups: for how many groups.
            last: no step follows.

        Returns:
            What the transfer tells of itself.
        """
        self.weights.newer = False
        request, self._request = self._request, ""
        with self._flight.phase(Phase.SYNC_WEIGHTS):
            self.replicas.publish(self.step)
            at = self.driver.now()
            published = ev.WeightsPublished(at=at, version=self.step)
            ended = ev.StepEnded(
                at=at,
                step=self.step,
                waited_s=waited_s,
                waited_groups=waited_groups,
                starved_s=self._starved_s,
                starved_groups=self._starved_groups,
                last=last,
            )
            self.driver.tell(ended, published, ev.Released(at=at, request=request))
        return dict(self.replicas.sync_metrics)

    # ---------------------------------------------------------------- the gang

    def _acquire(self, tag: Tag, count: int, *, minimum: int = 0, batch: int = 0) -> None:
        """Ask for slices and wait for them; they may generate until the scheduler takes them back."""
        driver = self.driver
        self._asked += 1
        request = f"step-{self.step}/{self._asked}"
        driver.tell_restarts()
        missing = minimum - self._tell_news() if tag is Tag.TRAIN else 0
        asked = ev.AcquireRequested(
            at=driver.now(), request=request, tag=tag, count=count, minimum=minimum, batch=batch
        )
        driver.tell(asked)
        if missing > 0 and not driver.lending:
            self._starved_groups += missing
        with self._waiting_for_batch() if tag is Tag.TRAIN else nullcontext():
            while request not in driver.granted:
                if request in driver.refused:
                    raise GangRefused(f"{request}: {driver.refused[request]}")
                look_s = _LOOK_AT_RESTARTS_S if driver.restarting else _LOOK_S
                until = min(driver.timer if driver.timer is not None else math.inf, driver.now() + look_s)
                began, lending = driver.now(), driver.lending
                self._wait(max(until - began, 0.001))
                self._starved_s += 0.0 if lending or missing <= 0 else driver.now() - began
                driver.tell_restarts()
                self._flight.progress(self._tell_news(), minimum)
                driver.tick()
        del driver.granted[request]
        self._request = request

    @contextmanager
    def _waiting_for_batch(self) -> Iterator[None]:
        with self._flight.phase(Phase.WAIT_FOR_BATCH), self._rows.waiting(self.step):
            yield

    def _wait(self, timeout_s: float) -> None:
        self._rows.wait_for_news(timeout_s)

    def _release(self) -> None:
        request, self._request = self._request, ""
        self.driver.tell(ev.Released(at=self.driver.now(), request=request))

    # ---------------------------------------------------------------- validation

    def begin_validation(self) -> None:
        """Every slice that can generate does so until `end_validation`.

        Raises:
            GangRefused: nobody is left.
        """
        cluster = self._scheduler.cluster
        while True:
            serving = sum(status.holder is None for status in cluster if status.state in SERVING_SOON)
            wanted = max(1, serving + len(cluster.idle(Tag.ROLLOUT)))  # none: one is being restarted, or it is refused
            try:
                self._acquire(Tag.ROLLOUT, wanted)
                return
            except GangRefused:  # one died on the way
                if wanted == 1:
                    raise

    def end_validation(self) -> None:
        self._release()


def lending_of(trainer: Any, workers: Sequence[Any]) -> Lending:
    """Builds the lending of a run.

    Args:
        trainer: `SeamlessTrainer`, initialized.
        workers: those that roll out.
    """
    slices: Sequence[Slice] = trainer.slices
    settings: SchedulerConfig = trainer.seamless.scheduler
    flight: TrainerFlight = trainer.flight
    config = trainer.config
    standing_weights = trainer.standalone_checkpoint_manager
    is_published = isinstance(standing_weights, RollingWeights)
    shape = _shape_of(config, trainer.parameter_sync_step, is_published=is_published)
    group = trainer.actor_rollout_wg
    weights, reports = PublishedWeights(group), RequestReports(workers)
    train = [s.id for s in slices if Tag.TRAIN in s.capabilities]
    replicas = ReplicaSlices(
        hybrid=train,
        standing=[s.id for s in slices if Tag.TRAIN not in s.capabilities],
        hybrid_servers=trainer.llm_server_manager,
        standing_servers=trainer.standalone_server_manager,
        hybrid_weights=trainer.checkpoint_manager,
        standing_weights=standing_weights,
        published_weights=weights.in_place,
        checks=weight_checks_of(config, settings.check_weights, group.workers, flight.weights_checked),
    )
    policy = policy_of(settings, batch=shape.batch, mini_batch=shape.mini_batch)
    scheduler = Scheduler(policy, wakes_apart=is_published)
    driver = SliceDriver(
        RecordedScheduler(scheduler, flight.follow, policy=str(settings.policy), addresses=replicas.addresses),
        scheduler.cluster,
        replicas,
        clock=flight.recorder.now,
        fetch=reports.fetch,
        warn=trainer.reporter.say,
    )
    return Lending(
        scheduler=scheduler,
        driver=driver,
        replicas=replicas,
        weights=weights,
        rows=trainer.rows,
        flight=flight,
        shape=shape,
        gang=len(train),
        step=trainer.global_steps,
    )


def _shape_of(config: DictConfig, updates: int, *, is_published: bool) -> StepShape:
    batch = config.data.train_batch_size
    bypass = (config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False)
    return StepShape(
        batch=batch,
        mini_batch=batch // updates,
        rollouts=int(config.actor_rollout_ref.rollout.n),
        saves=updates > 1 and bool(bypass) and not is_published,  # what is published stands beside what is trained
    )
