"""The fluid limit: the shortest step that the hardware allows when nothing waits for anything.

    paper     (W_r + W_t) / (a + b)                       work over machines (PAPERS 1.2)
    fluid     T = T_train + (N - r_b * T_train) / r_ab    refined: rates depend on how many requests there are

with N generated tokens per step, r_b the token rate of the slices that only generate (all requests on them) and r_ab
that of all slices. If the rollout slices alone keep up (r_b * T_train >= N), training is the limit and T = T_train.
Systems whose trainers may not generate have T = max(T_train, N / r_b). At most (eta + 1) batches are in flight, so
rates are taken at that concurrency and with the mean context of a running request; both favour the limit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from seamless_verl.simulation.regimes import regime
from seamless_verl.simulation.replica import EnginePhysics
from seamless_verl.simulation.scenario import Pool, Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadMoments:
    """Of one trajectory, from a sample: generated and trained tokens, mean context while it decodes, tool time."""

    generated: float
    trained: float
    decoding_context: float
    tool_s: float
    prefilled: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidLimit:
    """Seconds per step; no system can be faster than ``step_s`` on average.

    Attributes:
        train_s: of the whole batch on the gang.
        generate_s: of a batch on all slices together.
        multiplexed_s: with lending; ``disaggregated_s``: without; ``colocated_s``: one after the other.
    """

    train_s: float
    generate_s: float
    multiplexed_s: float
    disaggregated_s: float
    colocated_s: float


def moments(scenario: Scenario, groups: int = 400) -> WorkloadMoments:
    """Sampled with a seed of its own, so that it does not depend on the run."""
    rng = random.Random(7919)
    generated = trained = weighted = tool_s = prefilled = 0.0
    count = 0
    for _ in range(groups):
        for trajectory in scenario.workload.group(rng, scenario.attempts):
            context = 0
            count += 1
            for turn in trajectory:
                context += turn.prompt
                prefilled += turn.prompt
                weighted += turn.answer * (context + turn.answer / 2)
                context += turn.answer
                generated += turn.answer
                tool_s += turn.tool_s
            trained += context
    return WorkloadMoments(
        generated=generated / count,
        trained=trained / count,
        decoding_context=weighted / generated,
        tool_s=tool_s / count,
        prefilled=prefilled / count,
    )


def rate(engine: EnginePhysics, running: float, work: WorkloadMoments) -> float:
    """Tokens per second of one replica with ``running`` requests, its share of prefill included."""
    running = min(running, engine.max_running, engine.kv_tokens / work.decoding_context)
    cost = engine.decode
    step = cost.attention_base_s + cost.attention_per_token_s * running * work.decoding_context
    step += max(cost.floor_s, cost.base_s + cost.per_request_s * running)
    return 1.0 / (step / running + work.prefilled / work.generated * engine.prefill_s_per_token)


def fluid_limit(scenario: Scenario) -> FluidLimit:
    """Of the scenario's cluster and work, whatever its system."""
    work = moments(scenario)
    trajectories = scenario.batch * scenario.attempts
    in_flight = trajectories * (scenario.eta + 1)
    gang = [pool for pool in scenario.pools if pool.trains]
    standing = [pool for pool in scenario.pools if not pool.trains]
    batch_tokens = work.generated * trajectories
    gang_s = _train_s(scenario, gang, work)
    everybody_s = _train_s(scenario, list(scenario.pools), work)
    all_rate = _total_rate(list(scenario.pools), in_flight, work)
    sync_rate = _total_rate(list(scenario.pools), trajectories, work)
    standing_rate = _total_rate(standing, in_flight, work)
    left = max(0.0, batch_tokens - standing_rate * gang_s)
    return FluidLimit(
        train_s=gang_s,
        generate_s=batch_tokens / all_rate,
        multiplexed_s=gang_s + left / all_rate,
        disaggregated_s=max(gang_s, batch_tokens / standing_rate) if standing else float("inf"),
        colocated_s=everybody_s + batch_tokens / max(sync_rate, all_rate),
    )


def limit_of(scenario: Scenario) -> float:
    """Seconds per step that the scenario's own system cannot beat."""
    rules, limit = regime(scenario.system), fluid_limit(scenario)
    if rules.colocated:
        return limit.colocated_s
    return limit.multiplexed_s if rules.lends else limit.disaggregated_s


def _train_s(scenario: Scenario, gang: list[Pool], work: WorkloadMoments) -> float:
    gpus = sum(pool.slices * pool.gpus for pool in gang) * min(pool.train_speed for pool in gang)
    train = scenario.train
    tokens = work.trained * scenario.batch * scenario.attempts
    return train.update_s + tokens * train.gpu_s_per_token * (1.0 + train.old_log_prob) / gpus


def _total_rate(pools: list[Pool], in_flight: float, work: WorkloadMoments) -> float:
    slices = sum(pool.slices for pool in pools)
    return sum(pool.slices * rate(pool.engine, in_flight / slices, work) for pool in pools)
