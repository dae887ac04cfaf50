"""From ``seamless.router`` to the rules that a run routes by."""

from __future__ import annotations

import pytest

from seamless_verl.config import RouterConfig
from seamless_verl.decode_cost import PUBLISHED
from seamless_verl.staleness.affinity import MovePrice
from seamless_verl.staleness.router import router_of
from seamless_verl.staleness.routing import LeastRequests, MarginalGain, MigrationRule


def test_by_itself_requests_are_counted_and_sessions_served_by_age() -> None:
    made = router_of(RouterConfig())
    assert isinstance(made.policy, LeastRequests)
    assert made.migration is None
    assert made.oldest_first
    assert made.price == MovePrice()


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_gain_is_reckoned_with_the_cost_that_is_configured_unless_a_better_one_is_known(name: str) -> None:
    settings = RouterConfig(policy="marginal_gain", mu=0.1, cost=name)
    made = router_of(settings)
    assert isinstance(made.policy, MarginalGain)
    assert (made.policy.mu, made.policy.cost, made.cost) == (0.1, PUBLISHED[name], PUBLISHED[name])
    measured = PUBLISHED["32b-tp2"]
    known = router_of(settings, cost=measured, prefill_s_per_token=1e-4)
    assert isinstance(known.policy, MarginalGain)
    assert known.policy.cost is known.cost is measured
    assert known.price.prefill_steps == pytest.approx(1e-4 / 6.3e-8)
    assert known.price.request_tokens == pytest.approx(2.446e-4 / 6.3e-8)


@pytest.mark.parametrize(("policy", "migrate"), [("least_requests", True), ("marginal_gain", False)])
def test_nothing_is_given_back_unless_gains_are_weighed_and_that_is_asked_for(policy: str, migrate: bool) -> None:
    assert router_of(RouterConfig(policy=policy, migrate=migrate)).migration is None
    assert router_of(RouterConfig(policy="marginal_gain", migrate=True)).migration == MigrationRule()
