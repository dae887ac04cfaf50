"""The settings that the simulator's benchmarks share: calibrated hardware, five workloads, clusters and splits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seamless_verl.simulation.loop import TrainPhysics
from seamless_verl.simulation.published import CALIBRATED, COSTS, engine
from seamless_verl.simulation.regimes import regime
from seamless_verl.simulation.scenario import Noise, Pool, Scenario
from seamless_verl.simulation.workload import Agentic, Bimodal, Constant, LogNormal, Workload

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
