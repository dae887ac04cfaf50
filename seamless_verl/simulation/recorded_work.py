"""What a recording says of the work: its requests, the sessions and groups that they belong to, the engine's speed.

A request may wait before it is served: in the engine's queue, or while its replica takes weights. Both are taken off
before the cost model is fitted, since the simulator makes requests wait by itself.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from seamless_verl.decode_cost import DecodeCost, fit_decode_cost
from seamless_verl.observe import flight
from seamless_verl.observe.flight import SliceState
from seamless_verl.observe.intervals import Intervals, overlap, union, within
from seamless_verl.observe.recording import Recording
from seamless_verl.simulation.agents import Trajectory, Turn
from seamless_verl.simulation.replica import slower


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request that ended; ``slice`` is the address of its server.

    Attributes:
        tokens: generated, which may be 0 where it was interrupted.
        completed: it has all its tokens; else a later request of its session goes on.
        group, session: that it belongs to; "" where the recording does not say.
    """

    name: str
    slice: str
    began: float
    ended: float
    prompt: int
    tokens: int
    completed: bool
    group: str
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Groups in the order in which they were admitted; ``exact`` where the recording says whose each request was."""

    groups: list[list[Trajectory]]
    exact: bool


def requests_of(recording: Recording, apart: Intervals) -> list[Request]:
    """Requests in the order in which they began (those of one moment in that of their events), without those that
    ended in ``apart``."""
    owners = {
        event.fields["request"]: (event.fields["group"], event.fields["session"])
        for event in recording.events
        if isinstance(event, flight.SchedulerInput) and event.name == "RequestStarted"
    }
    begun: dict[str, flight.RequestStarted] = {}
    order: dict[str, int] = {}
    found = []
    for event in recording.events:
        if isinstance(event, flight.RequestStarted):
            begun[event.request] = event
            order[event.request] = len(order)
        elif isinstance(event, flight.RequestEnded) and event.request in begun:
            start = begun.pop(event.request)
            group, session = owners.get(event.request, ("", ""))
            if event.at > start.at and not within(apart, event.at):
                found.append(
                    Request(
                        name=event.request,
                        slice=event.slice,
                        began=start.at,
                        ended=event.at,
                        prompt=start.prompt_tokens,
                        tokens=event.tokens,
                        completed=event.finish != "aborted",
                        group=group,
                        session=session,
                    )
                )
    return sorted(found, key=lambda request: order[request.name])


def work_of(recording: Recording, requests: Sequence[Request], apart: Intervals) -> Work:
    """The groups that the scheduler was told of, else those that sessions and requests suggest."""
    if any(request.session for request in requests):
        return Work(groups=_named(recording, requests), exact=True)
    generated = sorted((request for request in requests if request.tokens), key=lambda request: request.ended)
    ended = [e for e in recording.events if isinstance(e, flight.SessionEnded) and not within(apart, e.at)]
    if ended and generated:
        return Work(groups=_suggested(ended, generated), exact=False)
    tool_s = _beside_requests(recording, requests)
    return Work(groups=[[(Turn(prompt=r.prompt, answer=r.tokens, tool_s=tool_s),)] for r in generated], exact=False)


def _named(recording: Recording, requests: Sequence[Request]) -> list[list[Trajectory]]:
    """Sessions as they were; those that had not ended with the recording take their group with them."""
    groups: dict[str, dict[str, list[Request]]] = defaultdict(lambda: defaultdict(list))
    for request in requests:
        if request.session:
            groups[request.group][request.session].append(request)
    finished = {
        event.fields["session"]: event.at
        for event in recording.events
        if isinstance(event, flight.SchedulerInput) and event.name == "SessionFinished"
    }
    submitted = {
        group: event.at
        for event in recording.events
        if isinstance(event, flight.SchedulerInput) and event.name == "GroupsSubmitted"
        for group in event.fields["groups"]
    }
    open_for = union([span for spans in serving_of(recording).values() for span in spans])
    before, after = [], []
    for group, sessions in groups.items():
        if group in submitted:  # but not while all replicas take weights
            before.append(overlap(open_for, submitted[group], min(own[0].began for own in sessions.values())))
        after += [finished[name] - own[-1].ended for name, own in sessions.items() if name in finished]
    # The same for all: each its own would say what else the process was busy with just then, as with its start.
    usual_s = _usual(before) + _usual(after)
    return [
        [_trajectory(own, usual_s) for own in sessions.values()]
        for sessions in groups.values()
        if all(own[-1].completed and any(request.tokens for request in own) for own in sessions.values())
    ]


def _usual(seconds: Sequence[float]) -> float:
    return max(0.0, median(seconds)) if seconds else 0.0


def _trajectory(requests: Sequence[Request], after_s: float) -> Trajectory:
    """A session as its requests tell it, in their order; what was interrupted and went on is one turn.

    Args:
        after_s: what a session needs before its first request and after its last (its reward, its rows).
    """
    turns: list[Turn] = []
    context = prompt = tokens = 0
    for number, request in enumerate(requests):
        prompt = prompt or max(1, request.prompt - context)
        tokens += request.tokens
        last = number == len(requests) - 1
        if (request.completed or last) and tokens:
            tool_s = after_s if last else max(0.0, requests[number + 1].began - request.ended)
            turns.append(Turn(prompt=prompt, answer=tokens, tool_s=tool_s))
            context += prompt + tokens
            prompt = tokens = 0
    return tuple(turns)


def _suggested(sessions: Sequence[flight.SessionEnded], requests: Sequence[Request]) -> list[list[Trajectory]]:
    """Each session gets as many consecutive requests as it had turns; time outside requests is spread over turns."""
    turns = sum(max(1, session.turns) for session in sessions)
    outside = sum(session.seconds for session in sessions) - sum(r.ended - r.began for r in requests)
    tool_s = max(0.0, outside / turns)
    by_group: dict[str, list[Trajectory]] = {}
    position = 0
    for session in sessions:
        taken = []
        context = 0
        for _ in range(max(1, session.turns)):
            request = requests[position % len(requests)]
            position += 1
            prompt = max(1, request.prompt - context) if context else request.prompt
            taken.append(Turn(prompt=prompt, answer=request.tokens, tool_s=tool_s))
            context += prompt + request.tokens
        by_group.setdefault(session.group, []).append(tuple(taken))
    return list(by_group.values())


def _beside_requests(recording: Recording, requests: Sequence[Request]) -> float:
    """Seconds that an attempt needs before and after its request, from the moments at which none was running."""
    began = sorted(request.began for request in requests)
    ended = sorted(request.ended for request in requests)
    before, after = [], []
    for event in recording.events:
        count = bisect_right(ended, event.at)
        if count == bisect_right(began, event.at):  # nothing runs
            if isinstance(event, flight.StepBegan) and count < len(began):
                before.append(began[count] - event.at)
            elif isinstance(event, flight.PhaseEnded) and event.phase is flight.Phase.WAIT_FOR_BATCH and count:
                after.append(event.at - ended[count - 1])
    return _usual(before) + _usual(after)


# ---------------------------------------------------------------- the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A request as an engine served it: seconds of decoding, among ``beside`` on average, itself included."""

    slice: str
    seconds: float
    tokens: int
    beside: int
    kv_tokens: int


def served(
    requests: Sequence[Request], serving: Mapping[str, Intervals], max_running: int, *, oldest_first: bool
) -> list[Served]:
    """What is left of requests when queues and loads of weights are taken off.

    Args:
        serving: when each server generates; one that is not in it always does.
        max_running: requests that a server decodes at once.
        oldest_first: of those that wait, the one whose session began first is next; else the one that came first.
    """
    began_at: dict[str, float] = {}
    for request in requests:
        began_at.setdefault(request.session or request.name, request.began)
    ages = {r.name: began_at[r.session or r.name] if oldest_first else r.began for r in requests}
    found = []
    for name in sorted({request.slice for request in requests}):
        admitted = list(_admitted([request for request in requests if request.slice == name], max_running, ages))
        edges = sorted([(began, 1) for began, _ in admitted] + [(r.ended, -1) for _, r in admitted])
        area, running, last = 0.0, 0, edges[0][0] if edges else 0.0
        at: dict[float, float] = {}
        for time, change in edges:
            area += running * (time - last)
            at[time], last = area, time
            running += change
        for began, request in admitted:
            seconds = overlap(serving[name], began, request.ended) if name in serving else request.ended - began
            if request.tokens and seconds > 0:
                beside = max(1.0, (at[request.ended] - at[began]) / (request.ended - began))
                kv = round(beside * (request.prompt + request.tokens / 2))
                found.append(
                    Served(slice=name, seconds=seconds, tokens=request.tokens, beside=round(beside), kv_tokens=kv)
                )
    return found


def fit_decode(requests: Sequence[Served]) -> DecodeCost:
    """The cost model fitted to requests, each token a measurement: seconds, against how many ran beside it."""
    cost = fit_decode_cost(
        [request.beside for request in requests],
        [request.kv_tokens for request in requests],
        [request.seconds / request.tokens for request in requests],
        [request.tokens for request in requests],
    )
    if cost is None:
        mean = sum(request.seconds for request in requests) / sum(request.tokens for request in requests)
        return DecodeCost(floor_s=mean, base_s=mean, per_request_s=0.0, attention_base_s=0.0, attention_per_token_s=0.0)
    return cost


def fitted(cost: DecodeCost, requests: Sequence[Served]) -> DecodeCost:
    """The model, made slower or faster by as much as these requests were; as it is where there are none."""
    predicted = sum(request.tokens * cost.step_s(request.beside, request.kv_tokens) for request in requests)
    return slower(cost, sum(request.seconds for request in requests) / predicted) if predicted else cost


def _admitted(
    requests: Sequence[Request], max_running: int, ages: Mapping[str, float]
) -> Iterator[tuple[float, Request]]:
    """When the engine took each request that it took: the ends of those before it are known."""
    coming = deque(enumerate(requests))
    queue: list[tuple[float, int, Request]] = []
    ends: list[float] = []
    now = -math.inf
    while coming or queue:
        while ends and ends[0] <= now:
            heapq.heappop(ends)
        while coming and coming[0][1].began <= now:
            number, request = coming.popleft()
            heapq.heappush(queue, (ages[request.name], number, request))
        if queue and len(ends) < max_running:
            _, _, request = heapq.heappop(queue)
            if request.ended > now:  # else it was interrupted in the queue
                heapq.heappush(ends, request.ended)
                yield now, request
        else:
            now = ends[0] if queue else coming[0][1].began


def serving_of(recording: Recording) -> dict[str, Intervals]:
    """When each slice generated, by the address of its server; slices whose states were not recorded are left out."""
    address = {e.slice: e.address or e.slice for e in recording.events if isinstance(e, flight.SliceAdded)}
    return {address[name]: spans for name, spans in spans_of(recording, SliceState.ROLLOUT).items()}


def spans_of(recording: Recording, state: SliceState) -> dict[str, list[tuple[float, float]]]:
    """When each slice was in ``state``."""
    since: dict[str, tuple[SliceState, float]] = {}
    found: dict[str, list[tuple[float, float]]] = {}

    def leave(name: str, at: float) -> None:
        before, began = since.pop(name)
        if before is state and at > began:
            found.setdefault(name, []).append((began, at))

    for event in recording.events:
        if isinstance(event, flight.SliceAdded | flight.SliceMoved):
            if event.slice in since:
                leave(event.slice, event.at)
            elif isinstance(event, flight.SliceMoved):
                continue
            since[event.slice] = (event.state, event.at)
    for name in [*since]:
        leave(name, recording.events[-1].at)
    return found
