"""The repository inside a sandbox: at its base commit before the agent, with a patch applied before grading.

Both the agent and the grader start from `prepare_workspace`, so that a diff made in one applies in the other.
"""

from __future__ import annotations

import asyncio
import base64
import shlex
from collections.abc import Iterable

from seamless_verl.errors import SeamlessError
from seamless_verl.recipes.swe.real.patches import touched_paths
from seamless_verl.recipes.swe.real.sandbox import Sandbox, SandboxError
from seamless_verl.recipes.swe.real.settings import MAX_COMMAND_S, SandboxSettings
from seamless_verl.recipes.swe.real.task import AgentView

SETUP_TIMEOUT_S = 1800.0
MAX_DIFF_BYTES = 10_000_000

# What agents leave beside the source: their patch file and caches. Kept out of the diff taken for them.
_NOT_SOURCE = ("patch.txt", "*.pyc", "__pycache__/**", ".pytest_cache/**")

# The images of SWE-bench have one commit of build fixes on top of the base, by an author of that name; it is kept.
_CHECK_OUT = """
set -e
git config --global --add safe.directory {workdir}
want=$(git rev-parse -q --verify {base}'^{{commit}}' || true)
if [ -z "$want" ]; then git fetch -q --depth 1 origin {base}; want=$(git rev-parse FETCH_HEAD); fi
if [ "$(git log -1 --format=%an)" = SWE-bench ] && [ "$(git rev-parse -q --verify 'HEAD^')" = "$want" ]; then exit 0; fi
if [ "$(git rev-parse HEAD)" != "$want" ]; then git checkout -q -f --detach "$want"; fi
"""

# The commits after the base hold the solution: without names and logs they are not found by looking around.
_HIDE_FUTURE = """
set -e
git checkout -q --detach
for name in $(git remote); do git remote remove "$name"; done
git for-each-ref --format='option no-deref%0adelete %(refname)' | git update-ref --stdin
git reflog expire --expire=now --all
rm -f "$(git rev-parse --git-dir)/FETCH_HEAD" "$(git rev-parse --git-dir)/ORIG_HEAD"
"""

# What the image or the setup command left uncommitted belongs to the start, not to the agent's work.
_COMMIT_LEFTOVERS = """
set -e
if [ -n "$(git status --porcelain)" ]; then
  git add -A
  git -c user.name=base -c user.email=base@localhost -c commit.gpgsign=false commit -q --no-verify -m base
fi
"""

# A killed git leaves its lock behind. Base64, because swe-rex reads files as text and changes bytes and line ends.
_TAKE_DIFF = """
set -e
rm -f .git/index.lock
git add -A
mkdir -p {scratch}
git -c core.fileMode=false -c core.quotePath=true diff --cached --binary {base} -- . {leave_out} > {path}
size=$(wc -c < {path})
if [ "$size" -gt {limit} ]; then echo "it has $size bytes, more than {limit}"; exit 1; fi
base64 {path} > {path}.b64
"""


class DiffError(SeamlessError):
    """No diff can be taken of what the agent left: its own doing, the sandbox works."""


async def start_workspace(sandbox: Sandbox, view: AgentView, settings: SandboxSettings, *, limit_s: float) -> None:
    """Start the sandbox and prepare its workspace.

    Raises:
        SandboxError: it failed, or was not ready in time.
    """

    async def both() -> None:
        await sandbox.start()
        await prepare_workspace(sandbox, view, settings)

    try:
        await asyncio.wait_for(both(), timeout=limit_s)
    except asyncio.TimeoutError as error:
        raise SandboxError(f"the sandbox was not ready within {limit_s:.0f} s") from error


async def prepare_workspace(sandbox: Sandbox, view: AgentView, settings: SandboxSettings) -> None:
    """Bring the repository to the task's base commit and make it the sandbox's working directory.

    Raises:
        SandboxError: no repository, no such commit, or the setup command fails.
    """
    base = shlex.quote(view.base_commit)
    if settings.shared:
        workdir = f"{sandbox.scratch}/repo"
        url = shlex.quote(repository_url(view.repo, settings.repo_url))
        # Depth 1: the commits after the base, where the solution is, never get here.
        await sandbox.check(f"git init -q {workdir} && cd {workdir} && git fetch -q --depth 1 {url} {base}")
        sandbox.cwd = workdir
        await sandbox.check("git checkout -q --detach FETCH_HEAD")
    else:
        await sandbox.check(f"test -d {shlex.quote(view.workdir)}/.git")
        sandbox.cwd = view.workdir
        await sandbox.check(_CHECK_OUT.format(workdir=shlex.quote(view.workdir), base=base))
    await sandbox.check(_HIDE_FUTURE)
    if settings.setup_command:
        result = await sandbox.run_long(settings.setup_command, timeout_s=SETUP_TIMEOUT_S)
        if result.exit_code != 0:
            raise SandboxError(f"setup_command failed with {result.exit_code}: {result.output[-2000:]}")
    await sandbox.check(_COMMIT_LEFTOVERS)
    sandbox.base = (await sandbox.check("git rev-parse HEAD")).strip()


def repository_url(repo: str, template: str) -> str:
    """What git fetches from: paths and URLs as they are, ``owner/name`` through the template."""
    return repo if repo.startswith(("/", "file:")) or "://" in repo else template.format(repo=repo)


async def worktree_diff(sandbox: Sandbox) -> str:
    """Everything changed since `prepare_workspace`, new files and commits included, as one diff.

    Bytes that are no UTF-8 come as lone surrogates, which `apply_patch` turns back.

    Raises:
        DiffError: the agent left a repository of which none can be taken, or changed too much.
        SandboxError: the sandbox does not answer.
    """
    leave_out = " ".join(shlex.quote(f":(exclude,glob)**/{name}") for name in _NOT_SOURCE)
    path = f"{sandbox.scratch}/worktree.diff"
    script = _TAKE_DIFF.format(
        scratch=sandbox.scratch, base=sandbox.base, leave_out=leave_out, path=path, limit=MAX_DIFF_BYTES
    )
    result = await sandbox.run(script, timeout_s=MAX_COMMAND_S)
    if result.exit_code != 0:
        raise DiffError(f"no diff could be taken: {' '.join(result.output.split())[-300:]}")
    return base64.b64decode(await sandbox.read(f"{path}.b64")).decode("utf-8", "surrogateescape")


async def apply_patch(sandbox: Sandbox, patch: str, *, name: str) -> str:
    """Apply a diff; returns why it does not apply, or an empty string.

    Tried as git has it, then with fuzz: models often get line numbers slightly wrong.
    """
    path = f"{sandbox.scratch}/{name}.diff"
    exact = (patch if patch.endswith("\n") else patch + "\n").encode("utf-8", "surrogateescape")
    await sandbox.write(f"{path}.b64", base64.b64encode(exact).decode())
    await sandbox.check(f"base64 -d {path}.b64 > {path}")
    first = await sandbox.run(f"git apply --whitespace=nowarn {path}", timeout_s=120)
    if first.exit_code == 0:
        return ""
    fuzzy = f"patch --batch --forward --fuzz=5 -p1 --no-backup-if-mismatch -r - -i {path}"
    dry = await sandbox.run(f"{fuzzy} --dry-run", timeout_s=120)
    if dry.exit_code == 0:
        await sandbox.check(fuzzy)
        return ""
    return first.output.strip()[-500:] or "git apply failed"


async def changed_paths(sandbox: Sandbox) -> frozenset[str]:
    """Files that are not what the base commit holds, ignored ones too: a patch may bring a ``.gitignore``."""
    path = f"{sandbox.scratch}/changed"
    await sandbox.check(f"git status --porcelain -z --untracked-files=all --ignored --no-renames > {path}")
    return frozenset(entry[3:] for entry in (await sandbox.read(path)).split("\0") if entry)


async def restore(sandbox: Sandbox, paths: Iterable[str]) -> None:
    """Put files back to the base commit; those that it does not hold are removed."""
    for path in paths:
        quoted = shlex.quote(path)
        await sandbox.check(f"git checkout -q HEAD -- {quoted} 2>/dev/null || rm -rf -- {quoted}")


async def apply_tests(sandbox: Sandbox, test_patch: str) -> None:
    """Put the tests' files back to the base commit, then bring the new tests.

    Raises:
        SandboxError: the data set's own test patch does not apply.
    """
    if not test_patch.strip():
        return
    await restore(sandbox, sorted(touched_paths(test_patch)))
    if problem := await apply_patch(sandbox, test_patch, name="tests"):
        raise SandboxError(f"the task's test_patch does not apply to its base commit: {problem}")
