"""The trainer's side of the flight recorder: phases, slices, weights and progress of a run.

The same events go into a ledger, from which the idle share on the step line is taken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from seamless_verl.config import SeamlessConfig
from seamless_verl.memory.book import BOOK, entries
from seamless_verl.observe.flight import (
    BatchProgress,
    FlightEvent,
    MemoryHeld,
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
    WeightsChecked,
    WeightsPublished,
    WorkerDied,
)
from seamless_verl.observe.memory import MemoryTrack
from seamless_verl.observe.time_ledger import Ledger, SliceSeconds
from seamless_verl.run.check_combinations import has_own_sampler, replica_size
from seamless_verl.verl_adapter.rollout.request_log import recorder_of_process, role_of_worker

TRAINER, ROLLOUT = "trainer", "rollout"
STANDING = "standing"  # devices of the rollout pool, in the book of memory


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
        # Names the dead actor that caused an error; `job` sets it.
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

    @contextmanager
    def whole_run(self) -> Iterator[None]:
        """Training; the recording is closed with how it ended."""
        try:
            yield
        except BaseException as error:
            self.broke(error)
            raise
        self.end("finished")

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

    def worker_died(self, worker: str) -> None:
        """A rollout worker is gone, by the id of its actor."""
        self.recorder.record(WorkerDied(at=self.recorder.now(), writer=role_of_worker(worker)))

    def weights_checked(self, slice_id: str, version: int, published: str, held: str) -> None:
        """The weights of a slice were compared with the published ones."""
        at = self.recorder.now()
        self.recorder.record(WeightsChecked(at=at, slice=slice_id, version=version, published=published, held=held))

    @contextmanager
    def publishing(self, version: int, *, lent: bool, stops: bool = True) -> Iterator[None]:
        """Weights go to the rollout slices (and to lent trainers), which generate nothing meanwhile.

        Args:
            stops: standing ones, too; else they take what is published later, and tell so themselves.
        """
        receivers = [*(self._rollouts if stops else []), *(self._trainers if lent else [])]
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
        """Seconds of every slice since the run began: our own of the trainer's, and the load balancer's, by address."""
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


def run_started(config: DictConfig, seamless: SeamlessConfig, at: float, policy: str, total_steps: int) -> RunStarted:
    """``at`` is not after the slices': a recording is read in the order of time, and a run ends what was before it."""
    staleness = seamless.staleness
    ours = staleness.policy == "reserve" and not has_own_sampler(config)
    return RunStarted(
        at=at,
        name=seamless.recipe or config.trainer.experiment_name,
        policy=policy,
        eta=staleness.eta,
        bound=staleness.eta if ours else None,
        total_steps=total_steps,
    )


def slices_of_verl(
    config: DictConfig, at: float, hybrid: Sequence[str], standing: Sequence[str], *, lent: bool
) -> tuple[list[SliceAdded], list[SliceAdded]]:
    """The trainer's devices and every standalone replica, in the state that verl's initialization left them in.

    Args:
        hybrid: addresses of the replicas on the trainer's devices; none: they only train.
        standing: addresses of the standalone replicas.
        lent: those on the trainer's devices are awake.
    """
    trainer, replica = config.trainer, replica_size(config)
    if hybrid:
        state = SliceState.ROLLOUT if lent else SliceState.TRAINING
        trainers = [
            _slice(at, TRAINER, rank, replica, ("train", "rollout"), state, address)
            for rank, address in enumerate(hybrid)
        ]
    else:
        trainers = [_slice(at, TRAINER, 0, trainer.nnodes * trainer.n_gpus_per_node, ("train",), SliceState.TRAINING)]
    rollouts = [
        _slice(at, ROLLOUT, rank, replica, ("rollout",), SliceState.ROLLOUT, address)
        for rank, address in enumerate(standing)
    ]
    return trainers, rollouts


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


class MemoryFlight:
    """Reads what the processes of the run have booked since it last looked; nothing where no book is kept."""

    def __init__(self) -> None:
        self._file = Path(os.environ[BOOK]) if BOOK in os.environ else None
        self._read = 0
        self._began_at = 0.0
        self._track = MemoryTrack(self._slice_of)
        self._slices: dict[str, list[str]] = {TRAINER: [], STANDING: []}  # by kind, one name per device
        self._hybrid = False

    def begin(self, at: float) -> None:
        """The recording begins, on the recorder's clock; what is there already was there from then on."""
        self._began_at = at

    def add(self, added: SliceAdded) -> None:
        """To be called in the order of devices: the trainer's ranks, and the replicas as verl counts them."""
        kind = TRAINER if "train" in added.capabilities else STANDING
        if added.slice not in self._slices[kind]:  # one that returns stays where it was
            self._slices[kind] += [added.slice] * added.devices
            self._hybrid = self._hybrid or (kind == TRAINER and "rollout" in added.capabilities)

    def news(self, clock_s: float) -> Iterator[MemoryHeld]:
        """What was booked since the last call, as events.

        Args:
            clock_s: the recorder's clock, now.
        """
        if self._file is None or not self._file.exists():
            return
        with self._file.open("rb") as stream:
            stream.seek(self._read)
            text = stream.read()
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        offset = clock_s - time.time()
        for entry in entries(text):
            for event in self._track.take(entry):
                yield replace(event, at=max(event.at + offset, self._began_at))

    def _slice_of(self, device: str) -> str | None:
        """verl numbers its standalone replicas after those on the trainer's devices."""
        kind, _, number = device.partition("/")
        index = int(number)
        if kind == STANDING and self._hybrid:
            index -= len(self._slices[TRAINER])
        names = self._slices[kind]
        return names[index] if 0 <= index < len(names) else None
