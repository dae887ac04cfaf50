"""kill -9 of rollout replicas in real runs: does a run go on, or end within a minute with the reason?

Servers and engine processes, lent and standing, idle, generating, before, in and after a transfer, waking and draining,
with the checkpoint engine of GPU users (`nccl_over_gloo`). With a policy many in one run, each when the last is back;
without one a run ends at the first, and has to say why.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import parts
from benchmarks.forced_lengths import write_workload
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report

_ROOT = Path(__file__).parents[1]
_WANTED = 60
_PER_RUN = 13
_HANG_S = 300.0  # without a step or an end
_END_S = 60.0
_MOMENTS = {
    "lent": ("idle", "generating", "waking", "draining", "before", "in", "after"),
    "standing": ("generating", "before", "in", "after", "idle", "waking", "draining"),
}
_RESOURCES = (
    "seamless.resources=[{name: trainers, nodes: 1, gpus_per_node: 1, capabilities: [train, rollout]},"
    "{name: rollouts, nodes: 1, gpus_per_node: 1, capabilities: [rollout]}]"
)
_WITHOUT_POLICY = 8  # of the 60: each is a run of its own


def plan() -> list[dict[str, Any]]:
    """All kills with a policy, in an order that any part of them is a fair sample of."""
    rng = random.Random(20)
    kills = [
        {"moment": moment, "whose": whose, "part": part}
        for whose, moments in _MOMENTS.items()
        for moment, part in itertools.product(moments, ("server", "engine"))
    ]
    rng.shuffle(kills)
    return [{**kill, "delay_s": round(rng.uniform(0, 0.4), 3)} for kill in itertools.islice(itertools.cycle(kills), 60)]


def run(kills: list[dict[str, Any]], *, policy: bool) -> dict[str, Any]:
    """One run in which all of them happen."""
    with tempfile.TemporaryDirectory(prefix="deaths-") as temporary:
        scratch = Path(temporary)
        data = write_workload(scratch, lengths="skewed", prompts=64, sessions=4, longest=240)
        log, folder = scratch / "kills.jsonl", scratch / "run"
        mark = uuid.uuid4().hex
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
            "VERL_USE_EXTERNAL_MODULES": "benchmarks.forced_deaths",
            "BENCHMARK_DEATHS": "\n".join(map(json.dumps, kills)),
            "BENCHMARK_DEATHS_LOG": str(log),
            "BENCHMARK_MARK": mark,
        }
        shared = set(os.listdir("/dev/shm"))
        began = time.monotonic()
        output, hung = _watch(_command(data, folder, len(kills), policy), environment, log)
        told = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        ended_at = time.time()
        summary = folder / "summary.json"
        figures = json.loads(summary.read_text()) if summary.exists() else {}
        return {
            "policy": policy,
            "kills": told,
            "hung": hung,
            "finished": bool(figures),
            "steps": figures.get("steps", 0),
            "rows": figures.get("rows", 0),
            "audited": figures.get("rows_audited", 0),
            "violations": figures.get("audit_violations", 0),
            "reason": next((line.strip() for line in output if line.startswith("error:")), ""),
            "end_s": ended_at - told[-1]["at"] if told else 0.0,
            "processes_left": _marked(mark),
            "shared_left": len(_segments(mark, shared)),
            "out": [line.strip() for line in output if line.startswith("slice ")],
            "wall_s": time.monotonic() - began,
        }


def _command(data: Path, folder: Path, kills: int, policy: bool) -> list[str]:
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    return [
        *(sys.executable, "-m", "seamless_verl.main", "+recipe=arithmetic", f"hydra.run.dir={folder}"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1", _RESOURCES),
        *([f"seamless.scheduler.policy={'greedy' if policy else 'null'}"]),
        *(f"{engine}.backend=nccl_over_gloo", f"{engine}.custom_backend_module=benchmarks.nccl_over_gloo"),
        *(f"data.train_files={data}", f"data.val_files={data}", "data.max_response_length=240"),
        f"+actor_rollout_ref.rollout.agent.agent_loop_config_path={data.parent}/agent_loops.yaml",
        *("actor_rollout_ref.rollout.max_model_len=272", "actor_rollout_ref.rollout.n=4"),
        *("actor_rollout_ref.rollout.max_num_seqs=4", "data.train_batch_size=4"),
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        f"trainer.total_training_steps={12 + 5 * kills}",
    ]


def _watch(command: list[str], environment: dict[str, str], log: Path) -> tuple[list[str], bool]:
    """Lines of its console; whether it had to be ended since nothing happened any more."""
    console = log.parent / "console"
    with console.open("w") as stream:
        process = subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT)
        size, moved, hung = 0, time.monotonic(), False
        while process.poll() is None:
            time.sleep(0.5)
            now, grown = time.monotonic(), console.stat().st_size
            size, moved = grown, now if grown != size else moved
            if now - moved > _HANG_S:
                hung = True
                process.terminate()
                process.wait(120)
    return console.read_text().splitlines(), hung


def _marked(mark: str) -> int:
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found += f"BENCHMARK_MARK={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
    return found


def _segments(mark: str, before: set[str]) -> set[str]:
    """New ones that stay and that no living process has open: another run on the machine may have its own."""
    new = set(os.listdir("/dev/shm")) - before
    if new:
        time.sleep(5)  # semaphores of others, which lose their name as soon as they are made
        new &= set(os.listdir("/dev/shm"))
    held = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            held |= {name for name in new if f"/dev/shm/{name}" in maps.read_text()}
        except OSError:
            continue
    return new - held


def main() -> int:
    options = arguments(__doc__ or "", parts.extend)
    wanted = 2 if options.quick else _WANTED
    found = Parts(options)
    with_policy, without = found.of("policy"), found.of("no policy")
    alone = 1 if options.quick else _WITHOUT_POLICY
    kills = plan()
    while (done := sum(len(part["kills"]) for part in with_policy)) < wanted - alone or len(without) < alone:
        if found.out_of_time:
            return found.pause()
        if len(without) < alone and (len(without) * _PER_RUN <= done or done >= wanted - alone):
            moment = ("in", "generating", "before", "after")[len(without) % 4]
            part = ("engine", "server")[len(without) // 2 % 2]
            kill = {"moment": moment, "whose": "standing", "part": part, "delay_s": 0.1}
            name, outcome = "no policy", run([kill], policy=False)
        else:
            name, outcome = "policy", run(kills[done : min(done + _PER_RUN, wanted - alone)], policy=True)
        found.add(name, outcome)
        print(json.dumps({"name": name, **outcome}), flush=True)
    return report(_records(with_policy, without, wanted), options.json)


def _records(with_policy: list[Any], without: list[Any], wanted: int) -> list[Record]:
    runs = with_policy + without
    kills = [kill for part in runs for kill in part["kills"]]
    ended = [part for part in runs if not part["finished"]]
    slowest = max((part["end_s"] for part in ended), default=0.0)
    named = sum("rollout replica" in part["reason"] for part in ended)
    rows, audited = sum(part["rows"] for part in runs), sum(part["audited"] for part in runs)
    left = sum(part["processes_left"] + part["shared_left"] for part in runs)
    hung = sum(part["hung"] for part in runs)
    counts = Counter((kill["whose"], kill["moment"]) for kill in kills)
    by_part = Counter(kill["part"] for kill in kills)
    return [
        Record(name="replicas killed", value=len(kills), unit="", bar=f">= {wanted}", holds=len(kills) >= wanted),
        *(
            Record(name=f"of them {whose}, {moment}", value=count, unit="")
            for (whose, moment), count in sorted(counts.items())
        ),
        *(Record(name=f"of them the {part} process", value=count, unit="") for part, count in sorted(by_part.items())),
        Record(name="runs", value=len(runs), unit=""),
        Record(name="runs that hung", value=hung, unit="", bar="= 0", holds=hung == 0),
        Record(name="runs that went on to their last step", value=len(runs) - len(ended), unit=""),
        Record(name="runs that ended", value=len(ended), unit=""),
        Record(name="of them with the replica's name", value=named, unit="", bar="all", holds=named == len(ended)),
        Record(
            name="longest from a kill to the end",
            value=slowest,
            unit="s",
            bar=f"<= {_END_S:.0f}",
            holds=slowest <= _END_S,
        ),
        Record(name="rows trained", value=rows, unit="", bar="> 0", holds=rows > 0),
        Record(
            name="rows that were not audited or not right",
            value=rows - audited,
            unit="",
            bar="= 0",
            holds=rows == audited,
        ),
        Record(name="processes and shared memory left", value=left, unit="", bar="= 0", holds=left == 0),
    ]


if __name__ == "__main__":
    sys.exit(main())
