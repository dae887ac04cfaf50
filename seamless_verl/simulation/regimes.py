"""The systems that are compared, each by its published rule. Everything else (hardware, work, seeds) is equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from seamless_verl.errors import ConfigError, meant
from seamless_verl.scheduling.policies.colocated import Colocated
from seamless_verl.scheduling.policies.disaggregated import Disaggregated
from seamless_verl.scheduling.policies.greedy import Greedy
from seamless_verl.scheduling.policies.policy import Policy
from seamless_verl.scheduling.policies.predictive import Predictive, PredictiveConfig
from seamless_verl.scheduling.policies.verl_gate import VerlGate
from seamless_verl.simulation.feeds import BatchPerStep, Bounded, Bucket, Draw, Feed, Quota
from seamless_verl.staleness.protocol import StalenessProtocol


def _eta(eta: int) -> int:
    return eta


def _unbounded(eta: int) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """One system.

    Attributes:
        colocated: every slice trains and rolls out, all in turn.
        lends: slices that can train may roll out where their tags say so; else pools stay apart.
        bound: on staleness in versions, given eta; None: there is none.
        policy: of the scheduler, given batch and mini-batch in groups.
        feed: admission, given the source of groups, the batch and eta.
        streaming: mini-batches are trained as they come; else the whole batch is waited for.
        releases: the gang is given back while it starves within a step.
        needs_standing: it lends at the end of a step only, so somebody else must generate the first batch.
        stop_the_world: weights reach all replicas before the step ends; else the trainer hands them over first, and the
            replicas load them afterwards.
        awaits_load: where they do, the trainer waits for that (its slices are free meanwhile), as a live run's process
            does; else it goes on.
        barrier: one-step-off's order.
        poll_s: how often the trainer looks for data.
        router: ``least_requests`` or ``marginal_gain`` (with migration).
        rebalances: requests are placed anew when replicas join (verl's gate: where it announces them, see `TrainLoop`).
        oldest_first: what waits for an engine is served in the order in which sessions began; else as it came.
    """

    colocated: bool = False
    bound: Callable[[int], int | None] = _eta
    lends: bool = False
    needs_standing: bool = False
    policy: Callable[[int, int], Policy]
    feed: Callable[[Draw, int, int], Feed]
    streaming: bool = False
    releases: bool = False
    stop_the_world: bool = True
    awaits_load: bool = False
    barrier: bool = False
    poll_s: float = 0.0
    router: str = "least_requests"
    rebalances: bool = False
    oldest_first: bool = False

    @property
    def reserves(self) -> bool:
        """Whether it admits by the reserve / occupy / consume protocol, which can be told how many batches."""
        return self.feed is _bounded


def _bounded(draw: Draw, batch: int, eta: int) -> Feed:
    return Bounded(draw, StalenessProtocol(eta=eta, batch_size=batch))


def _colocated(batch: int, mini: int) -> Policy:
    return Colocated()


def _disaggregated(batch: int, mini: int) -> Policy:
    return Disaggregated()


def _greedy(batch: int, mini: int) -> Policy:
    return Greedy()


def _predictive(batch: int, mini: int) -> Policy:
    return Predictive(PredictiveConfig(migration=True))


def _gate(batch: int, mini: int) -> Policy:
    return VerlGate(batch=batch, mini_batch=mini)


_VERL_POLL_S = 2.0

REGIMES: Mapping[str, Regime] = MappingProxyType(
    {
        "verl_sync": Regime(
            colocated=True,
            bound=lambda eta: 0,
            policy=_colocated,
            feed=lambda draw, batch, eta: BatchPerStep(draw, batch, warmup=0),
            poll_s=_VERL_POLL_S,
        ),
        "verl_colocate_async": Regime(
            colocated=True,
            bound=_unbounded,
            policy=_colocated,
            feed=lambda draw, batch, eta: BatchPerStep(draw, batch, warmup=eta),
            poll_s=_VERL_POLL_S,
        ),
        "verl_colocate_async_wait": Regime(
            colocated=True,
            policy=_colocated,
            feed=lambda draw, batch, eta: BatchPerStep(draw, batch, warmup=eta, oldest=eta + 1),
            poll_s=_VERL_POLL_S,
        ),
        "verl_one_step_off": Regime(
            bound=lambda eta: 1,
            policy=_disaggregated,
            feed=lambda draw, batch, eta: BatchPerStep(draw, batch, warmup=0),
            barrier=True,
        ),
        "verl_separate_async": Regime(
            bound=_unbounded,
            policy=_disaggregated,
            feed=lambda draw, batch, eta: BatchPerStep(draw, batch, warmup=eta),
            streaming=True,
            poll_s=_VERL_POLL_S,
        ),
        "verl_separate_async_wait": Regime(
            policy=_disaggregated,
            feed=lambda draw, batch, eta: BatchPerStep(draw, batch, warmup=eta, oldest=eta + 1),
            streaming=True,
            poll_s=_VERL_POLL_S,
        ),
        "verl_enable_switch_wait": Regime(
            lends=True,
            needs_standing=True,
            policy=_gate,
            feed=lambda draw, batch, eta: BatchPerStep(draw, batch, warmup=eta, oldest=eta + 1),
            streaming=True,
            poll_s=_VERL_POLL_S,
        ),
        "verl_enable_switch": Regime(
            lends=True,
            needs_standing=True,
            bound=_unbounded,
            policy=_gate,
            feed=lambda draw, batch, eta: BatchPerStep(draw, batch, warmup=eta),
            streaming=True,
            poll_s=_VERL_POLL_S,
        ),
        "areal": Regime(
            policy=_disaggregated, bound=_unbounded, feed=lambda draw, batch, eta: Quota(draw, batch, eta=eta)
        ),
        "roll": Regime(policy=_disaggregated, feed=lambda draw, batch, eta: Bucket(draw, batch, alpha=eta)),
        "staleflow": Regime(policy=_disaggregated, feed=_bounded, stop_the_world=False, router="marginal_gain"),
        "seamlessflow": Regime(lends=True, policy=_greedy, feed=_bounded, stop_the_world=False, rebalances=True),
        "greedy": Regime(
            lends=True,
            policy=_greedy,
            feed=_bounded,
            streaming=True,
            releases=True,
            stop_the_world=False,
            awaits_load=True,
            rebalances=True,
            oldest_first=True,
        ),
        "predictive": Regime(
            lends=True,
            policy=_predictive,
            feed=_bounded,
            streaming=True,
            releases=True,
            stop_the_world=False,
            awaits_load=True,
            rebalances=True,
            oldest_first=True,
        ),
        "disaggregated": Regime(
            policy=_disaggregated,
            feed=_bounded,
            streaming=True,
            stop_the_world=False,
            awaits_load=True,
            oldest_first=True,
        ),
        "colocated": Regime(colocated=True, policy=_colocated, feed=_bounded, rebalances=True, oldest_first=True),
    }
)


# A live run's name for verl's rule under our scheduler; the other policies are called the same here.
LIVE_NAMES: Mapping[str, str] = MappingProxyType({"verl_gate": "verl_enable_switch"})


def regime(name: str) -> Regime:
    """Look a system up.

    Raises:
        ConfigError: unknown; names the nearest known one.
    """
    if name not in REGIMES:
        raise ConfigError("scheduler.policy", name, "no such system", meant(name, REGIMES))
    return REGIMES[name]
