"""What the recording says of each loan: whether its bytes moved, and whether its weights were the published ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from seamless_verl.observe import flight
from seamless_verl.observe.flight import SliceState

_SKEW_S = 0.005  # between the clocks that stamp moves of slices and moves of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Loans:
    """Of one slice, from its first step on.

    Attributes:
        wakes, reclaims: how often it was woken and taken back.
        wakes_that_took, reclaims_that_freed: in which both weights and cache were taken, or given back.
        bytes_moved: of the engine, both ways.
        shared: moments at which something of the trainer lay beside the engine's cache.
        wake_s, reclaim_s: seconds each one took, with everything that belongs to it.
        checked, matching: loans whose weights were compared with the published ones, and those that were the same.
        versions: of the weights that were lent, without repetition.
        distinct: checksums among the published ones.
    """

    wakes: int
    reclaims: int
    wakes_that_took: int
    reclaims_that_freed: int
    bytes_moved: int
    shared: int
    wake_s: tuple[float, ...]
    reclaim_s: tuple[float, ...]
    checked: int
    matching: int
    versions: tuple[int, ...]
    distinct: int


def loans_of(events: Sequence[flight.FlightEvent], slice_id: str) -> Loans:
    """``events`` are a recording's, in order of time."""
    began = next(event.at for event in events if isinstance(event, flight.StepBegan))
    held = [event for event in events if isinstance(event, flight.MemoryHeld) and event.slice == slice_id]
    checked = [event for event in events if isinstance(event, flight.WeightsChecked) and event.slice == slice_id]
    moves = [
        event
        for event in events
        if isinstance(event, flight.SliceMoved) and event.slice == slice_id and event.at >= began
    ]
    spans: dict[SliceState, list[tuple[float, float]]] = {SliceState.WAKING: [], SliceState.DRAINING: []}
    for before, after in pairwise(moves):
        if before.state in spans:
            spans[before.state].append((before.at, after.at))
    took = [_moved(held, span, taken=True) for span in spans[SliceState.WAKING]]
    freed = [_moved(held, span, taken=False) for span in spans[SliceState.DRAINING]]
    return Loans(
        wakes=len(took),
        reclaims=len(freed),
        wakes_that_took=sum(moved >= {"weights", "kv_cache"} for moved in took),
        reclaims_that_freed=sum(moved >= {"weights", "kv_cache"} for moved in freed),
        bytes_moved=_bytes_moved([event for event in held if event.at >= began]),
        shared=_shared(held),
        wake_s=tuple(stop - start for start, stop in spans[SliceState.WAKING]),
        reclaim_s=tuple(stop - start for start, stop in spans[SliceState.DRAINING]),
        checked=len(checked),
        matching=sum(event.published == event.held for event in checked),
        versions=tuple(dict.fromkeys(event.version for event in checked)),
        distinct=len({event.published for event in checked}),
    )


def _moved(held: Sequence[flight.MemoryHeld], span: tuple[float, float], *, taken: bool) -> set[str]:
    start, stop = span
    return {
        event.what
        for event in held
        if event.user == "engine" and bool(event.nbytes) is taken and start - _SKEW_S <= event.at <= stop + _SKEW_S
    }


def _bytes_moved(held: Sequence[flight.MemoryHeld]) -> int:
    moved, now = 0, {}
    for event in held:
        key = event.device, event.user, event.what
        if event.user == "engine":
            moved += abs(event.nbytes - now.get(key, 0)) if key in now else event.nbytes
        now[key] = event.nbytes
    return moved


def _shared(held: Sequence[flight.MemoryHeld]) -> int:
    now: dict[tuple[str, str, str], int] = {}
    found = 0
    for event in held:
        now[event.device, event.user, event.what] = event.nbytes
        trainer = any(nbytes for (_, user, _), nbytes in now.items() if user == "trainer")
        cache = any(nbytes for (_, user, what), nbytes in now.items() if (user, what) == ("engine", "kv_cache"))
        found += trainer and cache
    return found
