"""What users get wrong and what happens to runs, with the real commands: does the message help, how long does it take?

    python -m benchmarks.mishaps [--quick] [--only WORD] [--resume FILE] [--json FILE]

Each mishap starts a command in a folder of its own, made by ``seamless-verl new``. Asked of each: the exit code (2
where it is refused before anything heavy starts), every word of the list in what it prints, no traceback, the end
within 60 s of the mishap, no process, no shared memory and no temporary file left, and where something can be mended,
that the same command goes on then. Where the user may make mounts, the benchmark has some of its own (``/dev/shm``,
disks that fill up); elsewhere what other runs of this machine make meanwhile counts as left. ``--quick``: a few of
them. ``--messages FILE`` writes down what was said. ``--resume FILE`` goes on, and tries once more what missed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import parts
from benchmarks.mishap import MARK, Live, Mishap, Missed, in_the_end, marked
from benchmarks.mishap_list import MISHAPS
from benchmarks.mishap_runs import no_mounts
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report
from seamless_verl.errors import ConfigError
from seamless_verl.run.new_command import write

_MOST_S = 60.0
_AGAIN_S = 600.0
_QUICK = 5
_SETTLE_S = 5.0  # for what is ended after the command itself
_SHM = Path("/dev/shm")
_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended: ``wrong`` is why its mishap does not hold, empty if it does."""

    code: int
    said: str
    seconds: float
    wrong: tuple[str, ...]


def try_out(mishap: Mishap, assets: Path) -> Ended:
    """Start the command, let the mishap happen, and look at what is left."""
    with tempfile.TemporaryDirectory(prefix="mishap-") as scratch, _taken_port() as port, ExitStack() as mounts:
        folder = Path(scratch)
        mounts.callback(_unmount, folder)
        write("my_task", folder)
        (folder / "tmp").mkdir()
        for split in ("train", "val"):
            shutil.copy(assets / f"{split}.parquet", folder)
        mishap.prepare(folder)
        places = {"folder": str(folder), "assets": str(assets), "port": str(port), "python": sys.executable}
        command = [word.format(**places) for word in mishap.command]
        shared = set(_SHM.iterdir()) if _SHM.is_dir() else set()
        live = _started(command, folder, "said")
        said, seconds, missed = _run(live, mishap)
        wrong = [*missed, *_wrong_with(mishap.words, mishap.code, live.process.returncode, said)]
        if seconds > _MOST_S:
            wrong.append(f"{seconds:.0f} s")
        wrong += [f"left: {one}" for one in _left(live.mark, shared, folder / "tmp")]
        if mishap.again is not None and not wrong:
            mishap.again.mend(folder)
            after = _started(command, folder, "said again")
            _end(after.process, _AGAIN_S)
            wrong += [
                f"again: {one}" for one in _wrong_with(mishap.again.words, 0, after.process.returncode, after.said())
            ]
            said += f"\n--- again:\n{after.said()}"
    return Ended(code=live.process.returncode, said=said, seconds=seconds, wrong=tuple(wrong))


def _started(command: list[str], folder: Path, log: str) -> Live:
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "TMPDIR": str(folder / "tmp")}
    environment.pop("RAY_ADDRESS", None)
    with (folder / log).open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Live(process=process, folder=folder, log=folder / log, mark=mark)


def _run(live: Live, mishap: Mishap) -> tuple[str, float, list[str]]:
    """What it said, the seconds from the mishap to its end, and why that did not happen."""
    began, missed = time.monotonic(), []
    try:
        mishap.happens(live)
        if mishap.happens is not in_the_end:
            began = time.monotonic()
    except Missed as why:
        missed.append(f"the mishap did not happen: {why}")
    _end(live.process, _MOST_S)
    return live.said(), time.monotonic() - began, missed


def _end(process: subprocess.Popen[bytes], limit_s: float) -> None:
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wrong_with(words: Sequence[str], wanted: int, code: int, said: str) -> list[str]:
    wrong = [f"does not say {word!r}" for word in words if word not in said]
    if code != wanted:
        wrong.append(f"exit code {code}")
    if _TRACEBACK in said:
        wrong.append("a traceback")
    return wrong


def _left(mark: str, shared: set[Path], temporary: Path) -> list[str]:
    """What the command left behind, after `_SETTLE_S` at most; what is left is ended."""
    until = time.monotonic() + _SETTLE_S
    while (found := marked(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    left = [f"process {' '.join(process.info['cmdline'] or [])[:80]}" for process in found]
    for process in found:
        process.kill()
    left += [f"temporary {path.name}" for path in temporary.iterdir()]
    ours = (path for path in (set(_SHM.iterdir()) - shared if _SHM.is_dir() else ()) if path.exists())
    return [*left, *(f"shared memory {path.name}" for path in ours if path.stat().st_uid == os.getuid())]


def _mounts_of_our_own() -> None:
    """What is mounted from here on is seen by this process and its children only, and goes with them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4g,mode=1777", "none", str(_SHM)], check=True)


def _unmount(folder: Path) -> None:
    if (folder / "run").is_mount():
        subprocess.run(["umount", "--lazy", str(folder / "run")], check=True)


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
    parts.extend(parser)


def main() -> int:
    options = arguments(__doc__ or "", _extend)
    chosen = [one for one in MISHAPS if options.only in one.name][: _QUICK if options.quick else None]
    if not chosen:
        raise ConfigError("--only", options.only, "is in no mishap's name", "leave it out to see them all")
    if no_mounts() is None:
        _mounts_of_our_own()
    kept = Parts(options)
    with tempfile.TemporaryDirectory(prefix="mishaps-") as scratch:
        assets = _assets(Path(scratch))
        for mishap in chosen:
            if (tries := kept.of(mishap.name)) and not tries[-1]["wrong"]:
                continue
            if kept.out_of_time:
                return kept.pause()
            if (why_not := mishap.cannot()) is not None:
                print(f"not tried: {mishap.name} ({why_not})", flush=True)
                continue
            ended = try_out(mishap, assets)
            verdict = "MISSED" if ended.wrong else "holds "
            print(f"{verdict} {mishap.name} ({ended.seconds:.0f} s) {'; '.join(ended.wrong)}", flush=True)
            kept.add(mishap.name, asdict(ended))
    tried = {mishap.name: kept.of(mishap.name)[-1] for mishap in chosen if kept.of(mishap.name)}
    if options.messages:
        told = (f"## {name}: exit code {last['code']}\n{last['said'].strip()}\n" for name, last in tried.items())
        options.messages.write_text("\n".join(told), encoding="utf-8")
    records = [
        Record(name=name, value=round(last["seconds"], 1), unit="s", bar="≤ 60 s", holds=not last["wrong"])
        for name, last in tried.items()
    ]
    held = sum(record.holds is True for record in records)
    records.append(Record(name="mishaps that hold", value=held, unit=f"of {len(tried)}"))
    return report(records, options.json)


if __name__ == "__main__":
    sys.exit(main())
