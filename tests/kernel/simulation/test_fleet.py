"""Which request goes where: what the simulator asks the router, and what it takes off a slice again."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from seamless_verl.config import RouterConfig
from seamless_verl.simulation.agents import Agentic, Agents, Attempt, Replay, Turn
from seamless_verl.simulation.books import Use
from seamless_verl.simulation.clock import Clock
from seamless_verl.simulation.fleet import Fleet
from seamless_verl.simulation.replica import Request
from seamless_verl.simulation.run import Simulation
from seamless_verl.simulation.scenario import Pool, TrainPhysics
from seamless_verl.staleness.affinity import MovePrice
from seamless_verl.staleness.router import router_of
from seamless_verl.staleness.routing import Hold, MarginalGain, PendingRequest, ReplicaLoad, Route
from tests.kernel.simulation.build import ENGINE, make_fleet, scenario


def test_the_router_is_told_the_version_of_a_session_and_serves_the_most_stale_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group that waits for its first token has the version that it was admitted with, a later turn that of the
    first: with eta 1 nothing is more than one version behind the replicas."""
    route, seen = MarginalGain.route, []

    def watched(
        self: MarginalGain, requests: Iterable[PendingRequest], replicas: Sequence[ReplicaLoad]
    ) -> list[Route | Hold]:
        pending = {request.request: request for request in requests}
        decisions = route(self, pending.values(), replicas)
        seen.append(([pending[decision.request] for decision in decisions], max(load.version for load in replicas)))
        return decisions

    monkeypatch.setattr(MarginalGain, "route", watched)
    work = Agentic(turns=3, max_turns=6, answer=150, observation=80, tool_s=4.0, prompt=200, max_answer=800)
    Simulation(scenario("staleflow", workload=work, eta=1)).run()
    assert max(newest for _, newest in seen) > 3
    assert all(newest - 1 <= request.version <= newest for pending, newest in seen for request in pending)
    behind = [[(request.version, request.arrival) for request in pending] for pending, _ in seen]
    assert all(order == sorted(order) for order in behind)
    assert any(order[0][0] < order[-1][0] for order in behind)  # interrupted sessions beside new ones


def test_where_contexts_outgrow_the_caches_sessions_that_keep_theirs_are_faster() -> None:
    """Two slices of 400,000 tokens for 64 sessions of some 30,000; with ten times as much it makes no difference."""
    work = Agentic(turns=12, max_turns=20, answer=150, observation=2500, tool_s=2.0, prompt=2000, max_answer=800)

    def step_s(policy: str, cache: int) -> tuple[float, float]:
        pool = Pool(name="a", slices=2, gpus=4, trains=True, engine=replace(ENGINE, kv_tokens=cache))
        pools = (pool, replace(pool, name="b", trains=False))
        changes = {"batch": 16, "train": TrainPhysics(gpu_s_per_token=1e-5), "router": RouterConfig(policy=policy)}
        outcome = Simulation(scenario("disaggregated", workload=work, pools=pools, **changes)).run()
        again = outcome.books.gpu_seconds[Use.PREFILL_AGAIN] / len(outcome.steps)
        return outcome.step_s, again

    (fewest, computed_again), (keeping, hardly) = step_s("least_requests", 400_000), step_s("cache_aware", 400_000)
    assert keeping < 0.85 * fewest
    assert hardly < 0.5 * computed_again
    assert step_s("cache_aware", 4_000_000)[0] == pytest.approx(step_s("least_requests", 4_000_000)[0], rel=0.02)


def _fleet(stopped: list[tuple[object, str, bool]], **changes: Any) -> Fleet:
    def told(request: Request, name: str, finished: bool) -> None:
        stopped.append((request.owner, name, finished))

    return make_fleet(Clock(), stopped=told, **changes)


def test_a_request_is_withdrawn_wherever_it_is() -> None:
    stopped: list[tuple[object, str, bool]] = []
    fleet = _fleet(stopped)
    unit = fleet.add("a", gpus=1, trainable=False, physics=ENGINE)
    held, other = Request("held", 10, 50), Request("other", 10, 50)
    fleet.submit([held, other])  # nobody serves yet
    fleet.withdraw(held)
    assert fleet.num_held == 1
    unit.serve(0)
    fleet.pump()
    assert (fleet.num_held, unit.replica.load) == (0, 1)
    fleet.withdraw(other)
    assert unit.replica.load == 0
    assert stopped == [("other", "a", False)]  # whoever counts what runs on a slice must be told


def test_a_group_that_is_given_up_leaves_no_request_behind_and_does_not_come_back() -> None:
    """One attempt is generating, one is in its tool, one is in its last."""
    live: list[Request] = []
    ended: list[Attempt] = []
    clock = Clock()
    turns = (Turn(prompt=10, answer=5, tool_s=3.0), Turn(prompt=10, answer=5))
    agents = Agents(
        clock,
        Replay([[turns, turns, turns[:1]]]),
        random.Random(0),
        attempts=3,
        submit=live.extend,
        withdraw=live.remove,
        on_session=ended.append,
        on_group=lambda group: pytest.fail("it was given up"),
    )
    group = agents.draw(0)
    agents.start([group])
    for request in live[1:]:
        live.remove(request)
        request.version = 0
        agents.finished(request)
    agents.stop(group)
    assert not clock.run(lambda: False)  # until nothing is left to happen
    assert clock.now == 3.0
    assert (live, [attempt.index for attempt in ended]) == ([], [0, 1, 2])


def _two_busy(
    stopped: list[tuple[object, str, bool]],
    context: int,
    *,
    count: int = 40,
    price: MovePrice | None = None,
    policy: str = "least_requests",
) -> Fleet:
    """Two slices that serve requests of one context and a third that does not yet; what joins may take running ones."""
    router = replace(router_of(RouterConfig(policy=policy, oldest_first=False)), price=price or MovePrice())
    fleet = _fleet(stopped, rebalance=True, router=router)
    for name in ("a", "b", "c"):
        fleet.add(name, gpus=1, trainable=name == "c", physics=ENGINE)
    for name in ("a", "b"):
        fleet.units[name].serve(0)
    fleet.submit([Request(n, context, 5000) for n in range(count)])
    return fleet


def _join(fleet: Fleet, name: str) -> None:
    fleet.units[name].serve(0)
    fleet.joined(name)
    fleet.even_out()


@pytest.mark.parametrize("policy", ["least_requests", "cache_aware"])
def test_who_is_interrupted_for_a_slice_that_joins_arrives_there(policy: str) -> None:
    """Also long contexts, where a turn of usual length would rather have its prefix."""
    stopped: list[tuple[object, str, bool]] = []
    fleet = _two_busy(stopped, 3000, policy=policy)
    _join(fleet, "c")
    assert fleet.units["c"].replica.load == len(stopped) > 0


def test_a_slice_that_joins_interrupts_only_those_that_move_to_it() -> None:
    stopped: list[tuple[object, str, bool]] = []
    fleet = _two_busy(stopped, 20)
    _join(fleet, "c")
    loads = {name: unit.replica.load for name, unit in fleet.units.items()}
    assert len(stopped) == loads["c"]
    assert max(loads.values()) - min(loads.values()) <= 1
    assert sum(loads.values()) == 40


def test_where_prefill_is_dear_long_contexts_stay_where_they_are_cached() -> None:
    moved = []
    for prefill_steps in (200, 2_000, 20_000):
        stopped: list[tuple[object, str, bool]] = []
        _join(_two_busy(stopped, 9000, price=MovePrice(prefill_steps=prefill_steps)), "c")
        moved.append(len(stopped))
    assert moved[0] > moved[1] > moved[2]
    assert moved[2] <= 4


def test_a_slice_that_comes_back_has_no_conversations_left() -> None:
    fleet = _two_busy([], 400, count=4)
    first = next(iter(fleet._home))
    home = fleet._home[first]
    fleet.vacate(home)
    fleet.units[home].serve(0)
    assert home not in fleet._home.values()
