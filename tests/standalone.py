"""The stand-alone proxy as a user starts it: a process of its own, in front of any server that speaks vLLM's wire."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from benchmarks.mock_engine import Connection, PreparedAnswers
from seamless_verl.proxy.client import ProxyAdmin

KEY = "an-admin-key-for-tests"
ROOT = Path(__file__).parents[1]


def save_tokenizer(folder: Path, tokenizer: Any) -> Path:
    """A model's folder, as far as the proxy reads it."""
    folder.mkdir(exist_ok=True)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer.eos_token}))
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template)
    return folder


class Mock:
    """A server at vLLM's wire; ``latency_s`` may be changed while it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.latency_s = 0.0
        self._answers = PreparedAnswers(folder)
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._answers, lambda: self.latency_s), "127.0.0.1", 0
        )
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()


class Standalone:
    """One proxy process; :meth:`start` returns when it takes requests."""

    def __init__(self, scratch: Path, engine: str, model: Path, *options: str, served: str = "mock") -> None:
        self.record = scratch / "record"
        key = scratch / "key"
        key.write_text(KEY)
        self.command = [sys.executable, "-m", "seamless_verl.cli", "proxy", "--engine", engine, "--model", str(model)]
        self.command += ["--served-model", served, "--port", "0", "--record", str(self.record)]
        self.command += ["--admin-key-file", str(key), *options]
        self.log = scratch / "proxy.log"
        self.url = ""
        self.said = ""
        self.process: subprocess.Popen[str] | None = None

    def start(self, **options: Any) -> str:
        """Start it (again, on the same folder and port); returns the line it said."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, **options
            )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        assert self.said.startswith("proxy http"), self.log.read_text()
        self.url = self.said.split()[1]
        self.command[self.command.index("--port") + 1] = self.url.rpartition(":")[2]
        return self.said

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        return int(self.process.returncode)

    def admin(self) -> ProxyAdmin:
        return ProxyAdmin(self.url, KEY)

    def rows(self) -> list[dict[str, Any]]:
        files = sorted((self.record / "rows").glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


async def chat(url: str, key: str, messages: list[dict[str, Any]], **body: Any) -> httpx.Response:
    """One chat completion."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        headers = {"authorization": f"Bearer {key}"}
        return await http.post(
            "/v1/chat/completions", json={"model": "m", "messages": messages, **body}, headers=headers
        )


def refused(scratch: Path, *arguments: str) -> str:
    """What the command says when it will not start."""
    done = subprocess.run(
        [sys.executable, "-m", "seamless_verl.cli", "proxy", *arguments],
        cwd=scratch,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    assert "Unclosed" not in done.stderr, done.stderr
    return done.stderr
