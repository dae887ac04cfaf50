"""Environment of a replica's processes in which vLLM's CPU build works as vLLM does on GPUs."""

from __future__ import annotations

import os
from pathlib import Path

SCHEDULED_AHEAD = {"VERL_USE_EXTERNAL_MODULES": "tests.scheduled_ahead"}
"""A step is scheduled before the last one's tokens are known."""

GPU_RUNNER = {
    "PYTHONPATH": os.pathsep.join(
        [
            str(Path(__file__).with_name("gpu_runner")),
            str(Path(__file__).parents[1]),
            os.environ.get("PYTHONPATH", ""),
        ]
    ),
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
"""The model runner is that of GPUs (``tests/gpu_runner``)."""
