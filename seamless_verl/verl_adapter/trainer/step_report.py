"""Measures a step on verl's data: the audit of what is trained, log-prob agreement, staleness, idle shares."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from seamless_verl.errors import SeamlessError
from seamless_verl.observe.flight import RowsTrained
from seamless_verl.observe.reporter import PoolStanding, Reporter, StepReport, ValidationReport
from seamless_verl.observe.summary import clustered_mean
from seamless_verl.observe.time_ledger import SliceSeconds, idle_shares
from seamless_verl.verl_adapter.rollout.verl_samples import row_digest, stamps
from seamless_verl.verl_adapter.trainer.trainer_flight import ROLLOUT, TRAINER

_AUDIT_FIELDS = ["prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "extra_fields"]
_ROWS_PER_COMPARED_ROW = 32  # a forward pass is a third of training at most, so this costs about 1 % of it


class AuditFailed(SeamlessError):
    """What is about to be trained is not what was generated."""


def on_policy_keys(batch: KVBatchMeta, current_version: int) -> list[str]:
    """Rows whose every token was sampled from the weights that they are about to change."""
    return [
        key
        for key, tag in zip(batch.keys, batch.tags, strict=True)
        if not tag.get("is_padding", False) and tag["min_global_steps"] == tag["max_global_steps"] == current_version
    ]


def rows_to_compare(batch: KVBatchMeta, current_version: int, ranks: int, micro: int | None) -> KVBatchMeta | None:
    """Rows on which trainer and rollout can be compared, other ones at every version; None where there are none.

    A sample: to compare all of them costs what verl's ``bypass_mode`` is there to save, a forward pass of the batch.

    Args:
        ranks: data-parallel shares of equal size that verl cuts a batch into.
        micro: rows of a micro-batch at most; None: verl counts tokens instead.
    """
    on_policy = on_policy_keys(batch, current_version)
    if not on_policy:
        return None
    share = max(1, len(batch) // (ranks * _ROWS_PER_COMPARED_ROW))
    wanted = ranks * share
    found, count = len(on_policy), min(wanted, len(on_policy))
    chosen = [on_policy[(current_version + row * found // count) % found] for row in range(count)]
    taken = set(chosen)
    others = [key for key in batch.keys if key not in taken]
    sample = batch.select_keys(chosen + others[: wanted - count])
    # verl 0.9.1: engine/utils.py:125 refuses a share that is no multiple of the micro-batch.
    sizes = range(min(share, micro or share), 0, -1)
    sample.extra_info["micro_batch_size_per_gpu"] = next(size for size in sizes if share % size == 0)
    return sample


class StepMeter:
    """Collects over the mini-batches of a step; `finish` closes the step and starts the next."""

    def __init__(self) -> None:
        self._books_before: tuple[SliceSeconds, ...] = ()
        self._idle_share: dict[str, float] = {}
        self._clear()

    def _clear(self) -> None:
        self._rows = 0
        self._audited = 0
        self._violations = 0
        self._policy_tokens = 0
        self._logprob_diff: float | None = None
        self._staleness: list[int] = []
        self._lengths: list[tuple[int, int]] = []  # prompt, response
        self._sharing = {"tokens": 0.0, "tokens_computed": 0.0, "seconds_saved": 0.0}
        # session key -> (row index, reward, passed): the last row of a session carries its reward
        self._sessions: dict[str, tuple[int, float, Any]] = {}

    def audit(self, batch: KVBatchMeta) -> None:
        """Compare every row about to be trained with the stamp that the proxy put on it after its own audit.

        Raises:
            AuditFailed: a row differs, or its session had violations.
        """
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=_AUDIT_FIELDS)
        columns = {name: _rows_of(data[name]) for name in _AUDIT_FIELDS if name in data}
        stamped = [key for key, stamp in zip(batch.keys, stamps(columns["extra_fields"]), strict=True) if stamp]
        if "rollout_log_probs" not in columns and stamped:  # some of verl's own loops keep none: nobody is given any
            data = tq.kv_batch_get(keys=stamped, partition_id=batch.partition_id, select_fields=["rollout_log_probs"])
            sampled = dict(zip(stamped, _rows_of(data["rollout_log_probs"]), strict=True))
            columns["rollout_log_probs"] = [sampled.get(key) for key in batch.keys]
        refused: list[str] = []
        for position, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
            if tag.get("is_padding", False):
                continue
            row = {name: column[position] for name, column in columns.items()}
            self._rows += 1
            self._lengths.append((len(row["prompts"]), len(row["responses"])))
            self._policy_tokens += int(row["response_mask"].sum())
            self._count_session(key, row)
            (stamp,) = stamps([row["extra_fields"]])
            if not stamp:
                continue  # rows of verl's own agent loops carry no stamp
            self._audited += 1
            found = row_digest(row["prompts"], row["responses"], row["response_mask"], row["rollout_log_probs"])
            if found != stamp["digest"] or stamp["violations"]:
                refused.append(
                    f"row {key} is not what the engine returned: its digest "
                    f"{'differs' if found != stamp['digest'] else 'agrees'} and the proxy found "
                    f"{stamp['violations']} violations"
                )
        if refused:
            self._refuse(refused)

    def _refuse(self, stories: Sequence[str]) -> NoReturn:
        """Count the rows, one story each; their step is to be reported although it is not trained."""
        self._violations += len(stories)
        more = f" ({len(stories)} such rows)" if len(stories) > 1 else ""
        raise AuditFailed(f"{stories[0]}{more}. Nothing of this batch was trained")

    def _count_session(self, key: str, row: Mapping[str, Any]) -> None:
        session, _, index = key.rpartition("_")
        known = self._sessions.get(session)
        if known is None or known[0] < int(index):
            info = (row["extra_fields"] or {}).get("reward_extra_info") or {}
            self._sessions[session] = (int(index), float(row["rm_scores"].sum()), info.get("passed"))

    def count_staleness(self, batch: KVBatchMeta, current_version: int) -> None:
        """Versions between the first token of every row and the weights that it is about to change.

        Replayed rows count as fresh: verl's `SkipManager` tags them with the step that trains them, which is one above
        the weights that it begins with.

        Raises:
            AuditFailed: a row names a version that nobody has made yet.
        """
        refused: list[str] = []
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            if tag.get("is_padding", False):
                continue
            version = tag["min_global_steps"]
            if version > current_version + 1:
                refused.append(
                    f"row {key} says that its first token is of version {version}, but the trainer is at version "
                    f"{current_version}"
                )
            self._staleness.append(max(0, current_version - version))
        if refused:
            self._refuse(refused)

    def compare_log_probs(self, batch: KVBatchMeta, current_version: int) -> None:
        """Largest |trainer - rollout| log-prob over rows generated wholly by the version being trained.

        Raises:
            AuditFailed: a log-prob is not finite.
        """
        on_policy = on_policy_keys(batch, current_version)
        if not on_policy:
            return
        fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
        data = tq.kv_batch_get(keys=on_policy, partition_id=batch.partition_id, select_fields=fields)
        if "rollout_log_probs" not in data:
            return
        refused: list[str] = []
        for key, trained, sampled, mask in zip(on_policy, *(_rows_of(data[name]) for name in fields), strict=True):
            if not mask.any():
                continue  # an agent loop of the user's own masked all of it
            difference = (trained - sampled).abs()[mask.bool()].max().item()
            if math.isfinite(difference):
                self._logprob_diff = max(self._logprob_diff or 0.0, difference)
            else:
                refused.append(f"row {key} has a log-prob that is not finite")
        if refused:
            self._refuse(refused)

    def compare_a_sample(
        self,
        batch: KVBatchMeta,
        current_version: int,
        ranks: int,
        config: Any,
        compute: Callable[[KVBatchMeta, dict[str, Any]], object],
    ) -> dict[str, Any]:
        """Where verl copies the rollout's log-probs, a forward pass over a few rows shows whether the trainer agrees.

        Args:
            ranks: see `rows_to_compare`.
            config: the run's, with verl's ``bypass_mode`` on.
            compute: verl's old log-probs of a batch, into its rows, and metrics.

        Returns:
            What verl would report of all rows.
        """
        micro = config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
        sample = rows_to_compare(batch, current_version, ranks, micro)
        if sample is None:
            return {}
        found: dict[str, Any] = {}
        correction = config.algorithm.rollout_correction
        correction.bypass_mode = False
        compute(sample, found)
        correction.bypass_mode = True
        self.compare_log_probs(sample, current_version)
        return {name: value for name, value in found.items() if name.startswith("training/rollout_")}

    def count_sharing(self, metrics: Mapping[str, Any], config: Any, rows: int) -> None:
        """What ``seamless.shared_prefix`` did for a batch; engines tell means over ranks and optimizer steps.

        Args:
            rows: of the batch.
        """
        n = config.actor_rollout_ref.rollout.n
        for role, model in (("actor", config.actor_rollout_ref.actor), ("critic", config.critic)):
            if f"{role}/shared_prefix/tokens" in metrics:
                optimizer_steps = model.ppo_epochs * rows / (model.ppo_mini_batch_size * n)
                for key in self._sharing:
                    self._sharing[key] += optimizer_steps * metrics[f"{role}/shared_prefix/{key}"]

    def rows_trained(self, at: float, step: int) -> RowsTrained:
        """The rows of the step that is about to be closed, for the flight recorder."""
        return RowsTrained(
            at=at,
            step=step,
            rollouts=len(self._sessions),
            staleness=tuple(self._staleness),
            prompt_tokens=tuple(prompt for prompt, _ in self._lengths),
            response_tokens=tuple(response for _, response in self._lengths),
        )

    def finish(
        self,
        *,
        step: int,
        total_steps: int,
        timing: Mapping[str, float],
        attempts: tuple[int, int] = (0, 0),
        curriculum: PoolStanding | None = None,
    ) -> StepReport:
        """Close the step, also one that an audit has ended.

        Args:
            timing: verl's ``timing_raw``.
            attempts: that ended since the step before, and how many of them failed.
        """
        step_s = timing["step"]
        passed = [p for _, _, p in self._sessions.values() if p is not None]
        rewards = [reward for _, reward, _ in self._sessions.values()]
        tokens, sharing = sum(map(sum, self._lengths)), self._sharing
        computed = sharing["tokens_computed"] / sharing["tokens"] if sharing["tokens"] else None
        report = StepReport(
            step=step,
            total_steps=total_steps,
            step_s=step_s,
            reward=float(np.mean(rewards)) if rewards else 0.0,
            pass_rate=float(np.mean(passed)) if passed and all(map(_is_share, passed)) else None,
            tokens_per_s=self._policy_tokens / step_s,
            staleness_mean=float(np.mean(self._staleness)) if self._staleness else 0.0,
            staleness_max=max(self._staleness, default=0),
            rows=self._rows,
            rollouts=len(self._sessions),
            rows_audited=self._audited,
            audit_violations=self._violations,
            max_logprob_diff=self._logprob_diff,
            attempts=attempts[0],
            attempts_failed=attempts[1],
            idle_share={pool: self._idle_share.get(pool) for pool in (TRAINER, ROLLOUT)},
            curriculum=curriculum,
            row_tokens=tokens,
            computed_tokens=round(tokens * computed) if computed is not None else None,
            sharing_saved_s=sharing["seconds_saved"] if computed is not None else None,
        )
        self._clear()
        return report

    def open_window(self, books: tuple[SliceSeconds, ...]) -> None:
        """A step begins; ``books`` are those of the whole run up to now."""
        self._books_before = books

    def close_window(self, books: tuple[SliceSeconds, ...]) -> None:
        """The step's work is done; validation and bookkeeping that follow are no part of it."""
        self._idle_share = idle_shares(self._books_before, books)


def report_validation(
    reporter: Reporter,
    step: int,
    wanted: int,
    data_sources: Sequence[str],
    uids: Sequence[str],
    infos: Mapping[str, Sequence[Any]],
) -> None:
    """Report a validation, and how many of its rollouts are missing.

    Args:
        wanted: rollouts that were asked for.
        uids: group of each rollout that came; ``data_sources`` and the columns of ``infos`` are in the same order.
    """
    for report in validation_report(step, data_sources, uids, infos):
        reporter.validation(report)
    if (missing := wanted - len(uids)) > 0:
        reporter.say(
            f"validation after step {step}: {missing} of {wanted} rollouts are missing, and in none of these "
            "figures; verl's acc counts them as 0 (the reasons are in logs/)"
        )


def validation_report(
    step: int, data_sources: Sequence[str], uids: Sequence[str], infos: Mapping[str, Sequence[Any]]
) -> Iterator[ValidationReport]:
    """One report per data source, on ``passed`` where its rewards have shares there (0 without), else on the rewards.

    Tasks go by their names, which last from one validation to the next; where several prompts of a source share one,
    by their groups, which do not.
    """
    passed = infos.get("passed") or [None] * len(uids)
    told = [(source, value) for source, value in zip(data_sources, passed, strict=True) if value is not None]
    tells = {source for source, _ in told} - {source for source, value in told if not _is_share(value)}
    by_source: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    names = [str(name or uid) for name, uid in zip(infos.get("task_id") or uids, uids, strict=True)]
    prompts = Counter((source, name) for source, name, _ in {*zip(data_sources, names, uids, strict=True)})
    shared = {source for (source, _), count in prompts.items() if count > 1}
    rows = zip(data_sources, names, uids, passed, infos["reward"], strict=True)
    for source, name, uid, has_passed, reward in rows:
        task = uid if source in shared else name
        by_source[source][task].append(float((has_passed or 0.0) if source in tells else reward))
    for name, values in by_source.items():
        estimate = clustered_mean(values)
        yield ValidationReport(
            step=step,
            name=name,
            metric="passed" if name in tells else "reward",
            mean=estimate.mean,
            low=estimate.low,
            high=estimate.high,
            tasks=estimate.tasks,
            rollouts=estimate.rollouts,
            task_means={task: sum(v) / len(v) for task, v in values.items()},
        )


def _is_share(passed: Any) -> bool:
    """Whether a ``passed`` can be averaged: verl's own agent loops may call a text ("3/5") or a count so."""
    return isinstance(passed, (int, float, np.integer, np.floating, np.bool_)) and bool(0 <= passed <= 1)


def _rows_of(column: Any) -> list[Any]:
    """A TransferQueue column as a list, one entry per row: jagged tensors, stacks or lists of plain objects."""
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    return list(column.tolist() if hasattr(column, "tolist") else column)
