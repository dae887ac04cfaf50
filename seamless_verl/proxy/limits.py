"""Caps of one proxy. Each answers with a status of its own, so that no input and no client costs without bound."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one proxy takes.

    Attributes:
        max_body_bytes: longest request body (413).
        max_arriving_bytes: bodies of all sessions that are being read at once (429).
        body_timeout_s: time in which a body must have arrived (408).
        max_messages: messages in one request (413).
        max_image_bytes: one picture (413).
        max_image_pixels: width times height of one picture (400).
        max_session_images, max_session_image_bytes: all pictures of one session (413).
        max_sessions: sessions held at once (429).
        max_model_len: tokens of prompt and answer together, where a session does not say otherwise (400).
        max_in_flight: generations of all sessions at once (429).
        orphan_grace_s: how long a generation goes on after its last client left, for a retry to find it.
        max_resident_bytes: memory that sessions may take before idle ones are spilled to the journal, if there is one.
        alarm_rows: a session that leaves more rows than this is counted and logged: its history does not merge.
        expired_grace_s: how long a session past its deadline is kept for the trainer to close.
    """

    max_body_bytes: int = 32 << 20
    max_arriving_bytes: int = 2 << 30
    body_timeout_s: float = 30.0
    max_messages: int = 10_000
    max_image_bytes: int = 20 << 20
    max_image_pixels: int = 50_000_000
    max_session_images: int = 1000
    max_session_image_bytes: int = 256 << 20
    max_sessions: int = 100_000
    max_model_len: int = 1 << 20
    max_in_flight: int = 4096
    max_resident_bytes: int = 2 << 30
    alarm_rows: int = 8
    orphan_grace_s: float = 10.0
    expired_grace_s: float = 3600.0
