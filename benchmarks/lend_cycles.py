"""A hundred forced lend and reclaim cycles while agents work: does any of them notice, is every token kept?

A row that is not what the engine returned would end the run. Runs ``+recipe=swe`` (agents in sandboxes behind the
proxy) on two cores, one of which changes hands ten times a step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.records import Record, arguments, report
from seamless_verl.observe import flight
from seamless_verl.observe.ledger import Ledger
from seamless_verl.observe.recording import read_recording

_ROOT = Path(__file__).parents[1]
_PER_STEP = 10
_RESOURCES = (
    "seamless.resources=[{name: trainers, nodes: 1, gpus_per_node: 1, capabilities: [train, rollout]},"
    "{name: rollouts, nodes: 1, gpus_per_node: 1, capabilities: [rollout]}]"
)


def main() -> int:
    parsed = arguments(__doc__ or "")
    steps = 2 if parsed.quick else 11
    with tempfile.TemporaryDirectory(prefix="cycles-") as temporary:
        folder = Path(temporary) / "run"
        command = [
            *(sys.executable, "-m", "seamless_verl.main", "+recipe=swe", _RESOURCES),
            *("seamless.scheduler.policy=greedy", f"trainer.total_training_steps={steps}"),
            *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"),
            *("data.train_batch_size=8", "actor_rollout_ref.rollout.n=4", f"hydra.run.dir={folder}"),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
            "VERL_USE_EXTERNAL_MODULES": "benchmarks.forced_cycles",
            "BENCHMARK_CYCLES_PER_STEP": str(_PER_STEP),
        }
        subprocess.run(command, cwd=_ROOT, env=environment, check=True)
        return report(_records(folder, 100 if not parsed.quick else 10), parsed.json)


def _records(folder: Path, wanted: int) -> list[Record]:
    summary = json.loads((folder / "summary.json").read_text())
    events = read_recording(folder / "flight").events
    moves = Counter(
        event.state.value for event in events if isinstance(event, flight.SliceMoved) and event.slice == "trainers/0"
    )
    cycles = min(moves["waking"], moves["draining"])
    requests = Counter(event.finish for event in events if isinstance(event, flight.RequestEnded))
    statuses = Counter(event.status for event in events if isinstance(event, flight.SessionEnded))
    failed = sum(count for finish, count in requests.items() if finish not in ("completed", "aborted", "abort"))
    wrong = sum(count for status, count in statuses.items() if status != "finished")
    interrupted = requests["aborted"] + requests["abort"]
    ledger, added = Ledger(), {}
    for event in events:
        ledger.handle(event)
        if isinstance(event, flight.SliceAdded):
            added.setdefault(event.slice, event.at)
    (ended,) = (event.at for event in events if isinstance(event, flight.RunEnded))
    off = max(abs(sum(b.seconds.values()) / (ended - added[b.slice]) - 1) for b in ledger.books(ended))
    audited = summary["rows_audited"] / summary["rows"]
    stale = summary["staleness_max"]
    return [
        Record(name="lend and reclaim cycles", value=cycles, unit="", bar=f">= {wanted}", holds=cycles >= wanted),
        Record(
            name="generations interrupted and continued", value=interrupted, unit="", bar="> 0", holds=interrupted > 0
        ),
        Record(name="generations that failed", value=failed, unit="", bar="= 0", holds=failed == 0),
        Record(name="sessions", value=sum(statuses.values()), unit=""),
        Record(name="sessions that did not end well", value=wrong, unit="", bar="= 0", holds=wrong == 0),
        Record(name="share of rows audited", value=audited, unit="", bar="= 1", holds=audited == 1),
        Record(name="largest staleness", value=stale, unit="versions", bar="<= 1", holds=stale <= 1),
        Record(name="ledger against wall x devices", value=off, unit="", bar="<= 0.005", holds=off <= 0.005),
    ]


if __name__ == "__main__":
    sys.exit(main())
