"""Who may start when, and what the trainer gets: the admission rule of each system, as published.

A feed knows groups only. The trainer loop asks it for groups to start at three moments (a step begins, groups were
consumed, weights were published) and for groups to train on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from seamless_verl.errors import SeamlessError
from seamless_verl.simulation.agents import Group
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
        """``count`` finished groups, and groups that are nobody's any more (to be stopped)."""

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
        self._draw = draw
        self._groups: dict[str, Group] = {}

    @property
    def finished(self) -> int:
        return self.protocol.num_available

    @property
    def in_flight(self) -> int:
        return sum(self.protocol.state_of(name) is EntryState.RESERVED for name in self._groups)

    def published(self, version: int) -> list[Group]:
        groups = []
        for _ in range(self.protocol.capacity(version)):
            group = self._draw(version)
            if self.protocol.reserve(group.name, version) is None:
                raise SeamlessError(f"{group.name}: capacity was promised and refused")
            self._groups[group.name] = group
            groups.append(group)
        return groups

    def finish(self, group: Group) -> None:
        self.protocol.occupy(group.name, tokens=group.tokens)

    def take(self, count: int) -> tuple[list[Group], list[Group]]:
        consumption = self.protocol.consume(count)
        surplus = [self._groups.pop(name) for name in consumption.surplus]
        return [self._groups.pop(consumed.group) for consumed in consumption.groups], surplus

    def awaited(self) -> frozenset[str]:
        return frozenset(self.protocol.awaited())
