"""A hundred forced lend and reclaim cycles while agents work: does any of them notice, is every token kept?

Memory moves as on a GPU (`verl_adapter.cpu.cpu_device`): each wake takes the engine's weights and cache, each
reclaim gives them back, and the weights of every loan are compared with those that were published. A row that is not
what the engine returned would end the run. Runs ``+recipe=swe`` (agents in sandboxes behind the proxy) on two cores,
one of which changes hands up to twelve times a step. ``--keep FOLDER`` keeps the run's folder; with ``--sync rolling``
lent slices take the weights that are published in shared memory instead of the trainer's own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.loans import Loans, loans_of
from benchmarks.records import Record, arguments, report
from seamless_verl.observe import flight
from seamless_verl.observe.recording import read_recording
from seamless_verl.observe.time_ledger import Ledger

_ROOT = Path(__file__).parents[1]
_PER_STEP = 12  # greedy does not lend each time that it could: when little is left to generate, it keeps the slice
RESOURCES = (
    "seamless.resources=[{name: trainers, nodes: 1, gpus_per_node: 1, capabilities: [train, rollout]},"
    "{name: rollouts, nodes: 1, gpus_per_node: 1, capabilities: [rollout]}]"
)


def main() -> int:
    parsed = arguments(__doc__ or "", _extend)
    steps = 2 if parsed.quick else 12
    with tempfile.TemporaryDirectory(prefix="cycles-") as temporary:
        folder = (parsed.keep or Path(temporary)).absolute() / "run"
        command = [
            *(sys.executable, "-m", "seamless_verl.main", "+recipe=swe", RESOURCES),
            *("seamless.scheduler.policy=greedy", f"trainer.total_training_steps={steps}"),
            *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"),
            *("data.train_batch_size=8", "actor_rollout_ref.rollout.n=4", f"hydra.run.dir={folder}"),
            f"seamless.weights.sync={parsed.sync}",
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
            "VERL_USE_EXTERNAL_MODULES": "benchmarks.forced_cycles",
            "BENCHMARK_CYCLES_PER_STEP": str(_PER_STEP),
        }
        subprocess.run(command, cwd=_ROOT, env=environment, check=True)
        return report(_records(folder, 120 if not parsed.quick else 10), parsed.json)


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sync", choices=("together", "rolling"), default="together", help="seamless.weights.sync")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run's folder, FOLDER/run")


def _records(folder: Path, wanted: int) -> list[Record]:
    summary = json.loads((folder / "summary.json").read_text())
    events = read_recording(folder / "flight").events
    moves = Counter(
        event.state.value for event in events if isinstance(event, flight.SliceMoved) and event.slice == "trainers/0"
    )
    cycles = min(moves["waking"], moves["draining"])
    (ended,) = (event.at for event in events if isinstance(event, flight.RunEnded))
    # Prompts beyond the last step, of which some are always under way, are cancelled when the run has ended.
    requests = Counter(e.finish for e in events if isinstance(e, flight.RequestEnded) and e.at <= ended)
    statuses = Counter(event.status for event in events if isinstance(event, flight.SessionEnded))
    failed = sum(count for finish, count in requests.items() if finish not in ("completed", "aborted", "abort"))
    wrong = sum(count for status, count in statuses.items() if status != "finished")
    interrupted = requests["aborted"] + requests["abort"]
    ledger, added = Ledger(), {}
    for event in events:
        ledger.handle(event)
        if isinstance(event, flight.SliceAdded):
            added.setdefault(event.slice, event.at)
    off = max(abs(sum(b.seconds.values()) / (ended - added[b.slice]) - 1) for b in ledger.books(ended))
    loans = loans_of(events, "trainers/0")
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
        *_memory_records(loans),
    ]


def _memory_records(loans: Loans) -> list[Record]:
    still, kept = loans.wakes - loans.wakes_that_took, loans.reclaims - loans.reclaims_that_freed
    other = loans.checked - loans.matching
    unchecked = loans.wakes - loans.checked
    same = len(loans.versions) - loans.distinct
    return [
        Record(name="wakes", value=loans.wakes, unit=""),
        Record(name="wakes that took no weights or no cache", value=still, unit="", bar="= 0", holds=still == 0),
        Record(name="reclaims", value=loans.reclaims, unit=""),
        Record(name="reclaims that kept weights or cache", value=kept, unit="", bar="= 0", holds=kept == 0),
        Record(name="bytes that the lent engine moved", value=loans.bytes_moved / 1e9, unit="GB"),
        Record(
            name="moments with the trainer beside a cache", value=loans.shared, unit="", bar="= 0",
            holds=loans.shared == 0,
        ),
        Record(name="wakes with unchecked weights", value=max(unchecked, 0), unit="", bar="= 0", holds=unchecked <= 0),
        Record(name="loans with other weights than published", value=other, unit="", bar="= 0", holds=other == 0),
        Record(name="versions that were lent", value=len(loans.versions), unit=""),
        Record(name="versions with the weights of another", value=same, unit="", bar="= 0", holds=same == 0),
        Record(name="wake, median", value=statistics.median(loans.wake_s), unit="s"),
        Record(name="reclaim, median", value=statistics.median(loans.reclaim_s), unit="s"),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
