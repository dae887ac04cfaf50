"""Run folders to watch, recorded by the real proxy and the real recorder's format."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from seamless_verl.observe.flight import RunStarted, SessionEnded, SessionGivenUp
from seamless_verl.observe.recording import FLIGHT, write_recording
from seamless_verl.proxy.client import SessionHandle
from seamless_verl.proxy.deploy.http_server import ProxyServer
from seamless_verl.proxy.journal.kept_sessions import KeepingJournal
from seamless_verl.proxy.session.sessions import TASK, SessionSpec
from seamless_verl.trajectory.rows import Row
from seamless_verl.watch.watch_app import make_app
from seamless_verl.watch.watch_command import Root, names_of
from tests.fakes import Served, serving, small_tokenizer
from tests.kernel.observe.made_up import HEADER

TOKEN = "the-token-of-this-test"


@dataclass
class Agent:
    """An agent's side of one session."""

    proxy: Served
    session: SessionHandle

    async def ask(self, messages: list[Any]) -> dict[str, Any]:
        answer = await self.proxy.http.post(
            "/v1/chat/completions",
            json={"model": "tiny", "messages": messages},
            headers={"Authorization": f"Bearer {self.session.api_key}"},
        )
        assert answer.status_code == 200, answer.text
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message

    async def end(self, reward: float) -> tuple[Row, ...]:
        """Close it, and take its rows as the trainer does."""
        result = await self.proxy.admin.close_session(self.session.id, reward, {"passed": reward})
        await self.proxy.admin.delete_session(self.session.id)
        return result.rows


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@asynccontextmanager
async def training(run: Path, script: Callable[[str], str] = lambda prompt: "ok") -> AsyncIterator[Served]:
    """A proxy beside a rollout worker of ``run``, with its journal, as the trainer has it."""
    folder = run / "proxy" / "agent_loop_worker_0"
    folder.mkdir(parents=True, exist_ok=True)
    journal = KeepingJournal(folder / "journal.sqlite", max_bytes=1 << 24)
    async with serving(script, journal=journal) as proxy:
        yield proxy
    await journal.close()


async def begin(proxy: Served, group: str, index: int = 0, task: str = "") -> Agent:
    metadata = {TASK: task} if task else {}
    return Agent(proxy, await proxy.admin.open_session(SessionSpec(group=group, index=index, metadata=metadata)))


def write_texts(run: Path, step: int, texts: list[tuple[str, float, str]]) -> None:
    """What verl writes down of a step: ``uid``, score, and the row's text."""
    (run / "rows").mkdir(exist_ok=True)
    lines = [
        json.dumps({"input": "q", "output": text, "gts": "", "score": score, "step": step, "uid": uid})
        for uid, score, text in texts
    ]
    (run / "rows" / f"{step}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_flight(run: Path, *ended: SessionEnded | SessionGivenUp) -> Path:
    """The recording of a run that goes on."""
    start = RunStarted(at=0.0, name="watched", policy="", eta=1, bound=1, total_steps=4)
    write_recording(run / FLIGHT / "trainer.jsonl", HEADER, [start, *ended])
    return run / FLIGHT / "trainer.jsonl"


def save_tokenizer(folder: Path) -> Path:
    small_tokenizer().save_pretrained(folder)
    return folder


@asynccontextmanager
async def watching(
    folder: Path, tokenizer: Path | None = None, *, alive: bool = False
) -> AsyncIterator[httpx.AsyncClient]:
    """The pages over real HTTP; the client knows the token."""
    root = Root(folder, tokenizer, lambda run: alive)
    app: Any = make_app(root, token=TOKEN, allowed=names_of("127.0.0.1"))
    server = ProxyServer(app, drain_s=1.0)
    base_url = await server.start()
    try:
        async with httpx.AsyncClient(base_url=f"{base_url}/{TOKEN}/", trust_env=False, timeout=30) as http:
            yield http
    finally:
        await server.stop()
        root.close()


async def get(http: httpx.AsyncClient, path: str, **query: Any) -> Any:
    answer = await http.get(f"api/{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def only_run(http: httpx.AsyncClient) -> str:
    (run,) = (await get(http, "runs"))["runs"]
    return f"run/{run['id']}"
