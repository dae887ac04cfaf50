"""Settings of the real runner, and what its parts refuse before anything starts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.agents.contract import AgentJob
from seamless_verl.errors import ConfigError, MachineError
from seamless_verl.recipes.swe.real import protocol, runner
from seamless_verl.recipes.swe.real.child import Child
from seamless_verl.recipes.swe.real.patches import split_patch
from seamless_verl.recipes.swe.real.protocol import GradeRequest, HarnessRequest
from seamless_verl.recipes.swe.real.settings import RunnerSettings, SandboxSettings
from seamless_verl.recipes.swe.real.task import AgentView, SweTask
from seamless_verl.recipes.swe.real.workspace import repository_url

VIEW = AgentView(instance_id="a__b-1", repo="a/b", base_commit="c", problem_statement="p")
TASK = SweTask(view=VIEW, test_command="pytest", fail_to_pass=("t.py::x",), test_patch="+secret")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sandbok": {}}, "kwargs.sandbok=.*did you mean seamless.agent.kwargs.sandbox"),
        (
            {"sandbox": {"kynd": "docker"}},
            "sandbox.kynd=docker.*did you mean seamless.agent.kwargs.sandbox.kind",
        ),
        ({"sandbox": {"kind": "dokcer"}}, "is no kind of sandbox.*did you mean docker"),
        ({"sandbox": {"kind": "local"}}, "without a sandbox.*allow_unsandboxed"),
        ({"sandbox": {"command_timeout_s": 400}}, "at most 270"),
        ({"sandbox": {"repo_url": "https://example.org"}}, "has no {repo}"),
        ({"sandbox": {"start_attempts": 0}}, "start_attempts=0"),
        ({"reward": "some"}, "kwargs.reward=some.*all, share"),
        ({"action_format": "xml"}, "action_format=xml.*toolcall, text"),
        ({"grade_timeout_s": 0}, "grade_timeout_s=0"),
        ({"max_concurrent": True}, "max_concurrent=True"),
        ({"step_limit": -1}, "step_limit=-1"),
        ({"protected_paths": "conftest.py"}, r"protected_paths=conftest.py.*write \[conftest.py\]"),
        ({"forward_env": "A"}, r"forward_env=A.*write \[A\]"),
        ({"sandbox": {"options": {"docker_args": "--rm"}}}, r"sandbox.options.docker_args=--rm.*write \[--rm\]"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunnerSettings.from_mapping(options)


def test_a_harness_configuration_is_found_from_the_folder_of_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert RunnerSettings.from_mapping({"harness_config": "mine.yaml"}).config_name == str(tmp_path / "mine.yaml")
    assert RunnerSettings.from_mapping({"harness_config": "default"}).config_name == "default"


def test_requests_survive_the_way_to_their_process() -> None:
    settings = RunnerSettings.from_mapping(
        {"sandbox": {"kind": "modal", "env": {"A": "b"}}, "forward_env": ["X"], "model_kwargs": {"temperature": 1.0}}
    )
    ask = HarnessRequest(
        token="t", view=VIEW, base_url="http://h/v1", api_key="k", model="m", limit_s=3.0, settings=settings
    )
    grade = GradeRequest(token="t", task=TASK, patch="p", limit_s=3.0, settings=settings)

    assert protocol.load_harness_request(protocol.dump(ask)) == ask
    assert protocol.load_grade_request(protocol.dump(grade)) == grade


def test_the_harness_is_told_no_test() -> None:
    settings = RunnerSettings()
    ask = HarnessRequest(
        token="t", view=TASK.agent_view(), base_url="u", api_key="k", model="m", limit_s=1.0, settings=settings
    )

    text = protocol.dump(ask).decode()

    assert set(json.loads(text)["view"]) == {
        "instance_id", "repo", "base_commit", "problem_statement", "image", "workdir",
    }  # fmt: skip
    assert "secret" not in text
    assert "t.py::x" not in text


def test_a_missing_package_names_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_PACKAGES", {"no_such_package_xyz": "swe-rex"})

    with pytest.raises(MachineError, match=r"swe-rex: not installed. Fix: pip install -e '/path/to/clone\[swe\]'"):
        runner.MiniSweRunner()


def test_docker_that_is_not_there_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_PACKAGES", {})
    monkeypatch.setenv("PATH", "")

    with pytest.raises(MachineError, match="docker: not found in PATH"):
        runner.MiniSweRunner()
    with pytest.raises(MachineError, match="podman: not found in PATH"):
        runner.MiniSweRunner(sandbox={"options": {"container_runtime": "podman"}})


async def test_a_job_never_waits_within_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_PACKAGES", {})
    limits: list[float] = []

    async def run_child(child: Child) -> dict[str, Any]:
        limits.append(child.timeout_s)
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(runner, "run_child", run_child)
    swe = runner.MiniSweRunner(sandbox={"kind": "modal"}, grade_timeout_s=60, max_concurrent=1)
    assert swe.max_concurrent == 1, "who admits jobs is told"
    task = json.loads(TASK.to_json())
    job = AgentJob(task=task, base_url="http://h/v1", api_key="k", model="m", deadline_s=100.0)
    jobs = [asyncio.ensure_future(swe.run(job)) for _ in range(3)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert limits == [40.0] * 3
    await swe.close()
    await asyncio.wait(jobs)


def test_images_activate_their_environment_and_shared_machines_do_not() -> None:
    assert SandboxSettings(kind="docker").command_env["BASH_ENV"] == "/root/.bashrc"
    assert "BASH_ENV" not in SandboxSettings(kind="remote").command_env


@pytest.mark.parametrize(
    ("repo", "url"),
    [
        ("a/b", "https://example.org/a/b.git"),
        ("/srv/a", "/srv/a"),
        ("file:///srv/a", "file:///srv/a"),
        ("ssh://git@h/a.git", "ssh://git@h/a.git"),
    ],
)
def test_where_a_repository_is_fetched_from(repo: str, url: str) -> None:
    assert repository_url(repo, "https://example.org/{repo}.git") == url


def test_an_empty_submission_has_no_sections() -> None:
    assert split_patch("") == ()
