"""The last hop of a transfer, from a worker into its vLLM engine, when the engine or the transfer dies in it.

Three things of verl 0.9.1's are patched, in every process that imports them. Remove each when verl has its like.

* `BucketedWeightSender` waits for each bucket to be acknowledged without a limit, in a call that blocks its actor: here
  it waits for `_TRANSFER_S`, and ends at once when the engine is known to be gone.
* What feeds it may be collective (the trainer's parameters are gathered by all its workers, a checkpoint engine's
  buckets are broadcast to all replicas): whoever cannot deliver walks through the rest of it, and only then fails.
  Nobody else notices.
* `BucketedWeightReceiver` waits for the next bucket without a limit, in the engine: if there is none, it is told so.
"""

from __future__ import annotations

import os
import time
from types import ModuleType
from typing import Any

from seamless_verl.errors import SeamlessError
from seamless_verl.verl_adapter.weights import transfer_members

_TRANSFER_S = float(os.environ.get("SEAMLESS_TRANSFER_TIMEOUT_S", "120"))  # per bucket
_POLL_MS = 200
_GRACE_S = 5.0  # for an engine that lives to acknowledge the bucket it has, in a transfer that was given up
_FAREWELL = {"bucket_meta": None, "is_last": True}  # what the receiver cannot load, so that its call fails


class NotDelivered(SeamlessError):
    """Weights that a worker could not hand to its engine."""


class AnsweredSocket:
    """The sender's socket: one request, one answer, and never a wait without an end."""

    _POLLIN, _POLLOUT = 1, 2  # zmq's numbers, which this module would have to import zmq for

    def __init__(self, socket: Any, engine: str) -> None:
        self._socket = socket
        self._engine = engine
        self._answered = False  # the engine waits for the next request
        self._ended = False  # and was told that there is none

    def send_pyobj(self, message: Any) -> None:
        self._wait(self._POLLOUT)  # an engine that has not connected yet
        self._ended = isinstance(message, dict) and bool(message.get("is_last"))
        self._answered = False
        self._socket.send_pyobj(message)

    def recv(self) -> bytes:
        self._wait(self._POLLIN)
        answer: bytes = self._socket.recv()
        self._answered = True
        return answer

    def close(self) -> None:
        if self._answered and not self._ended and self._socket.poll(0, self._POLLOUT):
            self._socket.send_pyobj(_FAREWELL)
            self._socket.close(linger=1000)
        else:
            self._socket.close(linger=0)

    def _wait(self, event: int) -> None:
        standing, began = transfer_members.current, time.monotonic()
        while not self._socket.poll(_POLL_MS, event):
            waited = time.monotonic() - began
            if standing.engine_gone.is_set() and (waited > _GRACE_S or not standing.aborted.is_set()):
                raise NotDelivered(f"the transfer of weights to {self._engine} was given up")
            if waited > _TRANSFER_S:
                raise NotDelivered(
                    f"{self._engine} has not taken a bucket of weights for {waited:.0f} s (SEAMLESS_TRANSFER_TIMEOUT_S)"
                )


def bound_sender(transfer: ModuleType) -> None:
    """See the module, the first two."""
    from verl.workers.rollout.utils import ensure_async_iterator

    sender = transfer.BucketedWeightSender
    init_socket, send_weights = sender._init_socket, sender.async_send_weights

    def init_answered_socket(self: Any) -> None:
        init_socket(self)
        self.socket = AnsweredSocket(self.socket, self.zmq_handle)

    async def send(self: Any, weights: Any) -> None:
        standing = transfer_members.current

        async def unless_given_up() -> Any:
            async for named in ensure_async_iterator(weights):
                if standing.aborted.is_set():  # after that the buckets hold anything
                    raise NotDelivered("the transfer of weights was given up")
                yield named

        try:
            await send_weights(self, unless_given_up())
        except BaseException:
            await walk_through(weights)
            raise

    sender._init_socket = init_answered_socket
    sender.async_send_weights = send


async def walk_through(weights: Any) -> None:
    """To the end: making the next weight may be a collective call that others wait in."""
    from verl.workers.rollout.utils import ensure_async_iterator

    async for _ in ensure_async_iterator(weights):
        pass


def fail_together(rollout: ModuleType) -> None:
    """Let a worker of the trainer, whose replica died, stay with the others until their weights are in.

    verl 0.9.1 wakes all hybrid replicas in one collective call (`ActorRolloutRefWorker.update_weights`: weights on,
    gather and send, barrier, cache on). If one worker raises at the beginning, the others wait in a gather or at the
    barrier, and with them the run. Here it takes part to the barrier and raises in the step behind it. Remove when that
    call lets no worker leave early.
    """
    adapter = rollout.ServerAdapter
    resume, update_weights = adapter.resume, adapter.update_weights

    async def resume_or_remember(self: Any, tags: list[str]) -> None:
        if not self.config.free_cache_engine:
            await resume(self, tags)
        elif "weights" in tags:
            self._update_failed, self._update_open = None, True
            try:
                await resume(self, tags)
            except Exception as error:  # noqa: BLE001 - raised behind the barrier
                self._update_failed = error
        else:
            failed, self._update_failed = getattr(self, "_update_failed", None), None
            self._update_open = False
            if failed is not None:
                raise failed
            await resume(self, tags)

    async def update_or_remember(self: Any, weights: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(self, "_update_failed", None) is not None:
            await walk_through(weights)
            return
        try:
            await update_weights(self, weights, *args, **kwargs)
        except Exception as error:
            await walk_through(weights)
            if not getattr(self, "_update_open", False):
                raise
            self._update_failed = error

    adapter.resume, adapter.update_weights = resume_or_remember, update_or_remember
