"""The driver under a real scheduler, with replicas that die at the worst moment. No Ray cluster is started."""

import pytest
from ray.exceptions import RayError

from seamless_verl.scheduling.slices import Tag

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


class Replicas:
    """In place of `ReplicaSlices`: keeps what it was told. A replica dies in the method ``dies_in``; ``takes`` is
    called for the time that a method needs.
    """

    def __init__(self, trainers):
        self.addresses = {"t/0": "A", "r/0": "B"} | {name: name for name in trainers[1:]}
        self.on_router = {*trainers, "r/0"}
        self.awake = {*trainers}
        self.told = []
        self.dies_in = {}
        self.refuse = {}  # why slices cannot take weights by themselves
        self.takes = {}
        self.died = set()
        self.restarts = []

    def is_hybrid(self, slice_id):
        return slice_id.startswith("t/")

    def _maybe_die(self, method):
        self.told.append(method)
        self.takes.get(method, lambda: None)()
        victim = self.dies_in.pop(method, None)
        if victim is not None:
            self.died.add(victim)
            raise RayError(f"{victim} died")

    def register(self, slices):
        self._maybe_die("register")
        self.on_router.update(slices)

    def forget_caches(self):
        self.told.append("forget_caches")

    def even_out(self):
        self.told.append("even_out")

    def set_horizon(self, slices, outlasting):
        self.told.append(("set_horizon", slices, outlasting))

    def unregister(self, slices):
        self.on_router.difference_update(slices)

    def hold(self, slices):
        self._maybe_die("hold")

    def wake(self, slices, version, serving):
        self._maybe_die("wake")
        self.awake.update(set(slices) - self.refuse.keys())
        return {s: self.refuse[s] for s in slices if s in self.refuse}

    def interrupt(self, slices):
        self.awake.difference_update(slices)
        try:
            self._maybe_die("interrupt")
        except RayError as error:
            return {s: error for s in slices if s in self.died}
        return {}

    def sync(self, version):
        self._maybe_die("sync")

    def dead(self, slices):
        return {s: "killed" for s in slices if s in self.died}

    def leave_out(self, slices):
        self.told.append(("leave_out", list(slices)))
        self.on_router.difference_update(slices)

    def take_in(self, slices):
        self.told.append("take_in")

    def restart(self, slice_id):
        from concurrent.futures import Future

        self.told.append(("restart", slice_id))
        self.died.discard(slice_id)
        self.restarts.append((slice_id, Future()))
        return self.restarts[-1][1]


class Run:
    """A trainer without a model: slices that train and roll out, and one that only rolls out."""

    def __init__(self, *trainers, wakes_apart=False):
        from seamless_verl.scheduling import events as ev
        from seamless_verl.scheduling.policies import SeamlessFlow
        from seamless_verl.scheduling.scheduler import Scheduler
        from seamless_verl.scheduling.slices import Gpu, Slice, SliceState, Tag
        from seamless_verl.verl_adapter.slices.slice_driver import SliceDriver

        self.ev, self.time, self.asked, self.reports, self.lines = ev, 0.0, 0, [], []
        self.scheduler = Scheduler(SeamlessFlow(), wakes_apart=wakes_apart)
        self.trainers = trainers or ("t/0",)
        self.replicas = Replicas(self.trainers)
        self.driver = SliceDriver(
            self.scheduler,
            self.scheduler.cluster,
            self.replicas,
            clock=self.clock,
            fetch=lambda: [self.reports.pop() for _ in list(self.reports)],
            warn=self.lines.append,
        )
        self.driver.tell(ev.WeightsPublished(at=self.clock(), version=0))
        both = [(name, frozenset(Tag)) for name in self.trainers]
        for name, tags in [*both, ("r/0", frozenset({Tag.ROLLOUT}))]:
            slice_ = Slice(id=name, pool=name[0], gpus=(Gpu(node=name, index=0),), capabilities=tags)
            self.driver.tell(ev.SliceAdded(at=self.clock(), slice=slice_, state=SliceState.ROLLOUT, version=0))

    def clock(self):
        self.time += 0.01
        return self.time

    def state(self, slice_id):
        return self.scheduler.cluster[slice_id].state.value

    def acquire(self):
        from seamless_verl.scheduling.slices import Tag

        self.asked += 1
        request = f"step-{self.asked}"
        self.driver.tell(
            self.ev.AcquireRequested(
                at=self.clock(), request=request, tag=Tag.TRAIN, count=len(self.trainers), minimum=4, batch=4
            ),
            self.ev.GroupsReady(at=self.clock(), ready=4, in_flight=0),
        )
        return request

    def step(self):
        """A whole one; whatever happens in it, the trainer has to get its gang and to publish."""
        self.train(self.acquire())

    def train(self, request):
        assert request in self.driver.granted, self.lines
        self.driver.tell(
            self.ev.StepEnded(at=self.clock(), step=self.asked),
            self.ev.WeightsPublished(at=self.clock(), version=self.asked),
            self.ev.Released(at=self.clock(), request=request),
        )


@pytest.mark.parametrize(
    ("method", "victim"),
    [("interrupt", "t/0"), ("hold", "t/0"), ("wake", "t/0"), ("sync", "r/0"), ("register", "t/0")],
)
def test_whenever_a_replica_dies_the_steps_go_on_and_it_is_restarted(method, victim):
    run = Run()
    run.step()
    assert run.state("t/0") == run.state("r/0") == "rollout"
    run.replicas.dies_in[method] = victim
    run.step()
    other = "r/0" if victim == "t/0" else "t/0"
    assert run.replicas.on_router == {other}
    assert run.state(other) == "rollout"
    assert any(victim in line and "out" in line for line in run.lines)
    ((restarted, restart),) = run.replicas.restarts
    assert restarted == victim
    request = run.acquire()
    assert (request in run.driver.granted) == (victim == "r/0"), "nobody trains where an engine starts"
    restart.set_result(None)
    run.driver.tell_restarts()
    run.train(request)
    run.step()
    assert run.state("t/0") == run.state("r/0") == "rollout"
    assert run.replicas.on_router == {"t/0", "r/0"}


def test_a_replica_that_died_while_its_gpus_train_is_restarted_when_they_do_not():
    run = Run()
    run.step()
    request = run.acquire()
    assert run.state("t/0") == "training"
    run.replicas.died.add("t/0")
    run.reports.append(run.ev.SliceFailed(at=0.0, slice="A", reason="killed", lost=frozenset({Tag.ROLLOUT})))
    run.driver.tell_requests()
    assert run.replicas.restarts == []
    run.train(request)
    assert [slice_id for slice_id, _ in run.replicas.restarts] == ["t/0"]


def test_a_replica_that_cannot_be_restarted_stays_out():
    run = Run()
    run.step()
    run.replicas.dies_in["interrupt"] = "t/0"
    run.step()
    ((_, restart),) = run.replicas.restarts
    request = run.acquire()
    restart.set_exception(RuntimeError("no memory"))
    run.driver.tell_restarts()
    run.train(request)
    assert run.replicas.on_router == {"r/0"}
    (told,) = [line for line in run.lines if "no memory" in line]
    assert told.startswith("slice t/0 is out: restarting it failed: no memory; none of the trainer's")


def test_a_standing_replica_that_cannot_be_restarted_stays_out():
    run = Run()
    run.step()
    run.replicas.died.add("r/0")
    lost = frozenset({Tag.ROLLOUT})
    run.driver.tell(run.ev.SliceFailed(at=run.clock(), slice="r/0", reason="killed", lost=lost))
    ((_, restart),) = run.replicas.restarts
    restart.set_exception(RuntimeError("no memory"))
    run.driver.tell_restarts()
    assert [line for line in run.lines if "r/0" in line] == [
        "slice r/0 is out: killed",
        "slice r/0 stays out: restarting it failed: no memory",
    ]


def test_one_of_two_replicas_of_the_trainer_dies_the_other_hands_its_memory_back_and_waits_for_it():
    run = Run("t/0", "t/1")
    run.step()
    assert run.replicas.awake == {"t/0", "t/1"}
    run.replicas.dies_in["interrupt"] = "t/0"
    run.step()
    assert (run.state("t/1"), run.replicas.awake) == ("idle", set())
    told = len(run.replicas.told)
    request = run.acquire()
    assert "wake" not in run.replicas.told[told:]  # weights go into the trainer's replicas together: with one out none
    assert [slice_id for slice_id, _ in run.replicas.restarts] == ["t/0"]
    run.replicas.restarts[0][1].set_result(None)
    run.driver.tell_restarts()
    run.train(request)
    run.step()
    assert run.state("t/0") == run.state("t/1") == run.state("r/0") == "rollout"


@pytest.mark.parametrize("method", ["hold", "wake"])
def test_of_a_loan_in_which_a_replica_dies_the_others_are_handed_back_and_not_restarted(method):
    run = Run("t/0", "t/1", "t/2")
    run.step()
    run.replicas.dies_in[method] = "t/1"
    run.step()
    assert [slice_id for slice_id, _ in run.replicas.restarts] == ["t/1"]
    assert [line for line in run.lines if "is out" in line] == ["slice t/1 is out: killed"]
    assert [run.state(name) for name in run.trainers] == ["idle"] * 3
    assert run.replicas.told.count("interrupt") == 3, "two gangs, and those that were to be lent"
    assert run.replicas.on_router == {"r/0"}
    run.replicas.restarts[0][1].set_result(None)
    run.driver.tell_restarts()
    assert [run.state(name) for name in run.trainers] == ["rollout"] * 3
    run.step()
    assert run.replicas.on_router == {*run.trainers, "r/0"}


def test_a_replica_that_died_asleep_fails_a_loan_of_others_and_is_named():
    from seamless_verl.scheduling import commands as cm

    run = Run("t/0", "t/1")
    run.replicas.dies_in["wake"] = "t/0"
    told = run.driver._carry_out([cm.LendSlice(command=7, slice="t/1", version=0)])
    assert [(type(event).__name__, event.slice) for event in told] == [("SliceFailed", "t/0"), ("SliceDrained", "t/1")]


@pytest.mark.parametrize("wakes_apart", [False, True])
def test_who_is_out_is_left_out_and_restarted_before_others_are_lent_and_what_was_ordered_of_it_is_void(wakes_apart):
    """A loan may take as long as a restart has."""
    from seamless_verl.scheduling import commands as cm

    run = Run("t/0", "t/1", "t/2", wakes_apart=wakes_apart)
    orders = [
        cm.DrainSlice(command=7, slice="t/0"),
        cm.LendSlice(command=8, slice="t/1", version=0),
        cm.LendSlice(command=9, slice="t/2", version=0),
        cm.FailOver(slice="t/0", reason="killed"),
        cm.FailOver(slice="t/2", reason="killed"),
        cm.RestartSlice(slice="t/0"),
    ]
    told = run.driver._carry_out(orders)
    ordered = [each for each in run.replicas.told if each not in ("register", "even_out")]
    assert ordered == [("leave_out", ["t/0", "t/2"]), ("restart", "t/0"), "hold", "wake"]
    assert [(type(event).__name__, event.slice) for event in told] == [("SliceReady", "t/1")]


def test_of_a_loan_that_failed_though_nobody_died_all_are_restarted():
    run = Run("t/0", "t/1")
    run.replicas.dies_in["wake"] = "nobody"
    run.step()
    assert [slice_id for slice_id, _ in run.replicas.restarts] == ["t/0", "t/1"]


def test_slices_that_take_weights_by_themselves_are_lent_while_another_is_started_again():
    run = Run("t/0", "t/1", wakes_apart=True)
    run.replicas.refuse["t/0"] = RayError("killed")
    run.step()
    assert (run.state("t/0"), run.state("t/1"), run.replicas.awake) == ("idle", "rollout", {"t/1"})
    assert [slice_id for slice_id, _ in run.replicas.restarts] == ["t/0"]
    assert run.replicas.on_router == {"t/1", "r/0"}
    assert [line for line in run.lines if "is out" in line] == ["slice t/0 is out: RayError: killed"]
    run.replicas.refuse.clear()
    request = run.acquire()
    assert request not in run.driver.granted, "nobody trains where an engine starts"
    run.replicas.restarts[0][1].set_result(None)
    run.driver.tell_restarts()
    run.train(request)
    assert run.replicas.awake == {"t/0", "t/1"}


def test_the_last_replica_that_only_rolls_out_dies_and_the_trainers_own_goes_on():
    run = Run()
    run.step()
    run.replicas.died.add("r/0")
    run.reports += [run.ev.SliceFailed(at=0.0, slice="B", reason="killed")] * 3  # each of its requests says so
    run.driver.tell_requests()
    assert len(run.replicas.restarts) == 1
    run.step()
    run.step()
    assert run.replicas.on_router == {"t/0"}


def test_weights_that_reach_nobody_although_all_live_end_the_run():
    from seamless_verl.run.restarts import Exit, exit_of
    from seamless_verl.verl_adapter.slices.slice_driver import WeightsLost

    run = Run()
    run.replicas.dies_in["sync"] = "nobody"
    with pytest.raises(WeightsLost, match="version 1 did not reach r/0, and none is dead: nobody died") as lost:
        run.step()
    assert exit_of(lost.value) is Exit.DIED, "it goes on from its last checkpoint"


@pytest.mark.parametrize("wakes_apart", [False, True])
def test_a_dead_replica_of_a_slice_that_only_trains_is_named_and_the_run_starts_again(wakes_apart):
    """verl wakes it with the others, and the scheduler cannot start it. Who wakes apart does not need it."""
    from seamless_verl.run.restarts import Exit, exit_of
    from seamless_verl.scheduling.slices import Gpu, Slice, SliceState
    from seamless_verl.verl_adapter.slices.slice_driver import WeightsLost

    run = Run(wakes_apart=wakes_apart)
    only = Slice(id="t/9", pool="t", gpus=(Gpu(node="t/9", index=0),), capabilities=frozenset({Tag.TRAIN}))
    run.driver.tell(run.ev.SliceAdded(at=run.clock(), slice=only, state=SliceState.IDLE))
    run.replicas.died.add("t/9")
    run.replicas.dies_in["wake"] = "t/9"
    if wakes_apart:
        run.step()
        assert [slice_id for slice_id, _ in run.replicas.restarts] == ["t/0"], "it could not wake"
        return
    with pytest.raises(WeightsLost, match="the replica of t/9, .* died: killed") as lost:
        run.step()
    assert exit_of(lost.value) is Exit.DIED


def test_a_transfer_fails_for_a_replica_that_died_unnoticed_and_not_for_the_one_that_came_back():
    from seamless_verl.scheduling.slices import Gpu, Slice, SliceState

    run = Run()
    other = Slice(id="r/1", pool="r", gpus=(Gpu(node="r/1", index=0),), capabilities=frozenset({Tag.ROLLOUT}))
    run.replicas.addresses["r/1"] = "r/1"
    run.driver.tell(run.ev.SliceAdded(at=run.clock(), slice=other, state=SliceState.ROLLOUT, version=0))
    run.replicas.died.add("r/0")
    lost = frozenset({Tag.ROLLOUT})
    run.driver.tell(run.ev.SliceFailed(at=run.clock(), slice="r/0", reason="killed", lost=lost))
    run.replicas.restarts[0][1].set_result(None)
    run.replicas.dies_in["sync"] = "r/1"  # as all standing replicas it takes part
    run.driver.tell_restarts()
    assert (run.state("r/0"), run.replicas.on_router) == ("rollout", {"t/0", "r/0"})
    assert [line for line in run.lines if "is out" in line][-1] == "slice r/1 is out: killed"
    assert [slice_id for slice_id, _ in run.replicas.restarts] == ["r/0", "r/1"]


def test_what_the_other_replicas_take_first_is_no_part_of_a_switch():
    from seamless_verl.scheduling.slices import Switch

    run = Run()
    for method, seconds in (("sync", 5.0), ("wake", 1.0)):
        run.replicas.takes[method] = lambda seconds=seconds: setattr(run, "time", run.time + seconds)
    run.step()
    assert run.scheduler.cluster.costs.typical_s(Switch.TO_ROLLOUT) == pytest.approx(1.0, abs=0.1)


def test_the_router_learns_what_outlasts_a_loan_before_the_slice_is_on_it():
    from seamless_verl.scheduling import commands as cm

    run = Run()
    lend = cm.LendSlice(command=7, slice="t/0", version=0)
    run.driver._carry_out([lend, cm.SetHorizon(slice="t/0", outlasting=frozenset({"s"}))])
    told = run.replicas.told
    assert told.index(("set_horizon", ["t/0"], frozenset({"s"}))) < told.index("register")


def test_what_ends_while_a_slice_wakes_is_told_with_its_own_time():
    import time

    run, told = Run(), []
    handle = run.scheduler.handle
    run.scheduler.handle = lambda event: (told.append(event), handle(event))[1]
    run.reports.append(
        run.ev.RequestStarted(at=time.time(), request="q", session="s", group="g", slice="B", context_tokens=1)
    )
    run.driver.tell_requests()

    def wake():
        run.time += 1.0
        run.reports.append(run.ev.RequestFinished(at=time.time() - 0.5, request="q", tokens=5))

    run.replicas.takes["wake"] = wake
    run.step()
    [finished] = [event for event in told if isinstance(event, run.ev.RequestFinished)]
    first, second = [event for event in told if isinstance(event, run.ev.SliceReady)]
    assert (first.slice, second.slice) == ("r/0", "t/0")
    assert finished.at - first.at == pytest.approx(0.5, abs=0.1)
    assert second.at - finished.at == pytest.approx(0.5, abs=0.1)


def test_a_death_that_requests_report_too_is_one_death():
    import time

    run = Run()

    def wake():
        run.reports.append(
            run.ev.SliceFailed(at=time.time(), slice="A", reason="died", lost=frozenset(), restartable=True)
        )

    run.replicas.takes["wake"] = wake
    run.replicas.dies_in["wake"] = "t/0"
    run.step()
    assert [slice_id for slice_id, _ in run.replicas.restarts] == ["t/0"]
    assert len([line for line in run.lines if "is out" in line]) == 1


def test_a_node_whose_clock_is_ahead_does_not_move_the_run_into_the_future():
    import time

    run, told = Run(), []
    handle = run.scheduler.handle
    run.scheduler.handle = lambda event: (told.append(event), handle(event))[1]
    for number in range(2):
        run.reports.append(
            run.ev.RequestStarted(
                at=time.time() + 600, request=f"q{number}", session="s", group="g", slice="B", context_tokens=1
            )
        )
        run.driver.tell_requests()
    assert [event.request for event in told] == ["q0", "q1"]
    assert all(event.at <= run.time for event in told)
    assert run.driver.now() <= run.time
    [line] = run.lines
    assert "600 s ahead" in line
