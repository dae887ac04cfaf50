"""`seamless.router.policy=cache_aware` as verl's load balancer, and how it learns what it needs."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from seamless_verl.config import RouterConfig
from seamless_verl.decode_cost import DecodeCost, EnginePace
from seamless_verl.staleness.routing import EngineLoad

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

DEAR = EnginePace(
    decode=DecodeCost(floor_s=0, base_s=0.01, per_request_s=1e-3, attention_base_s=0, attention_per_token_s=0),
    prefill_s_per_token=1.0,
)


class Server:
    """A replica that tells what its engine takes, and what it has to do if ``load`` is set.

    Attributes:
        forgotten: conversations whose cache it may take first, with the tokens of their first prompts.
    """

    def __init__(self, pace: EnginePace | None = DEAR) -> None:
        self.asked = asyncio.Event()
        self.pace = SimpleNamespace(remote=self._told)
        self.load: EngineLoad | None = None
        self.engine_load = SimpleNamespace(remote=self._told_load)
        self.forgotten: list[tuple[str, int]] = []
        self.let_go = SimpleNamespace(remote=self.forgotten.extend)
        self._pace = pace

    async def _told_load(self) -> EngineLoad | None:
        return self.load

    async def _told(self) -> EnginePace | None:
        self.asked.set()
        return self._pace


async def learned(cache: int = 1000, policy: str = "cache_aware", **servers: Server):
    """A balancer that has asked its replicas."""
    from seamless_verl.verl_adapter.rollout.holding_balancer import balancer_class

    made = balancer_class(RouterConfig(policy=policy), 64)(servers=servers, max_cache_size=100)
    made.set_cache_tokens(dict.fromkeys(servers, cache))
    place, _ = await made.acquire_server("first", context_tokens=1)
    made.release_server(place, "first")
    await asyncio.gather(*(asyncio.wait_for(server.asked.wait(), 10) for server in servers.values()))
    await asyncio.sleep(0.01)
    if policy == "cache_aware":
        made.conversations_over(["first"])
    return made


def ask(made, name, tokens, group=""):
    named = {"group": group} if group else {}
    return asyncio.ensure_future(made.acquire_server(name, context_tokens=tokens, **named))


async def seated(*calls):
    return [(await asyncio.wait_for(call, 10))[0] for call in calls]


async def test_a_session_waits_for_room_and_gets_it_when_another_has_ended():
    made = await learned(a=Server())
    await seated(ask(made, "old", 500), ask(made, "older", 300))
    waits = ask(made, "new", 200)
    made.release_server("a", "old")
    await asyncio.sleep(0.01)
    assert not waits.done(), "its turn has ended, its cache stays"
    made.conversations_over(["old"])
    assert await seated(waits) == ["a"]


async def test_who_left_while_it_waited_keeps_no_room():
    made = await learned(a=Server())
    await seated(ask(made, "old", 500), ask(made, "older", 300))
    left = ask(made, "left", 400)
    await asyncio.sleep(0.01)
    made.conversations_over(["left"])  # its agent has ended; the call to the router goes on by itself
    made.release_server("a", "old")
    made.release_server("a", "older")
    await seated(left)
    made.release_server("a", "left")
    made.conversations_over(["old", "older"])
    assert await seated(ask(made, "next", 500), ask(made, "one more", 400)) == ["a", "a"]


async def test_the_sessions_of_a_dead_rollout_worker_keep_no_room():
    made = await learned(a=Server())
    await made.acquire_server("lives", context_tokens=100, worker="w1")
    for name in ("one", "two"):
        await made.acquire_server(name, context_tokens=350, worker="w2")
        made.release_server("a", name)  # their agents use tools, and will not come back
    waits = ask(made, "new", 400)
    await asyncio.sleep(0.01)
    assert not waits.done()
    made.worker_died("w2")
    assert await seated(waits) == ["a"]


async def test_where_prefilling_is_cheap_it_does_not_wait():
    made = await learned(a=Server(EnginePace(decode=DEAR.decode, prefill_s_per_token=0.0)))
    assert await seated(ask(made, "old", 500), ask(made, "older", 300), ask(made, "new", 200)) == ["a"] * 3


async def test_a_replica_that_tells_nothing_is_reckoned_with_as_configured():
    made = await learned(a=Server(pace=None))
    assert await seated(ask(made, "old", 500), ask(made, "older", 300), ask(made, "new", 200)) == ["a"] * 3


@pytest.mark.parametrize(("prefill_s", "num_moved"), [(1.0, 0), (1e-6, 4)])
async def test_under_the_default_rule_a_move_has_the_price_of_the_engines_own_steps(prefill_s, num_moved):
    from seamless_verl.verl_adapter.rollout.holding_balancer import balancer_class

    server, aborted = Server(replace(DEAR, prefill_s_per_token=prefill_s)), []
    server.abort_request = SimpleNamespace(remote=lambda name, **_: aborted.append(name))
    made = balancer_class(RouterConfig(policy="least_requests"), 64)(servers={"a": server}, max_cache_size=100)
    for number in range(9):
        made.acquire_server(f"r{number}", context_tokens=100, engine_name=f"a{number}")
    made.release_server("a", "r0")
    await asyncio.wait_for(server.asked.wait(), 10)
    await asyncio.sleep(0.01)
    made.add_servers({"b": Server()})
    made.even_out()
    assert len(aborted) == num_moved


async def test_the_marginal_gain_is_that_of_the_engines_own_steps():
    slow = replace(DEAR, decode=replace(DEAR.decode, per_request_s=0.1))
    made = await learned(cache=100_000, policy="marginal_gain", a=Server(slow), b=Server())
    assert await seated(*(ask(made, name, 1) for name in ("one", "two", "three"))) == ["b"] * 3
    made.add_servers({"c": Server()})  # has told nothing yet: it is like the first one
    assert await seated(ask(made, "four", 1)) == ["b"]


async def test_a_session_that_grew_too_large_waits_while_the_older_ones_run():
    made = await learned(a=Server())
    await seated(ask(made, "old", 400), ask(made, "young", 400))
    made.release_server("a", "young")
    grown = ask(made, "young", 700)
    await asyncio.sleep(0.01)
    assert not grown.done()
    made.release_server("a", "old")
    assert await seated(grown) == ["a"], "nobody else runs"


async def test_groups_come_together_and_sessions_leave_with_their_replica():
    made = await learned(cache=100_000, a=Server(), b=Server())
    places = await seated(*(ask(made, f"{group}{n}", 2000, group) for n in range(3) for group in "xy"))
    assert places[0::2] in (["a"] * 3, ["b"] * 3)
    assert len(set(places)) == 2, "each group on a replica of its own"
    left = places[0]
    made.remove_servers([left])
    assert await seated(ask(made, "x0", 2100, "x")) == [places[1]]
    made.clear_sticky_cache()
    assert await seated(ask(made, "x0", 2100, "x")) == [places[1]]


async def asked_again(made):
    """As if the time had passed after which replicas are asked what they have to do."""
    made._polled_at.clear()
    made._poll_replicas()
    await asyncio.gather(*made._polls.values())


async def test_a_replica_whose_engine_has_a_queue_gets_nobody_until_that_is_gone():
    server = Server(EnginePace(decode=DEAR.decode, prefill_s_per_token=0.0))  # its cache would not hold anybody back
    made = await learned(cache=100_000, a=server, b=Server())
    made.remove_servers(["b"])
    await seated(ask(made, "old", 10), ask(made, "older", 10))
    server.load = EngineLoad(running=1, waiting=1, kv_tokens=20)
    await asked_again(made)
    waits = ask(made, "new", 10)
    await asyncio.sleep(0.01)
    assert not waits.done(), "by the number of its requests it would have seats"
    server.load = EngineLoad(running=2, waiting=0, kv_tokens=20)
    assert await seated(waits) == ["a"], "while somebody waits engines are asked every second, whoever ends"


async def test_a_replica_that_does_not_answer_keeps_nobody_from_hearing_the_others():
    """Its engine takes new weights, or hangs."""
    calls = []

    async def silent() -> EngineLoad:
        calls.append(asyncio.current_task())
        await asyncio.Event().wait()

    server, busy = Server(EnginePace(decode=DEAR.decode, prefill_s_per_token=0.0)), Server()
    busy.engine_load = SimpleNamespace(remote=silent)
    made = await learned(cache=100_000, a=server, b=busy)
    made.set_cache_tokens({"b": 15})
    assert await seated(*(ask(made, name, 10) for name in ("old", "older", "oldest"))) == ["a", "b", "a"]
    server.load = EngineLoad(running=1, waiting=1, kv_tokens=20)
    made._polled_at.clear()
    made._poll_replicas()
    for _ in range(20):
        await asyncio.sleep(0)
    assert made._engine_loads["a"][0] == server.load
    waits = ask(made, "new", 10)
    await asyncio.sleep(0.01)
    assert not waits.done()
    server.load = EngineLoad(running=2, waiting=0, kv_tokens=20)
    assert await seated(waits) == ["a"]
    assert len(calls) == 1, "nobody asks again who owes an answer"
    made.remove_servers(["b"])
    await asyncio.wait(calls, timeout=20)
    assert calls[0].cancelled()


@pytest.mark.parametrize(("error", "warnings"), [("task", 1), ("death", 0)])
async def test_a_replica_that_fails_to_tell_is_named_once_and_a_dead_one_is_not(error, warnings, caplog):
    from ray.exceptions import ActorDiedError, RayTaskError

    errors = {"task": RayTaskError("engine_load", "no such queue", AttributeError()), "death": ActorDiedError()}

    async def fails() -> EngineLoad:
        raise errors[error]

    server = Server()
    server.engine_load = SimpleNamespace(remote=fails)
    made = await learned(a=server)
    await asked_again(made)
    await asked_again(made)
    told = [line for line in caplog.messages if "engine_load of replica a failed" in line]
    assert len(told) == warnings
    assert all("no such queue" in line for line in told)
    assert await seated(ask(made, "new", 10)) == ["a"]


async def test_what_an_engine_said_ends_with_its_requests_and_with_its_leaving():
    server = Server()
    made = await learned(a=server)
    await seated(ask(made, "old", 100))
    server.load = EngineLoad(running=0, waiting=1, kv_tokens=640)
    await asked_again(made)
    (load,) = made._loads()
    assert (load.running, load.waiting, load.kv_tokens, load.kv_room) == (0, 1, 640, 360)
    made.release_server("a", "old")
    (load,) = made._loads()
    assert (load.running, load.waiting, load.kv_tokens) == (0, 0, 0)
    await seated(ask(made, "old", 100))
    made.remove_servers(["a"])
    made.add_servers({"a": server})
    await seated(ask(made, "new", 50))
    (load,) = made._loads()
    assert (load.running, load.waiting, load.kv_tokens) == (1, 0, 50)


async def test_a_replica_is_told_whose_cache_it_may_take_first():
    server = Server()
    made = await learned(a=server)
    await seated(ask(made, "over", 100), ask(made, "old", 300), ask(made, "young", 300))
    made.release_server("a", "over")
    await seated(ask(made, "over", 150))
    made.conversations_over(["over", "never placed"])
    assert server.forgotten == [("first", 1), ("over", 100)], "with the prompt that its group shares"
    made.release_server("a", "young")
    made.release_server("a", "old")
    await seated(ask(made, "old", 800))
    assert server.forgotten[2:] == [("young", 300)], "it has lost its place"


@pytest.mark.parametrize("policy", ["least_requests", "cache_aware"])
async def test_a_conversation_that_moves_leaves_no_cache_behind(policy):
    from seamless_verl.verl_adapter.rollout.holding_balancer import balancer_class

    server = Server(replace(DEAR, prefill_s_per_token=1e-6))
    server.abort_request = SimpleNamespace(remote=lambda name, **_: None)
    made = balancer_class(RouterConfig(policy=policy), 64)(servers={"a": server}, max_cache_size=100)
    for number in range(4):
        asked = made.acquire_server(f"r{number}", context_tokens=100, engine_name=f"a{number}")
        if asyncio.iscoroutine(asked):
            await asked
    made._poll_replicas()
    await asyncio.gather(*made._polls.values())
    made.add_servers({"b": Server()})
    made.even_out()
    assert server.forgotten == [("r2", 100), ("r3", 100)]


async def test_who_waits_is_served_when_a_replica_joins():
    made = await learned(a=Server())
    await seated(ask(made, "old", 800))
    waits = ask(made, "new", 300)
    await asyncio.sleep(0.01)
    assert not waits.done()
    made.add_servers({"b": Server()})
    assert await seated(waits) == ["b"]


async def test_a_session_that_moves_to_a_newcomer_keeps_no_room_where_it_was():
    server, aborted = Server(replace(DEAR, prefill_s_per_token=1e-6)), []
    server.abort_request = SimpleNamespace(remote=lambda name, **_: aborted.append(name))
    made = await learned(a=server)

    def kept():
        return {load.replica: load.kept for load in made._loads()}

    for number in range(8):
        await made.acquire_server(f"r{number}", context_tokens=100, engine_name=f"a{number}")
    made.add_servers({"b": Server()})
    made.set_cache_tokens({"b": 1000})
    assert kept() == {"a": 800, "b": 0}
    made.even_out()
    assert aborted == ["a4", "a5", "a6", "a7"]
    assert kept() == {"a": 400, "b": 0}, "at once: they are still on their way"
    for name in ("r4", "r5", "r6", "r7"):
        made.release_server("a", name)
        assert await seated(ask(made, name, 120)) == ["b"]
    assert kept() == {"a": 400, "b": 480}


async def test_a_session_that_is_moved_is_not_sent_back_to_its_prefix():
    """As an answer goes on for as long as its context is, moving pays; for a turn of usual length it would not."""
    server, aborted = Server(replace(DEAR, prefill_s_per_token=1e-2)), []
    server.abort_request = SimpleNamespace(remote=lambda name, **_: aborted.append(name))
    made = await learned(cache=100_000, a=server)
    for number in range(8):
        await made.acquire_server(f"r{number}", context_tokens=4000, engine_name=f"a{number}", group="g")
    made.add_servers({"b": Server()})
    made.set_cache_tokens({"b": 100_000})
    made.even_out()
    assert aborted == ["a7"]
    made.release_server("a", "r7")
    assert await seated(ask(made, "r7", 4100, group="g")) == ["b"]


async def test_a_client_tells_which_group_it_asks_for_and_when_its_session_is_over():
    from omegaconf import OmegaConf

    from seamless_verl.verl_adapter.rollout.llm_client import VersionedLLMClient
    from seamless_verl.verl_adapter.rollout.request_log import RequestLog, request_log

    made = await learned(cache=100_000, a=Server(), b=Server())
    told = []

    class Handle:
        def __getattr__(self, name):
            def remote(*args, **kwargs):
                told.append((name, args, kwargs))
                answer = getattr(made, name)(*args, **kwargs)
                if asyncio.iscoroutine(answer):
                    return answer
                done = asyncio.get_running_loop().create_future()
                done.set_result(answer)
                return done

            return SimpleNamespace(remote=remote)

    client = VersionedLLMClient(OmegaConf.create({}), Handle())
    with request_log.session("prompt", 0):
        await client._acquire_server("chat", prompt_ids=[1, 2, 3])
    assert (
        "acquire_server",
        (),
        {"request_id": "chat", "context_tokens": 3, "group": "prompt", "session": "prompt_0"},
    ) in told

    log = RequestLog()
    log.over = client.conversations_over
    with log.session("prompt", 1):
        log.name("chat")
        log.started("q", "second chat", "a", 1)
    with log.session("prompt", 2):
        pass
    assert [args for name, args, _ in told if name == "conversations_over"] == [(["chat", "second chat"],)]


@pytest.mark.parametrize("policy", ["cache_aware", "marginal_gain"])
async def test_under_full_determinism_a_name_decides_and_nobody_waits(policy):
    from seamless_verl.verl_adapter.rollout.holding_balancer import balancer_class

    names = [f"s{n}" for n in range(20)]
    places = []
    for _ in range(2):
        made = balancer_class(RouterConfig(policy=policy), 1)(
            servers={"a": Server(), "b": Server()}, max_cache_size=100, full_determinism=True
        )
        places.append(await seated(*(ask(made, name, 10) for name in names)))
        names.reverse()
    assert places[0] == places[1][::-1]
    assert set(places[0]) == {"a", "b"}
