"""verl's TransferQueue is one per Ray cluster; a second run there is refused, a dying one of the last life awaited."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("verl")
import ray
from transfer_queue import interface

from seamless_verl.errors import MachineError
from seamless_verl.verl_adapter import job
from seamless_verl.verl_adapter.trainer.adoption import refuse_joined_queue

# verl warns of engines that are not installed when its trainer is imported.
pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def controller() -> Iterator[Any]:
    class Controller:  # defined here, Ray sends it by value and its processes need not import verl
        pass

    ray.init("local", num_cpus=1, include_dashboard=False)
    made = ray.remote(num_cpus=0)(Controller).options(name="TransferQueueController", namespace="transfer_queue")
    yield made.remote()
    ray.shutdown()


def test_a_second_run_is_refused_and_the_end_of_the_first_one_awaited(
    controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_DYING_S", 0.0)
    with pytest.raises(MachineError, match=r"another verl run is on it.*\+\+ray_kwargs\.ray_init\.address=local"):
        job._check_alone()
    monkeypatch.setattr(job, "_DYING_S", 150.0)
    threading.Timer(0.5, ray.kill, [controller]).start()
    job._check_alone()


_ANOTHER_RUN = """
import sys, ray
ray.init(sys.argv[1])
class Controller: pass
ray.remote(num_cpus=0)(Controller).options(name="theirs", namespace="transfer_queue", lifetime="detached").remote()
"""


def test_another_runs_queue_that_was_joined_is_let_go_before_the_run_is_refused(
    controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "_TQ_CONTROLLER", controller)
    refuse_joined_queue()
    address = ray.get_runtime_context().gcs_address
    subprocess.run([sys.executable, "-c", _ANOTHER_RUN, address], check=True, capture_output=True)
    theirs = ray.get_actor("theirs", namespace="transfer_queue")
    monkeypatch.setattr(interface, "_TQ_CONTROLLER", theirs)
    with pytest.raises(MachineError, match="another verl run is on it"):
        refuse_joined_queue()
    interface.close()  # as verl's entry point does
    ray.get(theirs.__ray_ready__.remote())
