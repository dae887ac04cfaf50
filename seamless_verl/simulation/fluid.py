"""The fluid limit: the shortest step when nobody waits for anybody, and its refinement for a bound on staleness.

Work.     T = T_train + (N - r_b * T_train) / r_ab, which is (W_r + W_t) / (a + b) of SeamlessFlow; rates depend
          on how many requests there are: N tokens per step, r_b and r_ab the token rates of the slices that only
          generate and of all slices with (eta + 1) batches in flight. Without lending T = max(T_train, N / r_b).
Bound.    A batch is admitted when weights are published and must be whole eta + 1 steps later, so its longest
          trajectory must fit into (eta + 1) T, and towards the end few requests are left to fill the replicas. With
          C(a) tokens generated at age a and n(t) requests in flight, dC/da = 1 / step time(n): a periodic fluid
          equation whose smallest T with C((eta + 1) T) >= longest is found by bisection.

Paid.     Each step pays for what no decision avoids: a slice that is lent wakes up and is drained at least once (the
          2 T_switch of SeamlessFlow); new weights stop what runs on a slice while it loads them (a request could only
          dodge that by moving, and is prefilled again then); and what is generated last must still be trained and
          pushed before the next version is out, so the longest trajectory has (eta + 1) T less both.

The last two are what an ideal system reaches that shares all slices equally among the requests in flight; it is a limit
for policies that decide who uses which slice when, not for clairvoyant ones that would give long requests more. As a
fluid it is exact to a few per cent: simulated systems that never lend, or lend everything, come to 0.94 to 1.06 of
theirs. Where more are in flight than engines have seats for, the order in which they are served decides when the
longest ends; the limit lets each of them run at once, while the work of all is done by those that have a seat.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from seamless_verl.errors import ConfigError
from seamless_verl.simulation.regimes import Regime, regime
from seamless_verl.simulation.replica import EnginePhysics
from seamless_verl.simulation.scenario import Pool, Scenario

_CELLS = 48  # per step
_PLACES = 5  # where in a step the loan is tried
_GROUPS = 256  # sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSample:
    """Sampled trajectories: generated tokens and tool seconds of each, and means over all of them.

    Attributes:
        longest: of each group of a batch the tokens of its longest trajectory, ascending, mean over batches.
        begins_with, grows_by: tokens of cache at the first generated token, and per generated token (tool results too).
    """

    generated: Any
    tool_s: Any
    longest: Any
    trained: float
    begins_with: float
    grows_by: float
    decoding_context: float
    prefilled_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidLimit:
    """Seconds per step: of the gang's training, by work alone, under the bound on staleness, and with what each step
    pays; none is smaller than the one before."""

    train_s: float
    work_s: float
    bounded_s: float
    paid_s: float


def sample(scenario: Scenario) -> WorkSample:
    """Draw trajectories with a seed of their own: the limit belongs to the setting, not to a run."""
    rng, workload = random.Random(7919), copy(scenario.workload)
    groups = max(_GROUPS, 2 * scenario.batch)
    generated, tools, first, trained, weighted, prefilled = [], [], 0.0, 0.0, 0.0, 0.0
    for _ in range(groups):
        for trajectory in workload.group(rng, scenario.attempts):
            context = 0
            first += trajectory[0].prompt
            for turn in trajectory:
                context += turn.prompt
                prefilled += turn.prompt
                weighted += turn.answer * (context + turn.answer / 2)
                context += turn.answer
            generated.append(float(sum(turn.answer for turn in trajectory)))
            tools.append(sum(turn.tool_s for turn in trajectory))
            trained += context
    tokens = np.array(generated)
    maxima = tokens.reshape(groups, scenario.attempts).max(axis=1)
    batches = np.sort(maxima[: groups // scenario.batch * scenario.batch].reshape(-1, scenario.batch), axis=1)
    begins_with = first / len(tokens)
    decoding_context = float(weighted / tokens.sum())
    mean_age = float((tokens**2).sum() / 2 / tokens.sum())  # generated tokens of a request that decodes
    return WorkSample(
        generated=tokens,
        tool_s=np.array(tools),
        longest=batches.mean(axis=0),
        trained=trained / len(tokens),
        begins_with=begins_with,
        grows_by=max(0.0, decoding_context - begins_with) / mean_age,
        decoding_context=decoding_context,
        prefilled_share=prefilled / tokens.sum(),
    )


def fluid_limit(scenario: Scenario, *, idle: float = 0.0) -> FluidLimit:
    """The limit of the scenario's work on its slices, as its system may share them.

    Args:
        idle: share of the time that slices which are lent stand idle beside that; it shortens ``paid_s``'s loan.
    """
    rules = regime(scenario.system)
    bound = rules.bound(scenario.eta)
    scenario = scenario if bound is None else replace(scenario, eta=bound)
    work = sample(scenario)
    standing = scenario.standing
    lendable = [pool for pool in scenario.gang if pool.rolls_out and (rules.lends or rules.colocated)]
    everybody = [*lendable, *standing]
    train_s = _train_s(scenario, work)
    trajectories = scenario.batch * scenario.attempts
    in_flight = trajectories * (scenario.eta + 1)
    tokens = float(work.generated.mean()) * trajectories
    rate_all, rate_standing = _rate(everybody, in_flight, work), _rate(standing, in_flight, work)
    work_s = train_s + max(0.0, tokens - rate_standing * train_s) / rate_all
    lent = sum(pool.slices for pool in lendable)

    always = sum(pool.slices for pool in standing)
    engine = everybody[0].engine

    ends = [(float(work.longest[-1]), 0.0)]

    def bounded(step_s: float) -> bool:
        windows = _windows(always, lent, step_s, lent_s=step_s - train_s)
        return any(_fits(scenario, work, engine, window, step_s, ends) for window in windows)

    costs = scenario.costs
    push_s = scenario.push_s(rules)
    trained = _ends_before_training(scenario, rules, work, train_s)

    def paid(step_s: float) -> bool:
        lent_s = max(0.0, (1.0 - idle) * step_s - train_s - push_s - costs.wake - costs.drain) if lent else 0.0
        always_s = max(0.0, step_s - scenario.load_s)
        made = rate_standing * always_s + (rate_all - rate_standing) * lent_s
        if made < tokens or step_s < train_s:
            return False
        return any(
            _fits(scenario, work, engine, window, step_s, trained, load_s=scenario.load_s)
            for window in _windows(always, lent, step_s, lent_s=lent_s)
        )

    bounded_s = _smallest(bounded, work_s)
    return FluidLimit(train_s=train_s, work_s=work_s, bounded_s=bounded_s, paid_s=_smallest(paid, bounded_s))


def _ends_before_training(
    scenario: Scenario, rules: Regime, work: WorkSample, train_s: float
) -> list[tuple[float, float]]:
    """Of each mini-batch the tokens of its longest trajectory, and how long before the publication these must be there:
    it and all after it are still trained, and the weights pushed."""
    update = rules.update(scenario.batch, scenario.mini_batch)
    return [
        (
            float(work.longest[ready - 1]),
            train_s * (scenario.batch - ready + update) / scenario.batch + scenario.push_s(rules),
        )
        for ready in range(update, scenario.batch + 1, update)
    ]


def _windows(always: int, lent: int, step_s: float, lent_s: float) -> Iterator[Any]:
    """Slices that generate in each cell of a step: the gang trains as a whole, so the lent ones all generate or none
    do; one loan per step, wherever in it."""
    cells = round(_CELLS * min(1.0, max(0.0, lent_s) / step_s)) if lent else 0
    for part in range(_PLACES if 0 < cells < _CELLS else 1):
        begin = round((_CELLS - cells) * part / max(_PLACES - 1, 1))
        slices = np.full(_CELLS, float(always))
        slices[begin : begin + cells] += lent
        yield slices


def _smallest(fits: Callable[[float], bool], low: float) -> float:
    """The smallest value from ``low`` on that fits, to a thousandth."""
    if fits(low):
        return low
    high = 2.0 * low
    while not fits(high):
        low, high = high, 2.0 * high
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def best_limit(scenario: Scenario) -> float | None:
    """Seconds per step with costs paid on the scenario's slices, with the tags that they have, by whoever shares them
    best: lent, apart or all in turn, with an update per mini-batch or per batch. None where the scenario's system has
    no bound on staleness: there is no limit; and where fewer batches are in flight than the bound allows: then it is
    not known."""
    bound = regime(scenario.system).bound(scenario.eta)
    if bound is None or scenario.in_flight is not None:
        return None
    found = []
    for system in ("predictive", "disaggregated", "colocated"):
        for mini in {scenario.mini_batch, scenario.batch}:
            with suppress(ConfigError):  # these slices do not suit it
                found.append(fluid_limit(replace(scenario, system=system, eta=bound, mini_batch=mini)).paid_s)
    return min(found)


def _fits(
    scenario: Scenario,
    work: WorkSample,
    engine: EnginePhysics,
    slices: Any,
    step_s: float,
    ends: Sequence[tuple[float, float]],
    *,
    load_s: float = 0.0,
) -> bool:
    """Whether trajectories of so many tokens end so many seconds (``ends``) before eta + 1 steps of this length do, in
    the periodic fluid.

    Nothing is generated during the first ``load_s`` of a step (> 0: new weights, after which the caches of those that
    go on are filled again), nor where ``slices`` (per cell of the rest) are 0.
    """
    lives = scenario.eta + 1
    size = scenario.batch * scenario.attempts
    order = np.sort(work.generated)
    tool_share = float(work.tool_s.sum() / max(work.generated.sum(), 1.0))  # seconds of tools per generated token
    running = np.full(_CELLS, 0.7 * lives * size)
    context = np.full(_CELLS, work.decoding_context)
    progress = np.zeros(lives * _CELLS)
    served = slices > 0
    among = np.maximum(slices, 1.0)
    again_s = 0.0
    for _ in range(40):
        width = (step_s - load_s - again_s) / _CELLS
        if width <= 0:
            return False
        step = _step_s(engine, _seated(engine, np.maximum(running / among, 1e-3), context), context, work)
        duty = step / (step + tool_share)
        progress = np.cumsum(np.tile(served * duty / step, lives)) * width
        alive = (len(order) - np.searchsorted(order, progress)) * (size / len(order))
        decoding = alive * np.tile(duty, lives)
        now = np.maximum(decoding.reshape(lives, _CELLS).sum(axis=0), 1e-3)
        held = (decoding * (work.begins_with + work.grows_by * progress)).reshape(lives, _CELLS).sum(axis=0)
        if load_s:
            again_s = 0.5 * again_s + 0.5 * float(held[-1] / among.max()) * engine.prefill_s_per_token
        if np.abs(now - running).max() < 0.5:
            break
        running, context = 0.5 * (running + now), 0.5 * (context + held / now)
    cells = [(tokens, len(progress) - 1 - round(after_s / width)) for tokens, after_s in ends]
    return all(cell >= 0 and progress[cell] >= tokens for tokens, cell in cells)


def _seated(engine: EnginePhysics, running: Any, context: Any) -> Any:
    """Of the requests ``running`` on a replica those that decode at once; the others queue for a seat or for cache."""
    return np.minimum(np.minimum(running, engine.max_running), engine.kv_tokens / np.maximum(context, 1.0))


def _step_s(engine: EnginePhysics, seated: Any, context: Any, work: WorkSample) -> Any:
    """Seconds per token of one request among ``seated``, with its share of everybody's prefill."""
    cost = engine.decode
    step = cost.attention_base_s + cost.attention_per_token_s * seated * context
    step = step + np.maximum(cost.floor_s, cost.base_s + cost.per_request_s * seated)
    return step + seated * work.prefilled_share * engine.prefill_s_per_token


def _rate(pools: Sequence[Pool], in_flight: float, work: WorkSample) -> float:
    """Tokens per second with ``in_flight`` trajectories spread evenly; those that have seats decode."""
    slices = sum(pool.slices for pool in pools)
    if not slices:
        return 0.0
    found = 0.0
    for pool in pools:
        seated = float(_seated(pool.engine, in_flight / slices, work.decoding_context))
        found += pool.slices * seated / float(_step_s(pool.engine, seated, work.decoding_context, work))
    return found


def _train_s(scenario: Scenario, work: WorkSample) -> float:
    gpus = sum(pool.slices * pool.gpus for pool in scenario.gang)
    mini_batches = scenario.batch // regime(scenario.system).update(scenario.batch, scenario.mini_batch)
    tokens = work.trained * scenario.batch * scenario.attempts
    return scenario.train.update_s * (mini_batches - 1) + scenario.train.seconds(round(tokens), gpus)
