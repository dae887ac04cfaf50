"""Mishaps in the middle of a run, by the stage at which they happen."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.mishap import RUN, Again, Live, Mishap, rewritten

_CHECKPOINTS = "trainer.save_freq=1"
_LONG = (*RUN, "trainer.val_before_train=false", "trainer.total_training_steps=1000", _CHECKPOINTS)
_SHORT = (*RUN, "trainer.val_before_train=false", "trainer.total_training_steps=4", _CHECKPOINTS)
_FAILED, _INTERRUPTED = 1, 130
_HOUR_S = 3600.0


def _process(word: str) -> Callable[[Live], bool]:
    """A process of the run is called so."""

    def is_there(live: Live) -> bool:
        return any(word in " ".join(found.info["cmdline"] or ()) for found in live.processes())

    return is_there


def _some_checkpoint(live: Live) -> bool:
    return any((live.folder / "run" / "checkpoints").glob("global_step_*"))


def _engines(live: Live) -> list[psutil.Process]:
    """The engine's process: the server of a replica spawns it."""
    found: list[psutil.Process] = []
    for process in live.processes():
        if "".join((process.info["cmdline"] or ())[:1]).startswith("ray::InterruptibleServer"):
            with contextlib.suppress(psutil.Error):  # ended meanwhile
                found += [child for child in process.children() if "spawn_main" in " ".join(child.cmdline())]
    return found


_STAGES: dict[str, Callable[[Live], object]] = {
    "checks": lambda live: "platform:" in live.said(),
    "start of Ray": _process("raylet/raylet"),
    "start of the engine": _engines,
    "first rollout": lambda live: live.recorded('"RequestStarted"'),
    "training": lambda live: live.recorded('"PhaseBegan"', '"update_actor"'),
    "checkpoint": _some_checkpoint,
}
_SECOND_S = 0.5  # between two presses of a key


def _interrupted(stage: str, times: int) -> Mishap:
    def happens(live: Live) -> None:
        live.until(_STAGES[stage])
        for number in range(times):
            time.sleep(_SECOND_S if number else 0.0)
            live.interrupt()

    words = ("interrupted", "anything was started" if stage == "checks" else "nothing is left running; ")
    return Mishap(
        name=f"Ctrl-C {'twice' if times == 2 else 'once'}: {stage}",
        command=_LONG,
        code=_INTERRUPTED,
        words=words,
        happens=happens,
    )


_INTERRUPTS = tuple(_interrupted(stage, times) for stage in _STAGES for times in (1, 2))


# ---------------------------------------------------------------- a disk that fills up


def no_mounts() -> str | None:
    """Why no disk can be mounted here."""
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "no mount namespaces for this user"


def _own_disk(folder: Path) -> None:
    """A disk in memory; the benchmark has a mount namespace of its own, with which it goes."""
    (folder / "run").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4g", "none", str(folder / "run")], check=True)


def _resize(size: str, where: Path) -> bool:
    return subprocess.run(["mount", "-o", f"remount,size={size}", str(where)], check=False).returncode == 0


def _fill(live: Live) -> None:
    """Takes the room away, all but a few pages."""
    run = live.folder / "run"

    def is_full(_: Live) -> bool:  # not at once where the run has written more since it was looked at
        disk = os.statvfs(run)
        return _resize(str((disk.f_blocks - disk.f_bfree) * disk.f_frsize + (64 << 10)), run)

    live.until(is_full)


def _make_room(folder: Path) -> None:
    assert _resize("4g", folder / "run")


def _full_disk(stage: str) -> Mishap:
    def happens(live: Live) -> None:
        live.until(_STAGES[stage])
        if stage == "checkpoint":
            live.until(lambda live: "checkpoint of step 1 written" in live.said())
        _fill(live)

    return Mishap(
        name=f"disk full: {stage}",
        command=_SHORT,
        code=_FAILED,
        words=("the disk is full", "Fix: make room", "then the same command"),
        prepare=_own_disk,
        happens=happens,
        again=Again(mend=_make_room, words=("4 steps", " 0 violations")),
        cannot=no_mounts,
    )


_DISKS = tuple(_full_disk(stage) for stage in ("first rollout", "training", "checkpoint"))


# ---------------------------------------------------------------- a clock that jumps

_CLOCK = """
import mmap, struct, time

with open({file!r}, "rb") as file:
    offset = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
real = time.time
time.time = lambda: real() + struct.unpack("d", offset)[0]
"""


def _own_clock(folder: Path) -> None:
    """Python's wall clock for all processes of the command; Ray's own, in C++, stays."""
    (folder / "offset").write_bytes(struct.pack("d", 0.0))
    (folder / "sitecustomize.py").write_text(_CLOCK.format(file=str(folder / "offset")))


def _jump(by_s: float) -> Callable[[Live], None]:
    def happens(live: Live) -> None:
        live.until(_STAGES["training"])
        with (live.folder / "offset").open("r+b") as file:
            file.write(struct.pack("d", by_s))

    return happens


def _clock(name: str, by_s: float) -> Mishap:
    return Mishap(
        name=f"clock {name}",
        command=("env", "PYTHONPATH={folder}", *_SHORT),
        code=0,
        words=("4 steps", " 0 violations"),
        prepare=_own_clock,
        happens=_jump(by_s),
    )


_CLOCKS = (_clock("an hour ahead", _HOUR_S), _clock("an hour back", -_HOUR_S))


# ---------------------------------------------------------------- engines, agents and rewards that fail


def _until_engine_ends(live: Live) -> None:
    live.until(_engines)
    live.until(lambda live: not _engines(live))


def _kill_engine(live: Live) -> None:
    live.until(_engines)
    for process in _engines(live):
        process.kill()


_VALIDATION = (*RUN, "data.val_max_samples=8", "trainer.total_training_steps=1")


def _in_own_words(name: str, says: tuple[str, ...], prepare: Callable[[Path], None]) -> Mishap:
    return Mishap(
        name=name,
        command=_VALIDATION,
        code=_FAILED,
        words=says,
        prepare=prepare,
        happens=lambda live: live.until(lambda live: "an attempt of validation failed" in live.said()),
    )


_FAILURES = (
    Mishap(
        name="engine cannot start",
        command=(*_LONG, "actor_rollout_ref.rollout.load_format=no_such"),
        code=_FAILED,
        words=("vLLM's engine did not start", "no_such", "Fix:"),
        happens=_until_engine_ends,
    ),
    Mishap(
        name="engine killed at its start",
        command=_LONG,
        code=_FAILED,
        words=("vLLM's engine did not start", "SIGKILL", "Fix:"),
        happens=_kill_engine,
    ),
    Mishap(
        name="engine option misspelt",
        command=(*_LONG, "+actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_sequs=4"),
        code=_FAILED,
        words=("vLLM's engine did not start", "max-num-sequs", "Fix:"),
    ),
    _in_own_words(
        "agent raises",
        ("agent.py:", 'raise OSError("my disk is odd")'),
        rewritten("agent.py", "    messages, turns =", '    raise OSError("my disk is odd")\n    messages, turns ='),
    ),
    _in_own_words(
        "reward raises",
        ("KeyError: 'anser'", "reward.py:"),
        rewritten("reward.py", 'outcome["answer"]', 'outcome["anser"]'),
    ),
    _in_own_words(
        "reward is no number",
        ("nan", "no finite number", "Fix:"),
        rewritten("reward.py", '{"reward": 0.0,', '{"reward": float("nan"),'),
    ),
)
RUNS: tuple[Mishap, ...] = (*_INTERRUPTS, *_DISKS, *_CLOCKS, *_FAILURES)
