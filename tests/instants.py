"""A proxy without sockets and threads, so that a test can act between any two steps of its event loop.

::

    Caller ──ASGI──▶ the real application ──▶ ScriptedEngine
                              └──▶ SteppingJournal: SQLite, held or stepped through around each write of turns
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from seamless_verl.proxy.http.app import ProxyDeps, make_app
from seamless_verl.proxy.journal.sqlite_journal import SqliteJournal
from seamless_verl.proxy.session.sessions import SessionSpec
from seamless_verl.proxy.text.chat_template import TokenizerRenderer
from tests.fakes import ScriptedEngine, small_tokenizer

CHAT = "/v1/chat/completions"


async def steps(num: int) -> None:
    """Let the event loop make this many steps."""
    for _ in range(num):
        await asyncio.sleep(0)


class Caller:
    """One request; :meth:`leave` is what a closed connection is to the application.

    Attributes:
        status: of the response; None while there is none.
    """

    def __init__(self, app: Any, key: str, body: dict[str, Any], *, path: str = CHAT, retry: int | None = None) -> None:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        if retry is not None:
            headers.append((b"x-stainless-retry-count", str(retry).encode()))
        self._scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": headers,
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1),
        }
        self._unread = [json.dumps({"model": "m", **body}).encode()]
        self._left = asyncio.Event()
        self._content = b""
        self.status: int | None = None
        self.task = asyncio.create_task(app(self._scope, self._receive, self._send))

    @property
    def has_left(self) -> bool:
        return self._left.is_set()

    def leave(self) -> None:
        self._left.set()

    async def answered(self) -> Any:
        """The whole response, decoded; of a stream its events."""
        await self.task
        text = self._content.decode()
        if not text.startswith("data: "):
            return json.loads(text) if text else None
        return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]

    async def _receive(self) -> dict[str, Any]:
        if self._unread:
            return {"type": "http.request", "body": self._unread.pop(), "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self._left.is_set():
            return  # as uvicorn does: what is written to a closed connection is lost
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self._content += message["body"]


class _Inline(Executor):
    """A journal's thread that is the caller's own."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future


class SteppingJournal(SqliteJournal):
    """The real journal in the event loop's own thread.

    Args:
        before, after: steps of the loop that a write of turns takes before it is on disk, and until its caller knows.

    Attributes:
        may_write, may_return: hold writes of turns, before they are on disk and after.
        reached, written: set once a write of turns has begun, and once one is on disk.
        failing: numbers of the writes of turns, from 0, that fail.
    """

    def __init__(self, path: Path, *, before: int = 0, after: int = 0) -> None:
        super().__init__(path)
        self._thread.shutdown()
        self._thread = _Inline()  # type: ignore[assignment]
        self._before, self._after = before, after
        self._num_writes = 0
        self.failing: frozenset[int] = frozenset()
        self.may_write, self.may_return, self.reached, self.written = (asyncio.Event() for _ in range(4))
        self.may_write.set()
        self.may_return.set()

    async def _write(self, statements: Any) -> None:
        if not statements[0][0].startswith("INSERT INTO turns"):
            await super()._write(statements)
            return
        number, self._num_writes = self._num_writes, self._num_writes + 1
        self.reached.set()
        await steps(self._before)
        await self.may_write.wait()
        if number in self.failing:
            statements = [*statements, ("INSERT INTO nowhere VALUES (1)", ())]
        await super()._write(statements)
        self.written.set()
        await steps(self._after)
        await self.may_return.wait()

    def num_turns(self) -> int:
        """Turns on disk."""
        return int(self._db.execute("SELECT count(*) FROM turns").fetchone()[0])

    def copy_to(self, path: Path) -> None:
        """What a process that is killed now leaves on disk."""
        path.write_bytes(self._db.serialize())


class House:
    """One process: the application, its sessions, its engine."""

    def __init__(self, journal: SqliteJournal | None, script: Callable[[str], str], **options: Any) -> None:
        tokenizer = small_tokenizer()
        self.engine = options.pop("engine", None) or ScriptedEngine(tokenizer, script, num_versions=2)
        renderer = TokenizerRenderer(tokenizer)
        if journal is not None:
            options["journal"] = journal
        self.deps = ProxyDeps(engine=self.engine, renderer=renderer, admin_key="admin", model="m", **options)
        if journal is not None:
            journal.resume(self.deps.sessions)
        self.app = make_app(self.deps)

    async def open(self, **spec: Any) -> tuple[str, str]:
        """Id and key of a new session."""
        session, key = self.deps.sessions.open(SessionSpec(**spec), now=time.time())
        await self.deps.journal.opened(session)
        return session.id, key

    def ask(self, key: str, text: str, *, retry: int | None = None, **wishes: Any) -> Caller:
        return Caller(self.app, key, {"messages": [{"role": "user", "content": text}], **wishes}, retry=retry)

    async def close(self, session_id: str) -> Any:
        """The result of a session, as on the wire."""
        return json.loads(await self.app.state.handover.close(session_id))


async def rows_after_restart(path: Path, session_id: str) -> Any:
    """What closing a session gives in a process that finds this journal."""
    journal = SteppingJournal(path)
    result = await House(journal, lambda prompt: "").close(session_id)
    await journal.close()
    return result
