"""The state that decisions are made on. The scheduler changes it; policies only read.

Invariant: the state of a slice changes through `SliceStatus.move` and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from seamless_verl.scheduling.events import AcquireRequested, Ending, RequestFinished, RequestStarted
from seamless_verl.scheduling.roofline import Roofline
from seamless_verl.scheduling.slices import (
    InvalidTransition,
    Move,
    Slice,
    SliceId,
    SliceState,
    Tag,
    next_state,
)
from seamless_verl.scheduling.switch_costs import SwitchCosts

GENERATING = frozenset({SliceState.ROLLOUT, SliceState.SYNCING})
SERVING_SOON = GENERATING | {SliceState.WAKING}


@dataclass(slots=True, kw_only=True)
class SliceStatus:
    """One slice as it is now.

    Attributes:
        usable: capabilities that are not lost.
        version: weights it holds while it serves.
        command: number of the command it has not answered yet.
        since: when it entered its state.
        holder: request that was granted this slice.
        decision: number of the decision that lent it.
        interrupted: the drain under way does not wait for running requests.
        restarting: what it lost is to come back.
        restart_begun: a `RestartSlice` is out: its GPUs are taken until that is answered.
        lost_for_good: it will not come back by itself.
    """

    slice: Slice
    state: SliceState
    usable: frozenset[Tag]
    since: float
    version: int | None = None
    command: int | None = None
    holder: str | None = None
    decision: int | None = None
    interrupted: bool = False
    restarting: bool = False
    restart_begun: bool = False
    lost_for_good: bool = False

    @property
    def lent(self) -> bool:
        """A slice that could train is (or is becoming) a rollout slice and nobody called it back."""
        return self.slice.lendable and self.state in SERVING_SOON

    @property
    def leisurely(self) -> bool:
        """Lent before, and draining without its requests being interrupted."""
        return self.slice.lendable and self.state is SliceState.DRAINING and not self.interrupted

    @property
    def may_restart(self) -> bool:
        """A replica takes all the memory that it will ever have when it starts: not while its GPUs train."""
        return self.restarting and not self.restart_begun and self.state in (SliceState.IDLE, SliceState.FAILED)

    @property
    def doing(self) -> str:
        """For people."""
        return "restarting its replica" if self.restart_begun else self.state.value

    def move(self, move: Move, at: float, story: str) -> None:
        after = next_state(self.slice.id, self.state, move, story)
        if after is not self.state:
            self.state, self.since = after, at


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A generation under way."""

    start: RequestStarted


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
        steps: training steps that ended.
        last_step: no step follows the one that ended.
        generated: tokens that finished requests generated, by slice.
        training_s: seconds that gangs were held, all grants that ended.
        costs: measured switches.
        roofline: which slice is good at what.
    """

    now: float = 0.0
    slices: dict[SliceId, SliceStatus] = field(default_factory=dict)
    pending: dict[str, Pending] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    on_slice: dict[SliceId, set[str]] = field(default_factory=dict)
    generated: dict[SliceId, int] = field(default_factory=dict)
    published: int | None = None
    ready: int = 0
    in_flight: int = 0
    steps: int = 0
    last_step: bool = False
    training_s: float = 0.0
    costs: SwitchCosts = field(default_factory=SwitchCosts)
    roofline: Roofline = field(default_factory=Roofline)

    def __getitem__(self, slice_id: SliceId) -> SliceStatus:
        try:
            return self.slices[slice_id]
        except KeyError:
            raise InvalidTransition(f"no slice {slice_id}; known: {', '.join(self.slices) or 'none'}") from None

    def __iter__(self) -> Iterator[SliceStatus]:
        return iter(self.slices.values())

    def add(self, status: SliceStatus) -> None:
        owned = {gpu: other.slice.id for other in self for gpu in other.slice.gpus}
        for gpu in status.slice.gpus:
            if gpu in owned:
                raise InvalidTransition(f"{status.slice.id}: {gpu.node}/{gpu.index} already belongs to {owned[gpu]}")
        if status.slice.id in self.slices:
            raise InvalidTransition(f"slice {status.slice.id} is already known")
        self.slices[status.slice.id] = status
        self.on_slice[status.slice.id] = set()
        self.generated[status.slice.id] = 0
        self.roofline.add(status.slice)

    def idle(self, tag: Tag) -> list[SliceStatus]:
        """Free slices that could carry the tag now."""
        free = [
            s
            for s in self
            if s.state is SliceState.IDLE and tag in s.usable and s.holder is None and not s.restart_begun
        ]
        return [s for s in free if not s.slice.lendable] if tag is Tag.ROLLOUT and self.without_replica() else free

    def may_carry(self, status: SliceStatus, tag: Tag) -> bool:
        """Whether it carries the tag, could, or will when what is restarted is back."""
        if tag not in status.usable and not (tag in status.slice.capabilities and status.restarting):
            return False
        if tag is Tag.TRAIN or not status.slice.lendable or status.state in (*SERVING_SOON, SliceState.DRAINING):
            return True
        return not any(other.lost_for_good for other in self.without_replica())

    def without_replica(self) -> list[SliceStatus]:
        """Slices of the trainer that can only train since their replica died.

        While there is one, none is lent: the trainer's workers load weights into their replicas together (verl 0.9.1:
        engine_workers.py, `update_weights`), and the others would wait for the one that cannot.
        """
        return [s for s in self if s.slice.lendable and s.usable == {Tag.TRAIN}]

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
        """The lent (or leisurely draining) slices that must come back for a gang, fewest and best for it first."""
        tag = pending.event.tag
        coming = [s for s in self if s.state is SliceState.DRAINING and s.interrupted and tag in s.usable]
        missing = pending.event.count - len(self.idle(tag)) - len(coming)
        taken = [s for s in self if tag in s.usable and s.holder is None and (s.lent or s.leisurely)]
        return self.by_priority(taken, tag)[: max(missing, 0)]

    def by_priority(self, statuses: Iterable[SliceStatus], tag: Tag) -> list[SliceStatus]:
        """Those that can do nothing else first, then by the roofline."""
        statuses = list(statuses)
        rank = {slice_id: i for i, slice_id in enumerate(self.roofline.order((s.slice for s in statuses), tag))}
        return sorted(statuses, key=lambda s: (len(s.usable), rank[s.slice.id]))

    def start_request(self, event: RequestStarted) -> None:
        if event.slice not in self.slices:
            raise InvalidTransition(f"RequestStarted: no slice {event.slice}")
        self.running[event.request] = Running(start=event)
        self.on_slice[event.slice].add(event.request)

    def finish_request(self, event: RequestFinished) -> None:
        run = self.running.pop(event.request, None)
        if run is None:  # its slice failed: the request was written off then
            return
        self.on_slice[run.start.slice].discard(event.request)
        if event.ending is not Ending.FAILED:
            self.generated[run.start.slice] += event.tokens

    def write_off(self, slice_id: SliceId) -> None:
        """Forget the generations of a slice that died."""
        for request in self.on_slice[slice_id]:
            del self.running[request]
        self.on_slice[slice_id] = set()


def ids(statuses: Iterable[SliceStatus]) -> tuple[SliceId, ...]:
    return tuple(status.slice.id for status in statuses)
