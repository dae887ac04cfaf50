"""A warm pool of worker processes for agents written in Python: JSON lines in, JSON lines out.

A worker runs many jobs at once in threads and lives until the pool closes. A worker that dies takes only its own jobs
with it, each of which fails with ``WorkerDied``, and is replaced; so is one in which all threads hang in jobs that were
given up. Workers get a process group of their own and a short list of environment variables, and they end with the
process that owns the pool, even when that is killed.

This file holds both sides: ``AgentPool`` for the owner, ``serve`` for the worker's script. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from seamless_verl.agents.ties import die_with_owner, kill_group
from seamless_verl.errors import SeamlessError
from seamless_verl.places import places_of, places_of_stack

_MARK = "SEAMLESS_RUN_ID"  # a run's processes are found by it on nodes where the supervisor is not
ENVIRONMENT = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SSL_CERT_FILE"),
    _MARK,
)
_MAX_LINE_BYTES = 64 << 20
_STDERR_LINES = 20
_START_ATTEMPTS = 3
_WHERE_S = 1.0  # for a worker to say where a job stands
_FORGET_S = 10.0  # for a job to end that nobody waits for any more
_LAST_WORDS_S = 1.0  # for what a worker wrote before it ended to be read
OWNER = "SEAMLESS_AGENT_OWNER"  # process id of the pool's owner, told to the worker

# What a worker's script gives to `serve`: the job's payload and an event that is set when nobody waits any more.
Handler = Callable[[dict[str, Any], threading.Event], Any]


class WorkerDied(SeamlessError):
    """The worker process of this job ended; other jobs of the pool go on."""


class PoolBroken(SeamlessError):
    """Workers end before they are ready; no job can ever run. The message quotes the last one."""


class JobFailed(SeamlessError):
    """The handler in the worker raised; the message names the exception and the lines that it came from."""


class JobTimedOut(SeamlessError):
    """No result within the time given; the message says where the job stands. The worker was told to forget it."""


class _Worker:
    """One process and the jobs that it holds."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.jobs: dict[int, asyncio.Future[Any]] = {}
        self.asked: dict[int, asyncio.Future[str]] = {}  # where a job stands
        self.given_up: set[int] = set()  # told to end, and have not yet
        self.ready = asyncio.get_running_loop().create_future()
        self.stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self.unreadable = ""  # what was wrong with what it answered
        self.readers: list[asyncio.Task[None]] = []

    def send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")

    async def where(self, job: int) -> str:
        """In which lines a job stands."""
        self.asked[job] = asyncio.get_running_loop().create_future()
        try:
            self.send({"where": job})
            return await asyncio.wait_for(self.asked[job], _WHERE_S)
        except (asyncio.TimeoutError, OSError, RuntimeError):
            return f"; its process {self.process.pid} does not answer"
        finally:
            del self.asked[job]

    def story(self) -> str:
        """How it ended, and the last of what it said."""
        status = self.process.returncode
        how = f"killed by {signal.Signals(-status).name}" if status is not None and status < 0 else f"status {status}"
        fault = f"; its answer could not be read: {self.unreadable}" if self.unreadable else ""
        said = " | ".join(self.stderr)
        return f"worker {self.process.pid} ended ({how}){fault}" + (f"; it last wrote: {said}" if said else "")


class AgentPool:
    """Runs jobs on worker processes.

    Args:
        command: how to start a worker; its script must call ``serve``.
        processes: number of workers.
        threads: jobs that one worker runs at a time; further jobs wait in the pool.
        environment: variables to add to the few that are passed on (``ENVIRONMENT``).

    The pool belongs to one event loop. Workers start with the first job.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        processes: int = 2,
        threads: int = 64,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if processes < 1 or threads < 1:
            raise ValueError(f"a pool needs processes and threads, got {processes} and {threads}")
        self._command = tuple(command)
        self._threads = threads
        inherited = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        self._environment = {**inherited, **(environment or {})}
        self._workers: list[_Worker | None] = [None] * processes
        self._reading: set[asyncio.Task[None]] = set()  # also of workers that have ended and have left their slot
        self._starting = [asyncio.Lock() for _ in range(processes)]
        self._room = asyncio.Semaphore(processes * threads)
        self._load = [0] * processes
        self._ids = itertools.count()
        self._closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the live workers."""
        return tuple(worker.process.pid for worker in self._workers if worker is not None)

    async def run(self, payload: Mapping[str, Any], timeout: float) -> Any:
        """Result of one job, within ``timeout`` seconds counted from now, the wait for room included.

        Raises:
            JobTimedOut, JobFailed, WorkerDied, PoolBroken: see there.
            SeamlessError: the pool is closed.
        """
        sent: list[tuple[_Worker, int]] = []  # to which worker, as which job
        running = asyncio.ensure_future(self._run(payload, sent))
        try:
            await asyncio.wait([running], timeout=timeout)
            if sent and not running.done():
                worker, job = sent[0]
                stands = await worker.where(job)
            else:
                stands = f"; it was not begun: {self._holdup()}"
            if running.done():
                return running.result()
        finally:
            running.cancel()
            await asyncio.wait([running])
        raise JobTimedOut(f"no result after {timeout:.1f} s{stands}")

    def _holdup(self) -> str:
        for worker in self._workers:
            if worker is not None and not worker.ready.done():
                pid = worker.process.pid
                return f"process {pid} is not ready yet; look at what its modules do when they are imported"
        return "all workers are busy"

    async def _run(self, payload: Mapping[str, Any], sent: list[tuple[_Worker, int]]) -> Any:
        async with self._room:
            return await self._run_on_some_worker(payload, sent)

    async def _run_on_some_worker(self, payload: Mapping[str, Any], sent: list[tuple[_Worker, int]]) -> Any:
        slot = min(range(len(self._load)), key=self._load.__getitem__)
        self._load[slot] += 1
        try:
            worker = await self._started(slot)
            job = next(self._ids)
            worker.jobs[job] = future = asyncio.get_running_loop().create_future()
            try:
                worker.send({"job": job, "payload": payload})
                sent.append((worker, job))
                return await future
            except asyncio.CancelledError:
                worker.given_up.add(job)
                asyncio.get_running_loop().call_later(_FORGET_S, self._end_if_stuck, worker, frozenset(worker.given_up))
                with contextlib.suppress(OSError, RuntimeError):
                    worker.send({"forget": job})
                raise
            finally:
                worker.jobs.pop(job, None)
        finally:
            self._load[slot] -= 1

    def _end_if_stuck(self, worker: _Worker, given_up: frozenset[int]) -> None:
        """End a worker all of whose threads still hang in jobs that were given up: it would never begin another."""
        if worker in self._workers and len(worker.given_up & given_up) >= self._threads:
            kill_group(worker.process.pid)

    async def _started(self, slot: int) -> _Worker:
        """The slot's worker, started now if it has none; a worker that never gets ready is an error with its story."""
        async with self._starting[slot]:
            worker = self._workers[slot]
            for _ in range(_START_ATTEMPTS):
                if self._closed:
                    raise SeamlessError("the agent pool is closed")
                if worker is None:
                    worker = await self._start(slot)
                # Shielded: all jobs of the slot share the future, and one that is given up must not cancel it.
                ready = await asyncio.shield(worker.ready)
                if ready and self._workers[slot] is worker:  # else it ended since, and nobody would fail a new job
                    return worker
                await asyncio.wait([worker.readers[0]])  # then its story is whole
                story, worker = worker.story(), None
            raise PoolBroken(f"{' '.join(self._command)}: {_START_ATTEMPTS} workers ended at their start; {story}")

    async def _start(self, slot: int) -> _Worker:
        pipe = asyncio.subprocess.PIPE
        environment = {**self._environment, OWNER: str(os.getpid())}
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, limit=_MAX_LINE_BYTES
        )
        worker = _Worker(process)
        worker.send({"threads": self._threads})
        tasks = self._read(slot, worker), _keep_stderr(worker), _let_go_of_pipes(process)
        worker.readers = [asyncio.ensure_future(task) for task in tasks]
        self._reading.add(worker.readers[0])
        worker.readers[0].add_done_callback(self._reading.discard)
        self._workers[slot] = worker
        if self._closed:  # meanwhile: `close` has not seen it
            kill_group(worker.process.pid)
        return worker

    async def _read(self, slot: int, worker: _Worker) -> None:
        """Hand results to their jobs until the worker ends, then fail what is left of them.

        A worker whose answers cannot be read is ended: nobody would hear of its other jobs.
        """
        assert worker.process.stdout is not None
        try:
            async for line in worker.process.stdout:
                _take(worker, json.loads(line))
        except Exception as error:  # noqa: BLE001 - told by `story`, to every job that it fails
            worker.unreadable = f"{type(error).__name__}: {error}"
        finally:
            self._workers[slot] = None  # first: a job that comes while its last words are awaited needs another one
            kill_group(worker.process.pid)
            await worker.process.wait()
            await worker.readers[1]
            worker.readers[2].cancel()
            if not worker.ready.done():
                worker.ready.set_result(False)
            for future in worker.jobs.values():
                if not future.done():
                    future.set_exception(WorkerDied(worker.story()))

    async def close(self) -> None:
        """End every worker and what it started; jobs in progress fail with ``WorkerDied``. Idempotent."""
        self._closed = True
        for worker in self._workers:
            if worker is not None:
                kill_group(worker.process.pid)
        await asyncio.gather(*self._reading)


def _take(worker: _Worker, message: dict[str, Any]) -> None:
    """What a worker says: that it is ready, where a job stands, or how it ended.

    Raises:
        LookupError, TypeError: it is neither.
    """
    if "ready" in message:
        if not worker.ready.done():
            worker.ready.set_result(True)
        return
    if "where" in message:
        asked = worker.asked.get(message["job"])
        if asked is not None and not asked.done():
            asked.set_result(message["where"])
        return
    worker.given_up.discard(message["job"])
    future = worker.jobs.get(message["job"])
    if future is None or future.done():
        return
    if "error" in message:
        future.set_exception(JobFailed(message["error"]))
    else:
        future.set_result(message["result"])


async def _keep_stderr(worker: _Worker) -> None:
    assert worker.process.stderr is not None
    while True:
        try:
            line = await worker.process.stderr.readline()
        except ValueError:  # longer than _MAX_LINE_BYTES, and thrown away; the next one may be what it dies of
            continue
        if not line:
            return
        worker.stderr.append(line.decode("utf-8", "replace").rstrip())


async def _let_go_of_pipes(process: asyncio.subprocess.Process) -> None:
    """Close our ends once the process has ended: a child outside of its group may hold the others as long as it likes.

    Not before: a transport that is closed earlier may take the exit status from whoever waits for it.
    """
    while process.returncode is None:  # noqa: ASYNC110 - with Python 3.11 `wait` waits for the pipes as well
        await asyncio.sleep(_LAST_WORDS_S)
    await asyncio.sleep(_LAST_WORDS_S)
    process._transport.close()  # type: ignore[attr-defined]


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Jobs and results, for this process alone: what it starts reads nothing and prints to standard error."""
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # not held in a buffer, which would be lost with a worker that dies
    return pipes


def serve(handler: Handler, pipes: tuple[BinaryIO, BinaryIO] | None = None) -> None:
    """The worker's side: answer jobs from standard input until it closes. Call it from the script's main thread.

    ``handler`` runs in a thread per job; what it returns must be JSON-compatible, what it raises fails the job. What
    is printed goes to standard error, whose last lines the owner quotes when the worker dies. ``pipes``: of a script
    that had to take them before its imports.
    """
    die_with_owner(OWNER)
    jobs, results = pipes or take_pipes()
    writing = threading.Lock()
    forgotten: dict[int, threading.Event] = {}
    threads_of: dict[int, int] = {}  # job -> identity of its thread

    def answer(message: Mapping[str, Any]) -> None:
        with writing, contextlib.suppress(BrokenPipeError):  # the owner is gone, and soon this process too
            results.write(json.dumps(message).encode() + b"\n")
            results.flush()

    def run(job: int, payload: dict[str, Any]) -> None:
        threads_of[job] = threading.get_ident()
        try:
            answer({"job": job, "result": handler(payload, forgotten[job])})
        except BaseException as error:  # noqa: BLE001 - JobFailed at the owner, also when the handler exits
            answer({"job": job, "error": f"{type(error).__name__}: {error}{_in_words(places_of(error))}"})
        finally:
            del forgotten[job], threads_of[job]

    threads = json.loads(jobs.readline() or "{}").get("threads", 1)
    executor = ThreadPoolExecutor(threads, thread_name_prefix="job")
    answer({"ready": os.getpid()})
    for line in jobs:
        message: dict[str, Any] = json.loads(line)
        if "where" in message:
            frame = sys._current_frames().get(threads_of.get(message["where"], 0))
            stands = f"; it stands{_in_words(places_of_stack(frame))}" if frame else "; its worker has not begun it"
            answer({"job": message["where"], "where": stands})
        elif "forget" in message:
            event = forgotten.get(message["forget"])
            if event is not None:
                event.set()
        else:
            forgotten[message["job"]] = threading.Event()
            executor.submit(run, message["job"], message["payload"])
    os._exit(0)  # jobs in progress have nobody left to answer to


def _in_words(places: Sequence[str]) -> str:
    return " in " + " | ".join(reversed(places)) if places else ""
