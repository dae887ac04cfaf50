"""The gate in front of an engine: closed while weights change; agents wait and see nothing of it.

::

    POST /pause                 no attempt starts any more; answers once those under way have ended
    (new weights are loaded)
    POST /resume {"version": 8} waiting requests go on, their tokens are stamped with version 8

An attempt that the engine aborts meanwhile (vLLM's ``/pause``, a restart) is continued behind the gate with the tokens
that it has (:mod:`seamless_verl.trajectory.generation`). Everything is an event; a session's deadline bounds the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Callable
from dataclasses import replace

from seamless_verl.proxy.engine import Engine, EngineUnavailable, Generation, GenerationRequest, TokenChunk
from seamless_verl.trajectory.generation import Decode, PartialGeneration
from seamless_verl.trajectory.tokens import TokenPath


class Gate:
    """Open at first.

    Args:
        stamp: told of the weight version before the gate opens with a new one; an OSError keeps the gate closed.
    """

    def __init__(self, stamp: Callable[[int], None]) -> None:
        self._stamp = stamp
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._num_inside = 0

    @property
    def is_open(self) -> bool:
        return self._is_open.is_set()

    @property
    def num_inside(self) -> int:
        """Attempts that are at the engine."""
        return self._num_inside

    async def close(self, timeout_s: float) -> bool:
        """Let nothing through any more; whether all that was inside ended within ``timeout_s``."""
        self._is_open.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._is_quiet.wait(), timeout_s)
        return self._is_quiet.is_set()

    def open(self, version: int | None = None) -> None:
        """Let everything through; from now on under weight version ``version``, where one is given."""
        if version is not None:
            self._stamp(version)
        self._is_open.set()

    async def __aenter__(self) -> None:
        """Wait until the gate is open, then be inside."""
        while not self._is_open.is_set():
            await self._is_open.wait()
        self._num_inside += 1
        self._is_quiet.clear()

    async def __aexit__(self, *_: object) -> None:
        self._num_inside -= 1
        if not self._num_inside:
            self._is_quiet.set()


class GatedEngine:
    """An engine behind a gate: what is interrupted goes on when the gate opens.

    Args:
        decode: token ids to text.
        moves_grammars: the engine continues an answer under a grammar; it is otherwise started anew.
    """

    def __init__(self, engine: Engine, gate: Gate, decode: Decode, *, moves_grammars: bool) -> None:
        self._engine = engine
        self._gate = gate
        self._decode = decode
        self._moves_grammars = moves_grammars

    async def generate(self, request: GenerationRequest) -> Generation:
        """See :class:`~seamless_verl.proxy.engine.Engine`."""
        partial = PartialGeneration(request.sampling, self._decode, moves_grammars=self._moves_grammars)
        # An interrupted attempt that is given up must not have been shown.
        is_given_up = "structured_outputs" in request.sampling and not self._moves_grammars
        on_tokens = None if is_given_up else request.on_tokens
        num_shown = 0

        def show(chunk: TokenChunk) -> None:
            nonlocal num_shown
            num_shown += len(chunk.token_ids)
            assert on_tokens is not None
            on_tokens(chunk)

        num_attempts = 0
        while True:
            num_kept = len(partial.token_ids)
            attempt = replace(
                request,
                request_id=f"{request.request_id}-{num_attempts}" if num_attempts else request.request_id,
                prompt_ids=TokenPath.of(request.prompt_ids).then(array("i", partial.token_ids)),
                sampling=partial.sampling(),
                on_tokens=None if on_tokens is None else show,
            )
            num_attempts += 1
            try:
                async with self._gate:
                    generation = await self._engine.generate(attempt)
            except EngineUnavailable:
                if self._gate.is_open or num_shown > num_kept:
                    raise
                continue  # it went down while its weights change; the gate tells when it is back
            if partial.add(generation):
                return partial.generation()
            if self._gate.is_open and len(partial.token_ids) == num_kept:
                return partial.generation()  # aborted for a reason of the engine's own, and nothing is won by asking
