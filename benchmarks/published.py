"""What publications measured of the runs that the simulator has as presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures of one of `seamless_verl.simulation.presets.RUNS`."""

    hours: float
    steps: int
    tokens_per_s: float

    @property
    def step_s(self) -> float:
        return self.hours * 3600 / self.steps


# verl documentation, "V1 async trainer", section Benchmark.
MODES: Mapping[str, Measured] = {
    "sync": Measured(hours=22.79, steps=150, tokens_per_s=12053),
    "colocate_async": Measured(hours=14.72, steps=150, tokens_per_s=18852),
    "separate_async": Measured(hours=14.10, steps=150, tokens_per_s=18829),
}
# The same page, "Separate_async switching".
SWITCHING: Mapping[str, Measured] = {
    "no_switch": Measured(hours=13.15, steps=100, tokens_per_s=14604),
    "switch": Measured(hours=11.79, steps=100, tokens_per_s=16445),
}
MEASURED: Mapping[str, Measured] = {**MODES, **SWITCHING}
