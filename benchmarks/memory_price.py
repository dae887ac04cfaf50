"""What it costs on the CPU platform that device memory is really moved and counted, in the demo's own job.

One run of ``+recipe=swe``. Every sleep and wake of an engine, every offload and load of the trainer, and every entry in
the book of memory is timed in its process (`timed_memory`). The price is the sum of all of them over the time of the
steps, as if nothing else had gone on meanwhile: more than what a run without them would save.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.records import Record, arguments, report
from benchmarks.timed_memory import FOLDER

_ROOT = Path(__file__).parents[1]
_STEPS, _QUICK = 8, 2


def main() -> int:
    options = arguments(__doc__ or "")
    steps = _QUICK if options.quick else _STEPS
    with tempfile.TemporaryDirectory(prefix="memory-price-") as temporary:
        folder, times = Path(temporary) / "run", Path(temporary) / "times"
        times.mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
            "VERL_USE_EXTERNAL_MODULES": "benchmarks.timed_memory",
            FOLDER: str(times),
        }
        command = [sys.executable, "-m", "seamless_verl.main", "+recipe=swe", f"trainer.total_training_steps={steps}"]
        command += ["trainer.val_before_train=false", "trainer.test_freq=-1", f"hydra.run.dir={folder}"]
        subprocess.run(command, cwd=_ROOT, env=environment, check=True)
        seconds, calls = _spent(times)
        told = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return report(_records(sum(step["step_s"] for step in told), seconds, calls), options.json)


def _spent(times: Path) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds and calls by what was done, all processes together."""
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for file in times.iterdir():
        for line in file.read_text().splitlines():
            what, took = line.split()
            seconds[what] += float(took)
            calls[what] += 1
    return seconds, calls


def _records(steps_s: float, seconds: dict[str, float], calls: dict[str, int]) -> list[Record]:
    missing = {"engine_sleeps", "engine_wakes"} - seconds.keys()
    assert not missing, f"no engine moved memory in this run: {missing}"
    price = sum(seconds.values()) / steps_s
    records = [Record(name="time of all steps", value=steps_s, unit="s")]
    for what in sorted(seconds):
        records.append(Record(name=f"{what.replace('_', ' ')}, {calls[what]} calls", value=seconds[what], unit="s"))
    records.append(
        Record(name="price of moving and counting memory", value=price, unit="", bar="<= 0.05", holds=price <= 0.05)
    )
    return records


if __name__ == "__main__":
    sys.exit(main())
