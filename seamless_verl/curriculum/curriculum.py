"""Which prompt comes next: stages choose the sources, History Resampling the pool, a seed the order.

    draw ──► in flight ──► finished | failed, surplus (drawn once more) ──► epoch ends when its last prompt is consumed

Prompts are drawn ahead of consumption, so the next epoch begins before the last one has ended. What the last one then
removes is skipped where it was not drawn yet, what it brings back joins the next one, and what is already known to be
solved is put at the end of the order, so running ahead costs few wasted rollouts and never a wait.

Invariant: an epoch hands every prompt of its order out exactly once, except those that left the pool meanwhile; a
prompt without a group (it failed, or was surplus) is handed out a second time.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seamless_verl.curriculum.prompt_pool import Change, Outcome, Pool, Resampling, StageProgress
from seamless_verl.curriculum_config import CurriculumConfig, StageConfig
from seamless_verl.errors import ConfigError, SeamlessError

STATE_VERSION = 1


class CurriculumError(SeamlessError):
    """A call that does not fit what was drawn before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """``prompt`` (its position in the data) was handed out for ``epoch``, counted from 0."""

    prompt: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnded:
    """Every prompt of ``epoch`` was consumed.

    Attributes:
        outcomes: groups per outcome; all-correct and all-wrong groups have no advantage.
        removed, readmitted: prompts that History Resampling took out of the pool or back into it.
        pool: prompts of the current stage that are left.
    """

    epoch: int
    stage: str
    outcomes: Mapping[Outcome, int]
    removed: tuple[int, ...]
    readmitted: tuple[int, ...]
    pool: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEntered:
    stage: str
    epoch: int


@dataclass(slots=True, kw_only=True)
class _Epoch:
    number: int
    stage: int
    queue: deque[int] = field(default_factory=deque)
    in_flight: dict[int, int] = field(default_factory=dict)  # prompt -> failures so far
    failed: dict[int, int] = field(default_factory=dict)  # waiting to be drawn again -> failures so far
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    accuracy: float = 0.0  # sum over the finished groups

    @property
    def is_consumed(self) -> bool:
        return not (self.queue or self.in_flight or self.failed)

    @property
    def is_untouched(self) -> bool:
        return not (self.in_flight or self.failed or self.outcomes)


class Curriculum:
    """Pure state; the same calls in the same order give the same draws.

    Args:
        sources: data source of every prompt, by position.
        stages: what to draw from; ``()`` is one stage over all sources.
        resampling: ``None`` switches History Resampling off.
        seed: order of the epochs; ``None`` keeps the order of the data.
        dataset: fingerprint of the data, so that a state is not restored onto other data.
    """

    def __init__(
        self,
        *,
        sources: Sequence[str],
        stages: Sequence[StageConfig] = (),
        resampling: Resampling | None = None,
        seed: int | None = 0,
        dataset: str = "",
    ) -> None:
        if not sources:
            raise ConfigError("data.train_files", "[]", "holds no prompt", "give data with at least one row")
        known = sorted(set(sources))
        self._sources = tuple(sources)
        self._progress = StageProgress(stages or (StageConfig(name="all", sources=tuple(known)),), known)
        self._members = [
            [prompt for prompt, source in enumerate(sources) if source in stage.sources]
            for stage in self._progress.stages
        ]
        self._resampling = resampling
        for position, members in enumerate(self._members):
            if resampling is not None and len(members) < resampling.floor:
                raise ConfigError(
                    "seamless.curriculum.pool_floor",
                    resampling.floor,
                    f"stage {self._progress.stages[position].name} has only {len(members)} prompts",
                    f"write {len(members)} or less",
                )
        self._seed = seed
        self._dataset = dataset
        self._pool = Pool(resampling or Resampling())
        self._epochs: deque[_Epoch] = deque([self._begin(0)])

    # ---------------------------------------------------------------- reading

    @property
    def epochs_ended(self) -> int:
        """Epochs whose prompts were all consumed."""
        return self._epochs[0].number

    @property
    def stage(self) -> str:
        return self._progress.current.name

    @property
    def num_left(self) -> int:
        """Prompts, of any stage, that have left the pool and not come back."""
        return self._pool.num_removed

    @property
    def pool_size(self) -> int:
        """Prompts that the current stage draws from."""
        return sum(prompt in self._pool for prompt in self._members[self._progress.index])

    # ---------------------------------------------------------------- events

    def draw(self) -> Draw:
        """The next prompt to generate a group for; begins another epoch when the order of this one is through."""
        while True:
            last = self._epochs[-1]
            for epoch in self._epochs:
                # Failed prompts keep their epoch open: those of an earlier one go first, those of this one last.
                if epoch.failed and (epoch is not last or not last.queue):
                    prompt = next(iter(epoch.failed))
                    epoch.in_flight[prompt] = epoch.failed.pop(prompt)
                    return Draw(prompt=prompt, epoch=epoch.number)
            if last.queue:
                prompt = last.queue.popleft()
                last.in_flight[prompt] = 0
                return Draw(prompt=prompt, epoch=last.number)
            if not last.failed:
                self._epochs.append(self._begin(last.number + 1))

    def finish(self, draw: Draw, accuracies: Sequence[float]) -> list[EpochEnded | StageEntered]:
        """The group of ``draw`` was consumed (trained on, or filtered for want of signal).

        Args:
            accuracies: one per rollout, 1 is correct.

        Returns:
            What ended with it, in order.

        Raises:
            CurriculumError: it is not in flight.
        """
        epoch = self._in_flight(draw)
        del epoch.in_flight[draw.prompt]
        epoch.outcomes[draw.prompt] = Outcome.of(accuracies)
        epoch.accuracy += sum(accuracies) / len(accuracies) if accuracies else 0.0
        return self._close_consumed()

    def fail(self, draw: Draw) -> list[EpochEnded | StageEntered]:
        """No group came of it: it is drawn once more at the end of the epoch, then given up until the next.

        It could not be generated, or was surplus, which counts alike: the slowest prompts are surplus again and again,
        and an epoch has to end.
        """
        epoch = self._in_flight(draw)
        failures = epoch.in_flight.pop(draw.prompt) + 1
        if failures < 2:
            epoch.failed[draw.prompt] = failures
        else:
            epoch.outcomes[draw.prompt] = Outcome.FAILED
        return self._close_consumed()

    def step_ended(self, step: int) -> list[EpochEnded | StageEntered]:
        """Training step ``step`` is done; a stage may end with it."""
        if not self._progress.step_ended(step):
            return []
        return [*self._enter_stage(), *self._close_consumed()]

    # ---------------------------------------------------------------- epochs

    def _in_flight(self, draw: Draw) -> _Epoch:
        for epoch in self._epochs:
            if epoch.number == draw.epoch and draw.prompt in epoch.in_flight:
                return epoch
        raise CurriculumError(f"{draw} is not in flight: never drawn, or finished before")

    def _begin(self, number: int) -> _Epoch:
        return self._fill(_Epoch(number=number, stage=self._progress.index))

    def _fill(self, epoch: _Epoch) -> _Epoch:
        """Queue, in its order, what is in the pool and was not drawn for it."""
        seen = epoch.in_flight.keys() | epoch.failed.keys() | epoch.outcomes.keys()
        queue = [prompt for prompt in self._members[epoch.stage] if prompt in self._pool and prompt not in seen]
        if self._seed is not None:
            queue.sort(key=lambda prompt: _shuffle_key(self._seed, epoch.number, prompt))
        if self._resampling is not None and epoch.number:
            # Solved in an epoch that has not ended yet: likely to leave the pool before it is drawn.
            solved = {p for other in self._epochs for p, o in other.outcomes.items() if o is Outcome.ALL_CORRECT}
            queue.sort(key=lambda prompt: prompt in solved)
        epoch.queue = deque(queue)
        return epoch

    def _close_consumed(self) -> list[EpochEnded | StageEntered]:
        events: list[EpochEnded | StageEntered] = []
        while self._epochs[0].is_consumed:
            if len(self._epochs) == 1:
                self._epochs.append(self._begin(self._epochs[0].number + 1))
            events += self._close(self._epochs.popleft())
        return events

    def _close(self, epoch: _Epoch) -> list[EpochEnded | StageEntered]:
        # Solved prompts count as solved while they are away, or removing them would look like a loss of accuracy.
        away = sum(p not in self._pool and p not in epoch.outcomes for p in self._members[self._progress.index])
        changes = []
        if self._resampling is not None:
            solved = [prompt for prompt, outcome in epoch.outcomes.items() if outcome is Outcome.ALL_CORRECT]
            changes = self._pool.resample(epoch.number, solved, self._members[self._progress.index :])
            self._fill(self._epochs[-1])  # begun already: less what left, and with what came back
        counts = {outcome: list(epoch.outcomes.values()).count(outcome) for outcome in Outcome}
        events: list[EpochEnded | StageEntered] = [
            EpochEnded(
                epoch=epoch.number,
                stage=self._progress.stages[epoch.stage].name,
                outcomes=counts,
                removed=tuple(change.prompt for change in changes if change.change is Change.REMOVED),
                readmitted=tuple(change.prompt for change in changes if change.change is Change.READMITTED),
                pool=self.pool_size,
            )
        ]
        graded = sum(outcome is not Outcome.FAILED for outcome in epoch.outcomes.values()) + away
        of_this_stage = epoch.stage == self._progress.index and graded
        if of_this_stage and self._progress.epoch_ended((epoch.accuracy + away) / graded):
            events += self._enter_stage()
        return events

    def _enter_stage(self) -> list[EpochEnded | StageEntered]:
        """What the old stage has not drawn yet is dropped: the new one begins with the next draw."""
        last = self._epochs[-1]
        last.queue.clear()
        number = last.number + 1
        if last.is_untouched:
            number = self._epochs.pop().number
        self._epochs.append(self._begin(number))
        return [StageEntered(stage=self.stage, epoch=number)]

    # ---------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """Everything as plain JSON data; prompts in flight stay in flight."""
        return {
            "version": STATE_VERSION,
            "dataset": self._dataset,
            "prompts": len(self._sources),
            "stages": [stage.name for stage in self._progress.stages],
            "stage": self._progress.index,
            "accuracies": list(self._progress.accuracies),
            "pool_log": self._pool.state(),
            "epochs": [
                {
                    "number": epoch.number,
                    "stage": epoch.stage,
                    "queue": list(epoch.queue),
                    "in_flight": list(epoch.in_flight.items()),
                    "failed": list(epoch.failed.items()),
                    "outcomes": [[prompt, outcome.value] for prompt, outcome in epoch.outcomes.items()],
                    "accuracy": epoch.accuracy,
                }
                for epoch in self._epochs
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken.

        Raises:
            ConfigError: the state is of another version, other data or other stages.
        """
        names = [stage.name for stage in self._progress.stages]
        _same("its version", "trainer.resume_mode", state.get("version"), STATE_VERSION, "start afresh with disable")
        data = (state["prompts"], state["dataset"])
        _same(
            "the data it was taken on", "data.train_files", data, (len(self._sources), self._dataset), "use that data"
        )
        _same("its stages", "seamless.curriculum.stages", state["stages"], names, "use those stages")
        self._progress.index = state["stage"]
        self._progress.accuracies = list(state["accuracies"])
        self._pool.restore(state["pool_log"])
        self._epochs = deque(
            _Epoch(
                number=epoch["number"],
                stage=epoch["stage"],
                queue=deque(epoch["queue"]),
                in_flight=dict(epoch["in_flight"]),
                failed=dict(epoch["failed"]),
                outcomes={prompt: Outcome(value) for prompt, value in epoch["outcomes"]},
                accuracy=epoch["accuracy"],
            )
            for epoch in state["epochs"]
        )


def _same(what: str, key: str, found: object, expected: object, fix: str) -> None:
    if found != expected:
        raise ConfigError(key, expected, f"the checkpoint differs in {what}: {found}", f"{fix}, or another checkpoint")


def _shuffle_key(seed: int | None, epoch: int, prompt: int) -> bytes:
    """A number that only these three decide: the order needs no random state that could be lost."""
    return hashlib.blake2b(f"{seed}/{epoch}/{prompt}".encode(), digest_size=8).digest()


def configured(
    config: CurriculumConfig, *, sources: Sequence[str], train_batch_size: int, seed: int | None, dataset: str = ""
) -> Curriculum:
    """The curriculum that ``seamless.curriculum`` describes; ``sources`` is the data's ``data_source`` column.

    Raises:
        ConfigError: the section does not fit the data.
    """
    resampling = None
    if config.history_resampling:
        floor = min(train_batch_size, len(sources)) if config.pool_floor is None else config.pool_floor
        resampling = Resampling(floor=floor, readmit_after=config.readmit_after_epochs)
    return Curriculum(sources=sources, stages=config.stages, resampling=resampling, seed=seed, dataset=dataset)
