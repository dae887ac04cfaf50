"""verl's TransferQueue is one per Ray cluster; a second run there is refused, a dying one of the last life awaited."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("verl")
import ray

from seamless_verl.errors import MachineError
from seamless_verl.verl_adapter import job

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
