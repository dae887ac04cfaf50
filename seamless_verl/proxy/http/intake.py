"""Bodies on their way in: how many of a session, and how much memory in all, before anything is read or parsed.

A flight counts against the session's ``max_parallel`` only once its body was read; whoever sends many bodies slowly
would otherwise hold memory that no limit knows. Requests that wait for a flight of others count as well.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request

from seamless_verl.proxy.call_errors import ApiError
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.session.requests import read_body
from seamless_verl.proxy.session.sessions import Session

_NUM_ALWAYS = 8  # requests that a session may have here, however few answers it may have in flight


class BodyIntake:
    """See the module; one per proxy, and one per front."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_bytes = 0

    @asynccontextmanager
    async def held(self, request: Request) -> AsyncIterator[bytes]:
        """The body of any request; its bytes count until the block ends.

        Raises:
            ApiError: 429, too many bytes are on their way already; or what :func:`~.requests.read_body` refuses.
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
            ApiError: 429, too much is on its way already; or what :func:`~.requests.read_body` refuses.
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
