"""Caps of one proxy. Each answers with a status of its own, so that no input and no client costs without bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

_Number = TypeVar("_Number", int, float)


def _limit(default: _Number, told: str) -> _Number:
    """A field with its line in the command's help."""
    return field(default=default, metadata={"help": told})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one proxy takes, before it answers with the status in brackets."""

    max_body_bytes: int = _limit(32 << 20, "longest request body (413).")
    max_arriving_bytes: int = _limit(2 << 30, "bodies of all sessions that are being read at once (429).")
    body_timeout_s: float = _limit(30.0, "time in which a body must have arrived (408).")
    max_messages: int = _limit(10_000, "messages in one request (413).")
    max_image_bytes: int = _limit(20 << 20, "one picture (413).")
    max_image_pixels: int = _limit(50_000_000, "width times height of one picture (400).")
    max_session_images: int = _limit(1000, "pictures of one session (413).")
    max_session_image_bytes: int = _limit(256 << 20, "all pictures of one session (413).")
    max_sessions: int = _limit(100_000, "sessions held at once (429).")
    max_model_len: int = _limit(1 << 20, "tokens of prompt and answer, where a session does not say otherwise (400).")
    max_in_flight: int = _limit(4096, "generations of all sessions at once (429).")
    max_resident_bytes: int = _limit(2 << 30, "memory of sessions before idle ones are spilled to a journal, if any.")
    alarm_rows: int = _limit(8, "a session with more rows is counted and logged: its history does not merge.")
    orphan_grace_s: float = _limit(10.0, "how long a generation whose last client left goes on, for a retry to find.")
    expired_grace_s: float = _limit(3600.0, "how long a session past its deadline is kept for the trainer to close.")
