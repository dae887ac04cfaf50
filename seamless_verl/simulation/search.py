"""Which split and which tags under a GPU budget, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from seamless_verl.config import WeightsConfig
from seamless_verl.errors import ConfigError
from seamless_verl.simulation.options import alike, apply
from seamless_verl.simulation.regimes import regime
from seamless_verl.simulation.run import Result, simulate
from seamless_verl.simulation.scenario import Scenario

# What is least certain in a prediction, each moved by this factor.
UNCERTAIN = {
    "decode.slowdown": 1.2,
    "train.gpu_s_per_token": 1.2,
    "costs.wake": 2.0,
    "costs.drain": 2.0,
    "costs.load": 2.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One split under one system; ``label`` names both."""

    scenario: Scenario
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Step time of the best candidate and of the second when one parameter is moved; whether the order holds."""

    key: str
    factor: float
    best_s: float
    second_s: float


def candidates(base: Scenario, systems: Sequence[str], gpus: int) -> Iterator[Candidate]:
    """Every split of the budget into slices of the base's size, in eighths; and all of them {train, rollout}, for
    systems that can share those.

    Raises:
        ConfigError: the budget is no multiple of a slice, or too small to be split.
    """
    size = base.pools[0].gpus
    if gpus % size or gpus < 2 * size:
        raise ConfigError(
            "--gpus", gpus, f"does not split into slices of {size}", f"write {max(2, gpus // size) * size}"
        )
    slices = gpus // size
    splits = sorted({max(1, min(slices - 1, round(slices * part / 8))) for part in range(1, 8)})
    train, rollout = alike(base, trains=True), alike(base, trains=False)
    for system in systems:
        rules = regime(system)
        known: dict[str, Any] = {"system": system}  # what the base has of ours and this one has not, it does without
        known |= {} if rules.reserves else {"in_flight": None}
        known |= {} if rules.rolls else {"weights": WeightsConfig()}
        if rules.colocated or (rules.lends and not rules.needs_standing):
            together = (replace(train, name="all", slices=slices, trains=True, rolls_out=True),)
            scenario = replace(base, pools=together, **known)
            yield Candidate(scenario=scenario, label=f"{system}, {slices} slices")
        for trainers in () if rules.colocated else splits:
            pools = (
                replace(train, name="trainers", slices=trainers, trains=True, rolls_out=True),
                replace(rollout, name="rollouts", slices=slices - trainers, trains=False, rolls_out=True),
            )
            scenario = replace(base, pools=pools, **known)
            yield Candidate(scenario=scenario, label=f"{system}, {trainers}+{slices - trainers} slices")


def rank(
    found: Sequence[Candidate], seeds: int, progress: Callable[[Candidate, float], None]
) -> list[tuple[Candidate, list[Result]]]:
    """Fastest first, by the mean over the seeds; of each the results by seed. ``progress`` gets a candidate and the
    seconds of its mean step."""
    timed = []
    for candidate in found:
        results = [simulate(replace(candidate.scenario, seed=candidate.scenario.seed + n)) for n in range(seeds)]
        timed.append((sum(result.step_s for result in results) / seeds, candidate, results))
        progress(candidate, timed[-1][0])
    timed.sort(key=lambda entry: entry[0])
    return [(candidate, results) for _, candidate, results in timed]


def sensitivity(best: Candidate, second: Candidate, progress: Callable[[int, int], None]) -> list[Sensitivity]:
    """Move each uncertain parameter up and down."""
    found = []
    moves = [(key, factor) for key, up in UNCERTAIN.items() for factor in (1 / up, up)]
    for done, (key, factor) in enumerate(moves, start=1):
        times = [simulate(_moved(candidate.scenario, key, factor)).step_s for candidate in (best, second)]
        found.append(Sensitivity(key=key, factor=factor, best_s=times[0], second_s=times[1]))
        progress(done, len(moves))
    return found


def _moved(base: Scenario, key: str, factor: float) -> Scenario:
    if key == "decode.slowdown":
        return apply(base, [f"{key}={factor}"])
    if key == "train.gpu_s_per_token":
        return apply(base, [f"{key}={base.train.gpu_s_per_token * factor}"])
    return apply(base, [f"{key}={getattr(base.costs, key.partition('.')[2]) * factor}"])
