"""Process of one grading: a fresh sandbox, the agent's patch, the task's tests. ``python -m … RESULT < REQUEST``.

Nothing of the agent's sandbox is reused: only its diff comes over, minus the parts that touch tests or protected
files. The tests come from the task's test patch, if it has one, on top of the base commit's own test files.
"""

from __future__ import annotations

import dataclasses
import glob
import shlex
import time
from collections.abc import Iterable

from seamless_verl.recipes.swe.real import protocol
from seamless_verl.recipes.swe.real.patches import matching, touched_paths, without_paths
from seamless_verl.recipes.swe.real.protocol import GradeRequest, GradeResult
from seamless_verl.recipes.swe.real.results import Outcome, ReportError, Score, parse_junit, parse_log, score
from seamless_verl.recipes.swe.real.sandbox import CommandResult, Sandbox, SandboxError
from seamless_verl.recipes.swe.real.task import SweTask
from seamless_verl.recipes.swe.real.workspace import apply_patch, apply_tests, changed_paths, restore, start_workspace


async def main(raw: bytes) -> GradeResult:
    """Grade one patch."""
    request = protocol.load_grade_request(raw)
    deadline = time.monotonic() + request.limit_s
    sandbox = Sandbox(request.settings.sandbox, image=request.task.view.image, token=request.token)
    try:
        await start_workspace(sandbox, request.task.view, request.settings.sandbox, limit_s=request.limit_s)
        protocol.mark_ready()
        result = await _grade(sandbox, request, deadline=deadline)
    finally:
        unclean = await sandbox.stop()
    return dataclasses.replace(result, unclean=unclean)


async def _grade(sandbox: Sandbox, request: GradeRequest, *, deadline: float) -> GradeResult:
    task = request.task
    files = sorted(touched_paths(task.test_patch) | _test_files(task.expected))
    protected = (*request.settings.protected_paths, *(f"/{glob.escape(path)}" for path in files))
    patch, dropped = without_paths(request.patch, protected)
    notes = []
    if patch.strip():
        before = await changed_paths(sandbox)
        if problem := await apply_patch(sandbox, patch, name="agent"):
            num_tests = len(task.expected) or 1
            return GradeResult(num_passed=0, num_tests=num_tests, detail=f"the patch does not apply: {problem}")
        # git finds sections that we do not: a plain header after the hunks of a section of its own kind.
        hidden = matching(await changed_paths(sandbox) - before, protected)
        await restore(sandbox, hidden)
        dropped += tuple(hidden)
    else:
        notes.append("the patch is empty")
    if dropped:
        notes.insert(0, f"left out of the patch: {', '.join(dropped[:5])}")
    await apply_tests(sandbox, task.test_patch)
    try:
        result, outcomes = await run_tests(sandbox, task, limit_s=max(1.0, deadline - time.monotonic()))
    except SandboxError as error:
        if not await sandbox.ended():
            raise
        detail = f"the tests ended their sandbox: {error}"
        return GradeResult(num_passed=0, num_tests=len(task.expected) or 1, detail=detail)
    graded = score(task.expected, outcomes, exit_code=None if result.timed_out else result.exit_code)
    notes += _explain(graded, result, outcomes)
    return GradeResult(
        num_passed=graded.num_passed,
        num_tests=graded.num_tests,
        detail="; ".join(notes),
        exit_code=result.exit_code,
    )


def _test_files(names: Iterable[str]) -> frozenset[str]:
    """Files that pytest's ids name; not those of doctests (``a.py::a.f``), which hold the source as well."""
    split = (name.partition("::") for name in names)
    return frozenset(path for path, _, test in split if test and "." not in test.partition("[")[0])


async def run_tests(sandbox: Sandbox, task: SweTask, *, limit_s: float) -> tuple[CommandResult, dict[str, Outcome]]:
    """Run the task's tests; outcomes from a JUnit report where the command ends in pytest, else from its output."""
    report = f"{sandbox.scratch}/junit.xml"
    # By environment, so that the command stays the task's: tox, make or a script may stand between it and pytest.
    options = shlex.quote(f"--junitxml={report} -rA -p no:cacheprovider")
    # xdist's -nauto, as in mypy's pytest.ini, would start a worker for each CPU of the host.
    more = "PYTHONDONTWRITEBYTECODE=1 PYTEST_XDIST_AUTO_NUM_WORKERS=0"
    line = f'export PYTEST_ADDOPTS="${{PYTEST_ADDOPTS:-}} "{options} {more}\n{task.test_command}\n'
    result = await sandbox.run_long(line, timeout_s=limit_s)
    found = await sandbox.run(f"test -s {report}", timeout_s=30)
    printed = parse_log(result.output)
    if found.exit_code != 0:
        return result, printed
    try:
        reported = parse_junit(await sandbox.read(report))
    except ReportError:
        # A report cut short by a crash: what was printed until then still counts.
        return result, printed
    # Of several pytest runs only the last one's report is left. Without a list every test that is mentioned counts, and
    # the output may mention those of a run inside a test (pytest's plugins test themselves so).
    return result, {**printed, **reported} if task.expected else reported


def _explain(graded: Score, result: CommandResult, outcomes: dict[str, Outcome]) -> list[str]:
    if graded.all_passed:
        return []
    notes = [f"{graded.num_passed} of {graded.num_tests} tests passed"]
    if result.timed_out:
        notes.append("the tests were stopped by their time limit")
    if not outcomes:
        tail = " ".join(result.output.split())[-300:]
        notes.append(f"no test result was found in the output (exit code {result.exit_code}): {tail}")
    elif graded.missing:
        notes.append(f"not run: {', '.join(graded.missing[:3])}")
    return notes


if __name__ == "__main__":
    raise SystemExit(protocol.serve(main))
