"""swe-rex's Docker deployment with a stand-in for the ``docker`` command line: no daemon is needed, none is tested.

The stand-in starts what swe-rex has the image run (its server, by sh) as a process that outlives its client, as a
container does, and copies the "image's" repository afresh for every container.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from seamless_verl.agents.contract import AgentJob, AgentStatus
from seamless_verl.errors import ConfigError, MachineError
from seamless_verl.recipes.swe.real import child
from seamless_verl.recipes.swe.real import runner as runner_module
from seamless_verl.recipes.swe.real.child import ChildError
from seamless_verl.recipes.swe.real.protocol import TOKEN_VARIABLE
from seamless_verl.recipes.swe.real.runner import MiniSweRunner
from seamless_verl.recipes.swe.real.sandbox import CONTAINER_LABEL, Sandbox, SandboxError
from seamless_verl.recipes.swe.real.settings import SandboxSettings
from seamless_verl.recipes.swe.real.task import SweTask
from tests.edge.recipes.test_swe_real_support import (
    SUBMIT_PATCH,
    ModelServer,
    first_request,
    job_of,
    make_repository,
    model_server,
    nothing_left,
)

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("swerex") is None or importlib.util.find_spec("minisweagent") is None,
        reason="swe-rex and mini-swe-agent not installed; see tests/edge/recipes/test_swe_real_runner.py",
    ),
    pytest.mark.timeout(300),
]

Serve = Callable[..., ModelServer]

STAND_IN = """#!{python}
import os, pathlib, shutil, signal, subprocess, sys
STATE, ORIGIN, IMAGE_REPO = pathlib.Path("{state}"), {origin!r}, {workdir!r}
args = sys.argv[2:]
with (STATE / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")

def option(name):
    return args[args.index(name) + 1]

def end(name):
    (STATE / (name + ".label")).unlink(missing_ok=True)
    try:
        os.killpg(int((STATE / (name + ".pid")).read_text()), signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        pass

if sys.argv[1:3] == ["ps", "--all"] and (STATE / "hung").exists():
    signal.pause()
if sys.argv[1] == "inspect" and (STATE / "stuck").exists():
    signal.pause()
if (STATE / "down").exists():
    sys.exit("Cannot connect to the daemon")
if sys.argv[1] == "run":
    shutil.rmtree(IMAGE_REPO, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", ORIGIN, IMAGE_REPO], check=True)
    command = ["sleep", "600"] if (STATE / "asleep").exists() else args[-3:]
    inside = {{"PATH": str(STATE / "bin") + ":" + os.environ["PATH"], "HOME": str(STATE)}}
    inside["PORT"] = option("-p").split(":")[0]
    running = subprocess.Popen(command, env=inside, start_new_session=True)
    (STATE / (option("--name") + ".pid")).write_text(str(running.pid))
    (STATE / (option("--name") + ".label")).write_text(option("--label"))
    sys.exit(running.wait())
if sys.argv[1] == "kill":
    sys.exit("tried to kill container, and it runs on") if (STATE / "busy").exists() else end(args[0])
if sys.argv[1] == "rm":
    for name in args[2:]:
        end(name)
        if (STATE / "busy").exists():
            sys.exit("removal of container " + name + " is already in progress")
if sys.argv[1] == "ps" and "--filter" in args:
    for path in STATE.glob("*.label"):
        if "label=" + path.read_text() == option("--filter"):
            print(path.stem)
"""
# "Inside" the container. What swe-rex would install its server with, where there is none, takes its time.
INSIDE = {
    "swerex-remote": 'echo $$ > {state}/server; exec {python} -m swerex.server --host 127.0.0.1 --port $PORT "$@"',
    "python3": "exec sleep 600",
}


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda commands, **kwargs: stack.enter_context(model_server(commands, **kwargs))


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    # The scratch folders are inside the containers, which are this machine here.
    with nothing_left(scratch=False) as prefix:
        yield
    for folder in Path("/tmp").glob(f"seamless-swe-{prefix}*"):
        shutil.rmtree(folder)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of the stand-in's state; fails the test when a container is left."""
    folder = tmp_path / "docker"
    (folder / "bin").mkdir(parents=True)
    origin, workdir = str(tmp_path / "origin"), str(tmp_path / "testbed")
    programs = {"docker": STAND_IN, **{f"bin/{name}": f"#!/bin/sh\n{line}\n" for name, line in INSIDE.items()}}
    for name, text in programs.items():
        (folder / name).write_text(text.format(python=sys.executable, state=folder, origin=origin, workdir=workdir))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    yield folder
    assert not list(folder.glob("*.label")), "a container is left"
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    assert psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=30)[1] == []


def containers(docker: Path) -> list[str]:
    return [path.stem for path in docker.glob("*.label")]


def task(tmp_path: Path, server: ModelServer) -> AgentJob:
    repository = make_repository(tmp_path / "origin")
    return job_of(repository, server, image="calc:1", workdir=str(tmp_path / "testbed"))


def runner(**sandbox: Any) -> MiniSweRunner:
    # No BASH_ENV: the "container" is this machine, whose .bashrc is none of the test's business.
    return MiniSweRunner(sandbox={"env": {"BASH_ENV": ""}, "start_attempts": 1, **sandbox}, grade_timeout_s=60)


async def test_one_container_for_the_agent_and_a_fresh_one_for_the_grade(
    serve: Serve, docker: Path, tmp_path: Path
) -> None:
    server = serve(["git log --oneline --all; git remote", *SUBMIT_PATCH])
    swe = runner(options={"docker_args": ["--memory", "4g"]})

    report = await swe.run(task(tmp_path, server))
    await swe.close()

    assert report.reward == 1.0, report.detail
    calls = (docker / "calls").read_text().splitlines()
    runs = [call for call in calls if call.startswith("run ")]
    assert len(runs) == 2
    for call, phase in zip(runs, ("agent", "grade"), strict=True):
        assert "--memory 4g" in call
        assert f"{CONTAINER_LABEL}=" in call
        assert f"-{phase} --name" in call
    seen = server.requests[1]["messages"][-1]["content"]
    assert "start" in seen
    assert "must not be found" not in seen
    assert "origin" not in seen


async def test_a_killed_harness_leaves_no_container(serve: Serve, docker: Path, tmp_path: Path) -> None:
    server = serve(["sleep 60"])
    swe = runner()
    attempt = asyncio.ensure_future(swe.run(task(tmp_path, server)))
    await first_request(server)
    assert len(containers(docker)) == 1
    (harness,) = psutil.Process().children()
    harness.send_signal(signal.SIGKILL)

    with pytest.raises(ChildError, match="ended with -9"):
        await attempt

    await swe.close()
    assert "rm --force --volumes" in (docker / "calls").read_text()


async def test_an_agent_that_ends_its_container_is_graded(serve: Serve, docker: Path, tmp_path: Path) -> None:
    swe = runner()

    report = await swe.run(task(tmp_path, serve([f"kill -9 $(cat {docker}/server)"])))
    await swe.close()

    assert (report.status, report.reward) == (AgentStatus.FAILED, 0.0)
    assert report.detail.startswith("the agent ended its sandbox: "), report.detail


async def test_tests_that_end_their_container_have_not_passed(serve: Serve, docker: Path, tmp_path: Path) -> None:
    ends = f"kill -9 $(cat {docker}/server)"
    job = task(tmp_path, serve(SUBMIT_PATCH))
    swe = runner()

    report = await swe.run(dataclasses.replace(job, task={**job.task, "test_command": ends}))
    await swe.close()

    assert report.reward == 0.0
    assert "the tests ended their sandbox: " in report.detail, report.detail


async def test_a_container_that_cannot_be_killed_and_is_being_removed_goes_and_costs_no_result(
    serve: Serve, docker: Path, tmp_path: Path
) -> None:
    (docker / "busy").touch()
    swe = runner()
    report = await swe.run(task(tmp_path, serve(SUBMIT_PATCH)))
    await swe.close()
    assert report.reward == 1.0, report.detail
    assert not containers(docker)


async def test_an_image_that_does_not_come_in_time_is_no_reward(
    serve: Serve, docker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (child, runner_module):  # what swe-rex asks Docker for blocks the loop of the process
        monkeypatch.setattr(module, "GRACE_S", 0.5)
    (docker / "stuck").touch()
    swe = runner()
    job = dataclasses.replace(task(tmp_path, serve(["ls"])), deadline_s=68.0)

    with pytest.raises(SandboxError, match=r"the sandbox of .*\.harness was not ready within 8 s"):
        await swe.run(job)
    with pytest.raises(SandboxError, match=r"the sandbox of .*\.grade was not ready within 8 s"):
        await swe._grade(SweTask.from_mapping(job.task), "", secrets.token_hex(8), 8.0)

    await swe.close()
    assert "inspect calc:1" in (docker / "calls").read_text()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # swe-rex leaves its client's pipes open
async def test_a_container_that_does_not_answer_is_given_up_and_another_one_tried(docker: Path, tmp_path: Path) -> None:
    make_repository(tmp_path / "origin")
    (docker / "asleep").touch()
    settings = SandboxSettings(start_attempts=2, options={"startup_timeout": 0.5})
    with pytest.raises(SandboxError, match="did not start: TimeoutError: Runtime did not start within 0.5s"):
        await Sandbox(settings, image="calc:1", token="t").start()
    calls = (docker / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["inspect", "run", "kill"] * 2


async def test_a_daemon_that_hangs_does_not_hang_the_attempt(
    docker: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child, "CLIENT_S", 0.5)
    (docker / "hung").touch()
    gone = child.Child(module="no.such.module", token="t", request=b"", timeout_s=60, container_runtime="docker")

    # Why the attempt failed is told all the same.
    with pytest.raises(ChildError, match=r"ended with 1 and no result: .*No module named"):
        await child.run_child(gone)
    assert "docker ps did not answer within 0.5 s, containers may be left" in caplog.text
    with pytest.raises(ChildError, match=r"docker ps did not answer within 0\.5 s, containers may be left"):
        await child.remove_containers("docker", "t")


RUNNER = """
import asyncio, json, sys
from seamless_verl.agents.contract import AgentJob
from seamless_verl.recipes.swe.real.runner import MiniSweRunner

swe = MiniSweRunner(sandbox={"env": {"BASH_ENV": ""}, "start_attempts": 1}, grade_timeout_s=60)
asyncio.run(swe.run(AgentJob(**json.loads(sys.argv[1]))))
"""


async def test_a_killed_rollout_worker_leaves_no_container(serve: Serve, docker: Path, tmp_path: Path) -> None:
    server = serve(["sleep 60"])
    job = json.dumps(dataclasses.asdict(task(tmp_path, server)))
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", RUNNER, job, env=env)
    await first_request(server)
    (harness,) = psutil.Process(worker.pid).children()
    scratch = f"/tmp/seamless-swe-{harness.environ()[TOKEN_VARIABLE]}"  # "inside" the container
    assert len(containers(docker)) == 1
    worker.kill()
    await worker.wait()
    left = psutil.wait_procs([harness], timeout=60)[1]
    shutil.rmtree(scratch)
    assert not left, "the harness outlives its owner"


async def test_a_task_without_an_image_says_so(serve: Serve, docker: Path, tmp_path: Path) -> None:
    job = job_of(make_repository(tmp_path / "origin"), serve(["ls"]))
    swe = runner()
    with pytest.raises(SandboxError, match="the task names none"):
        await swe.run(job)
    await swe.close()


def test_a_daemon_that_is_down_is_told_at_the_start(docker: Path) -> None:
    (docker / "down").touch()
    with pytest.raises(MachineError, match=r"docker: not usable \(Cannot connect"):
        runner()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sandbox": {"options": {"dokker_args": []}}}, "sandbox.options=.*is refused by swe-rex"),
        ({"harness_config": "mini2"}, "harness_config=mini2: .* finds no mini2.yaml"),
        ({"harness_config": "/no/mini.yaml"}, "harness_config=/no/mini.yaml: .* finds no /no/mini.yaml"),
        ({"harness_config": "conf.yml"}, "harness_config=/.*/conf.yml: .* finds no /.*/conf.yaml"),
        ({"harness_config": "mine"}, "harness_config=mine: .* finds no mine.yaml"),
    ],
)
def test_what_swe_rex_or_mini_swe_agent_does_not_know_is_refused_at_the_start(
    docker: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    for name in ("conf.yml", "mine.yaml"):
        (docker / name).touch()
    monkeypatch.chdir(docker)
    monkeypatch.setenv("MSWEA_CONFIG_DIR", str(docker))
    MiniSweRunner.check_machine({"harness_config": "mini", "sandbox": {"options": {"docker_args": ["--rm"]}}})
    MiniSweRunner.check_machine({"harness_config": "mine", "forward_env": ["MSWEA_CONFIG_DIR"]})
    with pytest.raises(ConfigError, match=message):
        MiniSweRunner.check_machine(options)
