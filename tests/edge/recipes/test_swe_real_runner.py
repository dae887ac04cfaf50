"""The real harness on a real repository: mini-swe-agent with swe-rex against a scripted model server.

Needs the `swe` extra. To run it where that is not installed:

    python -m venv /tmp/swe && /tmp/swe/bin/pip install -c requirements-cpu.lock -e ".[swe,dev]"
    /tmp/swe/bin/python -m pytest tests/edge/recipes/test_swe_real_runner.py
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from seamless_verl.agents.contract import AgentJob, AgentReport, AgentStatus
from seamless_verl.proxy.calls import ApiError, bad_request
from seamless_verl.proxy.dialects.chat import parse_chat
from seamless_verl.recipes.swe.real.runner import MiniSweRunner
from seamless_verl.recipes.swe.real.sandbox import SandboxError
from tests.edge.recipes.test_swe_real_support import (
    FIX,
    KEY,
    SECRET,
    SUBMIT,
    SUBMIT_PATCH,
    ModelServer,
    first_request,
    job_of,
    make_repository,
    model_server,
    nothing_left,
)

_MISSING = [name for name in ("swerex", "minisweagent") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(
        bool(_MISSING),
        reason=f"{', '.join(_MISSING)} not installed; run: pip install -c requirements-cpu.lock -e '.[swe,dev]' "
        "in a virtual environment of its own, then pytest tests/edge/recipes/test_swe_real_runner.py",
    ),
    pytest.mark.timeout(300),
]

Repository = tuple[Path, str]
Serve = Callable[..., ModelServer]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return make_repository(tmp_path / "origin")


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda commands, **kwargs: stack.enter_context(model_server(commands, **kwargs))


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


def options(**more: Any) -> dict[str, Any]:
    sandbox = {"kind": "local", "allow_unsandboxed": True, "command_timeout_s": 20, **more.pop("sandbox", {})}
    return {"sandbox": sandbox, "grade_timeout_s": 60, **more}


async def attempt(job: AgentJob, **more: Any) -> AgentReport:
    runner = MiniSweRunner(**options(**more))
    try:
        return await runner.run(job)
    finally:
        await runner.close()


def only_trajectory(folder: Path) -> str:
    (path,) = folder.glob("logs/*/trajectory.json")
    return path.read_text()


@contextmanager
def remote_server(port: int) -> Iterator[None]:
    command = [sys.executable, "-m", "swerex.server", "--host", "127.0.0.1", "--port", str(port), "--auth-token", "t"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=20)


async def test_a_submitted_repair_is_graded_with_one(serve: Serve, repository: Repository, tmp_path: Path) -> None:
    server = serve(["git log --oneline --all", *SUBMIT_PATCH])

    report = await attempt(job_of(repository, server), log_dir=str(tmp_path / "logs"))

    assert report == AgentReport(
        status=AgentStatus.FINISHED, reward=1.0, rewards={"passed": 1.0, "share": 1.0}, detail=""
    )
    assert server.keys == [f"Bearer {KEY}"] * 5
    assert {request["model"] for request in server.requests} == {"Qwen/Qwen3-8B"}
    for request in server.requests:
        parse_chat(json.dumps(request).encode())  # the proxy refuses what it does not know
    conversation = json.dumps(server.requests[-1])
    assert "add() subtracts." in conversation
    assert "a + b" in conversation, "the agent saw its own diff"
    for hidden in (SECRET, "test_double", "must not be found"):
        assert hidden not in conversation
    assert KEY not in only_trajectory(tmp_path)


async def test_text_actions_share_and_an_unfinished_attempt(
    serve: Serve, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # the model is reached past it
    for name in ("http_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "example.org")
    server = serve(["ls", "echo '# looked' >> calc.py"], text=True)

    job = dataclasses.replace(job_of(repository, server), model="/srv/models/Qwen3-8B")
    report = await attempt(job, action_format="text", step_limit=2, reward="share")

    for request in server.requests:
        parse_chat(json.dumps(request).encode())
    assert server.requests[0]["model"] == "/srv/models/Qwen3-8B"
    # Nothing was submitted: what changed in the repository is graded, and repairs nothing.
    assert report.status is AgentStatus.FINISHED
    assert report.rewards == {"passed": 0.0, "share": pytest.approx(1 / 3)}
    assert report.reward == pytest.approx(1 / 3)
    assert "1 of 3 tests passed" in report.detail


async def test_tests_cannot_be_rewritten(serve: Serve, repository: Repository) -> None:
    cheat = "echo 'def test_add(): pass' > test_calc.py; echo 'import os; os._exit(0)' > conftest.py"
    server = serve([cheat, "exit 1"])

    report = await attempt(job_of(repository, server), step_limit=2)

    assert report.reward == 0.0
    assert "left out of the patch: conftest.py, test_calc.py" in report.detail


@pytest.mark.parametrize(
    ("damage", "reward"), [("touch .git/index.lock", 1.0), ("rm -rf .git", 0.0), ('rm -rf "$PWD"', 0.0)]
)
async def test_an_agent_that_damages_its_repository_is_graded(
    serve: Serve, repository: Repository, damage: str, reward: float
) -> None:
    report = await attempt(job_of(repository, serve([f"{FIX}; {damage}", "exit 1"])), step_limit=2)

    assert report.reward == reward
    assert ("no diff could be taken: " in report.detail) == (reward == 0.0), report.detail


async def test_a_patch_that_does_not_apply_is_worth_nothing(serve: Serve, repository: Repository) -> None:
    bad = "--- a/calc.py\\n+++ b/calc.py\\n@@ -1,1 +1,1 @@\\n-no such line\\n+x\\n"
    server = serve([f"{SUBMIT}; printf -- '{bad}'"])

    report = await attempt(job_of(repository, server))

    assert report.reward == 0.0
    assert "does not apply" in report.detail


async def test_the_deadline_ends_a_model_that_does_not_answer(serve: Serve, repository: Repository) -> None:
    server = serve([FIX, "ls"])

    async def stall() -> None:
        await first_request(server)
        server.wait_s = 600.0

    stalling = asyncio.ensure_future(stall())
    report = await attempt(job_of(repository, server, deadline_s=110.0), grade_timeout_s=60)
    await stalling

    # The repair was made before the time was up, and counts.
    assert report.status is AgentStatus.TIMED_OUT
    assert report.reward == 1.0
    assert "stopped after" in report.detail


async def test_a_model_that_cannot_be_reached_fails_the_agent_and_not_the_runner(
    serve: Serve, repository: Repository, unused_tcp_port: int
) -> None:
    job = dataclasses.replace(job_of(repository, serve(["ls"])), base_url=f"http://127.0.0.1:{unused_tcp_port}/v1")

    report = await attempt(job, reward="share")

    assert report.status is AgentStatus.FAILED
    assert report.reward == pytest.approx(1 / 3)
    assert "Connection error" in report.detail


@pytest.mark.parametrize(
    "refusal",
    [
        bad_request(
            "This model's maximum context length is 9 tokens, and the prompt has 9 (prompt is too long: 9 tokens > 9 "
            "maximum).",
            param="messages",
            code="context_length_exceeded",
        ),
        ApiError(429, "turn_budget_exhausted", "Session s1 has used its 50 turns."),
        ApiError(429, "token_budget_exhausted", "Session s1 has used its 24576 tokens."),
    ],
    ids=["context", "turns", "tokens"],
)
async def test_an_agent_that_has_spent_what_it_was_given_has_not_failed(
    serve: Serve, repository: Repository, refusal: ApiError
) -> None:
    server = serve([FIX, refusal])

    report = await attempt(job_of(repository, server))

    assert (report.status, report.reward) == (AgentStatus.FINISHED, 1.0), report.detail


async def test_background_processes_of_the_agent_are_ended(serve: Serve, repository: Repository) -> None:
    server = serve(["setsid nohup sleep 987654 >/dev/null 2>&1 & echo started", *SUBMIT_PATCH])

    report = await attempt(job_of(repository, server))

    assert report.reward == 1.0
    assert not [p for p in psutil.process_iter(["cmdline"]) if "987654" in (p.info["cmdline"] or [])]


async def test_close_ends_what_runs(serve: Serve, repository: Repository) -> None:
    server = serve(["sleep 4"])
    runner = MiniSweRunner(**options())
    running = asyncio.ensure_future(runner.run(job_of(repository, server)))
    await first_request(server)

    await runner.close()
    await runner.close()

    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(RuntimeError, match="after close"):
        await runner.run(job_of(repository, server))


async def test_a_sandbox_that_fails_is_no_reward(serve: Serve, repository: Repository) -> None:
    server = serve(["ls"])
    job = job_of((repository[0], "0" * 40), server)

    with pytest.raises(SandboxError, match="0000000"):
        await attempt(job)

    assert not server.requests


async def test_a_remote_swe_rex_server(serve: Serve, repository: Repository, unused_tcp_port: int) -> None:
    model = serve(SUBMIT_PATCH)
    remote = {"kind": "remote", "options": {"auth_token": "t", "port": unused_tcp_port, "timeout": 5.0}}
    with remote_server(unused_tcp_port):
        report = await attempt(job_of(repository, model), sandbox={**remote, "start_attempts": 8})
    assert report.reward == 1.0
