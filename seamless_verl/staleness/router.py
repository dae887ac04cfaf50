"""The rules by which a run places and moves requests. A live run and a simulated one get theirs from `router_of`."""

from __future__ import annotations

from dataclasses import dataclass

from seamless_verl.config import RouterConfig
from seamless_verl.decode_cost import PUBLISHED, DecodeCost, EnginePace
from seamless_verl.staleness.affinity import MovePrice
from seamless_verl.staleness.cache_aware import CacheAware
from seamless_verl.staleness.routing import LeastRequests, MarginalGain, MigrationRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """What ``seamless.router`` asks for, as objects.

    Attributes:
        policy: places requests; each decision sees the load of those before it.
        cost: model of a decode step; what `policy` and `migration` reckon with.
        migration: when replicas give requests back; None: never.
        price: of leaving a replica that has the context in its cache.
        oldest_first: engines serve waiting requests of the oldest session first; else as they came.
    """

    policy: LeastRequests | MarginalGain | CacheAware
    cost: DecodeCost
    migration: MigrationRule | None
    price: MovePrice
    oldest_first: bool


def router_of(
    settings: RouterConfig, *, cost: DecodeCost | None = None, prefill_s_per_token: float | None = None
) -> Router:
    """What ``seamless.router`` asks for.

    Args:
        cost: of a decode step, where it is known (the simulator's engines); else the published one that is configured.
        prefill_s_per_token: seconds of a replica, where they are known.
    """
    gains = settings.policy == "marginal_gain"
    known = cost or PUBLISHED[settings.cost]
    price = MovePrice() if prefill_s_per_token is None else MovePrice.of(known, prefill_s_per_token)
    policy: LeastRequests | MarginalGain | CacheAware = LeastRequests()
    if gains:
        policy = MarginalGain(cost=known, mu=settings.mu)
    elif settings.policy == "cache_aware":
        prefill_s = prefill_s_per_token or price.prefill_steps * known.attention_per_token_s
        policy = CacheAware(pace=EnginePace(decode=known, prefill_s_per_token=prefill_s), price=price)
    return Router(
        policy=policy,
        cost=known,
        migration=MigrationRule() if gains and settings.migrate else None,
        price=price,
        oldest_first=settings.oldest_first,
    )
