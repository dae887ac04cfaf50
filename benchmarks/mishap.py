"""What a mishap is, and a command under way to which it happens."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from os import killpg
from pathlib import Path

import psutil

MARK = "BENCHMARK_MARK"
"""The variable by which processes of a command are found."""
_UNTIL_S = 240.0  # for a run to get where the mishap happens, on two busy cores
_LOOK_S = 0.2


class Missed(Exception):
    """The command never came to where the mishap was to happen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A command that has been started.

    Attributes:
        folder: its working directory; a run's own folder is ``run`` in it.
        log: what it says.
        mark: value of `MARK` in the environment of its processes.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    log: Path
    mark: str

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        return marked(self.mark)

    def recorded(self, *words: str) -> bool:
        """Whether one line of the run's recording has all of these words."""
        files = (self.folder / "run" / "flight").glob("*.jsonl")
        return any(all(word in line for word in words) for file in files for line in file.read_text().splitlines())

    def until(self, is_there: Callable[[Live], object]) -> None:
        """Wait until ``is_there`` says so.

        Raises:
            Missed: the command ended before, or takes too long.
        """
        latest = time.monotonic() + _UNTIL_S
        while not is_there(self):
            if self.process.poll() is not None:
                raise Missed(f"it ended with exit code {self.process.returncode} before")
            if time.monotonic() > latest:
                raise Missed(f"it did not get there within {_UNTIL_S:.0f} s")
            time.sleep(_LOOK_S)

    def interrupt(self) -> None:
        """Ctrl-C: a terminal sends it to every process of the command's group."""
        killpg(self.process.pid, signal.SIGINT)


def marked(mark: str) -> list[psutil.Process]:
    """Processes that carry this `MARK`."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    return found


def nothing(folder: Path) -> None:
    """No preparation."""


def in_the_end(live: Live) -> None:
    """The mishap is there from the start, and the command ends of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """The same command once more, which must go on to its end.

    Attributes:
        mend: what the user does about the mishap before.
        words: what it must say.
    """

    mend: Callable[[Path], None]
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mishap:
    """One mistake, or something that happens to a run.

    Attributes:
        command: ``{folder}``, ``{assets}`` and ``{port}`` (one that is taken) are filled in.
        words: what it must say: the cause, the fix.
        code: what it must end with.
        prepare: makes the folder wrong.
        happens: waits until the command is where it happens, and does it; the seconds count from there.
        again: what must be possible afterwards.
        cannot: why it cannot be tried here; None: it can.
    """

    name: str
    command: tuple[str, ...]
    words: tuple[str, ...]
    code: int = 2
    prepare: Callable[[Path], None] = nothing
    happens: Callable[[Live], None] = in_the_end
    again: Again | None = None
    cannot: Callable[[], str | None] = lambda: None


RUN = (
    *("{python}", "-m", "seamless_verl.main", "--config-dir", "my_task", "+recipe=my_task"),
    *("hydra.run.dir={folder}/run", "seamless.assets.dir={assets}"),
)
"""A run of the task that ``seamless-verl new`` writes."""


def rewritten(file: str, old: str, new: str) -> Callable[[Path], None]:
    """Changes a file of that task."""

    def rewrite(folder: Path) -> None:
        path = folder / "my_task" / file
        text = path.read_text(encoding="utf-8")
        assert old in text, (file, old)
        path.write_text(text.replace(old, new), encoding="utf-8")

    return rewrite
