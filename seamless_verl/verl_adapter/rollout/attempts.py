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
from seamless_verl.scheduling.events import Ending
from seamless_verl.verl_adapter.rollout.request_log import request_log

_CURRENT: ContextVar[RecordedAttempt | None] = ContextVar("recorded_attempt", default=None)


@functools.cache
def recorder_of_process(run_dir: str | None, role: str) -> FlightRecorder:
    """One recorder per process and role, made on first use: verl pickles clients before they reach their process."""
    return FlightRecorder(Path(run_dir) if run_dir else None, role)


class RecordedAttempt:
    """Stands around one ``LLMServerClient.generate``; `routed` is called, in the same task, when a replica is chosen.

    Args:
        request_id: what the caller calls the conversation.
        prompt_tokens: tokens sent, those of earlier attempts included.
        resumed: an earlier attempt was interrupted.

    Attributes:
        server: address of the replica that was chosen.
    """

    def __init__(self, recorder: FlightRecorder, request_id: str, *, prompt_tokens: int, resumed: bool) -> None:
        self._recorder = recorder
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        self._resumed = resumed
        self._request = uuid.uuid4().hex
        self.server: str | None = None
        self._output: TokenOutput | None = None
        self._token: Token[RecordedAttempt | None] | None = None

    @staticmethod
    def routed(server: str) -> None:
        """The attempt of this task runs on ``server`` from now on; outside of an attempt nothing happens."""
        attempt = _CURRENT.get()
        if attempt is None:
            return
        attempt.server = server
        request_log.started(attempt._request, attempt._request_id, server, attempt._prompt_tokens)
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
        if self.server is None:
            return
        tokens = len(self._output.token_ids) if self._output is not None else 0
        request_log.finished(self._request, tokens, _ending(self._output))
        extra = self._output.extra_fields if self._output is not None else {}
        self._recorder.record(
            RequestEnded(
                at=self._recorder.now(),
                request=self._request,
                slice=self.server,
                tokens=tokens,
                finish=_finish(kind, self._output),
                cached_tokens=extra.get("num_cached_tokens"),
                version=extra.get("global_steps"),
            )
        )


def _finish(kind: type[BaseException] | None, output: TokenOutput | None) -> str:
    if kind is not None:
        return kind.__name__
    return str(output.stop_reason) if output is not None else "replica_died"


def _ending(output: TokenOutput | None) -> Ending:
    if output is None:
        return Ending.FAILED
    return Ending.INTERRUPTED if output.stop_reason in ("abort", "aborted") else Ending.COMPLETED
