"""The systems that are compared, each by its published rule. Everything else (hardware, work, seeds) is equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from seamless_verl.errors import ConfigError, meant
from seamless_verl.scheduling.policies import Colocated, Disaggregated, Greedy, Policy
from seamless_verl.scheduling.prediction.predictive import Predictive, PredictiveConfig
from seamless_verl.scheduling.verl_gate import VerlGate
from seamless_verl.simulation.feeds import BatchPerStep, Bounded, Bucket, Draw, Feed, Quota
from seamless_verl.staleness.protocol import StalenessProtocol


def _eta(eta: int) -> int:
    return eta


def _none(eta: int) -> None:
    """No bound on staleness."""


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

    def update(self, batch: int, mini_batch: int) -> int:
        """Groups that are trained as soon as they are there."""
        return mini_batch if self.streaming else batch


def _bounded(draw: Draw, batch: int, eta: int) -> Feed:
    return Bounded(draw, StalenessProtocol(eta=eta, batch_size=batch))


def _verl_gate(batch: int, mini_batch: int) -> Policy:
    return VerlGate(batch=batch, mini_batch=mini_batch)


def _verl(*, warmup: bool = True, waits: bool = False) -> Callable[[Draw, int, int], Feed]:
    """Admission of verl's modes: ``warmup``: eta batches in advance; ``waits``: for whatever is eta versions old."""

    def feed(draw: Draw, batch: int, eta: int) -> Feed:
        return BatchPerStep(draw, batch, warmup=eta if warmup else 0, oldest=eta + 1 if waits else None)

    return feed


_APART = Regime(policy=lambda batch, mini_batch: Disaggregated(), feed=_bounded)
_IN_TURN = Regime(colocated=True, policy=lambda batch, mini_batch: Colocated(), feed=_bounded)
_VERL_SYNC = replace(_IN_TURN, feed=_verl(warmup=False), bound=lambda eta: 0, poll_s=2.0)
_VERL_SEPARATE = replace(_APART, feed=_verl(), bound=_none, streaming=True, poll_s=2.0)
_VERL_SWITCH = replace(_VERL_SEPARATE, lends=True, needs_standing=True, policy=_verl_gate)
_OURS = replace(_APART, streaming=True, stop_the_world=False, awaits_load=True, oldest_first=True)
_GREEDY = replace(_OURS, lends=True, policy=lambda batch, mini_batch: Greedy(), releases=True, rebalances=True)

REGIMES: Mapping[str, Regime] = MappingProxyType(
    {
        "verl_sync": _VERL_SYNC,
        "verl_colocate_async": replace(_VERL_SYNC, feed=_verl(), bound=_none),
        "verl_colocate_async_wait": replace(_VERL_SYNC, feed=_verl(waits=True), bound=_eta),
        "verl_one_step_off": replace(_APART, feed=_verl(warmup=False), bound=lambda eta: 1, barrier=True),
        "verl_separate_async": _VERL_SEPARATE,
        "verl_separate_async_wait": replace(_VERL_SEPARATE, feed=_verl(waits=True), bound=_eta),
        "verl_enable_switch_wait": replace(_VERL_SWITCH, feed=_verl(waits=True), bound=_eta),
        "verl_enable_switch": _VERL_SWITCH,
        "areal": replace(_APART, feed=lambda draw, batch, eta: Quota(draw, batch, eta=eta), bound=_none),
        "roll": replace(_APART, feed=lambda draw, batch, eta: Bucket(draw, batch, alpha=eta)),
        "staleflow": replace(_APART, stop_the_world=False, router="marginal_gain"),
        "seamlessflow": replace(
            _APART,
            lends=True,
            policy=lambda batch, mini_batch: Greedy(),
            stop_the_world=False,
            rebalances=True,
        ),
        "greedy": _GREEDY,
        "predictive": replace(_GREEDY, policy=lambda batch, mini_batch: Predictive(PredictiveConfig(migration=True))),
        "disaggregated": _OURS,
        "colocated": replace(_IN_TURN, rebalances=True, oldest_first=True),
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
