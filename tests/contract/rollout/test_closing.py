"""The end of a run closes its rollout workers, with real Ray actors: some answer, some cannot."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")
import ray
from omegaconf import OmegaConf

from seamless_verl.run.restarts import Exit
from seamless_verl.verl_adapter import job

# verl warns of engines that are not installed when its trainer is imported.
pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    class Worker:  # defined here, Ray sends it by value and its processes need not import verl
        def __init__(self, told: str, ends: bool = True) -> None:
            self._told = told
            self._ends = ends

        def close(self) -> None:
            if not self._ends:
                threading.Event().wait()
            with open(self._told, "a") as file:
                file.write("closed\n")

    ray.init("local", num_cpus=2, include_dashboard=False)
    yield ray.remote(num_cpus=0)(Worker)
    ray.shutdown()


def loops(monkeypatch: pytest.MonkeyPatch, workers: list[Any]) -> Any:
    """`job._agent_loops` with a manager of these workers."""
    made = SimpleNamespace(create=lambda **_: SimpleNamespace(agent_loop_workers=workers))
    monkeypatch.setattr("verl.utils.import_utils.load_class_from_fqn", lambda *_: made)
    asked = ("get_llm_client", "get_teacher_client", "get_reward_handles")
    trainer = SimpleNamespace(**dict.fromkeys(asked, lambda: None))
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"agent": {"agent_loop_manager_class": "m.M"}}}})
    return job._agent_loops(config, trainer)


def test_workers_are_closed_however_the_run_ends(worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    workers = [worker.remote(str(told)) for _ in range(2)]
    with loops(monkeypatch, workers) as manager:
        assert manager.agent_loop_workers == workers
        assert not told.exists()
    assert told.read_text() == "closed\n" * 2
    with pytest.raises(ValueError, match="no rows"), loops(monkeypatch, workers):
        raise ValueError("no rows")
    assert told.read_text() == "closed\n" * 4


def _ask_for_ever(worker: Any) -> None:
    while True:
        ray.get(worker.__ray_ready__.remote())


def test_a_worker_that_does_not_answer_costs_a_line_and_not_the_others(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(job, "_CLOSE_S", 1.0)
    told = tmp_path / "told"
    dead, stuck, well = (worker.remote(str(told), ends) for ends in (True, False, True))
    ray.get([one.__ray_ready__.remote() for one in (dead, stuck, well)])
    ray.kill(dead)
    with pytest.raises(ray.exceptions.RayActorError):  # to kill is not to wait for the end: it may answer until then
        _ask_for_ever(dead)
    foreign = SimpleNamespace()  # of a manager of the user's
    with caplog.at_level(logging.WARNING), loops(monkeypatch, [dead, stuck, well, foreign]):
        pass
    assert told.read_text() == "closed\n"
    (line,) = [record.getMessage() for record in caplog.records if record.name == job.__name__]
    assert "rollout worker 0: " in line
    assert "rollout worker 1: no answer within 1 s" in line
    assert "rollout worker 2" not in line
    ray.kill(stuck)


# `job.main`, where training waits for a signal and its clean-up for a line.
CLEANING = """
import sys, threading
from pathlib import Path
from seamless_verl.verl_adapter import job

def train(run_dir, terminal, start_up):
    try:
        terminal.write("begun\\n")
        while True:
            threading.Event().wait(0.1)
    finally:
        terminal.write("cleaning\\n")
        sys.stdin.readline()
        terminal.write("clean\\n")

job._train = train
sys.exit(job.main(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_slurms_signal_beside_the_supervisors_does_not_cut_the_clean_up_short(first: int, tmp_path: Path) -> None:
    command, pipe = [sys.executable, "-c", CLEANING, str(tmp_path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "begun\n"
        trainer.send_signal(first)
        assert trainer.stdout.readline() == "cleaning\n"
        trainer.send_signal(signal.SIGINT if first == signal.SIGTERM else signal.SIGTERM)
        assert trainer.communicate("go on\n")[0] == "clean\n"
    assert trainer.returncode == 130


def test_a_pipe_that_is_gone_does_not_change_what_the_supervisor_is_told(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from seamless_verl.run.restarts import RunBroken
from seamless_verl.verl_adapter import job

def train(run_dir, terminal, start_up):
    raise RunBroken("rollout worker 0 died")

job._train = train
sys.exit(job.main(Path(sys.argv[1])))
"""
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], stdout=writer, check=False)
    os.close(writer)
    assert ended.returncode == Exit.DIED
