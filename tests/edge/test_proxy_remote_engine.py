"""A proxy's engine in another process: what crosses the socket, and what happens when one side goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from seamless_verl.proxy.engine import Engine, EngineRefused, EngineUnavailable, GenerationRequest
from seamless_verl.proxy.remote_engine import EngineHost, RemoteEngine
from seamless_verl.proxy.server import base_url_of, listen_on
from tests.fakes import ScriptedEngine, small_tokenizer

PROMPT = (7, 11, 2**31 - 1)


def _request(**sampling: Any) -> GenerationRequest:
    sampling.setdefault("max_tokens", 50)
    return GenerationRequest(request_id="r", session_id="s", prompt_ids=PROMPT, sampling=sampling, deadline=12.5)


@asynccontextmanager
async def linked(engine: Engine) -> AsyncIterator[tuple[RemoteEngine, EngineHost]]:
    listener = listen_on("127.0.0.1", 0)
    host = EngineHost(engine, listener)
    host.start()
    remote, handed = await RemoteEngine.connect(host.address)
    assert base_url_of(handed) == base_url_of(listener)
    handed.close()
    try:
        yield remote, host
    finally:
        await remote.close()
        await host.close()
        listener.close()


class _Echo:
    """Stands at the engine boundary: remembers the request and answers with a script, or an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.inner = ScriptedEngine(small_tokenizer(), lambda prompt: "an answer", num_versions=3)
        self.seen: list[GenerationRequest] = []
        self.error = error

    async def generate(self, request: GenerationRequest) -> Any:
        self.seen.append(request)
        if self.error is not None:
            raise self.error
        generation = await self.inner.generate(_request())
        self.answered = generation
        return generation


async def test_requests_and_answers_arrive_as_they_were_sent() -> None:
    engine = _Echo()
    form = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    async with linked(engine) as (remote, _):
        answers = await asyncio.gather(*(remote.generate(_request(seed=n, structured_outputs=form)) for n in range(20)))
    for answer in answers:
        assert list(answer.token_ids) == list(engine.answered.token_ids)
        assert list(answer.log_probs) == list(engine.answered.log_probs)
        assert (answer.version_spans, answer.finish_reason) == (
            engine.answered.version_spans,
            engine.answered.finish_reason,
        )
    seen = engine.seen[0]
    assert (seen.request_id, seen.session_id, tuple(seen.prompt_ids), seen.deadline) == ("r", "s", PROMPT, 12.5)
    assert sorted(request.sampling["seed"] for request in engine.seen) == list(range(20))
    assert seen.sampling["structured_outputs"] == form


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (EngineRefused("no such schema"), EngineRefused),
        (EngineUnavailable("replica 3 is down"), EngineUnavailable),
        (ZeroDivisionError("oh"), RuntimeError),
    ],
)
async def test_errors_keep_their_kind_and_their_words(raised: Exception, kind: type[Exception]) -> None:
    async with linked(_Echo(raised)) as (remote, _):
        with pytest.raises(kind, match=str(raised)):
            await remote.generate(_request())


async def test_a_request_that_nobody_waits_for_is_cancelled_at_the_engine() -> None:
    engine = ScriptedEngine(small_tokenizer(), delay_s=60.0)
    async with linked(engine) as (remote, _):
        asking = asyncio.create_task(remote.generate(_request()))
        await engine.started.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await _until(lambda: engine.num_cancelled == 1)
        engine.delay_s = 0.0
        assert (await remote.generate(_request())).token_ids  # the others go on


async def test_when_the_proxy_is_gone_its_requests_are_cancelled_and_the_next_one_is_served() -> None:
    engine = ScriptedEngine(small_tokenizer(), delay_s=60.0)
    async with linked(engine) as (remote, host):
        asking = asyncio.create_task(remote.generate(_request()))
        await engine.started.wait()
        await remote.close()
        with pytest.raises(EngineUnavailable):
            await asking
        await _until(lambda: engine.num_cancelled == 1)
        engine.delay_s = 0.0
        again, handed = await RemoteEngine.connect(host.address)
        assert (await again.generate(_request())).token_ids
        handed.close()
        await again.close()


async def test_when_the_owner_is_gone_every_request_says_so() -> None:
    engine = ScriptedEngine(small_tokenizer(), delay_s=60.0)
    async with linked(engine) as (remote, host):
        asking = asyncio.create_task(remote.generate(_request()))
        await engine.started.wait()
        await host.close()
        await remote.ended()
        with pytest.raises(EngineUnavailable, match="owner is gone"):
            await asking
        with pytest.raises(EngineUnavailable, match="owner is gone"):
            await remote.generate(_request())


async def _until(holds: Any) -> None:
    for _ in range(10_000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen within ten seconds")
