"""What a simulation says, as a row: for the table on the terminal, for JSON and for Parquet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from seamless_verl.errors import ConfigError
from seamless_verl.simulation.fluid import best_limit
from seamless_verl.simulation.run import Result
from seamless_verl.simulation.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One setting and its figures.

    Attributes:
        label: what the user calls it.
        changed: the settings that were made, as they were written.
        slices: of each pool, ``trainers 4 + rollouts 4``.
        gpus: devices in all.
        step_s: seconds per step.
        step_s_least, step_s_most: over the seeds; both equal ``step_s`` where there is one. The other figures are those
            of the seed in the middle.
        tokens_per_s: trained tokens of all devices together, prompts included.
        limit_share: of these slices the fluid limit with costs paid (`best_limit`) over ``step_s``; 1 is the best that
            any policy could do with samples of that age. None where the system does not bound their age.
        train, generate, prefill, sync, switch, failed, idle: shares of all device time; they add up to 1.
        trainable_idle: idle share of the slices that can train.
        mean_staleness, max_staleness: in versions.
        loans: LEND decisions carried out.
    """

    label: str
    changed: tuple[str, ...]
    system: str
    slices: str
    gpus: int
    eta: int
    step_s: float
    step_s_least: float
    step_s_most: float
    tokens_per_s: float
    limit_share: float | None
    train: float
    generate: float
    prefill: float
    sync: float
    switch: float
    failed: float
    idle: float
    trainable_idle: float
    mean_staleness: float
    max_staleness: int
    loans: int


def outcome(label: str, results: Sequence[Result], changed: Sequence[str] = ()) -> Outcome:
    """The row of one scenario's results, one per seed."""
    times = sorted(result.step_s for result in results)
    step_s = sum(times) / len(times)
    result = sorted(results, key=lambda result: result.step_s)[len(results) // 2]
    scenario, books = result.scenario, result.books
    limit_s = best_limit(scenario)
    shares = {use.value: seconds / (books.wall_s * books.gpus) for use, seconds in books.gpu_seconds.items()}
    return Outcome(
        label=label,
        changed=tuple(changed),
        system=scenario.system,
        slices=_slices(scenario),
        gpus=scenario.gpus,
        eta=scenario.eta,
        step_s=step_s,
        step_s_least=times[0],
        step_s_most=times[-1],
        tokens_per_s=result.tokens_per_s,
        limit_share=None if limit_s is None else limit_s / step_s,
        train=shares["train"],
        generate=shares["generate"],
        prefill=shares["prefill"] + shares["prefill_again"],
        sync=shares["sync"],
        switch=shares["switch"],
        failed=shares["failed"],
        idle=books.idle_share,
        trainable_idle=books.trainable_idle_share,
        mean_staleness=result.mean_staleness,
        max_staleness=result.max_staleness,
        loans=result.lends,
    )


def described(scenario: Scenario) -> str:
    """What is simulated, in one line."""
    sizes = "/".join(str(size) for size in sorted({pool.gpus for pool in scenario.pools}))
    counted = f"steps {scenario.warm + 1} to {scenario.steps} count" if scenario.warm else f"{scenario.steps} steps"
    fewer = "" if scenario.in_flight is None else f", {scenario.in_flight:g} batches in flight"
    return (
        f"{scenario.system} on {scenario.gpus} GPUs in slices of {sizes} ({_slices(scenario)}), "
        f"eta {scenario.eta}{fewer}, {scenario.batch} x {scenario.attempts} answers a step; {counted}"
    )


def _slices(scenario: Scenario) -> str:
    return " + ".join(f"{pool.name} {pool.slices}" for pool in scenario.pools)


LEGEND = """\
step s         mean of the steps that count; those before them fill the pipeline
tok/s          trained tokens of all GPUs together, prompts included
of limit       share of the fastest step that any policy could have on these slices with samples of that age
train … idle   shares of all device time
trainers idle  idle share of the slices that can train
staleness      mean/most of the trained samples, in weight versions
loans          slices lent to rollout"""


def table(rows: Sequence[Outcome]) -> str:
    """Fixed columns; shares of device time in per cent."""
    width = max(len(row.label) for row in rows)
    failures, seeds = any(row.failed for row in rows), any(row.step_s_least < row.step_s_most for row in rows)
    head = (
        f"{'':<{width}}  {'step s':>8}{'  least-most':>16}" if seeds else f"{'':<{width}}  {'step s':>8}"
    ) + f" {'tok/s':>8} {'of limit':>8}  {'train':>5} {'gen':>5} {'prefill':>7} {'sync':>5} {'switch':>6}"
    head += f"{' failed' if failures else ''} {'idle':>5}  {'trainers idle':>13}  {'staleness':>9} {'loans':>5}"
    lines = [head]
    for row in rows:
        spread = f"{row.step_s_least:.1f}-{row.step_s_most:.1f}"
        limit = "-" if row.limit_share is None else f"{row.limit_share:.0%}"
        failed = f" {row.failed:6.0%}" if failures else ""
        lines.append(
            f"{row.label:<{width}}  {row.step_s:8.1f}{f'{spread:>16}' if seeds else ''} {row.tokens_per_s:8.0f}"
            f" {limit:>8}  {row.train:5.0%} {row.generate:5.0%} {row.prefill:7.0%} {row.sync:5.0%} {row.switch:6.0%}"
            f"{failed} {row.idle:5.0%}  {row.trainable_idle:13.0%}"
            f"  {f'{row.mean_staleness:.1f}/{row.max_staleness}':>9} {row.loans:5d}"
        )
    return "\n".join(lines)


def write_json(file: Path, rows: Sequence[Outcome], extra: dict[str, object]) -> None:
    """``{"settings": [row, …], **extra}``."""
    document = {"settings": [asdict(row) for row in rows], **extra}
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_parquet(file: Path, rows: Sequence[Outcome]) -> None:
    """One column per field.

    Raises:
        ConfigError: pyarrow is not installed (verl brings it).
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError("--parquet", file, "needs pyarrow", "pip install pyarrow, or use --json") from None
    columns = {spec.name: [getattr(row, spec.name) for row in rows] for spec in fields(Outcome)}
    parquet.write_table(pyarrow.table(columns), file)
