"""The trainer waits for nobody who serves; a pull that fails leaves a replica as it was, or out.

At Ray's boundary: calls are futures that the tests complete.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seamless_verl.run.restarts import Exit, exit_of

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def fails(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


class FakeRay:
    """Ray's calls on futures of this process.

    Attributes:
        killed: servers, in order.
        published: versions, in order.
        made_room: workers of the trainer that did, in order.
        nbytes: of a version.
    """

    def __init__(self) -> None:
        self.killed: list[Any] = []
        self.published: list[int] = []
        self.made_room: list[Any] = []
        self.nbytes = 1.0
        self.has_killed = threading.Event()

    def get(self, call: Any, timeout: float | None = None) -> Any:
        from ray.exceptions import GetTimeoutError

        try:
            return [self.get(each) for each in call] if isinstance(call, list) else call.result(timeout)
        except TimeoutError:
            raise GetTimeoutError from None

    def wait(self, calls: list[Future[Any]], num_returns: int = 1, timeout: float | None = None) -> Any:
        ready = [call for call in calls if call.done()]
        if len(ready) < num_returns and timeout:
            wait(calls, timeout, FIRST_COMPLETED if num_returns == 1 else ALL_COMPLETED)
            ready = [call for call in calls if call.done()]
        return ready, [call for call in calls if not call.done()]

    def kill(self, server: Any) -> None:
        self.killed.append(server)
        self.has_killed.set()


class Replica:
    """A replica whose pulls end when the test says so, and the first one at once.

    Attributes:
        answers: how the next pulls end; none left: they do not.
        asked: set when a pull has begun that does not end.
        wakes: how its wake ends; by itself it does not.
        node: where it is, once it says so.
    """

    def __init__(self, rank: int) -> None:
        self.replica_rank, self.server_address = rank, f"replica-{rank}"
        self.answers: list[Any] = []
        self.pulls: list[int] = []
        self.asked = threading.Event()
        self.open: Future[Any] = Future()
        self.version: int | None = None
        self._news = threading.Condition()
        self.servers = [
            SimpleNamespace(
                pull=SimpleNamespace(remote=self._pull),
                requests=SimpleNamespace(remote=lambda: done((1, 0))),
                wake_with=SimpleNamespace(remote=self._wake),
                __ray_call__=SimpleNamespace(remote=lambda _: self.node),
            )
        ]
        self.workers: list[Any] = []
        self.node: Future[str] = done("here")
        self.wakes: Future[Any] = Future()
        self.woken: list[tuple[int, str]] = []

    def _pull(self, folder: str, at_least: int, keep: bool, router: Any, address: str, carrier: Any) -> Future[Any]:
        self.pulls.append(at_least)
        if not self.answers:
            self.open = Future()
            self.asked.set()
            return self.open
        answer = self.answers.pop(0)
        if answer == "nothing newer":
            return done(SimpleNamespace(before=self.version, version=self.version, seconds={}, running=1, waiting=0))
        return fails(answer) if isinstance(answer, BaseException) else done(self.pulled(at_least))

    def _wake(self, folder: str, version: int, keep: bool, router: Any, address: str, carrier: Any) -> Future[Any]:
        self.woken.append((version, address))
        return self.wakes

    def pulled(self, version: int) -> Any:
        with self._news:
            before, self.version = self.version, version
            self._news.notify_all()
        seconds = {"load": 300.0 if before is None else 3.0}
        return SimpleNamespace(before=before, version=version, seconds=seconds, running=1, waiting=0)

    def has(self, version: int) -> bool:
        """Wait for it."""
        with self._news:
            return self._news.wait_for(lambda: self.version == version, 20)


def failure(name: str, text: str = "it failed") -> BaseException:
    """As Ray raises what a server raised."""
    from ray.exceptions import RayTaskError

    return RayTaskError("pull", "remote traceback", type(name, (Exception,), {})(text))


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    from seamless_verl.verl_adapter.weights import rolling_weights

    made = FakeRay()
    monkeypatch.setattr(rolling_weights, "ray", made)
    monkeypatch.setattr(rolling_weights, "_AGAIN_S", 0.05)
    return made


@pytest.fixture
def start(fake_ray: FakeRay, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    from seamless_verl.config import WeightsConfig
    from seamless_verl.verl_adapter.weights.rolling_weights import RollingWeights

    made: list[Any] = []

    def begin(*replicas: Replica, limit_s: float = 60.0, carrier: Any = None, **told: Any) -> Any:
        def publish(global_steps: int, mode: str) -> list[Future[Any]]:
            fake_ray.published.append(global_steps)
            return [done({"weights/bytes": fake_ray.nbytes})]

        trainers: Any = SimpleNamespace(update_weights=publish)
        router: Any = SimpleNamespace(wanted=SimpleNamespace(remote=lambda: done(None)))
        some: Any = replicas
        config = WeightsConfig(sync="rolling")
        events: list[Any] = []
        weights = RollingWeights(
            trainers,
            some,
            folder=tmp_path / "published",
            carrier=carrier,
            config=config,
            router=router,
            record=events.append,
            **{"clock": lambda: 0.0, "say": print} | told,
            limit_s=limit_s,
        )
        made.append(weights)
        for replica in replicas:
            replica.answers.append("whole")
        weights.update_weights(1)
        return weights, events

    yield begin
    for weights in made:
        weights.close()


def test_the_trainer_waits_for_nobody_who_serves(start: Callable[..., Any]) -> None:
    first, second = Replica(0), Replica(1)
    weights, events = start(first, second)
    assert (first.version, second.version) == (1, 1)
    weights.update_weights(2)  # returns, though nobody has it
    assert first.asked.wait(10) or second.asked.wait(10)
    weights.update_weights(3)
    assert not (first.asked.is_set() and second.asked.is_set()), "both pull at once"
    slow, other = (first, second) if first.asked.is_set() else (second, first)
    other.answers.append("whole")
    slow.answers.append("whole")  # it pulled 2, and 3 is there by now
    slow.open.set_result(slow.pulled(2))
    assert first.has(3)
    assert second.has(3)
    assert [event.version for event in events if type(event).__name__ == "PullEnded"][:2] == [1, 1]


@pytest.mark.parametrize(("step_s", "told"), [(7.0, False), (4.0, True)])
def test_replicas_that_cannot_keep_up_are_told_of_once(
    start: Callable[..., Any], fake_ray: FakeRay, step_s: float, told: bool
) -> None:
    from seamless_verl.verl_adapter.weights.weight_transfer import TransferBroken

    lost, replicas, said, now = Replica(2), [Replica(0), Replica(1)], [], [0.0]
    weights, _ = start(*replicas, lost, clock=lambda: now[0], say=said.append)
    lost.answers += [failure("ReplicaBroken")] * 2
    for version in range(2, 5):
        now[0] += step_s
        for replica in replicas:
            replica.answers += ["nothing newer", "whole"]
        with contextlib.suppress(TransferBroken):
            weights.update_weights(version)
        assert all(replica.has(version) for replica in replicas)
        assert fake_ray.has_killed.wait(20)
    story = "replicas take new weights more slowly than they come (2 × 3 s, steps of 4 s): seamless.weights.at_once=2"
    assert said == ([story] if told else [])


def test_who_joins_has_weights_before_the_call_returns(start: Callable[..., Any]) -> None:
    first, late = Replica(0), Replica(1)
    weights, _ = start(first)
    late.answers.append("whole")
    weights.add_replicas([late])
    weights.update_weights(1)
    assert late.version == 1


def test_what_is_refused_keeps_its_version_and_is_asked_again(start: Callable[..., Any], fake_ray: FakeRay) -> None:
    replica = Replica(0)
    weights, events = start(replica)
    replica.answers += [failure("WeightsRefused"), failure("WeightsRefused"), failure("WeightsRefused"), "whole"]
    weights.update_weights(2)
    assert replica.has(2)
    assert replica.pulls == [1, 2, 2, 2, 2]
    assert not fake_ray.killed
    assert [event.version for event in events if getattr(event, "failure", "")] == [1, 1, 1]


def test_what_is_refused_for_good_is_said_once_and_given_up(
    start: Callable[..., Any], fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as on a node whose shared memory holds one version, and not two."""
    from seamless_verl.verl_adapter.weights import rolling_weights
    from seamless_verl.verl_adapter.weights.weight_transfer import TransferBroken

    monkeypatch.setattr(rolling_weights, "_REFUSED_S", 0.2)
    replica = Replica(0)
    weights, _ = start(replica)
    replica.answers += [failure("WeightsRefused", "could not copy: no space left")] * 1000
    with contextlib.suppress(TransferBroken):  # it may be given up before the call returns
        weights.update_weights(2)
    assert fake_ray.has_killed.wait(20), "or every request waits for it"
    assert len(replica.pulls) > 4
    asked_again, given_up = [record.getMessage() for record in caplog.records]
    assert "rollout replica 0 refused version 2" in asked_again
    assert "rollout replica 0 is ended" in given_up
    with pytest.raises(TransferBroken, match="rollout replica 0: WeightsRefused: could not copy: no space left"):
        weights.update_weights(3)


@pytest.mark.parametrize("before", [[], ["WeightsRefused", "WeightsRefused"]])
def test_a_whole_load_cures_what_broke(start: Callable[..., Any], fake_ray: FakeRay, before: list[str]) -> None:
    replica = Replica(0)
    weights, _ = start(replica)
    replica.answers += [failure(name) for name in before]
    replica.answers += [failure("ReplicaBroken", ""), "whole"]  # an error without words, too
    weights.update_weights(2)
    assert replica.has(2)
    assert not fake_ray.killed


@pytest.mark.parametrize("how", ["broken twice", "dead", "silent"])
def test_who_cannot_be_cured_is_out_and_named(start: Callable[..., Any], fake_ray: FakeRay, how: str) -> None:
    from ray.exceptions import RayActorError

    from seamless_verl.verl_adapter.weights.weight_transfer import TransferBroken

    lost, other = Replica(0), Replica(1)
    weights, _ = start(lost, other, limit_s=0.3 if how == "silent" else 60.0)
    lost.answers += {
        "broken twice": [failure("ReplicaBroken"), failure("ReplicaBroken")],
        "dead": [RayActorError()],
        "silent": [],
    }[how]
    other.answers.append("whole")
    with contextlib.suppress(TransferBroken):  # it may be known before the call returns, or later
        weights.update_weights(2)
    assert fake_ray.has_killed.wait(20)
    assert fake_ray.killed == lost.servers
    with pytest.raises(TransferBroken, match="rollout replica 0") as raised:
        weights.update_weights(2)
    assert list(raised.value.dead) == [lost]
    assert exit_of(raised.value) is Exit.DIED, "before the first step nobody goes on without it: the run starts again"
    weights.remove_replicas([lost])
    assert other.has(2)
    other.answers.append("whole")
    weights.update_weights(3)
    assert other.has(3)


def test_one_that_is_started_anew_while_replicas_are_asked_what_they_do_hurts_nobody(start: Callable[..., Any]) -> None:
    dead, other = Replica(0), Replica(1)
    weights, _ = start(dead, other)
    (old,) = dead.servers

    def start_anew() -> Future[Any]:
        """On another thread, when its death is known; until the new server is there it has none."""
        weights.remove_replicas([dead])
        dead.servers = []
        return done((1, 0))

    old.requests = SimpleNamespace(remote=start_anew)
    dead.answers.append("whole")
    other.answers.append("whole")
    weights.update_weights(2)
    assert other.has(2)
    weights.raise_broken()


def test_what_ends_the_thread_is_told_to_who_waits_for_rows(start: Callable[..., Any]) -> None:
    from ray.exceptions import RayActorError

    replica = Replica(0)
    weights, _ = start(replica)
    weights.raise_broken()
    weights._router.wanted = SimpleNamespace(remote=lambda: fails(RayActorError()))
    weights.publish(2)
    weights._thread.join(20)
    with pytest.raises(RayActorError):
        weights.raise_broken()


@pytest.mark.parametrize("node", ["here", "there", "unknown"])
def test_a_pull_to_another_node_has_time_for_the_copy(start: Callable[..., Any], fake_ray: FakeRay, node: str) -> None:
    """By what the trainer's worker published: this process may be on a node that has nothing of it."""
    fake_ray.nbytes = float(64 << 30)
    replica = Replica(0)
    replica.node = Future() if node == "unknown" else done(node)
    weights, _ = start(replica, limit_s=0.3, carrier=SimpleNamespace(node="here"))
    weights.update_weights(2)
    assert replica.asked.wait(10)
    if node == "here":
        assert fake_ray.has_killed.wait(10), "nothing is copied"
        return
    assert not fake_ray.has_killed.wait(1.5), "64 GiB are under way"
    replica.open.set_result(replica.pulled(2))
    assert replica.has(2)


def test_a_version_is_published_once_and_what_that_took_is_told_once(
    start: Callable[..., Any], fake_ray: FakeRay
) -> None:
    replica = Replica(0)
    weights, _ = start(replica)
    weights.publish(2)
    weights.publish(2)
    assert weights.update_weights(2)["weights/bytes"] == 1.0
    assert "weights/bytes" not in weights.update_weights(2)
    assert fake_ray.published == [1, 2]


def test_lent_replicas_wake_each_by_itself_with_what_is_published(
    start: Callable[..., Any], fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import GetTimeoutError, RayActorError

    from seamless_verl.verl_adapter.weights import rolling_weights

    monkeypatch.setattr(rolling_weights, "_WAKE_S", 1.0)
    fake_ray.nbytes = float(64 << 30)
    well, dead, *silent = lent = [Replica(number) for number in range(5, 11)]

    def worker(name: str) -> Any:
        def call(function: Any) -> Future[Any]:
            return done(fake_ray.made_room.append(name) if function.__name__ == "make_room" else None)

        return SimpleNamespace(__ray_call__=SimpleNamespace(remote=call))

    well.workers, dead.workers = [worker("5a"), worker("5b")], [worker("6")]
    well.wakes.set_result(None)
    dead.wakes.set_exception(RayActorError())
    weights, _ = start(Replica(0), carrier=SimpleNamespace(node="here"))
    began = time.monotonic()
    failed = weights.wake(lent, 1)
    assert time.monotonic() - began < 3, "they have the same second, and nothing is copied"
    assert {replica: type(error) for replica, error in failed.items()} == {
        dead: RayActorError,
        **dict.fromkeys(silent, GetTimeoutError),
    }
    assert [replica.woken for replica in lent] == [[(1, f"replica-{number}")] for number in range(5, 11)]
    assert fake_ray.made_room == ["5a", "5b", "6"], "those whose GPUs are lent"
    assert fake_ray.published == [1], "whatever they hold by now"
