"""The connections to the engine, beyond what the engines' own tests see of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from benchmarks.http_pool import HttpPool


class _Line(asyncio.Transport):
    """Answers whatever is sent at once; refuses what asyncio's transport of Python 3.12 never gets rid of."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._protocol = protocol
        self.sent = b""

    def writelines(self, parts: Iterable[Any]) -> None:
        parts = list(parts)
        assert all(parts), "an empty part stays in the transport's buffer"
        self.sent += b"".join(parts)
        self._protocol.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        return None


@pytest.mark.parametrize("body", [b"", b"{}"])
async def test_no_empty_part_is_handed_to_the_transport(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    lines: list[_Line] = []

    async def connect(make: Callable[[], asyncio.Protocol], *_: Any, **__: Any) -> Any:
        protocol = make()
        lines.append(_Line(protocol))
        protocol.connection_made(lines[-1])
        return lines[-1], protocol

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connect)
    pool = HttpPool("http://127.0.0.1:1")
    answer = await pool.request("POST", "/x", body, timeout_s=5)
    assert (answer.status, answer.body) == (200, b"ok")
    (line,) = lines
    head, _, sent = line.sent.partition(b"\r\n\r\n")
    assert (sent, b"content-length: %d" % len(body) in head) == (body, True)
    pool.close()
