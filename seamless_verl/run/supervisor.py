"""Runs the trainer in a process of its own and leaves nothing behind, however it ends.

The supervisor is the process that the user started: small, without torch. Every process of the run carries
``SEAMLESS_RUN_ID`` in its environment; whoever still carries it after the trainer's end is ended here. Being a
subreaper, the supervisor also inherits orphans whose parents were killed, and ends those that carry no mark (a program
started with an empty environment).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from seamless_verl import nursery
from seamless_verl.agents.ties import adopt_orphans, die_with_parent
from seamless_verl.machine import APART, WEIGHTS, mapped_files, sees_all_users

RUN_ID = "SEAMLESS_RUN_ID"
# Ray and vLLM rename their processes; without it the new title is written over the environment that /proc shows, and
# over the mark with it.
_KEEP_ENVIRONMENT = "SPT_NOENV"
MARKS = (RUN_ID, _KEEP_ENVIRONMENT)
"""Variables by which processes of a run are found."""
INTERPRETER = "SEAMLESS_INTERPRETER"
JOURNALS = "SEAMLESS_JOURNALS"
"""In the environment of the trainer: `machine.JOURNAL_DIR`."""
GRACE = "SEAMLESS_GRACE_S"
"""In the environment of a process that needs so many seconds between SIGTERM and SIGKILL to clean up behind it."""

_GRACE_S = 45.0
_KILLED_S = 5.0  # no process that can end needs as long after SIGKILL
_PATIENCE_S = 3.0
_SWEEP_S = 60.0  # a GPU's driver may hold a killed process for tens of seconds
_LEFT_BEHIND = 1
_LONGEST_BASE = 28
# Ray's core reads two variables for good when it is loaded, which in the nursery is before Ray has started: the job's
# id (an embedded run has a cluster of its own, and this is the id of a cluster's first job) and the process that a
# worker must not outlive (the supervisor serves as well as Ray's own daemon).
_FIRST_JOB = "01000000"
_SHARED_MEMORY = Path("/dev/shm")
_SECOND_LOOK_S = 0.2
_FAR_SWEEP_S = 120.0
_SIGN_S = 30.0  # between two signs of life (`compose.run_is_alive`), which the sweep may delay
_CLUSTER = "RAY_ADDRESS"
# Under `uv run` Ray's hook breaks verl's ray.init; verl (0.9.1: verl/__init__.py) sets this, too late after Ray.
_UNLESS_SET = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}


def run_trainer(
    run_dir: Path, run_id: str, environment: Mapping[str, str | None], imported: Sequence[str], interrupts: list[int]
) -> int:
    """Run `seamless_verl.verl_adapter.job` on a run folder that holds ``config.yaml``; return its exit code.

    A first Ctrl-C (or SIGTERM; or SIGHUP, but not under nohup) lets the trainer clean up, a second one ends it at once;
    what is left after it is swept up in any case. An interrupt during the sweep turns to force; one more, or the first
    if the trainer was interrupted before, leaves at once.

    Args:
        run_dir: folder of the run.
        run_id: mark of every process of the run.
        environment: added to this process's own; ``None`` takes a variable away.
        imported: modules that processes of the run find imported already (`seamless_verl.nursery`); none: no nursery.
        interrupts: signals that the user sends are added to it; empty at first.

    Returns:
        The trainer's exit code, or 128 + the signal that ended it; 1 where processes of the run could not be ended,
        which stderr names.
    """
    adopt_orphans()
    trainer: subprocess.Popen[bytes] | None = None

    def forward(number: int, _: object) -> None:
        interrupts.append(number)
        if trainer is not None and trainer.poll() is None:
            trainer.send_signal(signal.SIGINT if len(interrupts) == 1 else signal.SIGKILL)

    spared = frozenset(psutil.Process().children())
    previous = {number: signal.signal(number, forward) for number in _interrupts()}
    ray_dir = _short_folder()
    started = time.time()
    try:
        command = [sys.executable, "-m", "seamless_verl.verl_adapter.job", str(run_dir)]
        env = _environment(environment, run_id, ray_dir)
        if imported:
            env[INTERPRETER] = _start_nursery(ray_dir, run_dir, env, imported)
        trainer = subprocess.Popen(command, env=env, preexec_fn=partial(_apart, os.getpid()))
        code = _wait(trainer, interrupts, run_dir / "pid", spared)
    finally:
        swept = sweep(run_id, spared, patience_s=_PATIENCE_S, limit_s=_SWEEP_S, interrupts=interrupts)
        _tidy_up(swept, run_id, ray_dir, run_dir, started, journals := environment.get(JOURNALS) or "")
        if joined := environment.get(_CLUSTER):
            _sweep_cluster(run_id, started, journals, joined, interrupts)
        for number, handler in previous.items():
            signal.signal(number, handler)
    ended = 128 + interrupts[0] if interrupts and code else code  # else a dead trainer would start again
    return _LEFT_BEHIND if swept.survivors else ended


def _interrupts() -> tuple[signal.Signals, ...]:
    asked = (signal.SIGINT, signal.SIGTERM)
    # Ignored from the start: nohup, so that a run outlives its terminal.
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*asked, signal.SIGHUP)


def _environment(added: Mapping[str, str | None], run_id: str, ray_dir: Path) -> dict[str, str]:
    own = {RUN_ID: run_id, "SEAMLESS_RAY_DIR": str(ray_dir), "TMPDIR": str(ray_dir), _KEEP_ENVIRONMENT: "1"}
    wanted: dict[str, str | None] = {**_UNLESS_SET, **os.environ, **added, **own}
    return {name: value for name, value in wanted.items() if value is not None}


def _tidy_up(swept: Swept, run_id: str, ray_dir: Path, run_dir: Path, since: float, journals: str) -> None:
    if swept.survivors:
        _say(f"could not be ended and still run: {_named(swept.survivors)}")
    _collect_logs(ray_dir, run_dir / "logs")
    shutil.rmtree(ray_dir, ignore_errors=True)
    _remove_files(swept, run_id, since, journals)


def _remove_files(swept: Swept, run_id: str, since: float, journals: str) -> None:
    """What a run left on this node outside of its folders: shared memory, published weights, journals."""
    _remove_shared_memory(swept.shared, since)
    for begin in (WEIGHTS, Path(journals or tempfile.gettempdir()) / APART):
        shutil.rmtree(f"{begin}{run_id}", ignore_errors=True)


def _wait(
    trainer: subprocess.Popen[bytes], interrupts: list[int], owner: Path, spared: frozenset[psutil.Process]
) -> int:
    """The trainer's exit code, or 128 + the signal that the user sent; an interrupted trainer has ``_GRACE_S``.

    One that does not even end by force is left to the sweep, which names it. Meanwhile ``owner`` is touched, and what
    agents leave behind is waited for: zombies count against the limit on processes.
    """
    if interrupts:  # before there was a trainer to hand them on to
        trainer.kill()
    deadline: float | None = None
    touch_at = time.monotonic()
    code = -signal.SIGKILL
    while True:
        try:
            code = trainer.wait(timeout=1.0)
            break
        except subprocess.TimeoutExpired:
            _reap_orphans({trainer.pid, *(child.pid for child in spared)})
            if time.monotonic() > touch_at:
                touch_at += _SIGN_S
                with contextlib.suppress(OSError):  # removed by hand, or its disk is away
                    os.utime(owner)
            if interrupts and deadline is None:
                deadline = time.monotonic() + _GRACE_S
            if deadline is not None and len(interrupts) > 1:
                deadline = min(deadline, time.monotonic())
            if deadline is not None and time.monotonic() > deadline:
                trainer.kill()
                if time.monotonic() > deadline + _KILLED_S:
                    break
    if interrupts:
        return 128 + interrupts[0]
    return code if code >= 0 else 128 - code


def _short_folder() -> Path:
    """A temporary folder for the run; Ray puts sockets far below it, and a socket's path has at most 107 characters."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="sv-", dir=usual if len(usual) <= _LONGEST_BASE else "/tmp"))


def _start_nursery(folder: Path, run_dir: Path, env: Mapping[str, str], imported: Sequence[str]) -> str:
    """Start the nursery; return an executable that behaves like this interpreter, only faster where it can be."""
    address, executable = folder / "nursery", folder / "python"
    standin = Path(nursery.__path__[0]) / "standin.py"
    words = (sys.executable, "-I", "-S", str(standin), str(address), sys.executable)
    executable.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    executable.chmod(0o755)
    if not os.access(executable, os.X_OK):
        return sys.executable  # the folder for temporary files is mounted noexec
    (run_dir / "logs").mkdir(exist_ok=True)
    with (run_dir / "logs" / "nursery.log").open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "seamless_verl.nursery.nursery_server", str(address), *imported],
            env={**env, "RAY_JOB_ID": _FIRST_JOB, "RAY_RAYLET_PID": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=partial(_apart, os.getpid()),
        )
    return str(executable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What a sweep found.

    Attributes:
        shared: shared-memory files that the run's processes had in use.
        survivors: processes that did not end, e.g. in uninterruptible sleep on a dead disk.
    """

    shared: set[str]
    survivors: tuple[psutil.Process, ...]


def sweep(
    run_id: str,
    spared: frozenset[psutil.Process] | None = None,
    *,
    patience_s: float = _PATIENCE_S,
    limit_s: float = _SWEEP_S,
    interrupts: Sequence[int] = (),
) -> Swept:
    """End every process of a run that is still alive, a request first, then by force until none is left.

    Args:
        run_id: the mark that the run's processes carry.
        spared: children of this process that are not the run's; its other children and theirs end, marked or not.
            ``None`` ends what is marked only.
        patience_s: how long a request is given before force, in seconds; a process that carries ``GRACE`` may ask for
            more.
        limit_s: what is then left is left.
        interrupts: signals that the user has sent; grows meanwhile. A new one turns to force, and leaves at once if it
            is not the first of all.
    """
    shared: set[str] = set()
    begun, before, empty_looks, asked, told = time.monotonic(), len(interrupts), 0, False, False
    while True:
        left = _left(run_id, spared)
        if not left:
            # A process that is just replacing its image has no readable environment: look again.
            empty_looks += 1
            if empty_looks == 2:
                return Swept(shared=shared, survivors=())
            time.sleep(_SECOND_LOOK_S)
            continue
        empty_looks = 0
        seen = len(interrupts)
        waited_s = time.monotonic() - begun
        leave = waited_s >= limit_s or seen > max(before, 1)
        forced = [process for process in left if leave or seen > before or waited_s >= _patience(process, patience_s)]
        shared.update(*(mapped_files(process.pid) for process in left))
        for process in forced if asked else left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL if process in forced else signal.SIGTERM)
        asked = True
        until = begun + limit_s if not leave else 0.0
        left = _await_end(left, min(until, time.monotonic() + patience_s), interrupts, seen)
        _reap_orphans(() if spared is None else [child.pid for child in spared])
        if leave:
            return Swept(shared=shared, survivors=tuple(left))
        stubborn = [process for process in left if process in forced]
        if stubborn and not told:
            told = True
            _say(f"waiting up to {limit_s:.0f} s for what does not end: {_named(stubborn)}; Ctrl-C leaves sooner")


def sweep_node(run_id: str, since: float, journals: str) -> str:
    """End and remove what is left of a run on this node, without a subreaper: processes, shared memory, journals.

    Returns:
        What could not be ended, for people; empty: nothing is left.
    """
    swept = sweep(run_id, limit_s=_SWEEP_S)
    _remove_files(swept, run_id, since, journals)
    return f"could not be ended and still run: {_named(swept.survivors)}" if swept.survivors else ""


def _sweep_cluster(run_id: str, since: float, journals: str, address: str, interrupts: Sequence[int]) -> None:
    """`sweep_node` on each node of a joined Ray cluster; what remains there is said. An interrupt ends it."""
    command = [sys.executable, "-m", "seamless_verl.verl_adapter.far_sweep", run_id, repr(since), journals]
    env = {**_UNLESS_SET, **os.environ, _CLUSTER: address}
    apart, nothing = partial(_apart, os.getpid()), subprocess.DEVNULL
    far = subprocess.Popen(command, env=env, stdin=nothing, stdout=nothing, preexec_fn=apart)
    until, seen = time.monotonic() + _FAR_SWEEP_S, len(interrupts)
    while far.poll() is None and time.monotonic() < until and len(interrupts) == seen:
        time.sleep(_SECOND_LOOK_S)
    if far.poll() is None:
        far.kill()
        far.wait()
        _say(f"the nodes of the Ray cluster at {address} were not swept to the end")


def _left(run_id: str, spared: frozenset[psutil.Process] | None) -> list[psutil.Process]:
    return list({*processes_of(run_id), *(() if spared is None else _children_but(spared))})


def _await_end(
    processes: list[psutil.Process], until: float, interrupts: Sequence[int], seen: int
) -> list[psutil.Process]:
    """Wait for ``processes``; returns those left when the time is over or the user interrupts again."""
    while True:
        _, processes = psutil.wait_procs(processes, timeout=_SECOND_LOOK_S)
        if not processes or time.monotonic() >= until or len(interrupts) > seen:
            return processes


def _patience(process: psutil.Process, usual_s: float) -> float:
    try:
        return max(usual_s, float(process.environ().get(GRACE, 0.0)))
    except (psutil.Error, ValueError):  # ended meanwhile, or not ours to look into
        return usual_s


def _named(processes: Sequence[psutil.Process]) -> str:
    names = []
    for process in processes:
        with contextlib.suppress(psutil.Error):  # ended meanwhile
            names.append(f"{process.pid} {process.name()}")
    return ", ".join(names) or "none any more"


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        sys.stderr.write(line + "\n")  # which is line-buffered


def processes_of(run_id: str) -> Iterator[psutil.Process]:
    """Processes that carry the run's mark, this one excepted."""
    mark = f"{RUN_ID}={run_id}".encode()
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue  # ended meanwhile, or another user's
        if mark in environment.split(b"\0"):
            yield process


def _children_but(spared: frozenset[psutil.Process]) -> Iterator[psutil.Process]:
    for child in psutil.Process().children():
        if child not in spared:
            yield child
            with contextlib.suppress(psutil.NoSuchProcess):
                yield from child.children(recursive=True)


def _remove_shared_memory(files: set[str], since: float) -> None:
    """Remove segments that killed processes of the run could not: those seen in use, and those that appeared meanwhile.

    Python's, verl's and NCCL's names only, ours, made during the run, and used by no living process. Where others may
    use what they made unseen, those seen in use only.
    """
    for prefix in ("psm_", "verl_weights_", "sem.mp-", "nccl-") if sees_all_users() else ():
        for candidate in _SHARED_MEMORY.glob(prefix + "*"):
            with contextlib.suppress(OSError):  # gone meanwhile
                found = candidate.stat()
                if found.st_ctime >= since and found.st_uid == os.getuid():
                    files.add(str(candidate))
    files = {file for file in files if Path(file).parent == _SHARED_MEMORY}
    in_use = {inode for process in psutil.process_iter() for inode in mapped_files(process.pid).values()}
    for file in files:
        with contextlib.suppress(OSError):  # gone meanwhile
            if os.stat(file).st_ino not in in_use:
                os.unlink(file)


def _reap_orphans(others: Collection[int]) -> None:
    """Take the status of every child that has ended but of ``others``, which somebody here waits for."""
    with contextlib.suppress(ChildProcessError):  # no child is left
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):  # else spare the look at all processes
            for child in psutil.Process().children():
                if child.pid not in others:
                    os.waitpid(child.pid, os.WNOHANG)


def _collect_logs(ray_dir: Path, target: Path) -> None:
    """Keep what Ray's processes wrote, as far as there is room; its sockets and runtime files go."""
    try:
        for logs in ray_dir.glob("session_2*/logs"):
            target.mkdir(parents=True, exist_ok=True)
            for file in logs.iterdir():
                if file.is_file() and file.stat().st_size:
                    shutil.copyfile(file, target / file.name)
    except OSError as error:
        _say(f"not all logs could be kept in {target}: {error}")


def _apart(supervisor: int) -> None:
    """Out of reach of the terminal's Ctrl-C, which is the supervisor's to hand on, and ended with the supervisor.

    A process group and no session of its own: Linux shares out a core among sessions first (autogroup), and a trainer
    beside replicas in another session waited 2 to 4 s for a core of a busy machine.
    """
    os.setpgid(0, 0)
    die_with_parent(supervisor, signal.SIGTERM)
