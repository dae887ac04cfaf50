"""Records each attempt to generate: on which replica, from when to when, how many tokens (`observe.flight`)."""

from __future__ import annotations

import functools
import uuid
from contextvars import ContextVar, Token
from pathlib import Path
from types import TracebackType

from verl.workers.rollout.replica import TokenOutput

from seamless_verl.observe.flight import RequestEnded, RequestStarted
from seamless_verl.observe.recorder import FlightRecorder

_CURRENT: ContextVar[RecordedAttempt | None] = ContextVar("recorded_attempt", default=None)


@functools.cache
def recorder_of_process(run_dir: str | None, role: str) -> FlightRecorder:
    """One recorder per process and role, made on first use: verl pickles clients before they reach their process."""
    return FlightRecorder(Path(run_dir) if run_dir else None, role)


class RecordedAttempt:
    """Stands around one ``LLMServerClient.generate``; `routed` is called, in the same task, when a replica is chosen.

    Args:
        prompt_tokens: tokens sent, those of earlier attempts included.
        resumed: an earlier attempt was interrupted.
    """

    def __init__(self, recorder: FlightRecorder, *, prompt_tokens: int, resumed: bool) -> None:
        self._recorder = recorder
        self._prompt_tokens = prompt_tokens
        self._resumed = resumed
        self._request = uuid.uuid4().hex
        self._server: str | None = None
        self._output: TokenOutput | None = None
        self._token: Token[RecordedAttempt | None] | None = None

    @staticmethod
    def routed(server: str) -> None:
        """The attempt of this task runs on ``server`` from now on; outside of an attempt nothing happens."""
        attempt = _CURRENT.get()
        if attempt is None:
            return
        attempt._server = server
        attempt._recorder.record(
            RequestStarted(
                at=attempt._recorder.now(),
                request=attempt._request,
                slice=server,
                prompt_tokens=attempt._prompt_tokens,
                resumed=attempt._resumed,
            )
        )

    def answered(self, output: TokenOutput) -> None:
        self._output = output

    def __enter__(self) -> RecordedAttempt:
        self._token = _CURRENT.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            _CURRENT.reset(self._token)
        if self._server is None:
            return
        extra = self._output.extra_fields if self._output is not None else {}
        self._recorder.record(
            RequestEnded(
                at=self._recorder.now(),
                request=self._request,
                slice=self._server,
                tokens=len(self._output.token_ids) if self._output is not None else 0,
                finish=kind.__name__ if kind is not None else str(self._output and self._output.stop_reason),
                cached_tokens=extra.get("num_cached_tokens"),
                version=extra.get("global_steps"),
            )
        )
