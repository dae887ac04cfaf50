"""Small scenarios that tests of the simulator start from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from seamless_verl.config import RouterConfig
from seamless_verl.decode_cost import DecodeCost
from seamless_verl.observe import flight
from seamless_verl.simulation.agents import LogNormal
from seamless_verl.simulation.clock import Clock
from seamless_verl.simulation.fleet import Fleet
from seamless_verl.simulation.regimes import REGIMES
from seamless_verl.simulation.replica import EnginePhysics
from seamless_verl.simulation.scenario import Pool, Scenario, SwitchCosts, TrainPhysics
from seamless_verl.staleness.router import router_of

COST = DecodeCost(
    floor_s=1.1e-2, base_s=9.8e-3, per_request_s=1.2e-4, attention_base_s=9e-4, attention_per_token_s=4e-9
)
ENGINE = EnginePhysics(decode=COST, prefill_s_per_token=2.5e-5, kv_tokens=400_000, max_running=256)


def scenario(system: str, **changes: Any) -> Scenario:
    """Two trainer and two rollout slices (four that do both for who needs that), short skewed answers, six steps."""
    trainers = Pool(name="trainers", slices=2, gpus=4, trains=True, engine=ENGINE)
    together = system in REGIMES and REGIMES[system].colocated
    values: dict[str, Any] = {
        "system": system,
        "pools": (replace(trainers, slices=4),)
        if together
        else (trainers, replace(trainers, name="rollouts", trains=False)),
        "workload": LogNormal(mean=1000, sigma=0.8, cap=4096),
        "train": TrainPhysics(gpu_s_per_token=2e-3, update_s=0.5),
        "costs": SwitchCosts(wake=2.0, drain=1.0, load=1.0, push=0.5),
        "batch": 8,
        "mini_batch": 2,
        "attempts": 4,
        "steps": 6,
        "warm": 2,
    }
    return Scenario(**{**values, **changes})


def make_fleet(clock: Clock, **changes: Any) -> Fleet:
    """Without slices. Requests go to who has the fewest, nothing moves by itself, and nobody listens."""
    values: dict[str, Any] = {
        "router": router_of(RouterConfig(oldest_first=False)),
        "rebalance": False,
        "is_long": lambda request: False,
        "lowest_version": lambda request: 0,
        "started": lambda request, name: None,
        "stopped": lambda request, name, finished: None,
        "finished": lambda request: None,
    }
    return Fleet(clock, **{**values, **changes})


def trained_s(events: Iterable[flight.FlightEvent]) -> list[float]:
    """Seconds that the trainer computed in each step of a recording."""
    found: list[float] = []
    for event in events:
        if isinstance(event, flight.StepBegan):
            found.append(0.0)
        elif isinstance(event, (flight.PhaseBegan, flight.PhaseEnded)) and event.phase is flight.Phase.UPDATE_ACTOR:
            found[-1] += event.at if isinstance(event, flight.PhaseEnded) else -event.at
    return found
