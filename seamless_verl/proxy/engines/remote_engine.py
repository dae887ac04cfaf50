"""A proxy in a process of its own, beside the process that owns its engine and its listening socket.

::

    owner    listening socket ──handed over──▶ proxy ◀── agents
             engine ◀──── requests, answers (msgpack over a Unix socket) ────┘

Invariant: the owner keeps the listening socket, so its address outlives the proxy. While one that was killed is being
started again, agents that connect wait in the socket's backlog instead of being refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import logging
import os
import secrets
import socket
import struct
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from seamless_verl.errors import SeamlessError
from seamless_verl.proxy.engine import Engine, EngineRefused, EngineUnavailable, GenerationRequest
from seamless_verl.trajectory.generation import Generation
from seamless_verl.trajectory.tokens import TokenPath

_log = logging.getLogger(__name__)
_LENGTH_BYTES = 4
_ACCEPT_PAUSE_S = 1.0
_DIAL_S = 60.0  # for the owner's loop to turn, which takes milliseconds unless it is held up
# Errors that pass, as when files are closed or memory is freed; an aborted connection says nothing of the next one.
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EPROTO}


class _Ask(msgspec.Struct, array_like=True):
    """One request; token ids as they lie in memory, four bytes each."""

    number: int
    request_id: str
    session_id: str
    prompt_ids: bytes
    sampling: dict[str, Any]
    deadline: float
    images: list[bytes]
    resume_from: Generation | None = None
    tells_progress: bool = False


class _Answer(msgspec.Struct, array_like=True):
    """How a request ended: with a generation, or with one of three kinds of error. Or ``progress`` before that."""

    number: int
    generation: Generation | None = None
    refused: str = ""
    unavailable: str = ""
    failed: str = ""
    progress: Generation | None = None


class _Message(msgspec.Struct, array_like=True):
    """From the proxy: a request, or the number of one that the proxy has cancelled."""

    ask: _Ask | None = None
    cancelled: int | None = None


_encode = msgspec.msgpack.Encoder().encode
_messages = msgspec.msgpack.Decoder(_Message)
_answers = msgspec.msgpack.Decoder(_Answer)


class EngineHost:
    """The owner's side: passes its listening socket to each proxy that connects, then generates for it.

    Args:
        engine: streams nothing to the proxy, which sees answers as a whole.
        listener: bound and listening.

    Attributes:
        address: of the Unix socket. It is no file, so that nothing is left behind by a process that is killed; only
            processes of the same user are served.
    """

    def __init__(self, engine: Engine, listener: socket.socket) -> None:
        self._engine = engine
        self._listener = listener
        self.address = f"\0seamless-engine-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.address)
        self._socket.listen()
        self._socket.setblocking(False)
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take connections from now on."""
        self._accepting = asyncio.create_task(self._accept())
        self._accepting.add_done_callback(_report)
        self._keep(self._accepting)

    def check(self) -> None:
        """Raise when no connection is accepted any more, so that a proxy that died could not be restarted."""
        if self._accepting is not None and self._accepting.done():
            story = "the engine's owner takes connections of its proxy no more"
            raise SeamlessError(story) from (None if self._accepting.cancelled() else self._accepting.exception())

    async def close(self) -> None:
        """Take no more, and cancel what is generated."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                if error.errno not in _PASSING:
                    raise
                _log.warning("no connection of a proxy can be taken (%s); again in %.0f s", error, _ACCEPT_PAUSE_S)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if self._handed_over(connection):
                self._keep(asyncio.create_task(self._serve(connection)))

    def _handed_over(self, connection: socket.socket) -> bool:
        """Whether the other end is ours and has the listening socket now; else the connection is closed."""
        try:
            if _user_of(connection) == os.geteuid():
                socket.send_fds(connection, [b"\0"], [self._listener.fileno()])
                return True
        except OSError as error:  # e.g. it was killed meanwhile; the next one is to be served
            _log.warning("a proxy connected and did not take the listening socket: %s", error)
        connection.close()
        return False

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        running: dict[int, asyncio.Task[None]] = {}
        try:
            while (frame := await _read(reader)) is not None:
                message = _messages.decode(frame)
                if message.ask is not None:
                    number = message.ask.number
                    running[number] = asyncio.create_task(self._generate(message.ask, writer))
                    running[number].add_done_callback(functools.partial(_ended, running, number))
                elif message.cancelled is not None and message.cancelled in running:
                    running[message.cancelled].cancel()
        finally:
            for task in tuple(running.values()):
                task.cancel()  # what the proxy does not live to record is not worth its replica
            writer.close()

    async def _generate(self, ask: _Ask, writer: asyncio.StreamWriter) -> None:
        answer = _Answer(ask.number)

        def on_progress(tokens: Generation) -> None:
            _write(writer, _Answer(ask.number, progress=tokens))

        try:
            answer.generation = await self._engine.generate(
                GenerationRequest(
                    request_id=ask.request_id,
                    session_id=ask.session_id,
                    prompt_ids=array("i", ask.prompt_ids),
                    sampling=ask.sampling,
                    deadline=ask.deadline,
                    images=ask.images,
                    resume_from=ask.resume_from,
                    on_progress=on_progress if ask.tells_progress else None,
                )
            )
        except EngineRefused as error:
            answer.refused = str(error) or "for no reason that it told"
        except EngineUnavailable as error:
            answer.unavailable = str(error) or "for no reason that it told"
        except Exception as error:  # noqa: BLE001 - raised again on the proxy's side, which waits for an answer
            answer.failed = f"{type(error).__name__}: {error}"
        _write(writer, answer)


class RemoteEngine:
    """The proxy's side: an :class:`~seamless_verl.proxy.engine.Engine` that asks its owner."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[_Answer]] = {}
        self._on_progress: dict[int, Callable[[Generation], None]] = {}
        self._reading = asyncio.create_task(self._read_answers(reader))

    @classmethod
    async def connect(cls, address: str) -> tuple[RemoteEngine, socket.socket]:
        """The engine, and the listening socket to serve on.

        Raises:
            OSError: its owner is gone, or does not hand the socket over (a TimeoutError after ``_DIAL_S``).
        """
        connection, listener = await asyncio.to_thread(_dial, address)
        return cls(*await asyncio.open_unix_connection(sock=connection)), listener

    async def generate(self, request: GenerationRequest) -> Generation:
        """See :class:`~seamless_verl.proxy.engine.Engine`."""
        if self._reading.done():
            raise EngineUnavailable("its owner is gone")
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        ask = _Ask(
            number=number,
            request_id=request.request_id,
            session_id=request.session_id,
            prompt_ids=b"".join(TokenPath.of(request.prompt_ids).chunks()),
            sampling=dict(request.sampling),
            deadline=request.deadline,
            images=list(request.images),
            resume_from=request.resume_from,
            tells_progress=request.on_progress is not None,
        )
        if request.on_progress is not None:
            self._on_progress[number] = request.on_progress
        _write(self._writer, _Message(ask=ask))
        try:
            answer: _Answer = await waiting
        except asyncio.CancelledError:
            _write(self._writer, _Message(cancelled=number))
            raise
        finally:
            del self._waiting[number]
            self._on_progress.pop(number, None)
        if answer.generation is not None:
            return answer.generation
        if answer.refused:
            raise EngineRefused(answer.refused)
        if answer.unavailable:
            raise EngineUnavailable(answer.unavailable)
        raise RuntimeError(f"the engine's owner failed: {answer.failed}")

    async def ended(self) -> None:
        """Returns when the owner is gone."""
        await asyncio.wait({self._reading})

    async def close(self) -> None:
        self._writer.close()
        await self.ended()

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        try:
            while (frame := await _read(reader)) is not None:
                answer = _answers.decode(frame)
                if answer.progress is not None:
                    if (tell := self._on_progress.get(answer.number)) is not None:
                        tell(answer.progress)
                    continue
                waiting = self._waiting.get(answer.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        finally:
            for number, waiting in self._waiting.items():
                if not waiting.done():
                    waiting.set_result(_Answer(number, unavailable="its owner is gone"))


def _ended(running: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    del running[number]


def _report(accepting: asyncio.Task[None]) -> None:
    if not accepting.cancelled():
        _log.error("connections of the proxy are taken no more", exc_info=accepting.exception())


def _user_of(connection: socket.socket) -> int:
    """Effective user id of the process at the other end."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


def _dial(address: str) -> tuple[socket.socket, socket.socket]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_DIAL_S)  # until asyncio takes the connection over
        connection.connect(address)
        _, handles, _, _ = socket.recv_fds(connection, 1, 1)
        if not handles:
            raise ConnectionError("the engine's owner closed the connection instead of handing its socket over")
    except TimeoutError:
        connection.close()
        story = "its loop is held up, or it takes no connections; see its log"
        raise TimeoutError(f"the engine's owner handed no socket over within {_DIAL_S:.0f} s: {story}") from None
    except OSError:
        connection.close()
        raise
    return connection, socket.socket(fileno=handles[0])


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    """One message; None when the other side is gone."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        head = await reader.readexactly(_LENGTH_BYTES)
        return await reader.readexactly(int.from_bytes(head, "little"))
    return None


def _write(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    body = _encode(message)
    writer.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
