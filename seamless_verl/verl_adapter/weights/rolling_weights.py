"""The trainer publishes once and trains on; each standing replica pulls in its turn (`staleness.synchronisation`).

publish(7) ─► into shared memory ─► returns                    a thread: who is behind ─► pull ─► done, refused, dead
update_weights(7)   the same, then waits for replicas that have no weights at all, which serve nobody yet
wake(lent, 7)       a replica of the trainer's GPUs wakes with what is published, whatever the trainer holds meanwhile

refused    nothing was loaded: it goes on with its version, and is asked again a little later; after two minutes of it
           its server is killed, and its death is handled as any other
broken     its load failed half-way: one more try, then the same
silent     a pull that takes longer than its limit: the same
dead       told to whoever publishes next (`TransferBroken`), unless the replica's requests told before
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig
from ray.exceptions import RayError, RayTaskError
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutReplica

from seamless_verl.config import WeightsConfig
from seamless_verl.observe.flight import FlightEvent, PullBegan, PullEnded
from seamless_verl.observe.recording import FlightRecorder
from seamless_verl.staleness.synchronisation import Pull, ReplicaWeights, synchronisation_of, too_slow
from seamless_verl.verl_adapter.rollout.llm_client import replica_died
from seamless_verl.verl_adapter.slices.deaths import story_of
from seamless_verl.verl_adapter.weights import weight_store
from seamless_verl.verl_adapter.weights.shared_engine import make_room
from seamless_verl.verl_adapter.weights.weight_carrier import Carrier, carrier_of, node_of
from seamless_verl.verl_adapter.weights.weight_store import SHARED
from seamless_verl.verl_adapter.weights.weight_transfer import GuardedCheckpointManager, TransferBroken, name_of

_log = logging.getLogger(__name__)

_PULL_S = 120.0
_SLOWEST = 50e6  # bytes per second that a copy to another node may take
_WAKE_S = 600.0  # as patient as the scheduler
_LOOK_S = 0.25
_ANSWER_S = 0.2  # of a replica that is asked what it has to do
_AGAIN_S = 2.0  # after a pull that was refused
_REFUSED_S, _REFUSALS = 120.0, 5  # of a replica that refuses: as long, and as often at least
_TRIES = 2  # of a replica whose load failed half-way


@dataclass(slots=True)
class _State:
    """What is known of a replica.

    Attributes:
        servers: its own, also when somebody starts it anew meanwhile and it has none, or others.
        version: of its weights; None: it has none, or broke.
        call: the pull under way, since when, and for how long at most.
        broken, refused: pulls that failed in this way since the last one that did not; refused since when.
        load: requests that run and wait, as of the last answer.
        lost: why it will not come back by itself; empty: it has not died.
    """

    servers: tuple[Any, ...]
    version: int | None = None
    call: Any = None
    since: float = 0.0
    limit_s: float = 0.0
    again_at: float = 0.0
    broken: int = 0
    refused: int = 0
    refused_since: float = 0.0
    load: tuple[int, int] = (0, 0)
    lost: str = ""


class RollingWeights:
    """In the place of verl's `CheckpointEngineManager` of the standing replicas.

    Args:
        actor_wg: the trainer's workers, whose checkpoint engine is ``seamless_shared``.
        folder: where they publish.
        carrier: takes what is published to replicas on other nodes; None: there are none.
        router: ours; told versions by the servers, and asked what requests wait for.
        record: into the flight recorder.
        clock: of the recorder.
        say: on the terminal.
    """

    def __init__(
        self,
        actor_wg: Any,
        replicas: Sequence[RolloutReplica],
        *,
        folder: Path,
        carrier: Carrier | None = None,
        config: WeightsConfig,
        router: Any,
        record: Callable[[FlightEvent], None],
        clock: Callable[[], float],
        say: Callable[[str], None],
        limit_s: float = _PULL_S,
    ) -> None:
        self._actor_wg = actor_wg
        self._folder = folder
        self._carrier = carrier
        self._config = config
        self._keep = config.cache == "keep"
        self._sync = synchronisation_of(config)
        self._router = router
        self._record = record
        self._clock = clock
        self._say, self._told_slow = say, False
        self._published_at, self._pulls_s = 0.0, list[float]()  # seconds of those that changed weights since
        self._limit_s = limit_s
        self._newest: int | None = None
        self._copy_s = 0.0  # to another node a pull begins with a copy of the version
        self._nodes: dict[RolloutReplica, str] = {}
        self._published: dict[str, Any] = {}  # what the last publication took, until it is told
        self._states = _new_states(replicas)
        self._news = threading.Condition()
        self._open = True
        self._broke: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="weights", daemon=True)
        weight_store.remove(folder)  # of an earlier life of this run: its versions may be higher
        self._thread.start()

    @property
    def replicas(self) -> list[RolloutReplica]:
        return list(self._states)

    def add_replicas(self, replicas: Sequence[RolloutReplica]) -> None:
        """They have no weights: the next `update_weights` waits for their first pull."""
        with self._news:
            self._states |= _new_states(replicas)
            self._news.notify_all()

    def remove_replicas(self, replicas: Sequence[RolloutReplica]) -> None:
        with self._news:
            for replica in replicas:
                self._states.pop(replica, None)
                self._nodes.pop(replica, None)  # it may come back on another one

    def publish(self, version: int) -> None:
        """What the trainer's workers hold, unless that version is published already."""
        if self._newest == version:
            return
        began = time.perf_counter()
        told = ray.get(self._actor_wg.update_weights(global_steps=version, mode=SHARED))
        self._published = {key: value for each in told if isinstance(each, dict) for key, value in each.items()}
        self._published["weights/wait_s"] = time.perf_counter() - began
        self._copy_s = self._published.get("weights/bytes", 0.0) / _SLOWEST
        with self._news:
            step_s, self._published_at = self._clock() - self._published_at, self._clock()
            story = too_slow(self._config, len(self._living()), self._pulls_s, step_s)
            self._pulls_s = []
            if story and not self._told_slow:
                self._told_slow = True
                self._say(story)
            self._newest = version
            self._news.notify_all()

    def wake(self, replicas: Sequence[RolloutReplica], version: int) -> dict[RolloutReplica, RayError]:
        """Replicas of the trainer's GPUs, which are lent and sleep, with the published weights: each by itself.

        Returns:
            Those that could not, and why; the others are awake, and their gates still closed.

        Raises:
            RayError: a worker of the trainer did not make room.
        """
        workers = [worker for replica in replicas for worker in replica.workers]  # others may be starting a replica
        ray.get([worker.__ray_call__.remote(make_room) for worker in workers], timeout=_WAKE_S)
        told = str(self._folder), version, self._keep, self._router
        calls = {each: each.servers[0].wake_with.remote(*told, each.server_address, self._carrier) for each in replicas}
        failed: dict[RolloutReplica, RayError] = {}
        until = time.monotonic() + _WAKE_S
        for replica, call in calls.items():
            try:
                limit_s = until + self._copying_s(replica, replica.servers[0]) - time.monotonic()
                ray.get(call, timeout=max(limit_s, 0))
            except RayError as error:
                failed[replica] = error
        return failed

    def _copying_s(self, replica: RolloutReplica, server: Any) -> float:
        """How much longer it may take. Who does not say at once where it is may be elsewhere, and is asked again."""
        if self._carrier is None:
            return 0.0
        if replica not in self._nodes:
            try:
                self._nodes[replica] = ray.get(server.__ray_call__.remote(node_of), timeout=_ANSWER_S)
            except RayError:
                return self._copy_s
        return 0.0 if self._nodes[replica] == self._carrier.node else self._copy_s

    def update_weights(self, global_steps: int) -> dict[str, Any]:
        """`publish`, and wait for replicas without weights.

        Raises:
            TransferBroken: replicas died, or one without weights cannot get any.
        """
        self.publish(global_steps)
        began = time.perf_counter()
        metrics, self._published = self._published, {}
        with self._news:
            while self._broke is None and any(each.version is None and not each.lost for each in self._states.values()):
                self._news.wait(_LOOK_S)
            self.raise_broken()
            lost = {replica: state.lost for replica, state in self._states.items() if state.lost}
        if lost:
            raise TransferBroken(global_steps, lost, "")
        return metrics | {"weights/wait_s": metrics.get("weights/wait_s", 0.0) + time.perf_counter() - began}

    def oldest_version(self) -> int | None:
        """The oldest that a replica serves."""
        version: int | None = ray.get(self._router.oldest_version.remote())
        return version

    def raise_broken(self) -> None:
        """Raise what ended the thread, if anything did: no replica takes new weights any more."""
        if self._broke is not None:
            raise self._broke

    def close(self) -> None:
        """No pull begins any more, and what is published goes."""
        with self._news:
            self._open = False
            self._news.notify_all()
        self._thread.join(timeout=2 * _LOOK_S + _ANSWER_S)
        weight_store.remove(self._folder)

    # ---------------------------------------------------------------- the thread

    def _work(self) -> None:
        try:
            while self._open:
                seen = self._newest
                self._finish()
                self._begin()
                calls = [state.call for state in self._living().values() if state.call is not None]
                if calls:
                    ray.wait(calls, timeout=_LOOK_S)
                    continue
                with self._news:
                    if self._open and self._newest == seen:
                        self._news.wait(_LOOK_S)
        except BaseException as error:
            with self._news:
                self._broke = error
                self._news.notify_all()
            if self._open:
                raise

    def _living(self) -> dict[RolloutReplica, _State]:
        with self._news:
            return {replica: state for replica, state in self._states.items() if not state.lost}

    def _begin(self) -> None:
        states, newest = self._living(), self._newest
        if newest is None or all(state.version == newest for state in states.values()):
            return
        now = time.monotonic()
        self._ask_loads(states)
        named = {name_of(replica): replica for replica in states}
        told = [
            ReplicaWeights(
                replica=name,
                version=states[replica].version,
                pulling=states[replica].call is not None,
                running=states[replica].load[0],
                waiting=states[replica].load[1],
                failed=states[replica].broken + states[replica].refused,
            )
            for name, replica in named.items()
            if states[replica].again_at <= now
        ]
        wanted = ray.get(self._router.wanted.remote(), timeout=self._limit_s)
        for pull in self._sync.pulls(newest, told, wanted):
            replica = named[pull.replica]
            self._pull(replica, states[replica], pull)

    def _ask_loads(self, states: dict[RolloutReplica, _State]) -> None:
        """Whoever does not answer in time is taken to have as much to do as before."""
        calls = {state.servers[0].requests.remote(): state for state in states.values()}
        for call in ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_S)[0]:
            try:
                calls[call].load = ray.get(call)
            except RayError:  # its pull will tell
                continue

    def _pull(self, replica: RolloutReplica, state: _State, pull: Pull) -> None:
        address = replica.server_address
        self._record(PullBegan(at=self._clock(), slice=address, at_least=pull.at_least, reason=pull.reason))
        state.limit_s = self._limit_s + self._copying_s(replica, state.servers[0])
        state.since = time.monotonic()
        told = str(self._folder), pull.at_least, self._keep, self._router, address, self._carrier
        state.call = state.servers[0].pull.remote(*told)

    def _finish(self) -> None:
        for replica, state in self._living().items():
            if state.call is None:
                continue
            is_over = bool(ray.wait([state.call], timeout=0)[0])
            if not is_over and time.monotonic() - state.since < state.limit_s:
                continue
            call, state.call = state.call, None
            try:
                if not is_over:
                    raise TimeoutError(f"its pull has not ended for {state.limit_s:.0f} s")
                done = ray.get(call)
            except (RayError, TimeoutError) as error:
                self._failed(replica, state, error)
                continue
            with self._news:
                state.version, state.broken, state.refused = done.version, 0, 0
                if done.before is not None and done.seconds:  # neither its first one, nor one that found nothing newer
                    self._pulls_s.append(sum(done.seconds.values()))
                self._news.notify_all()
            self._record(
                PullEnded(
                    at=self._clock(),
                    slice=replica.server_address,
                    before=done.before,
                    version=done.version,
                    seconds=done.seconds,
                    running=done.running,
                    waiting=done.waiting,
                )
            )

    def _failed(self, replica: RolloutReplica, state: _State, error: Exception) -> None:
        cause = error.cause if isinstance(error, RayTaskError) else error
        story = story_of(cause)
        before, now = state.version, time.monotonic()
        with self._news:
            if type(cause).__name__ == "WeightsRefused":
                if not state.refused:
                    state.refused_since = now
                    _log.warning("%s refused version %s, is asked again (%s)", name_of(replica), self._newest, story)
                state.refused += 1
                state.again_at = now + _AGAIN_S
                gives_up = state.refused >= _REFUSALS and now - state.refused_since >= _REFUSED_S
            else:
                state.broken += 1
                state.version, state.again_at = None, now
                is_dead = not isinstance(error, RayError) or replica_died(error)
                gives_up = is_dead or state.broken >= _TRIES
            if gives_up:
                state.lost = story
            self._news.notify_all()
        if gives_up:
            _log.warning("%s is ended, it cannot get new weights (%s)", name_of(replica), story)
        self._record(
            PullEnded(
                at=self._clock(), slice=replica.server_address, before=before, version=state.version, failure=story
            )
        )
        if gives_up:  # what it holds is nobody's version, or it does not answer
            for server in state.servers:
                ray.kill(server)


def _new_states(replicas: Sequence[RolloutReplica]) -> dict[RolloutReplica, _State]:
    return {replica: _State(tuple(replica.servers)) for replica in replicas}


def standing_weights(
    rollout: DictConfig,
    config: WeightsConfig,
    actor_wg: Any,
    servers: LLMServerManager,
    recorder: FlightRecorder,
    say: Callable[[str], None],
) -> GuardedCheckpointManager | RollingWeights:
    """What gives weights to a run's standing replicas; ``rollout`` is verl's section, as `adopt_config` left it."""
    engine = omega_conf_to_dataclass(rollout.checkpoint_engine)
    if config.sync == "together":
        return GuardedCheckpointManager(config=engine, actor_wg=actor_wg, replicas=servers.get_replicas())
    folder = Path(engine.engine_kwargs[SHARED]["folder"])
    return RollingWeights(
        actor_wg,
        servers.get_replicas(),
        folder=folder,
        carrier=carrier_of(actor_wg.workers[0], folder),
        config=config,
        router=servers.global_load_balancer,
        record=recorder.record,
        clock=recorder.now,
        say=say,
    )
