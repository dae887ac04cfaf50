"""Whole training runs on one device that trains and rolls out in turn: weights, log-probs, rows and memory."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_checks.live import Run, run, settings
from benchmarks.gpu_checks.registry import Context
from benchmarks.records import Record

_GIB = 1 << 30
_STEPS = 3
# Answers of told lengths are never right. Answers of one prompt differ in this, so that there is something to learn.
_REWARD = """def compute_score(data_source, solution_str, ground_truth, **_):
    return sum(ord(letter) % 2 for letter in solution_str) / max(len(solution_str), 1)
"""
ONE_UPDATE = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
Line = dict[str, Any]


def tolerance(context: Context) -> float:
    """Between log-probs of trainer and engine, of one token. Eight bits leave the same weights some tenths apart at
    most; other weights are nats away."""
    return 0.5 if context.on_gpu else 1e-4


def run_offload(context: Context) -> list[Record]:
    """Offloading off and on."""
    records = []
    for offload in (False, True):
        name = f"offload-{'on' if offload else 'off'}"
        overrides = [
            *settings(context),
            *offloading(offload),
            *skewed_lengths(context),
            *ONE_UPDATE,
            "seamless.staleness.eta=0",  # every token is of the weights being trained, so log-probs are comparable
            f"trainer.total_training_steps={_STEPS}",
        ]
        probe = context.folder / f"{name}.jsonl"
        done = watched(context, overrides, probe, name=name, watches="memory")
        told = [*of_summary(done, _STEPS, tolerance(context)), *memory_by_phase(lines_of(probe))]
        records += [named(record, f"{name.replace('-', ' ')}: ") for record in told]
    return records


def run_mini_batches(context: Context) -> list[Record]:
    """Four updates per batch, lending within the step as well; weights compared at each publication and loan."""
    overrides = [
        *settings(context),
        *offloading(True),
        *skewed_lengths(context),
        "seamless.staleness.eta=0",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"trainer.total_training_steps={_STEPS}",
    ]
    probe = context.folder / "weights.jsonl"
    done = watched(context, overrides, probe, watches="weights", dtype="bfloat16" if context.on_gpu else "float32")
    return [*of_summary(done, _STEPS, tolerance(context)), *of_weights(lines_of(probe))]


def run_adapter(context: Context) -> list[Record]:
    """An adapter that stays apart from the base model; its updates are large, so that the base alone would show."""
    overrides = [
        *settings(context),
        *offloading(True),
        *skewed_lengths(context),
        "seamless.staleness.eta=0",
        *ONE_UPDATE,
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.model.lora_alpha=16",
        "actor_rollout_ref.actor.optim.lr=3e-2",
        "actor_rollout_ref.rollout.load_format=safetensors",  # verl sends the adapter only, never the base
        f"trainer.total_training_steps={_STEPS}",
    ]
    probe = context.folder / "weights.jsonl"
    done = watched(context, overrides, probe, watches="weights", dtype="bfloat16" if context.on_gpu else "float32")
    versions = {line["version"]: line["sums"] for line in lines_of(probe) if line["kind"] == "published"}
    changed = len({json.dumps(sums, sort_keys=True) for sums in versions.values()})
    return [
        *of_summary(done, _STEPS, tolerance(context)),
        Record(
            name="versions of the adapter", value=changed, unit="", bar=f"= {_STEPS + 1}", holds=changed == _STEPS + 1
        ),
    ]


def offloading(on: bool) -> list[str]:
    return [f"actor_rollout_ref.actor.fsdp_config.{what}_offload={str(on).lower()}" for what in ("param", "optimizer")]


def skewed_lengths(context: Context) -> list[str]:
    """Answers of told lengths with a long tail, four to a prompt, so that a mini-batch is often waited for; their rows
    carry the stamp that the audit reads."""
    from benchmarks.forced_lengths import write_workload

    data = write_workload(context.folder, lengths="skewed", prompts=64, sessions=4, longest=240)
    (context.folder / "reward.py").write_text(_REWARD)
    return [
        f"reward.custom_reward_function.path={context.folder}/reward.py",
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"+actor_rollout_ref.rollout.agent.agent_loop_config_path={context.folder}/agent_loops.yaml",
        "data.max_response_length=240",
        "actor_rollout_ref.rollout.max_model_len=272",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    ]


def watched(
    context: Context,
    overrides: Sequence[str],
    probe: Path,
    *,
    name: str = "run",
    watches: str,
    dtype: str = "float32",
    **further: str,
) -> Run:
    probe.touch()  # a run that does not begin leaves nothing in it, and says why itself
    return run(
        context,
        overrides,
        name=name,
        modules="benchmarks.gpu_checks.probes",
        BENCHMARK_PROBE=str(probe),
        BENCHMARK_WATCHES=watches,
        BENCHMARK_DTYPE=dtype,
        **further,
    )


def of_summary(done: Run, steps: int, most_off: float) -> list[Record]:
    """What every run must show."""
    told = done.summary()
    audited = told["rows_audited"] / max(told["rows"], 1)
    off = told["max_logprob_diff"]
    held = off is not None and off <= most_off
    violations = told["audit_violations"]
    return [
        Record(name="steps", value=told["steps"], unit="", bar=f"= {steps}", holds=told["steps"] == steps),
        Record(name="rows audited", value=audited, unit="share", bar="= 1", holds=audited == 1),
        Record(name="rows that failed the audit", value=violations, unit="", bar="= 0", holds=violations == 0),
        Record(
            name="log-probs, trainer against engine",
            value=off if off is not None else -1.0,
            unit="nats",
            bar=f"<= {most_off:g}",
            holds=held,
        ),
        training_price(done),
    ]


def training_price(done: Run) -> Record:
    """The median step's seconds of training per token, prompts included, on the one device; without old log-probs."""
    steps = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    price = statistics.median(step["timing_s/update_actor"] / step["perf/total_num_tokens"] for step in steps)
    said = f"--set train.gpu_s_per_token={price:.3g}"
    return Record(name="price of training", value=1e6 * price, unit="us/token", bar=said)


def of_weights(lines: Iterable[Line]) -> list[Record]:
    """Engine's and trainer's weights at each loan, against those that the version was published with."""
    published, loans, old = {}, [], []
    for line in lines:
        if line["kind"] == "published":
            published[line["version"]] = line["sums"]
        elif line["kind"] == "loan":
            loans.append(line)
        elif line["kind"] == "old_log_probs":
            old.append(line)
    of_engine = sum(loan["engine"] != published.get(loan["version"]) for loan in loans)
    given = sum(loan["given"] != published.get(loan["version"]) for loan in loans)
    lost = {"a loan": sum(not loan["kept"] for loan in loans), "old log-probs": sum(not line["kept"] for line in old)}
    different = len({json.dumps(sums, sort_keys=True) for sums in published.values()})
    within = sum(loan["within_step"] for loan in loans)
    return [
        Record(name="loans", value=len(loans), unit="", bar=">= 3", holds=len(loans) >= _STEPS),
        Record(name="loans within a step", value=within, unit="", bar="> 0", holds=within > 0),
        Record(name="loans with an engine of other weights", value=of_engine, unit="", bar="= 0", holds=not of_engine),
        Record(name="loans whose trainer had other weights", value=given, unit="", bar="= 0", holds=not given),
        *(
            Record(name=f"times that {what} lost updates", value=times, unit="", bar="= 0", holds=times == 0)
            for what, times in lost.items()
        ),
        Record(
            name="published versions that differ",
            value=different,
            unit="",
            bar=f"= {len(published)}",
            holds=different == len(published),
        ),
    ]


def memory_by_phase(lines: Sequence[Line]) -> list[Record]:
    """The most that the device held in each phase, all its owners together."""
    samples = [(line["at"], line["used"]) for line in lines if line["kind"] == "memory" and line["total"]]
    if not samples:
        return [Record(name="memory: nobody counts it here", value=0, unit="")]
    open_since: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for line in lines:
        if line["kind"] != "phase":
            continue
        if line["edge"] == "began":
            open_since[line["phase"]] = line["at"]
            continue
        began = open_since.pop(line["phase"], line["at"])
        before = [used for at, used in samples if at <= began][-1:]
        within = [used for at, used in samples if began < at <= line["at"]]
        peaks[line["phase"]] = max([peaks.get(line["phase"], 0.0), *before, *within])
    return [Record(name=f"memory in {phase}, most", value=peak / _GIB, unit="GiB") for phase, peak in peaks.items()]


def lines_of(file: Path) -> list[Line]:
    return sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda line: float(line["at"]))


def named(record: Record, prefix: str) -> Record:
    return Record(name=prefix + record.name, value=record.value, unit=record.unit, bar=record.bar, holds=record.holds)
