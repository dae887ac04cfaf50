"""Shared by the tests of the real SWE runner: a scripted model server and a small repository with a bug."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from seamless_verl.agents.contract import AgentJob
from seamless_verl.proxy.calls import ApiError
from seamless_verl.recipes.swe.real.protocol import TOKEN_VARIABLE

_NUMBERS = itertools.count()
KEY = "sk-session-7f"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
FIX = "sed -i 's/return a - b/return a + b/' calc.py"
SUBMIT_PATCH = [FIX, "git diff -- calc.py > patch.txt", "cat patch.txt", f"{SUBMIT} && cat patch.txt"]
SECRET = "canary_the_agent_must_not_see"
TEST_PATCH = "\n".join(
    (
        "diff --git a/test_calc.py b/test_calc.py",
        "--- a/test_calc.py",
        "+++ b/test_calc.py",
        "@@ -1,5 +1,13 @@",
        "-from calc import add",
        "+from calc import add, double",
        " ",
        " ",
        " def test_add_zero():",
        "     assert add(3, 0) == 3",
        "+",
        "+",
        "+def test_add():",
        f"+    assert add(2, 3) == 5  # {SECRET}",
        "+",
        "+",
        "+def test_double():",
        "+    assert double(4) == 8",
        "",
    )
)


class ModelServer(ThreadingHTTPServer):
    """Answers chat completions with one scripted bash command (or refusal) after the other, and keeps the requests."""

    daemon_threads = True

    def __init__(self, commands: Sequence[str | ApiError], *, text: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commands = commands
        self.text = text
        self.wait_s = wait_s
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.asked = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: ModelServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        turn = len(self.server.requests)
        self.server.requests.append(body)
        self.server.keys.append(self.headers["Authorization"])
        self.server.asked.set()
        time.sleep(self.server.wait_s)
        command = self.server.commands[min(turn, len(self.server.commands) - 1)]
        if isinstance(command, ApiError):
            self._answer(command.status, command.body(self.path), command.headers())
            return
        message: dict[str, Any] = {"role": "assistant", "content": "THOUGHT: next."}
        if self.server.text:
            message["content"] = f"THOUGHT: next.\n\n```mswea_bash_command\n{command}\n```"
        else:
            call = {"name": "bash", "arguments": json.dumps({"command": command})}
            message["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": call}]
        choice = {"index": 0, "message": message, "finish_reason": "stop" if self.server.text else "tool_calls"}
        answer = {"id": f"c{turn}", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        answer["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self._answer(200, answer, {})

    def _answer(self, status: int, answer: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        data = json.dumps(answer).encode()
        try:
            self.send_response(status)
            for name, value in {**headers, "Content-Type": "application/json"}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except ConnectionError:
            pass  # the attempt was stopped while we thought

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def model_server(commands: Sequence[str | ApiError], **kwargs: Any) -> Iterator[ModelServer]:
    """A `ModelServer` in a thread."""
    server = ModelServer(commands, **kwargs)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def make_repository(folder: Path) -> tuple[Path, str]:
    """A repository whose second commit repairs what its first one gets wrong; tasks start from the first."""
    folder.mkdir()
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost"]

    def run(*args: str) -> str:
        return subprocess.run([*git, *args], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()

    run("init", "-q", "-b", "main")
    broken = "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return add(a, a)\n"
    (folder / "calc.py").write_text(broken)
    (folder / "dos.txt").write_bytes(b"caf\xe9\r\n")
    (folder / "test_calc.py").write_text("from calc import add\n\n\ndef test_add_zero():\n    assert add(3, 0) == 3\n")
    run("add", "-A")
    run("commit", "-qm", "start")
    base = run("rev-parse", "HEAD")
    (folder / "calc.py").write_text(broken.replace("a - b", "a + b"))
    run("commit", "-qam", "the repair that must not be found")
    return folder, base


def job_of(repository: tuple[Path, str], server: ModelServer, *, deadline_s: float = 200.0, **more: str) -> AgentJob:
    """The task of `make_repository` against a scripted model; ``more`` are further keys of the task."""
    task = {
        "instance_id": "calc__calc-1",
        "repo": str(repository[0]),
        "base_commit": repository[1],
        "problem_statement": "add() subtracts.",
        "test_command": f"{sys.executable} -m pytest -q test_calc.py",
        "fail_to_pass": ["test_calc.py::test_add", "test_calc.py::test_double"],
        "pass_to_pass": ["test_calc.py::test_add_zero"],
        "test_patch": TEST_PATCH,
        **more,
    }
    return AgentJob(task=task, base_url=server.url, api_key=KEY, model="Qwen/Qwen3-8B", deadline_s=deadline_s)


async def first_request(server: ModelServer) -> None:
    """Wait until the agent has asked the model for the first time."""
    assert await asyncio.to_thread(server.asked.wait, 60), "no request within 60 s"


@contextmanager
def nothing_left(*, scratch: bool = True) -> Iterator[str]:
    """Asserts that the body's attempts leave no process and, with ``scratch``, no folder.

    Yields:
        What the tokens of the attempts begin with: other runs on this machine do not count.
    """
    prefix = secrets.token_hex(6)
    with mock.patch("seamless_verl.recipes.swe.real.runner.secrets") as tokens:
        tokens.token_hex.side_effect = lambda _: f"{prefix}{next(_NUMBERS)}"
        yield prefix
    assert not scratch or not list(Path("/tmp").glob(f"seamless-swe-{prefix}*"))
    assert not [process for process in psutil.process_iter() if _token(process).startswith(prefix)]


def _token(process: psutil.Process) -> str:
    try:
        return str(process.environ().get(TOKEN_VARIABLE, ""))
    except psutil.Error:
        return ""


def test_the_scripted_server_answers_in_turn() -> None:
    with model_server(["ls", "pwd"]) as server:
        for command in ("ls", "pwd", "pwd"):
            request = urllib.request.Request(
                f"{server.url}/chat/completions", data=b"{}", headers={"Authorization": "Bearer k"}
            )
            with urllib.request.urlopen(request) as response:
                (choice,) = json.load(response)["choices"]
            (call,) = choice["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"command": command}
