"""The pool with real worker processes: what a worker is given, what its death costs, what is left after the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from seamless_verl.agents import agent_pool as module
from seamless_verl.agents.agent_pool import AgentPool, JobFailed, JobTimedOut, PoolBroken, WorkerDied
from seamless_verl.errors import SeamlessError
from seamless_verl.run.supervisor import RUN_ID

WORKER = """
import os, signal, subprocess, sys, threading
from seamless_verl.agents.agent_pool import serve

meeting = threading.Barrier(4)

def leave_a_child():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "child", __file__], start_new_session=True)

def handle(payload, forgotten):
    kind = payload["kind"]
    if kind == "echo":
        print("a line for people, not for the owner")
        return {"echo": payload["text"], "pid": os.getpid()}
    if kind == "meet":
        meeting.wait(30)
        return os.getpid()
    if kind == "wait":
        if "started" in payload:
            open(payload["started"], "w").close()
        forgotten.wait(60)
        if "ended" in payload:
            open(payload["ended"], "w").close()
        return "forgotten"
    if kind == "raise":
        raise LookupError("no such thing")
    if kind == "die":
        print("I am about to die", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "leave a child":
        return leave_a_child()
    if kind == "environment":
        return dict(os.environ)
    if kind == "child":
        return [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid, os.getpid()]
    if kind == "group":
        return [os.getpgid(0), os.getpid(), os.getsid(0)]

serve(handle)
"""


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return sys.executable, str(script)


@pytest.fixture
async def pool(command: tuple[str, ...]) -> AsyncIterator[AgentPool]:
    pool = AgentPool(command, processes=2, threads=4)
    yield pool
    pids = pool.pids
    await pool.close()
    assert not any(map(psutil.pid_exists, pids))


async def appears(path: Path) -> None:
    """Wait for a file that a worker makes: the only event that two processes share here."""

    def look() -> None:
        deadline = time.monotonic() + 30
        while not path.exists():
            assert time.monotonic() < deadline, f"{path} never appeared"
            time.sleep(0.01)

    await asyncio.to_thread(look)


async def test_jobs_come_back_to_whoever_asked(pool: AgentPool) -> None:
    jobs = [pool.run({"kind": "echo", "text": f"é {number}\n"}, 30) for number in range(40)]
    results = await asyncio.gather(*jobs)
    assert [result["echo"] for result in results] == [f"é {number}\n" for number in range(40)]
    assert {result["pid"] for result in results} == set(pool.pids)
    assert len(pool.pids) == 2


async def test_one_worker_runs_many_jobs_at_once(command: tuple[str, ...]) -> None:
    pool = AgentPool(command, processes=1, threads=4)
    try:
        results = await asyncio.gather(*(pool.run({"kind": "meet"}, 30) for _ in range(4)))
        assert len(set(results)) == 1, "four jobs met inside one process"
    finally:
        await pool.close()


async def test_exception_of_the_handler_fails_its_job_only(pool: AgentPool) -> None:
    with pytest.raises(
        JobFailed, match=r'LookupError: no such thing in /.*/worker.py:\d+ in handle: raise LookupError\("'
    ):
        await pool.run({"kind": "raise"}, 30)
    assert (await pool.run({"kind": "echo", "text": "still here"}, 30))["echo"] == "still here"


async def test_timeout_tells_the_worker_and_frees_the_place(command: tuple[str, ...], tmp_path: Path) -> None:
    pool = AgentPool(command, processes=1, threads=1)
    try:
        await pool.run({"kind": "echo", "text": ""}, 30)
        with pytest.raises(JobTimedOut, match=r"0\.2 s; it stands in .*/worker.py:\d+ in handle: forgotten.wait\(60\)"):
            await pool.run({"kind": "wait", "ended": str(tmp_path / "ended")}, 0.2)
        await appears(tmp_path / "ended")
        assert (await pool.run({"kind": "echo", "text": "next"}, 30))["echo"] == "next"
    finally:
        await pool.close()


async def test_a_job_that_no_worker_had_time_for_says_so(command: tuple[str, ...], tmp_path: Path) -> None:
    pool = AgentPool(command, processes=1, threads=1)
    try:
        first = asyncio.ensure_future(pool.run({"kind": "wait", "started": str(tmp_path / "started")}, 30))
        await appears(tmp_path / "started")
        with pytest.raises(JobTimedOut, match="it was not begun: all workers are busy"):
            await pool.run({"kind": "echo", "text": ""}, 0.05)
        first.cancel()
    finally:
        await pool.close()


async def test_a_job_that_was_not_begun_since_its_worker_is_not_ready_says_so() -> None:
    pool = AgentPool((sys.executable, "-c", "import time; time.sleep(1000)"), processes=1)
    try:
        with pytest.raises(JobTimedOut, match=r"it was not begun: process \d+ is not ready .* when they are imported"):
            await pool.run({}, 0.5)
    finally:
        await pool.close()


async def test_dead_worker_fails_only_its_jobs_and_is_replaced(pool: AgentPool, tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    waiting = [asyncio.ensure_future(pool.run({"kind": "wait", "started": str(file)}, 60)) for file in files]
    for file in files:
        await appears(file)
    first, second = pool.pids
    os.kill(first, signal.SIGKILL)
    done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == len(pending) == 1
    with pytest.raises(WorkerDied, match=f"worker {first} ended \\(killed by SIGKILL\\)"):
        await done.pop()
    pids = {(await pool.run({"kind": "echo", "text": ""}, 30))["pid"] for _ in range(4)}
    assert first not in pids
    assert second in pool.pids
    assert len(pool.pids) == 2
    for job in pending:
        job.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


async def test_last_words_of_a_dead_worker_are_quoted(pool: AgentPool) -> None:
    with pytest.raises(WorkerDied, match="I am about to die"):
        await pool.run({"kind": "die"}, 30)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("held", ["stderr", "both"])
def test_a_child_that_outlives_its_worker_holds_nothing_up(
    command: tuple[str, ...], loop: str, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in a session of its own, out of the group's reach, and has the pipes that its worker had at that time."""
    monkeypatch.setattr(module, "_LAST_WORDS_S", 0.1)
    if held == "both":
        Path(command[1]).write_text(WORKER.replace("serve(handle)", "leave_a_child()\nserve(handle)"))

    async def work() -> None:
        pool = AgentPool(command, processes=1, threads=1)
        try:
            for _ in range(2):
                await pool.run({"kind": "leave a child"}, 30)
                with pytest.raises(WorkerDied, match="killed by SIGKILL.*I am about to die"):
                    await pool.run({"kind": "die"}, 20)
            await pool.run({"kind": "leave a child"}, 30)
            await asyncio.wait_for(pool.close(), 20)
        finally:
            left = end_children(command)
        assert left == (3 if held == "stderr" else 6)

    pytest.importorskip(loop, reason="comes with vLLM").run(work())


def end_children(command: tuple[str, ...]) -> int:
    """Those that outlived their workers; how many there were."""
    processes = psutil.process_iter(["cmdline"])
    left = [process for process in processes if (process.info["cmdline"] or [])[-2:] == ["child", command[1]]]
    for process in left:
        process.kill()
    return len(left)


async def test_a_job_that_comes_when_a_worker_has_just_ended_is_given_to_the_next(command: tuple[str, ...]) -> None:
    """Its last words take a while: a child of its own holds its standard error."""
    pool = AgentPool(command, processes=1, threads=1)
    try:
        await pool.run({"kind": "leave a child"}, 30)
        (ended,) = pool._workers
        assert ended is not None
        assert ended.process.stdout is not None
        os.kill(ended.process.pid, signal.SIGKILL)
        while not ended.process.stdout.at_eof():  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0.01)
        assert (await pool.run({"kind": "echo", "text": "next"}, 30))["echo"] == "next"
    finally:
        await pool.close()
        assert end_children(command) == 1
    assert ended.readers[0].done(), "the pool is closed when this one's last words are read, too"


async def test_worker_that_cannot_start_is_a_clear_error(tmp_path: Path) -> None:
    pool = AgentPool((sys.executable, "-c", "raise SystemExit('no licence for this agent')"), processes=1)
    try:
        with pytest.raises(PoolBroken, match=r"3 workers ended at their start.*no licence for this agent"):
            await pool.run({}, 60)
    finally:
        await pool.close()


# Says that it is ready when a file appears, not before.
SLOW_START = """
import os, sys, time
open(sys.argv[2], "w").close()
while not os.path.exists(sys.argv[3]):
    time.sleep(0.01)
exec(open(sys.argv[1]).read())
"""


async def test_a_job_given_up_while_its_worker_starts_leaves_the_worker_to_the_next(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    pool = AgentPool((sys.executable, "-c", SLOW_START, command[1], str(begun), str(go)), processes=1)
    try:
        given_up = asyncio.ensure_future(pool.run({"kind": "echo", "text": "no"}, 60))
        await appears(begun)
        while not pool.pids:  # noqa: ASYNC110 - its process is there before this one has heard of it
            await asyncio.sleep(0.01)
        (pid,) = pool.pids
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        go.touch()
        for text in ("one", "two"):
            assert await pool.run({"kind": "echo", "text": text}, 60) == {"echo": text, "pid": pid}
    finally:
        await pool.close()


async def test_a_pool_that_is_closed_while_a_worker_is_being_started_leaves_none(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn, spawned, go_on = asyncio.create_subprocess_exec, asyncio.Event(), asyncio.Event()
    made: list[asyncio.subprocess.Process] = []

    async def slow(*args: Any, **named: Any) -> asyncio.subprocess.Process:
        made.append(await spawn(*args, **named))
        spawned.set()
        await go_on.wait()
        return made[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    pool = AgentPool((sys.executable, "-c", SLOW_START, command[1], str(tmp_path / "a"), str(tmp_path / "b")))
    job = asyncio.ensure_future(pool.run({"kind": "echo", "text": "no"}, 60))
    await spawned.wait()
    await pool.close()
    go_on.set()
    with pytest.raises(SeamlessError, match="closed"):
        await asyncio.wait_for(job, 30)
    assert await asyncio.wait_for(made[0].wait(), 30) == -signal.SIGKILL


# Answers its first job with a line that cannot be read and lives on; the worker after it answers well.
BABBLER = """
import json, os, sys
sys.stdin.readline()
print(json.dumps({"ready": 1}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if os.path.exists(sys.argv[1]):
        print(json.dumps({"job": job["job"], "result": "well"}), flush=True)
    else:
        open(sys.argv[1], "w").close()
        print(eval(sys.argv[2]), flush=True)
"""


@pytest.mark.parametrize(
    ("said", "story"),
    [
        ("'no JSON'", "JSONDecodeError"),
        ("'[]'", "TypeError"),
        ("{}", "KeyError: 'job'"),
        ("json.dumps({'job': job['job']})", "KeyError: 'result'"),
        ("'x' * 300_000", "ValueError"),
    ],
)
async def test_a_worker_that_cannot_be_understood_fails_its_jobs_and_is_replaced(
    said: str, story: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_LINE_BYTES", 100_000)
    pool = AgentPool((sys.executable, "-c", BABBLER, str(tmp_path / "said"), said), processes=1)
    try:
        with pytest.raises(WorkerDied, match=f"could not be read: {story}"):
            await pool.run({}, 30)
        assert await pool.run({}, 30) == "well"
    finally:
        await pool.close()


async def test_a_line_for_people_may_be_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_LINE_BYTES", 100_000)
    script = tmp_path / "loud.py"
    script.write_text(
        "import os, sys\n"
        "from seamless_verl.agents.agent_pool import serve\n"
        "def handle(payload, forgotten):\n"
        "    print('x' * 1_000_000, file=sys.stderr, flush=True)\n"
        "    print('my last words', file=sys.stderr, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "serve(handle)\n"
    )
    pool = AgentPool((sys.executable, str(script)), processes=1)
    try:
        with pytest.raises(WorkerDied, match="my last words"):
            await pool.run({}, 30)
    finally:
        await pool.close()


async def test_a_worker_whose_interpreter_is_a_shared_library_elsewhere_starts(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under SLURM's modules: its libpython is found by LD_LIBRARY_PATH only."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$LD_LIBRARY_PATH" = /site/lib ] && exec {command[0]} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/site/lib")
    pool = AgentPool((str(python), *command[1:]), processes=1)
    try:
        assert (await pool.run({"kind": "echo", "text": "hi"}, 30))["echo"] == "hi"
    finally:
        await pool.close()


async def test_environment_is_not_passed_on_wholesale(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "t0ken")
    monkeypatch.setenv(RUN_ID, "a-run")
    pool = AgentPool(command, processes=1, environment={"AGENT_COLOUR": "blue"})
    try:
        environment: dict[str, str] = await pool.run({"kind": "environment"}, 30)
    finally:
        await pool.close()
    assert "SECRET_TOKEN" not in environment
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["AGENT_COLOUR"] == "blue"
    assert environment[RUN_ID] == "a-run", "the sweep of another node finds agents by it"


async def test_a_worker_is_a_process_group_of_its_own_and_shares_cores_as_its_owner_does(pool: AgentPool) -> None:
    group, pid, session = await pool.run({"kind": "group"}, 30)
    assert group == pid
    assert session == os.getsid(0)


async def test_close_ends_workers_their_children_and_their_jobs(command: tuple[str, ...], tmp_path: Path) -> None:
    pool = AgentPool(command, processes=1)
    child, worker = await pool.run({"kind": "child"}, 30)
    child_process = psutil.Process(child)
    job = asyncio.ensure_future(pool.run({"kind": "wait", "started": str(tmp_path / "started")}, 60))
    await appears(tmp_path / "started")
    await pool.close()
    await pool.close()
    with pytest.raises(WorkerDied):
        await job
    assert not psutil.pid_exists(worker)
    # The child may stay a zombie until init has waited for it; it runs no more.
    psutil.wait_procs([child_process], timeout=30)
    assert not child_process.is_running() or child_process.status() == psutil.STATUS_ZOMBIE
    assert pool.pids == ()
    with pytest.raises(SeamlessError, match="closed"):
        await pool.run({"kind": "echo", "text": ""}, 30)


OWNER = """
import asyncio, sys
from seamless_verl.agents.agent_pool import AgentPool

async def main():
    pool = AgentPool((sys.executable, sys.argv[1]), processes=2)
    await asyncio.gather(*(pool.run({"kind": "echo", "text": ""}, 30) for _ in range(4)))
    print(*pool.pids, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_workers_end_with_a_killed_owner(command: tuple[str, ...]) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, command[1]], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner:
        workers = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        owner.kill()
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert [worker for worker in alive if worker.status() != psutil.STATUS_ZOMBIE] == []


def test_serve_ends_with_its_input(command: tuple[str, ...]) -> None:
    lines = [{"threads": 1}, {"job": 0, "payload": {"kind": "echo", "text": "hi"}}]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        for line in lines:
            worker.stdin.write(json.dumps(line) + "\n")
        worker.stdin.flush()
        said: list[dict[str, Any]] = [json.loads(worker.stdout.readline()) for _ in lines]
        worker.stdin.close()
        assert worker.wait(30) == 0
    assert said == [{"ready": worker.pid}, {"job": 0, "result": {"echo": "hi", "pid": worker.pid}}]


@pytest.mark.parametrize("size", [{"processes": 0}, {"threads": 0}])
def test_empty_pool_is_refused(size: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="needs processes and threads"):
        AgentPool(("true",), **size)
