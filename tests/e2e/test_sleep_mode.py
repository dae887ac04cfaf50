"""A real vLLM engine on the CPU gives its memory back when it sleeps, and needs weights after level 2."""

import json
import os
import subprocess
import sys

import pytest

from recipes.arithmetic.assets import build
from seamless_verl.run.environment import CPU_ENVIRONMENT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_weights_and_cache_are_given_back_and_taken_by_tag() -> None:
    model = build() / "model"
    # vLLM takes functions for its worker under this setting only.
    environment = {**os.environ, **CPU_ENVIRONMENT, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    command = [sys.executable, "-m", "tests.e2e.sleeping_engine", str(model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    first, *others = seen["answers"]
    assert all(answer == first for answer in others)  # after level 1, and after level 2 with weights
    weights, cache = seen["resident"][0]
    assert weights > 1_000_000 < cache
    assert seen["resident"][1:3] == [[0, 0], [weights, cache]]  # level 1, all at once
    assert seen["resident"][3:5] == [[0, 0], [weights, 0]]  # level 2, the weights first
    assert seen["empty"]
    assert seen["numbers"] == [False, True]  # rubbish until weights arrive
    assert seen["checksums"][0] == seen["checksums"][1]  # fused and padded, and yet the weights of the file
