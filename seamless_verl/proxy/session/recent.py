"""Requests as they were sent, kept so that the next one costs only what is new in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seamless_verl.trajectory.messages import Message, Transcript

_BYTES_PER_CHAR = 3  # as sent, and in messages made of an earlier request
_BYTES_PER_MESSAGE = 1_500  # both objects, and their digests


class RecentTranscripts:
    """The last few requests as sent, so that a history is parsed and hashed once, however often it is sent again.

    Bounded: ``size`` conversations (parallel branches and sub-agents each keep one).

    Attributes:
        num_bytes: about how much memory they take.
    """

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._entries: list[_Entry] = []
        self.num_bytes = 0

    def best(
        self, raw_messages: list[Mapping[str, Any]]
    ) -> tuple[int, Transcript | None, list[Mapping[str, Any]] | None]:
        """Length of the longest common beginning with an earlier request, its transcript and its tools as sent."""
        best: tuple[int, Transcript | None, list[Mapping[str, Any]] | None] = (0, None, None)
        for entry in self._entries:
            length = _common_length(entry.raw_messages, raw_messages)
            if length > best[0]:
                best = (length, entry.transcript, entry.raw_tools)
        return best

    def add(
        self,
        raw_messages: list[Mapping[str, Any]],
        raw_tools: list[Mapping[str, Any]],
        transcript: Transcript,
        *,
        replaces: Transcript | None,
    ) -> None:
        """Remember a request; one that continues ``replaces`` takes its place."""
        if any(entry.transcript is transcript for entry in self._entries):
            return  # another sample of the same request
        before = next((entry for entry in self._entries if entry.transcript is replaces), None)
        num_known = len(before.transcript.messages) if before is not None else 0
        num_chars = before.num_chars if before is not None else 0
        entry = _Entry(
            raw_messages=raw_messages,
            raw_tools=raw_tools,
            transcript=transcript,
            num_chars=num_chars + sum(_num_chars(message) for message in transcript.messages[num_known:]),
        )
        others = [kept for kept in self._entries if kept is not before]
        self._entries = [*others[-(self._size - 1) :], entry]
        self.num_bytes = sum(kept.num_bytes for kept in self._entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    raw_messages: list[Mapping[str, Any]]
    raw_tools: list[Mapping[str, Any]]
    transcript: Transcript
    num_chars: int  # of the messages

    @property
    def num_bytes(self) -> int:
        num_chars = self.num_chars + sum(map(len, self.transcript.tools))
        return _BYTES_PER_MESSAGE * len(self.transcript.messages) + _BYTES_PER_CHAR * num_chars


def _num_chars(message: Message) -> int:
    return len(message.content) + len(message.reasoning) + sum(len(call.arguments) for call in message.tool_calls)


def _common_length(one: list[Mapping[str, Any]], other: list[Mapping[str, Any]]) -> int:
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(at for at in range(shorter) if one[at] != other[at])
