"""The tiny agent and its runner: a real agent process, real test runs, and a small HTTP server that plays the model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.agents.contract import AgentJob, AgentStatus
from seamless_verl.errors import ConfigError
from seamless_verl.recipes.swe.tiny import edit
from seamless_verl.recipes.swe.tiny.runner import TinySweRunner
from seamless_verl.recipes.swe.tiny.tasks import Task, generate

Reply = tuple[int, dict[str, str], bytes]


def completion(content: str, finish_reason: str = "stop") -> Reply:
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    return 200, {}, json.dumps({"choices": [choice]}).encode()


@dataclass
class Model:
    """The scripted endpoint: ``answer`` sees each request, everything asked is kept in ``requests``."""

    answer: Callable[[dict[str, Any]], Reply] = lambda request: completion("")
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: set[tuple[str, int]] = field(default_factory=set)
    hang_up: bool = False
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model: Model

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.model.requests.append(request)
        self.model.headers.append(dict(self.headers))
        self.model.connections.add(self.client_address)
        status, headers, body = self.model.answer(request)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        with contextlib.suppress(BrokenPipeError):  # an agent past its deadline, or killed, waits no more
            self.end_headers()
            self.wfile.write(body)
        self.close_connection = self.model.hang_up

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def model() -> Iterator[Model]:
    model = Model()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"model": model}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    model.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield model
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
async def runner() -> AsyncIterator[TinySweRunner]:
    runner = TinySweRunner(processes=1, threads=4)
    yield runner
    await runner.close()


@pytest.fixture(scope="module")
def task() -> Task:
    """A task whose file is right again after one edit, and which passes some tests as it is."""
    return next(task for task in generate("train", 3) if 0 < task.run(task.source)[1] < 1)


def job(task: Task, model: Model, deadline_s: float = 30.0, **changes: Any) -> AgentJob:
    public = {**json.loads(task.to_json()), **changes}
    return AgentJob(task=public, base_url=model.url, api_key="sk-one", model="tiny", deadline_s=deadline_s)


async def test_right_answer_passes_and_the_conversation_is_complete(
    runner: TinySweRunner, model: Model, task: Task
) -> None:
    answers = ["not an edit", task.answer]
    model.answer = lambda request: completion(answers[len(model.requests) - 1])
    report = await runner.run(job(task, model))
    assert report.status is AgentStatus.FINISHED
    assert report.reward == 1.0
    assert report.rewards == {"passed": 1.0, "share": 1.0, "turns": 2.0, "valid_edits": 0.5}
    first = edit.user_message(task.source, task.run(task.source)[0])
    assert [message["content"] for message in model.requests[1]["messages"]] == [
        first, "not an edit", f"{edit.BAD_EDIT}\n{first}",
    ]  # fmt: skip
    assert [message["role"] for message in model.requests[1]["messages"]] == ["user", "assistant", "user"]
    assert model.requests[0]["max_tokens"] == 24
    assert "temperature" not in model.requests[0]
    assert model.headers[0]["Authorization"] == "Bearer sk-one"
    assert len(model.connections) == 1, "the connection is kept alive over the turns"


async def test_hidden_part_of_the_task_never_reaches_the_agent(runner: TinySweRunner, model: Model, task: Task) -> None:
    await runner.run(job(task, model))
    assert task.answer.split("|")[1].strip() not in json.dumps(model.requests)


async def test_turns_run_out_and_the_file_is_graded_as_it_is(runner: TinySweRunner, model: Model, task: Task) -> None:
    model.answer = lambda request: completion("1|def nothing():")
    report = await runner.run(job(task, model))
    assert report.status is AgentStatus.FINISHED
    assert report.rewards == {"passed": 0.0, "share": 0.0, "turns": 3.0, "valid_edits": 1.0}
    assert len(model.requests) == 3


async def test_answer_cut_at_its_length_ends_the_attempt(runner: TinySweRunner, model: Model, task: Task) -> None:
    model.answer = lambda request: completion(task.answer, "length")
    report = await runner.run(job(task, model))
    assert report.status is AgentStatus.FINISHED
    assert report.reward == pytest.approx(task.run(task.source)[1])
    assert len(model.requests) == 1


async def test_waits_when_told_to_and_asks_again(runner: TinySweRunner, model: Model, task: Task) -> None:
    model.answer = lambda request: (
        (429, {"Retry-After": "0"}, b"{}") if len(model.requests) == 1 else completion(task.answer)
    )
    report = await runner.run(job(task, model))
    assert report.reward == 1.0
    assert len(model.requests) == 2
    assert model.requests[0] == model.requests[1]


async def test_a_wait_longer_than_the_deadline_is_not_waited(runner: TinySweRunner, model: Model, task: Task) -> None:
    model.answer = lambda request: (503, {"Retry-After": "25"}, b"{}")
    report = await runner.run(job(task, model, deadline_s=20.0))
    assert report.status is AgentStatus.TIMED_OUT
    assert "asked to wait 25 s" in report.detail
    assert report.reward == pytest.approx(task.run(task.source)[1])


@pytest.mark.parametrize("status", [400, 403, 410, 413])
async def test_budget_refusal_is_an_end_and_not_a_fault(
    runner: TinySweRunner, model: Model, task: Task, status: int
) -> None:
    model.answer = lambda request: (status, {}, b'{"error": {"message": "turn budget used up"}}')
    report = await runner.run(job(task, model))
    assert report.status is AgentStatus.FINISHED
    assert "turn budget used up" in report.detail


@pytest.mark.parametrize("reply", [(500, {}, b"boom"), (401, {}, b"who?"), (200, {}, b"not json")])
async def test_broken_endpoint_fails_the_attempt(runner: TinySweRunner, model: Model, task: Task, reply: Reply) -> None:
    model.answer = lambda request: reply
    report = await runner.run(job(task, model))
    assert report.status is AgentStatus.FAILED
    assert reply[2].decode() in report.detail


async def test_connection_closed_between_turns_is_opened_again(runner: TinySweRunner, model: Model, task: Task) -> None:
    model.hang_up = True
    answers = ["no", task.answer]
    model.answer = lambda request: completion(answers[len(model.requests) - 1])
    report = await runner.run(job(task, model))
    assert report.reward == 1.0
    assert len(model.connections) == 2


async def test_silent_endpoint_times_out_and_the_edit_before_counts(
    runner: TinySweRunner, model: Model, task: Task
) -> None:
    release = threading.Event()

    def answer(request: dict[str, Any]) -> Reply:
        if len(model.requests) == 1:
            return completion("1|def nothing():")
        release.wait(60)
        return completion(task.answer)

    model.answer = answer
    report = await runner.run(job(task, model, deadline_s=2.0))
    release.set()
    assert report.status is AgentStatus.TIMED_OUT
    assert report.reward == 0.0, "the harmful edit was written before the deadline"


async def test_killed_agent_fails_its_attempt_and_the_next_one_works(
    runner: TinySweRunner, model: Model, task: Task
) -> None:
    asked, release = threading.Event(), threading.Event()

    def answer(request: dict[str, Any]) -> Reply:
        asked.set()
        release.wait(60)
        return completion(task.answer)

    model.answer = answer
    attempt = asyncio.ensure_future(runner.run(job(task, model)))
    await asyncio.to_thread(asked.wait)
    (pid,) = runner._pool.pids
    os.kill(pid, signal.SIGKILL)
    report = await attempt
    assert report.status is AgentStatus.FAILED
    assert "SIGKILL" in report.detail
    assert report.reward == pytest.approx(task.run(task.source)[1])
    release.set()
    assert (await runner.run(job(task, model))).reward == 1.0


async def test_many_attempts_at_once(runner: TinySweRunner, model: Model) -> None:
    tasks = list(islice(generate("train", 11), 12))
    answer_of = {edit.user_message(task.source, task.run(task.source)[0]): task.answer for task in tasks}
    model.answer = lambda request: completion(answer_of[request["messages"][0]["content"]])
    reports = await asyncio.gather(*(runner.run(job(task, model)) for task in tasks))
    assert [report.reward for report in reports] == [1.0] * len(tasks)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("test_command", None),
        ("test_command", "make check"),
        ("tests", ""),
        ("tests", "x = 1"),
        ("source", 5),
        ("source_file", "../evil.py"),
        ("test_file", "test.txt"),
    ],
)
async def test_malformed_task_is_named_before_the_model_is_asked(
    runner: TinySweRunner, model: Model, task: Task, key: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        await runner.run(job(task, model, **{key: value}))
    assert caught.value.key == f"extra_info.task.{key}"
    assert model.requests == []


async def test_close_leaves_no_process_and_no_folder(
    model: Model, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also none of the agents' own, which are killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    runner = TinySweRunner(processes=2, threads=2)
    model.answer = lambda request: completion(task.answer)
    await asyncio.gather(*(runner.run(job(task, model)) for _ in range(4)))
    pids = runner._pool.pids
    assert len(pids) == 2
    await runner.close()
    await runner.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert os.listdir(tmp_path) == []
