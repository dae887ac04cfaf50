"""The settings that the simulator's benchmarks share: calibrated hardware, five workloads, clusters and splits,
and the ground of StaleFlow's evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from seamless_verl.decode_cost import PUBLISHED
from seamless_verl.simulation.agents import Agentic, Bimodal, Constant, LogNormal, Workload
from seamless_verl.simulation.presets import CALIBRATED, COSTS, H20, engine
from seamless_verl.simulation.regimes import regime
from seamless_verl.simulation.replica import EnginePhysics
from seamless_verl.simulation.scenario import Noise, Pool, Scenario, TrainPhysics

WORKLOADS: Mapping[str, Workload] = {
    "constant": Constant(answer=12_700),
    "lognormal": LogNormal(mean=12_700, sigma=0.7, cap=32_768),
    "skewed": LogNormal(mean=6_000, sigma=1.2, cap=32_768),
    "bimodal": Bimodal(short=4_000, long=28_000, long_share=0.2),
    "agentic": Agentic(turns=15, max_turns=50, answer=500, observation=800, tool_s=8.0),
}
GPUS_PER_SLICE = 4


def cell(system: str, work: str, gpus: int = 32, trainers: float = 0.5, **changes: Any) -> Scenario:
    """``trainers``: their share of the slices; all of them where a system takes turns. The batch grows with the
    cluster: 64 groups of 8 on 32 GPUs."""
    slices = gpus // GPUS_PER_SLICE
    training = slices if regime(system).colocated else max(1, round(slices * trainers))
    physics = engine(CALIBRATED)
    pools = (
        Pool(name="trainers", slices=training, gpus=GPUS_PER_SLICE, trains=True, engine=physics),
        Pool(name="rollouts", slices=slices - training, gpus=GPUS_PER_SLICE, trains=False, engine=physics),
    )
    values: dict[str, Any] = {
        "system": system,
        "pools": tuple(pool for pool in pools if pool.slices),
        "workload": WORKLOADS[work],
        "train": TrainPhysics(gpu_s_per_token=CALIBRATED.train_gpu_s_per_token, update_s=2.0),
        "costs": COSTS,
        "batch": 2 * gpus,
        "mini_batch": gpus // 2,
        "attempts": 8,
        "steps": 16,
        "warm": 4,
        "noise": Noise(slowdown=0.03),
    }
    return Scenario(**{**values, **changes})


# Bytes of a cached token on one device, of the published cost models: layers x KV heads x 128, K and V, two bytes, over
# the tensor-parallel devices.
KV_BYTES_PUBLISHED = {
    "7b-tp1": 28 * 4 * 128 * 4,
    "14b-tp1": 48 * 8 * 128 * 4,
    "32b-tp2": 64 * 8 * 128 * 4 / 2,
    "30b-a3b-tp1": 48 * 4 * 128 * 4,
}


def staleflow_ground(workload: Workload, *, gpus: int = 32, trainers: float = 0.75) -> Scenario:
    """StaleFlow's evaluation in small: Qwen2.5-14B, one H20 per slice, 16 answers per prompt, as many prompts as GPUs.

    Published are the decode cost, the card, the sizes of batch and group and the limit of 20,000 tokens (which
    ``workload`` has to keep). Assumed: 40 % of the peak in training and prefill, old log-probs computed anew, and the
    share of the GPUs that train.
    """
    parameters, utilisation = 14.8e9, 0.4
    physics = EnginePhysics(
        decode=PUBLISHED["14b-tp1"],
        prefill_s_per_token=2 * parameters / (utilisation * H20.flops),
        kv_tokens=int((0.85 * H20.memory - 2 * parameters) / KV_BYTES_PUBLISHED["14b-tp1"]),
    )
    training = Pool(name="trainers", slices=round(gpus * trainers), gpus=1, trains=True, engine=physics)
    return Scenario(
        system="staleflow",
        pools=(training, replace(training, name="rollouts", slices=gpus - training.slices, trains=False)),
        workload=workload,
        train=TrainPhysics(
            gpu_s_per_token=6 * parameters / (utilisation * H20.flops), old_log_prob=1 / 3, update_s=2.0
        ),
        costs=COSTS,
        batch=gpus,
        mini_batch=gpus // 4,
        attempts=16,
    )
