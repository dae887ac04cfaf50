"""What ``--set key=value`` may say, and the scenarios that follow. Keys are those of the live configuration."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

import yaml

from seamless_verl.config import RouterConfig, SchedulerConfig, WeightsConfig
from seamless_verl.errors import ConfigError, meant
from seamless_verl.scheduling.slices import Tag
from seamless_verl.simulation.agents import Agentic, Bimodal, Constant, LogNormal
from seamless_verl.simulation.presets import CALIBRATED, engine
from seamless_verl.simulation.regimes import regime
from seamless_verl.simulation.replica import slower
from seamless_verl.simulation.scenario import Noise, Pool, Scenario, SwitchCosts, divisor

_WORKLOADS = {"constant": Constant, "lognormal": LogNormal, "bimodal": Bimodal, "agentic": Agentic}
_WHOLE = {  # field, least, most
    "staleness.eta": ("eta", 0, 100),
    "data.train_batch_size": ("batch", 1, 100_000),
    "actor.ppo_mini_batch_size": ("mini_batch", 1, 100_000),
    "rollout.n": ("attempts", 1, 10_000),
    "steps": ("steps", 1, 100_000),
    "seed": ("seed", 0, 1 << 32),
}
_SHARES = ("shared", "long_share")
_WIDEST = 5.0  # standard deviation of a logarithm: a factor of 150 at one sigma
_MAY_BE_ZERO = ("prompt", "observation", "answer_sigma", "tool_sigma")
_RESOURCES = (
    "write resources=[{name: trainers, nodes: 2, gpus_per_node: 8, capabilities: [train, rollout]}, "
    "{name: rollouts, nodes: 1, gpus_per_node: 8, capabilities: [rollout]}]"
)
_EXAMPLES = {
    "constant": "{kind: constant, answer: 8000}",
    "lognormal": "{kind: lognormal, mean: 8000, sigma: 0.9, cap: 32768}",
    "bimodal": "{kind: bimodal, short: 4000, long: 28000, long_share: 0.2}",
    "agentic": "{kind: agentic, turns: 15, max_turns: 50, answer: 500, observation: 800, tool_s: 8}",
}
# What a verl user would look for by the last part of verl's key, and where it is here.
_ELSEWHERE = {
    "max_response_length": f"write it as the cap of workload={_EXAMPLES['lognormal']}",
    "max_prompt_length": "write workload={…, prompt: N}",
    "nnodes": _RESOURCES,
    "n_gpus_per_node": _RESOURCES,
    "path": "a preset is Qwen3.5-35B-A3B on H100; for your model record a short run and start --from it",
    "model": "a preset is Qwen3.5-35B-A3B on H100; for your model record a short run and start --from it",
    "cost": "leave it out: the simulated engines know what a decode step costs",
    "max_num_seqs": "it is read from a recorded run, start --from one",
}
_SIZES = (2, 4, 8)  # of a preset's model, whose weights do not fit into one GPU; a node has eight
_NESTED = {
    "costs": SwitchCosts,
    "noise": Noise,
    "weights": WeightsConfig,
    "router": RouterConfig,
    "scheduler": SchedulerConfig,
}
_FIELDS = {f"{name}.{field.name}": str(field.type) for name, kind in _NESTED.items() for field in fields(kind)}
# Simulated engines know what a decode step costs, a policy may be a rival's, and no weights are loaded.
for _elsewhere in ("router.cost", "scheduler.policy", "scheduler.check_weights"):
    del _FIELDS[_elsewhere]
_KINDS = {kind.__name__: kind for kind in (int, str, bool)}  # else float
_SLICE_SIZE = "rollout.tensor_model_parallel_size"
KEYS = (
    "scheduler.policy",
    "staleness.in_flight",
    *_WHOLE,
    _SLICE_SIZE,
    "resources",
    "workload",
    "train.gpu_s_per_token",
    "train.shared_prefix",
    "decode.slowdown",
    *_FIELDS,
)


def apply(base: Scenario, assignments: Sequence[str]) -> Scenario:
    """The scenario with all assignments made at once, so that they are checked together.

    Raises:
        ConfigError: an unknown key, a value that cannot be read, or a scenario that cannot be.
    """
    changes: dict[str, Any] = {}
    pairs = []
    for assignment in assignments:
        key, sign, text = assignment.partition("=")
        if not sign:
            raise ConfigError("--set", assignment, "is no assignment", "write key=value, e.g. staleness.eta=2")
        pairs.append((key.removeprefix("seamless.").removeprefix("actor_rollout_ref."), text))
    for text in (text for key, text in pairs if key == _SLICE_SIZE):  # before the slices are declared
        base = _resized(base, text)
    first = ("resources", "scheduler.policy")  # others change what these declare
    for key, text in sorted(pairs, key=lambda pair: pair[0] not in first):
        if key != _SLICE_SIZE:
            _assign(base, changes, key, text)
    noise, costs = (changes.get(group, getattr(base, group)) for group in ("noise", "costs"))
    if noise.failures_per_hour * costs.repair >= 3600:
        problem = f"slices would fail faster than they are repaired ({costs.repair:g} s each, costs.repair)"
        raise ConfigError("noise.failures_per_hour", noise.failures_per_hour, problem, "write e.g. 0.5")
    if noise.slowdown > _WIDEST:
        raise ConfigError("noise.slowdown", noise.slowdown, "is no spread of a logarithm", "write e.g. 0.03")
    if "steps" in changes:
        changes["warm"] = min(base.warm, changes["steps"] // 4)
    if "batch" in changes and "mini_batch" not in changes:
        changes["mini_batch"] = divisor(changes["batch"], changes["batch"] * base.mini_batch // base.batch)
    return replace(base, **changes)


def _assign(base: Scenario, changes: dict[str, Any], key: str, text: str) -> None:
    if key == "scheduler.policy":
        changes["system"] = text
    elif key == "staleness.in_flight":
        changes["in_flight"] = None if text == "null" else _read(key, text, float)
    elif key in _WHOLE:
        name, least, most = _WHOLE[key]
        changes[name] = _read(key, text, int)
        if not least <= changes[name] <= most:
            raise ConfigError(key, text, "cannot be simulated", f"write a number from {least} to {most}")
    elif key == "resources":
        changes["pools"] = _pools(base, text)
    elif key == "workload":
        changes["workload"] = _workload(text)
    elif key == "train.gpu_s_per_token":
        changes["train"] = replace(changes.get("train", base.train), gpu_s_per_token=_read(key, text, float))
    elif key == "train.shared_prefix":
        factor = _read(key, text, float)
        if not 0 < factor <= 1:
            raise ConfigError(key, text, "is no share of the training time", f"write e.g. {key}=0.6, or 1 without")
        changes["train"] = replace(changes.get("train", base.train), shared_prefix=factor)
    elif key == "decode.slowdown":
        factor = _read(key, text, float)
        if not 0.001 <= factor <= 1000:
            raise ConfigError(key, text, "is no factor between 0.001 and 1000", f"write e.g. {key}=1.2")
        pools = changes.get("pools", base.pools)
        changes["pools"] = tuple(
            replace(pool, engine=replace(pool.engine, decode=slower(pool.engine.decode, factor))) for pool in pools
        )
    elif key in _FIELDS:
        group, _, field = key.partition(".")
        before = changes.get(group, getattr(base, group))
        system = changes.get("system", base.system)
        rules = regime(system)
        before = rules.routed(before) if group == "router" else before
        changes[group] = replace(before, **{field: _read(key, text, _KINDS.get(_FIELDS[key], float))})
        if group == "router" and rules.routed(changes[group]) != changes[group]:
            fix = "leave it out, or simulate one of ours, e.g. scheduler.policy=predictive"
            raise ConfigError(key, text, f"{system} places requests by its own rule", fix)
        if group == "scheduler" and system != "predictive":
            raise ConfigError(key, text, f"{system} has no such setting", "simulate scheduler.policy=predictive")
    else:
        raise ConfigError(key, text, "unknown key", _ELSEWHERE.get(key.rpartition(".")[2]) or meant(key, KEYS))


def _resized(base: Scenario, text: str) -> Scenario:
    """The same GPUs in slices of another size."""
    size = _read(_SLICE_SIZE, text, int)
    if size not in _SIZES:
        problem = "a slice of a preset has 2 to 8 GPUs (its model has 35B parameters, too many for one)"
        raise ConfigError(_SLICE_SIZE, text, problem, f"write one of {_told(_SIZES)}")
    if any(pool.engine != engine(CALIBRATED, pool.gpus) for pool in base.pools):
        problem = "a recording shows one size only, and what another would cost is known for presets"
        raise ConfigError(_SLICE_SIZE, text, problem, "leave it out, or start from --preset")
    pools = []
    for pool in base.pools:
        if pool.slices * pool.gpus % size:
            fits = [fit for fit in _SIZES if pool.slices * pool.gpus % fit == 0]
            problem = f"does not divide the {pool.slices * pool.gpus} GPUs of {pool.name}"
            raise ConfigError(_SLICE_SIZE, text, problem, f"write one of {_told(fits)}")
        slices = pool.slices * pool.gpus // size
        pools.append(replace(pool, slices=slices, gpus=size, engine=engine(CALIBRATED, size)))
    return replace(base, pools=tuple(pools))


def _told(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _read(key: str, text: str, kind: type) -> Any:
    example = {int: "2", float: "0.03" if key == "noise.slowdown" else "1.5", str: "predictive", bool: "true"}[kind]
    try:
        value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ConfigError(key, text, f"is no {kind.__name__}", f"write e.g. {key}={example}") from None
    if kind is float and not 0 <= value < 1e12:
        raise ConfigError(key, text, "must be finite and not negative", f"write e.g. {key}={example}")
    return value


def _yaml(key: str, text: str, fix: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(key, text, "is no YAML", fix) from None


def _pools(base: Scenario, text: str) -> tuple[Pool, ...]:
    declared = _yaml("resources", text, _RESOURCES)
    if not isinstance(declared, list) or not declared or not all(isinstance(entry, dict) for entry in declared):
        raise ConfigError("resources", text, "is no list of pools", _RESOURCES)
    pools = [_pool(base, entry) for entry in declared]
    if len({pool.name for pool in pools}) < len(pools):
        raise ConfigError("resources", text, "two pools have the same name", "rename one")
    return tuple(pools)


def _pool(base: Scenario, entry: Mapping[str, Any]) -> Pool:
    needed = ("name", "nodes", "gpus_per_node", "capabilities")
    lacking, unknown = [key for key in needed if key not in entry], sorted(map(str, entry.keys() - set(needed)))
    if lacking or unknown:
        problem = f"an entry lacks {', '.join(lacking)}" if lacking else f"{', '.join(unknown)} cannot be simulated"
        raise ConfigError("resources", entry, problem, _RESOURCES)
    if not all(type(entry[name]) is int and entry[name] > 0 for name in ("nodes", "gpus_per_node")):
        raise ConfigError("resources", entry, "nodes and gpus_per_node must be whole numbers above 0", _RESOURCES)
    tags, known = entry["capabilities"], [tag.value for tag in Tag]
    if not isinstance(tags, list) or not tags or any(tag not in known for tag in tags):
        raise ConfigError("resources", entry, "capabilities must be some of train and rollout", _RESOURCES)
    trains, rolls_out = Tag.TRAIN.value in tags, Tag.ROLLOUT.value in tags
    model = alike(base, trains=trains, name=str(entry["name"]))
    on_node, devices = entry["gpus_per_node"], entry["nodes"] * entry["gpus_per_node"]
    if devices % model.gpus or (on_node % model.gpus and model.gpus % on_node):  # as `slices_of` of a live run
        raise ConfigError("resources", entry, f"does not split into slices of {model.gpus} GPUs", _RESOURCES)
    slices = devices // model.gpus
    return replace(model, name=str(entry["name"]), slices=slices, trains=trains, rolls_out=rolls_out)


def alike(base: Scenario, *, trains: bool, name: str = "") -> Pool:
    """The pool whose slices new ones are like (recorded pools differ in speed): that of the same name, else the first
    that is the trainer's or not as they are, else the first of all."""
    return min(base.pools, key=lambda pool: (pool.name != name, pool.trains != trains))


def _workload(text: str) -> Any:
    declared = _yaml("workload", text, f"write workload={_EXAMPLES['lognormal']}")
    name = str(declared.get("kind")) if isinstance(declared, dict) else ""
    fix = f"write e.g. workload={_EXAMPLES.get(name, _EXAMPLES['lognormal'])}"
    if name not in _WORKLOADS:
        raise ConfigError("workload", text, f"kind must be one of {', '.join(_WORKLOADS)}", fix)
    kind, figures = _WORKLOADS[name], {key: value for key, value in declared.items() if key != "kind"}
    known = {spec.name: spec.default is MISSING for spec in fields(kind)}
    whole = {spec.name for spec in fields(kind) if spec.type == "int"}
    lacking = [key for key, needed in known.items() if needed and key not in figures]
    unknown = [str(key) for key in figures if key not in known]
    if lacking or unknown:
        problem = f"lacks {', '.join(lacking)}" if lacking else f"{', '.join(unknown)}: not known"
        raise ConfigError("workload", text, f"{problem} ({name} takes {', '.join(known)})", fix)
    try:
        workload = kind(**figures)
        for key in known:
            _check_figure(key, getattr(workload, key), whole=key in whole)
        workload.group(random.Random(0), 1)
    except ValueError as error:
        raise ConfigError("workload", text, str(error), fix) from None
    return workload


def _check_figure(name: str, value: object, *, whole: bool) -> None:
    """Refuse a value that this figure cannot have.

    Raises:
        ValueError: no number, no share between 0 and 1, or a length, time or spread that is not positive or too large.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}: {value} is no number (in YAML 8e3 is text, write 8000)")
    if whole and value % 1:  # also of inf and nan
        raise ValueError(f"{name}: {value} is no whole number")
    if name.endswith("sigma") and value > _WIDEST:
        raise ValueError(f"{name}: {value} is no spread of a logarithm, write e.g. 0.9")
    if name in _SHARES:
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: {value} is no share, it must lie between 0 and 1")
    elif not 0 <= value < 1e12 or (value == 0 and name not in _MAY_BE_ZERO):
        raise ValueError(f"{name}: {value} must be positive")
