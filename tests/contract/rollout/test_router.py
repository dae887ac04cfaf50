"""The routing kernel as verl's load balancer: places, holds back, wakes, and never forgets anybody."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from seamless_verl.config import RouterConfig

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


def router(servers=("a", "b"), mu=0.3, max_running=64):
    from seamless_verl.verl_adapter.rollout.holding_balancer import balancer_class

    made = balancer_class(RouterConfig(policy="marginal_gain", mu=mu), max_running)
    return made(servers={name: f"handle of {name}" for name in servers}, max_cache_size=100)


def balancer_of(servers, max_running=64, policy="marginal_gain", full_determinism=False, **settings):
    from seamless_verl.verl_adapter.rollout.holding_balancer import balancer_class

    made = balancer_class(RouterConfig(policy=policy, **settings), max_running)
    return made(servers=servers, max_cache_size=100, full_determinism=full_determinism)


async def forgets(balancer):
    """Nothing counts any more of what was served: each replica takes a request that fills its cache, none takes two."""
    names = sorted(balancer.get_all_servers())
    balancer.set_cache_tokens(dict.fromkeys(names, 1_000_000))
    filled = [asyncio.ensure_future(balancer.acquire_server(f"fills {n}", context_tokens=1_000_000)) for n in names]
    return sorted(place for place, _ in await asyncio.wait_for(asyncio.gather(*filled), 5)) == names


def test_among_equals_a_long_session_stays_off_what_is_lent_until_that_is_taken_back():
    from seamless_verl.verl_adapter.rollout.load_balancer import MeteredLoadBalancer

    balancer = MeteredLoadBalancer(servers={"a": "A", "b": "B"}, max_cache_size=1000)
    for n in range(20):
        balancer.set_horizon(["b"], frozenset({f"group_long{n}"}))
        order = ("long", "new") if n % 2 else ("new", "long")
        places = {kind: balancer.acquire_server(f"{kind}{n}", session=f"group_{kind}{n}")[0] for kind in order}
        assert places == {"long": "a", "new": "b"}
    balancer.remove_servers(["b"])
    assert balancer.acquire_server("new0")[0] == "a"  # its place is gone
    balancer.add_servers({"b": "B"})
    assert balancer.acquire_server("long99")[0] == "b"  # the fewest; nothing is lent


async def test_the_router_knows_long_sessions_by_the_names_that_the_scheduler_learns_from_their_requests(monkeypatch):
    from omegaconf import OmegaConf

    from seamless_verl.scheduling.events import RequestStarted
    from seamless_verl.verl_adapter.rollout import llm_client
    from seamless_verl.verl_adapter.rollout.load_balancer import MeteredLoadBalancer
    from seamless_verl.verl_adapter.rollout.request_log import request_log

    balancer = MeteredLoadBalancer(servers={"a": "A", "b": "B"}, max_cache_size=1000)

    async def seat(client, request_id, **extra):
        wanted = {key: extra[key] for key in balancer.require_acquire_fields() if key in extra}
        return balancer.acquire_server(request_id, **wanted)

    monkeypatch.setattr(llm_client.VersionedLLMClient, "_seat", seat)
    client = llm_client.VersionedLLMClient(OmegaConf.create({"actor_rollout_ref": {"rollout": {}}}))
    request_log.take()
    with request_log.session("prompt", 3):
        request_log.name("the proxy's")  # of its session, as whoever opened that was told
        request_log.started("turn 1", "the proxy's", "a", 10)
        (started,) = [event for event in request_log.take() if isinstance(event, RequestStarted)]
        balancer.set_horizon(["b"], frozenset({started.session}))
        with request_log.session("prompt", 4):
            assert (await client._acquire_server("another", prompt_ids=[1]))[0] == "b"
        for _ in range(3):
            assert (await client._acquire_server("the proxy's", prompt_ids=[1]))[0] == "a"


def test_a_router_of_ours_is_told_of_full_determinism_which_verl_tells_its_own_only():
    from seamless_verl.verl_adapter.rollout.holding_balancer import balancer_class

    made = balancer_class(RouterConfig(), 64, full_determinism=True)
    idle, loaded = (made(servers={"a": "A", "b": "B"}, max_cache_size=100) for _ in range(2))
    for n in range(12):
        place, _ = loaded.acquire_server(f"other-{n}")
        if place == "a":
            loaded.release_server(place, f"other-{n}")
    places = {name: idle.acquire_server(name)[0] for name in (f"det-{n}" for n in range(24))}
    assert {name: loaded.acquire_server(name)[0] for name in reversed(places)} == places, "by name, not by load"


async def test_requests_spread_and_a_conversation_stays_where_it_is():
    balancer = router()
    places = [(await balancer.acquire_server(f"r{n}", context_tokens=100))[0] for n in range(10)]
    assert sorted(places) == ["a"] * 5 + ["b"] * 5
    balancer.release_server(places[0], "r0")
    assert (await balancer.acquire_server("r0", context_tokens=300)) == (places[0], f"handle of {places[0]}")
    assert balancer.get_total_inflight() == 10


async def test_requests_sent_at_once_see_each_other():
    balancer = router()
    places = await asyncio.gather(*(balancer.acquire_server(f"r{n}", context_tokens=1) for n in range(6)))
    assert sorted(name for name, _ in places) == ["a"] * 3 + ["b"] * 3


async def test_a_request_is_held_back_until_another_ends_and_the_oldest_goes_first():
    balancer = router(servers=("a",), max_running=1)
    await balancer.acquire_server("first", context_tokens=1)
    later = [asyncio.ensure_future(balancer.acquire_server(name, context_tokens=1)) for name in ("old", "new")]
    await asyncio.sleep(0)
    assert not any(call.done() for call in later), "one is running"
    balancer.release_server("a", "first")
    await asyncio.wait_for(later[0], 5)
    assert not later[1].done()
    balancer.release_server("a", "old")
    await asyncio.wait_for(later[1], 5)


async def test_a_request_for_which_no_cache_has_room_is_held_back_until_another_ends():
    balancer = router()
    balancer.set_cache_tokens({"a": 100, "b": 150})
    assert (await balancer.acquire_server("long", context_tokens=120))[0] == "b"
    assert (await balancer.acquire_server("short", context_tokens=60))[0] == "a"
    later = asyncio.ensure_future(balancer.acquire_server("next", context_tokens=50))
    await asyncio.sleep(0)
    assert not later.done(), "40 tokens are left here, 30 there"
    balancer.release_server("b", "long")
    assert (await asyncio.wait_for(later, 5))[0] == "b"
    more = asyncio.ensure_future(balancer.acquire_server("more", context_tokens=101))
    await asyncio.sleep(0)
    assert not more.done()
    balancer.set_cache_tokens({"a": 1000})  # started again, with another cache
    assert (await asyncio.wait_for(more, 5))[0] == "a"


async def test_everybody_is_answered_in_the_end():
    balancer = router(mu=1.0)
    ended = 0

    async def request(number):
        nonlocal ended
        place, _ = await balancer.acquire_server(f"r{number}", context_tokens=1 * (number * 37 % 5000))
        await asyncio.sleep(0)
        balancer.release_server(place, f"r{number}")
        ended += 1

    await asyncio.wait_for(asyncio.gather(*(request(number) for number in range(300))), 30)
    assert ended == 300
    assert balancer.get_total_inflight() == 0
    assert await forgets(balancer)


async def test_a_conversation_with_several_requests_at_once_is_served_in_full():
    """Sub-agents and parallel calls: verl names them by their conversation alone."""
    balancer = router(servers=("a", "b"), max_running=1)
    taken = {name: (await balancer.acquire_server(name, context_tokens=1))[0] for name in ("first", "second")}
    calls = [asyncio.ensure_future(balancer.acquire_server("family", context_tokens=1 * n)) for n in (10, 20, 30)]
    await asyncio.sleep(0)
    assert not any(call.done() for call in calls), "both replicas are taken"
    balancer.release_server(taken["first"], "first")
    places = await asyncio.wait_for(asyncio.gather(*calls), 5)
    assert {place for place, _ in places} == {taken["first"]}
    for place, _ in places:
        balancer.release_server(place, "family")
    balancer.release_server(taken["second"], "second")
    assert balancer.get_total_inflight() == 0
    assert await forgets(balancer)


async def test_a_client_that_gives_up_is_forgotten():
    balancer = router(servers=("a",), max_running=1)
    await balancer.acquire_server("first", context_tokens=1)
    call = asyncio.ensure_future(balancer.acquire_server("gone", context_tokens=1))
    await asyncio.sleep(0)
    other = asyncio.ensure_future(balancer.acquire_server("other", context_tokens=1))
    await asyncio.sleep(0)
    call.cancel()
    balancer.release_server("a", "first")  # before the one that gave up could clean up
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await asyncio.wait_for(other, 5))[0] == "a"
    balancer.release_server("a", "other")
    assert await forgets(balancer)


@pytest.fixture(scope="module")
def cluster():
    import ray

    ray.init("local", num_cpus=1, include_dashboard=False)
    yield ray
    ray.shutdown()


async def turn():
    """Everything else that is ready runs once."""
    await asyncio.sleep(0)


def client_of(balancer):
    from omegaconf import OmegaConf

    from seamless_verl.verl_adapter.rollout.llm_client import VersionedLLMClient

    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"response_length": 400, "name": "vllm"}}})
    return VersionedLLMClient(config, balancer)


async def test_the_seat_of_a_client_that_left_an_actors_queue_goes_to_the_next(cluster):
    """Cancelling an await on an actor's answer does not cancel the actor's call: it is granted a seat later."""
    from seamless_verl.verl_adapter.rollout.holding_balancer import balancer_class

    made = balancer_class(RouterConfig(policy="marginal_gain"), 1)
    balancer = cluster.remote(made).options(num_cpus=0).remote(servers={"a": "handle"}, max_cache_size=100)

    async def looked_up(what):
        return await balancer.__ray_call__.remote(what)

    client = client_of(balancer)
    await client._acquire_server("first", context_tokens=7)
    gone = asyncio.ensure_future(client._acquire_server("gone", context_tokens=5))
    while not await looked_up(lambda router: len(router._held)):
        pass
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    client._release_server("a", request_id="first")
    assert await asyncio.wait_for(client._acquire_server("next", context_tokens=3), 30) == ("a", "handle")
    client._release_server("a", request_id="next")
    while await looked_up(lambda router: router.get_total_inflight()):  # a release is not waited for
        pass
    assert await looked_up(lambda router: (router._kv, router._running, router._held)) == ({"a": 0}, {}, {})


async def test_a_client_cancelled_while_its_seat_is_on_the_way_gives_it_back():
    balancer = balancer_of({"a": "handle"})
    client = client_of(Awaitable(balancer))
    call = asyncio.ensure_future(client._acquire_server("gone", context_tokens=1))
    while not balancer.get_total_inflight():
        await turn()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    while balancer.get_total_inflight():
        await turn()


async def test_a_client_that_left_before_it_was_refused_owes_nothing():
    balancer = balancer_of({})
    client = client_of(Awaitable(balancer))
    call = asyncio.ensure_future(client._acquire_server("gone", context_tokens=1))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert balancer.get_total_inflight() == 0


async def test_replicas_may_come_and_go():
    balancer = router(servers=("a",), max_running=1)
    await balancer.acquire_server("first", context_tokens=1)
    call = asyncio.ensure_future(balancer.acquire_server("held", context_tokens=1))
    await asyncio.sleep(0)
    balancer.add_servers({"b": "handle of b"})
    assert (await asyncio.wait_for(call, 5))[0] == "b"
    balancer.remove_servers(["b"])
    balancer.release_server("b", "held")  # late, of a replica that is gone
    assert balancer.get_status()["active_servers"] == 1
    balancer.remove_servers(["a"])
    with pytest.raises(RuntimeError, match="No available servers"):
        await balancer.acquire_server("nowhere", context_tokens=1)


async def test_too_many_held_requests_are_served_rather_than_block_the_actor(monkeypatch):
    from seamless_verl.verl_adapter.rollout import holding_balancer as module

    monkeypatch.setattr(module, "_MOST_HELD", 2)
    balancer = router(servers=("a",), max_running=1)
    calls = [asyncio.ensure_future(balancer.acquire_server(f"r{n}", context_tokens=1)) for n in range(6)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert sum(call.done() for call in calls) == 4, "one runs, two are held, three went ahead"
    for call in calls:
        call.cancel()


class Replica:
    """Stands at vLLM's server under verl: counts up from the prompt's last token, one at a time, until told to stop."""

    def __init__(self):
        self.under_way = {}  # request -> tokens so far
        self.aborted = set()
        self.prompts = []

    async def generate(self, *, request_id, prompt_ids, sampling_params, **_):
        from verl.workers.rollout.replica import TokenOutput

        self.prompts.append(list(prompt_ids))
        tokens = self.under_way[request_id] = []
        reason = "completed"
        while len(tokens) < sampling_params["max_tokens"]:
            if request_id in self.aborted:
                reason = "aborted"
                break
            tokens.append(prompt_ids[-1] + len(tokens) + 1)
            await asyncio.sleep(0)
        del self.under_way[request_id]
        return TokenOutput(
            token_ids=tokens, log_probs=[-0.5] * len(tokens), stop_reason=reason, extra_fields={"global_steps": 3}
        )

    def abort_request(self, request_id, reset_prefix_cache):
        assert reset_prefix_cache is False
        self.aborted.add(request_id)


class Remote:
    """An actor handle: every method is called through ``.remote``."""

    def __init__(self, target):
        self.target = target

    def __getattr__(self, name):
        method = getattr(self.target, name)
        return type("Method", (), {"remote": staticmethod(method)})


class Awaitable(Remote):
    """The same where the callee's plain methods are awaited."""

    def __getattr__(self, name):
        method = getattr(self.target, name)

        async def call(*args, **options):
            answer = method(*args, **options)
            return await answer if asyncio.iscoroutine(answer) else answer

        plain = name == "release_server"  # fire and forget
        return type("Method", (), {"remote": staticmethod(method if plain else call)})


async def test_a_replica_that_starves_takes_over_half_of_what_runs_elsewhere_with_its_tokens():
    full, starving = Replica(), Replica()
    balancer = balancer_of({"full": Remote(full)}, migrate=True)
    client = client_of(Awaitable(balancer))
    calls = [
        asyncio.ensure_future(client.generate(f"r{n}", prompt_ids=[1000 * n], sampling_params={"max_tokens": 300}))
        for n in range(8)
    ]
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(full.under_way) == 8
    balancer.add_servers({"starving": Remote(starving)})
    while len(starving.under_way) < 4:
        await turn()
    assert (len(full.under_way), len(full.aborted), starving.aborted) == (4, 4, set())
    outputs = await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert [output.token_ids for output in outputs] == [[1000 * n + t for t in range(1, 301)] for n in range(8)]
    assert all(output.extra_fields["version_spans"] == [(3, 300)] for output in outputs)
    assert all(prompt == list(range(prompt[0], prompt[-1] + 1)) and len(prompt) > 10 for prompt in starving.prompts)
    assert balancer.get_total_inflight() == 0
    assert await forgets(balancer)


async def test_a_round_of_moves_is_over_when_those_that_left_have_asked_again_or_do_not(monkeypatch):
    from seamless_verl.verl_adapter.rollout import holding_balancer as module

    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)  # of it alone: the loop has its own
    monkeypatch.setattr(module, "time", clock)
    full = Replica()
    balancer = balancer_of({"full": Remote(full)}, migrate=True)
    for number in range(8):
        await balancer.acquire_server(f"r{number}", context_tokens=1, engine_name=f"a{number}")
    balancer.add_servers({"starving": Remote(Replica())})
    assert full.aborted == {"a4", "a5", "a6", "a7"}
    for number in range(4, 8):
        balancer.release_server("full", f"r{number}")
    assert len(full.aborted) == 4, "the four are on their way"
    assert [(await balancer.acquire_server(f"r{n}", engine_name=f"b{n}"))[0] for n in (4, 5)] == ["starving"] * 2
    for number in (4, 5):
        balancer.release_server("starving", f"r{number}")
    assert len(full.aborted) == 4, "two are"
    now = 2.0
    await balancer.acquire_server("r4", engine_name="c4")
    balancer.release_server("starving", "r4")
    assert len(full.aborted) > 4, "they had ended, and the replica starves again"


async def test_without_migration_requests_stay_where_they_are():
    full = Replica()
    balancer = balancer_of({"full": Remote(full)})
    for number in range(8):
        await balancer.acquire_server(f"r{number}", context_tokens=1, engine_name=f"a{number}")
    balancer.add_servers({"starving": Remote(Replica())})
    assert not full.aborted


async def test_requests_without_a_name_cannot_be_moved():
    full = Replica()
    balancer = balancer_of({"full": Remote(full)}, migrate=True)
    for number in range(8):
        await balancer.acquire_server(f"r{number}", context_tokens=1)
    balancer.add_servers({"starving": Remote(Replica())})
    assert not full.aborted


def eight_on_one(named=True, **settings):
    full = Replica()
    balancer = balancer_of({"full": Remote(full)}, policy="least_requests", **settings)
    for number in range(8):
        balancer.acquire_server(f"r{number}", context_tokens=100, engine_name=f"a{number}" if named else "")
    balancer.add_servers({"awake": Remote(Replica())})
    return full, balancer


def test_a_replica_that_is_awake_gets_half_of_what_queues_elsewhere_old_and_young_alike():
    full, balancer = eight_on_one(max_running=2)
    assert not full.aborted, "it is on the router before it is awake"
    balancer.even_out()
    assert full.aborted == {"a2", "a3", "a5", "a6"}, "of a2 to a7, which queue"
    for number in (2, 3, 5, 6):
        balancer.release_server("full", f"r{number}")
        assert balancer.acquire_server(f"r{number}", context_tokens=100, engine_name=f"b{number}")[0] == "awake"
    balancer.even_out()
    assert len(full.aborted) == 4, "nobody idles"


def test_without_a_queue_those_that_came_last_move():
    full, balancer = eight_on_one()
    balancer.even_out()
    assert full.aborted == {"a4", "a5", "a6", "a7"}


@pytest.mark.parametrize("why", [{"named": False}, {"full_determinism": True}])
def test_requests_stay_that_nobody_can_name_or_whose_places_are_fixed(why):
    full, balancer = eight_on_one(**why)
    balancer.even_out()
    assert not full.aborted


@pytest.mark.parametrize("policy", ["least_requests", "marginal_gain", "cache_aware"])
async def test_what_moves_to_a_replica_that_joined_goes_on_with_its_tokens(policy):
    full, awake = Replica(), Replica()
    balancer = balancer_of({"full": Remote(full)}, policy=policy)
    client = client_of(Awaitable(balancer))
    calls = [
        asyncio.ensure_future(client.generate(f"r{n}", prompt_ids=[1000 * n], sampling_params={"max_tokens": 300}))
        for n in range(8)
    ]
    while len(full.under_way) < 8:
        await turn()
    balancer.add_servers({"awake": Remote(awake)})
    balancer.even_out()
    outputs = await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert len(awake.prompts) == 4
    assert [output.token_ids for output in outputs] == [[1000 * n + t for t in range(1, 301)] for n in range(8)]
    assert all(output.extra_fields["version_spans"] == [(3, 300)] for output in outputs)
    assert balancer.get_total_inflight() == 0
    assert policy == "least_requests" or await forgets(balancer)


# ---------------------------------------------------------------- rollout workers that die


class Server:
    """A replica's handle: notes what it is asked to end."""

    def __init__(self):
        self.ended = []

    @property
    def abort_request(self):
        class Method:
            @staticmethod
            def remote(name, reset_prefix_cache):
                assert not reset_prefix_cache
                self.ended.append(name)

        return Method


async def test_requests_of_a_dead_worker_end_and_give_their_places_back():
    servers = {"a": Server(), "b": Server()}
    balancer = balancer_of(servers, policy="least_requests")
    places = {}
    for number, worker in enumerate(["w0", "w1"] * 3):
        places[number], _ = balancer.acquire_server(f"c{number}", 10, f"request {number}", worker)
    validation, _ = balancer.acquire_server("validation", 10)
    balancer.worker_died("w0")
    assert sorted(servers["a"].ended + servers["b"].ended) == ["request 0", "request 2", "request 4"]
    assert balancer.get_total_inflight() == 4
    with pytest.raises(RuntimeError, match="rollout worker w0 is dead"):
        balancer.acquire_server("sent before it died", 10, "late", "w0")
    balancer.release_server(places[0], "c0")
    assert balancer.get_total_inflight() == 4, "it ended before its worker died, and was heard of later"
    for number in (1, 3, 5):
        balancer.release_server(places[number], f"c{number}")
    balancer.release_server(validation, "validation")
    assert balancer.get_total_inflight() == 0
    ended = len(servers["a"].ended + servers["b"].ended)
    balancer.worker_died("w1")
    assert len(servers["a"].ended + servers["b"].ended) == ended, "its requests have all ended"


async def test_what_a_dead_worker_had_to_wait_for_goes_to_others():
    balancer = balancer_of({"a": Server()}, max_running=1)
    await balancer.acquire_server("first", 1, "first", "w0")
    waiting = asyncio.ensure_future(balancer.acquire_server("second", 1, "second", "w0"))
    await asyncio.sleep(0)
    other = asyncio.ensure_future(balancer.acquire_server("other", 1, "other", "w1"))
    await asyncio.sleep(0)
    assert not waiting.done()
    balancer.worker_died("w0")
    assert (await asyncio.wait_for(other, 5))[0] == "a"
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert balancer.get_total_inflight() == 1
    balancer.release_server("a", "other")
    assert await forgets(balancer)


async def test_what_happens_while_a_long_look_at_the_held_lasts_is_looked_at_together(monkeypatch):
    balancer = router(tuple(f"r{n}" for n in range(64)), mu=0.0, max_running=4)
    seated = [await balancer.acquire_server(f"s{n}", context_tokens=1) for n in range(256)]
    held = [asyncio.ensure_future(balancer.acquire_server(f"h{n}", context_tokens=n)) for n in range(500)]
    await asyncio.sleep(0.1)
    assert not any(call.done() for call in held)
    policy, looks = type(balancer.rules.policy), []
    route = policy.route

    def counted(self, requests, loads):
        looks.append(len(requests))
        return route(self, requests, loads)

    monkeypatch.setattr(policy, "route", counted)
    for n, (replica, _) in enumerate(seated[:200]):
        balancer.release_server(replica, f"s{n}")
    await asyncio.wait_for(asyncio.gather(*held[:200]), 60)
    assert looks[0] == 500
    assert len(looks) <= 2, "the first at once, unless a look has just ended; the last in any case"
    assert not any(call.done() for call in held[200:])
    for call in held[200:]:
        call.cancel()
