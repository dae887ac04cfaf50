"""The systems that are compared, each by its published rule: who may start when, what the trainer gets, who uses which
slice. Everything else (hardware, work, seeds) is equal.

A feed is the admission rule. It knows groups only: the trainer loop asks it for groups to start at three moments (a
step begins, groups were consumed, weights were published) and for groups to train on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from seamless_verl.config import RouterConfig, SchedulerConfig
from seamless_verl.errors import ConfigError, SeamlessError, meant
from seamless_verl.scheduling.declaration import policy_of
from seamless_verl.scheduling.policies import Policy, SeamlessFlow
from seamless_verl.simulation.agents import Group
from seamless_verl.staleness.floors import reserve_between
from seamless_verl.staleness.protocol import EntryState, StalenessProtocol

Draw = Callable[[int], Group]  # a new group for the given weight version


class Feed(ABC):
    """``version`` is the newest one that replicas generate with."""

    def step_begins(self, version: int) -> list[Group]:
        return []

    def published(self, version: int) -> list[Group]:
        return []

    @abstractmethod
    def finish(self, group: Group) -> None: ...

    @abstractmethod
    def take(self, count: int) -> tuple[list[Group], list[Group]]:
        """``count`` finished groups, and groups that were given up (to be stopped)."""

    def to_discard(self, version: int) -> list[Group]:
        """Groups that the system gives up for their age, running or finished."""
        return []

    def awaited(self) -> frozenset[str]:
        """Unfinished groups that the batch being filled cannot do without."""
        return frozenset()

    @property
    def available(self) -> int:
        """Finished groups that may be taken."""
        return self.finished

    @property
    @abstractmethod
    def finished(self) -> int:
        """Groups that are whole, whether they may be taken yet or not (verl's ``get_sampleable_count``)."""

    @property
    @abstractmethod
    def in_flight(self) -> int: ...


class _Counting(Feed):
    """What the published systems share: finished groups in the order of their prompts, a number on the way."""

    def __init__(self, draw: Draw, batch: int) -> None:
        self.draw = draw
        self.batch = batch
        self.running: dict[str, Group] = {}
        self.ready: list[Group] = []

    @property
    def finished(self) -> int:
        return len(self.ready)

    @property
    def in_flight(self) -> int:
        return len(self.running)

    def admit(self, count: int, version: int) -> list[Group]:
        groups = [self.draw(version) for _ in range(count)]
        self.running.update((group.name, group) for group in groups)
        return groups

    def finish(self, group: Group) -> None:
        del self.running[group.name]
        self.ready.append(group)

    def take(self, count: int) -> tuple[list[Group], list[Group]]:
        self.ready.sort(key=lambda group: group.reserved)  # verl: ordered by the step of the prompt; stable
        taken, self.ready = self.ready[:count], self.ready[count:]
        return taken, []


class BatchPerStep(_Counting):
    """verl: each step submits one batch of prompts; ``warmup`` batches are submitted before the first step.

    Args:
        oldest: verl's ``max_off_policy_threshold`` with the strategy ``wait``: nothing is sampled while a prompt that
            is under way has this age in versions, counted from 1. None: the age is not bounded (verl's default would
            drop groups after 8 versions, which none of these runs reaches).

    Source: `PPOTrainer.prepare_step`, `_add_async_warmup_batches` and `ReplayBufferAsync` of verl 0.9.1.
    """

    def __init__(self, draw: Draw, batch: int, *, warmup: float, oldest: int | None = None) -> None:
        super().__init__(draw, batch)
        self._extra = round(warmup * batch)
        self._oldest = oldest
        self._version = 0

    @property
    def available(self) -> int:
        if self._oldest is not None and self.running:
            first = next(iter(self.running.values()))  # in the order of submission
            if self._version - first.reserved + 1 >= self._oldest:
                return 0
        return len(self.ready)

    def step_begins(self, version: int) -> list[Group]:
        self._version = version
        count, self._extra = self.batch + self._extra, 0
        return self.admit(count, version)


class Quota(_Counting):
    """AReaL: the N-th group may start while floor((N - 1) / B) <= v + eta (bounds the work, not a sample's age)."""

    def __init__(self, draw: Draw, batch: int, *, eta: int) -> None:
        super().__init__(draw, batch)
        self._eta = eta
        self._submitted = 0

    def published(self, version: int) -> list[Group]:
        allowed = (version + self._eta + 1) * self.batch
        count = max(0, allowed - self._submitted)
        self._submitted += count
        return self.admit(count, version)

    def take(self, count: int) -> tuple[list[Group], list[Group]]:
        taken, self.ready = self.ready[:count], self.ready[count:]  # in the order in which they finished
        return taken, []


class Bucket(_Counting):
    """ROLL: at most (1 + alpha) B groups started and not consumed; a group older than alpha versions is discarded."""

    def __init__(self, draw: Draw, batch: int, *, alpha: int) -> None:
        super().__init__(draw, batch)
        self._alpha = alpha

    def published(self, version: int) -> list[Group]:
        free = (1 + self._alpha) * self.batch - len(self.running) - len(self.ready)
        return self.admit(max(0, free), version)

    def to_discard(self, version: int) -> list[Group]:
        old = [group for group in self.running.values() if group.reserved < version - self._alpha]
        for group in old:
            del self.running[group.name]
        stale = [group for group in self.ready if group.version < version - self._alpha]
        for group in stale:
            self.ready.remove(group)
        return old + stale


class Bounded(Feed):
    """Ours and StaleFlow's: the reserve / occupy / consume protocol, the object of the live run."""

    def __init__(self, draw: Draw, protocol: StalenessProtocol) -> None:
        self.protocol = protocol
        self.oldest: Callable[[], int | None] = lambda: None  # version that serves; None: all have the newest
        self._draw = draw
        self._groups: dict[str, Group] = {}

    @property
    def finished(self) -> int:
        return self.protocol.num_available

    @property
    def in_flight(self) -> int:
        return sum(self.protocol.state_of(name) is EntryState.RESERVED for name in self._groups)

    def published(self, version: int) -> list[Group]:
        groups, oldest = [], self.oldest()
        for _ in range(self.protocol.capacity(version)):
            group = self._draw(version)
            if reserve_between(self.protocol, group.name, version if oldest is None else oldest, version) is None:
                raise SeamlessError(f"{group.name}: capacity was promised and refused")
            group.reserved = self.protocol.reserved_for(group.name) or 0
            self._groups[group.name] = group
            groups.append(group)
        return groups

    def finish(self, group: Group) -> None:
        self.protocol.occupy(group.name, group.version, tokens=group.tokens)

    def take(self, count: int) -> tuple[list[Group], list[Group]]:
        consumption = self.protocol.consume(count)
        surplus = [self._groups.pop(name) for name in consumption.surplus]
        return [self._groups.pop(consumed.group) for consumed in consumption.groups], surplus

    def awaited(self) -> frozenset[str]:
        return frozenset(self.protocol.awaited())


# ---------------------------------------------------------------- the systems


def _eta(eta: int) -> int:
    return eta


def _none(eta: int) -> None:
    """No bound on staleness."""


_VERLS_ROUTER = RouterConfig(oldest_first=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """One system.

    Attributes:
        colocated: every slice trains and rolls out, all in turn.
        lends: slices that can train may roll out where their tags say so; else pools stay apart.
        bound: on staleness in versions, given eta; None: there is none.
        policy: of the scheduler, given its settings, and batch and mini-batch in groups.
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
        router: what ``seamless.router`` would say in a live run of it.
        rebalances: requests are placed anew when replicas join (verl's gate: where it announces them, see `TrainLoop`).
    """

    colocated: bool = False
    bound: Callable[[int], int | None] = _eta
    lends: bool = False
    needs_standing: bool = False
    policy: Callable[[SchedulerConfig, int, int], Policy]
    feed: Callable[[Draw, int, int], Feed]
    streaming: bool = False
    releases: bool = False
    stop_the_world: bool = True
    awaits_load: bool = False
    barrier: bool = False
    poll_s: float = 0.0
    router: RouterConfig = _VERLS_ROUTER
    rebalances: bool = False

    def routed(self, asked: RouterConfig | None) -> RouterConfig:
        """The router of a run that asks for this one: it decides in ours, which have the default of a live run."""
        if asked is None or self.router == RouterConfig():
            return asked or self.router
        return replace(self.router, oldest_first=asked.oldest_first)

    @property
    def rolls(self) -> bool:
        """Whether replicas may take new weights one after the other: the trainer hands them over first."""
        return self.reserves and not self.stop_the_world

    @property
    def reserves(self) -> bool:
        """Whether it admits by the reserve / occupy / consume protocol, which can be told how many batches."""
        return self.feed is _bounded

    def update(self, batch: int, mini_batch: int) -> int:
        """Groups that are trained as soon as they are there."""
        return mini_batch if self.streaming else batch


def _bounded(draw: Draw, batch: int, eta: int) -> Feed:
    return Bounded(draw, StalenessProtocol(eta=eta, batch_size=batch))


def _policy(name: str) -> Callable[[SchedulerConfig, int, int], Policy]:
    """What a live run with ``seamless.scheduler.policy=name`` gets."""
    return lambda asked, batch, mini_batch: policy_of(replace(asked, policy=name), batch=batch, mini_batch=mini_batch)


def _verl(*, warmup: bool = True, waits: bool = False) -> Callable[[Draw, int, int], Feed]:
    """Admission of verl's modes: ``warmup``: eta batches in advance; ``waits``: for whatever is eta versions old."""

    def feed(draw: Draw, batch: int, eta: int) -> Feed:
        return BatchPerStep(draw, batch, warmup=eta if warmup else 0, oldest=eta + 1 if waits else None)

    return feed


_STALEFLOWS = RouterConfig(policy="marginal_gain", migrate=True, oldest_first=False)
_APART = Regime(policy=_policy("disaggregated"), feed=_bounded)
_IN_TURN = Regime(colocated=True, policy=_policy("colocated"), feed=_bounded)
_VERL_SYNC = replace(_IN_TURN, feed=_verl(warmup=False), bound=lambda eta: 0, poll_s=2.0)
_VERL_SEPARATE = replace(_APART, feed=_verl(), bound=_none, streaming=True, poll_s=2.0)
_VERL_SWITCH = replace(_VERL_SEPARATE, lends=True, needs_standing=True, policy=_policy("verl_gate"))
_OURS = replace(_APART, streaming=True, stop_the_world=False, awaits_load=True, router=RouterConfig())
_GREEDY = replace(_OURS, lends=True, policy=_policy("greedy"), releases=True, rebalances=True)

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
        "staleflow": replace(_APART, stop_the_world=False, router=_STALEFLOWS),
        "seamlessflow": replace(
            _APART,
            lends=True,
            policy=lambda asked, batch, mini_batch: SeamlessFlow(),
            stop_the_world=False,
            rebalances=True,
        ),
        "greedy": _GREEDY,
        "predictive": replace(_GREEDY, policy=_policy("predictive")),
        "verl_gate": replace(_GREEDY, policy=_policy("verl_gate"), needs_standing=True),
        "disaggregated": _OURS,
        "colocated": replace(_IN_TURN, rebalances=True, router=RouterConfig()),
    }
)


def regime(name: str) -> Regime:
    """Look a system up.

    Raises:
        ConfigError: unknown; names the nearest known one.
    """
    if name not in REGIMES:
        raise ConfigError("scheduler.policy", name, "no such system", meant(name, REGIMES))
    return REGIMES[name]
