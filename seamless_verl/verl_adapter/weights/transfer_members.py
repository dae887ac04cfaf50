"""A transfer of weights as the processes that take part in it see it: what can end their wait.

verl's transfers block whole actors: a broadcast that waits for a dead peer holds the event loop, and no further call
gets in. So a thread of each member listens, while a transfer lasts, to what the trainer's process says of it (a key in
Ray's own key-value store): which replicas are gone, and whether to abort.

    gone     the members of that replica stop waiting for their engine, and walk through the rest of the weights, so
             that the others' collectives end as usual
    abort    the communicator is aborted (``ncclCommAbort``): that ends the wait of whoever lost a peer in a broadcast
    over     the thread ends
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

_LISTEN_S = 0.5
_NAMESPACE = "seamless_transfer"


class Standing:
    """What this process knows of the transfer under way; `current` is the process's own."""

    def __init__(self) -> None:
        self.engine_gone = threading.Event()  # the engine that this process sends to
        self.aborted = threading.Event()
        self.over = threading.Event()

    def give_up(self) -> None:
        """Called by the thread, while the process itself may be blocked in the very calls that this ends."""
        self.engine_gone.set()
        self.aborted.set()


current = Standing()


def key_of(transfer: str) -> bytes:
    return f"{_NAMESPACE}:{transfer}".encode()


def say(transfer: str, *, gone: list[int], abort: bool, over: bool) -> None:
    """The trainer's side of the key."""
    import ray.experimental.internal_kv as internal_kv

    said = json.dumps({"gone": gone, "abort": abort, "over": over}).encode()
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
    standing = current = Standing()
    engines = list(_checkpoint_engines(worker)) if in_group else []
    arguments = (standing, engines, transfer, replica)
    threading.Thread(target=_listen, args=arguments, name="transfer watch", daemon=True).start()


def end(_: Any) -> None:
    current.over.set()


def renew_group(worker: Any, generation: int) -> None:
    """Forget the group of verl's nccl engine, so that the next transfer makes one of whoever takes part then.

    verl 0.9.1 asserts that rank and world size stay what they were at the first transfer (``rebuild_group=False``),
    and has no call by which a member that stays could leave a group that another left by dying. The new group has a
    new name: under the old one peers would find the rendezvous of the old. Remove when ``CheckpointEngineManager``
    rebuilds groups after `remove_replicas`, as its docstring says.
    """
    for engine in _checkpoint_engines(worker):
        name = getattr(engine, "group_name", None)
        if name is None:  # its peers find each other anew in each transfer
            continue
        _abort(engine)
        collective = _collective()
        if collective is not None and collective.is_group_initialized(name):
            with contextlib.suppress(ValueError):  # the rendezvous went with its owner
                collective.destroy_collective_group(name)
        engine.group_name = f"{name.partition('~')[0]}~{generation}"
        engine.rank = engine.world_size = None


def _listen(standing: Standing, engines: list[Any], transfer: str, replica: int) -> None:
    import ray.experimental.internal_kv as internal_kv

    while not standing.over.wait(_LISTEN_S):
        said = internal_kv._internal_kv_get(key_of(transfer))
        news = json.loads(said) if said else {"gone": [], "abort": False, "over": True}
        if replica in news["gone"]:
            standing.engine_gone.set()
        if news["abort"] and not standing.aborted.is_set():
            standing.give_up()
            for engine in engines:
                _abort(engine)
        if news["over"]:
            return


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
    """Of a worker beside a replica, or of the trainer's, which verl may have fused with others."""
    for part in (worker, *getattr(worker, "worker_dict", {}).values()):
        engine = getattr(part, "checkpoint_engine", None)
        if engine is not None:
            yield engine
