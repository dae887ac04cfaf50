"""A proxy's engine in another process: what crosses the socket, and what happens when one side goes away."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from seamless_verl.errors import SeamlessError
from seamless_verl.proxy.deploy.http_server import base_url_of, listen_on
from seamless_verl.proxy.engine import Engine, EngineRefused, EngineUnavailable, GenerationRequest
from seamless_verl.proxy.engines import remote_engine as module
from seamless_verl.proxy.engines.remote_engine import EngineHost, RemoteEngine
from seamless_verl.trajectory.generation import Generation
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


async def test_a_proxy_killed_before_its_owner_looked_does_not_keep_the_next_one_out() -> None:
    async with linked(_Echo()) as (_, host):
        with socket.socket(socket.AF_UNIX) as killed:
            killed.connect(host.address)
        again, handed = await asyncio.wait_for(RemoteEngine.connect(host.address), 30)
        assert (await again.generate(_request())).token_ids
        host.check()
        handed.close()
        await again.close()


async def test_an_owner_without_a_free_file_takes_the_next_proxy_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ACCEPT_PAUSE_S", 0.0)
    failures = [OSError(errno.EMFILE, "Too many open files")] * 3
    _accept_fails(monkeypatch, failures)
    async with linked(_Echo()) as (remote, host):
        assert (await remote.generate(_request())).token_ids
        assert failures == []
        host.check()


async def test_an_owner_that_takes_no_more_proxies_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _accept_fails(monkeypatch, [OSError(errno.EINVAL, "it listens no more")])
    with listen_on("127.0.0.1", 0) as listener:
        host = EngineHost(_Echo(), listener)
        host.check()
        host.start()
        await _until(lambda: "taken no more" in caplog.text)
        with pytest.raises(SeamlessError, match="takes connections of its proxy no more") as raised:
            host.check()
        assert "it listens no more" in str(raised.value.__cause__)
        await host.close()


async def test_a_proxy_gives_up_on_an_owner_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DIAL_S", 0.1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0seamless-test-{os.getpid()}")
        silent.listen()
        with pytest.raises(TimeoutError, match="handed no socket over within"):
            await asyncio.wait_for(RemoteEngine.connect(silent.getsockname().decode()), 30)


async def test_an_owner_that_refuses_a_proxy_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_user_of", lambda connection: -1)
    with listen_on("127.0.0.1", 0) as listener:
        host = EngineHost(_Echo(), listener)
        host.start()
        with pytest.raises(ConnectionError, match="instead of handing its socket over"):
            await RemoteEngine.connect(host.address)
        await host.close()


def _accept_fails(monkeypatch: pytest.MonkeyPatch, failures: list[OSError]) -> None:
    loop = asyncio.get_running_loop()
    accept = loop.sock_accept

    async def scripted(listening: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", scripted)


async def _until(holds: Any) -> None:
    for _ in range(10_000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen within ten seconds")


async def test_what_is_kept_comes_before_the_answer_and_goes_to_who_continues_it() -> None:
    engine = ScriptedEngine(small_tokenizer(), lambda prompt: "the quick brown fox")
    engine.keeps = 3
    kept: list[Generation] = []
    async with linked(engine) as (remote, _):
        whole = await remote.generate(replace(_request(), on_progress=kept.append))
        (told,) = kept
        assert list(told.token_ids) == list(whole.token_ids[:3])
        assert list(told.log_probs) == list(whole.log_probs[:3])
        again = await remote.generate(replace(_request(), resume_from=told))
    assert list(again.token_ids) == list(whole.token_ids)
    assert again.version_spans[0] == told.version_spans[0]
    assert engine.requests[-1].resume_from == told
