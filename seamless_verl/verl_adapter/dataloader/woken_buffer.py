"""verl's asynchronous replay buffer, which wakes when a prompt group ends instead of every 2 s; stragglers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import ray
from ray.exceptions import RayActorError
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync, _accumulate_eviction_metrics

from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.staleness.groups import StuckPolicy, Treatment
from seamless_verl.staleness.protocol import StalenessProtocol
from seamless_verl.verl_adapter.rollout.attempt_watch import AttemptDesk, attended

# With a bell, how long to wait before looking without having been called (a killed worker never rings).
LOOK_S = 10.0
# Without one (a rollout manager of the user's own); the price of a look is one RPC to TransferQueue's controller.
_POLL_S = 0.05
# A blocked `ray.wait` does not see Ctrl-C; nothing else depends on this.
_SIGNALS_S = 1.0


Replace = Callable[[Any, RayActorError], Any]
"""Starts another rollout worker in place of one that died, has its groups begin again, and returns it: their agents are
given the answers that were recorded, as far as they ask for them."""
Say = Callable[[str], None]
"""Prints a line."""


class RolloutFailed(SeamlessError):
    """No attempt of a validation can be used, or prompt groups fail one after another; more of them would hide that."""


def living(calls: Sequence[Any], look: Callable[[], None]) -> list[Any]:
    """Answers of rollout workers, without those that died: the bell hears of them, too. ``look``: see `attended`."""
    answers = []
    for call in calls:
        with suppress(RayActorError):
            answers.append(attended(call, look))
    return answers


class Bell:
    """Wakes the trainer when a rollout worker has news: one call per worker is always open, and fails if it dies.

    Args:
        replace: None: a death ends the wait with its error.
    """

    def __init__(self, workers: Sequence[Any], replace: Replace | None = None) -> None:
        self._replace = replace
        self._calls = {worker.news.remote(0): worker for worker in workers}

    def wait(self, timeout_s: float) -> None:
        """Return when a group ended since the last call that returned for one, or after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            answered, _ = ray.wait(list(self._calls), num_returns=1, timeout=min(left, _SIGNALS_S))
            if not answered:
                continue
            # Others may have rung meanwhile; one look at the metadata serves them all.
            answered, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
            for call in answered:
                worker = self._calls.pop(call)
                try:
                    seen = ray.get(call)
                except RayActorError as error:
                    if self._replace is None:
                        raise
                    worker, seen = self._replace(worker, error), 0
                self._calls[worker.news.remote(seen)] = worker
            return


class Stragglers:
    """Carries out the policy for STUCK steps on the rollout workers: wait, start stragglers anew, or cut them short.

    Patience is counted in `waiting` only: a trainer that trains or publishes weights waits for nobody.

    Args:
        clock: seconds.
    """

    def __init__(self, policy: StuckPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy
        self._clock = clock
        self._step: int | None = None
        self._waited_s = 0.0  # in the waits of this step that are over, since a group came
        self._since: float | None = None  # from when on the wait under way counts
        self._workers: Sequence[Any] = ()
        self._look: Callable[[], None] = lambda: None

    @property
    def look_again_s(self) -> float:
        """When to look again although nobody called."""
        return float("inf") if self.policy.treatment is Treatment.WAIT else self.policy.patience_s

    def listen(self, workers: Sequence[Any], look: Callable[[], None]) -> None:
        """``look`` is called while workers do not answer."""
        self._workers, self._look = workers, look

    @contextmanager
    def waiting(self, step: int) -> Iterator[None]:
        """Within, the trainer waits for groups of ``step``; not to be nested."""
        if step != self._step:
            self._step, self._waited_s = step, 0.0
        self._since = self._clock()
        try:
            yield
        finally:
            self._waited_s += self._clock() - self._since
            self._since = None

    def got_some(self) -> None:
        """A group came, or the trainer has what it waited for."""
        self._waited_s = 0.0
        if self._since is not None:
            self._since = self._clock()

    def give_up(self, uids: Sequence[str]) -> None:
        """These are surplus: have them stopped."""
        if uids:
            living([worker.give_up_groups.remote(uids) for worker in self._workers], self._look)

    def treat(self, protocol: StalenessProtocol, version: int) -> dict[str, int]:
        """Called at every look that brought nothing; the slots of groups that are started anew move.

        A look outside of `waiting` treats nobody.

        Args:
            version: of the weights that a group started now begins with.

        Returns:
            How many groups were started anew and cut short, by metric; verl adds up a step's ``total``.
        """
        if self._since is None:
            return {}
        uids = self.policy.treat(protocol, self._waited_s + self._clock() - self._since)
        if not uids or not self._workers:
            return {}
        self.got_some()  # those that are treated now are given as much time again
        if self.policy.treatment is Treatment.RETRY:
            return {"training/stuck/retried_total": self._restart(protocol, version, uids)}
        living([worker.cut_groups.remote(uids) for worker in self._workers], self._look)
        return {"training/stuck/truncated_total": len(uids)}

    def _restart(self, protocol: StalenessProtocol, version: int, uids: Sequence[str]) -> int:
        answers = living([worker.restart_groups.remote(uids, version) for worker in self._workers], self._look)
        accepted = {uid for answer in answers for uid in answer}
        for uid in uids:  # in the policy's order; what has ended meanwhile is found by the next look
            if uid in accepted:
                protocol.abort(uid)
                if protocol.reserve(uid, version) is None:
                    raise SeamlessError(f"prompt {uid} gave its slot back to be started anew and found none")
        return len(accepted)


class WokenReplayBuffer(ReplayBufferAsync):
    """verl's asynchronous buffer with its ``max_off_policy_*`` semantics; whoever waits for rows sleeps until news.

    Attributes:
        admits: whether it decides how many prompts are under way; if not, verl submits a batch per step.
        outlives_workers: whether it has rollout workers that die replaced.
    """

    admits = False
    outlives_workers = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # keeps verl's `poll_interval`: for its switch a step that waits longer was idle
        self._bell: Bell | None = None
        self.look_s = LOOK_S
        self._meanwhile: Callable[[], None] = lambda: None
        self.check: Callable[[], None] = lambda: None  # raises what keeps rows from coming
        self.desk = AttemptDesk([], print)  # until `listen`
        self._evicted: dict[str, float] = {}  # metrics of what `take_stock` replaced, until the next sample

    def listen(self, workers: Sequence[Any], replace: Replace | None = None, say: Say = print) -> None:
        """Wait for these rollout workers from now on, and for those that take their place; workers that cannot ring are
        polled."""
        self.desk = AttemptDesk(workers, say)
        if workers and all(hasattr(worker, "news") for worker in workers):
            self._bell = Bell(workers, replace)

    def wait_for_news(self, timeout_s: float) -> None:
        """Return when a group may have ended, after ``timeout_s`` at the latest."""
        if self._bell is None:
            time.sleep(min(timeout_s, _POLL_S))
        else:
            self._bell.wait(min(timeout_s, self.look_s))
        self.check()
        self.desk.look()

    def attend(self, meanwhile: Callable[[], None]) -> None:
        """Have ``meanwhile`` called after every wait for rows: slices may have died or come back."""
        self._meanwhile = meanwhile

    def reserve(self, uids: Sequence[str], global_steps: int) -> None:
        """Prompts are about to be submitted."""

    def awaited(self) -> frozenset[str] | None:
        """Groups that the next batch waits for; None: not known."""
        return None

    def waiting(self, global_steps: int) -> AbstractContextManager[None]:
        """Within, the trainer waits for groups of its step."""
        return nullcontext()

    def _rows_by_group(self) -> dict[str, list[str]]:
        rows: dict[str, list[str]] = defaultdict(list)
        for key in self.partitions["train"]:
            rows[key.split("_", 1)[0]].append(key)
        return rows

    def take_stock(self, global_steps: int) -> tuple[int, int]:
        """Training groups that could be taken now, and those on their way; what ended for nothing is replaced first."""
        while True:
            self._sync_metadata_from_transfer_queue()
            reasons = self._terminal_eviction_reasons(global_steps, "train")
            evicted, stale, _, metrics = self._evict_terminal_groups(global_steps, "train", reasons)
            if not evicted:
                break
            _accumulate_eviction_metrics(self._evicted, metrics, stale)
            if self.refill_fn is not None:
                self.refill_fn(len(evicted))
        keys = self._sampleable_terminal_keys("train", reasons)
        on_their_way = len(self.pending_keys["train"]) + len(self.running_keys["train"])
        return len(keys) if self._has_enough_samples(global_steps, "train", 0, keys) else 0, on_their_way

    def wait_for_sampleable(
        self, global_steps: int, partition_id: str, target_count: int
    ) -> tuple[set[str], dict[str, float]]:
        keys, metrics = super().wait_for_sampleable(global_steps, partition_id, target_count)
        if partition_id == "train":
            before, self._evicted = self._evicted, {}
            stale = next((count for name, count in before.items() if name.endswith("/off_policy/evicted_samples")), 0)
            _accumulate_eviction_metrics(metrics, before, int(stale))
        return keys, metrics

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self.wait_for_news(self.look_s)
        self._meanwhile()
        return last_debug_time

    def _materialize_batch(self, partition_id: str, *args: Any) -> KVBatchMeta:
        """As verl's, which makes an empty batch where every group of a validation failed, and later falls over it.

        Raises:
            RolloutFailed: they all failed.
        """
        batch = super()._materialize_batch(partition_id, *args)
        if partition_id == "val" and not batch.keys:
            raise RolloutFailed(f"no rollout of the validation can be used; {self.desk.story(validation=True)}")
        return batch


class PolledBuffer:
    """A sampler of the user's own where `WokenReplayBuffer` is expected: nobody rings, so it is asked again and again.

    Args:
        sampler: with the methods of verl's `ReplayBufferAsync`.
    """

    admits = False
    outlives_workers = False

    @staticmethod
    def checked(sampler: Any) -> Any:
        """``sampler``, if `take_stock` can ask it."""
        needed = ("get_sampleable_count", "pending_keys", "running_keys")
        if lacking := [name for name in needed if not hasattr(sampler, name)]:
            key, problem = "trainer.v1.sampler.custom_sampler.name", f"has no {', '.join(lacking)}, which lending asks"
            raise ConfigError(key, type(sampler).__name__, problem, "derive it from verl's ReplayBufferAsync")
        return sampler

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.desk = AttemptDesk([], print)

    def listen(self, workers: Sequence[Any], replace: Replace | None = None, say: Say = print) -> None:
        self.desk = AttemptDesk(workers, say)

    def attend(self, meanwhile: Callable[[], None]) -> None: ...

    def reserve(self, uids: Sequence[str], global_steps: int) -> None: ...

    def awaited(self) -> frozenset[str] | None:
        return None

    def waiting(self, global_steps: int) -> AbstractContextManager[None]:
        return nullcontext()

    def take_stock(self, global_steps: int) -> tuple[int, int]:
        ready = self._sampler.get_sampleable_count(global_steps, "train")
        return ready, len(self._sampler.pending_keys["train"]) + len(self._sampler.running_keys["train"])

    def wait_for_news(self, timeout_s: float) -> None:
        time.sleep(min(timeout_s, _POLL_S))
        self.desk.look()


RowBuffer = WokenReplayBuffer | PolledBuffer
