"""Replicas of several versions: no request begins, goes on or is moved to weights older than its floor."""

import asyncio
from collections import Counter

import pytest

from tests.contract.rollout.test_router import Awaitable, Remote, Replica, balancer_of, turn

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore")]
POLICIES = pytest.mark.parametrize("policy", ["least_requests", "marginal_gain", "cache_aware"])
HOLDING = pytest.mark.parametrize("policy", ["marginal_gain", "cache_aware"])


def two(policy, **settings):
    """The old one is of version 3, the new one of 4."""
    made = balancer_of({"old": Remote(Replica()), "new": Remote(Replica())}, policy=policy, **settings)
    made.set_version(["old"], 3)
    made.set_version(["new"], 4)
    return made


def client_of(balancer, sync="rolling"):
    from omegaconf import OmegaConf

    from seamless_verl.verl_adapter.rollout.llm_client import VersionedLLMClient

    rollout = {"response_length": 400, "name": "vllm"}
    config = {"actor_rollout_ref": {"rollout": rollout}, "seamless": {"weights": {"sync": sync}}}
    return VersionedLLMClient(OmegaConf.create(config), balancer)


async def acquire(balancer, name, **fields):
    return (await Awaitable(balancer).acquire_server.remote(name, context_tokens=10, **fields))[0]


@POLICIES
async def test_a_floor_leaves_out_who_is_too_old_also_where_the_prefix_lies(policy):
    balancer = two(policy)
    balancer.set_version(["new"], 3)
    places = {name: await acquire(balancer, name, floor=3) for name in "abcdef"}
    assert Counter(places.values()) == {"old": 3, "new": 3}
    balancer.set_version(["new"], 4)
    assert await acquire(balancer, "floor 4", floor=4) == "new"
    there, here = (next(name for name in places if places[name] == where) for where in ("old", "new"))
    balancer.release_server("old", there)
    assert await acquire(balancer, there, floor=3) == "old"
    balancer.release_server("old", there)
    balancer.release_server("new", "floor 4")
    balancer.release_server("new", here)
    assert await acquire(balancer, there, floor=4) == "new", "its prefix does not count"
    assert balancer.wanted() is None


@pytest.mark.parametrize("policy", ["least_requests", "cache_aware"])
async def test_whoever_is_first_to_have_a_version_gets_its_share_and_the_others_theirs(policy):
    """Six prompts need version 4, which one of two replicas has; the other one has as many requests to begin with."""
    from seamless_verl.verl_adapter.rollout.request_log import request_log

    balancer = two(policy)
    places = {name: await acquire(balancer, name, floor=3) for name in "abcd"}
    client = client_of(Awaitable(balancer))
    request_log.reserve({"g": 4})
    calls = [asyncio.ensure_future(_in_session(client, "g", index)) for index in range(6)]
    while sum(call.done() for call in calls) < 3:
        await turn()
    for _ in range(100):
        await turn()
    assert [call.result() for call in calls if call.done()] == ["new"] * 3
    assert balancer.wanted() is None, "somebody has it"
    balancer.release_server("new", next(name for name in places if places[name] == "new"))
    while sum(call.done() for call in calls) < 4:  # two and four, and three that wait: one of them may come
        await turn()
    for _ in range(100):
        await turn()
    assert balancer.get_status()["servers"] == {"old": 2, "new": 5}
    balancer.set_version(["old"], 4)
    await asyncio.wait_for(asyncio.gather(*calls), 10)
    assert balancer.get_status()["servers"] == {"old": 4, "new": 5}
    assert not balancer._refused
    request_log.release("g")


@pytest.mark.parametrize("policy", ["least_requests", "marginal_gain"])
async def test_whoever_was_refused_and_gave_up_raises_nobodys_share(policy):
    """Of 20 prompts that nobody could serve, half were cancelled and half were a rollout worker's that died."""

    from seamless_verl.verl_adapter.rollout.load_balancer import Request

    async def taken(gave_up):
        balancer = two(policy)
        for name in "abcd":
            await acquire(balancer, name, floor=3)
        for number in range(gave_up):
            request = Request(f"given up {number}", 10, worker="dead" if number % 2 else "", floor=5)
            with pytest.raises(RuntimeError, match="version 5 yet"):
                balancer._choose(request)
        balancer.conversations_over([f"given up {number}" for number in range(0, gave_up, 2)])
        balancer.worker_died("dead")
        balancer.set_version(["new"], 5)
        for number in range(30):
            request = Request(f"prompt {number}", 10, floor=5)
            try:
                balancer._choose(request)
            except RuntimeError:
                return number
            balancer._seat(request)
        return 30

    assert await taken(20) == await taken(0) < 30


# Where sessions keep their caches, whoever waits outside is not counted: a second one would wait for its share.
@pytest.mark.parametrize(
    ("policy", "groups"), [("least_requests", "ghg"), ("marginal_gain", "ghg"), ("cache_aware", "gh")]
)
async def test_whom_nobody_may_serve_waits_outside_and_goes_as_soon_as_somebody_has_the_weights(policy, groups):
    balancer = two(policy)
    client = client_of(Awaitable(balancer))
    from seamless_verl.verl_adapter.rollout.request_log import request_log

    request_log.reserve({"g": 5, "h": 6})
    calls = [asyncio.ensure_future(_in_session(client, group, index)) for index, group in enumerate(groups)]
    while balancer.wanted() != 6:
        await turn()
    assert balancer.get_total_inflight() == 0
    assert not getattr(balancer, "_held", {}), "it would hold one of the places of Ray's actor"
    balancer.set_version(["old"], 5)
    done = await asyncio.wait_for(asyncio.gather(*calls[::2]), 10)
    assert done == ["old"] * groups.count("g")
    assert (balancer.wanted(), calls[1].done()) == (6, False)
    balancer.add_servers({"newest": Remote(Replica())})
    balancer.set_version(["newest"], 6)
    assert await asyncio.wait_for(calls[1], 10) == "newest"
    assert balancer.wanted() is None
    request_log.release("g"), request_log.release("h")


async def _in_session(client, group, index):
    from seamless_verl.verl_adapter.rollout.request_log import request_log

    with request_log.session(group, index):
        return (await client._acquire_server(f"{group}{index}", prompt_ids=[1]))[0]


@HOLDING
async def test_where_no_more_are_held_who_is_refused_does_not_ask_again_at_once(policy, monkeypatch):
    from seamless_verl.verl_adapter.rollout import holding_balancer

    monkeypatch.setattr(holding_balancer, "_MOST_HELD", 0)
    balancer = two(policy)
    assert await acquire(balancer, "first", floor=4) == "new"
    with pytest.raises(RuntimeError, match="No replica takes requests for version 4"):
        await acquire(balancer, "second", floor=4)  # of two requests the new one has its share
    waits = asyncio.ensure_future(balancer.someone_serves(4))
    for _ in range(20):
        await turn()
    assert not waits.done()
    balancer.set_version(["old"], 4)
    await asyncio.wait_for(waits, 5)
    assert await acquire(balancer, "second", floor=4) == "old"


@HOLDING
async def test_a_request_that_is_held_back_is_told_of_newer_weights(policy):
    balancer = two(policy, max_running=1)
    assert await acquire(balancer, "first", floor=4) == "new"
    held = asyncio.ensure_future(acquire(balancer, "held", floor=4))
    await turn()
    assert not held.done()
    assert balancer.wanted() is None, "somebody has it, and is full"
    balancer.remove_servers(["new"])
    assert balancer.wanted() == 4
    balancer.set_version(["old"], 4)
    assert await asyncio.wait_for(held, 5) == "old"


@POLICIES
async def test_where_nobody_tells_versions_floors_change_nothing(policy):
    balancer = balancer_of({"a": "A", "b": "B"}, policy=policy)
    places = [await acquire(balancer, f"r{n}", floor=n) for n in range(10)]
    assert Counter(places) == {"a": 5, "b": 5}
    assert (balancer.wanted(), balancer.oldest_version()) == (None, None)


@POLICIES
async def test_nobody_moves_to_a_replica_that_joined_with_older_weights(policy):
    balancer = balancer_of({"full": Remote(Replica())}, policy=policy)
    balancer.set_version(["full"], 4)
    for number in range(8):
        await acquire(balancer, f"r{number}", engine_name=f"a{number}")
    balancer.add_servers({"joined": Remote(Replica())})
    balancer.set_version(["joined"], 3)
    balancer.even_out()
    assert not balancer._servers["full"].target.aborted
    balancer.set_version(["joined"], 4)
    balancer.even_out()
    assert len(balancer._servers["full"].target.aborted) == 4


async def test_nor_does_migration_move_them_there():
    balancer = balancer_of({"full": Remote(Replica())}, migrate=True)
    balancer.set_version(["full"], 4)
    for number in range(8):
        await balancer.acquire_server(f"r{number}", context_tokens=1, engine_name=f"a{number}", floor=4)
    full = balancer._servers["full"].target
    balancer.set_version(["lags"], 3)
    balancer.add_servers({"lags": Remote(Replica())})
    assert balancer.oldest_version() == 3
    balancer.release_server("full", "r0")
    assert not full.aborted
    balancer.set_version(["lags"], 4)
    balancer.release_server("full", "r1")
    assert full.aborted


@pytest.mark.parametrize(("sync", "floors"), [("rolling", [2, 3, 2, 3]), ("together", [None] * 4)])
async def test_what_a_session_has_begun_with_is_its_floor_from_then_on(sync, floors):
    """Reserved for 2, begun with 3 (what `Replica` tells): later turns go to 3 or newer, a restart may begin with 2."""
    from seamless_verl.verl_adapter.rollout.request_log import request_log

    asked = []
    balancer = balancer_of({"a": Remote(Replica())}, policy="least_requests")

    class Watched(Awaitable):
        @property
        def acquire_server(self):
            class Method:
                @staticmethod
                async def remote(**fields):
                    asked.append(fields.get("floor"))
                    return balancer.acquire_server(**fields)

            return Method

    client = client_of(Watched(balancer), sync)
    request_log.reserve({"u": 2})
    for _ in range(2):
        with request_log.session("u", 0):
            for _ in range(2):
                output = await client.generate("c", prompt_ids=[1], sampling_params={"max_tokens": 3})
    assert asked == floors
    request_log.release("u")
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (3, 3)


async def test_versions_of_turns_on_unlike_replicas_are_lowest_and_highest(monkeypatch):
    """verl's agent loops take `max_global_steps` of the last turn for the session's."""
    from seamless_verl.verl_adapter.rollout.request_log import request_log
    from tests.contract.test_verl_contract import _client

    client, _ = _client(monkeypatch, [([1], 5, "aborted"), ([2], 7, "completed"), ([3], 6, "completed")])
    with request_log.session("u", 0):
        first = await client.generate("c", prompt_ids=[9], sampling_params={"max_tokens": 9})
        last = await client.generate("c", prompt_ids=[9], sampling_params={"max_tokens": 9})
    spans = [(o.extra_fields["min_global_steps"], o.extra_fields["max_global_steps"]) for o in (first, last)]
    assert spans == [(5, 7), (6, 7)]
