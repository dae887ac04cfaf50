"""What each policy is worth on a toy cluster, where everything but the policy is equal."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from seamless_verl.scheduling import commands as cm
from seamless_verl.scheduling.commands import Verb
from seamless_verl.scheduling.policies import Colocated, Disaggregated, Greedy, Policy
from seamless_verl.scheduling.prediction.predictive import Predictive
from seamless_verl.scheduling.verl_gate import VerlGate
from tests.kernel.scheduling.toy import Setting, Toy


def skewed(rng: random.Random) -> float:
    return min(rng.lognormvariate(6.5, 1.0), 8000)


def constant(rng: random.Random) -> float:
    return 1000.0


def mean_step_s(make: type[Policy], setting: Setting) -> float:
    return sum(Toy(make(), setting, seed).run().step_s for seed in range(2)) / 2


def rivals(setting: Setting) -> dict[str, float]:
    def gate() -> VerlGate:
        return VerlGate(batch=setting.batch, mini_batch=setting.batch // setting.updates)

    policies = {"disaggregated": Disaggregated, "colocated": Colocated, "greedy": Greedy, "verl_gate": gate}
    return {name: mean_step_s(make, setting) for name, make in policies.items()}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "setting",
    [
        Setting(lengths=skewed),
        Setting(lengths=skewed, train_s=8.0),
        Setting(lengths=skewed, eta=0),
        Setting(lengths=lambda rng: min(rng.lognormvariate(4, 1.0), 800), train_s=2.0, wake_s=0.5, back_s=0.3),
        Setting(lengths=skewed, trainers=4, standing=4, batch=16, members=8, train_s=20, steps=8),
    ],
    ids=["skewed", "little training", "synchronous", "short steps", "larger"],
)
def test_predictive_is_the_fastest_or_level_where_lengths_are_skewed(setting: Setting) -> None:
    others = rivals(setting)
    ours = mean_step_s(Predictive, setting)
    assert ours < 1.01 * min(others.values()), others
    assert ours < 0.97 * min(others["disaggregated"], others["greedy"], others["verl_gate"]), others


@pytest.mark.parametrize(
    "setting",
    [
        Setting(lengths=constant),
        Setting(lengths=skewed, train_s=120.0),
        Setting(lengths=skewed, wake_s=40.0, back_s=20.0),
        Setting(lengths=skewed, standing=0, trainers=4),
    ],
    ids=["constant lengths", "bound by training", "dear switches", "only training slices"],
)
def test_predictive_loses_nothing_where_there_is_nothing_to_win(setting: Setting) -> None:
    others = rivals(setting)
    assert mean_step_s(Predictive, setting) <= 1.03 * min(others.values()), others


def test_it_stops_when_switches_are_dear_and_does_not_begin_when_training_is_the_bottleneck() -> None:
    cheap = Toy(Predictive(), Setting(lengths=skewed)).run()
    dear = Toy(Predictive(), Setting(lengths=skewed, wake_s=400.0, back_s=100.0)).run()
    bound = Toy(Predictive(), Setting(lengths=skewed, train_s=120.0)).run()
    assert cheap.loans >= 19  # one per step
    assert dear.loans <= 1  # the first, before a switch was measured
    assert bound.loans == 0


class _Counted(Toy):
    """Counts LEND decisions between two ends of steps."""

    def __init__(self, policy: Policy, setting: Setting) -> None:
        super().__init__(policy, setting)
        self.loans: Counter[int] = Counter()

    def carry_out(self, command: cm.Command) -> None:
        if isinstance(command, cm.RecordDecision) and command.decision.verb is Verb.LEND:
            self.loans[self.step] += 1
        super().carry_out(command)


@pytest.mark.parametrize("limit", [1, 2])
def test_loans_per_step_are_bounded_whatever_is_predicted(limit: int) -> None:
    """Free switches make every loan look good; the bound holds all the same."""
    setting = Setting(lengths=skewed, wake_s=0.0, back_s=0.0)
    toy = _Counted(Predictive(max_loans_per_step=limit), setting)
    toy.run()
    assert max(toy.loans.values()) == limit


def test_a_slice_is_lent_at_most_once_between_two_grants() -> None:
    toy = Toy(Predictive(max_loans_per_step=100), Setting(lengths=skewed))
    toy.run()
    lent: Counter[str] = Counter()
    for command in toy.log:
        if isinstance(command, cm.GrantAcquire):
            lent.clear()
        if isinstance(command, cm.LendSlice) and command.decision is not None:
            lent[command.slice] += 1
            assert lent[command.slice] == 1


def test_a_margin_asks_more_of_a_loan_than_its_switch() -> None:
    setting = Setting(lengths=skewed, wake_s=8.0, back_s=4.0)
    free, careful = (Toy(Predictive(margin=margin), setting).run() for margin in (0.0, 2.0))
    assert careful.loans < free.loans
    predicted = [d.decision.predicted_benefit_s for d in careful.decisions if d.decision.verb is Verb.LEND]
    assert all(benefit > 2.0 * (8.0 + 4.0) for benefit in predicted if benefit is not None)


class _Watched(Toy):
    """Keeps, for each horizon, what the sessions that were out had to go then: (named, left)."""

    def __init__(self, policy: Policy, setting: Setting) -> None:
        super().__init__(policy, setting)
        self.seen: list[list[tuple[bool, float]]] = []

    def carry_out(self, command: cm.Command) -> None:
        if isinstance(command, cm.SetHorizon) and command.slice.endswith("2"):  # the same for all that are lent
            for server in self.servers.values():
                self.advance(server)
            out = [
                (session, session.mark - server.progress)
                for server in self.servers.values()
                for session in server.running.values()
            ]
            out += [(session, session.left) for session in self.queue]
            self.seen.append([(session.name in command.outlasting, left) for session, left in out])
        super().carry_out(command)


def test_sessions_that_a_horizon_names_have_more_to_go_than_the_others() -> None:
    """Who is long shows when the short ones have ended; among the others are long ones that have just begun."""
    toy = _Watched(Predictive(), Setting(lengths=lambda rng: rng.uniform(4000, 5000) if rng.random() < 0.2 else 300.0))
    toy.run()
    told = [out for out in toy.seen if 0 < sum(named for named, _ in out) < len(out)]
    assert len(told) >= 10
    named, others = ([left for out in told for is_named, left in out if is_named is wanted] for wanted in (True, False))
    assert sum(named) / len(named) > 1.5 * sum(others) / len(others)


def test_every_loan_says_why_and_what_it_was_worth() -> None:
    result = Toy(Predictive(), Setting(lengths=skewed)).run()
    lends = {d.number: d.decision for d in result.decisions if d.decision.verb is Verb.LEND}
    settled = {o.outcome.decision: o.outcome for o in result.outcomes}
    predicted = {n: d.predicted_benefit_s for n, d in lends.items() if d.predicted_benefit_s is not None}
    assert len(predicted) >= 15
    assert all("benefit" in lends[n].reason for n in predicted)
    assert set(predicted) - set(settled) <= {max(predicted)}  # the last one may still be out
    realised = [settled[n].realised_benefit_s for n in predicted if n in settled]
    assert all(value is not None for value in realised)
    ratio = sum(value or 0.0 for value in realised) / sum(predicted[n] for n in predicted if n in settled)
    assert 0.5 < ratio < 2.0  # the prediction is of the right size
