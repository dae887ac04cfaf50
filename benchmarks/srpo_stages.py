"""SRPO's two stages against both sources from the start: whole runs of ``+recipe=srpo``, lengths over time.

    python -m benchmarks.srpo_stages [--quick] [--resume FILE --minutes 8] [--svg FILE] [--json FILE]

Same steps, same prompts per step, three seeds; the first stage takes half of the steps. Held-out problems of both
sources are answered before and after. Lengths are in tokens, per step and source, of the rows that were trained.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.intervals import interval
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report

_ROOT = Path(__file__).parents[1]
_SEEDS, _STEPS, _QUICK_STEPS = 3, 48, 8
_SOURCES = ("math", "code")
_ANSWERS = 8  # to each held-out problem
ORDERS = ("two stages", "mixed")


def _stages(order: str, steps: int) -> str:
    first = f"{{name: math, sources: [math], until_step: {steps // 2}}}, " if order == "two stages" else ""
    return f"seamless.curriculum.stages=[{first}{{name: math+code, sources: [math, code]}}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run.

    Attributes:
        lengths: per source and step, mean tokens of an answer; None where a step had none of the source.
        before, after: per source, accuracy and mean tokens on held-out problems.
    """

    lengths: Mapping[str, list[float | None]]
    before: Mapping[str, tuple[float, float]]
    after: Mapping[str, tuple[float, float]]


def run(order: str, seed: int, steps: int) -> Measured:
    """Start it as a user would, and read what it leaves.

    Raises:
        CalledProcessError: it did not end well.
    """
    from transformers import AutoTokenizer

    from seamless_verl.recipes.srpo import assets

    with tempfile.TemporaryDirectory(prefix="srpo-") as temporary:
        folder = Path(temporary) / "run"
        command = [
            *(sys.executable, "-m", "seamless_verl.main", "+recipe=srpo", _stages(order, steps)),
            *(f"data.seed={seed}", f"trainer.total_training_steps={steps}", f"hydra.run.dir={folder}"),
            *(f"trainer.validation_data_dir={folder}/held_out", f"actor_rollout_ref.rollout.val_kwargs.n={_ANSWERS}"),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
        subprocess.run(command, cwd=_ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        tokenizer = AutoTokenizer.from_pretrained(assets.build() / "model")
        trained = [_answers(folder / "rows" / f"{step}.jsonl", tokenizer) for step in range(1, steps + 1)]
        first, last = (_answers(folder / "held_out" / f"{step}.jsonl", tokenizer) for step in (0, steps))
    return Measured(
        lengths={source: [_mean(row["tokens"] for row in rows[source]) for rows in trained] for source in _SOURCES},
        before={source: _figures(first[source]) for source in _SOURCES},
        after={source: _figures(last[source]) for source in _SOURCES},
    )


def _answers(file: Path, tokenizer: Any) -> dict[str, list[dict[str, float]]]:
    """Accuracy and tokens of each row that verl wrote, by source: expressions have a parenthesis or a ``%``."""
    from seamless_verl.recipes.srpo.reward import compute_score

    found: dict[str, list[dict[str, float]]] = {source: [] for source in _SOURCES}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        source = "code" if any(mark in row["input"] for mark in "(%") else "math"
        tokens = len(tokenizer.encode(row["output"], add_special_tokens=False))
        accuracy = compute_score(source, row["output"], row["gts"])["acc"]
        found[source].append({"acc": accuracy, "tokens": tokens})
    return found


def _mean(values: Any) -> float | None:
    taken = [*values]
    return statistics.fmean(taken) if taken else None


def _figures(rows: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    return statistics.fmean(row["acc"] for row in rows), statistics.fmean(row["tokens"] for row in rows)


def records(found: Mapping[str, Sequence[Measured]]) -> list[Record]:
    told = [Record(name="seeds", value=len(found["mixed"]), unit="runs per order")]
    for order, runs in found.items():
        for source in _SOURCES:
            for when in ("before", "after"):
                accuracy, tokens = (
                    statistics.fmean(getattr(one, when)[source][which] for one in runs) for which in (0, 1)
                )
                told.append(Record(name=f"{order}, {source}: held-out accuracy {when}", value=accuracy, unit=""))
                told.append(Record(name=f"{order}, {source}: held-out length {when}", value=tokens, unit="tokens"))
    for source in _SOURCES:
        for which, name in enumerate(("accuracy", "length")):
            gains = [
                staged.after[source][which] - mixed.after[source][which]
                for staged, mixed in zip(found["two stages"], found["mixed"], strict=True)
            ]
            for end, value in zip(("low", "high"), interval(gains), strict=True):
                told.append(Record(name=f"two stages - mixed, {source}: {name}, {end} (95 %)", value=value, unit=""))
    return told


def plot(file: Path, found: Mapping[str, Sequence[Measured]]) -> None:
    """Mean over the seeds; a source that a step does not have stays where it was."""
    panels = []
    for source in _SOURCES:
        series: dict[str, list[float]] = {}
        for order, runs in found.items():
            line: list[float] = []
            for values in zip(*(one.lengths[source] for one in runs), strict=True):
                mean = _mean(value for value in values if value is not None)
                line.append(mean if mean is not None else line[-1] if line else runs[0].before[source][1])
            series[order] = line
        panels.append(plots.lines(f"{source}: tokens of an answer", series, "steps"))
    plots.figure(file, panels)


def main() -> int:
    options = arguments(__doc__ or "", plots.extend)
    steps, seeds = (_QUICK_STEPS, 1) if options.quick else (_STEPS, _SEEDS)
    taken = Parts(options)
    for seed in range(seeds):
        for order in ORDERS if seed % 2 else ORDERS[::-1]:
            if len(taken.of(order)) > seed:
                continue
            if taken.out_of_time:
                return taken.pause()
            measured = run(order, seed, steps)
            taken.add(order, asdict(measured))
            told = ", ".join(f"{s} {measured.after[s][0]:.3f} at {measured.after[s][1]:.1f} tokens" for s in _SOURCES)
            print(f"seed {seed}, {order}: {told}", flush=True)
    found = {order: [Measured(**one) for one in taken.of(order)] for order in ORDERS}
    if options.svg is not None:
        plot(options.svg, found)
    return report(records(found), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
