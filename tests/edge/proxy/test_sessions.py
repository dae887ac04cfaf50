"""Sessions seen from outside: budgets under parallel requests, views, expiry."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from seamless_verl.proxy.client import ProxyAdmin, ProxyRefused
from seamless_verl.proxy.engine import Gate
from seamless_verl.proxy.http.app import make_app
from seamless_verl.proxy.http.requests import StreamTiming
from seamless_verl.proxy.session.sessions import Session, SessionSpec
from tests.fakes import Served, serving

HI: list[Any] = [{"role": "user", "content": "hi"}]
LONG = "one two three four five six seven eight nine ten"


def _body(number: int, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": f"question {number}"}], **more}


@pytest.mark.parametrize("more", [{}, {"max_tokens": 8}, {"n": 2}])
async def test_parallel_requests_never_overshoot_the_token_budget(more: dict[str, Any]) -> None:
    async with serving(lambda prompt: LONG, delay_s=0.02) as proxy:
        handle = await proxy.open(max_tokens=30, max_parallel=20)
        answers = await asyncio.gather(*(proxy.post(handle, _body(number, **more)) for number in range(10)))
        codes = {answer.json()["error"]["code"] for answer in answers if answer.status_code != 200}
        assert codes == {"token_budget_exhausted"}
        result = await proxy.admin.close_session(handle.id)
        assert 1 <= sum(row.num_trained for row in result.rows) <= 30
        assert result.audit.is_clean


async def test_what_one_answer_leaves_over_goes_to_the_next() -> None:
    async with serving(lambda prompt: "ok", delay_s=0.02) as proxy:
        handle = await proxy.open(max_tokens=30)
        answers = await asyncio.gather(*(proxy.post(handle, _body(number)) for number in range(8)))
        assert [answer.status_code for answer in answers] == [200] * 8  # each had asked for all there is
        assert len({answer.json()["id"] for answer in answers}) == 8
        num_tokens = len(proxy.engine.tokenizer.encode("ok", add_special_tokens=False)) + 1
        assert (await proxy.admin.view_session(handle.id))["generated_tokens"] == 8 * num_tokens


def _held(proxy: Served) -> asyncio.Event:
    """The engine answers once this is set."""
    gate, generate = asyncio.Event(), proxy.engine.generate

    async def held(request: Any) -> Any:
        proxy.engine.started.set()
        await gate.wait()
        return await generate(request)

    proxy.engine.generate = held  # type: ignore[method-assign]
    return gate


def _asked_for_budget(session: Session, times: int) -> asyncio.Event:
    """Set once the session was asked that often, from now on."""
    asked, reserve, calls = asyncio.Event(), session.reserve, itertools.count(1)

    def counting(*args: Any, **options: Any) -> Any:
        if next(calls) == times:
            asked.set()
        return reserve(*args, **options)

    session.reserve = counting  # type: ignore[method-assign]
    return asked


async def test_samples_of_one_request_wait_for_the_budget_as_one_answer_does() -> None:
    async with serving(lambda prompt: LONG) as proxy:
        handle = await proxy.open(max_tokens=1000)
        (session,) = proxy.deps.sessions
        gate = _held(proxy)
        first = asyncio.create_task(proxy.post(handle, _body(0)))  # asks for all there is
        await proxy.engine.started.wait()
        asked = _asked_for_budget(session, 1)
        second = asyncio.create_task(proxy.post(handle, _body(1, n=3)))
        await asked.wait()
        gate.set()
        assert [answer.status_code for answer in (await first, await second)] == [200, 200]
        assert len(proxy.engine.requests) == 4
        assert session.num_reserved == 0


async def test_samples_that_the_budget_cannot_pay_for_are_refused_before_any_is_generated() -> None:
    async with serving(lambda prompt: LONG) as proxy:
        handle = await proxy.open(max_tokens=2)
        refused = await proxy.post(handle, _body(0, n=3))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "token_budget_exhausted")
        assert proxy.engine.requests == []
        assert (await proxy.post(handle, _body(0, n=2))).json()["usage"]["completion_tokens"] == 2


async def test_a_stream_that_waits_for_budget_is_kept_alive() -> None:
    async with serving(lambda prompt: LONG, timing=StreamTiming(keep_alive_s=0.05)) as proxy:
        handle = await proxy.open(max_tokens=1000)
        gate = _held(proxy)
        first = asyncio.create_task(proxy.post(handle, _body(0)))
        await proxy.engine.started.wait()
        auth = {"authorization": f"Bearer {handle.api_key}"}
        body = _body(1, stream=True)
        async with proxy.http.stream("POST", "/v1/chat/completions", json=body, headers=auth, timeout=5) as answer:
            lines = answer.aiter_lines()
            while await anext(lines) != ": keep-alive":
                assert not first.done()
            gate.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert (await first).status_code == 200


async def test_a_sample_never_waits_for_tokens_that_its_sibling_holds() -> None:
    """All samples of a request have their tokens before the first is generated; another request waits meanwhile."""
    async with serving(lambda prompt: LONG if "question" in prompt else "ok") as proxy:
        handle = await proxy.open(max_tokens=40, deadline_s=10)
        (session,) = proxy.deps.sessions
        gate = _held(proxy)
        long = {"model": "m", "messages": [{"role": "user", "content": "word " * 5000}], "n": 2}  # rendered in a thread
        pair = asyncio.create_task(proxy.post(handle, long))
        await proxy.engine.started.wait()
        assert session.num_reserved == 40
        asked = _asked_for_budget(session, 1)
        other = asyncio.create_task(proxy.post(handle, _body(0)))
        await asked.wait()
        gate.set()
        assert [answer.status_code for answer in (await pair, await other)] == [200, 200]
        assert session.num_reserved == 0


async def test_a_request_that_fails_gives_its_share_back() -> None:
    async with serving(lambda prompt: "ok") as proxy:
        handle = await proxy.open(max_tokens=30)
        proxy.engine.failure = RuntimeError("broken")
        for number in range(3):
            assert (await proxy.post(handle, _body(number))).status_code == 500
        proxy.engine.failure = None
        assert (await proxy.post(handle, _body(9))).status_code == 200


async def test_waiting_for_budget_ends_at_the_deadline() -> None:
    async with serving(lambda prompt: LONG, delay_s=5.0) as proxy:
        handle = await proxy.open(max_tokens=30, deadline_s=0.4)
        answers = await asyncio.gather(*(proxy.post(handle, _body(number)) for number in range(2)))
        assert [answer.json()["error"]["code"] for answer in answers] == ["deadline_exceeded"] * 2


async def test_the_view_shows_the_tree_in_every_dialect_and_the_state() -> None:
    async with serving() as proxy:
        handle = await proxy.open(deadline_s=1.0)
        await proxy.post(handle, {"model": "m", "messages": HI})
        history = [*HI, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
        await proxy.post(handle, {"model": "m", "input": history}, "/v1/responses")
        await proxy.post(handle, {"model": "m", "messages": history, "max_tokens": 9}, "/v1/messages")
        view = await proxy.admin.view_session(handle.id)
        assert view["state"] == "open"
        assert [(turn["parent"], turn["kind"]) for turn in view["turns"]] == [
            (None, "clean"),
            (0, "clean"),
            (0, "fork"),
        ]
        await proxy.admin.set_reward(handle.id, 0.5, {"style": 1.0})
        await asyncio.sleep(1.0)
        view = await proxy.admin.view_session(handle.id)
        assert (view["state"], view["reward"], view["rewards"]) == ("expired", 0.5, {"style": 1.0})
        late = await proxy.post(handle, {"model": "m", "max_tokens": 9, "messages": HI}, "/v1/messages")
        assert (late.status_code, late.json()["error"]["code"]) == (409, "session_expired")
        result = await proxy.admin.close_session(handle.id)
        assert (result.audit.is_clean, result.reward, result.rewards) == (True, 0.5, {"style": 1.0})


async def test_an_agent_sees_its_tree_but_not_what_its_task_is_judged_by() -> None:
    async with serving() as proxy:
        handle = await proxy.open(group="g", metadata={"expected": "42"})
        await proxy.admin.set_reward(handle.id, 0.5, {"style": 1.0})
        headers = {"authorization": f"Bearer {handle.api_key}"}
        own = (await proxy.http.get(f"/sessions/{handle.id}", headers=headers)).json()
        judged = {"metadata": {"expected": "42"}, "reward": 0.5, "rewards": {"style": 1.0}}
        assert own | judged == await proxy.admin.view_session(handle.id)
        assert not own.keys() & judged.keys()


async def test_a_pause_may_take_longer_than_other_calls() -> None:
    async with serving(delay_s=60.0, gate=Gate(lambda version: None)) as proxy:
        handle = await proxy.open()
        asking = asyncio.create_task(proxy.post(handle, {"model": "m", "messages": HI}))
        await proxy.engine.started.wait()
        hasty = ProxyAdmin(proxy.server.base_url, "admin-key", timeout_s=0.2)
        assert await hasty.pause(timeout_s=0.5) == {"quiet": False, "at_engine": 1}
        await hasty.close()
        asking.cancel()


async def test_an_admin_in_the_proxys_own_process_needs_no_socket() -> None:
    async with serving() as proxy:
        url = proxy.server.base_url
        await proxy.server.stop()  # nobody listens any more
        inside = ProxyAdmin(url, "admin-key", app=make_app(proxy.deps))
        handle = await inside.open_session(SessionSpec(group="g"))
        result = await inside.close_session(handle.id, 0.5)
        assert (handle.base_url, result.group) == (f"{url}/sessions/{handle.id}/v1", "g")
        with pytest.raises(ProxyRefused, match="session"):
            await inside.view_session(handle.id)
        await inside.close()
