"""The streaming dataloader: a replay buffer for verl that admits, waits and hands out under StaleFlow's protocol.

    admit ─► reserve ─► verl's rollout workers ─► TransferQueue ─► (bell) look ─► occupy | fail | filter ─► consume
      ▲                                                                              │       │
      └──────────────────────────── slots that came back ◄──────────────────────────┴───────┘

Nothing is dropped to keep the bound: a prompt is admitted only when a training step within the bound has a slot for it.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY, _accumulate_eviction_metrics
from verl.utils.skip import SkipManager

from seamless_verl.config import TRAINER_MODE
from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.staleness.floors import reserve_between
from seamless_verl.staleness.groups import StuckPolicy
from seamless_verl.staleness.protocol import ConsumedGroup, EntryState, StalenessProtocol
from seamless_verl.verl_adapter.dataloader.woken_buffer import (
    LOOK_S,
    Replace,
    RolloutFailed,
    Say,
    Stragglers,
    WokenReplayBuffer,
)
from seamless_verl.verl_adapter.rollout.verl_samples import stamps

FAILURES_IN_A_ROW = 32
STATE_FILE = "streaming.json"
_STATE_VERSION = 1


class PromptSource(Protocol):
    """Where prompts come from and go back to; ``None`` in its place is verl's own dataloader."""

    def name(self, uids: Sequence[str]) -> None:
        """The prompts fetched last are known as ``uids`` from now on, in order."""

    def consumed(self, keys: Mapping[str, Sequence[str]]) -> None:
        """Groups (uid to trajectory keys) were trained on or filtered."""

    def given_up(self, uids: Sequence[str]) -> None:
        """No group of these will be trained: it could not be generated, or was surplus."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any], in_flight: Collection[str]) -> None:
        """Continue from ``state``; prompts that it knows and that are not among ``in_flight`` are given up."""


class StreamingReplayBuffer(WokenReplayBuffer):
    """See the module; validation prompts are handled by verl's own code.

    Version 0 is what training starts from; step ``k`` updates version ``k - 1``, and the replicas generate with
    ``k - 1`` until step ``k`` ends. A group's V_traj is the lowest version that one of its rows started with.

    Args:
        eta: bound in weight versions.
        batch_size: prompts per training step.
        redundancy, in_flight: see `StalenessProtocol`.
        stuck: what is done about stragglers.
        admits: False where rollouts are replayed (`SkipManager`), which brings its own prompts.
        refill_fn: the trainer's; submits that many new prompts, which come back through `reserve`.
        on_progress: told, at every look, how many groups could be taken and how many are needed.
    """

    def __init__(
        self,
        *,
        eta: int,
        batch_size: int,
        redundancy: float = 1.0,
        in_flight: float | None = None,
        stuck: StuckPolicy | None = None,
        admits: bool = True,
        refill_fn: Callable[[int], int],
        on_progress: Callable[[int, int], None] = lambda ready, needed: None,
        trainer_config: Any,
        sampler_kwargs: Any,
        filter_groups_metric: str | None = None,
    ) -> None:
        super().__init__(
            trainer_mode=TRAINER_MODE,
            trainer_config=trainer_config,
            max_off_policy_threshold=None,
            max_off_policy_strategy="wait",
            sampler_kwargs=sampler_kwargs,
            refill_fn=refill_fn,
            filter_groups_metric=filter_groups_metric,
        )
        self.protocol = StalenessProtocol(eta=eta, batch_size=batch_size, redundancy=redundancy, in_flight=in_flight)
        self.admits = admits
        self.stragglers = Stragglers(stuck or StuckPolicy())
        self.look_s = min(LOOK_S, self.stragglers.look_again_s)
        self._source: PromptSource | None = None
        self._on_progress = on_progress
        self._oldest: Callable[[], int | None] = lambda: None
        self._max_lag = 1
        self._abandoned: set[str] = set()  # surplus groups that have not been seen to end
        self._adopted: set[str] = set()  # groups that somebody else submitted; their versions may be another run's
        self._failures = 0
        self._owed = 0  # groups that failed or were filtered and have not been replaced
        self._metrics: dict[str, Any] = defaultdict(float)

    def listen(self, workers: Sequence[Any], replace: Replace | None = None, say: Say = print) -> None:
        super().listen(workers, replace, say)
        if all(hasattr(worker, "restart_groups") for worker in workers):
            self.stragglers.listen(workers, self.desk.look)

    # ---------------------------------------------------------------- admission

    def follow(self, source: PromptSource) -> None:
        """A curriculum chooses the prompts: tell it what becomes of them."""
        self._source = source

    def follow_versions(self, oldest: Callable[[], int | None], max_lag: int) -> None:
        """Replicas may lag; ``oldest``: the oldest version that one of them serves."""
        self._oldest, self._max_lag = oldest, max_lag

    def floor_of(self, uid: str) -> int:
        """The oldest weights that may begin a prompt's rollouts: those of its reservation. The newest for validation,
        and for prompts that somebody else submitted."""
        reserved = self.protocol.reserved_for(uid)
        return self.protocol.version if reserved is None else reserved

    def start_at(self, version: int) -> None:
        """Begin with weights of ``version``, from a checkpoint without our state.

        How old the finished groups of such a checkpoint are is not known, so they are generated again.

        Raises:
            ConfigError: a curriculum is on, which did not draw the prompts in flight.
        """
        if self._source is not None:
            problem = "the checkpoint was taken without a curriculum, its prompts in flight belong to none"
            raise ConfigError("seamless.curriculum", "on", problem, "switch it off, or start afresh from the weights")
        protocol = self.protocol
        self.protocol = StalenessProtocol(
            eta=protocol.eta,
            batch_size=protocol.batch_size,
            redundancy=protocol.redundancy,
            in_flight=protocol.in_flight,
            version=version,
        )
        self._sync_metadata_from_transfer_queue()
        if self.partitions["train"]:
            tq.kv_clear(partition_id="train", keys=list(self.partitions["train"]))
        if prompts := list(self.prompt_global_steps["train"]):  # verl re-issues what is pending
            tq.kv_batch_put(keys=prompts, partition_id="train", tags=[{"status": "pending"} for _ in prompts])

    def admit(self, global_steps: int) -> int:
        """Submit as many new prompts as the bound has room for, or as are to be replaced where rollouts are replayed;
        returns how many."""
        room = self.protocol.capacity(global_steps - 1)
        if not self.admits:
            room = min(room, self._owed)
            self._owed -= room
        if room:
            self.refill_fn(room)
        return room

    def reserve(self, uids: Sequence[str], global_steps: int) -> None:
        """Called by the trainer before prompts are submitted.

        Each for the oldest version that a replica serves and may go on to serve, where the bound has room for one so
        old; what is to be replaced at once (``max_lag`` 1) would make every sample a version older and gain seconds.

        Raises:
            SeamlessError: more prompts are submitted than there is room for.
        """
        newest, oldest = global_steps - 1, self._oldest() if self._max_lag > 1 else None
        first = newest if oldest is None else max(oldest, newest + 1 - self._max_lag)
        for uid in uids:
            if reserve_between(self.protocol, uid, first, newest) is None:
                raise SeamlessError(
                    f"prompt {uid} was submitted in step {global_steps} beyond the bound: "
                    f"{self.protocol.num_in_flight} groups are in flight, eta is {self.protocol.eta}"
                )
        if self._source is not None:
            self._source.name(uids)

    def awaited(self) -> frozenset[str]:
        return frozenset(self.protocol.awaited())

    def waiting(self, global_steps: int) -> AbstractContextManager[None]:
        return self.stragglers.waiting(global_steps)

    # ---------------------------------------------------------------- verl's interface

    def get_sampleable_count(self, global_steps: int, partition_id: str) -> int:
        if partition_id != "train":
            return super().get_sampleable_count(global_steps, partition_id)
        self._look(global_steps)
        return self.protocol.num_available

    def take_stock(self, global_steps: int) -> tuple[int, int]:
        """See `WokenReplayBuffer.take_stock`; what the bound has room for is admitted, and counts. When the step has
        handed out its batch, the next one admits: until its weights are out, prompts would begin with the old ones."""
        self._look(global_steps)
        if self.protocol.version < global_steps:
            self.admit(global_steps)
        return self.protocol.num_available, len(self._groups(EntryState.RESERVED))

    def wait_for_sampleable(
        self, global_steps: int, partition_id: str, target_count: int
    ) -> tuple[set[str], dict[str, float]]:
        if partition_id != "train":
            return super().wait_for_sampleable(global_steps, partition_id, target_count)
        last_debug_time = time.time()
        with self.stragglers.waiting(global_steps):
            while True:
                self._look(global_steps)
                self.admit(global_steps)
                self._on_progress(self.protocol.num_available, target_count)
                if self.protocol.num_available >= target_count:
                    metrics, self._metrics = dict(self._metrics), defaultdict(float)
                    return self.finished_keys[partition_id] & self._groups(EntryState.OCCUPIED), metrics
                last_debug_time = self._wait_for_next_poll(partition_id, last_debug_time)

    @SkipManager.annotate_tq(role="rollout_tq", phase="sample")  # type: ignore[untyped-decorator]
    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """A mini-batch: the longest of the finished groups, in the order of their random names, which is that of verl's
        optimizer steps."""
        if partition_id != "train":
            return super().sample(global_steps, partition_id, batch_size)  # type: ignore[no-any-return]
        _, metrics = self.wait_for_sampleable(global_steps, partition_id, batch_size)
        self.stragglers.got_some()
        consumption = self.protocol.consume(batch_size)
        self._abandoned.update(consumption.surplus)
        self.stragglers.give_up(consumption.surplus)
        self._adopted.difference_update(entry.group for entry in consumption.groups)
        rows = self._rows_by_group()
        consumed = {group: rows[group] for group in sorted(entry.group for entry in consumption.groups)}
        if self._source is not None:
            self._source.given_up(consumption.surplus)
            self._source.consumed(consumed)
        metrics |= self._staleness_metrics(consumption.groups)
        keys = [key for group in consumed.values() for key in group]
        tags = [self.partitions[partition_id][key] for key in keys]
        tq.kv_clear(partition_id=partition_id, keys=list(consumed))
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags), metrics

    def _staleness_metrics(self, groups: Sequence[ConsumedGroup]) -> dict[str, float]:
        lags = [entry.staleness for entry in groups]
        return {
            "training/staleness/mean": sum(lags) / len(lags),
            "training/staleness/max": float(max(lags)),
            "training/staleness/in_flight": float(self.protocol.num_in_flight),
        }

    # ---------------------------------------------------------------- looking at TransferQueue

    def _look(self, global_steps: int) -> None:
        """Take in what ended since the last look."""
        self._sync_metadata_from_transfer_queue()
        self._adopt(global_steps)
        rows = self._rows_by_group()
        empty = {uid for uid in self.finished_keys["train"] if not rows.get(uid)}
        self.finished_keys["train"] -= empty  # verl's filter raises over one
        self.failure_keys["train"] |= empty
        reserved = self._groups(EntryState.RESERVED)
        ended = [uid for uid in self._in_order(reserved) if uid in self.finished_keys["train"]]
        failed = self.failure_keys["train"] & reserved
        filtered = self._dapo_filtered_keys("train")[0] & reserved
        done = [uid for uid in ended if uid not in filtered]
        for uid in done:
            tokens = sum(self.partitions["train"][key].get("seq_len", 0) for key in rows[uid])
            self.protocol.occupy(uid, self._began(uid, rows[uid]), tokens=tokens)
        if filtered and self._source is not None:
            self._source.consumed({uid: rows[uid] for uid in ended if uid in filtered})
        if failed and self._source is not None:
            self._source.given_up(sorted(failed))
        for uid in filtered | failed:
            self.protocol.abort(uid)
        if filtered:
            values = Counter(self._dapo_classification_cache["train"][uid] for uid in filtered)
            found = {"training/filter_groups/evicted_samples": len(filtered), DAPO_FILTERED_REWARD_COUNTS_KEY: values}
            _accumulate_eviction_metrics(self._metrics, found, 0)
        if failed:
            self._metrics["training/rollout_failure/evicted_samples"] += len(failed)
        self._owed += len(filtered | failed)
        abandoned = self._abandoned & (self.finished_keys["train"] | self.failure_keys["train"])
        self._abandoned -= abandoned
        self._clear_groups("train", filtered | failed | abandoned)
        self.count_failures(len(failed), bool(done or filtered))
        if done or filtered or failed:
            self.stragglers.got_some()
        else:
            for metric, count in self.stragglers.treat(self.protocol, global_steps - 1).items():
                self._metrics[metric] += count

    def _began(self, uid: str, rows: Sequence[str]) -> int | None:
        """V_traj by the tags of a group's rows; None: not known, or what an agent loop of the user's own has there."""
        tags = [self.partitions["train"][key] for key in rows]
        started = [int(tag["min_global_steps"]) for tag in tags if tag.get("min_global_steps") is not None]
        if uid in self._adopted or len(started) < len(tags):
            return None
        version, asked, newest = min(started), self.floor_of(uid), self.protocol.version
        fields = ["extra_fields"]
        if asked <= version <= newest or any(stamps(tq.kv_batch_get(list(rows), "train", fields)["extra_fields"])):
            return version
        told = "an agent loop of yours calls min_global_steps what cannot be the weights that began its rows"
        self.desk.say_once(f"{told} (the step?): its groups count as begun by those that they were admitted for")
        return None

    def count_failures(self, failed: int, finished: bool) -> None:
        """Note what this look found; a group that finished starts the count anew.

        Raises:
            RolloutFailed: ``FAILURES_IN_A_ROW`` groups failed and none finished.
        """
        self._failures = 0 if finished else self._failures + failed
        if self._failures >= FAILURES_IN_A_ROW:
            raise RolloutFailed(
                f"{self._failures} prompt groups failed in a row and none finished; {self.desk.story(validation=False)}"
            )

    def _adopt(self, global_steps: int) -> None:
        """Reserve for groups that verl put there itself: replayed ones (`SkipManager`), those of a plain checkpoint."""
        for uid in self.prompt_global_steps["train"]:
            if uid in self._abandoned or self.protocol.state_of(uid) is not None:
                continue
            if self.protocol.reserve(uid, global_steps - 1) is not None:  # refused: it waits for the next look
                self._adopted.add(uid)

    def _groups(self, state: EntryState) -> set[str]:
        return {group for group, now in self.protocol.groups() if now is state}

    def _in_order(self, groups: set[str]) -> list[str]:
        """``groups`` in the order in which they were reserved."""
        return [group for group, _ in self.protocol.groups() if group in groups]

    def _rows_by_group(self) -> dict[str, list[str]]:
        rows: dict[str, list[str]] = defaultdict(list)
        for key in self.partitions["train"]:
            rows[key.split("_", 1)[0]].append(key)
        return rows

    # ---------------------------------------------------------------- checkpoints

    def save(self, folder: Path) -> None:
        """Into the folder of a checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STATE_FILE).write_text(json.dumps(self.state()), encoding="utf-8")

    def load(self, folder: Path, version: int) -> bool:
        """Continue from a checkpoint of weights ``version``; False: it has no state of ours (see `start_at`)."""
        file = folder / STATE_FILE
        if not file.exists():
            self.start_at(version)
            return False
        self.restore(json.loads(file.read_text(encoding="utf-8")))
        return True

    def state(self) -> dict[str, Any]:
        """What the checkpoint of a step keeps beside verl's own; TransferQueue's content is in verl's."""
        return {
            "version": _STATE_VERSION,
            "protocol": self.protocol.state(),
            "source": self._source.state() if self._source is not None else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, after TransferQueue was restored: finished groups are kept, the others are re-issued.

        Removed from TransferQueue are rows that the saved step had already trained on, and surplus groups.

        Raises:
            ConfigError: the state is of another version or was taken under other settings.
        """
        if state.get("version") != _STATE_VERSION:
            problem = f"the checkpoint's streaming state has version {state.get('version')}, this is {_STATE_VERSION}"
            raise ConfigError("trainer.resume_mode", "auto", problem, "write disable to start afresh")
        if (self._source is None) != (state["source"] is None):
            now, then = ("off", "with") if self._source is None else ("on", "without")
            problem = f"the checkpoint was taken {then} a curriculum"
            raise ConfigError("seamless.curriculum", now, problem, "use the checkpoint's settings, or start afresh")
        self.protocol.restore(state["protocol"])
        if self._source is not None:
            self._source.restore(state["source"], {group for group, _ in self.protocol.groups()})
        self._sync_metadata_from_transfer_queue()
        prompts = self.prompt_global_steps["train"]
        if lost := [group for group, _ in self.protocol.groups() if group not in prompts]:
            raise SeamlessError(f"the checkpoint's TransferQueue lacks {len(lost)} groups in flight, first {lost[0]}")
        known = (*prompts, *self.partitions["train"])
        if gone := [key for key in known if self.protocol.state_of(key.split("_", 1)[0]) is None]:
            tq.kv_clear(partition_id="train", keys=gone)
