"""Commands, limits, repositories and patches in a sandbox on this machine."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from seamless_verl.recipes.swe.real.sandbox import Sandbox, SandboxError, drain_output
from seamless_verl.recipes.swe.real.settings import SandboxSettings
from seamless_verl.recipes.swe.real.task import AgentView
from seamless_verl.recipes.swe.real.workspace import apply_patch, apply_tests, prepare_workspace, worktree_diff
from tests.edge.recipes.test_swe_real_support import TEST_PATCH, make_repository

pytest.importorskip("swerex", reason="swe-rex not installed; see tests/edge/recipes/test_swe_real_runner.py")

SETTINGS = SandboxSettings(
    kind="local",
    allow_unsandboxed=True,
    output_limit_bytes=1000,
    setup_command="mkdir -p build && echo made > build/setup.txt",
)
SLIPPED = """\
--- a/calc.py
+++ b/calc.py
@@ -41,5 +41,5 @@ somewhere else
 def add(a, b):
-    return a - b
+    return a + b


 def double(a):
"""


def exists(folder: str) -> bool:
    return Path(folder).exists()


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    box = Sandbox(SETTINGS, image="", token=f"test-{time.time_ns()}")
    await box.start()
    assert exists(box.scratch)
    yield box
    assert await box.stop() == ""
    assert await box.stop() == ""
    assert not exists(box.scratch)


@pytest.fixture
async def repository(sandbox: Sandbox, tmp_path: Path) -> Sandbox:
    folder, base = make_repository(tmp_path / "origin")
    view = AgentView(instance_id="i", repo=str(folder), base_commit=base, problem_statement="p")
    await prepare_workspace(sandbox, view, SETTINGS)
    return sandbox


async def test_a_command_that_hangs_is_stopped_with_what_it_printed(sandbox: Sandbox) -> None:
    started = time.monotonic()

    result = await sandbox.run("echo begun; sleep 60", timeout_s=1)

    assert (result.exit_code, result.timed_out, result.output) == (124, True, "begun\n")
    assert time.monotonic() - started < 20


async def test_a_limit_of_the_commands_own_is_not_ours(sandbox: Sandbox) -> None:
    own = await sandbox.run("timeout 0.1 sleep 60", timeout_s=60)
    long = await sandbox.run_long("timeout 0.1 sleep 60", timeout_s=60)
    killed = await sandbox.run("trap '' TERM; while true; do sleep 1; done", timeout_s=1)

    assert (own.exit_code, own.timed_out) == (124, False)
    assert (long.exit_code, long.timed_out) == (124, False)
    assert killed.timed_out


async def test_output_is_cut_and_what_prints_it_runs_to_its_end(sandbox: Sandbox, tmp_path: Path) -> None:
    result = await sandbox.run(f"seq 300000; echo x > {tmp_path}/done", timeout_s=200)

    assert (len(result.output), result.exit_code, result.timed_out) == (1000, 0, False)
    assert exists(f"{tmp_path}/done")
    assert len((await sandbox.run("yes", timeout_s=1)).output) == 1000


async def test_quotes_exit_codes_and_variables_arrive(sandbox: Sandbox) -> None:
    result = await sandbox.run('echo "it\'s $PAGER" >&2; exit 7', timeout_s=20)

    assert (result.exit_code, result.output) == (7, "it's cat\n")


async def test_a_command_that_cannot_be_started_is_a_result(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = AsyncMock(side_effect=BlockingIOError("[Errno 11] Resource temporarily unavailable"))
    with monkeypatch.context() as no_process_is_free:
        no_process_is_free.setattr(sandbox._deployment.runtime, "execute", full)
        result = await sandbox.run("true", timeout_s=20)
    assert result.exit_code == 126
    assert "BlockingIOError: [Errno 11]" in result.output
    assert (await sandbox.run(f"true {'x' * 200_000}", timeout_s=20)).exit_code == 126
    sandbox.cwd = str(tmp_path / "gone")
    assert (await sandbox.run("true", timeout_s=20)).exit_code == 126
    sandbox.cwd = "/"


async def test_long_commands_are_polled_and_limited(sandbox: Sandbox) -> None:
    ended = await sandbox.run_long("sleep 0.5; echo 'a b'; exit 3", timeout_s=20)
    hung = await sandbox.run_long("echo begun; sleep 60", timeout_s=1)

    assert (ended.exit_code, ended.output, ended.timed_out) == (3, "a b\n", False)
    assert (hung.exit_code, hung.output, hung.timed_out) == (124, "begun\n", True)


async def test_what_a_start_up_file_of_bash_prints_is_no_output(tmp_path: Path) -> None:
    (tmp_path / "bashrc").write_text("echo 5; echo welcome >&2\n")
    settings = dataclasses.replace(SETTINGS, env={"BASH_ENV": str(tmp_path / "bashrc")})
    box = Sandbox(settings, image="", token=f"test-{time.time_ns()}")
    await box.start()
    try:
        assert (await box.run("printf a", timeout_s=20)).output == "a"
        assert (await box.run_long("exit 3", timeout_s=20)).exit_code == 3
    finally:
        assert await box.stop() == ""


async def test_a_failing_check_shows_the_output(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match=r"failed with 5: echo why; exit 5\nwhy"):
        await sandbox.check("echo why; exit 5")


async def test_the_diff_holds_the_agents_work_and_nothing_else(repository: Sandbox) -> None:
    await repository.check("echo '# x' >> calc.py; echo new > extra.txt; echo d > patch.txt; mkdir __pycache__")
    await repository.check("echo c > __pycache__/calc.pyc; git rm -q test_calc.py")

    diff = await worktree_diff(repository)

    assert "+# x" in diff
    assert "b/extra.txt" in diff
    assert "a/test_calc.py" in diff
    for left_out in ("patch.txt", "calc.pyc", "setup.txt"):
        assert left_out not in diff


async def test_only_the_base_commit_is_there(repository: Sandbox) -> None:
    log = await repository.check("git log --all --format=%s; git remote; git reflog")

    assert "must not be found" not in log


async def test_a_patch_whose_lines_slipped_still_applies(repository: Sandbox) -> None:
    assert await apply_patch(repository, SLIPPED, name="agent") == ""
    assert "return a + b" in await repository.check("cat calc.py")


async def test_a_patch_for_something_else_does_not(repository: Sandbox) -> None:
    problem = await apply_patch(repository, SLIPPED.replace("return a - b", "return a * b"), name="agent")

    assert "calc.py" in problem
    assert await worktree_diff(repository) == ""


async def test_the_tests_replace_what_the_agent_made_of_them(repository: Sandbox) -> None:
    await repository.check("echo 'def test_add(): pass' > test_calc.py")

    await apply_tests(repository, TEST_PATCH)

    assert "assert add(2, 3) == 5" in await repository.check("cat test_calc.py")
    with pytest.raises(SandboxError, match="test_patch does not apply to its base commit"):
        await apply_tests(repository, TEST_PATCH.replace("from calc import add\n", "no such line\n"))


def test_the_output_of_a_container_is_read_away() -> None:
    chatter = "import sys; sys.stdout.write('x' * 1_000_000); sys.stderr.write('x' * 1_000_000)"
    process = subprocess.Popen([sys.executable, "-c", chatter], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        drain_output(SimpleNamespace(_container_process=process))
        assert process.wait(timeout=20) == 0
        time.sleep(0.2)
    drain_output(SimpleNamespace())
