"""Published set-ups: where ``simulate --preset`` starts, and what the simulator is fitted to.

Hardware facts are data-sheet values; mean lengths are those that the publications state. What nobody states is fitted
(`benchmarks/calibration.py`): how much slower decoding is than the published cost model scaled to the hardware,
GPU-seconds of training per token, the bandwidth that attention reaches, and how far lengths spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from seamless_verl.decode_cost import PUBLISHED, DecodeCost
from seamless_verl.errors import ConfigError, meant
from seamless_verl.scheduling.slices import Hardware
from seamless_verl.simulation.agents import LogNormal
from seamless_verl.simulation.replica import EnginePhysics
from seamless_verl.simulation.scenario import Noise, Pool, Scenario, SwitchCosts, TrainPhysics


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The free parameters.

    Attributes:
        decode: factor on what a decode step takes however many requests it serves: reading the weights, launches,
            all-reduces, the inefficiency of many small experts.
        train_gpu_s_per_token: forward and backward.
        attention: share of the memory bandwidth that attention reaches: the four published cost models imply 0.34 to
            0.52.
        sigma: standard deviation of the logarithm of the lengths, before they are cut at the limit.
    """

    decode: float
    train_gpu_s_per_token: float
    attention: float
    sigma: float


# The fit to all five runs; `python -m benchmarks.calibration` finds it again.
CALIBRATED = Fitted(decode=2.65, train_gpu_s_per_token=327e-6, attention=0.407, sigma=0.916)


@dataclass(frozen=True, slots=True)
class Published:
    """A published run of verl 0.9 on 8-GPU H100 nodes with Qwen3.5-35B-A3B, batch 64 x 8, lengths 2k / 32k.

    Attributes:
        trainer_nodes, rollout_nodes: 0 rollout nodes is colocated.
        mean_answer: tokens, as published.
        decoupled: old log-probs are recomputed by the trainer.
    """

    system: str
    trainer_nodes: int
    rollout_nodes: int
    mean_answer: float
    decoupled: bool


# verl documentation, "V1 async trainer": section Benchmark, then "Separate_async switching".
RUNS: Mapping[str, Published] = {
    "sync": Published("verl_sync", 4, 0, mean_answer=12720, decoupled=True),
    "colocate_async": Published("verl_colocate_async", 4, 0, mean_answer=12854, decoupled=True),
    "separate_async": Published("verl_separate_async", 2, 2, mean_answer=12288, decoupled=True),
    "no_switch": Published("verl_separate_async", 2, 1, mean_answer=13343, decoupled=False),
    "switch": Published("verl_enable_switch", 2, 1, mean_answer=13478, decoupled=False),
}

# The published cost model is that of Qwen3-30B-A3B on one H20. Each of its terms is carried over to Qwen3.5-35B-A3B on
# four H100 by what bounds it: weights, state and cache by bytes over bandwidth, the work per request by FLOPs.
_TENSOR_PARALLEL = 4
H20 = Hardware(flops=148e12, bandwidth=4.0e12, memory=96e9)
_H100 = Hardware(flops=989e12, bandwidth=3.35e12, memory=80e9)
_WEIGHTS, _WEIGHTS_PUBLISHED = 35e9 * 2, 30.5e9 * 2
# 10 of 40 layers keep a cache: 2 heads of 256, K and V, two bytes.
_KV_HEADS = 2
_KV_BYTES = 10 * _KV_HEADS * 256 * 2 * 2
# The other 30 keep a recurrent state of 32 heads of 128 x 128 in fp32, read and written at every step.
_STATE_BYTES = 30 * 32 * 128 * 128 * 4 * 2
_ACTIVE_PARAMETERS = 3e9
_PREFILL_UTILISATION = 0.15  # of the peak; mixture of experts with tensor parallelism


def engine(fitted: Fitted, tensor_parallel: int = _TENSOR_PARALLEL) -> EnginePhysics:
    """So many H100 with vLLM and Qwen3.5-35B-A3B; at least two, since one has no room for the weights.

    Only four were measured. With another number, what is read and computed is shared by that many; what the decode
    factor adds to reading (launches, all-reduces) stays as it was, which is assumed.
    """
    published = PUBLISHED["30b-a3b-tp1"]
    bandwidth, flops = tensor_parallel * _H100.bandwidth, tensor_parallel * _H100.flops
    reading = (_WEIGHTS / bandwidth) / (_WEIGHTS_PUBLISHED / H20.bandwidth)
    fixed = (fitted.decode - 1.0) * reading * tensor_parallel / _TENSOR_PARALLEL
    weights = reading + fixed
    # Two KV heads on four devices: each device keeps one, so the cache is there twice.
    kv_bytes = _KV_BYTES * max(1.0, tensor_parallel / _KV_HEADS)
    per_request = published.per_request_s * H20.flops / flops + _STATE_BYTES / bandwidth
    return EnginePhysics(
        decode=DecodeCost(
            floor_s=published.floor_s * weights,
            base_s=published.base_s * weights,
            # Not slowed down: a request's state is moved at the memory's speed, and experts that are read anyway serve
            # one more token. With the factor, full slices were too slow and lending looked too good.
            per_request_s=per_request,
            attention_base_s=published.attention_base_s * weights,
            attention_per_token_s=kv_bytes / bandwidth / fitted.attention,
        ),
        prefill_s_per_token=2 * _ACTIVE_PARAMETERS / (_PREFILL_UTILISATION * flops),
        kv_tokens=int((0.85 * tensor_parallel * _H100.memory - _WEIGHTS) / kv_bytes),
    )


# 70 GB of weights over NVLink and the network, state of the optimizer over PCIe: seconds, not fitted.
COSTS = SwitchCosts(wake=12.0, drain=8.0, load=8.0, push=4.0, spread=0.1)


def scenario(run: Published, fitted: Fitted, *, steps: int = 40, seed: int = 0) -> Scenario:
    """The published run as a scenario."""
    replicas = 8 // _TENSOR_PARALLEL
    physics = engine(fitted)
    trainers = Pool(
        name="trainers", slices=run.trainer_nodes * replicas, gpus=_TENSOR_PARALLEL, trains=True, engine=physics
    )
    pools: tuple[Pool, ...] = (trainers,)
    if run.rollout_nodes:
        pools += (replace(trainers, name="rollouts", slices=run.rollout_nodes * replicas, trains=False),)
    return Scenario(
        system=run.system,
        pools=pools,
        workload=LogNormal(mean=run.mean_answer, sigma=fitted.sigma, cap=32768),
        train=TrainPhysics(
            gpu_s_per_token=fitted.train_gpu_s_per_token, old_log_prob=1 / 3 if run.decoupled else 0.0, update_s=2.0
        ),
        costs=COSTS,
        steps=steps,
        warm=min(5, steps // 4),
        seed=seed,
        noise=Noise(slowdown=0.03),
    )


def preset(name: str) -> Scenario:
    """The scenario of this name.

    Raises:
        ConfigError: unknown; names the nearest.
    """
    if name not in RUNS:
        raise ConfigError("--preset", name, "no such preset", meant(name, RUNS))
    return scenario(RUNS[name], CALIBRATED, steps=20)
