"""A client for one conversation over an OpenAI-style ``/chat/completions``, with one connection kept alive.

Answers that say "later" (429, 503) are asked again when they say so; a connection that the server closed while it was
idle is opened anew, once, and the request is marked as a retry, so that a server which already answered can repeat
itself instead of generating again. Nothing else is retried: another generation would be another sample.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

_LATER = (429, 503)
_DEFAULT_RETRY_AFTER_S = 1.0
_MAX_RETRY_AFTER_S = 30.0
# The session's own limits: no more turns, no more tokens, a prompt too long, a session that is over.
_REFUSALS = (400, 402, 403, 409, 410, 413, 422)


class ChatRefused(Exception):
    """The endpoint will not continue this conversation (budget, length, closed session): an end, not a fault."""


class ChatFailed(Exception):
    """The endpoint is broken, unreachable, or does not know this key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The assistant's text, unchanged, and why it stopped (``stop``, ``length``)."""

    content: str
    finish_reason: str


class ChatClient:
    """Use as a context manager, from one thread."""

    def __init__(self, base_url: str, api_key: str) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base URL {base_url!r}: expected http://host:port/path")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port)
        self._path = parts.path.rstrip("/") + "/chat/completions"
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._connection.close()

    def complete(self, request: dict[str, Any], *, deadline: float, forgotten: threading.Event) -> Answer:
        """One answer. ``deadline`` is on the monotonic clock; ``forgotten`` cuts waits short.

        Raises:
            TimeoutError: the deadline came first.
            ChatRefused, ChatFailed: see there.
        """
        body = json.dumps(request).encode()
        while True:
            status, retry_after_s, data = self._post(body, deadline)
            if status not in _LATER:
                break
            left = deadline - time.monotonic()
            if retry_after_s >= left:
                raise TimeoutError(f"HTTP {status}: asked to wait {retry_after_s:g} s, {max(left, 0.0):.1f} s are left")
            if forgotten.wait(retry_after_s):
                raise TimeoutError("nobody waits for this attempt any more")
        if status == 200:
            return _parse(data)
        message = f"HTTP {status}: {data[:300].decode('utf-8', 'replace')}"
        raise (ChatRefused if status in _REFUSALS else ChatFailed)(message)

    def _post(self, body: bytes, deadline: float) -> tuple[int, float, bytes]:
        """Status, seconds to wait if the status says so, and body of the response."""
        for retry in range(2):
            reused = self._connection.sock is not None
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("deadline passed")
            self._connection.timeout = left
            if self._connection.sock is not None:
                self._connection.sock.settimeout(left)
            headers = {**self._headers, "x-stainless-retry-count": str(retry)}
            try:
                self._connection.request("POST", self._path, body, headers)
                response = self._connection.getresponse()
                return response.status, _retry_after_s(response.getheader("Retry-After")), response.read()
            except TimeoutError:
                self._connection.close()
                raise TimeoutError("no answer before the deadline") from None
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                if retry or not reused:
                    raise ChatFailed(f"{type(error).__name__}: {error}") from error
        raise AssertionError("unreachable")


def _retry_after_s(header: str | None) -> float:
    try:
        return min(max(float(header or _DEFAULT_RETRY_AFTER_S), 0.0), _MAX_RETRY_AFTER_S)
    except ValueError:  # an HTTP date
        return _DEFAULT_RETRY_AFTER_S


def _parse(data: bytes) -> Answer:
    try:
        choice = json.loads(data)["choices"][0]
        return Answer(content=choice["message"]["content"] or "", finish_reason=str(choice["finish_reason"]))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ChatFailed(f"no chat completion: {data[:200]!r}") from error
