"""Idle training slices working for rollout: verl's own ways and ours, same prompts, same forced lengths, same cores.

Two cores are two devices: the trainer and its lendable replica share one, the rollout-only replica has the other.
Systems run one after the other, in rounds; the first steps of each run are left out. The idle share of verl's
trainer is the time it waits for samples while it holds its device; ours is that of the recorded ledger, in which a
lent slice without a request counts as idle, too.

``--lengths constant`` and ``--switch-cost SECONDS`` (added to every change of hands) are negative controls: what the
policy loses by them, and that it stops lending where a switch costs more than it brings. ``--layers 8`` makes the model
four times as deep: with the recipe's two layers much of both cores goes to everything around the engines, and a
trainer's idle core is not idle. ``--trainers 4`` gives the trainer so many slices, all of them lendable, which share
the cores in turn; the rollout-only replica keeps the second one. verl's systems with ``, waiting`` bound the age of
samples as ours do, to one version: they wait for prompts that would become older. A whole measurement takes half an
hour; ``--resume FILE --minutes 8`` takes it in pieces. ``--keep FOLDER`` keeps the folders of the runs, which
``benchmarks.live_order`` replays.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from omegaconf import OmegaConf

from benchmarks import parts
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report

_ROOT = Path(__file__).parents[1]
_LEFT_OUT = 2
_LONGEST = 480
_ROWS = 64  # of a step: eight prompts, eight answers each

_VERL = [
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "trainer.v1.separate_async.num_warmup_batches=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=cpu_zmq",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=seamless_verl.verl_adapter.cpu.cpu_weights",
]


_SWITCH = "trainer.v1.separate_async.hybrid_rollout.enable_switch=true"
_WAITING = ", waiting"
_SEPARATE = [*_VERL, "actor_rollout_ref.hybrid_engine=false"]
_SWITCHING = [*_VERL, "actor_rollout_ref.hybrid_engine=true", _SWITCH]
# A trajectory may span two versions, so its first token is one version old at most.
_BOUND = ["trainer.v1.sampler.max_off_policy_threshold=2", "trainer.v1.sampler.max_off_policy_strategy=wait"]


def _of_recipe(recipe: str) -> list[str]:
    """Its policy and its router, for another workload."""
    values = OmegaConf.load(_ROOT / f"hydra_configs/recipe/{recipe}.yaml").seamless
    return [f"seamless.scheduler.policy={values.scheduler.policy}", f"seamless.router.policy={values.router.policy}"]


SYSTEMS: Mapping[str, list[str]] = {
    "verl separate_async": _SEPARATE,
    "verl enable_switch": _SWITCHING,
    f"verl separate_async{_WAITING}": [*_SEPARATE, *_BOUND],
    f"verl enable_switch{_WAITING}": [*_SWITCHING, *_BOUND],
    "ours apart": [],
    "ours greedy": ["seamless.scheduler.policy=greedy"],
    "ours predictive": ["seamless.scheduler.policy=predictive"],
    "ours as recipe swe": _of_recipe("swe"),
}
_LENDING = ("ours greedy", "ours predictive", "ours as recipe swe")
_APART = ("verl separate_async", f"verl separate_async{_WAITING}", "ours apart")  # nothing is lent


def _slices(system: str, trainers: int) -> list[str]:
    """The trainer's slices, and the one that only rolls out."""
    if system.startswith("verl"):
        return [f"trainer.n_gpus_per_node={trainers}"]
    tags = "[train]" if system in _APART else "[train, rollout]"
    return [
        f"seamless.resources=[{{name: trainers, nodes: 1, gpus_per_node: {trainers}, capabilities: {tags}}},"
        "{name: rollouts, nodes: 1, gpus_per_node: 1, capabilities: [rollout]}]"
    ]


def _cores(system: str, trainers: int) -> dict[str, list[int]]:
    """Of the two: whose is which, by the order of trainer workers and of replicas."""
    shared = [number % 2 for number in range(trainers)]
    return {"trainer": shared, "replica": [1] if system in _APART else [*shared, 1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run.

    Attributes:
        steps_s: wall time of each step that counts. With a lag of one step, long and short ones alternate: a run is
            judged by their mean.
        idle: share of the trainable slice's time in which it had nothing to do.
        staleness: versions by first token, the largest; verl's metric for verl's modes.
        loans: decisions to lend.
        late_loans: those of the second half of the run, when every cost is known.
        complete: rows that were audited, of all; None where rows carry no stamp.
    """

    steps_s: list[float]
    idle: float
    staleness: float
    loans: int
    complete: float | None
    late_loans: int | None = None

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.steps_s)


def run(
    system: str,
    work: Path,
    lengths: str,
    steps: int,
    switch_cost_s: float,
    seed: int,
    model: Path | None,
    keep: Path | None,
    trainers: int = 1,
) -> Measured:
    """Start it as a user would, and read what it leaves.

    Args:
        trainers: slices of the trainer.
        keep: folder under which the run's own is kept, named by system and round.

    Raises:
        RuntimeError: it did not end well.
    """
    overrides = [
        *SYSTEMS[system],
        *_slices(system, trainers),
        f"ray_kwargs.ray_init.num_gpus={trainers + 1}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={min(32, _ROWS // trainers)}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={min(32, _ROWS // trainers)}",
    ]
    with tempfile.TemporaryDirectory(prefix="mux-") as temporary:
        folder = Path(temporary) / "run" if keep is None else keep / f"{re.sub('[, ]+', '-', system)}-{seed + 1}"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
            "SEAMLESS_CORES": json.dumps(_cores(system, trainers)),
            "VERL_LOGGING_LEVEL": "WARN",  # verl 0.9.1: trainer_separate_async.py:181 raises at INFO without hybrid
            "BENCHMARK_SWITCH_COST_S": str(switch_cost_s),
        }
        command = [sys.executable, "-m", "seamless_verl.main", *_workload(work, lengths, steps, seed), *overrides]
        if model is not None:
            command.append(f"actor_rollout_ref.model.path={model}")
        if switch_cost_s:
            environment["VERL_USE_EXTERNAL_MODULES"] = "benchmarks.expensive_switch"
        done = subprocess.run(
            [*command, f"hydra.run.dir={folder}"], cwd=_ROOT, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{system} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return _read(folder, ours=system.startswith("ours"))


def _workload(work: Path, lengths: str, steps: int, seed: int) -> list[str]:
    data = work / f"{lengths}.parquet"
    return [
        "+recipe=arithmetic",
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"data.seed={seed}",
        f"data.max_response_length={_LONGEST}",
        f"actor_rollout_ref.rollout.max_model_len={_LONGEST + 32}",
        f"+actor_rollout_ref.rollout.agent.agent_loop_config_path={work}/agent_loops.yaml",
        f"data.train_batch_size={_ROWS // 8}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={_ROWS // 8}",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.max_num_seqs=4",  # generating takes about twice as long as training, as usual in RL
        "algorithm.rollout_correction.bypass_mode=true",
        "trainer.rollout_data_dir=null",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        f"trainer.total_training_steps={steps}",
    ]


def deeper_model(folder: Path, layers: int) -> Path:
    """The recipe's model with so many layers and random weights: lengths are prescribed, it need not know anything."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from seamless_verl.recipes.arithmetic import assets

    recipe, model = assets.build() / "model", folder / "model"
    shutil.copytree(recipe, model)
    config = Qwen3Config.from_pretrained(recipe)
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(model)
    return model


def _read(folder: Path, *, ours: bool) -> Measured:
    log = (folder / "logs" / "trainer.log").read_text(errors="replace")
    lines = [line for line in log.splitlines() if re.match(r"step:\d+ - ", line)]
    steps = [dict(part.rsplit(":", 1) for part in line.split(" - ") if ":" in part) for line in lines][_LEFT_OUT:]
    seconds = [float(step["timing_s/step"]) for step in steps]
    if not ours:
        waited = sum(float(step.get("timing_s/gen", 0.0)) for step in steps)
        stale = max(_number(step["training/off_policy/trajectory_staleness/max"]) for step in steps)
        loans = sum("timing_s/switch_to_rollout" in step for step in steps)
        return Measured(steps_s=seconds, idle=waited / sum(seconds), staleness=stale, loans=loans, complete=None)
    summary = json.loads((folder / "summary.json").read_text())
    return Measured(
        steps_s=seconds,
        idle=_idle_share(folder),
        staleness=summary["staleness_max"],
        loans=_count_loans(folder),
        late_loans=_count_loans(folder, after_step=(_LEFT_OUT + len(steps)) // 2),
        complete=summary["rows_audited"] / summary["rows"],
    )


def _number(text: str) -> float:
    """verl prints some of its metrics as ``np.int64(1)``."""
    return float(text.removesuffix(")").rpartition("(")[2])


def _idle_share(folder: Path) -> float:
    """Of the slice that can train, from the third step's beginning to the end of the last."""
    from seamless_verl.observe import flight
    from seamless_verl.observe.recording import read_recording
    from seamless_verl.observe.time_ledger import Ledger, idle_shares

    ledger, before, books, pool = Ledger(), None, (), ""
    for event in read_recording(folder / "flight").events:
        if isinstance(event, flight.SliceAdded) and "train" in event.capabilities:
            pool = event.pool
        if isinstance(event, flight.StepBegan) and event.step == _LEFT_OUT + 1:
            before = ledger.books(event.at)
        ledger.handle(event)
        if isinstance(event, flight.StepEnded):
            books = ledger.books(event.at)
    assert before is not None
    return idle_shares(before, books)[pool]


def _count_loans(folder: Path, *, after_step: int = 0) -> int:
    from seamless_verl.observe import flight
    from seamless_verl.observe.recording import read_recording

    loans = step = 0
    for event in read_recording(folder / "flight").events:
        if isinstance(event, flight.StepBegan):
            step = event.step
        elif isinstance(event, flight.DecisionMade) and event.action == "lend" and step > after_step:
            loans += 1
    return loans


def _options(parser: argparse.ArgumentParser) -> None:
    parts.extend(parser)
    parser.add_argument("--lengths", choices=("skewed", "constant"), default="skewed")
    parser.add_argument("--switch-cost", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--layers", type=int, metavar="N", help="of the model (the recipe's has 2)")
    parser.add_argument("--trainers", type=int, default=1, metavar="N", help="slices of the trainer, two cores for all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--keep", type=lambda path: Path(path).resolve(), metavar="FOLDER", help="keep the runs' folders"
    )
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))


def main() -> int:
    from benchmarks.forced_lengths import write_workload

    options = arguments(__doc__ or "", _options)
    taken = Parts(options)
    repeats = 1 if options.quick else options.repeats
    with tempfile.TemporaryDirectory(prefix="mux-") as folder:
        work = Path(folder)
        write_workload(work, lengths=options.lengths, prompts=256, sessions=8, longest=_LONGEST)
        model = deeper_model(work, options.layers) if options.layers else None
        for repeat in range(repeats):
            first = repeat % len(options.systems)
            for system in options.systems[first:] + options.systems[:first]:
                if len(taken.of(system)) > repeat:
                    continue
                if taken.out_of_time:
                    return taken.pause()
                asked = (options.lengths, options.steps, options.switch_cost, repeat, model, options.keep)
                measured = run(system, work, *asked, options.trainers)
                taken.add(system, asdict(measured))
                print(f"{repeat + 1}/{repeats} {system}: {measured.mean_s:.2f} s/step", flush=True)
    found = {system: [Measured(**one) for one in taken.of(system)] for system in options.systems}
    negative = options.lengths == "constant" or options.switch_cost > 0
    return report(_records(found, negative=negative, dear=options.switch_cost > 0), options.json)


def _by_system(found: Mapping[str, list[Measured]], medians: Mapping[str, float], *, negative: bool) -> list[Record]:
    records = []
    for system, runs in found.items():
        idle = statistics.median([one.idle for one in runs])
        bar = system in _LENDING and not negative
        records += [
            Record(name=f"{system}: wall time per step", value=medians[system], unit="s"),
            Record(
                name="  idle share of the trainable slice",
                value=idle,
                unit="",
                bar="<= 0.05" if bar else "",
                holds=idle <= 0.05 if bar else None,
            ),
            Record(name="  loans per run, median", value=statistics.median([one.loans for one in runs]), unit=""),
        ]
        stale = max(one.staleness for one in runs)
        ours = system.startswith("ours")
        records.append(
            Record(
                name="  largest staleness by first token",
                value=stale,
                unit="versions",
                bar="<= 1" if ours else "",
                holds=stale <= 1 if ours else None,
            )
        )
        if ours:
            complete = min(one.complete or 0.0 for one in runs)
            records.append(
                Record(name="  share of rows audited", value=complete, unit="", bar="= 1", holds=complete == 1)
            )
    return records


def _beside(found: Mapping[str, list[Measured]], theirs: list[str], which: str) -> list[Record]:
    """Ours against the best of some of verl's, round by round."""
    records = []
    for system in _LENDING:
        if system in found and theirs:
            rounds = zip(*(found[other] for other in (system, *theirs)), strict=True)
            ratios = [min(other.mean_s for other in others) / own.mean_s for own, *others in rounds]
            ratio, worst, best = statistics.median(ratios), min(ratios), max(ratios)
            name = f"{system}, speed relative to verl's best of a round{which}"
            records.append(Record(name=name, value=ratio, unit="x", bar=">= 1.15", holds=ratio >= 1.15))
            records.append(Record(name="  in its worst round", value=worst, unit="x", bar="> 1", holds=worst > 1))
            records.append(Record(name="  in its best round", value=best, unit="x"))
            records += [Record(name=f"  in round {n}", value=one, unit="x") for n, one in enumerate(ratios, 1)]
    return records


def _records(found: Mapping[str, list[Measured]], *, negative: bool, dear: bool) -> list[Record]:
    """Every system by itself, then the comparisons for which both sides were run."""
    medians = {system: statistics.median([one.mean_s for one in runs]) for system, runs in found.items()}
    records = _by_system(found, medians, negative=negative)
    verls = [system for system in found if system.startswith("verl")]
    records += _beside(found, [system for system in verls if not system.endswith(_WAITING)], "")
    records += _beside(found, [system for system in verls if system.endswith(_WAITING)], " at the same bound")
    for system in _LENDING:
        if "ours apart" in medians and system in medians:
            loss = medians[system] / medians["ours apart"] - 1
            records.append(
                Record(
                    name=f"{system}, loss against never lending",
                    value=loss,
                    unit="",
                    bar="<= 0.02" if negative else "",
                    holds=loss <= 0.02 if negative else None,
                )
            )
    if dear and "ours predictive" in found:
        late = max(one.late_loans for one in found["ours predictive"] if one.late_loans is not None)
        records.append(
            Record(
                name="ours predictive, loans in the second half of a run, most",
                value=late,
                unit="",
                bar="= 0, unless lending wins",
                holds=late == 0 or medians["ours predictive"] < medians.get("ours apart", 0.0),
            )
        )
    return records


if __name__ == "__main__":
    sys.exit(main())
