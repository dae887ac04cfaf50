"""The mock engine with a ledger of its own: what crossed its wire, outside the proxy and its gate.

Two requests for one prompt are answered differently, and what is under way when the weights change breaks off where it
is: the proxy has to ask for the rest. So an answer of the proxy is one piece of the ledger, or several in a row::

    prompt ──▶ piece 1 (version 3, broken off)
    prompt + piece 1 ──▶ piece 2 (version 4, whole)
"""

from __future__ import annotations

import json
import random
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.mock_engine import NUM_ANSWERS, Connection, PreparedAnswers, choice_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One answer of the engine, whole or broken off."""

    ids: array[int]
    log_probs: array[float]
    version: int
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the engine said: one entry per token."""

    log_probs: list[float]
    versions: list[int]


class WireLedger:
    """Pieces by the prompt that they continue.

    Attributes:
        version: of the weights.
        num_seams: answers that were broken off.
    """

    def __init__(self) -> None:
        self.version = 0
        self.num_seams = 0
        self._pieces: dict[bytes, list[Piece]] = {}
        self._under_way: set[LedgerConnection] = set()

    def note(self, prompt: bytes, piece: Piece) -> None:
        key = array("i", msgspec.json.decode(prompt)).tobytes()
        self._pieces.setdefault(key, []).append(piece)
        self.num_seams += not piece.is_whole

    def began(self, connection: LedgerConnection) -> None:
        self._under_way.add(connection)

    def ended(self, connection: LedgerConnection) -> None:
        self._under_way.discard(connection)

    def break_off(self, rng: random.Random) -> None:
        """End all that is under way where it is."""
        for connection in tuple(self._under_way):
            connection.break_off(rng)

    def readings(self, prompt: Sequence[int], ids: Sequence[int], num_cut: int) -> Iterator[Told]:
        """All ways in which the engine said ``ids`` (less ``num_cut`` at their end) after ``prompt``."""
        ids = array("i", ids)
        for piece in self._pieces.get(array("i", prompt).tobytes(), ()):
            num = min(len(piece.ids), len(ids))
            if piece.ids[:num] != ids[:num]:
                continue
            told = Told(log_probs=piece.log_probs[:num].tolist(), versions=[piece.version] * num)
            if piece.is_whole and num == len(ids) and len(piece.ids) == num + num_cut:
                yield told
            elif not piece.is_whole and num == len(piece.ids) < len(ids):
                for rest in self.readings([*prompt, *piece.ids], ids[num:], num_cut):
                    yield Told(log_probs=told.log_probs + rest.log_probs, versions=told.versions + rest.versions)


class LedgerConnection(Connection):
    """One client of that engine."""

    def __init__(self, answers: PreparedAnswers, ledger: WireLedger) -> None:
        super().__init__(answers, lambda: 0.004)
        self._ledger = ledger
        self._asked = b""

    def on_message_complete(self) -> None:
        self._asked = b"".join(self._body)
        super().on_message_complete()
        if self._asked:
            self._ledger.began(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._ledger.ended(self)

    def break_off(self, rng: random.Random) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._say(self._asked, rng.randint(1, 200))

    def _reply(self, url: bytes, body: bytes) -> None:
        if body:
            self._say(body, None)
        else:
            super()._reply(url, body)

    def _say(self, body: bytes, length: int | None) -> None:
        self._ledger.ended(self)
        if self._transport.is_closing():
            return
        start = body.index(b'"prompt":[') + 9
        number = zlib.crc32(body) % NUM_ANSWERS
        ids, log_probs = self._answers.ids[number][:length], self._answers.log_probs[number][:length]
        piece = Piece(
            ids=array("i", ids), log_probs=array("d", log_probs), version=self._ledger.version, is_whole=length is None
        )
        self._ledger.note(body[start : body.index(b"]", start) + 1], piece)
        streams = b'"stream":true' in body
        if length is None:
            prepared = self._answers.streams if streams else self._answers.completions
            self._send(prepared[number], kind=b"text/event-stream" if streams else b"application/json")
            return
        said = json.dumps({"choices": [choice_of("", ids, log_probs, "abort")]}).encode()
        if streams:
            self._send(b"data: " + said + b"\n\ndata: [DONE]\n\n", kind=b"text/event-stream")
        else:
            self._send(said)
