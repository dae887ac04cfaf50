"""In the process of vLLM's engine: what it has to do, for whoever asks, and contexts that nobody needs any more.

    a session ends, or loses its place ─► router ─► server ─► its blocks go to the front of vLLM's free queue

A prefix cache forgets first what nobody has used for longest. A session that has just ended is not that: its blocks lie
behind those of sessions that are about to ask again. From here they are taken first, and hit until then. The prompt
that a session began with stays where it is: the others of its group begin with it as well.

Blocks are known by their hashes, so that nothing is held that vLLM has given to somebody else meanwhile.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

LOAD, LET_GO = "seamless_load", "seamless_let_go"  # what a server's client calls
_MOST_PER_BLOCK = 2  # hashes remembered; no more than one of each block can still be there
_TURN = "~"


def name_of_turn(conversation: str, turn: str) -> str:
    """What an engine calls the request, so that it knows which ones go on with one another."""
    return f"{conversation}{_TURN}{turn}"


def _conversation_of(request: str) -> str:
    """Of a request by the name that it has within the engine; empty: it was not named like that."""
    return request.rpartition(_TURN)[0]


class Contexts:
    """The hashes of the blocks that each conversation filled, of its last request.

    Args:
        most: hashes in all; the oldest conversations are forgotten first.
    """

    def __init__(self, most: int) -> None:
        self._chains: OrderedDict[str, Sequence[Any]] = OrderedDict()
        self._most = most
        self._num = 0

    def left(self, conversation: str, hashes: Sequence[Any]) -> None:
        """Its request has ended, or was preempted; ``hashes`` are those of its full blocks, in order."""
        self.pop(conversation)
        self._chains[conversation] = hashes
        self._num += len(hashes)
        while self._num > self._most:
            self.pop(next(iter(self._chains)))

    def pop(self, conversation: str) -> Sequence[Any]:
        """What is remembered of it, which is forgotten."""
        hashes = self._chains.pop(conversation, ())
        self._num -= len(hashes)
        return hashes


def install(core: Any) -> None:
    """Give ``vllm.v1.engine.core``'s engine the two calls (0.24 to 0.27)."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    manager: Any = KVCacheManager
    free = manager.free
    if hasattr(free, "__wrapped__"):
        return

    @functools.wraps(free)
    def free_and_note(self: Any, request: Any) -> None:
        free(self, request)
        conversation = _conversation_of(request.request_id)
        if conversation and request.block_hashes:
            _contexts(self).left(conversation, request.block_hashes)

    manager.free = free_and_note
    setattr(core.EngineCore, LOAD, _load)
    setattr(core.EngineCore, LET_GO, _let_go)


def install_reset(scheduler: Any) -> None:
    """Have ``vllm.v1.core.sched.scheduler`` tell its worker whom a reset of the cache preempted (0.24; 0.27 does)."""
    made = scheduler.Scheduler
    reset, schedule = made.reset_prefix_cache, made.schedule
    if "reset_preempted_req_ids" in made.__init__.__code__.co_names or hasattr(reset, "__wrapped__"):
        return

    @functools.wraps(reset)
    def reset_and_note(self: Any, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        if reset_running_requests:
            before = vars(self).get("seamless_preempted", set())
            self.seamless_preempted = before | {request.request_id for request in self.running}
        done: bool = reset(self, reset_running_requests, *args, **kwargs)
        return done

    @functools.wraps(schedule)
    def schedule_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        output.preempted_req_ids = {*(output.preempted_req_ids or ()), *vars(self).pop("seamless_preempted", ())}
        return output

    made.reset_prefix_cache, made.schedule = reset_and_note, schedule_and_tell


def _contexts(manager: Any) -> Contexts:
    if "seamless_contexts" not in vars(manager):
        manager.seamless_contexts = Contexts(_MOST_PER_BLOCK * manager.block_pool.num_gpu_blocks)
    found: Contexts = manager.seamless_contexts
    return found


def _load(core: Any) -> tuple[int, int, int]:
    """Requests that it computes, those in its queue, and tokens of the cache that the former hold."""
    scheduler, pool = core.scheduler, core.scheduler.kv_cache_manager.block_pool
    used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one is never given to anybody
    waiting = len(scheduler.waiting) + len(scheduler.skipped_waiting)
    return len(scheduler.running), waiting, used * scheduler.block_size


def _let_go(core: Any, sessions: Sequence[tuple[str, int]]) -> None:
    """These conversations will not be gone on with here, but for their first so many tokens: blocks with the others are
    taken before all others."""
    manager = core.scheduler.kv_cache_manager
    pool = manager.block_pool
    for conversation, shared in sessions:
        own = _contexts(manager).pop(conversation)[shared // pool.hash_block_size :]
        found = [pool.get_cached_block(each, [group]) for each in own for group in range(manager.num_kv_cache_groups)]
        free = [block for blocks in found for block in blocks or () if block.ref_cnt == 0 and not block.is_null]
        for block in free:
            pool.free_block_queue.remove(block)
        pool.free_block_queue.prepend_n(free[::-1])  # a context is of use as far as it is whole
