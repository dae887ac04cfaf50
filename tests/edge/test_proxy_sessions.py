"""Sessions seen from outside: budgets under parallel requests, views, expiry."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from seamless_verl.proxy.app import make_app
from seamless_verl.proxy.client import ProxyAdmin, ProxyRefused
from seamless_verl.proxy.sessions import SessionSpec
from tests.fakes import serving

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
        assert (await proxy.admin.close_session(handle.id)).audit.is_clean


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
