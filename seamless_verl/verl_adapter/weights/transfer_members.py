"""A transfer of weights in the processes that take part in it: what ends their waits, and the hop into the engine.

verl's transfers block whole actors: a broadcast that waits for a dead peer holds the event loop, and no further call
gets in. So a thread of each member listens, while a transfer lasts, to what the trainer's process says of it (a key in
Ray's own key-value store): which replicas are gone, and whether to abort.

    gone     the members of that replica stop waiting for their engine, and walk through the rest of the weights, so
             that the others' collectives end as usual
    abort    the communicator is aborted (``ncclCommAbort``): a broadcast that waits for a lost peer ends
    nothing  it is over: the thread ends

The last hop, from a worker into its vLLM engine, is verl 0.9.1's with three changes, made in every process that
imports it. Remove each when verl has its like.

* `BucketedWeightSender` waits for each bucket to be acknowledged without a limit, in a call that blocks its actor: here
  it waits for `_TRANSFER_S`, and ends at once when the engine is known to be gone.
* What feeds it may be collective (the trainer's parameters are gathered by all its workers, a checkpoint engine's
  buckets are broadcast to all replicas): a sender that cannot deliver walks through the rest, and only then fails.
  The other members do not notice.
* `BucketedWeightReceiver` waits for the next bucket without a limit, in the engine: if there is none, it is told so.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from seamless_verl.errors import SeamlessError

_LISTEN_S = 0.5
_NAMESPACE = "seamless_transfer"
_TRANSFER_S = float(os.environ.get("SEAMLESS_TRANSFER_TIMEOUT_S", "120"))  # per bucket
_POLL_MS = 200
_SNDMORE = 2  # zmq's number, which this module would have to import zmq for
_GRACE_S = 5.0  # for an engine that lives to acknowledge the bucket it has, in a transfer that was given up
_FAREWELL = {"bucket_meta": None, "is_last": True}  # what the receiver cannot load, so that its call fails


class TransferState:
    """What this process knows of the transfer under way, as events that its blocked calls look at."""

    def __init__(self) -> None:
        self.engine_gone = threading.Event()  # the engine that this process sends to
        self.aborted = threading.Event()
        self.over = threading.Event()  # the next transfer has begun

    def give_up(self) -> None:
        """Called by the listening thread; the main thread may be blocked in the calls that this ends."""
        self.engine_gone.set()
        self.aborted.set()


current = TransferState()


def key_of(transfer: str) -> bytes:
    return f"{_NAMESPACE}:{transfer}".encode()


def say(transfer: str, *, gone: list[int], abort: bool) -> None:
    """Tell the members of a transfer how it stands; called in the trainer's process."""
    import ray.experimental.internal_kv as internal_kv

    said = json.dumps({"gone": gone, "abort": abort}).encode()
    internal_kv._internal_kv_put(key_of(transfer), said, overwrite=True)


def forget(transfer: str) -> None:
    import ray.experimental.internal_kv as internal_kv

    internal_kv._internal_kv_del(key_of(transfer))


# ---------------------------------------------------------------- run in a member's process, by ``__ray_call__``


def begin(worker: Any, transfer: str, in_group: bool, replica: int) -> None:
    """Listen to what is said of ``transfer``.

    Args:
        replica: number of the one whose engine this worker sends to.
        in_group: the checkpoint engine's group takes part.
    """
    global current
    current.over.set()
    state = current = TransferState()
    engines = list(_checkpoint_engines(worker)) if in_group else []
    arguments = (state, engines, transfer, replica)
    threading.Thread(target=_listen, args=arguments, name="transfer watch", daemon=True).start()


def greet(worker: Any, last: bool) -> None:
    """Publish a greeting where verl's engine publishes what is in each bucket; nothing is published after the last."""
    for engine in _checkpoint_engines(worker):
        if getattr(engine, "is_master", False) and hasattr(engine, "topic"):
            engine.socket.send_string(engine.topic, flags=_SNDMORE)
            engine.socket.send_pyobj(last)


def hear(worker: Any) -> None:
    """Wait until a greeting has come, or the transfer is given up."""
    for engine in _listening(worker):
        while not (engine.socket.poll(_POLL_MS) or current.aborted.is_set()):
            pass


def skip_greetings(worker: Any) -> None:
    """Take greetings from the socket, to the last, so that the first bucket is next."""
    for engine in _listening(worker):
        while not current.aborted.is_set():
            if engine.socket.poll(_POLL_MS):
                engine.socket.recv_string()
                if engine.socket.recv_pyobj():
                    break


def _listening(worker: Any) -> Iterator[Any]:
    """Engines that are told of buckets over ZeroMQ's PUB/SUB (verl's nccl and hccl), by others."""
    for engine in _checkpoint_engines(worker):
        receives = getattr(engine, "rank", None) is not None and engine.rank >= getattr(engine, "num_senders", 1)
        if receives and hasattr(engine, "topic"):
            yield engine


def give_back(worker: Any) -> None:
    """What verl's nccl engine frees stays in cupy's pool, where no engine that wakes on this GPU can have it.

    Seen on an H200: both buckets of rank 0. Remove when `NCCLCheckpointEngine.finalize` empties that pool, too.
    """
    for engine in _checkpoint_engines(worker):
        cupy = getattr(sys.modules[type(engine).finalize.__module__], "cp", None)
        if cupy is not None:
            cupy.get_default_memory_pool().free_all_blocks()


def drop_buckets(worker: Any) -> None:
    """Finalize a transfer that broke. A group is left as it is: `renew_group` ends it before the next one."""
    for engine in _checkpoint_engines(worker):
        rebuilds, engine.rebuild_group = getattr(engine, "rebuild_group", False), False
        try:
            engine.finalize()
        finally:
            engine.rebuild_group = rebuilds
    give_back(worker)


def renew_group(worker: Any, generation: int) -> None:
    """Forget the group of verl's nccl engine, so that the next transfer makes one of its own members.

    verl 0.9.1 asserts that rank and world size stay what they were at the first transfer (``rebuild_group=False``),
    and has no call by which a member that stays could leave a group that another left by dying. The new group has a
    new name: under the old one peers would find the rendezvous of the old. Remove when ``CheckpointEngineManager``
    rebuilds groups after `remove_replicas`, as its docstring says.
    """
    for engine in _checkpoint_engines(worker):
        name = getattr(engine, "group_name", None)
        if name is None:  # its peers find each other anew in each transfer (not kimi's: `_check_lending`)
            continue
        _abort(engine)
        collective = _collective()
        if collective is not None and collective.is_group_initialized(name):
            with contextlib.suppress(ValueError):  # the rendezvous went with its owner
                collective.destroy_collective_group(name)
        engine.group_name = f"{name.partition('~')[0]}~{generation}"
        engine.rank = engine.world_size = None


def _listen(state: TransferState, engines: list[Any], transfer: str, replica: int) -> None:
    import ray.experimental.internal_kv as internal_kv

    while not state.over.wait(_LISTEN_S):
        if not (said := internal_kv._internal_kv_get(key_of(transfer))):
            return
        news: dict[str, Any] = json.loads(said)
        if replica in news["gone"]:
            state.engine_gone.set()
        if news["abort"] and not state.aborted.is_set():
            state.give_up()
            for engine in engines:
                _abort(engine)


def _abort(engine: Any) -> None:
    """End what waits for the group's peers in this process: device, and the metadata of the next bucket."""
    collective = _collective()
    groups = collective._group_mgr._name_group_map if collective is not None else {}
    group = groups.get(getattr(engine, "group_name", None))
    for communicators in list((getattr(group, "_dev_comm_map", None) or {}).values()):
        for communicator in communicators or ():
            communicator.abort()
    socket = getattr(engine, "socket", None)
    if socket is not None and not getattr(engine, "is_master", False) and not socket.closed:
        # Terminating its context is how another thread may end a socket's wait; the call returns when it is closed.
        threading.Thread(target=_terminate, args=(socket,), name="transfer abort", daemon=True).start()


def _terminate(socket: Any) -> None:
    socket.context.term()


def _collective() -> Any:
    """Ray's module of groups, if the process has any."""
    return sys.modules.get("ray.util.collective.collective")


def _checkpoint_engines(worker: Any) -> Iterator[Any]:
    """The checkpoint engines of a worker; those of the trainer may be fused with others (``worker_dict``)."""
    for part in (worker, *getattr(worker, "worker_dict", {}).values()):
        engine = getattr(part, "checkpoint_engine", None)
        if engine is not None:
            yield engine


# ---------------------------------------------------------------- from a worker into its engine


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
        state, began = current, time.monotonic()
        while not self._socket.poll(_POLL_MS, event):
            waited = time.monotonic() - began
            if state.engine_gone.is_set() and (waited > _GRACE_S or not state.aborted.is_set()):
                raise NotDelivered(f"the transfer of weights to {self._engine} was given up")
            if waited > _TRANSFER_S:
                raise NotDelivered(
                    f"{self._engine} has not taken a bucket of weights for {waited:.0f} s (SEAMLESS_TRANSFER_TIMEOUT_S)"
                )


def bound_sender(transfer: Any) -> None:
    """Patch `BucketedWeightSender`: its waits have a limit, and after a failure it takes the rest of the weights."""
    from verl.workers.rollout.utils import ensure_async_iterator

    sender = transfer.BucketedWeightSender
    init_socket, send_weights = sender._init_socket, sender.async_send_weights

    def init_answered_socket(self: Any) -> None:
        init_socket(self)
        self.socket = AnsweredSocket(self.socket, self.zmq_handle)

    async def send(self: Any, weights: Any) -> None:
        state = current

        async def unless_given_up() -> Any:
            async for named in ensure_async_iterator(weights):
                if state.aborted.is_set():  # after that the buckets hold anything
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
    """Consume all remaining weights: producing one may be a collective call in which others wait."""
    from verl.workers.rollout.utils import ensure_async_iterator

    async for _ in ensure_async_iterator(weights):
        pass


def fail_together(rollout: Any) -> None:
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
            self._update_failed = None
            self._update_open = True
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
