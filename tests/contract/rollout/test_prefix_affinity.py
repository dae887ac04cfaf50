"""Conversations and the replicas that hold their prefix, when replicas join and leave."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


def balancer(servers=("a", "b")):
    from seamless_verl.verl_adapter.rollout.load_balancer import MeteredLoadBalancer

    return MeteredLoadBalancer(servers={name: name.upper() for name in servers}, max_cache_size=10_000)


class Router:
    """In place of the actor's handle: calls are done at once, and a method that is not there is not there."""

    def __init__(self, made):
        self._made = made

    def __getattr__(self, name):
        call = getattr(self._made, name)
        return type("Method", (), {"remote": staticmethod(call)})


def slices_of(made, monkeypatch, names="abc"):
    """The edge that the driver commands, around a balancer; replicas are names."""
    from types import SimpleNamespace

    from seamless_verl.verl_adapter.slices import replica_slices as slices

    monkeypatch.setattr(slices.ray, "get", lambda answer: answer)
    edge = object.__new__(slices.ReplicaSlices)
    edge.addresses = {name: name for name in names}
    edge._replicas = {name: SimpleNamespace(server_handle=name.upper()) for name in names}
    edge._router = Router(made)
    return edge


class Agents:
    """Conversations of growing length; counts tokens that are prefilled although another replica has them cached."""

    def __init__(self, made, number, context=16_000, busy=0.1):
        self.made, self.busy, self.rng = made, busy, random.Random(1)
        self.contexts = {f"s{n}": context for n in range(number)}
        self.cached = {}  # conversation -> {replica: tokens}
        self.running = []
        self.again = 0

    def turn(self, name, served=True):
        place, _ = self.made.acquire_server(name, context_tokens=self.contexts[name])
        known = self.cached.setdefault(name, {})
        if known.get(place, 0) < max(known.values(), default=0):
            self.again += max(known.values()) - known.get(place, 0)
        self.contexts[name] += 100
        known[place] = self.contexts[name]
        self.running.append((place, name))
        if len(self.running) > self.busy * len(self.contexts):
            self.made.release_server(*self.running.pop(0))

    def round(self):
        names = sorted(self.contexts)
        self.rng.shuffle(names)
        for name in names:
            self.turn(name)

    def lost(self, replica):
        for known in self.cached.values():
            known.pop(replica, None)


def test_a_replica_that_joins_and_leaves_costs_few_of_100_conversations_their_prefix(monkeypatch):
    """verl's way moves two thirds of them when it joins and a third when it leaves: as many tokens as there are."""
    made = balancer()
    edge, agents = slices_of(made, monkeypatch), Agents(made, 100)
    agents.round()
    agents.round()
    assert agents.again == 0
    everything = sum(agents.contexts.values())
    edge.register(["c"])
    agents.round()
    agents.round()
    joined = agents.again
    agents.lost("c")
    edge.unregister(["c"])
    agents.round()
    assert joined < 0.1 * everything
    assert agents.again < 0.15 * everything


def test_new_conversations_go_to_the_replica_that_joined(monkeypatch):
    made = balancer()
    edge = slices_of(made, monkeypatch)
    old = [made.acquire_server(f"old{n}", context_tokens=16_000)[0] for n in range(8)]
    edge.register(["c"])
    assert [made.acquire_server(f"new{n}", context_tokens=16_000)[0] for n in range(4)] == ["c"] * 4
    assert [made.acquire_server(f"old{n}", context_tokens=16_500)[0] for n in range(8)] == old


def test_new_weights_spread_everybody_anew(monkeypatch):
    made = balancer()
    edge, agents = slices_of(made, monkeypatch), Agents(made, 99, busy=1.0)
    agents.round()
    edge.register(["c"])
    edge._store = None
    edge.forget_caches()
    for place, name in agents.running:
        made.release_server(place, name)
    agents.running.clear()
    for name in agents.contexts:
        agents.turn(name)
    assert set(Counter(place for place, _ in agents.running).values()) == {33}


def test_conversations_stay_with_replicas_that_take_new_weights_in_turn(monkeypatch):
    """Their caches are valid until each one's turn has come; what joined before it is a newcomer until then."""
    made = balancer()
    made.set_version(["a", "b"], 1)
    edge = slices_of(made, monkeypatch)
    edge._store = object()
    old = [made.acquire_server(f"old{n}", context_tokens=100)[0] for n in range(20)]
    made.set_version(["c"], 2)
    edge.register(["c"])
    made.set_version(["c"], 2)  # as it wakes with them: this is no new version
    edge.forget_caches()
    made.set_version(["a"], 2)
    again = [made.acquire_server(f"old{n}", context_tokens=100)[0] for n in range(20)]
    assert 0 < again.count("c") < 20
    assert all(place in (before, "c") for place, before in zip(again, old, strict=True))
    made.set_version(["c"], 3)
    assert [made.acquire_server(f"old{n}", context_tokens=100)[0] for n in range(20)] == again


def test_a_replica_that_comes_back_under_its_name_has_nothing_cached(monkeypatch):
    """The others do, since their conversations were placed anew meanwhile."""
    made = balancer()
    edge, agents = slices_of(made, monkeypatch), Agents(made, 40)
    agents.round()
    edge.unregister(["a"])
    agents.lost("a")
    agents.round()
    edge.register(["a"])
    before = agents.again
    agents.round()
    assert agents.again - before < 0.1 * sum(agents.contexts.values())


def test_a_router_of_the_users_own_is_told_to_spread_anew_as_by_verl(monkeypatch):
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    made = GlobalRequestLoadBalancer(servers={"a": "A", "b": "B"})
    edge = slices_of(made, monkeypatch)
    made.acquire_server("s")
    edge.register(["c"])
    assert not made._request_id_to_server


async def test_the_client_says_how_long_a_prompt_is_and_not_what_is_in_it():
    from omegaconf import OmegaConf

    from seamless_verl.verl_adapter.rollout.llm_client import VersionedLLMClient
    from tests.contract.rollout.test_router import Awaitable

    asked = []

    class Watched(type(balancer())):
        def acquire_server(self, request_id, **fields):
            asked.append(fields)
            return super().acquire_server(request_id, **fields)

    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"response_length": 400, "name": "vllm"}}})
    client = VersionedLLMClient(config, Awaitable(Watched(servers={"a": "A"}, max_cache_size=10)))
    await client._acquire_server("s", prompt_ids=[0] * 7)
    assert asked == [{"context_tokens": 7, "session": "s", "group": ""}]


class Changes(RuleBasedStateMachine):
    """Replicas come and go, weights are published, conversations ask and end in any order."""

    conversations = Bundle("conversations")

    def __init__(self):
        super().__init__()
        self.made = balancer(("r0",))
        self.serving = {"r0"}
        self.running = []
        self.number = 0

    @rule(target=conversations)
    def begin(self):
        self.number += 1
        return f"s{self.number}"

    @precondition(lambda self: self.serving)
    @rule(name=conversations, context=st.one_of(st.none(), st.integers(0, 100_000)))
    def ask(self, name, context):
        place, handle = self.made.acquire_server(name, context_tokens=context)
        assert (place in self.serving, handle) == (True, place.upper())
        self.running.append((place, name))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        self.made.release_server(*self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @rule(number=st.integers(0, 4))
    def join(self, number):
        if f"r{number}" not in self.serving:
            self.made.add_servers({f"r{number}": f"R{number}"})
            self.serving.add(f"r{number}")

    @rule(number=st.integers(0, 4))
    def leave(self, number):
        self.made.remove_servers([f"r{number}"])
        self.serving.discard(f"r{number}")
        self.running = [entry for entry in self.running if entry[0] in self.serving]

    @precondition(lambda self: self.serving)
    @rule()
    def publish(self):
        """Caches are worthless then: whoever was interrupted asks again, and loads are level within one request."""
        interrupted, self.running = self.running, []
        self.made.clear_sticky_cache()
        for place, name in interrupted:
            self.made.release_server(place, name)
        taken = {}
        for _, name in interrupted:
            taken[name] = self.made.acquire_server(name, context_tokens=1000)[0]
            self.running.append((taken[name], name))
        if len(taken) == len(interrupted):  # requests of one conversation stay together
            loads = Counter(dict.fromkeys(self.serving, 0))
            loads.update(taken.values())
            assert max(loads.values()) - min(loads.values()) <= 1

    @invariant()
    def no_route_points_to_a_replica_that_left(self):
        assert set(self.made._request_id_to_server.values()) <= self.serving

    @invariant()
    def requests_are_counted(self):
        assert self.made.get_total_inflight() == len(self.running)


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
