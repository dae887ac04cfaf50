"""One sample of a request, and its siblings (``n`` > 1): they share one reservation and one fate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from seamless_verl.proxy.calls import Call
from seamless_verl.proxy.errors import ApiError
from seamless_verl.proxy.sessions import Session
from seamless_verl.trajectory.messages import Transcript


class Siblings:
    """The samples of one request: none is committed before all are generated, so that all are answered or none is.

    Their tokens are reserved in one go, so that no sample holds some while it waits for another that needs more.
    """

    def __init__(self, session: Session, num: int) -> None:
        self._session = session
        self._missing = num
        self._num_under_way = num
        self._share = 0
        self._decided = asyncio.Event()
        self._failed = False

    async def reserve(self, wanted: int) -> int:
        """How many tokens of the session's budget this sample may generate, at most ``wanted``.

        The first that finds enough reserves for all of them, so that none holds tokens while it waits for another.

        Raises:
            ApiError: 429, nothing is left; or another one failed.
        """
        while not self._share:
            if self._failed:
                raise _sibling_failed()
            self._share = self._session.reserve(wanted, self._num_under_way)
            if not self._share:
                await self._session.released()
        return min(wanted, self._share)

    async def generated(self) -> None:
        """One more is generated; returns when all are.

        Raises:
            ApiError: another one failed.
        """
        self._missing -= 1
        if not self._missing:
            self._decided.set()
        await self._decided.wait()
        if self._failed:
            raise _sibling_failed()

    def ended(self) -> None:
        """One has ended, and gives its share back; if it never got to :meth:`generated`, the others fail."""
        if self._missing and not self._decided.is_set():
            self._failed = True
            self._decided.set()
        self._num_under_way -= 1
        self._session.release(self._share)


def _sibling_failed() -> ApiError:
    return ApiError(503, "sibling_failed", "Another sample of this request failed.", retry_after_s=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample to generate.

    Attributes:
        sampling: what the engine will be asked for, ``max_tokens`` still as wished.
        overrides: what the trainer decided against the agent's wish so far.
        remember: to be called once the request turns out to be one that the model can answer.
    """

    session: Session
    call: Call
    transcript: Transcript
    digest: bytes
    sampling: dict[str, Any]
    overrides: tuple[str, ...]
    siblings: Siblings
    remember: Callable[[], None]
