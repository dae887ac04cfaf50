"""A recorded run as a scenario: its requests, its tools, its speeds, its trainer; then ask what else could have been.

What a recording does not say is estimated from what it does: requests do not name their session, so each session gets
as many consecutive requests as it had turns, and the time that sessions spent outside requests is spread over turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from seamless_verl.errors import SeamlessError
from seamless_verl.observe import flight
from seamless_verl.observe.flight import Phase, SliceState
from seamless_verl.observe.recording import Recording
from seamless_verl.simulation.driver import SwitchCosts
from seamless_verl.simulation.loop import TrainPhysics
from seamless_verl.simulation.regimes import LIVE_POLICIES, REGIMES
from seamless_verl.simulation.replica import EnginePhysics
from seamless_verl.simulation.scenario import Pool, Scenario
from seamless_verl.simulation.workload import Replay, Trajectory, Turn
from seamless_verl.staleness.cost_model import DecodeCost, DecodeCostFit

_NOT_TRAINING = (Phase.WAIT_FOR_BATCH, Phase.SYNC_WEIGHTS, Phase.SWITCH)
_TO_ROLLOUT, _TO_TRAIN = 1.5, 1.0  # a switch that was never seen, in loads of weights; as `published.SEPARATE_COSTS`
_WAKING, _DRAINING, _SYNCING = SliceState.WAKING, SliceState.DRAINING, SliceState.SYNCING

_Event = TypeVar("_Event", bound=flight.FlightEvent)


class NothingToReplay(SeamlessError):
    """The recording lacks what a scenario needs; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A recording as a scenario, beside what was measured.

    Attributes:
        step_s: measured seconds of each complete step, without validation and checkpoints.
        notes: what was estimated, for the reader.
    """

    scenario: Scenario
    step_s: tuple[float, ...]
    notes: tuple[str, ...]


def from_recording(recording: Recording) -> Recorded:
    """Raises:
    NothingToReplay: no complete step or no request was recorded.
    """
    started = _last(recording, flight.RunStarted)
    rows = _all(recording, flight.RowsTrained)
    apart = _intervals(recording, (Phase.VALIDATE, Phase.CHECKPOINT))
    requests = [r for r in _requests(recording) if not _overlap(apart, r.ended, r.ended)]
    sessions = [s for s in _all(recording, flight.SessionEnded) if not _overlap(apart, s.at, s.at)]
    for what, found in (("trained rows", rows), ("requests", requests)):
        if not found:
            raise NothingToReplay(f"the recording holds no {what}; record a run of at least one step")
    if started is None:
        raise NothingToReplay("the recording holds no start of a run")
    spent = _phase_seconds(recording, {row.step for row in rows})
    groups = _groups(sessions, requests) if sessions else [[(_turn(request),)] for request in requests]
    attempts = max(1, round(median(len(group) for group in groups)))
    batch = max(1, round(median(row.rollouts for row in rows) / attempts))
    step_s = _step_seconds(recording, apart)
    warm = min(1, len(rows) - 1)  # the first step compiles and waits for the first answers
    idle = [sum(spent[row.step].get(phase, 0.0) for phase in _NOT_TRAINING) for row in rows]
    trained = sum(step_s[warm:]) - sum(idle[warm : len(step_s)])
    # Of a batch as it is replayed: sessions put together from requests may differ from the rows that were trained.
    tokens = batch / len(groups) * sum(turn.prompt + turn.answer for g in groups for attempt in g for turn in attempt)
    publish = median([seconds.get(Phase.SYNC_WEIGHTS, 0.0) for seconds in spent.values()])
    pools = _pools(recording, requests)
    gang = sum(pool.slices * pool.gpus for pool in pools if pool.trains)
    updates = Counter(e.step for e in _all(recording, flight.PhaseBegan) if e.phase is Phase.UPDATE_ACTOR)
    mini = max(1, round(batch / median(updates.values()))) if updates else batch
    mini = mini if batch % mini == 0 else batch
    costs, seen = _switch_costs(recording, publish)
    scenario = Scenario(
        system=_system_of(started.policy),
        pools=pools,
        workload=Replay(groups),
        train=TrainPhysics(gpu_s_per_token=trained / (len(rows) - warm) / tokens * gang, update_s=0.0),
        costs=costs,
        batch=batch,
        mini_batch=mini,
        attempts=attempts,
        eta=started.eta,
        steps=len(rows),
        warm=warm,
    )
    told = f"{len(sessions)} sessions" if sessions else "sessions of one turn each, as none were recorded"
    notes = (
        f"{len(requests)} requests in {told}, groups of {attempts}, {batch} groups per step",
        f"training {1e3 * scenario.train.gpu_s_per_token:.3g} ms of a device per token",
        f"weights are pushed in {costs.push:.2f} s and loaded in {costs.load:.2f} s",
        f"a switch costs {costs.wake:.2f} + {costs.drain:.2f} s, "
        + ("as seen" if seen else "assumed from the load (--set costs.wake=… to say better)"),
    )
    return Recorded(scenario=scenario, step_s=step_s, notes=notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    slice: str
    began: float
    ended: float
    prompt: int
    tokens: int
    resumed: bool


def _all(recording: Recording, kind: type[_Event]) -> list[_Event]:
    return [event for event in recording.events if isinstance(event, kind)]


def _last(recording: Recording, kind: type[_Event]) -> _Event | None:
    found = _all(recording, kind)
    return found[-1] if found else None


def _requests(recording: Recording) -> list[_Request]:
    """Completed ones, in the order of their ends."""
    begun: dict[str, flight.RequestStarted] = {}
    found = []
    for event in recording.events:
        if isinstance(event, flight.RequestStarted):
            begun[event.request] = event
        elif isinstance(event, flight.RequestEnded) and event.request in begun:
            start = begun.pop(event.request)
            if event.tokens > 0 and event.at > start.at:
                found.append(
                    _Request(
                        slice=event.slice,
                        began=start.at,
                        ended=event.at,
                        prompt=start.prompt_tokens,
                        tokens=event.tokens,
                        resumed=start.resumed,
                    )
                )
    return found


def _turn(request: _Request) -> Turn:
    return Turn(prompt=request.prompt, answer=request.tokens)


def _groups(sessions: Sequence[flight.SessionEnded], requests: Sequence[_Request]) -> list[list[Trajectory]]:
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


def fit_decode(requests: Sequence[_Request]) -> DecodeCost:
    """The cost model fitted to requests: seconds per token against how many ran beside it."""
    fit = DecodeCostFit(memory=1.0)
    for slice_name in sorted({request.slice for request in requests}):
        own = [request for request in requests if request.slice == slice_name]
        edges = sorted([(r.began, 1) for r in own] + [(r.ended, -1) for r in own])
        area, running, last = 0.0, 0, edges[0][0]
        at: dict[float, float] = {}
        for time, change in edges:
            area += running * (time - last)
            at[time], last = area, time
            running += change
        for request in own:
            seconds = request.ended - request.began
            beside = (at[request.ended] - at[request.began]) / seconds
            kv = beside * (request.prompt + request.tokens / 2)
            fit.observe(max(1, round(beside)), round(kv), seconds / request.tokens)
    cost = fit.fit()
    if cost is None:
        mean = sum(r.ended - r.began for r in requests) / sum(r.tokens for r in requests)
        return DecodeCost(floor_s=mean, base_s=mean, per_request_s=0.0, attention_base_s=0.0, attention_per_token_s=0.0)
    return cost


def _pools(recording: Recording, requests: Sequence[_Request]) -> tuple[Pool, ...]:
    longest = max(request.prompt + request.tokens for request in requests)
    engine = EnginePhysics(decode=fit_decode(requests), prefill_s_per_token=0.0, kv_tokens=max(10**6, 64 * longest))
    slices: dict[str, flight.SliceAdded] = {}
    for event in _all(recording, flight.SliceAdded):
        slices[event.slice] = event
    pools: dict[str, list[flight.SliceAdded]] = {}
    for added in slices.values():
        pools.setdefault(added.pool, []).append(added)
    return tuple(
        Pool(
            name=name,
            slices=len(members),
            gpus=members[0].devices,
            trains="train" in members[0].capabilities,
            engine=engine,
        )
        for name, members in pools.items()
    )


def _phase_seconds(recording: Recording, steps: set[int]) -> dict[int, dict[Phase, float]]:
    """Seconds of each phase by step; of nested phases the inner one counts."""
    spent: dict[int, dict[Phase, float]] = {step: {} for step in steps}
    stack: list[Phase] = []
    last = 0.0
    for event in recording.events:
        if not isinstance(event, (flight.PhaseBegan, flight.PhaseEnded)):
            continue
        if stack and event.step in spent:
            seconds = spent[event.step]
            seconds[stack[-1]] = seconds.get(stack[-1], 0.0) + event.at - last
        last = event.at
        if isinstance(event, flight.PhaseBegan):
            stack.append(event.phase)
        elif event.phase in stack:
            del stack[len(stack) - 1 - stack[::-1].index(event.phase) :]
    return spent


def _intervals(recording: Recording, phases: tuple[Phase, ...]) -> list[tuple[float, float]]:
    """When the trainer was in one of these phases."""
    found = []
    began: dict[Phase, float] = {}
    for event in recording.events:
        if isinstance(event, flight.PhaseBegan) and event.phase in phases:
            began[event.phase] = event.at
        elif isinstance(event, flight.PhaseEnded) and event.phase in began:
            found.append((began.pop(event.phase), event.at))
    return found


def _overlap(intervals: Sequence[tuple[float, float]], low: float, high: float) -> float:
    """Seconds that ``low`` to ``high`` shares with the intervals; for a moment, whether it lies in one."""
    if low == high:
        return float(any(begin <= low <= end for begin, end in intervals))
    return sum(max(0.0, min(high, end) - max(low, begin)) for begin, end in intervals)


def _step_seconds(recording: Recording, apart: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    began = {event.step: event.at for event in _all(recording, flight.StepBegan)}
    ended = {event.step: event.at for event in _all(recording, flight.StepEnded)}
    steps = sorted(began.keys() & ended.keys())
    return tuple(ended[step] - began[step] - _overlap(apart, began[step], ended[step]) for step in steps)


def _switch_costs(recording: Recording, publish_s: float) -> tuple[SwitchCosts, bool]:
    """Medians of the times in each state, and whether switches were seen; ``publish_s``: the trainer's part."""
    spans: dict[SliceState, list[float]] = {state: [] for state in (_WAKING, _DRAINING, _SYNCING)}
    since: dict[str, flight.SliceMoved] = {}
    for event in _all(recording, flight.SliceMoved):
        before = since.get(event.slice)
        if before is not None and before.state in spans:
            spans[before.state].append(event.at - before.at)
        since[event.slice] = event
    wake, drain, load = (spans[state] for state in (_WAKING, _DRAINING, _SYNCING))
    load_s = median(load) if load else publish_s
    return SwitchCosts(
        wake=median(wake) if wake else _TO_ROLLOUT * load_s,
        drain=median(drain) if drain else _TO_TRAIN * load_s,
        load=load_s,
        push=publish_s if load else 0.0,  # without states, the trainer's publication is all that is known
    ), bool(wake and drain)


def _system_of(policy: str) -> str:
    """Of a recorded policy; a simulated run names its system, one without a scheduler keeps its pools apart."""
    return LIVE_POLICIES.get(policy, policy if policy in REGIMES else "disaggregated_streaming")
