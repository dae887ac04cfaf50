"""Where the time of each attempt went, and which of the GPUs' idle seconds fall on it. Pure.

    requests of the attempt  ──► model ▏queue ▏held up     (in this order where several hold at once)
    the rest                 ──► start ▏agent ▏end         (before the first request, between two, after the last)
    idle devices / attempts under way, moment by moment  ──► its share of idle device-seconds

A device that has nothing to do waits for what agents are about to ask or to finish. So each moment of idle time is
shared equally by the attempts under way then: the shares of all attempts add up to the idle time in which there was
one, and a straggler that is alone at the end of a step has all of that wait.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from seamless_verl.observe import flight
from seamless_verl.observe.digest import RunDigest, StepSpan
from seamless_verl.observe.intervals import Intervals, union
from seamless_verl.observe.page.words import spent
from seamless_verl.observe.tallies import INTERRUPTED
from seamless_verl.observe.time_ledger import IDLE

_MOST_BLAMED, _LEAST_BLAMED = 8, 0.01  # attempts, share of the idle time


@dataclass(frozen=True, slots=True)
class _Shares:
    """Idle device-seconds per attempt since the beginning, at moments between which it grows evenly."""

    moments: list[float]
    grown: list[float]
    rates: list[float]

    @classmethod
    def of(cls, changes: Iterable[tuple[float, int, int]]) -> _Shares:
        """Add the changes up.

        Args:
            changes: ``(when, change of idle devices, change of attempts under way)``.
        """
        moments, grown, rates = [0.0], [0.0], [0.0]
        idle = attempts = 0
        for at, more_idle, more_attempts in sorted(changes):
            grown.append(grown[-1] + rates[-1] * (at - moments[-1]))
            moments.append(at)
            idle += more_idle
            attempts += more_attempts
            rates.append(idle / attempts if attempts else 0.0)
        return cls(moments, grown, rates)

    def at(self, moment: float) -> float:
        last = bisect_right(self.moments, moment) - 1
        return self.grown[last] + self.rates[last] * (moment - self.moments[last])


class AttemptTimes:
    """Where the time of each attempt went, and of each step; of all attempts in the recording, ended or not."""

    def __init__(self, run: RunDigest) -> None:
        self._requests, self._queued, self._held, lost = _requests(run)
        # From the requests, for attempts that have not ended; those that have say it themselves (below).
        self._spans = {s: (min(spans)[0], lost.get(s, run.span_s)) for s, spans in self._queued.items()}
        for event in run.recording.events:
            if isinstance(event, flight.SessionEnded | flight.SessionGivenUp):
                self._spans[event.session] = max(0.0, event.at - event.seconds), event.at
        self._whole = {event.session for event in run.recording.events if isinstance(event, flight.SessionEnded)}
        self._steps = {span.step: span for span in run.step_spans}
        under_way = [change for began, ended in self._spans.values() for change in ((began, 0, 1), (ended, 0, -1))]
        idle: defaultdict[str, list[tuple[float, int, int]]] = defaultdict(list)
        for lane in run.lanes:
            for stretch in lane.stretches:
                if stretch.category in IDLE:
                    idle[lane.pool] += [(stretch.start, lane.devices, 0), (stretch.stop, -lane.devices, 0)]
        self._shares = {pool: _Shares.of([*changes, *under_way]) for pool, changes in idle.items()}

    def attempt(self, session: str) -> dict[str, Any] | None:
        """``None``: the recording does not know it.

        Returns:
            ``seconds``; ``parts``: ``(what, seconds)``; ``spans``: ``(what, share of the attempt at which it begins,
            share at which it ends)``; ``idle``: device-seconds by pool.
        """
        if session not in self._spans:
            return None
        began, ended = self._spans[session]
        seconds = ended - began
        model = union(self._requests.get(session, ()))
        queued = _without(union(self._queued.get(session, ())), model)
        held = _without(union(self._held.get(session, ())), union([*model, *queued]))
        each = {"model": model, "queue": queued, "held up": held}
        spans = [(what, *span) for what, intervals in each.items() for span in intervals]
        rest = _without([(began, ended)], union([*model, *queued, *held]))
        spans += [(_part(span, (began, ended), session in self._whole), *span) for span in rest]
        spent = dict.fromkeys((*each, "start", "agent", "end"), 0.0)
        for what, at, to in spans:
            spent[what] += to - at
        return {
            "seconds": seconds,
            "parts": list(spent.items()),
            "spans": [(what, _share(at, began, seconds), _share(to, began, seconds)) for what, at, to in spans],
            "idle": self._idle(began, ended),
        }

    def step(self, step: int) -> dict[str, Any] | None:
        """``None``: the recording does not know it.

        Returns:
            ``seconds``; ``pools``: for each, ``(what, its style, device-seconds)``; ``idle``: device-seconds of all
            pools, ``alone``: those while no attempt was under way; ``blamed``: the attempts with the largest shares.
        """
        span = self._steps.get(step)
        if span is None:
            return None
        shares = [(key, sum(idle.values())) for key, idle in self._blamed(span)]
        shares.sort(key=lambda pair: -pair[1])
        idle_s = sum(seconds[category] for seconds in span.pools.values() for category in IDLE)
        return {
            "seconds": span.stop - span.start,
            "pools": {pool: spent(seconds) for pool, seconds in span.pools.items()},
            "idle": idle_s,
            "alone": max(0.0, idle_s - sum(share for _, share in shares)),
            "blamed": [pair for pair in shares[:_MOST_BLAMED] if pair[1] > _LEAST_BLAMED * idle_s],
        }

    def _blamed(self, span: StepSpan) -> Iterable[tuple[str, dict[str, float]]]:
        for session, (began, ended) in self._spans.items():
            if began < span.stop and ended > span.start:
                yield session, self._idle(max(began, span.start), min(ended, span.stop))

    def _idle(self, began: float, ended: float) -> dict[str, float]:
        return {pool: shares.at(ended) - shares.at(began) for pool, shares in self._shares.items()}


_Spans = defaultdict[str, list[tuple[float, float]]]


def _requests(run: RunDigest) -> tuple[_Spans, _Spans, _Spans, dict[str, float]]:
    """By session: when a replica generated for it, when a request of it waited for a replica or its first token, when
    an interrupted one waited to go on; and since when it is lost, if its worker died or the process of the run ended.
    """
    out: dict[str, flight.RequestStarted] = {}
    had, queued, held = _Spans(list), _Spans(list), _Spans(list)
    since: dict[str, float] = {}  # session -> when its latest request was interrupted
    lost: dict[str, float] = {}
    latest = 0.0
    for event in run.recording.events:
        if isinstance(event, flight.RunStarted | flight.RunEnded):
            at = event.at if isinstance(event, flight.RunEnded) else latest  # killed after its last event
            for cut in out.values():
                had[cut.session].append((cut.at, at))
            out.clear()
            since.clear()
            lost = dict.fromkeys(queued, at) | lost
        elif isinstance(event, flight.RequestStarted) and event.session:
            out[event.request] = event
            lost.pop(event.session, None)
            queued[event.session].append((event.at - event.waited_s, event.at))
            if event.resumed and event.session in since:
                held[event.session].append((since.pop(event.session), event.at - event.waited_s))
        elif isinstance(event, flight.RequestEnded) and (start := out.pop(event.request, None)) is not None:
            first = start.at + (event.first_token_s or 0.0)
            queued[start.session].append((start.at, first))
            had[start.session].append((first, event.at))
            if event.finish in INTERRUPTED:
                since[start.session] = event.at
            elif event.finish == flight.WORKER_DIED:
                lost[start.session] = event.at
        latest = event.at
    for start in out.values():
        had[start.session].append((start.at, run.span_s))
    return had, queued, held, lost


def _without(intervals: Intervals, taken: Intervals) -> list[tuple[float, float]]:
    """What is left of ``intervals`` outside of ``taken``."""
    left: list[tuple[float, float]] = []
    for begin, end in intervals:
        for low, high in taken:
            if low >= end:
                break
            if high > begin:
                left += [(begin, low)] if low > begin else []
                begin = max(begin, high)
        left += [(begin, end)] if begin < end else []
    return left


def _part(span: tuple[float, float], attempt: tuple[float, float], is_whole: bool) -> str:
    """Name a time without requests by where in the attempt it lies: ``start``, ``agent`` or ``end``.

    An attempt that was given up, or is under way (not ``is_whole``), has no ``end``.
    """
    if (span[0] == attempt[0]) == (span[1] == attempt[1]):
        return "agent"
    return "start" if span[0] == attempt[0] else "end" if is_whole else "agent"


def _share(at: float, began: float, seconds: float) -> float:
    return min(1.0, max(0.0, (at - began) / seconds)) if seconds > 0 else 0.0
