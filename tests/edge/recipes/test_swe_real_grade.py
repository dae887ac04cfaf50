"""What a patch may change before it is graded, and what a command may leave, with real git and bash but no swe-rex."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from seamless_verl.recipes.swe.real import grade, workspace
from seamless_verl.recipes.swe.real.protocol import GradeRequest, GradeResult
from seamless_verl.recipes.swe.real.records import Defaults, parse_record
from seamless_verl.recipes.swe.real.results import Outcome, score
from seamless_verl.recipes.swe.real.sandbox import CommandResult, Sandbox
from seamless_verl.recipes.swe.real.settings import RunnerSettings, SandboxSettings
from seamless_verl.recipes.swe.real.task import AgentView, SweTask
from seamless_verl.recipes.swe.real.workspace import DiffError, prepare_workspace, worktree_diff
from tests.edge.recipes.test_swe_real_support import FIX, TEST_PATCH, make_repository

SETTINGS = RunnerSettings(sandbox=SandboxSettings(kind="local", allow_unsandboxed=True))
EDIT = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -5,2 +5,3 @@ def add(a, b):
 def double(a):
     return add(a, a)
+# changed
"""
NEW = "--- /dev/null\n+++ b/{}\n@@ -0,0 +1 @@\n+{}\n"
REPAIRS = "import calc; calc.add = lambda a, b: a + b"


class ShellSandbox(Sandbox):
    """A folder on this machine, without swe-rex."""

    def __init__(self, folder: Path) -> None:
        super().__init__(SETTINGS.sandbox, image="", token="t")
        self.scratch = str(folder)

    async def run(self, command: str, *, timeout_s: float) -> CommandResult:
        pipe, stdout = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
        ran = await asyncio.create_subprocess_exec("bash", "-c", command, cwd=self.cwd, stdout=pipe, stderr=stdout)
        output, _ = await asyncio.wait_for(ran.communicate(), timeout_s)
        return CommandResult(output=output.decode(), exit_code=ran.returncode or 0)

    async def write(self, path: str, content: str) -> None:
        await asyncio.to_thread(Path(path).write_text, content)

    async def read(self, path: str) -> str:
        return await asyncio.to_thread(Path(path).read_text, encoding="utf-8", errors="replace")


@pytest.fixture
def sandbox(tmp_path: Path) -> ShellSandbox:
    (scratch := tmp_path / "scratch").mkdir()
    return ShellSandbox(scratch)


async def graded(
    sandbox: Sandbox,
    tmp_path: Path,
    patch: str = "",
    *,
    work: str = "",
    test_patch: str = TEST_PATCH,
    test_command: str = f"{sys.executable} -m pytest -q test_calc.py",
    limit_s: float = 60,
) -> GradeResult:
    """The grade of a patch, or of what the commands in ``work`` leave in a sandbox of their own."""
    folder, base = make_repository(tmp_path / "origin")
    view = AgentView(instance_id="i", repo=str(folder), base_commit=base, problem_statement="p")
    tests = ("test_calc.py::test_add", "test_calc.py::test_double")
    # A doctest's file is no test file: what is to be repaired may be in it.
    passing = () if test_patch else ("test_calc.py::test_add_zero", "calc.py::calc.add")
    task = SweTask(
        view=view, test_command=test_command, fail_to_pass=tests, pass_to_pass=passing, test_patch=test_patch
    )
    if work:
        (tmp_path / "agent").mkdir()
        agent = ShellSandbox(tmp_path / "agent")
        await prepare_workspace(agent, view, SETTINGS.sandbox)
        await agent.check(work)
        patch = await worktree_diff(agent)
    await prepare_workspace(sandbox, view, SETTINGS.sandbox)
    request = GradeRequest(token="t", task=task, patch=patch, limit_s=600, settings=SETTINGS)
    return await grade._grade(sandbox, request, deadline=time.monotonic() + limit_s)


async def test_a_patch_that_repairs_is_graded_so(sandbox: Sandbox, tmp_path: Path) -> None:
    repair = EDIT.replace("+# changed", f"+{REPAIRS.partition('; calc.')[2]}")
    assert (await graded(sandbox, tmp_path, repair)).num_passed == 2


async def test_every_pytest_run_of_a_command_counts(sandbox: ShellSandbox) -> None:
    sandbox.cwd = sandbox.scratch
    for name, body in {"a": "pass", "b": "print('PASSED test_c.py::test_c')"}.items():
        (Path(sandbox.cwd) / f"test_{name}.py").write_text(f"def test_{name}(): {body}\n")
    pytest_run = f"{sys.executable} -m pytest -q"

    view = AgentView(instance_id="i", repo="r", base_commit="c", problem_statement="p")
    command = f"{pytest_run} test_a.py && {pytest_run} test_b.py"
    listed = SweTask(view=view, test_command=command, fail_to_pass=("test_a.py::test_a", "test_b.py::test_b"))

    _, outcomes = await grade.run_tests(sandbox, listed, limit_s=60)
    assert {"test_a.test_a", "test_b.test_b"} <= outcomes.keys()
    # Without a list every test that is mentioned counts, so what tests print must not.
    _, outcomes = await grade.run_tests(sandbox, SweTask(view=view, test_command=command), limit_s=60)
    assert outcomes == {"test_b.test_b": Outcome.PASSED}


async def run_listed(
    sandbox: ShellSandbox, body: str, *names: str
) -> tuple[SweTask, CommandResult, dict[str, Outcome]]:
    """What the derived command says of tests in ``test_a.py``."""
    pytest.importorskip("xdist", reason="pytest-xdist not installed; it is in requirements-dev.lock")
    sandbox.cwd = sandbox.scratch
    (Path(sandbox.cwd) / "test_a.py").write_text(body)
    (Path(sandbox.cwd) / "pytest.ini").write_text("[pytest]\naddopts = -nauto\n")
    listed = [f"test_a.py::{name}" for name in names]
    record = {"instance_id": "i", "repo": "r", "base_commit": "c", "problem_statement": "p", "FAIL_TO_PASS": listed}
    task = parse_record(record, Defaults())
    task = dataclasses.replace(task, test_command=task.test_command.replace("python -m", f"{sys.executable} -m"))
    return task, *await grade.run_tests(sandbox, task, limit_s=60)


@pytest.mark.parametrize(("lost", "ran"), [("", {"test_a.test_a"}), ("gone", {"test_a.test_a", "test_a.test_b"})])
async def test_only_the_listed_tests_run_and_their_files_where_pytest_does_not_know_one(
    sandbox: ShellSandbox, lost: str, ran: set[str]
) -> None:
    body = "def test_a(): pass\ndef test_b(): assert 0\n"

    _, result, outcomes = await run_listed(sandbox, body, "test_a", *filter(None, [lost]))

    assert outcomes.keys() == ran, result.output
    assert result.exit_code == int(bool(lost))
    assert "bringing up nodes" not in result.output


@pytest.mark.parametrize(("end", "passed"), [("", 2), ("def test_d(): __import__('os')._exit(1)", 1)])
async def test_tests_that_need_others_before_them_pass_with_their_file_which_costs_nothing_where_it_does_not_end(
    sandbox: ShellSandbox, end: str, passed: int
) -> None:
    # The list has the repaired test first, and not all that it needs.
    body = "done = []\ndef test_a(): done.append('a')\ndef test_b(): done.append('b')\n"
    body += f"def test_c(): assert done == ['a', 'b']\n{end}\n"

    task, result, outcomes = await run_listed(sandbox, body, "test_c", "test_b")

    assert score(task.expected, outcomes, exit_code=result.exit_code).num_passed == passed, result.output


@pytest.mark.parametrize(
    "hidden",
    [
        NEW.format("conftest.py", REPAIRS),
        NEW.format(".gitignore", "conftest.py") + NEW.format("conftest.py", REPAIRS),
    ],
    ids=["plain", "ignored"],
)
async def test_a_protected_file_that_hides_behind_another_section_is_taken_out_again(
    sandbox: Sandbox, tmp_path: Path, hidden: str
) -> None:
    result = await graded(sandbox, tmp_path, EDIT + hidden)

    assert (result.num_passed, result.num_tests) == (0, 2)
    assert result.detail.startswith("left out of the patch: conftest.py; 0 of 2 tests passed")
    repository = tmp_path / "scratch" / "repo"
    assert "# changed" in (repository / "calc.py").read_text()
    assert not (repository / "conftest.py").exists()


async def test_a_repair_that_the_agent_committed_counts(sandbox: Sandbox, tmp_path: Path) -> None:
    commit = "git -c user.name=a -c user.email=a@b commit -qam repaired"
    assert (await graded(sandbox, tmp_path, work=f"{FIX} && {commit}")).num_passed == 2


async def test_line_ends_and_bytes_that_are_no_utf_8_arrive(sandbox: Sandbox, tmp_path: Path) -> None:
    result = await graded(sandbox, tmp_path, work=f"{FIX}; printf 'th\\351\\r\\n' >> dos.txt")

    assert result.num_passed == 2, result.detail
    assert (tmp_path / "scratch" / "repo" / "dos.txt").read_bytes() == b"caf\xe9\r\nth\xe9\r\n"


async def test_tests_that_hang_are_stopped_in_time_for_what_they_printed(sandbox: Sandbox, tmp_path: Path) -> None:
    hangs = "echo PASSED test_calc.py::test_add; sleep 600"
    result = await graded(sandbox, tmp_path, test_command=hangs, limit_s=3)
    assert (result.num_passed, result.num_tests) == (1, 2)
    assert "the tests were stopped by their time limit" in result.detail


async def test_a_diff_without_end_is_refused(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "MAX_DIFF_BYTES", 1000)
    with pytest.raises(DiffError, match=r"no diff could be taken: it has [0-9]{4} bytes, more than 1000"):
        await graded(sandbox, tmp_path, work="seq 999 > numbers")


async def test_without_a_test_patch_the_files_of_the_tests_are_those_of_the_base_commit(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    cheat = "--- a/test_calc.py\n+++ b/test_calc.py\n@@ -1 +1,2 @@\n+def test_add(): pass\n from calc import add\n"

    result = await graded(sandbox, tmp_path, EDIT + NEW.format("sub/test_calc.py", "x = 1") + cheat, test_patch="")

    assert (result.num_passed, result.num_tests) == (1, 4)
    assert result.detail.startswith("left out of the patch: test_calc.py; 1 of 4 tests passed")
    repository = tmp_path / "scratch" / "repo"
    assert "# changed" in (repository / "calc.py").read_text()
    assert (repository / "sub" / "test_calc.py").exists(), "only the one at the tests' path is protected"


async def test_a_long_command_that_leaves_a_process_behind_ends_with_its_code_and_output(sandbox: Sandbox) -> None:
    started = time.monotonic()

    result = await sandbox.run_long("sleep 60 & echo $!; echo problem >&2; seq 9999; exit 3", timeout_s=50)

    left, problem, *numbers = result.output.splitlines()
    os.kill(int(left), signal.SIGKILL)
    assert (result.exit_code, result.timed_out) == (3, False)
    assert (problem, numbers) == ("problem", [str(number) for number in range(1, 10_000)])
    assert time.monotonic() - started < 30


async def test_the_output_of_a_long_command_is_cut_and_its_time_limited(sandbox: Sandbox) -> None:
    flood = await sandbox.run_long("yes", timeout_s=60)
    hung = await sandbox.run_long("echo begun; sleep 60", timeout_s=1)

    assert 0 <= SETTINGS.sandbox.output_limit_bytes * 10 - len(flood.output) < 1024
    assert not flood.timed_out
    assert (hung.output, hung.exit_code, hung.timed_out) == ("begun\n", 124, True)
