"""The command joins the Ray cluster that ``ray start`` made on this machine."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from seamless_verl.run.environment import CPU_ENVIRONMENT
from seamless_verl.run.supervisor import RUN_ID, sweep

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

GPUS = 3
# What the CPU platform gives to a cluster of its own.
NOT_OF_ITS_OWN = [
    f"ray_kwargs.ray_init.{key}=null"
    for key in ("address", "num_cpus", "num_gpus", "include_dashboard", "object_store_memory")
]


@pytest.fixture
def cluster():
    """Environment of a shell in which ``ray start --head`` was given, with its temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="svj-", dir="/tmp"))  # Ray's sockets need a short path
    mark = uuid.uuid4().hex
    environment = {**os.environ, **CPU_ENVIRONMENT, "TMPDIR": str(folder), "SPT_NOENV": "1"}
    for name in ("RAY_ADDRESS", "RAY_TMPDIR"):
        environment.pop(name, None)
    settings = ["--port=0", "--node-ip-address=127.0.0.1", "--num-cpus=16", f"--num-gpus={GPUS}"]
    settings += ["--include-dashboard=false", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
    head = subprocess.Popen(
        [Path(sys.executable).with_name("ray"), "start", "--head", *settings],
        env={**environment, RUN_ID: mark},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        for line in head.stdout:
            if "Ray runtime started" in line:
                break
        yield environment
    finally:
        with contextlib.suppress(ProcessLookupError):
            head.send_signal(signal.SIGTERM)
        head.stdout.close()
        head.wait(timeout=60)
        sweep(mark)
        shutil.rmtree(folder, ignore_errors=True)


def test_after_ray_start_the_command_joins_that_cluster(cluster, tmp_path):
    """As far as the count of its GPUs, which is the cluster's and not this machine's."""
    asked = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.n_gpus_per_node=2"]
    command = [sys.executable, "-m", "seamless_verl.main", "+recipe=arithmetic", *NOT_OF_ITS_OWN, *asked]
    cluster = {**cluster, "SEAMLESS_RUNS": str(tmp_path / "runs")}
    ended = subprocess.run(command, env=cluster, cwd=tmp_path, capture_output=True, text=True, check=False)
    address = Path(cluster["TMPDIR"], "ray", "ray_current_cluster").read_text()
    said = ended.stdout + ended.stderr
    assert f"joining the Ray cluster at {address}" in said
    assert f"the Ray cluster has: {GPUS}" in said
    assert ended.returncode == 1
    assert "not swept" not in said
    assert "still run" not in said
