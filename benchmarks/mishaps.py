"""What users get wrong, tried with the real commands: does the message help, how long does it take, what is left?

    python -m benchmarks.mishaps [--quick] [--only WORD] [--json FILE]

Each mishap starts a command in a folder of its own, made by ``seamless-verl new``. Asked of each, before anything heavy
starts: exit code 2, every word of the list in what it prints, no traceback, the end within 60 s, no process, no shared
memory and no temporary file left (what other runs of this machine make meanwhile counts as left). ``--quick``: a few of
them. ``--messages FILE`` writes down what was said.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.mishap_list import MISHAPS, Mishap
from benchmarks.records import Record, arguments, report
from seamless_verl.errors import ConfigError
from seamless_verl.run.new_command import write

_MARK = "BENCHMARK_MARK"
_MOST_S = 60.0
_REFUSED = 2
_QUICK = 5
_SETTLE_S = 5.0  # for what is ended after the command itself
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    code: int
    said: str
    seconds: float
    left: tuple[str, ...]


def try_out(mishap: Mishap, assets: Path) -> Ended:
    """Start the command, do what the mishap wants done, and look at what is left."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="mishap-") as scratch, _taken_port() as port:
        folder = Path(scratch)
        write("my_task", folder)
        (folder / "tmp").mkdir()
        for split in ("train", "val"):
            shutil.copy(assets / f"{split}.parquet", folder)
        mishap.prepare(folder)
        places = {"folder": str(folder), "assets": str(assets), "port": str(port)}
        command = [word.format(**places) for word in mishap.command]
        shared = set(_SHM.iterdir()) if _SHM.is_dir() else set()
        environment = {**os.environ, _MARK: mark, "TMPDIR": str(folder / "tmp")}
        environment.pop("RAY_ADDRESS", None)
        code, said, seconds = _run(command, folder, environment)
        left = _left(mark, shared, folder / "tmp")
    return Ended(code=code, said=said, seconds=seconds, left=left)


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str, float]:
    """Exit code, output, seconds."""
    log, began = folder / "said", time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(_MOST_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, log.read_text(errors="replace"), time.monotonic() - began


def _left(mark: str, shared: set[Path], temporary: Path) -> tuple[str, ...]:
    """What the command left behind, after `_SETTLE_S` at most; what is left is ended."""
    until = time.monotonic() + _SETTLE_S
    while (found := _marked(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    left = [f"process {' '.join(process.info['cmdline'] or [])[:80]}" for process in found]
    for process in found:
        process.kill()
    left += [f"temporary {path.name}" for path in temporary.iterdir()]
    ours = (path for path in (set(_SHM.iterdir()) - shared if _SHM.is_dir() else ()) if path.exists())
    return (*left, *(f"shared memory {path.name}" for path in ours if path.stat().st_uid == os.getuid()))


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            if process.environ().get(_MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wrong_with(mishap: Mishap, ended: Ended) -> list[str]:
    """Why it does not hold; empty: it does."""
    wrong = [f"does not say {word!r}" for word in mishap.words if word not in ended.said]
    if ended.code != _REFUSED:
        wrong.append(f"exit code {ended.code}")
    if "Traceback (most recent call last)" in ended.said:
        wrong.append("a traceback")
    if ended.seconds > _MOST_S:
        wrong.append(f"{ended.seconds:.0f} s")
    return [*wrong, *(f"left: {one}" for one in ended.left)]


@contextmanager
def _taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def _assets(root: Path) -> Path:
    """Data and the tiny model of the example, built once."""
    write("my_task", root)
    built = subprocess.run(
        [sys.executable, "-m", "my_task.data"], cwd=root, check=True, stdout=subprocess.PIPE, text=True
    )
    return Path(built.stdout.split("assets: ", 1)[1].rpartition(" (")[0])


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="WORD", help="those with this word in their name")
    parser.add_argument("--messages", type=Path, metavar="FILE", help="write down what each of them said")


def main() -> int:
    options = arguments(__doc__ or "", _extend)
    chosen = [one for one in MISHAPS if options.only in one.name][: _QUICK if options.quick else None]
    if not chosen:
        raise ConfigError("--only", options.only, "is in no mishap's name", "leave it out to see them all")
    records: list[Record] = []
    messages: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mishaps-") as scratch:
        assets = _assets(Path(scratch))
        for mishap in chosen:
            if (why_not := mishap.cannot()) is not None:
                print(f"not tried: {mishap.name} ({why_not})", flush=True)
                continue
            ended = try_out(mishap, assets)
            wrong = wrong_with(mishap, ended)
            print(
                f"{'holds ' if not wrong else 'MISSED'} {mishap.name} ({ended.seconds:.0f} s) {'; '.join(wrong)}",
                flush=True,
            )
            messages.append(f"## {mishap.name}: exit code {ended.code}, {ended.seconds:.1f} s\n{ended.said.strip()}\n")
            records.append(
                Record(name=mishap.name, value=round(ended.seconds, 1), unit="s", bar="≤ 60 s", holds=not wrong)
            )
    if options.messages:
        options.messages.write_text("\n".join(messages), encoding="utf-8")
    held = sum(record.holds is True for record in records)
    records.append(Record(name="mishaps that hold", value=held, unit=f"of {len(records)}"))
    return report(records, options.json)


if __name__ == "__main__":
    sys.exit(main())
