"""Which actors of a run died, how a replica comes back, and how a run ends that cannot go on without one.

Actors are asked again and again without waiting, since a living one may be too busy to answer.

* `ReplicaHealth`: a replica that died is started anew where a scheduler goes on without it (`restart_replica`): new
  servers, and where they died too, new workers beside it, under the same names. verl 0.9.1 starts a replica's parts
  once. Remove the restart when a replica can restart itself.
* `Watchdog`: verl 0.9.1 waits without a limit for rows; an engine that dies meanwhile leaves it waiting for ever. The
  watchdog ends the wait, and with it the run, with the name of what died. Often a call that was under way or the groups
  that fail without the engine end it first; then the watchdog is asked whether a death caused that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from verl.single_controller.ray import RayWorkerGroup
from verl.utils.device import get_device_name, get_torch_device
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from seamless_verl.places import error_in_words
from seamless_verl.run.restarts import RunBroken
from seamless_verl.scheduling.issuing import Patience
from seamless_verl.verl_adapter.vllm.engine_death import engine_died

_log = logging.getLogger(__name__)

_GONE_S = 10.0
_AGAIN_S = 10.0  # the memory of a killed engine may come back a little after its process is gone
_RESTART_S = Patience().restart_s - 90.0  # with what is tidied up it ends before its GPUs may be the trainer's
_INTERVAL_S = 5.0
_LAST_ANSWERS_S = 3.0  # the dead answer at once, the busy not at all
_LAST_RESORT_S = 45.0  # for the run to end by itself once it is known why it must

Key = TypeVar("Key")


class Liveness(Generic[Key]):
    """Actors, each with a question under way whether it lives.

    Args:
        servers: those that are rollout servers, which may live while the engine behind them does not.
    """

    def __init__(self, actors: Mapping[Key, Any], servers: Collection[Key]) -> None:
        self._actors = dict(actors)
        self._servers = servers
        self._asked: dict[Key, tuple[Any, float]] = {}
        self.ask()

    def ask(self) -> None:
        """Ask all of them anew."""
        for key in self._actors:
            self._ask(key)

    def _ask(self, key: Key) -> None:
        actor = self._actors[key]
        call = actor.__ray_call__.remote(engine_died) if key in self._servers else actor.__ray_ready__.remote()
        self._asked[key] = (call, time.monotonic())

    def deaths(self, wait_s: float = 0.0) -> dict[Key, str]:
        """Actors that were found dead, and how: the error of the process, or the end of the engine behind a server.

        The others answered, or have not answered yet.

        Args:
            wait_s: for all of them to answer.
        """
        calls = [call for call, _ in self._asked.values()]
        if wait_s and calls:
            ray.wait(calls, num_returns=len(calls), timeout=wait_s)
        found: dict[Key, str] = {}
        for key, (call, _) in list(self._asked.items()):
            if not ray.wait([call], timeout=0)[0]:
                continue
            try:
                answer = ray.get(call)
            except RayError as error:
                found[key] = error_in_words(error)
                continue
            if key in self._servers and answer:
                found[key] = f"its engine process ended ({answer})"
            else:
                self._ask(key)
        return found

    def silent_s(self, key: Key) -> float:
        """Seconds since it was asked."""
        return time.monotonic() - self._asked[key][1]


# ---------------------------------------------------------------- replicas


class ReplicaHealth:
    """Which of the given replicas died, or are silent.

    A replica consists of servers, the engine processes behind them, and, unless it lives in the trainer's workers, of
    workers of its own that hand weights to it. Any of them may die alone.
    """

    def __init__(self, replicas: Sequence[RolloutReplica]) -> None:
        self._servers = {(replica, "server", n): part for replica in replicas for n, part in enumerate(replica.servers)}
        apart = [replica for replica in replicas if replica.rollout_mode is RolloutMode.STANDALONE]
        workers = {(replica, "worker", n): part for replica in apart for n, part in enumerate(replica.workers)}
        self._liveness = Liveness(self._servers | workers, self._servers)

    def deaths(self, wait_s: float = 0.0) -> dict[RolloutReplica, str]:
        """Which replicas were found dead, and why; the others answered, or have not answered yet."""
        found: dict[RolloutReplica, str] = {}
        for (replica, part, _), how in self._liveness.deaths(wait_s).items():
            found.setdefault(replica, f"its {part}: {how}")
        return found

    def silent(self, for_s: float) -> dict[RolloutReplica, str]:
        """Replicas with a server that has not answered for so long; workers do not answer while they work."""
        since = {key[0]: self._liveness.silent_s(key) for key in self._servers if self._liveness.silent_s(key) >= for_s}
        return {replica: f"its server has not answered for {seconds:.0f} s" for replica, seconds in since.items()}


def story_of(error: BaseException) -> str:
    """Its kind and its last line, without the traceback of the process that raised it."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return ": ".join([type(cause).__name__, *str(cause).strip().splitlines()[-1:]])


def restart_replica(replica: RolloutReplica) -> None:
    """Start a replica anew and wait until it answers; a hybrid one is put to sleep then.

    If it does not start in time, nothing of it is on its GPUs any more when this raises.
    """
    until = time.monotonic() + _RESTART_S
    if replica.rollout_mode is RolloutMode.STANDALONE:
        _replace_dead_workers(replica)
    try:
        _launch(replica, until)
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises for lack of memory; the second time it goes through
        _log.warning("replica %s did not start (%s), once more", replica.replica_rank, story_of(error))
        _launch(replica, until)


def _launch(replica: RolloutReplica, until: float) -> None:
    kill(replica.servers)  # then their names are free
    replica.servers = []
    try:
        _in_workers(replica, _empty_cache, until)
        asyncio.run(asyncio.wait_for(replica.launch_servers(), until - time.monotonic()))
        if replica.rollout_mode is RolloutMode.HYBRID:
            asyncio.run(asyncio.wait_for(replica.sleep(), until - time.monotonic()))
        _in_workers(replica, _forget_server, until)
    except BaseException:
        kill(replica.servers)
        time.sleep(_AGAIN_S)
        raise


def _in_workers(replica: RolloutReplica, function: Callable[[Any], None], until: float) -> None:
    ray.get([w.__ray_call__.remote(function) for w in replica.workers], timeout=max(until - time.monotonic(), 0))


def _replace_dead_workers(replica: RolloutReplica) -> None:
    """Start all workers anew, on the same GPUs, if one of them does not answer."""
    with contextlib.suppress(RayError):  # one is dead, or silent: `GetTimeoutError` is one of them
        ray.get([worker.__ray_ready__.remote() for worker in replica.workers], timeout=_GONE_S)
        return
    kill(replica.workers)
    replica.workers = start_workers(replica, f"_{time.time_ns()}")


def start_workers(replica: RolloutReplica, suffix: str = "") -> list[Any]:
    """The workers of a standalone replica on its pool, as verl's `init_standalone` makes them."""
    workers: list[Any] = RayWorkerGroup(
        resource_pool=replica.resource_pool,
        ray_cls_with_init=replica.get_ray_class_with_init_args(),
        bin_pack=False,
        name_prefix=f"rollout_standalone_{replica.replica_rank}{replica.name_suffix}{suffix}",
        use_gpu=True,
        device_name=get_device_name(),
    ).workers
    return workers


def end_replicas(replicas: Sequence[RolloutReplica]) -> None:
    """Kill their servers; memory of engines that lived is free then."""
    died = ReplicaHealth(replicas).deaths(_LAST_ANSWERS_S)
    kill([server for replica in replicas for server in replica.servers])
    if len(died) < len(replicas):
        time.sleep(_AGAIN_S)


def kill(actors: list[Any]) -> None:
    """Kill actors and wait until they are gone; the engines that servers started end right after them."""
    for actor in actors:
        ray.kill(actor)
    calls = [actor.__ray_ready__.remote() for actor in actors]
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=_GONE_S)


def _empty_cache(_: Any) -> None:
    """Runs in a worker's process: torch keeps what training has freed, and vLLM starts where its whole share is free.
    Parameters are not offloaded: new weights may be on their way from them to other replicas."""
    get_torch_device().empty_cache()


def _forget_server(worker: Any) -> None:
    """Runs in a worker's process: verl's `ServerAdapter` looks its server up once, by name."""
    for part in (worker, *getattr(worker, "worker_dict", {}).values()):
        for name in ("rollout", "server_adapter"):
            adapter = getattr(part, name, None)
            if adapter is not None and hasattr(adapter, "server_handle"):
                adapter.server_handle = None


# ---------------------------------------------------------------- the run


class Watchdog:
    """Asks every actor, again and again, whether it lives; a busy one may take its time to answer.

    Args:
        actors: handles by the name that people know them by.
        servers: the same of rollout servers, which may live while the engine behind them does not.
        last_word: told why; ends the process, which did not end by itself.
    """

    def __init__(
        self,
        actors: Mapping[str, Any],
        servers: Mapping[str, Any] | None = None,
        last_word: Callable[[str], None] = print,
    ) -> None:
        servers = servers or {}
        self._liveness = Liveness({**actors, **servers}, servers)
        self._last_word = last_word
        self._story: str | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def cause_of(self, error: BaseException) -> str | None:
        """The dead actor behind ``error``, in a line; None if all live or the user ended the run.

        Unless a death is known already, all actors are asked once more, which takes up to three seconds.
        """
        with self._lock:
            self._stop.set()
            if self._story is None and isinstance(error, Exception):
                self._liveness.ask()
                self._story = self._look(_LAST_ANSWERS_S)
            return self._story

    def confirm(self) -> None:
        """Ask all actors once more, for up to three seconds; return unless one is known to be dead.

        For a checkpoint: prompts whose groups failed because an actor died, in the seconds before that was noticed,
        would be left out for ever if it were written.

        Raises:
            RunBroken: an actor died.
        """
        with self._lock:
            if self._story is None:
                self._liveness.ask()
                self._story = self._look(_LAST_ANSWERS_S)
            if self._story is not None:
                raise RunBroken(self._story)

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            with self._lock:
                if self._stop.is_set():
                    return
                self._story = self._look()
            if self._story is not None:
                self._end_the_wait(self._story)
                return

    def _end_the_wait(self, story: str) -> None:
        """Interrupt the main thread again and again: an interrupt is lost where it is caught, or where `asyncio.run`,
        under Python's own handler, takes the first for a cancellation, which a blocked loop (`ray.get`) never sees.
        """
        last_resort = threading.Timer(_LAST_RESORT_S, self._last_word, [story])
        last_resort.daemon = True
        last_resort.start()
        main = threading.main_thread().ident
        assert main is not None  # it runs
        while True:
            with self._lock:
                if self._stop.is_set():
                    return
                signal.pthread_kill(main, signal.SIGINT)
            if self._stop.wait(_INTERVAL_S):
                return

    def _look(self, wait_s: float = 0.0) -> str | None:
        return next((f"{name} died: {how}" for name, how in self._liveness.deaths(wait_s).items()), None)
