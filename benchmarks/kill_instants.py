"""kill -9 on purpose in the middle of publications and pulls of a real run: does it go on, is the next one complete?

`benchmarks.crash_run` kills at random instants; here the instant is seen, and the process is stopped and looked at
again before it is killed (`benchmarks.instant_killer`). One run of agents behind the proxy under
``seamless.weights.sync=rolling``, with two replicas that only generate and a slice of the trainer that is lent; 16
layers instead of two, so that a publication and a load take long enough to die in.

    a replica's server or engine   before the pause, while it pauses, in mid-load, behind it; in mid-load of a loan
    a rank of the trainer          while a version is written, before it is listed, while a replica loads it
    the trainer                    while its first rank writes

After each kill it is waited for that the run, or the run that has started again, publishes, and that every replica that
only generates has pulled one and the same newer version, the killed one among them. At the end prompts, rows,
processes and shared memory are looked at. ``--resume FILE`` keeps what is measured; a run has ten kills. In the last of
the four the trainer has two ranks, both lent, and replicas keep their caches and pull two at a time. ``--begin N``
leaves the first N kills out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import parts
from benchmarks.crash_run import command, left, must_be_none, outcome
from benchmarks.instant_killer import ENGINE, SERVER, TRAINER, UNLISTED, WRITER, WRITING, Instant, InstantKiller
from benchmarks.mishap import MARK
from benchmarks.multiplexing import deeper_model
from benchmarks.parts import Parts
from benchmarks.pull_stages import STAGES
from benchmarks.records import Record, arguments, report

_ROOT = Path(__file__).parents[1]
_LAYERS = 16
_OF_TRAINER = (
    Instant(victim=WRITER, stage=WRITING),
    Instant(victim=WRITER, stage=UNLISTED),
    Instant(victim=TRAINER, stage=WRITING),
    Instant(victim=WRITER, stage="pull loading"),
)
_OF_REPLICAS = (
    Instant(victim=ENGINE, stage="pull loading"),
    Instant(victim=SERVER, stage="pull loading"),
    Instant(victim=SERVER, stage="pull pausing"),
    Instant(victim=ENGINE, stage="wake loading"),
    Instant(victim=ENGINE, stage="pull pausing"),
    Instant(victim=SERVER, stage="pull checking"),
    Instant(victim=SERVER, stage="wake loading"),
    Instant(victim=SERVER, stage="pull resuming"),
)
_IN_WORDS = {
    WRITING: "half of a version written",
    UNLISTED: "a version written, not listed",
    "pull checking": "a pull before the pause",
    "pull pausing": "a pull that pauses the engine",
    "pull loading": "a pull in mid-load",
    "pull resuming": "a pull behind its load",
    "wake loading": "a loan in mid-load",
}
_KEEPING = ("seamless.weights.cache=keep", "seamless.weights.at_once=2")
_FEW = ("actor_rollout_ref.rollout.n=2", "++seamless.agent.kwargs.reward=benchmarks.sum_agent.digits")
_ROWS = 32  # of a mini-batch
_PER_RUN, _QUICK = 10, 8
_KEEPING_FROM = 30  # of the plan
_STEPS_PER_KILL = 3  # while a replica comes back the run goes on


def plan() -> list[Instant]:
    """Three of replicas, then two of the trainer, in turns; before the first step a replica's."""
    replicas, trainers = iter(_OF_REPLICAS * 3), iter(_OF_TRAINER * 4)
    turns = [[*islice(replicas, 3), *islice(trainers, 2)] for _ in range(8)]
    _, *others = [instant for turn in turns for instant in turn]
    return [Instant(victim=ENGINE, stage="pull loading", first=True), *others]


def _shape(ranks: int) -> tuple[str, ...]:
    return (
        f"seamless.resources=[{{name: trainers, nodes: 1, gpus_per_node: {ranks}, capabilities: [train, rollout]}},"
        "{name: rollouts, nodes: 1, gpus_per_node: 2, capabilities: [rollout]}]",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={_ROWS // ranks}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={_ROWS // ranks}",
    )


def run(seed: int, instants: list[Instant], steps: int, keep: Path | None) -> dict[str, Any]:
    """One run in which all of them happen.

    Args:
        seed: how many kills of the plan come before.

    Raises:
        RuntimeError: it did not end well.
    """
    with tempfile.TemporaryDirectory(prefix="kill-instants-") as temporary:
        scratch, mark = (keep or Path(temporary)).absolute(), uuid.uuid4().hex
        (scratch / "stages").mkdir(parents=True)
        os.environ |= {
            MARK: mark,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
            "VERL_USE_EXTERNAL_MODULES": "benchmarks.pull_stages",
            "BENCHMARK_DEATHS_LOG": str(scratch / "deaths"),
            STAGES: str(scratch / "stages"),
        }
        model = deeper_model(scratch, _LAYERS)
        shape = (*_shape(2), *_KEEPING) if seed >= _KEEPING_FROM else _shape(1)
        overrides = (f"actor_rollout_ref.model.path={model}", *_FEW, *shape)
        words, prompts = command(scratch, steps, "rolling", *overrides)
        killer = InstantKiller(mark, scratch, instants, seed)
        killer.start()
        with (scratch / "console").open("w") as console:
            code = subprocess.run(words, cwd=_ROOT, stdout=console, stderr=subprocess.STDOUT).returncode
        killer.over.set()
        killer.join()
        lines = (scratch / "console").read_text(errors="replace").splitlines()
        if code:
            raise RuntimeError(f"the run ended with {code}:\n" + "\n".join(lines[-20:]))
        return {
            **outcome(scratch / "run", steps, prompts, lines),
            "kills": killer.kills,
            "misses": killer.misses,
            "left": left(mark) + sum(engine.is_running() for engine in killer.engines),
            "shared": sum(store.exists() for store in killer.stores),
        }


def judged(runs: list[dict[str, Any]], wanted: int) -> list[Record]:
    kills = [kill for one in runs for kill in one["kills"]]
    of_trainer = [kill for kill in kills if kill["victim"] in (WRITER, TRAINER)]
    of_replicas = [kill for kill in kills if kill["victim"] in (SERVER, ENGINE)]
    final = [kill for kill in kills if kill in of_trainer or kill["first"]]
    pulling = [kill for kill in of_replicas if kill["stage"].startswith("pull")]
    writing = [kill for kill in of_trainer if kill["stage"] in (WRITING, UNLISTED)]
    loading = [kill for kill in kills if kill["victim"] == ENGINE and kill["stage"].endswith("loading")]
    total = {key: sum(one[key] for one in runs) for key in runs[0] if key != "kills"}
    wrong = {
        "kills with other versions listed than whole ones": sum(not kill["whole"] for kill in kills),
        "pulls cut short of which the recording knows nothing": sum(not kill["under_way"] for kill in pulling),
        "kills after which the next version was not whole": sum(not kill.get("next_whole") for kill in kills),
        "kills after which not every replica pulled": sum(kill["pulled"] is None for kill in kills),
        "kills of replicas that the run did not go on after": sum(k["restarts"] for k in of_replicas if k not in final),
        "kills of the trainer, or before a step, without one restart": sum(kill["restarts"] != 1 for kill in final),
        "published weights left in shared memory": total["shared"],
    }
    return [
        Record(name="kills in the middle", value=len(kills), unit="", bar=f">= {wanted}", holds=len(kills) >= wanted),
        *(
            Record(name=f"of them the {victim}: {_IN_WORDS[stage]}", value=count, unit="")
            for (victim, stage), count in sorted(Counter((kill["victim"], kill["stage"]) for kill in kills).items())
        ),
        Record(
            name="versions cut off between the first and the last byte",
            value=sum(0 < (kill["cut"] or 0) < 1 for kill in writing),
            unit="",
        ),
        Record(
            name="engines that had read a part, not all", value=sum(0 < kill["read"] < 1 for kill in loading), unit=""
        ),
        Record(name="before the first step", value=sum(kill["first"] for kill in kills), unit=""),
        Record(name="stages that were over before the kill", value=total["misses"], unit=""),
        Record(name="runs", value=len(runs), unit=""),
        Record(name="steps trained", value=total["steps"], unit=""),
        Record(name="restarts from the last checkpoint", value=total["restarts"], unit=""),
        Record(name="steps whose rows died before they were written", value=total["unwritten"], unit=""),
        Record(name="a kill until all is as before, longest", value=max(k["settled_s"] for k in kills), unit="s"),
        *(Record(name=name, value=count, unit="", bar="= 0", holds=count == 0) for name, count in wrong.items()),
        *must_be_none(total),
    ]


def _extend(parser: argparse.ArgumentParser) -> None:
    parts.extend(parser)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs' folders, FOLDER/0 and so on")
    parser.add_argument(
        "--begin", type=int, default=0, choices=range(len(plan())), metavar="N", help="leave out the first N kills"
    )


def main() -> int:
    options = arguments(__doc__ or "", _extend)
    last = min(options.begin + _QUICK, len(plan())) if options.quick else len(plan())
    found = Parts(options)
    while (made := options.begin + sum(len(one["kills"]) for one in found.of("runs"))) < last:
        if found.out_of_time:
            return found.pause()
        instants = plan()[made : min(made + _PER_RUN, last)]
        keep = options.keep / str(made) if options.keep else None
        found.add("runs", run(made, instants, _STEPS_PER_KILL * len(instants), keep))
    return report(judged(found.of("runs"), last - options.begin), options.json)


if __name__ == "__main__":
    sys.exit(main())
