"""How long each replica of a router was registered, and how much of that it had something to do."""

from __future__ import annotations

import time
from collections.abc import Iterable

from seamless_verl.observe.flight import RequestEnded, RequestStarted, SliceAdded, SliceRemoved, SliceState
from seamless_verl.observe.time_ledger import Ledger, SliceSeconds

_ANY = "any"  # all requests on a replica count as one: it is busy while at least one is out


class ReplicaSeconds:
    """Replicas by address."""

    def __init__(self) -> None:
        self._ledger = Ledger()

    def joined(self, replicas: Iterable[str]) -> None:
        for name in replicas:
            self._ledger.handle(
                SliceAdded(
                    at=time.monotonic(),
                    slice=name,
                    pool="",
                    devices=1,
                    capabilities=("rollout",),
                    state=SliceState.ROLLOUT,
                )
            )

    def left(self, replicas: Iterable[str]) -> None:
        for name in replicas:
            self._ledger.handle(SliceRemoved(at=time.monotonic(), slice=name))

    def busy(self, replica: str) -> None:
        """It has a request now, and had none."""
        self._ledger.handle(RequestStarted(at=time.monotonic(), request=_ANY, slice=replica, prompt_tokens=0))

    def idle(self, replica: str) -> None:
        self._ledger.handle(
            RequestEnded(at=time.monotonic(), request=_ANY, slice=replica, tokens=0, finish="completed")
        )

    def books(self) -> tuple[SliceSeconds, ...]:
        return self._ledger.books(time.monotonic())
