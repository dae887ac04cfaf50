"""The state that decisions are made on: slices and their speeds, requests, data, weights. Policies only read it.

Invariant: a GPU belongs to one slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from seamless_verl.scheduling.events import AcquireRequested, Ending, RequestFinished, RequestStarted
from seamless_verl.scheduling.slices import (
    GENERATING,
    SERVING_SOON,
    InvalidTransition,
    Repair,
    Slice,
    SliceId,
    SliceState,
    SliceStatus,
    SwitchTimes,
    Tag,
)

_SPEED_DECAY = 0.97  # at each further request
_ALIKE_RATIO = 1.25  # of speeds that may be the same: measuring errs by some percent


def balance(slice_: Slice) -> float:
    """FLOP per byte of the slice's GPUs; 0 when unknown (all alike then)."""
    return slice_.hardware.flops / slice_.hardware.bandwidth if slice_.hardware else 0.0


def static_speed(slice_: Slice) -> float | None:
    """Expected generation speed in arbitrary units: bandwidth of all its GPUs."""
    return slice_.hardware.bandwidth * len(slice_.gpus) if slice_.hardware else None


@dataclass(slots=True)
class Roofline:
    """Which slices should rather train and which rather generate: the roofline, corrected by what is measured.

    Decoding reads every weight for every token (bound by memory bandwidth), training multiplies matrices (bound by
    FLOP/s). A slice's `balance` = FLOP/s per byte/s; a high balance is better used by training, a low one by rollout
    (SeamlessFlow). Facts from data sheets say how fast a slice should generate relative to others; the tokens it did
    generate say how fast it does.

    ``speed`` is on one scale for all slices, whichever of them were measured: 1 is the mean of what data sheets say.
    Measuring says how the measured slices share the speed that their data sheets promise of them together; one that was
    not measured yet has the speed of its data sheet, or is an average slice without one.
    """

    _slices: dict[SliceId, Slice] = field(default_factory=dict)
    _static: dict[SliceId, float] = field(default_factory=dict)  # by data sheets, their mean is 1
    _measured: dict[SliceId, tuple[float, float]] = field(default_factory=dict)  # expected seconds, seconds
    _total: float = 0.0  # of what was measured: the ratios of all slices
    _promised: float = 0.0  # of the same slices: the static speeds
    _kinds: dict[SliceId, float] | None = None

    def add(self, slice_: Slice) -> None:
        self._slices[slice_.id] = slice_
        self._kinds = None
        sheets = {name: static_speed(slice_) for name, slice_ in self._slices.items()}
        known = [sheet for sheet in sheets.values() if sheet is not None]
        average = sum(known) / len(known) if known else 1.0
        self._static = {name: 1.0 if sheet is None else sheet / average for name, sheet in sheets.items()}
        self._promised = sum(self._static[name] for name in self._measured)

    def measured(self, slice_id: SliceId, *, expected_s: float, took_s: float) -> None:
        """One more request.

        Sums of the last ones are compared, because who of many requests got a seat first is not always known: what one
        seems to have taken less another took more.

        Args:
            expected_s: what it would have taken on a slice of speed 1 under the same load.
        """
        before = self._measured.get(slice_id)
        self._kinds = None
        if before is None:
            self._promised += self._static[slice_id]
        else:
            self._total -= _ratio(before)
        sums = before or (0.0, 0.0)
        self._measured[slice_id] = sums = (_SPEED_DECAY * sums[0] + expected_s, _SPEED_DECAY * sums[1] + took_s)
        self._total += _ratio(sums)

    def speed(self, slice_id: SliceId) -> float:
        """Generation speed relative to an average slice; 1 when nothing is known."""
        if slice_id not in self._measured:
            return self._static[slice_id]
        return _ratio(self._measured[slice_id]) * self._promised / self._total

    def kinds(self) -> dict[SliceId, float]:
        """The speed of every slice, rounded to the mean of those that are about as fast: unlike ones stand out."""
        if self._kinds is None:
            ranked = sorted(self._slices, key=lambda name: (self.speed(name), name))
            self._kinds = {}
            while ranked:
                fastest = _ALIKE_RATIO * self.speed(ranked[0])
                alike = [name for name in ranked if self.speed(name) <= fastest]
                mean = sum(self.speed(name) for name in alike) / len(alike)
                self._kinds.update(dict.fromkeys(alike, mean))
                ranked = ranked[len(alike) :]
        return self._kinds

    def order(self, slices: Iterable[Slice], tag: Tag) -> list[SliceId]:
        """Best for ``tag`` first; ties by id, so that the order is the same on every machine."""
        if tag is Tag.TRAIN:
            ranked = sorted(slices, key=lambda s: (-balance(s), self.speed(s.id), s.id))
        else:
            ranked = sorted(slices, key=lambda s: (-self.speed(s.id), balance(s), s.id))
        return [s.id for s in ranked]


def _ratio(sums: tuple[float, float]) -> float:
    """How much faster than a slice of speed 1 it was."""
    expected_s, took_s = sums
    return expected_s / max(took_s, 1e-9)


@dataclass(slots=True, kw_only=True)
class Pending:
    """An acquire that was not answered yet."""

    event: AcquireRequested
    due_since: float | None = None  # when its data was there
    called_at: float | None = None  # when lent slices were called back for it
    stall_reported: bool = False


@dataclass(slots=True)
class Cluster:
    """Slices, open requests, data and published weights.

    Attributes:
        published: newest weight version; None before the first.
        ready: groups that the trainer could take now.
        in_flight: groups on their way.
        running: generations under way, and where.
        last_step: no step follows the one that ended.
        generated: tokens that finished requests generated, by slice.
        training_s: seconds that gangs were held, all grants that ended.
        costs: measured switches.
        roofline: which slice is good at what.
        wakes_apart: each slice of the trainer takes weights by itself when it is lent; else all do so together.
    """

    now: float = 0.0
    slices: dict[SliceId, SliceStatus] = field(default_factory=dict)
    pending: dict[str, Pending] = field(default_factory=dict)
    running: dict[str, SliceId] = field(default_factory=dict)
    generated: dict[SliceId, int] = field(default_factory=dict)
    published: int | None = None
    ready: int = 0
    in_flight: int = 0
    last_step: bool = False
    training_s: float = 0.0
    costs: SwitchTimes = field(default_factory=SwitchTimes)
    roofline: Roofline = field(default_factory=Roofline)
    wakes_apart: bool = False

    def __getitem__(self, slice_id: SliceId) -> SliceStatus:
        try:
            return self.slices[slice_id]
        except KeyError:
            raise InvalidTransition(f"no slice {slice_id}; known: {', '.join(self.slices) or 'none'}") from None

    def __iter__(self) -> Iterator[SliceStatus]:
        return iter(self.slices.values())

    def add(self, slice_: Slice, state: SliceState, version: int | None) -> None:
        """A slice joins; one that serves already has weights of ``version``."""
        if state not in (SliceState.IDLE, SliceState.ROLLOUT):
            raise InvalidTransition(f"SliceAdded: {slice_.id} cannot join as {state.name}")
        owned = {gpu: other.slice.id for other in self for gpu in other.slice.gpus}
        for gpu in slice_.gpus:
            if gpu in owned:
                raise InvalidTransition(f"{slice_.id}: {gpu.node}/{gpu.index} already belongs to {owned[gpu]}")
        if slice_.id in self.slices:
            raise InvalidTransition(f"slice {slice_.id} is already known")
        self.slices[slice_.id] = SliceStatus(
            slice=slice_, costs=self.costs, state=state, usable=slice_.capabilities, since=self.now, version=version
        )
        self.generated[slice_.id] = 0
        self.roofline.add(slice_)

    def idle(self, tag: Tag) -> list[SliceStatus]:
        """Free slices that could carry the tag now."""
        free = [
            s
            for s in self
            if s.state is SliceState.IDLE and tag in s.usable and s.holder is None and s.repair is not Repair.UNDER_WAY
        ]
        return [s for s in free if not s.slice.lendable] if tag is Tag.ROLLOUT and self.awaited() else free

    def may_carry(self, status: SliceStatus, tag: Tag) -> bool:
        """Whether it carries the tag, could, or will when what is restarted is back."""
        if tag not in status.usable and not (tag in status.slice.capabilities and status.comes_back):
            return False
        if tag is Tag.TRAIN or not status.slice.lendable or status.state in (*SERVING_SOON, SliceState.DRAINING):
            return True
        return not any(other.repair is Repair.GIVEN_UP for other in self.awaited())

    def awaited(self) -> list[SliceStatus]:
        """Slices of the trainer that can only train since their replica died, and that the others wait for.

        While there is one, none is lent: the trainer's workers load weights into their replicas together (verl 0.9.1:
        engine_workers.py, `update_weights`), and the others would wait for the one that cannot.
        """
        return [] if self.wakes_apart else [s for s in self if s.slice.lendable and s.usable == {Tag.TRAIN}]

    def lent(self) -> list[SliceStatus]:
        return [s for s in self if s.lent]

    def generating(self) -> list[SliceStatus]:
        return [s for s in self if s.state in GENERATING]

    def training_request(self) -> Pending | None:
        """The oldest unanswered acquire of a gang."""
        return next((p for p in self.pending.values() if p.event.tag is Tag.TRAIN), None)

    def is_due(self, pending: Pending) -> bool:
        """Whether the trainer could use the gang now, or nothing it could wait for is on its way."""
        return self.ready >= pending.event.minimum or self.in_flight == 0

    def shortfall(self, pending: Pending) -> list[SliceStatus]:
        """The lent slices that must come back for a gang, fewest and best for it first."""
        tag = pending.event.tag
        coming = [s for s in self if s.state is SliceState.DRAINING and tag in s.usable]
        missing = pending.event.count - len(self.idle(tag)) - len(coming)
        taken = [s for s in self if tag in s.usable and s.holder is None and s.lent]
        return self.by_priority(taken, tag)[: max(missing, 0)]

    def by_priority(self, statuses: Iterable[SliceStatus], tag: Tag) -> list[SliceStatus]:
        """Those that can do nothing else first, then by the roofline."""
        statuses = list(statuses)
        rank = {slice_id: i for i, slice_id in enumerate(self.roofline.order((s.slice for s in statuses), tag))}
        return sorted(statuses, key=lambda s: (len(s.usable), rank[s.slice.id]))

    def start_request(self, event: RequestStarted) -> None:
        if event.slice not in self.slices:
            raise InvalidTransition(f"RequestStarted: no slice {event.slice}")
        self.running[event.request] = event.slice

    def finish_request(self, event: RequestFinished) -> None:
        slice_id = self.running.pop(event.request, None)
        if slice_id is None:  # its slice failed: the request was written off then
            return
        if event.ending is not Ending.FAILED:
            self.generated[slice_id] += event.tokens

    def write_off(self, slice_id: SliceId) -> None:
        """Forget the generations of a slice that died."""
        self.running = {request: where for request, where in self.running.items() if where != slice_id}


def ids(statuses: Iterable[SliceStatus]) -> tuple[SliceId, ...]:
    return tuple(status.slice.id for status in statuses)
