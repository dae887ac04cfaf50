"""What our slices tell verl's replicas, router and checkpoint engine, and that one loan stays within its files."""

import asyncio
import subprocess
import sys
import threading
from unittest import mock

import pytest
from ray.exceptions import RayError

from seamless_verl.verl_adapter.weights.weight_transfer import TransferBroken
from tests.replicas import FakeStore, fake_slices, given

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def edge():
    with given():
        yield fake_slices(["t/0", "t/1"], ["r/0"])


@pytest.fixture(autouse=True)
def ended(monkeypatch):
    """Addresses of replicas that were; since then their servers are dead, and who lived before said nothing."""
    from seamless_verl.verl_adapter.slices import replica_slices

    class Health:
        def __init__(self, replicas):
            self._replicas = replicas

        def deaths(self, wait_s):
            return {each: "ActorDiedError" for each in self._replicas if each.server_address in found}

        def silent(self, for_s):
            return {}

    found = []
    monkeypatch.setattr(replica_slices, "ReplicaHealth", Health)
    monkeypatch.setattr(replica_slices, "end_replicas", lambda them: found.extend(each.server_address for each in them))
    return found


def told(slices, name):
    return slices._replicas[name].told


def test_a_lent_slice_wakes_with_the_weights_and_the_others_sleep_again(edge):
    slices, router = edge
    slices.unregister(["t/0", "t/1"])
    assert router.on_it == {"r/0"}
    slices.hold(["t/0"])
    slices.register(["t/0"])
    assert router.on_it == {"r/0", "t/0"}
    slices.wake(["t/0"], version=3, serving=[])
    assert (told(slices, "t/0"), told(slices, "t/1")) == (["abort", "resume"], ["sleep"])
    assert slices._hybrid_weights.versions == [3]
    slices.wake(["t/1"], version=3, serving=["t/0"])
    assert told(slices, "t/0") == ["abort", "resume"], "it serves on"
    slices.even_out()
    assert router.evened == [{"r/0", "t/0"}]
    del router.even_out  # a router of the user's own, which spreads conversations anew when it is told to
    slices.even_out()
    assert router.evened == [{"r/0", "t/0"}]


@pytest.mark.parametrize("fails_in", ["weights", "resume"])
def test_when_a_wake_fails_all_sleep_but_who_serves_and_who_died(fails_in):
    """verl has woken all of them by then, and the trainer may get its GPUs next."""

    def dies(address, what):
        if what == fails_in == "weights":
            raise TransferBroken(3, {slices._replicas["t/1"]: "killed"}, "")
        if what == fails_in:
            raise RayError("killed")

    with given():
        slices, _ = fake_slices(["t/0", "t/1", "t/2", "t/3"], ["r/0"], dies)
        with pytest.raises((TransferBroken, RayError)):
            slices.wake(["t/0"], version=3, serving=["t/3"])
    asleep = ["t/0", "t/2"] if fails_in == "weights" else ["t/0", "t/1", "t/2"]
    assert [told(slices, name)[-2:] for name in asleep] == [["abort", "sleep"]] * len(asleep)
    assert told(slices, "t/3") == []
    assert fails_in == "resume" or told(slices, "t/1") == []


def test_when_a_wake_with_published_weights_fails_only_those_sleep_that_were_to_wake(monkeypatch):
    store = FakeStore()
    monkeypatch.setattr(store, "wake", mock.Mock(side_effect=RayError("no room")))
    with given():
        slices, _ = fake_slices(["t/0", "t/1", "t/2"], ["r/0"], store=store)
        with pytest.raises(RayError, match="no room"):
            slices.wake(["t/0"], version=3, serving=["t/1"])
    assert [told(slices, name) for name in ("t/0", "t/1", "t/2")] == [["abort", "sleep"], [], []]


def test_who_did_not_answer_when_a_wake_failed_counts_as_dead_until_it_is_back(monkeypatch):
    """It was not put to sleep: nobody else would know of it, were it to answer a moment later."""
    with given():
        slices, _ = fake_slices(["t/0", "t/1"], ["r/0"])
        monkeypatch.setattr(slices._hybrid_weights, "update_weights", mock.Mock(side_effect=RayError("killed")))
        with mock.patch.object(slices, "dead", return_value={"t/1": "silent"}), pytest.raises(RayError):
            slices.wake(["t/0"], version=3, serving=[])
        assert (told(slices, "t/0"), told(slices, "t/1")) == (["abort", "sleep"], [])
        assert slices.dead(["t/0", "t/1"]) == {"t/1": "silent"}


def test_with_published_weights_each_lent_slice_takes_them_by_itself_and_nobody_else_notices():
    """One that cannot is named, and the other generates: verl's own transfer would have failed for both."""
    store = FakeStore()
    store.refuses["t/1"] = error = RayError("killed")
    with given():
        slices, _ = fake_slices(["t/0", "t/1", "t/2"], ["r/0"], store=store)
        slices.publish(3)
        assert slices.wake(["t/0", "t/1"], version=3, serving=[]) == {"t/1": error}
    assert (store.published, store.woken) == ([3], [("t/0", 3)])
    assert [told(slices, name) for name in ("t/0", "t/1", "t/2")] == [["resume"], [], []]
    assert slices._hybrid_weights.versions == [], "the trainer's weights may be newer by now"


def test_what_is_taken_back_is_interrupted_before_it_sleeps_and_who_cannot_is_named():
    def dies(address, what):
        if (address, what) == ("t/1", "abort"):
            raise RayError("killed")

    with given():
        slices, _ = fake_slices(["t/0", "t/1"], ["r/0"], dies)
        failed = slices.interrupt(["t/0", "t/1"])
    assert told(slices, "t/0") == ["abort", "sleep"]
    assert list(failed) == ["t/1"]


def test_why_a_slice_was_not_handed_back_outlives_the_end_of_its_replica(ended, monkeypatch):
    from seamless_verl.verl_adapter.slices import replica_slices

    with given():
        slices, _ = fake_slices(["t/0"], ["r/0"], mock.Mock(side_effect=RayError("Traceback\nits engine hangs")))
        slices.interrupt(["t/0"])
        assert ended == ["t/0"]
        assert slices.dead(["t/0"]) == {"t/0": "RayError: its engine hangs"}
        monkeypatch.setattr(replica_slices, "restart_replica", lambda replica: ended.clear())
        slices.restart("t/0").result(timeout=20)
    assert slices.dead(["t/0"]) == {}


@pytest.mark.parametrize("hangs_in", ["abort_all_requests", "sleep", "resume_generation"])
def test_an_engine_that_hangs_is_a_failure_and_ended_before_the_trainer_may_have_its_gpus(monkeypatch, ended, hangs_in):
    from seamless_verl.verl_adapter.slices import replica_slices

    async def forever(*_, **__):
        await asyncio.Event().wait()

    monkeypatch.setattr(replica_slices, "_ANSWER_S", 0.2)
    with given():
        slices, _ = fake_slices(["t/0", "t/1"], ["r/0"])
        monkeypatch.setattr(slices._replicas["t/1"], hangs_in, forever)
        if hangs_in == "resume_generation":
            with pytest.raises(RayError, match="has not answered"):
                slices.wake(["t/0", "t/1"], version=3, serving=[])
            assert told(slices, "t/0")[-2:] == ["abort", "sleep"]
            return
        failed = slices.interrupt(["t/0", "t/1"])
    assert (list(failed), ended) == (["t/1"], ["t/1"])
    assert told(slices, "t/0") == ["abort", "sleep"]


def test_standing_replicas_take_weights_together_and_one_that_is_out_takes_none(edge):
    slices, router = edge
    slices.sync(4)
    assert slices._standing_weights.versions == [4]
    slices.leave_out(["r/0"])
    assert "r/0" not in router.on_it
    slices.sync(5)
    assert slices._standing_weights.versions == [4], "nobody is left to take them"
    slices.take_in(["r/0"])
    slices.take_in(["r/0"])
    assert slices._standing_weights.replicas == [slices._replicas["r/0"]]


def test_a_replica_of_the_trainers_gpus_that_is_out_is_ended_though_it_may_live(edge, ended):
    """As one whose weights were refused three times in a row, which nobody starts again."""
    slices, router = edge
    slices.leave_out(["t/0", "r/0"])
    assert (router.on_it, ended) == ({"t/1"}, ["t/0"])
    assert slices._standing_weights.replicas == []
    del ended[:]
    assert list(slices.dead(["t/0", "t/1"])) == ["t/0"], "until it is back, also while its new servers start"


def test_the_router_is_told_what_outlasts_a_loan(edge):
    slices, router = edge
    slices.set_horizon(["t/0"], frozenset({"s"}))
    assert router.outlasting == {"s"}


def test_replicas_are_restarted_side_by_side(edge, monkeypatch):
    from seamless_verl.verl_adapter.slices import replica_slices

    slices, _ = edge
    both = threading.Barrier(2, timeout=10)
    monkeypatch.setattr(replica_slices, "restart_replica", lambda replica: both.wait())
    for restart in (slices.restart("t/0"), slices.restart("r/0")):
        restart.result(timeout=20)


_ENDS_DURING_A_RESTART = """
import threading
from seamless_verl.verl_adapter.slices import replica_slices
from tests.replicas import fake_slices

replica_slices.restart_replica = lambda replica: threading.Event().wait()
fake_slices([], ["r/0"])[0].restart("r/0")
"""


def test_a_run_that_ends_does_not_wait_for_a_replica_on_its_way_back():
    subprocess.run([sys.executable, "-c", _ENDS_DURING_A_RESTART], check=True, timeout=120)


def test_a_loan_passes_few_of_our_files():
    from benchmarks.house_loan import loan_files

    files = {*loan_files()}
    assert {"scheduling/scheduler.py", "verl_adapter/slices/slice_driver.py", "observe/scheduler_flight.py"} <= files
    assert len(files) <= 18
