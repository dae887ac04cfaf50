"""One sample of a request, and its siblings (``n`` > 1)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from seamless_verl.proxy.calls import Call
from seamless_verl.proxy.errors import ApiError
from seamless_verl.proxy.sessions import Session
from seamless_verl.trajectory.messages import Transcript


class Siblings:
    """The samples of one request: none is committed before all are generated, so that all are answered or none is."""

    def __init__(self, num: int) -> None:
        self._missing = num
        self._unserved = num
        self._decided = asyncio.Event()
        self._failed = False

    def take_share(self) -> int:
        """Into how many shares the session's budget is to be divided now; each sample asks once."""
        self._unserved -= 1
        return self._unserved + 1

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
            raise ApiError(503, "sibling_failed", "Another sample of this request failed.", retry_after_s=1.0)

    def ended(self) -> None:
        """One has ended; if it never got to :meth:`generated`, the others fail."""
        if self._missing and not self._decided.is_set():
            self._failed = True
            self._decided.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample to generate.

    Attributes:
        sampling: what the engine will be asked for, ``max_tokens`` still as wished.
        overrides: what the trainer decided against the agent's wish so far.
    """

    session: Session
    call: Call
    transcript: Transcript
    digest: bytes
    sampling: dict[str, Any]
    overrides: tuple[str, ...]
    siblings: Siblings
