"""Where every device-second went: a slice is in exactly one category at any moment, so the books always add up.

    events ──► Ledger ──► one account per slice ──► seconds by category, and stretches for the lanes of the report

The same object computes the idle shares of a live step and the ledger of a finished recording. Pure: time comes with
the events. Events out of order are taken to have happened at the latest time that the slice has seen.
"""

from __future__ import annotations

import typing
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from seamless_verl.observe import flight
from seamless_verl.observe.flight import FlightEvent, Phase, SliceState

# Waiting for the last tenth of a batch (its last group, if it has less than ten) is waiting for stragglers; anything
# earlier is waiting for data.
STRAGGLER_SHARE = 0.1
_ANY = "any"  # all requests on a replica count as one: it is busy while at least one is out


class Category(str, Enum):
    """What a device-second was spent on, in the order in which reports list it."""

    TRAIN = "train"
    GENERATE = "generate"
    PREFILL_AGAIN = "prefill_again"
    SYNC = "sync"
    SWITCH = "switch"
    WAIT_DATA = "wait_data"
    WAIT_STRAGGLER = "wait_straggler"
    FAILED = "failed"
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"
    OTHER = "other"


IDLE = frozenset({Category.WAIT_DATA, Category.WAIT_STRAGGLER})

_OF_PHASE: Mapping[Phase, Category] = {
    **dict.fromkeys(Phase, Category.TRAIN),
    Phase.WAIT_FOR_BATCH: Category.WAIT_DATA,
    Phase.SYNC_WEIGHTS: Category.SYNC,
    Phase.SWITCH: Category.SWITCH,
    Phase.VALIDATE: Category.VALIDATION,
    Phase.CHECKPOINT: Category.CHECKPOINT,
}
_OF_STATE: Mapping[SliceState, Category] = {
    SliceState.SYNCING: Category.SYNC,
    SliceState.WAKING: Category.SWITCH,
    SliceState.IDLE: Category.WAIT_DATA,
    SliceState.FAILED: Category.FAILED,
}


AccountKey = tuple[str, str, int]
"""Slice, pool and devices: a slice may come back with another size when a run is continued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A slice was in one state and one category from ``start`` to ``stop`` (seconds)."""

    account: AccountKey
    start: float
    stop: float
    state: SliceState
    category: Category


class _Account:
    """One slice: what it is doing, since when, and the seconds charged so far."""

    def __init__(self, added: flight.SliceAdded, at: float) -> None:
        self.key: AccountKey = added.slice, added.pool, added.devices
        self.state = added.state
        self.in_flight: dict[str, bool] = {}  # request -> whether it is prefilling again
        self.prefilling_again = 0
        self.category = Category.OTHER
        self.since = at
        self.opened = at
        self.seconds = dict.fromkeys(Category, 0.0)

    def categorize(self, phase: Phase | None, straggling: bool) -> Category:
        if self.state is SliceState.TRAINING:
            found = _OF_PHASE[phase] if phase is not None else Category.OTHER
        elif self.state in (SliceState.ROLLOUT, SliceState.DRAINING):
            if self.prefilling_again:
                found = Category.PREFILL_AGAIN
            elif self.in_flight:
                found = Category.GENERATE
            else:
                found = Category.SWITCH if self.state is SliceState.DRAINING else Category.WAIT_DATA
        else:
            found = _OF_STATE[self.state]
        return Category.WAIT_STRAGGLER if straggling and found is Category.WAIT_DATA else found

    def charge(self, at: float) -> Stretch | None:
        """Book the time up to ``at`` on the current category."""
        if at <= self.since:
            return None
        stretch = Stretch(account=self.key, start=self.since, stop=at, state=self.state, category=self.category)
        self.seconds[self.category] += at - self.since
        self.since = at
        return stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSeconds:
    """The books of one slice: ``seconds`` by category add up to ``wall_s``; times ``devices``, to device-seconds."""

    slice: str
    pool: str
    devices: int
    wall_s: float
    seconds: Mapping[Category, float]


class Ledger:
    """Books the device-seconds of every slice by category.

    Args:
        sink: is given every stretch as it closes, in order of time per slice; ``None`` where only totals are wanted.
    """

    def __init__(self, sink: Callable[[Stretch], None] | None = None) -> None:
        self._sink = sink
        self._accounts: dict[str, _Account] = {}
        self._closed: dict[AccountKey, SliceSeconds] = {}
        self._ended: dict[str, float] = {}  # slice -> when its last account was closed
        self._names: dict[str, str] = {}  # server address -> slice
        self._phases: list[Phase] = []
        self._straggling = False
        self._latest = 0.0

    def handle(self, event: FlightEvent) -> None:
        """Take an event in; kinds that move no time between categories are ignored."""
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)
        self._latest = max(self._latest, event.at)

    def books(self, at: float) -> tuple[SliceSeconds, ...]:
        """Charge all slices up to ``at``; one entry per slice that there ever was (two, if its size changed)."""
        books = dict(self._closed)
        for account in self._accounts.values():
            self._charge(account, at)
            _add(books, account)
        return tuple(books.values())

    # ---------------------------------------------------------------- events about the whole gang

    def _run_started(self, event: flight.RunStarted) -> None:
        self._close_all(self._latest)  # an earlier run in this folder was killed after its last event

    def _run_ended(self, event: flight.RunEnded) -> None:
        self._close_all(event.at)

    def _close_all(self, at: float) -> None:
        for name in list(self._accounts):
            self._close(name, at)
        self._names.clear()
        self._phases.clear()
        self._straggling = False

    def _phase_began(self, event: flight.PhaseBegan) -> None:
        self._phases.append(event.phase)
        if event.phase is Phase.WAIT_FOR_BATCH:
            self._straggling = False
        self._gang_changed(event.at)

    def _phase_ended(self, event: flight.PhaseEnded) -> None:
        if event.phase in self._phases:  # phases inside it have ended with it
            del self._phases[len(self._phases) - 1 - self._phases[::-1].index(event.phase) :]
            if Phase.WAIT_FOR_BATCH not in self._phases:
                self._straggling = False
            self._gang_changed(event.at)

    def _progress(self, event: flight.BatchProgress) -> None:
        missing = event.needed - event.ready
        last = event.ready > 0 and missing <= max(1.0, STRAGGLER_SHARE * event.needed)
        straggling = last and Phase.WAIT_FOR_BATCH in self._phases
        if straggling != self._straggling:
            self._straggling = straggling
            self._gang_changed(event.at)

    def _gang_changed(self, at: float) -> None:
        for account in self._accounts.values():
            self._changed(account, at)

    # ---------------------------------------------------------------- events about one slice

    def _added(self, event: flight.SliceAdded) -> None:
        if event.slice in self._accounts:
            self._close(event.slice, event.at)
        account = self._accounts[event.slice] = _Account(event, max(event.at, self._ended.get(event.slice, event.at)))
        self._names[event.address or event.slice] = event.slice
        account.category = self._categorize(account)

    def _removed(self, event: flight.SliceRemoved) -> None:
        if event.slice in self._accounts:
            self._close(event.slice, event.at)

    def _close(self, name: str, at: float) -> None:
        account = self._accounts.pop(name)
        self._charge(account, at)
        self._ended[name] = account.since
        _add(self._closed, account)

    def _moved(self, event: flight.SliceMoved) -> None:
        account = self._accounts.get(event.slice)
        if account is None:
            return
        self._charge(account, event.at)
        account.state = event.state
        if event.state in (SliceState.TRAINING, SliceState.FAILED):  # nothing can be in flight there any more
            account.in_flight.clear()
            account.prefilling_again = 0
        account.category = self._categorize(account)

    def _request_started(self, event: flight.RequestStarted) -> None:
        account = self._of_server(event.slice)
        if account is not None and event.request not in account.in_flight:
            prefilling_again = event.resumed and event.first_token_follows
            account.in_flight[event.request] = prefilling_again
            account.prefilling_again += prefilling_again
            self._changed(account, event.at)

    def _first_token(self, event: flight.FirstToken) -> None:
        account = self._of_server(event.slice)
        if account is not None and account.in_flight.get(event.request):
            account.in_flight[event.request] = False
            account.prefilling_again -= 1
            self._changed(account, event.at)

    def _request_ended(self, event: flight.RequestEnded) -> None:
        account = self._of_server(event.slice)
        if account is not None and event.request in account.in_flight:
            account.prefilling_again -= account.in_flight.pop(event.request)
            self._changed(account, event.at)

    def _of_server(self, name: str) -> _Account | None:
        return self._accounts.get(self._names.get(name, name))

    def _changed(self, account: _Account, at: float) -> None:
        category = self._categorize(account)
        if category is not account.category:
            self._charge(account, at)
            account.category = category

    def _categorize(self, account: _Account) -> Category:
        return account.categorize(self._phases[-1] if self._phases else None, self._straggling)

    def _charge(self, account: _Account, at: float) -> None:
        stretch = account.charge(at)
        if stretch is not None and self._sink is not None:
            self._sink(stretch)


def _add(books: dict[AccountKey, SliceSeconds], account: _Account) -> None:
    before = books.get(account.key)
    seconds = {
        category: value + (before.seconds[category] if before else 0.0) for category, value in account.seconds.items()
    }
    name, pool, devices = account.key
    books[account.key] = SliceSeconds(
        slice=name,
        pool=pool,
        devices=devices,
        wall_s=account.since - account.opened + (before.wall_s if before else 0.0),
        seconds=seconds,
    )


class ReplicaSeconds:
    """How long each replica of a router, by address, was registered, and how much of that it had something to do."""

    def __init__(self) -> None:
        self._ledger = Ledger()

    def joined(self, at: float, replicas: Iterable[str]) -> None:
        can, does = ("rollout",), SliceState.ROLLOUT
        for name in replicas:
            self._ledger.handle(flight.SliceAdded(at=at, slice=name, pool="", devices=1, capabilities=can, state=does))

    def left(self, at: float, replicas: Iterable[str]) -> None:
        for name in replicas:
            self._ledger.handle(flight.SliceRemoved(at=at, slice=name))

    def busy(self, at: float, replica: str) -> None:
        """The replica has a request now, and had none before."""
        self._ledger.handle(flight.RequestStarted(at=at, request=_ANY, slice=replica, prompt_tokens=0))

    def idle(self, at: float, replica: str) -> None:
        self._ledger.handle(flight.RequestEnded(at=at, request=_ANY, slice=replica, tokens=0, finish="completed"))

    def books(self, at: float) -> tuple[SliceSeconds, ...]:
        return self._ledger.books(at)


def idle_shares(before: Iterable[SliceSeconds], after: Iterable[SliceSeconds]) -> dict[str, float]:
    """By pool, the share of its device-seconds between two looks at the books in which it had nothing to do."""
    idle: defaultdict[str, float] = defaultdict(float)
    wall: defaultdict[str, float] = defaultdict(float)
    for sign, books in ((-1.0, before), (1.0, after)):
        for entry in books:
            idle[entry.pool] += sign * entry.devices * sum(entry.seconds[category] for category in IDLE)
            wall[entry.pool] += sign * entry.devices * entry.wall_s
    return {pool: idle[pool] / wall[pool] for pool in wall if wall[pool] > 0}


_HANDLERS: Mapping[type[FlightEvent], Callable[[Ledger, typing.Any], None]] = {
    flight.RunStarted: Ledger._run_started,
    flight.RunEnded: Ledger._run_ended,
    flight.SliceAdded: Ledger._added,
    flight.SliceRemoved: Ledger._removed,
    flight.SliceMoved: Ledger._moved,
    flight.PhaseBegan: Ledger._phase_began,
    flight.PhaseEnded: Ledger._phase_ended,
    flight.BatchProgress: Ledger._progress,
    flight.RequestStarted: Ledger._request_started,
    flight.FirstToken: Ledger._first_token,
    flight.RequestEnded: Ledger._request_ended,
}
