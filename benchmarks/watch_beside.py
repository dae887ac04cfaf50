"""Whole runs of `+recipe=swe` that somebody watches, beside the same runs alone.

    python -m benchmarks.watch_beside --resume FILE --minutes 8 [--json FILE]

Somebody: `seamless-verl watch`, and a client that asks every two seconds for what the open pages ask for (the run, its
steps, the groups under way). Both ways of one seed run one after the other, in an order that differs from seed to seed.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks import parts
from benchmarks.intervals import interval
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report
from benchmarks.staleness_live import finished

_SEEDS, _STEPS, _QUICK_STEPS = 4, 12, 3
_WARM = 1  # steps left out of times
_LOOKS_S = 2.0
_WAYS = ("alone", "watched")
_QUIET = ("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1")


@dataclass(frozen=True, slots=True)
class Measured:
    """One run.

    Attributes:
        step_s: seconds of each step.
        server_share: processor time of the server, of the seconds that it stood.
        looks: answers of the server that showed the run.
    """

    step_s: list[float]
    server_share: float = 0.0
    looks: int = 0

    @property
    def per_step_s(self) -> float:
        return statistics.fmean(self.step_s[_WARM:])


def measure(way: str, seed: int, steps: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="beside-") as temporary:
        settings = (f"data.seed={seed}", f"trainer.total_training_steps={steps}", *_QUIET)
        folder = Path(temporary) / "run"
        if way == "alone":
            return Measured(finished(folder, "+recipe=swe", *settings).step_s)
        with _looked_at(Path(temporary)) as server:
            step_s = finished(folder, "+recipe=swe", *settings).step_s
            return Measured(step_s, server.share(), server.looks)


class _Looking:
    """Somebody with the pages open; ``looks``: answers that showed a run."""

    def __init__(self, url: str, pid: int) -> None:
        self._url, self._process = url, psutil.Process(pid)
        self._over = threading.Event()
        self.looks = 0
        self._pool = ThreadPoolExecutor(1)
        self._looking = self._pool.submit(self._look)

    def share(self) -> float:
        """Processor time of the server, of the time that it has stood."""
        took = self._process.cpu_times()
        stood = time.time() - self._process.create_time()
        return float(took.user + took.system) / stood

    def stop(self) -> None:
        """Raises what a look raised: a run that nobody watched to its end is no measurement."""
        self._over.set()
        self._pool.shutdown()
        self._looking.result()

    def _look(self) -> None:
        with httpx.Client(base_url=self._url, trust_env=False, timeout=60) as http:
            while not self._over.wait(_LOOKS_S):
                for run in http.get("api/runs").json()["runs"]:
                    for page in ("page", "steps", "groups?step=none"):
                        self.looks += http.get(f"api/run/{run['id']}/{page}").is_success


@contextmanager
def _looked_at(runs: Path) -> Iterator[_Looking]:
    command = [sys.executable, "-m", "seamless_verl.cli", "watch", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        looking = _Looking(server.stdout.readline().split()[-1], server.pid)
        try:
            yield looking
            looking.stop()
        finally:
            server.terminate()


def records(found: Parts) -> list[Record]:
    alone, watched = ([Measured(**one) for one in found.of(way)] for way in _WAYS)
    told = [
        Record(
            name=f"{way}: time of a step, median of the seeds",
            value=statistics.median(one.per_step_s for one in of_way),
            unit="s",
        )
        for way, of_way in zip(_WAYS, (alone, watched), strict=True)
    ]
    ratios = [with_.per_step_s / without.per_step_s for without, with_ in zip(alone, watched, strict=True)]
    low, high = interval(ratios)
    judged = {"bar": "the interval has 1", "holds": low <= 1 <= high} if len(ratios) > 1 else {}
    return [
        *told,
        Record(name="watched over alone, time of a step (median)", value=statistics.median(ratios), unit="x"),
        Record(name="watched over alone, 95 %, low", value=low, unit="x", **judged),
        Record(name="watched over alone, 95 %, high", value=high, unit="x", **judged),
        Record(
            name="processor time of the server with every view asked, its start included",
            value=100 * statistics.median(one.server_share for one in watched),
            unit="% of a core",
        ),
        Record(name="looks at the runs", value=sum(one.looks for one in watched), unit=""),
    ]


def main() -> int:
    options = arguments(__doc__ or "", parts.extend)
    steps, seeds = (_QUICK_STEPS, 1) if options.quick else (_STEPS, _SEEDS)
    found = Parts(options)
    for seed in range(seeds):
        for way in random.Random(seed).sample(_WAYS, len(_WAYS)):
            if len(found.of(way)) > seed:
                continue
            if found.out_of_time:
                return found.pause()
            measured = measure(way, seed, steps)
            found.add(way, asdict(measured))
            print(f"seed {seed}, {way}: {measured.per_step_s:.2f} s per step", flush=True)
    return report(records(found), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
