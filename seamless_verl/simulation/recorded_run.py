"""A recorded run as a scenario: its requests, its tools, its speeds, its trainer; then ask what else could have been.

The trainer's own time is what is left of a step when waiting is taken off: for the batch, for the gang, for weights on
their way. Waiting comes back from the simulation, not from the recording.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import yaml

from seamless_verl.checked import build
from seamless_verl.config import RouterConfig, SchedulerConfig, StalenessConfig, WeightsConfig
from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.observe import flight
from seamless_verl.observe.flight import Phase, SliceState
from seamless_verl.observe.intervals import Intervals, overlap, union
from seamless_verl.observe.recording import Recording
from seamless_verl.observe.reporter import STEPS, read_records
from seamless_verl.observe.run_folder import CONFIG, load_recording
from seamless_verl.scheduling.slices import Tag
from seamless_verl.simulation.agents import Replay, Trajectory
from seamless_verl.simulation.recorded_work import (
    Request,
    fit_decode,
    fitted,
    requests_of,
    served,
    serving_of,
    spans_of,
    work_of,
)
from seamless_verl.simulation.regimes import REGIMES, regime
from seamless_verl.simulation.replica import EnginePhysics
from seamless_verl.simulation.scenario import Pool, Scenario, SwitchCosts, TrainPhysics

_TO_ROLLOUT, _TO_TRAIN = 1.5, 1.0  # a switch that was never seen, in loads of weights; as `published.COSTS`
_SWITCHING = (SliceState.WAKING, SliceState.DRAINING, SliceState.SYNCING)
_UNLIMITED = 1024

_Event = TypeVar("_Event", bound=flight.FlightEvent)


class NothingToReplay(SeamlessError):
    """The recording lacks what a scenario needs; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sections of the recorded run's configuration; the scheduler's policy and the bound are those of the recording.

    Attributes:
        router: None: as the recorded system does by itself.
    """

    router: RouterConfig | None = None
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A recording as a scenario, beside what was measured.

    Attributes:
        step_s: measured seconds from the beginning of each complete step to that of the next, without validation and
            checkpoints.
        notes: what was estimated, for the reader.
    """

    scenario: Scenario
    step_s: tuple[float, ...]
    notes: tuple[str, ...]


def from_run(folder: Path) -> Recorded:
    """A run folder: its recording, of its configuration how many requests an engine decodes at once, and what sharing
    saved.

    Raises:
        SeamlessError: there is no recording, it cannot be read, or it holds nothing to replay.
    """
    file, recording = folder / CONFIG, load_recording(folder)
    if not file.exists():  # a simulated run
        return from_recording(recording)
    rollout, settings = _settings(file)
    seats = 1
    for key, default, such_as in (("max_num_seqs", _UNLIMITED, 1024), ("data_parallel_size", 1, 1)):
        count = rollout.get(key) or default
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"{file}: actor_rollout_ref.rollout.{key}", count, "is no count", f"write e.g. {such_as}")
        seats *= count
    saved = [record["sharing_saved_s"] for record in read_records(folder / STEPS) if record.get("sharing_saved_s")]
    saved_s = fmean(saved) if saved else 0.0
    return from_recording(recording, max_running=seats, settings=settings, saved_s=saved_s)


def _settings(file: Path) -> tuple[dict[str, Any], Settings]:
    """``actor_rollout_ref.rollout`` of a run's configuration, and what decides in it; of a run without us, verl's."""
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise NothingToReplay(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    rollout, ours = _section(found, "actor_rollout_ref", "rollout"), _section(found, "seamless") or {}
    if rollout is None:
        raise NothingToReplay(f"{file} has no actor_rollout_ref.rollout; is it the configuration of this run?")
    sections = {known.name: _section(ours, known.name) or {} for known in fields(Settings)}
    settings: Settings = build(Settings, sections, f"{file}: seamless")
    router = replace(settings.router or RouterConfig(), oldest_first=rollout.get("scheduling_policy") == "priority")
    return rollout, replace(settings, router=router)


def _section(found: object, *path: str) -> dict[str, Any] | None:
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def from_recording(
    recording: Recording,
    *,
    max_running: int = _UNLIMITED,
    settings: Settings | None = None,
    saved_s: float = 0.0,
) -> Recorded:
    """Make a scenario of a recorded run; `NothingToReplay` where no complete step or no request was recorded.

    Args:
        max_running: requests that an engine decodes at once.
        settings: None: a simulated run's, which its recording does not tell.
        saved_s: what a step would have trained longer, had rows not computed once what they share.
    """
    asked, (recording, which) = settings or Settings(), _one_process(recording)
    apart = union(_phases(recording, Phase.VALIDATE, Phase.CHECKPOINT))
    requests = requests_of(recording, apart)
    steps = _steps(recording)
    work = work_of(recording, requests, apart)
    started = _start(recording, steps, work.groups)
    attempts = max(1, round(median(len(group) for group in work.groups)))
    batch, mini = _batches(recording, attempts)
    step_s = tuple(ended - began - overlap(apart, began, ended) for began, ended in steps)
    warm = min(started.eta + 1, len(steps) - 1)  # their batches were begun while everything was being loaded
    system = _system_of(started.policy)
    rules = regime(system)
    by_age, settled = rules.routed(asked.router).oldest_first, _settled(requests, steps[0][1])
    pools = _pools(recording, settled, max_running, oldest_first=by_age, lends=rules.lends)
    costs, seen, awaits_load = _switch_costs(recording, rolling=asked.weights.sync == "rolling")
    trained_s = fmean(_busy_seconds(recording, steps[warm:], apart))
    scenario = Scenario(
        system=system,
        pools=pools,
        workload=Replay(work.groups),
        train=_training(trained_s, saved_s, work.groups, pools, batch=batch, awaits_load=awaits_load),
        costs=costs,
        batch=batch,
        mini_batch=mini,
        attempts=attempts,
        eta=started.eta,
        in_flight=asked.staleness.in_flight if rules.reserves else None,
        steps=len(steps),
        warm=warm,
        router=asked.router,
        scheduler=asked.scheduler,
        weights=asked.weights if rules.rolls else WeightsConfig(),
    )
    notes = [*which, *_notes(scenario, len(requests), exact=work.exact, seen=seen), *_left_out(asked, scenario)]
    return Recorded(scenario=scenario, step_s=step_s, notes=(*notes, *(() if rules.lends else _never_lent(recording))))


def _training(
    trained_s: float,
    saved_s: float,
    groups: list[list[Trajectory]],
    pools: Sequence[Pool],
    *,
    batch: int,
    awaits_load: bool,
) -> TrainPhysics:
    """Costs that fit a batch as it is replayed: its sessions may differ from the rows that were trained."""
    tokens = sum(turn.prompt + turn.answer for group in groups for attempt in group for turn in attempt)
    gang = sum(pool.slices * pool.gpus for pool in pools if pool.trains)
    return TrainPhysics(
        gpu_s_per_token=(trained_s + saved_s) / (batch / len(groups) * tokens) * gang,
        shared_prefix=trained_s / (trained_s + saved_s),
        update_s=0.0,
        awaits_load=awaits_load,
    )


def _start(recording: Recording, steps: Intervals, groups: Sequence[object]) -> flight.RunStarted:
    """The beginning of the run, whose recording holds what a scenario needs.

    Raises:
        NothingToReplay: names what it lacks.
    """
    rows = _all(recording, flight.RowsTrained)
    for what, found in (("trained rows", rows), ("complete step", steps), ("complete group", groups)):
        if not found:
            raise NothingToReplay(f"the recording holds no {what}; record a run of at least one step")
    started = _all(recording, flight.RunStarted)
    if not started:
        raise NothingToReplay("the recording holds no start of a run")
    return started[-1]


def _never_lent(recording: Recording) -> Iterator[str]:
    bound = {added.pool for added in _all(recording, flight.SliceAdded) if added.capabilities == ("train",)}
    for pool in sorted(bound):
        yield f"{pool} never rolled out in the recording; a policy that lends may lend it here"


def _left_out(asked: Settings, scenario: Scenario) -> Iterator[str]:
    """Settings that change how long steps take, and that no replay has."""
    usual, keys = StalenessConfig(), ("policy", "redundancy", "group_redundancy", "stuck")
    values = {key: getattr(asked.staleness, key) for key in keys}
    told = [f"staleness.{key}={value}" for key, value in values.items() if value != getattr(usual, key)]
    told += [f"weights.sync={asked.weights.sync}"] if asked.weights.sync != scenario.weights.sync else []
    if told:
        yield f"a replay cannot play {', '.join(told)}: it leaves that out"


def _settled(requests: list[Request], since: float) -> list[Request]:
    """Those that ended after the first step, in which everything is still being loaded; all, if these tell nothing."""
    later = [request for request in requests if request.ended > since]
    return later if any(request.tokens for request in later) else requests


def _notes(scenario: Scenario, num_requests: int, *, exact: bool, seen: bool) -> tuple[str, ...]:
    """What was read off a recording.

    Args:
        exact: it says whose every request is.
        seen: it holds switches, so that their costs are known.
    """
    told = "" if exact else " (estimated: no scheduler was told whose they are)"
    costs, factor = scenario.costs, scenario.train.shared_prefix
    shared = f"; what rows share is computed once, which leaves {factor:.2f} of it" if factor < 1 else ""
    if scenario.rolling:
        known = "as seen" if costs.pull is not None else "as long as a load, since no pull was recorded"
        loaded = f"taken by one replica after the other, which stands still for {costs.pull_s:.2f} s ({known})"
    else:
        loaded = f"loaded in {costs.load:.2f} s"
    return (
        f"{num_requests} requests, groups of {scenario.attempts}{told}, {scenario.batch} groups per step",
        f"training takes {1e3 * scenario.train.gpu_s_per_token:.3g} ms of a device per trained token, all phases"
        f"{shared}",
        f"weights are pushed in {costs.push:.2f} s and {loaded}",
        f"a switch costs {costs.wake:.2f} s to wake and {costs.drain:.2f} s to take back, "
        + ("as seen" if seen else "assumed from the load (--set costs.wake=… to say better)"),
        "prefill is part of what decoding takes: a replay books it there",
    )


def _all(recording: Recording, kind: type[_Event]) -> list[_Event]:
    return [event for event in recording.events if isinstance(event, kind)]


# ---------------------------------------------------------------- the trainer


def _one_process(recording: Recording) -> tuple[Recording, tuple[str, ...]]:
    """Of a run that was continued or restarted the process with the most complete steps, of equals the last, and a note
    that says so: what lies between two processes is neither work nor waiting, and steps are done again."""
    starts = [number for number, event in enumerate(recording.events) if isinstance(event, flight.RunStarted)]
    parts = []
    for begin, end in pairwise([0, *starts[1:], len(recording.events)]):
        ended = (n + 1 for n in range(begin, end) if isinstance(recording.events[n], flight.RunEnded))
        parts.append(replace(recording, events=recording.events[begin : next(ended, end)]))
    lengths = [len(_steps(part)) for part in parts]
    which = max(range(len(parts)), key=lambda number: (lengths[number], number))
    told = f"{len(parts)} processes recorded; number {which + 1} is replayed, of {lengths[which]} complete steps"
    return parts[which], (told,) if len(parts) > 1 else ()


def _batches(recording: Recording, attempts: int) -> tuple[int, int]:
    """Groups per step and per local update: as the gang was asked for, else from what was trained."""
    asked = [event.fields for event in _all(recording, flight.SchedulerInput) if event.name == "AcquireRequested"]
    if asked:
        batch, mini = max(fields["batch"] for fields in asked), max(fields["minimum"] for fields in asked)
    else:
        batch = max(1, round(median(row.rollouts for row in _all(recording, flight.RowsTrained)) / attempts))
        updates = Counter(e.step for e in _all(recording, flight.PhaseBegan) if e.phase is Phase.UPDATE_ACTOR)
        mini = max(1, round(batch / median(updates.values()))) if updates else batch
    return batch, mini if batch % mini == 0 else batch


def _steps(recording: Recording) -> list[tuple[float, float]]:
    """Each complete step, from its beginning to that of the next: what lies between two is part of a run, too."""
    began = {event.step: event.at for event in _all(recording, flight.StepBegan)}
    ended = {event.step: event.at for event in _all(recording, flight.StepEnded)}
    return [(began[step], began.get(step + 1, ended[step])) for step in sorted(began.keys() & ended.keys())]


def _phases(recording: Recording, *phases: Phase) -> list[tuple[float, float]]:
    """When the trainer was in one of these phases."""
    found = []
    began: dict[Phase, float] = {}
    for event in recording.events:
        if isinstance(event, flight.PhaseBegan) and event.phase in phases:
            began[event.phase] = event.at
        elif isinstance(event, flight.PhaseEnded) and event.phase in began:
            found.append((began.pop(event.phase), event.at))
    return found


def _busy_seconds(recording: Recording, steps: Intervals, apart: Intervals) -> list[float]:
    """Of each step, what the trainer spent on it while it had the gang, a batch, and no weights on their way.

    What a step needs before it asks for the gang is the same in every step: the least that was seen.
    """
    waits = union([*apart, *_phases(recording, Phase.WAIT_FOR_BATCH, Phase.SYNC_WEIGHTS, Phase.SWITCH)])
    trainers = {event.slice for event in _all(recording, flight.SliceAdded) if "train" in event.capabilities}
    spans = spans_of(recording, SliceState.TRAINING)
    training = union([span for name in trainers for span in spans.get(name, ())])
    if not training:  # states of slices were not recorded
        return [ended - began - overlap(waits, began, ended) for began, ended in steps]
    asked = [event.at for event in _all(recording, flight.SchedulerInput) if event.name == "AcquireRequested"]
    before = [at - began for began, ended in steps for at in asked[bisect_left(asked, began) :][:1] if at < ended]
    busy = [[(max(a, began), min(b, ended)) for a, b in training if a < ended and b > began] for began, ended in steps]
    return [min(before, default=0.0) + sum(b - a - overlap(waits, a, b) for a, b in held) for held in busy]


# ---------------------------------------------------------------- the slices


def _pools(
    recording: Recording, requests: Sequence[Request], max_running: int, *, oldest_first: bool, lends: bool
) -> tuple[Pool, ...]:
    """One shape of the cost model for all, and for each pool its speed. Where the recorded system never ``lends``, what
    trains may be lent in a what-if, whatever its tags were."""
    longest = max(request.prompt + request.tokens for request in requests)
    decoded = served(requests, serving_of(recording), max_running, oldest_first=oldest_first)
    cost = fit_decode(decoded)
    pools: dict[str, dict[str, flight.SliceAdded]] = {}
    for added in _all(recording, flight.SliceAdded):
        pools.setdefault(added.pool, {})[added.slice] = added
    found = []
    for name, members in pools.items():
        first = next(iter(members.values()))
        servers = {added.address or added.slice for added in members.values()}
        own = fitted(cost, [request for request in decoded if request.slice in servers])
        engine = EnginePhysics(
            decode=own, prefill_s_per_token=0.0, kv_tokens=max(10**6, 64 * longest), max_running=max_running
        )
        trains, rolls_out = (tag.value in first.capabilities for tag in (Tag.TRAIN, Tag.ROLLOUT))
        found.append(
            Pool(
                name=name,
                slices=len(members),
                gpus=first.devices,
                trains=trains,
                rolls_out=rolls_out or not lends,
                engine=engine,
            )
        )
    return tuple(found)


def _switch_costs(recording: Recording, *, rolling: bool = False) -> tuple[SwitchCosts, bool, bool]:
    """Medians of the times in each state, whether switches were seen, and whether the trainer awaits the loads.

    Args:
        rolling: replicas take weights in turn: slices are in the state of loading while the trainer hands them over.
    """
    spans = {state: [span for own in spans_of(recording, state).values() for span in own] for state in _SWITCHING}
    wake, drain, load = ([end - begin for begin, end in spans[state]] for state in _SWITCHING)
    loading = union(spans[SliceState.SYNCING])
    publications = _phases(recording, Phase.SYNC_WEIGHTS) or [(0.0, 0.0)]
    publish_s = median(end - begin for begin, end in publications)
    beside_s = median(overlap(loading, begin, end) for begin, end in publications)
    load_s = median(load) if load else publish_s
    pulls = [event.stood_s for event in _all(recording, flight.PullEnded) if event.seconds]
    costs = SwitchCosts(
        wake=median(wake) if wake else _TO_ROLLOUT * load_s,
        drain=median(drain) if drain else _TO_TRAIN * load_s,
        load=load_s,
        # Without states, the trainer's publication is all that is known.
        push=publish_s - (0.0 if rolling else beside_s) if load else 0.0,
        pull=median(pulls) if pulls else None,
    )
    return costs, bool(wake and drain), beside_s > 0.5 * load_s


def _system_of(policy: str) -> str:
    """The system of a recorded run: a simulated one names it, one without a scheduler keeps its pools apart."""
    return policy if policy in REGIMES else "disaggregated"
