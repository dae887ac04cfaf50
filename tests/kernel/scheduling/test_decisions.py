"""What each policy proposes in one situation, called directly: verb, slices and the reason that people read."""

from __future__ import annotations

import re

import pytest

from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.cluster import Cluster, Pending
from seamless_verl.scheduling.commands import Decision, Horizon, LookAgain, Proposal, Verb
from seamless_verl.scheduling.policies import Colocated, Disaggregated, Greedy, Policy
from seamless_verl.scheduling.prediction.forecast import Forecaster
from seamless_verl.scheduling.prediction.predictive import Predictive
from seamless_verl.scheduling.slices import Order, SliceId, SliceState, Switch, Tag
from seamless_verl.scheduling.verl_gate import VerlGate
from tests.kernel.scheduling.world import BOTH, ROLLOUT, make_slice

IDLE, SERVES = SliceState.IDLE, SliceState.ROLLOUT


def cluster_of(ready: int = 0, in_flight: int = 8, waits: bool = True, **trainers: SliceState) -> Cluster:
    """Slices of the trainer, one that only rolls out, and whether the trainer has asked for one of its own."""
    cluster = Cluster(ready=ready, in_flight=in_flight)
    for name, state in trainers.items():
        cluster.add(make_slice(name, BOTH), state, 0 if state is SERVES else None)
    cluster.add(make_slice("r", ROLLOUT), SERVES, 0)
    if waits:
        event = ev.AcquireRequested(at=0.0, request="step-1", tag=Tag.TRAIN, count=1, minimum=4, batch=8)
        cluster.pending["step-1"] = Pending(event=event)
    return cluster


def proposed(policy: Policy, cluster: Cluster) -> list[tuple[Verb, tuple[str, ...], str]]:
    return [(p.verb, p.slices, p.reason) for p in policy.decide(cluster) if isinstance(p, Decision)]


@pytest.mark.parametrize(
    ("policy", "verb", "reason"),
    [
        (Greedy(), Verb.RECLAIM, "5 of 4 groups are ready"),
        (Colocated(), Verb.WAIT, "5 of 8 groups are ready"),
        (Disaggregated(), Verb.RECLAIM, "nothing is lent under this policy"),
    ],
)
def test_what_is_lent_when_the_trainers_first_groups_are_ready(policy: Policy, verb: Verb, reason: str) -> None:
    assert proposed(policy, cluster_of(ready=5, a=SERVES)) == [(verb, ("a",), reason)]
    assert proposed(policy, cluster_of(ready=5, a=IDLE)) == [], "it can be granted as it is"
    assert proposed(policy, cluster_of(ready=3, a=SERVES)) == [], "nothing idles and nothing is due"


@pytest.mark.parametrize(
    ("policy", "verb", "reason"),
    [
        (Greedy(), Verb.LEND, "idle"),
        (Colocated(), Verb.LEND, "idle"),
        (Disaggregated(), Verb.HOLD, "nothing is lent under this policy"),
    ],
)
def test_what_idles_while_the_trainer_has_no_data(policy: Policy, verb: Verb, reason: str) -> None:
    for waits in (True, False):
        assert proposed(policy, cluster_of(waits=waits, a=IDLE, b=SERVES)) == [(verb, ("a",), reason)]
    assert proposed(policy, cluster_of(ready=4, a=IDLE, b=IDLE)) == [], "the trainer could take it"


@pytest.mark.parametrize("policy", [Greedy(), Colocated(), Predictive(), VerlGate(batch=8, mini_batch=4)])
def test_after_the_last_step_nothing_is_lent(policy: Policy) -> None:
    cluster = cluster_of(waits=False, a=IDLE)
    cluster.last_step = True
    policy.observe(ev.StepEnded(at=0.0, step=9, last=True), cluster)
    assert Verb.LEND not in {verb for verb, _, _ in proposed(policy, cluster)}


# ---------------------------------------------------------------- verl's gate


def step_ended(
    gate: VerlGate, cluster: Cluster, waited_s: float = 0.0, groups: int = 0, starved_s: float = 0.0
) -> None:
    gate.observe(ev.StepEnded(at=0.0, step=1, waited_s=waited_s, waited_groups=groups, starved_s=starved_s), cluster)


def test_the_gate_decides_once_per_step_and_before_the_slices_are_free() -> None:
    gate, cluster = VerlGate(batch=8, mini_batch=4), cluster_of(waits=False, a=IDLE)
    assert proposed(gate, cluster) == [], "no step has ended"
    step_ended(gate, cluster)
    assert gate.lends_next
    assert proposed(gate, cluster) == [(Verb.LEND, ("a",), "0 of 4 groups ready; benefit unknown > cost unknown")]
    assert not gate.lends_next
    assert proposed(gate, cluster) == []


def test_the_gate_compares_what_waiting_cost_with_what_switching_costs() -> None:
    gate, cluster = VerlGate(batch=8, mini_batch=4), cluster_of(waits=False, a=IDLE)
    for switch, seconds in ((Switch.TO_ROLLOUT, 3.0), (Switch.TO_TRAIN, 1.0)):
        cluster.costs.begin(SliceId("a"), switch, 0.0)
        cluster.costs.end(SliceId("a"), seconds)
        gate.observe(ev.Tick(at=0.0), cluster)
    step_ended(gate, cluster, waited_s=4.0, groups=4, starved_s=4.0)  # 2 s per group, half of it saved by two slices
    found = [p for p in gate.decide(cluster) if isinstance(p, Decision)]
    assert [(p.verb, p.reason) for p in found] == [(Verb.HOLD, "0 of 4 groups ready; benefit 4.00 s <= cost 4.00 s")]
    assert found[0].predicted_benefit_s == 0.0
    step_ended(gate, cluster, waited_s=16.0, groups=4)  # 3 s per group by now
    assert gate.lends_next


def test_the_gate_takes_back_at_its_threshold_which_stands_when_the_trainer_asks() -> None:
    gate, cluster = VerlGate(batch=8, mini_batch=2), cluster_of(ready=4, a=SERVES)
    gate.observe(cluster.pending["step-1"].event, cluster)
    cluster.ready = 4
    assert proposed(gate, cluster) == [(Verb.RECLAIM, ("a",), "4 of 3 groups ready")]
    cluster.pending["step-1"] = Pending(
        event=ev.AcquireRequested(at=0.0, request="step-1", tag=Tag.TRAIN, count=1, minimum=2, batch=8)
    )
    cluster.ready = 2
    assert proposed(gate, cluster) == [(Verb.WAIT, ("a",), "2 of 3 groups ready")]


# ---------------------------------------------------------------- prediction


class Past:
    """A policy that has seen sessions of 100 tokens and of 2000, beside none to 31 others on a slice that only rolls
    out. With n of them each has a token every ``10 + 2 n`` ms."""

    def __init__(self, policy: Predictive | None = None) -> None:
        self.policy = policy or Predictive()
        self.cluster = cluster_of(waits=False, a=IDLE)
        for slice_ in (make_slice("a", BOTH), make_slice("r", ROLLOUT)):
            self.policy.observe(ev.SliceAdded(at=0.0, slice=slice_), self.cluster)
        self.number = 0
        for together in (1, 8, 16, 32):
            self.run(together, tokens=100)
            self.run(together, tokens=2000)

    def see(self, event: ev.Event) -> None:
        self.cluster.now = event.at
        self.policy.observe(event, self.cluster)

    def start(self, group: str) -> str:
        self.number += 1
        name = f"q{self.number}"
        self.see(
            ev.RequestStarted(
                at=self.cluster.now, request=name, session=name, group=group, slice=SliceId("r"), context_tokens=50
            )
        )
        return name

    def run(self, together: int, tokens: int) -> None:
        names = [self.start("old") for _ in range(together)]
        at = self.cluster.now + tokens * (0.01 + 0.002 * together)
        for name in names:
            self.see(ev.RequestFinished(at=at, request=name, tokens=tokens))
            self.see(ev.SessionFinished(at=at, session=name, group="old"))

    def starve(self, sessions: int) -> list[Proposal]:
        """The trainer has asked for its gang; so many sessions are out, each a group, and none is ready."""
        groups = tuple(f"g{number}" for number in range(sessions))
        self.see(ev.GroupsSubmitted(at=self.cluster.now, groups=groups, sessions=1))
        for group in groups:
            self.start(group)
        self.cluster.ready, self.cluster.in_flight = 0, sessions
        asked = ev.AcquireRequested(
            at=self.cluster.now, request="step-1", tag=Tag.TRAIN, count=1, minimum=sessions, batch=sessions
        )
        self.cluster.pending["step-1"] = Pending(event=asked)
        self.see(asked)
        return list(self.policy.decide(self.cluster))


def test_before_anything_is_known_it_lends_to_learn() -> None:
    policy, cluster = Predictive(), cluster_of(a=IDLE)
    policy.observe(cluster.pending["step-1"].event, cluster)
    assert proposed(policy, cluster) == [(Verb.LEND, ("a",), "nothing to predict from yet")]


def test_what_pays_is_lent_with_its_price_its_gain_and_how_long() -> None:
    horizon, lend = Past().starve(32)
    assert isinstance(horizon, Horizon)
    assert horizon.slices == ("a",)
    assert isinstance(lend, Decision)
    assert (lend.verb, lend.slices) == (Verb.LEND, ("a",))
    found = re.fullmatch(r"benefit ([0-9.]+) s > 0.00 s after costs of 0.00 \+ 0.00 s, for ([0-9.]+) s", lend.reason)
    assert found is not None, lend.reason
    assert float(found[1]) == pytest.approx(lend.predicted_benefit_s or 0.0, abs=0.01)
    assert 0 < float(found[1]) < float(found[2])


def test_what_does_not_pay_is_held_and_looked_at_again_after_a_switch() -> None:
    past = Past()
    for switch, seconds in ((Switch.TO_ROLLOUT, 300.0), (Switch.TO_TRAIN, 100.0)):
        past.cluster.costs.begin(SliceId("a"), switch, 0.0)
        past.cluster.costs.end(SliceId("a"), seconds)
    hold, again = past.starve(32)
    assert isinstance(hold, Decision)
    assert hold.verb is Verb.HOLD
    assert "after costs of 300.00 + 100.00 s" in hold.reason
    assert (hold.predicted_benefit_s or 0.0) <= 0
    assert again == LookAgain(at=past.cluster.now + 400.0)
    assert list(past.policy.decide(past.cluster)) == [again], "until then it is not worked out again"


def test_after_so_many_loans_a_step_the_rest_idle() -> None:
    past = Past(Predictive(max_loans_per_step=1))
    assert Verb.LEND in {p.verb for p in past.starve(32) if isinstance(p, Decision)}
    past.see(ev.Released(at=past.cluster.now, request="step-0"))
    assert proposed(past.policy, past.cluster) == [(Verb.HOLD, ("a",), "1 loans in this step already")]
    past.see(ev.StepEnded(at=past.cluster.now, step=1))
    past.see(past.cluster.pending["step-1"].event)
    assert Verb.LEND in {verb for verb, _, _ in proposed(past.policy, past.cluster)}


def test_the_trainers_own_time_is_the_median_of_its_steps_without_waiting() -> None:
    forecaster, cluster = Forecaster(), cluster_of(a=IDLE)
    asked = ev.AcquireRequested(at=0.0, request="s", tag=Tag.TRAIN, count=1, minimum=4, batch=8)
    for step, (trained, waited) in enumerate(((80.0, 0.0), (26.0, 10.0), (16.0, 0.0)), start=1):
        forecaster.observe(asked, cluster)
        assert not forecaster.between_steps
        forecaster.observe(ev.StepEnded(at=100.0 * step, step=step, waited_s=waited), cluster)
        cluster.training_s += trained
        forecaster.observe(ev.Released(at=100.0 * step, request="s"), cluster)
    assert list(forecaster._trainings) == [10.0, 2.0, 2.0]
    assert forecaster._train_s() == 2.0
    assert forecaster.minimum(None) == 4
    assert Forecaster().minimum(None) == 1
    assert Forecaster().outlook(cluster, None) is None


def test_a_gang_that_is_due_takes_back_what_has_nothing_left_to_be_worth() -> None:
    past = Past()
    past.starve(32)
    past.cluster[SliceId("a")].lend(past.cluster.now, Order(number=1, deadline=1e9, story="test"), 1)
    past.cluster[SliceId("a")].ready(past.cluster.now, version=0)
    past.cluster.ready, past.cluster.in_flight = 32, 0
    past.see(ev.Tick(at=past.cluster.now + 60.0))
    assert proposed(past.policy, past.cluster) == [
        (Verb.RECLAIM, ("a",), "32 groups are ready; taking back takes 0.00 s")
    ]


def test_where_nobody_else_generates_lent_slices_stay_until_the_trainer_can_train() -> None:
    past = Past()
    past.starve(4)
    past.cluster[SliceId("r")].lose(past.cluster.now, ROLLOUT, "killed", restartable=True)
    past.cluster[SliceId("a")].lend(past.cluster.now, Order(number=1, deadline=1e9, story="test"), 1)
    past.see(ev.Tick(at=past.cluster.now + 60.0))
    assert list(past.policy.decide(past.cluster)) == []
