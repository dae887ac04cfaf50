"""kill -9 of every kind of process of a real run, at random instants: does it go on, is each prompt trained once?

One run of agents behind the proxy, with a trainer slice that is lent. It goes on after a kill, or starts again from its
last checkpoint. At the end the prompts that were trained are held against the data: with eta 1 a run of N steps trains
the first N batches of prompts, each once. Every row was audited before it was trained.

* again    prompts that were trained twice
* holes    prompts among the first N batches that were not

verl writes the rows of a step in the background, so those of a step may die with its process although its checkpoint is
whole. Such steps are counted, and as many batches of prompts are not asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from benchmarks.lend_cycles import RESOURCES
from benchmarks.mishap import MARK
from benchmarks.records import Record, arguments, report

_ROOT = Path(__file__).parents[1]
_BATCH = 16
_KILLS = 20
_NOTICED_S = 8.0  # the watchdog looks every 5 s; a kill before that would hide the last one
_SETTLED_S = 120.0  # a kill follows the one before at the latest then, also if no step has ended since
_KINDS = {  # what the command line of a process begins with, or has in it
    "rollout worker": "ray::NotifyingWorker",
    "rollout replica": "ray::InterruptibleServer",
    "rollout replica that pulls": "ray::PullingServer",
    "replica's weight worker": "ray::CheckpointEngineWorker",
    "router": "ray::MeteredLoadBalancer",
    "TransferQueue's storage": "ray::SimpleStorageUnit",
    "TransferQueue's controller": "ray::TransferQueueController",
    "trainer worker": "ray::WorkerDict",
    "reward worker": "ray::RewardLoopWorker",
    "trainer": "seamless_verl.verl_adapter.job",
    "proxy": "ray::ProxyActor",
}
_LENDING = (RESOURCES, "seamless.scheduler.policy=greedy")
_AGENT = (
    "seamless.agent.runner=seamless_verl.agents.function_runner.FunctionRunner",
    "++seamless.agent.kwargs={agent: benchmarks.sum_agent.attempt, reward: benchmarks.sum_agent.score}",
    "seamless.agent.max_turns=1",
    "seamless.agent.max_tokens_per_turn=8",
)


def find_all(mark: str, kind: str) -> Iterator[psutil.Process]:
    """Processes of this kind that carry the mark."""
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if f"{MARK}={mark}".encode() in environment and _KINDS[kind] in " ".join(process.cmdline()):
                yield process
        except (OSError, psutil.Error):  # ended meanwhile, or not ours
            continue


def find(mark: str, kind: str) -> psutil.Process | None:
    return next(find_all(mark, kind), None)


def left(mark: str) -> int:
    """Kinds of process of which one is alive."""
    return sum(find(mark, kind) is not None for kind in _KINDS)


def kinds_of(sync: str) -> list[str]:
    """Those that a run has under this ``seamless.weights.sync``."""
    absent = {"together": "rollout replica that pulls", "rolling": "rollout replica"}[sync]
    return [kind for kind in _KINDS if kind != absent]


def write_prompts(file: Path, count: int) -> list[str]:
    """Data with so many different sums, in order; returns them."""
    sums = random.Random(1).sample([(a, b) for a in range(100) for b in range(100)], count)
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": f"{a:>2}+{b:>2}"}],
            "agent_name": "seamless_agent",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {
                "index": index,
                "split": "train",
                "task": json.dumps({"question": f"{a:>2}+{b:>2}", "answer": str(a + b)}),
            },
        }
        for index, (a, b) in enumerate(sums)
    ]
    pd.DataFrame(rows).to_parquet(file)
    return [f"{a}+{b}" for a, b in sums]


def trained(folder: Path, steps: int) -> tuple[Counter[str], int]:
    """Prompts that the run trained, each as often as a group of it was, and how many steps left no rows."""
    found: Counter[str] = Counter()
    files = [folder / "rows" / f"{step}.jsonl" for step in range(1, steps + 1)]
    there = [file for file in files if file.exists()]
    for file in there:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        groups = {row["uid"].split("_")[0]: "".join(row["input"].split()[1:-1]) for row in rows}
        found.update(groups.values())
    return found, len(files) - len(there)


class Killer(threading.Thread):
    """Kills one process after the other, a random while after the run has ended a step since the last kill."""

    def __init__(self, mark: str, folder: Path, kinds: list[str], count: int) -> None:
        super().__init__(daemon=True)
        self.kills: list[dict[str, Any]] = []
        self._mark, self._folder, self._count = mark, folder, count
        self._kinds, self._rng = kinds, random.Random(count)
        self.over = threading.Event()

    def run(self) -> None:
        kinds = self._kinds * (self._count // len(self._kinds) + 1)
        for kind in kinds[: self._count]:
            until, steps = time.monotonic() + _SETTLED_S, self._steps()
            while self._steps() == steps and time.monotonic() < until and not self.over.wait(0.1):
                pass
            if self.over.wait(self._rng.uniform(0, 6.0)):
                return
            while (process := find(self._mark, kind)) is None and not self.over.wait(0.1):
                pass  # the run is starting
            if process is not None:
                process.send_signal(signal.SIGKILL)
                self.over.wait(_NOTICED_S)
                self.kills.append({"kind": kind, "after_step": self._steps(), "at": time.time()})
                print(f"killed the {kind} ({process.pid})", flush=True)

    def _steps(self) -> int:
        file = self._folder / "steps.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0


def command(scratch: Path, steps: int, sync: str, *more: str) -> tuple[list[str], list[str]]:
    """The run in ``scratch/run``, with ``more`` overrides; and its prompts in order."""
    prompts = write_prompts(scratch / "sums.parquet", _BATCH * (steps + 4))
    words = [
        *(sys.executable, "-m", "seamless_verl.main", "+recipe=arithmetic", f"hydra.run.dir={scratch}/run"),
        *(f"data.train_files={scratch}/sums.parquet", "data.shuffle=false", f"data.train_batch_size={_BATCH}"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=2"),
        *(f"trainer.total_training_steps={steps}", "seamless.supervise.restarts=1000"),
        *("seamless.staleness.eta=1", f"seamless.weights.sync={sync}", "+trainer.max_actor_ckpt_to_keep=2"),
    ]
    return [*words, *_AGENT, *_LENDING, *more], prompts


def outcome(folder: Path, steps: int, prompts: list[str], lines: list[str]) -> dict[str, Any]:
    """What a run that has ended well left, and said in ``lines``."""
    figures = json.loads((folder / "summary.json").read_text())
    counts, unwritten = trained(folder, steps)
    missing = sum(prompt not in counts for prompt in prompts[: _BATCH * steps])
    return {
        "steps": figures["steps"],
        "restarts": sum("within an hour, from" in line for line in lines),
        "replaced": sum("prompt groups begin again" in line for line in lines),
        "again": sum(times - 1 for times in counts.values()),
        "unwritten": unwritten,
        "holes": missing - _BATCH * unwritten,
        "unaudited": figures["rows"] - figures["rows_audited"],
        "violations": figures["audit_violations"],
    }


def run(kills: int, steps: int, sync: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="crash-run-") as temporary:
        scratch, mark = Path(temporary), uuid.uuid4().hex
        words, prompts = command(scratch, steps, sync)
        killer = Killer(mark, scratch / "run", kinds_of(sync), kills)
        killer.start()
        done = subprocess.run(words, cwd=_ROOT, env={**os.environ, MARK: mark}, capture_output=True, text=True)
        killer.over.set()
        killer.join()
        lines = (done.stdout + done.stderr).splitlines()
        print(*(line for line in lines if "died" in line or "restart" in line), sep="\n", flush=True)
        if done.returncode:
            raise RuntimeError(f"the run ended with {done.returncode}:\n" + "\n".join(lines[-20:]))
        found = outcome(scratch / "run", steps, prompts, lines)
        return {"kills": killer.kills, "left": left(mark), **found}


def must_be_none(found: dict[str, Any]) -> list[Record]:
    """Of what is wrong with a run that is over."""
    return [
        Record(name=name, value=found[key], unit="", bar="= 0", holds=found[key] == 0)
        for name, key in (
            ("prompts trained again", "again"),
            ("prompts left out", "holes"),
            ("rows that were not audited", "unaudited"),
            ("rows that are not what the engine said", "violations"),
            ("processes left", "left"),
        )
    ]


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sync", choices=["together", "rolling"], default="together", help="seamless.weights.sync of the run"
    )


def main() -> int:
    options = arguments(__doc__ or "", _extend)
    kills = len(kinds_of(options.sync)) if options.quick else _KILLS
    found = run(kills, steps=3 * kills, sync=options.sync)
    by_kind = Counter(kill["kind"] for kill in found["kills"])
    made = len(found["kills"])
    return report(
        [
            Record(name="processes killed", value=made, unit="", bar=f">= {kills}", holds=made >= kills),
            *(Record(name=f"of them a {kind}", value=count, unit="") for kind, count in sorted(by_kind.items())),
            Record(name="steps trained", value=found["steps"], unit=""),
            Record(name="rollout workers that were replaced", value=found["replaced"], unit=""),
            Record(name="restarts from the last checkpoint", value=found["restarts"], unit=""),
            Record(name="steps whose rows died before they were written", value=found["unwritten"], unit=""),
            *must_be_none(found),
        ],
        options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
