"""The reserve / occupy / consume protocol of StaleFlow (arXiv 2601.12784): staleness as a capacity.

    version  v            v+1          …   v+eta          one buffer per coming training step, B groups each
           ┌────────────┬────────────┬───┬────────────┐
           │ o o o o r  │ o r r r .  │ … │ r r . . .  │   o finished   r reserved   . free
           └────────────┴────────────┴───┴────────────┘
    consume ◄─ first        occupy: earliest   reserve: latest legal place

Invariant: **V_traj + eta >= V_buf** for every entry, where V_traj is a version not newer than the one that the first
token of the group was generated with.

Proof. ``reserve`` admits only buffers <= V_traj + eta. ``occupy`` and the promotion after an abort move an entry to an
earlier buffer, which keeps the inequality; the repair step moves a reservation later only after testing it; carrying
a surplus entry into the next step tests it too. Nothing else moves an entry, and the bound does not mention how long
a generation takes, so it holds for any lengths, interrupts, migrations and aborts. Buffers exist for v … v+eta only,
so at most (eta+1) * slots groups are in flight; ``in_flight`` admits fewer, and then groups are younger on average than
the bound allows: by Little's law their mean age is the number of batches in flight less one.

Replicas of unlike versions change nothing in this as long as no rollout of a group begins with weights older than its
reservation names: then the V_traj found at ``occupy``, the lowest of the group, is the reserved one or newer. Floors
see to that (`staleness.floors`), and ``occupy`` compares.

Liveness: when nothing is in flight and every reservation was granted, buffer v has room or is READY, because a free
slot in it pulls finished groups out of later buffers. A floor is never newer than what is published, and replicas
only advance, so a group that nobody may begin yet can be begun once one has pulled (`staleness.synchronisation`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any

from seamless_verl.checked import check_bound, check_redundancy, whole
from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.staleness.buffers import BufferState, StalenessBuffer


class ProtocolError(SeamlessError):
    """A call that the protocol does not allow; the message tells what the entry was."""


class EntryState(Enum):
    RESERVED = "reserved"
    OCCUPIED = "occupied"


@dataclass(slots=True, kw_only=True)
class _GroupEntry:
    version: int
    buffer: int
    state: EntryState
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedGroup:
    """A group handed to the trainer. ``version`` is its V_traj, ``buffer`` the weight version being trained."""

    group: str
    version: int
    buffer: int

    @property
    def staleness(self) -> int:
        return self.buffer - self.version


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """What `StalenessProtocol.consume` gave.

    Attributes:
        groups: the mini-batch.
        surplus: groups of batch redundancy that no later step may use; their slots are gone already, and their
            generations should stop. Always empty when ``redundancy`` is 1: nothing is discarded to keep the bound.
    """

    groups: tuple[ConsumedGroup, ...]
    surplus: tuple[str, ...]


class StalenessProtocol:
    """Entries are whole groups (all rollouts of one prompt); a group's version is the lowest of its members.

    Args:
        eta: bound on V_buf - V_traj in weight versions; 0 is synchronous.
        batch_size: groups that one training step consumes (B).
        version: weight version that the first step starts from.
        redundancy: slots per buffer = ceil(batch_size * redundancy); the step starts when ``batch_size`` are finished.
        in_flight: batches that `capacity` admits, 1 to eta + 1; None: eta + 1. A matter of admission only: what was
            reserved beyond it (a checkpoint under another value) stays.
        repair: whether ``occupy`` moves reservations into the hole it leaves; off only to measure what it is worth.

    Raises:
        ConfigError: an argument that cannot work.
    """

    def __init__(
        self,
        *,
        eta: int,
        batch_size: int,
        version: int = 0,
        redundancy: float = 1.0,
        in_flight: float | None = None,
        repair: bool = True,
    ) -> None:
        check_bound(eta, in_flight)
        whole("data.train_batch_size", batch_size, 1, "write 1 or more")
        check_redundancy("redundancy", redundancy)
        self.eta = eta
        self.batch_size = batch_size
        self.redundancy = redundancy
        self.in_flight = in_flight
        self.repair = repair
        self._slots = math.ceil(batch_size * redundancy)
        self._entries: dict[str, _GroupEntry] = {}
        self._buffers: deque[StalenessBuffer] = deque()
        for number in range(version, version + eta + 1):
            self._open(number)

    # ---------------------------------------------------------------- reading

    @property
    def version(self) -> int:
        """Weight version that the step being filled starts from (v)."""
        return self._buffers[0].version

    @property
    def num_in_flight(self) -> int:
        """Groups reserved or finished and not yet consumed; never above (eta + 1) * slots."""
        return len(self._entries)

    @property
    def num_available(self) -> int:
        """Finished groups of the step being filled that `consume` can hand out now."""
        first = self._buffers[0]
        return min(len(first.occupied), first.needed - first.taken)

    @property
    def num_ahead(self) -> int:
        """Finished groups that wait in later steps."""
        return sum(len(buffer.occupied) for buffer in self._buffers) - len(self._buffers[0].occupied)

    def capacity(self, version: int) -> int:
        """How many more groups that start with weights of ``version`` can be reserved."""
        free = sum(max(0, buffer.num_free) for buffer in self._buffers if buffer.version <= version + self.eta)
        if self.in_flight is None:
            return free
        # What a step has handed out counts until it ends: admitted now, a group would have the old version.
        held = self.num_in_flight + self._buffers[0].taken
        return max(0, min(free, math.ceil(self.in_flight * self._slots) - held))

    def groups(self) -> Iterator[tuple[str, EntryState]]:
        """Every group in flight."""
        for group, entry in self._entries.items():
            yield group, entry.state

    def stuck(self) -> tuple[str, ...]:
        """Unfinished groups that keep the step being filled from being READY; empty while more can be reserved for it.

        Oldest version first, then those of later steps that will take its free places (``in_flight``).
        """
        first = self._buffers[0]
        if first.state is BufferState.READY or (first.num_free and self.capacity(self.version)):
            return ()
        named = (group for buffer in self._buffers for group, _ in buffer.reserved())
        return tuple(islice(named, max(first.num_missing, first.num_reserved)))

    def awaited(self) -> Iterator[str]:
        """Unfinished groups that the step being filled cannot do without: the bound keeps them out of later ones."""
        for group, version in self._buffers[0].reserved():
            if version + self.eta > self.version:
                return
            yield group

    def state_of(self, group: str) -> EntryState | None:
        """Where a group stands; ``None``: it is unknown, aborted or consumed."""
        entry = self._entries.get(group)
        return entry.state if entry else None

    def reserved_for(self, group: str) -> int | None:
        """The version that its reservation named (`reserve`); ``None``: it holds none."""
        entry = self._entries.get(group)
        return entry.version if entry is not None and entry.state is EntryState.RESERVED else None

    # ---------------------------------------------------------------- the protocol

    def reserve(self, group: str, version: int) -> int | None:
        """Ask for a slot before the group's first token; granted again, unchanged, to a group that has one.

        Args:
            group: name of the group, unique among those in flight.
            version: weight version it starts with, or any older one (V_traj).

        Returns:
            V_buf of the latest legal buffer with room; ``None`` is back-pressure: ask again after `consume` or `abort`.

        Raises:
            ProtocolError: ``version`` is newer than the weights being trained.
        """
        known = self._entries.get(group)
        if known is not None:
            return known.buffer
        if version > self.version:
            story = f"the newest weights are of version {self.version}"
            raise ProtocolError(f"reserve({group!r}, version={version}): {story}")
        for buffer in reversed(self._buffers):
            if buffer.version <= version + self.eta and buffer.num_free > 0:
                self._entries[group] = _GroupEntry(version=version, buffer=buffer.version, state=EntryState.RESERVED)
                buffer.add_reserved(group, version)
                return buffer.version
        return None

    def occupy(self, group: str, version: int | None = None, *, tokens: int = 0) -> int:
        """The group is finished: give back its reservation, repair, and take the earliest free place.

        Args:
            version: V_traj as it turned out to be; ``None``: as reserved.
            tokens: how much there is to train on, for the order of `consume`.

        Returns:
            V_buf of the buffer that the group is in now.

        Raises:
            ProtocolError: the group holds no reservation, or it started with older weights than it was reserved for.
        """
        entry = self._entries.get(group)
        if entry is None or entry.state is not EntryState.RESERVED:
            raise ProtocolError(f"occupy({group!r}): it is {entry.state.value if entry else 'not in flight'}")
        if version is not None and not entry.version <= version <= self.version:
            story = f"it started with version {version}, was reserved for {entry.version}"
            raise ProtocolError(f"occupy({group!r}): {story} and the newest weights are of version {self.version}")
        self._buffer(entry.buffer).remove_reserved(group, entry.version)
        hole = next(buffer for buffer in self._buffers if buffer.num_free > 0)
        buffer = self._repair(hole) if self.repair else hole
        if version is not None:
            entry.version = version
        entry.state, entry.buffer, entry.tokens = EntryState.OCCUPIED, buffer.version, tokens
        buffer.add_occupied(group, entry.version, tokens)
        return buffer.version

    def abort(self, group: str) -> None:
        """The group failed, was filtered or given up: its slot returns and finished groups of later steps move up.

        Raises:
            ProtocolError: the group is not in flight (never reserved, aborted before, or consumed).
        """
        entry = self._entries.pop(group, None)
        if entry is None:
            raise ProtocolError(f"abort({group!r}): it is not in flight")
        buffer = self._buffer(entry.buffer)
        if entry.state is EntryState.RESERVED:
            buffer.remove_reserved(group, entry.version)
        else:
            del buffer.occupied[group]
        self._promote(self._repair(buffer) if self.repair else buffer)

    def consume(self, count: int) -> Consumption:
        """Hand out ``count`` finished groups of the step being filled; its last one opens the next step.

        The longest of them first, in order of occupation where they are equal: the step ends with the mini-batch that
        holds the group finished last, and the shorter the rest of that one is, the sooner. Which groups a step trains
        on does not depend on it: those beyond its need are left out first.

        Mini-batches of a step may be taken while later groups of it are still generated: the bound compares with the
        version that the step starts from, which is the same for all of them.

        Raises:
            ProtocolError: fewer than ``count`` are finished, or ``count`` reaches beyond the step.
        """
        first = self._buffers[0]
        if not 1 <= count <= first.needed - first.taken:
            story = f"step {first.version} has handed out {first.taken} of its {first.needed} groups"
            raise ProtocolError(f"consume({count}): {story}")
        if len(first.occupied) < count:
            raise ProtocolError(f"consume({count}): {len(first.occupied)} groups of step {first.version} are finished")
        groups = []
        for group, version in first.take_longest(count):
            del self._entries[group]
            groups.append(ConsumedGroup(group=group, version=version, buffer=first.version))
        surplus = self._advance() if first.taken == first.needed else ()
        return Consumption(groups=tuple(groups), surplus=surplus)

    # ---------------------------------------------------------------- moving entries

    def _open(self, version: int) -> None:
        self._buffers.append(StalenessBuffer(version=version, slots=self._slots, needed=self.batch_size))

    def _buffer(self, version: int) -> StalenessBuffer:
        return self._buffers[version - self._buffers[0].version]

    def _repair(self, hole: StalenessBuffer) -> StalenessBuffer:
        """Move the free slot of ``hole`` as early as it goes, by moving reservations later, and return where it is.

        StaleFlow moves one reservation, into the slot that the finished group had. Here the earliest free slot is the
        target and the step repeats, so that no legal swap of a finished group with an earlier reservation remains.
        """
        for earlier in self._buffers:
            if earlier is hole:
                break
            waiting = earlier.reserved_since(hole.version - self.eta)
            if waiting is not None:
                entry = self._entries[waiting]
                earlier.remove_reserved(waiting, entry.version)
                hole.add_reserved(waiting, entry.version)
                entry.buffer = hole.version
                return self._repair(earlier)
        return hole

    def _promote(self, buffer: StalenessBuffer) -> None:
        """Fill a free slot with the first finished group of a later step, that one's with the next, and so on."""
        for later in self._buffers:
            if later.version > buffer.version and later.occupied and buffer.num_free > 0:
                group, version = later.occupied.popitem(last=False)
                entry = self._entries[group]
                buffer.add_occupied(group, version, entry.tokens)
                entry.buffer = buffer.version
                buffer = later

    def _advance(self) -> tuple[str, ...]:
        """Close the first buffer and open a new last one; what batch redundancy left over moves on where it may."""
        closed = self._buffers.popleft()
        self._open(closed.version + self.eta + 1)
        surplus = [group for group, version in closed.occupied.items() if not self._carry(group, version)]
        surplus += [group for group, version in closed.reserved() if not self._carry(group, version)]
        return tuple(surplus)

    def _carry(self, group: str, version: int) -> bool:
        entry = self._entries[group]
        finished = entry.state is EntryState.OCCUPIED
        for buffer in self._buffers if finished else reversed(self._buffers):
            if buffer.version <= version + self.eta and buffer.num_free > 0:
                entry.buffer = buffer.version
                if finished:
                    buffer.add_occupied(group, version, entry.tokens)
                else:
                    buffer.add_reserved(group, version)
                return True
        del self._entries[group]
        return False

    # ---------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """Everything as plain JSON data, taken between two steps.

        Raises:
            ProtocolError: the step being filled has handed out a part of its batch.
        """
        if self._buffers[0].taken:
            raise ProtocolError(f"state(): step {self.version} has handed out {self._buffers[0].taken} of its groups")
        return {
            "eta": self.eta,
            "batch_size": self.batch_size,
            "slots": self._slots,
            "version": self.version,
            "buffers": [
                {
                    "occupied": [(g, version, self._entries[g].tokens) for g, version in buffer.occupied.items()],
                    "reserved": list(buffer.reserved()),
                }
                for buffer in self._buffers
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken; reserved groups stay reserved.

        Raises:
            ConfigError: the state was taken under another bound, batch size or redundancy.
        """
        for key, found, now in (
            ("seamless.staleness.eta", state["eta"], self.eta),
            ("data.train_batch_size", state["batch_size"], self.batch_size),
            ("seamless.staleness.redundancy", state["slots"] / state["batch_size"], self._slots / self.batch_size),
        ):
            if found != now:
                raise ConfigError(key, now, f"the checkpoint was taken with {found}", f"write {found}, or start afresh")
        self._buffers.clear()
        self._entries.clear()
        for number, held in enumerate(state["buffers"], start=state["version"]):
            self._open(number)
            for group, version, tokens in held["occupied"]:
                entry = _GroupEntry(version=version, buffer=number, state=EntryState.OCCUPIED, tokens=tokens)
                self._entries[group] = entry
                self._buffers[-1].add_occupied(group, version, tokens)
            for group, version in held["reserved"]:
                self._entries[group] = _GroupEntry(version=version, buffer=number, state=EntryState.RESERVED)
                self._buffers[-1].add_reserved(group, version)
