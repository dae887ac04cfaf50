"""The records of a run, one per training step and one per validation set: written to its folder, printed for people.

metrics.jsonl      every metric of every step (also verl's)
steps.jsonl        the StepReport of every step
validation.jsonl   the ValidationReport of every set at every validation
curriculum.jsonl   the EpochReport of every epoch of a curriculum: what left the pool, and when

One writer per run; each record is one line, flushed at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from seamless_verl.observe.alternation import Alternation
from seamless_verl.observe.failures import alarm

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumProgress:
    """Where the curriculum is after a step.

    Attributes:
        epochs_ended: epochs whose prompts were all consumed.
        pool: prompts that the stage still draws from.
        left: prompts of the data that History Resampling has taken out and not brought back.
    """

    stage: str
    epochs_ended: int
    pool: int
    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """An epoch of the curriculum that ended with ``step``.

    Attributes:
        groups: prompts that were consumed; ``all_correct``, ``all_wrong`` and ``failed`` of them taught nothing.
            ``failed``: their groups could not be generated, or were surplus, twice.
        removed, readmitted: rows of the training data (counted from 0) that left the pool or came back.
        pool: prompts of the stage that are left.
    """

    step: int
    epoch: int
    stage: str
    groups: int
    all_correct: int
    all_wrong: int
    failed: int
    removed: tuple[int, ...]
    readmitted: tuple[int, ...]
    pool: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One training step.

    Attributes:
        reward: mean reward over rollouts.
        pass_rate: share that passed every test of the rollouts whose reward tells; ``None`` where none does.
        tokens_per_s: policy tokens trained per second of the step.
        staleness_mean, staleness_max: trained version minus version of a trajectory's first token.
        rows, rollouts: rows trained and the rollouts (sessions) that they came from.
        attempts, attempts_failed: those that ended since the step before, also of groups that later steps train.
        idle_share: by pool, the share of the step in which it had nothing to do; ``None`` where not measurable.
        rows_audited: rows whose tokens, mask and log-probs were compared with the engine's record.
        audit_violations: rows that the audit refused; above 0 only in the record of the step that the run ended in,
            which then counts as rows what was about to be trained.
        max_logprob_diff: largest |trainer - rollout| log-prob over tokens of the current version; ``None`` if none.
        curriculum: ``None`` where verl's own dataloader chooses the prompts.
        row_tokens: of the rows trained, prompts included.
        computed_tokens: distinct ones that went through the model; ``None`` without ``seamless.shared_prefix``.
        sharing_saved_s: seconds that the step would have taken longer without it, estimated.
    """

    step: int
    total_steps: int
    step_s: float
    reward: float
    pass_rate: float | None
    tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    rows: int
    rollouts: int
    rows_audited: int
    audit_violations: int
    max_logprob_diff: float | None
    attempts: int = 0
    attempts_failed: int = 0
    idle_share: Mapping[str, float | None] = field(default_factory=dict)
    curriculum: CurriculumProgress | None = None
    row_tokens: int = 0
    computed_tokens: int | None = None
    sharing_saved_s: float | None = None

    @property
    def rows_per_rollout(self) -> float:
        return self.rows / self.rollouts if self.rollouts else 0.0

    def as_metrics(self) -> dict[str, float]:
        """The report as flat metrics for wandb, tensorboard and the like; unknown values are left out."""
        flat = {f"seamless/{key}": value for key, value in asdict(self).items() if isinstance(value, (int, float))}
        flat["seamless/rows_per_rollout"] = self.rows_per_rollout
        flat.update({f"seamless/idle_share/{k}": v for k, v in self.idle_share.items() if v is not None})
        if (pool := self.curriculum) is not None:
            flat |= {"curriculum/epochs_ended": pool.epochs_ended, "curriculum/pool_size": pool.pool}
        return flat


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """One validation set at one step; ``task_means`` allows paired comparison with another step."""

    step: int
    name: str
    metric: str
    mean: float
    low: float
    high: float
    tasks: int
    rollouts: int
    task_means: Mapping[str, float]


def as_record(report: StepReport | ValidationReport | EpochReport) -> dict[str, Any]:
    """A JSON-compatible record; what is not finite (the interval around a single task) becomes null."""
    return {key: dict(value) if isinstance(value, Mapping) else finite(value) for key, value in asdict(report).items()}


def finite(value: Any) -> Any:
    """The value itself, or ``None`` for an infinite or undefined number: JSON has no word for those."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------- writing them


STEPS, METRICS, VALIDATION, EPOCHS = "steps.jsonl", "metrics.jsonl", "validation.jsonl", "curriculum.jsonl"
_BAR = 20  # characters of the progress bar
MOST_OFF, MOST_NORM_OFF = 0.05, 0.1
"""How far rows computed both ways may differ, in the mean and in the gradient's norm."""


class Reporter:
    """Writes records to the run ``folder`` (``None``: none), and lines for people to ``stream``.

    Args:
        clock: tells how long steps take with what lies between them, as validation.
    """

    def __init__(self, folder: Path | None, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._stream = stream
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=11)  # of the last steps
        self._alternation = Alternation()

    @classmethod
    def for_run(cls, run_dir: str | None) -> Reporter:
        return cls(Path(run_dir) if run_dir else None, sys.stdout)

    def step(self, report: StepReport, metrics: Mapping[str, Any]) -> None:
        self._ends.append(self._clock())
        each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) if len(self._ends) > 1 else report.step_s
        remaining = (report.total_steps - report.step) * each
        self._append(STEPS, as_record(report))
        numbers = {key: _number(value) for key, value in metrics.items() if _is_number(value)}
        self._append(METRICS, {"step": report.step, **numbers})
        self.say(step_line(report, remaining))
        for role in ("actor", "critic"):
            if (warning := computed_once_alarm(role, metrics)) is not None:
                self.say(warning)
        if (why := self._alternation.step(report.staleness_mean, report.idle_share)) is not None:
            self.say(why)

    def validation(self, report: ValidationReport) -> None:
        self._append(VALIDATION, as_record(report))
        self.say(validation_line(report))

    def epoch(self, report: EpochReport) -> None:
        self._append(EPOCHS, as_record(report))
        self.say(epoch_line(report))

    def checkpoint(self, step: int) -> None:
        self.say(f"checkpoint of step {step} written")

    def say(self, line: str) -> None:
        tell(self._stream, line)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        if self._folder is None:
            return
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        with (self._folder / name).open("ab+", buffering=0) as file:
            before = file.tell()
            if before and os.pread(file.fileno(), 1, before - 1) != b"\n":  # the machine died while it was written
                before = file.truncate(os.pread(file.fileno(), before, 0).rfind(b"\n") + 1)
            if file.write(line) < len(line):  # what the run adds when it goes on would follow on a line cut short
                file.truncate(before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def tell(stream: TextIO, text: str) -> None:
    """Write ``text`` for people: what would move the cursor or turn the text, and half characters, as escapes."""
    odd = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
    seen = re.sub(odd, lambda found: found[0].encode("unicode_escape").decode(), f"{text}\n")
    with contextlib.suppress(OSError):  # the terminal is gone; the training goes on, and its records are files
        stream.write(seen.encode(stream.encoding or "utf-8", "backslashreplace").decode(stream.encoding or "utf-8"))
        stream.flush()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a JSONL file; of lines that a crash cut short the log is told. A missing file has no records."""
    records = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), start=1):
        if (record := json_of(line)) is not None:
            records.append(record)
        else:
            _log.warning("%s: line %d is no record, and is left out", path, number)
    return records


def json_of(line: bytes) -> dict[str, Any] | None:
    """A record; what is no Unicode in it becomes replacement characters. ``None``: it is none, or nests too deep."""
    try:
        record = json.loads(line.decode("utf-8", "replace"))
        if b"\\ud" in line:  # perhaps half of a surrogate pair, which no database and no file takes
            record = json.loads(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float)) or getattr(value, "size", None) == 1 or getattr(value, "ndim", None) == 0


def _number(value: Any) -> float | int | None:
    return finite(value.item() if hasattr(value, "item") else value)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- lines for people


def step_line(report: StepReport, remaining_s: float | None) -> str:
    """``step  3/25 ███…  reward 0.42 …``: everything that tells whether the run is healthy, in one line."""
    done = round(_BAR * report.step / max(1, report.total_steps))
    width = len(str(report.total_steps))
    parts = [
        f"step {report.step:>{width}}/{report.total_steps} {'█' * done}{'░' * (_BAR - done)}",
        f"reward {report.reward:.3f}",
        *([f"pass {report.pass_rate:.0%}"] if report.pass_rate is not None else []),
        f"{_si(report.tokens_per_s)} tok/s",
        f"staleness {report.staleness_mean:.2f} (max {report.staleness_max})",
        f"rows/rollout {report.rows_per_rollout:.2f}",
        *([f"failed {report.attempts_failed} of {report.attempts} attempts"] if report.attempts_failed else []),
        *([f"{on.stage}: pool {on.pool} ({on.left} solved and taken out)"] if (on := report.curriculum) else []),
        "idle " + " ".join(f"{pool} {_share(share)}" for pool, share in report.idle_share.items()),
        *_computed_once(report),
        f"{report.step_s:.1f} s",
        *([f"{_duration(remaining_s)} left"] if remaining_s is not None else []),
    ]
    line = "  ".join(parts)
    if report.audit_violations:
        line += f"  AUDIT: {report.audit_violations} of {report.rows} rows are not what the engine returned"
    if (warning := alarm(report.step, report.attempts, report.attempts_failed)) is not None:
        line += f"\n{warning}"
    return line


def _computed_once(report: StepReport) -> Iterator[str]:
    if report.computed_tokens is not None and report.sharing_saved_s is not None:
        computed = _share(report.computed_tokens / report.row_tokens)
        yield f"computed {computed} of {_si(report.row_tokens)} tokens (saved {report.sharing_saved_s:.1f} s)"


def computed_once_alarm(role: str, metrics: Mapping[str, Any]) -> str | None:
    """Where rows computed both ways (``shared_prefix/guard.py``) differ by more than bfloat16 explains."""
    off, norm = (metrics.get(f"{role}/shared_prefix/{name}", 0.0) for name in ("off", "grad_norm_off"))
    if off <= MOST_OFF and norm <= MOST_NORM_OFF:  # not so for NaN
        return None
    return (
        f"ALARM: the {role} computed two rows with seamless.shared_prefix and without: outputs differ by {off:.2g} in "
        f"the mean (at most {MOST_OFF}), the gradient's norm by {norm:.0%} (at most {MOST_NORM_OFF:.0%}). Stop, and "
        "write seamless.shared_prefix=off"
    )


def validation_line(report: ValidationReport) -> str:
    label = "pass rate" if report.metric == "passed" else report.metric
    return (
        f"validation after step {report.step}: {report.name} {label} {report.mean:.3f} "
        f"[{report.low:.3f}, {report.high:.3f}] ({report.tasks} tasks, {report.rollouts} rollouts)"
    )


def epoch_line(report: EpochReport) -> str:
    silent = report.all_correct + report.all_wrong
    lost = f"{report.failed} given up (failed or surplus, twice); " if report.failed else ""
    return (
        f"curriculum: epoch {report.epoch} of stage {report.stage} ended: {report.groups} groups, "
        f"{silent / report.groups if report.groups else 0:.0%} without advantage; {lost}"
        f"{len(report.removed)} prompts left the pool, {len(report.readmitted)} came back, {report.pool} remain"
    )


def closing_lines(summary: Mapping[str, Any], notes: Sequence[str]) -> list[str]:
    """What a run ends with: before and after, or what its only validation found."""
    lines = [""]
    for name in summary.get("validation_sets", []):
        before, after = summary.get(f"{name}_before"), f"{summary[f'{name}_after']:.3f}"
        if before is None:  # validated once
            told = f"{after} ({_interval(*summary[f'{name}_after_ci'])})"
        else:
            gain = f"{summary[f'{name}_gain']:+.3f}, {_interval(*summary[f'{name}_gain_ci'])}"
            told = f"{before:.3f} before, {after} after ({gain})"
        lines.append(f"{name.replace('_', ' ')}: {told}")
    if (pool := summary["curriculum"]) is not None:
        lines.append(
            f"curriculum: {pool['epochs_ended']} epochs ended, now stage {pool['stage']} with {pool['pool']} prompts; "
            f"{pool['left']} solved prompts have left the pool (which ones: curriculum.jsonl)"
        )
    idle = ", ".join(f"{pool} {_share(share)}" for pool, share in summary["idle_share"].items())
    if summary["attempts_failed"]:
        lines.append(f"{summary['attempts_failed']} of {summary['attempts']} attempts failed")
    if summary["steps"]:
        lines.append(
            f"{summary['steps']} steps, {summary['rows']} rows, {_audited(summary)}, "
            f"{summary['audit_violations']} violations; idle share: {idle}"
        )
    began = summary["time_to_first_step_s"]
    until = "" if began is None else f", of which {_duration(began)} until the first training step began"
    return [*lines, f"wall time {_duration(summary['wall_s'])}{until}", *notes]


def file_lines(run_dir: Path, rows: str | None, checkpoints: str | None, steps: list[dict[str, Any]]) -> Iterator[str]:
    """Where the files of a run are, and what to look at next.

    Args:
        rows, checkpoints: their folders; ``None``: there are none.
        steps: records of ``steps.jsonl``.
    """
    yield f"files: {run_dir}"
    yield "  summary.json  these figures     metrics.jsonl  every metric of every step"
    yield "  config.yaml   what was run      logs/          a log per process"
    rows, checkpoints = (at and str(Path(at).absolute()).removeprefix(f"{run_dir}/") for at in (rows, checkpoints))
    if rows:
        yield f"  {rows + '/':<13} the trained rows, a file per step"
    if checkpoints:
        yield f"  {checkpoints + '/':<13} to resume or to export"
    yield f"look next at: seamless-verl report {run_dir} --open    (where the time went, on one page)"
    if rows and steps:
        first, last = (f"{rows}/{end(record['step'] for record in steps)}.jsonl" for end in (min, max))
        yield f"then at {first} and {last}: what agents wrote at first and at last"


def _audited(summary: Mapping[str, Any]) -> str:
    audited, others = summary["rows_audited"], summary["rows"] - summary["rows_audited"]
    who = f"the other {others} are of verl's" if audited else "verl's"
    why = f" ({who} own agent loops{', which' if audited else ''} leave no record to compare)"
    return f"{audited} audited{why if others else ''}"


def _interval(low: float | None, high: float | None) -> str:
    return "no interval" if low is None or high is None else f"95 % interval {low:+.3f} … {high:+.3f}"


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.0%}"


def _si(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
