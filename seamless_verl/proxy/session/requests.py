"""Keys, bodies and headers of raw requests. Everything here is bounded and ends in a 4xx."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from seamless_verl.proxy.call_errors import ApiError, bad_request
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.session.flights import ClientGone


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


_DIGITS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else ord(" ") for byte in range(256))
_MANY_DIGITS = b"0" * 300  # integers shorter than that are finite as floats


def refuse_infinite(body: bytes) -> None:
    """Numbers like ``NaN`` and ``1e999`` anywhere in a body: pydantic takes them where a schema says "anything".

    Raises:
        ApiError: 400.
    """
    try:
        msgspec.json.decode(body)  # takes no other number that is not finite; microseconds
        is_fine = _MANY_DIGITS not in body.translate(_DIGITS)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        is_fine = False
    if not is_fine:
        _refuse_infinite(body)


def _refuse_infinite(body: bytes) -> None:
    def refuse(number: str) -> NoReturn:
        raise bad_request(f"The body is not valid JSON: {number[:40]} is not a finite number.", code="invalid_json")

    def finite(number: str) -> float:
        value = float(number)
        if not math.isfinite(value):
            refuse(number)
        return value

    try:
        json.loads(body, parse_constant=refuse, parse_float=finite, parse_int=finite)
    except (ValueError, RecursionError):
        return  # the model's own parser says what is wrong


def encoded(content: Any) -> bytes:
    """A response body; what cannot be written as UTF-8 is replaced, never an error."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


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
    """Returns when the client is gone; the body has been read, so anything else is noise."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
