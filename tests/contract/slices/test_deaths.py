"""Whose death ends a run, with real Ray actors: one is killed, one is busy, one lives."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")
import ray
from verl.workers.rollout.replica import RolloutMode

from seamless_verl.run.restarts import Exit, RunBroken, exit_of
from seamless_verl.scheduling.issuing import Patience
from seamless_verl.verl_adapter import job
from seamless_verl.verl_adapter.slices import deaths
from seamless_verl.verl_adapter.slices.deaths import Watchdog

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def actor() -> Iterator[Any]:
    class Part:  # defined here, Ray sends it by value and its processes need not import verl
        def pid(self) -> int:
            return os.getpid()

        def work(self) -> None:
            threading.Event().wait()

    ray.init("local", num_cpus=3, include_dashboard=False)
    yield ray.remote(num_cpus=1)(Part)
    ray.shutdown()


@pytest.fixture
def parts(actor: Any) -> Iterator[dict[str, Any]]:
    named = {name: actor.remote() for name in ("trainer worker 0", "rollout replica 0", "rollout replica 1")}
    ray.get([part.pid.remote() for part in named.values()])
    yield named
    for part in named.values():
        ray.kill(part)


@pytest.fixture(autouse=True)
def _this_process_outlives_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run the last resort ends the process, also when the watchdog is gone: what follows may hang, too."""
    monkeypatch.setattr(deaths, "_LAST_RESORT_S", 24 * 3600.0)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """xdist's workers ignore SIGINT; a run's trainer does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _kill(part: Any) -> None:
    os.kill(ray.get(part.pid.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(part.work.remote())


def test_an_error_after_a_death_is_traced_to_it_before_the_next_look(
    parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "_INTERVAL_S", 3600.0)
    with Watchdog(parts) as dog:
        parts["trainer worker 0"].work.remote()
        _kill(parts["rollout replica 0"])
        assert dog.cause_of(KeyboardInterrupt()) is None, "the user ends it"
        told = dog.cause_of(ValueError("32 prompt groups failed"))
        assert told is not None
        assert told.startswith("rollout replica 0 died: ActorDiedError")
        assert dog.cause_of(ValueError("another")) == told


def test_nobody_is_blamed_for_an_error_while_all_live_or_are_busy(
    parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "_LAST_ANSWERS_S", 0.5)
    with Watchdog(parts) as dog:
        parts["trainer worker 0"].work.remote()
        assert dog.cause_of(ValueError("no rows")) is None


def test_no_checkpoint_is_written_after_a_death_that_nobody_noticed_yet(
    parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "_INTERVAL_S", 3600.0)
    with Watchdog(parts) as dog:
        dog.confirm()
        _kill(parts["rollout replica 0"])
        with pytest.raises(RunBroken, match="rollout replica 0 died: ActorDiedError"):
            dog.confirm()


@pytest.mark.usefixtures("interruptible")
def test_whoever_waits_for_a_dead_actor_is_interrupted(parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "_INTERVAL_S", 0.05)

    def wait_for_the_dead() -> None:
        _kill(parts["rollout replica 1"])
        threading.Event().wait(60)

    with Watchdog(parts) as dog:
        with pytest.raises(KeyboardInterrupt) as interrupted:
            wait_for_the_dead()
        told = dog.cause_of(interrupted.value)
        assert told is not None
        assert told.startswith("rollout replica 1 died: ActorDiedError")


@pytest.mark.usefixtures("interruptible")
def test_whoever_blocks_in_a_coroutine_is_interrupted_too(
    parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As verl's transfers did: `asyncio.run` turns the first interrupt into a cancellation that nobody sees."""
    monkeypatch.setattr(deaths, "_INTERVAL_S", 0.2)

    async def transfer() -> None:
        parts["trainer worker 0"].work.remote()
        _kill(parts["rollout replica 1"])
        ray.get(parts["trainer worker 0"].work.remote(), timeout=60)

    with Watchdog(parts) as dog:
        with pytest.raises(KeyboardInterrupt) as interrupted:
            asyncio.run(transfer())
        told = dog.cause_of(interrupted.value)
        assert told is not None
        assert told.startswith("rollout replica 1 died: ActorDiedError")


def test_a_server_without_its_engine_counts_as_dead(actor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "_INTERVAL_S", 3600.0)
    server = actor.remote()

    def lose_engine(part: Any) -> None:
        part.engine = type("Engine", (), {"errored": True})()

    with Watchdog({}, {"rollout replica 0": server}) as dog:
        assert dog.cause_of(ValueError("nothing yet")) is None
    ray.get(server.__ray_call__.remote(lose_engine))
    with Watchdog({}, {"rollout replica 0": server}) as dog:
        told = dog.cause_of(ValueError("32 prompt groups failed"))
        assert told == "rollout replica 0 died: its engine process ended (it is gone)"
    ray.kill(server)


def test_a_restart_that_takes_too_long_ends_before_others_may_have_its_gpus_and_leaves_nothing_on_them(
    actor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidying_s = deaths._LAST_ANSWERS_S + 4 * deaths._GONE_S + 3 * deaths._AGAIN_S
    assert deaths._RESTART_S + tidying_s < Patience().restart_s
    monkeypatch.setattr(deaths, "_RESTART_S", 5.0)
    monkeypatch.setattr(deaths, "_AGAIN_S", 0.1)
    launched: list[Any] = []

    async def launch() -> None:
        launched.append(actor.options(num_cpus=0).remote())
        replica.servers.append(launched[-1])
        if len(launched) == 1:
            raise RuntimeError("no memory")
        await asyncio.sleep(60)

    replica = SimpleNamespace(
        rollout_mode=RolloutMode.HYBRID, replica_rank=0, workers=[], servers=[], launch_servers=launch
    )
    with pytest.raises(asyncio.TimeoutError):
        deaths.restart_replica(replica)  # type: ignore[arg-type]
    assert len(launched) == 2, "it was tried again"
    for server in launched:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(server.pid.remote())


def test_a_worker_that_does_not_forget_the_last_server_leaves_no_engine_behind(
    actor: Any, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "_RESTART_S", 5.0)
    monkeypatch.setattr(deaths, "_AGAIN_S", 0.1)
    launched: list[Any] = []

    async def launch() -> None:
        launched.append(actor.options(num_cpus=0).remote())
        replica.servers.append(launched[-1])

    async def sleep() -> None:
        await launched[-1].pid.remote()

    def call(_: Any) -> Any:
        return parts["trainer worker 0"].work.remote() if launched else ray.put(None)

    replica = SimpleNamespace(
        rollout_mode=RolloutMode.HYBRID,
        replica_rank=0,
        workers=[SimpleNamespace(__ray_call__=SimpleNamespace(remote=call))],
        servers=[],
        launch_servers=launch,
        sleep=sleep,
    )
    with pytest.raises((asyncio.TimeoutError, ray.exceptions.GetTimeoutError)):
        deaths.restart_replica(replica)  # type: ignore[arg-type]
    assert launched
    for server in launched:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(server.pid.remote())


@pytest.mark.usefixtures("actor")
def test_an_engine_starts_when_the_workers_on_its_gpus_have_given_back_what_they_do_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM takes its share of the card or does not start; torch's allocator keeps what training has freed."""
    monkeypatch.setattr(deaths, "_AGAIN_S", 0.0)
    happened: list[str] = []
    device = SimpleNamespace(empty_cache=lambda: happened.append("given back"))
    monkeypatch.setattr(deaths, "get_torch_device", lambda: device)

    async def launch() -> None:
        happened.append("started")
        if happened.count("started") == 1:
            raise RuntimeError("no memory")

    async def sleep() -> None:
        happened.append("sleeps")

    def call(function: Any) -> Any:
        return ray.put(function(worker))

    worker = SimpleNamespace(__ray_call__=SimpleNamespace(remote=call))
    replica = SimpleNamespace(
        rollout_mode=RolloutMode.HYBRID,
        replica_rank=0,
        workers=[worker, worker],
        servers=[],
        launch_servers=launch,
        sleep=sleep,
    )
    deaths.restart_replica(replica)  # type: ignore[arg-type]
    assert happened == [*["given back"] * 2, "started", *["given back"] * 2, "started", "sleeps"]


@pytest.mark.usefixtures("actor")
def test_workers_that_are_too_busy_to_give_memory_back_hold_a_restart_up_no_longer_than_it_may_take(
    parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "_RESTART_S", 0.5)
    monkeypatch.setattr(deaths, "_AGAIN_S", 0.0)
    launched: list[str] = []

    async def launch() -> None:
        launched.append("engine")

    worker = SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda _: parts["trainer worker 0"].work.remote()))
    replica = SimpleNamespace(
        rollout_mode=RolloutMode.HYBRID,
        replica_rank=0,
        workers=[worker],
        servers=[],
        launch_servers=launch,
        sleep=launch,
    )
    with pytest.raises(ray.exceptions.GetTimeoutError):
        deaths.restart_replica(replica)  # type: ignore[arg-type]
    assert launched == []


def test_memory_of_an_engine_that_lived_is_waited_for(actor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(deaths, "time", SimpleNamespace(sleep=waited.append, monotonic=time.monotonic))
    server = actor.options(num_cpus=0).remote()
    replica: Any = type("Replica", (), {"rollout_mode": RolloutMode.HYBRID, "servers": [server]})()
    deaths.end_replicas([replica])
    assert waited == [deaths._AGAIN_S]
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(server.pid.remote())
    deaths.end_replicas([replica])
    deaths.end_replicas([])
    assert waited == [deaths._AGAIN_S], "what died before holds nothing any more"


def test_an_error_is_told_in_a_line_also_where_it_has_no_words() -> None:
    handed = ray.exceptions.RayTaskError("wake", "Traceback …\n" * 20, ValueError("first\nlast "))
    assert deaths.story_of(handed) == "ValueError: last"
    assert deaths.story_of(asyncio.TimeoutError()) == "TimeoutError"


@pytest.mark.filterwarnings("ignore")  # of verl's engines, at import
def test_the_router_transferqueue_trainer_and_reward_workers_are_watched_by_name(actor: Any) -> None:
    """As `job` names them; TransferQueue's actors are found by the names that it gives them itself."""
    from seamless_verl.verl_adapter.dataloader.replaced_workers import ReplacingManager

    router, trainer, reward = (actor.options(num_cpus=0).remote() for _ in range(3))
    named = [("TransferQueueController", "transfer_queue"), ("TransferQueueStorageUnit#0", None)]
    kept = [actor.options(num_cpus=0, name=name, namespace=where).remote() for name, where in named]
    run = SimpleNamespace(
        actor_rollout_wg=SimpleNamespace(workers=[trainer]),
        get_reward_handles=lambda: [reward],
        standalone_server_manager=SimpleNamespace(get_replicas=list, global_load_balancer=router),
    )
    parts = job._actors(run, SimpleNamespace())
    assert sorted(parts) == [
        "TransferQueueController",
        "TransferQueueStorageUnit#0",
        "load balancer",
        "reward worker 0",
        "trainer worker 0",
    ]
    of_a_user = SimpleNamespace(agent_loop_workers=[trainer])
    assert job._actors(run, of_a_user).keys() - parts.keys() == {"rollout worker 0"}
    of_ours = object.__new__(ReplacingManager)
    of_ours.agent_loop_workers = [trainer]
    run.rows = SimpleNamespace(outlives_workers=True)
    assert job._actors(run, of_ours).keys() == parts.keys(), "who replaces its workers goes on without one"
    run.rows = SimpleNamespace(outlives_workers=False)
    assert job._actors(run, of_ours).keys() - parts.keys() == {"rollout worker 0"}, "nobody would notice"
    ray.get([part.pid.remote() for part in (*parts.values(), *kept)])
    for name, part in parts.items():
        with Watchdog({name: part}) as dog:
            _kill(part)
            told = dog.cause_of(ValueError("what followed from it"))
        assert told is not None
        assert told.startswith(f"{name} died: ActorDiedError")


@pytest.mark.parametrize(
    ("module", "name", "code"),
    [
        ("ray.exceptions", "ActorDiedError", Exit.DIED),
        ("ray.exceptions", "WorkerCrashedError", Exit.DIED),
        ("vllm.v1.engine.exceptions", "EngineDeadError", Exit.DIED),
        ("torch", "OutOfMemoryError", Exit.OUT_OF_MEMORY),
        ("ray.exceptions", "OutOfMemoryError", Exit.OUT_OF_MEMORY),
        ("builtins", "ValueError", Exit.FAILED),
    ],
)
def test_what_ray_hands_over_is_told_from_a_users_error_by_its_class(module: str, name: str, code: Exit) -> None:
    kind = getattr(importlib.import_module(module), name)
    cause = kind("in another process") if name != "ActorDiedError" else kind()
    handed = ray.exceptions.RayTaskError("train", "the traceback", cause).as_instanceof_cause()
    assert exit_of(handed) is code
    assert exit_of(cause) is code


def test_an_error_of_ours_is_told_without_the_traceback_of_the_process_that_raised_it() -> None:
    class RayTaskError(Exception):
        cause = RunBroken("no engine. Fix: start one.")

    assert job._told(RayTaskError("Traceback …\n" * 20)) == "RunBroken: no engine. Fix: start one."
    assert job._told(ValueError("a\nb")) == "ValueError: a\nb"
    # As Ray tells of an actor that did not begin; from Python 3.11 on with a line of marks below each line of code.
    remote = """died in its creation task, ray::Server.__init__() (pid=1)
  File "server.py", line 20, in <module>
    import engine
    ^^^^^^^^^^^^^
ImportError: no engine
install one"""
    assert job._told(RuntimeError(remote)) == "RuntimeError: ImportError: no engine\ninstall one"
    assert job._told(RuntimeError('  File "cut off')) == 'RuntimeError: File "cut off'
