"""What a simulation says, as a row: for the table on the terminal, for JSON and for Parquet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from seamless_verl.errors import ConfigError
from seamless_verl.simulation.fluid import best_limit
from seamless_verl.simulation.scenario import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One setting.

    Attributes:
        label: what the user calls it.
        slices: of each pool, ``trainers 4 + rollouts 4``.
        gpus: devices in all.
        step_s: seconds per step.
        tokens_per_s: trained tokens, prompts included.
        limit_share: of these slices the fluid limit with costs paid (`best_limit`) over ``step_s``; 1 is the best that
            any policy could do with samples of that age. None where the system does not bound their age.
        train, generate, prefill, sync, switch, idle: shares of all device time.
        trainable_idle: idle share of the slices that can train.
        mean_staleness, max_staleness: in versions.
        loans: LEND decisions carried out.
    """

    label: str
    system: str
    slices: str
    gpus: int
    eta: int
    step_s: float
    tokens_per_s: float
    limit_share: float | None
    train: float
    generate: float
    prefill: float
    sync: float
    switch: float
    idle: float
    trainable_idle: float
    mean_staleness: float
    max_staleness: int
    loans: int


def outcome(label: str, result: Result) -> Outcome:
    """The row of a result."""
    scenario, books = result.scenario, result.books
    limit_s = best_limit(scenario)
    shares = {use.value: seconds / (books.wall_s * books.gpus) for use, seconds in books.gpu_seconds.items()}
    return Outcome(
        label=label,
        system=scenario.system,
        slices=" + ".join(f"{pool.name} {pool.slices}" for pool in scenario.pools),
        gpus=scenario.gpus,
        eta=scenario.eta,
        step_s=result.step_s,
        tokens_per_s=result.tokens_per_s,
        limit_share=None if limit_s is None else limit_s / result.step_s,
        train=shares["train"],
        generate=shares["generate"],
        prefill=shares["prefill"] + shares["prefill_again"],
        sync=shares["sync"],
        switch=shares["switch"],
        idle=books.idle_share,
        trainable_idle=books.trainable_idle_share,
        mean_staleness=result.mean_staleness,
        max_staleness=result.max_staleness,
        loans=result.lends,
    )


def table(rows: Sequence[Outcome]) -> str:
    """Fixed columns; shares of device time in per cent."""
    width = max(len(row.label) for row in rows)
    head = (
        f"{'':<{width}}  {'step s':>8} {'tok/s':>8} {'of limit':>8}  {'train':>5} {'gen':>5} {'prefill':>7}"
        f" {'sync':>5} {'switch':>6} {'idle':>5}  {'trainers idle':>13}  {'staleness':>9}"
    )
    lines = [head]
    for row in rows:
        used = (
            f"{row.train:5.0%} {row.generate:5.0%} {row.prefill:7.0%} {row.sync:5.0%} {row.switch:6.0%} {row.idle:5.0%}"
        )
        stale = f"{row.mean_staleness:.1f}/{row.max_staleness}"
        limit = "-" if row.limit_share is None else f"{row.limit_share:.0%}"
        lines.append(
            f"{row.label:<{width}}  {row.step_s:8.1f} {row.tokens_per_s:8.0f} {limit:>8}  {used}"
            f"  {row.trainable_idle:13.0%}  {stale:>9}"
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
