"""Requests on their way in: keys, headers, bodies. Everything here is bounded and ends in a 4xx.

How many bodies of a session, and how much memory in all, is decided before anything is read or parsed: an answer counts
against the session's ``max_parallel`` only once its body was read; whoever sends many bodies slowly would otherwise
hold memory that no limit knows. Requests that wait for the answer to another one count as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect

from seamless_verl.proxy.calls import ApiError, bad_request
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.session.sessions import Session, SessionSpec

_NUM_ALWAYS = 8  # requests that a session may have here, however few answers it may have in flight


class ClientGone(Exception):
    """The client has gone."""


class SamplingBody(BaseModel):
    """Sampling that the trainer decides."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)


class OpenBody(BaseModel):
    """Body of ``POST /sessions``; what is left out keeps the default of :class:`SessionSpec`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    group: str = Field(default="", max_length=256)
    index: int = Field(default=0, ge=0, lt=2**31)
    deadline_s: float = Field(default=3600.0, gt=0, le=30 * 86400)
    max_turns: int = Field(default=1000, ge=1, lt=2**31)
    max_tokens: int = Field(default=1 << 30, ge=1, lt=2**31)
    max_model_len: int | None = Field(default=None, ge=1, lt=2**31)
    max_parallel: int = Field(default=16, ge=1, lt=2**31)
    sampling: SamplingBody = Field(default_factory=SamplingBody)
    metadata: dict[str, Any] = Field(default_factory=dict)

    def spec(self) -> SessionSpec:
        fields = {name: getattr(self, name) for name in type(self).model_fields if name != "sampling"}
        return SessionSpec(**fields, sampling=self.sampling.model_dump(exclude_none=True))


class RewardBody(BaseModel):
    """Body of ``POST /sessions/{id}/reward`` and of ``…/close``."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    reward: float | None = None
    rewards: dict[str, float] = Field(default_factory=dict, max_length=256)


class PauseBody(BaseModel):
    """Body of ``POST /pause``; ``timeout_s`` is how long to wait for what is under way."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    timeout_s: float = Field(default=60.0, ge=0, le=3600)


class ResumeBody(BaseModel):
    """Body of ``POST /resume``; ``version`` of the weights that are served now, where they changed."""

    model_config = ConfigDict(extra="forbid")
    version: int | None = Field(default=None, ge=0, lt=2**31)


async def read_body(request: Request, limits: Limits, *, take: Callable[[int], None] = lambda num_bytes: None) -> bytes:
    """The body, unless it is too long or too slow.

    Args:
        take: told of the bytes of each piece; may refuse it.

    Raises:
        ApiError: 413 or 408, or whatever ``take`` refuses with.
        ClientGone: the client left while it was sending.
    """
    too_long = ApiError(413, "body_too_large", f"The body may have {limits.max_body_bytes} bytes.")
    announced = request.headers.get("content-length", "0")
    if len(announced) > 18 or (announced.isdigit() and int(announced) > limits.max_body_bytes):
        raise too_long

    async def read() -> bytes:
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limits.max_body_bytes:
                raise too_long
            take(len(chunk))
            chunks.append(chunk)
        return b"".join(chunks)

    try:
        return await asyncio.wait_for(read(), limits.body_timeout_s)
    except asyncio.TimeoutError:
        story = f"The body did not arrive within {limits.body_timeout_s:g} s."
        raise ApiError(408, "body_too_slow", story) from None
    except ClientDisconnect:
        raise ClientGone from None


class BodyIntake:
    """See the module; one per proxy, and one per front."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_bytes = 0

    @asynccontextmanager
    async def held(self, request: Request) -> AsyncIterator[bytes]:
        """The body of any request; its bytes count until the block ends.

        Raises:
            ApiError: 429, too many bytes are on their way already; or what :func:`read_body` refuses.
            ClientGone: the client left while it was sending.
        """
        num_taken = 0

        def take(num_bytes: int) -> None:
            nonlocal num_taken
            num_taken += num_bytes
            self._num_bytes += num_bytes
            if self._num_bytes > self._limits.max_arriving_bytes:
                story = f"Bodies of {self._limits.max_arriving_bytes} bytes are on their way, which is the limit."
                raise ApiError(429, "too_many_requests", story, retry_after_s=1.0)

        try:
            yield await read_body(request, self._limits, take=take)
        finally:
            self._num_bytes -= num_taken

    async def read(self, request: Request, session: Session) -> bytes:
        """The body of a request to this session.

        Raises:
            ApiError: 429, too much is on its way already; or what :func:`read_body` refuses.
            ClientGone: the client left while it was sending.
        """
        # Twice: each answer in flight may be asked for again before its first client is known to be gone.
        most = max(_NUM_ALWAYS, 2 * session.spec.max_parallel)
        if session.num_arriving + session.num_users >= most:
            story = f"Session {session.id} has {most} requests here, which is its limit."
            raise ApiError(429, "too_many_requests", story, retry_after_s=1.0)
        session.num_arriving += 1
        try:
            async with self.held(request) as body:
                return body
        finally:
            session.num_arriving -= 1


def api_key_of(request: Request) -> str:
    """The key of a request: ``Authorization: Bearer …`` or ``x-api-key``.

    Raises:
        ApiError: 401, there is none; 400, there are two.
    """
    bearers, plain = request.headers.getlist("authorization"), request.headers.getlist("x-api-key")
    if len(bearers) > 1 or len(plain) > 1:
        raise bad_request("The key was sent more than once.", code="duplicate_header")
    keys = set(plain)
    if bearers:
        scheme, _, key = bearers[0].partition(" ")
        if scheme.lower() == "bearer":  # others, like Basic, are for a gateway in front
            keys.add(key.strip())
    keys.discard("")
    if len(keys) > 1:
        raise bad_request("Authorization and x-api-key hold different keys.", code="duplicate_header")
    if keys:
        return keys.pop()
    raise ApiError(401, "missing_api_key", "Send the session's key as 'Authorization: Bearer KEY'.")


def retry_count_of(request: Request) -> int | None:
    """What the client says about how often it has tried; None when it says nothing."""
    text = request.headers.get("x-stainless-retry-count", "")
    return min(int(text), 1000) if text.isascii() and text.isdigit() and len(text) < 10 else None


async def client_left(request: Request) -> None:
    """Returns when the client has gone. The body has been read, so other messages are ignored."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
