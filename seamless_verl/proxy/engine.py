"""The engine as the proxy needs it: token ids in; token ids, log-probs and weight versions out.

The ledger stands directly at this boundary: it writes down every prompt and every answer before the tree, the parsers
or the templates see them, and is what the audit compares rows against. A gate in front of an engine is closed while
weights change; agents wait and see nothing of it.

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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from seamless_verl.trajectory.generation import Decode, Generation, PartialGeneration
from seamless_verl.trajectory.rows import LedgerEntry, ledger_entry
from seamless_verl.trajectory.tokens import TokenPath

_MAX_DISCARDED = 1000  # of one session


class Ability(Enum):
    """What some engines can do and others cannot. The proxy refuses requests for what its engine cannot do."""

    STRUCTURED_OUTPUTS = "structured_outputs"
    #: moves a grammar over the tokens that an interrupted answer already has (`GRAMMAR_PREFIX`)
    CONTINUED_GRAMMARS = "continued_grammars"
    TOP_LOGPROBS = "top_logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Tokens that have just been generated.

    Attributes:
        token_ids: one or more ids, in order; never taken back.
        log_probs: one per id.
        alternatives: per id the most likely tokens with their log-probs, best first; empty where not asked for.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    alternatives: Sequence[Sequence[tuple[int, float]]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        request_id: unique; also the generation's id in rows and audits.
        session_id: requests of one session share a prefix, so a router may want to keep them together.
        prompt_ids: the exact prompt; from a session a :class:`~seamless_verl.trajectory.tokens.TokenPath`, which tells
            what is new since the last prompt (``list()`` it where that does not matter).
        sampling: ``max_tokens`` always; ``temperature``, ``top_p``, ``top_k``, ``seed`` and ``stop`` (list of texts)
            where asked for; ``structured_outputs`` (vLLM's: ``{"json": …}`` or ``{"structural_tag": …}``) and
            ``logprobs`` (number of alternatives per token) only where the engine has the :class:`Ability`;
            ``extra_args`` as :class:`~seamless_verl.trajectory.generation.PartialGeneration` writes them.
        deadline: Unix time after which no client waits for the answer.
        images: pictures in the prompt, in its order, as the files that were sent; none to an engine that takes none.
        on_tokens: takes tokens as they come, so that clients see them at once. An engine that cannot stream never
            calls it. What the call returns in the end repeats all of them.
        resume_from: tokens of this answer that were generated earlier. The engine continues after them and returns all.
            With a finish reason other than ``ABORTED`` they are the whole answer, if the budget has room for it.
        on_progress: called with new tokens as soon as they would survive the loss of the replica: when the engine is
            interrupted, and under the trainer after every so many tokens. The last ones come with the result only.
    """

    request_id: str
    session_id: str
    prompt_ids: Sequence[int]
    sampling: Mapping[str, Any]
    deadline: float
    images: Sequence[bytes] = ()
    on_tokens: Callable[[TokenChunk], None] | None = None
    resume_from: Generation | None = None
    on_progress: Callable[[Generation], None] | None = None


class EngineRefused(Exception):
    """The engine will never take this request, e.g. a JSON schema that it cannot compile."""


class EngineUnavailable(Exception):
    """No engine can take the request now; trying again later may help."""


class Engine(Protocol):
    """Continues prompts. Weight updates, preemption and migration are its business and invisible here."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """The whole continuation. Cancelling the call frees the engine.

        Raises:
            EngineUnavailable: try again later.
            EngineRefused: do not.
        """
        ...


class Ledger:
    """What crossed the engine's boundary in one session; the audit compares rows with it.

    Of discarded answers it keeps the ids only, and only the latest: the audit reports a row with one of these, and a
    row with an id that the ledger does not know.
    """

    def __init__(self) -> None:
        self._entries: dict[str, LedgerEntry] = {}
        self._discarded: deque[str] = deque()

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        return tuple(self._entries.values())

    async def generate(self, engine: Engine, request: GenerationRequest, prompt_ids: TokenPath) -> Generation:
        """Call the engine and write down both sides of the call.

        Args:
            prompt_ids: as the tree has them, pictures told apart (:mod:`seamless_verl.trajectory.tokens`).
        """
        digest = prompt_ids.digest()
        generation = await engine.generate(request)
        self._entries[request.request_id] = ledger_entry(
            generation_id=request.request_id, prompt_digest=digest, prompt_len=len(prompt_ids), generation=generation
        )
        return generation

    def restore(self, entry: LedgerEntry) -> None:
        """Take over an entry written by an earlier process."""
        self._entries[entry.generation_id] = entry

    def entry(self, generation_id: str) -> LedgerEntry:
        return self._entries[generation_id]

    def discard(self, generation_id: str, reason: str) -> bool:
        """An answer did not reach the session; it must be in no row. False: the engine never finished it."""
        entry = self._entries.get(generation_id)
        if entry is None:
            return False
        nothing: dict[str, Any] = {"token_ids": array("i"), "log_probs": array("d"), "version_spans": ()}
        self._entries[generation_id] = replace(entry, discarded=reason, **nothing)
        self._discarded.append(generation_id)
        if len(self._discarded) > _MAX_DISCARDED:
            del self._entries[self._discarded.popleft()]
        return True


class Gate:
    """Open at first, unless it was closed when an earlier process ended.

    Args:
        stamp: told of the weight version before the gate opens with a new one; an OSError keeps the gate closed.
        paused: file that is there while the gate is closed; None for a gate that no other process remembers.
    """

    def __init__(self, stamp: Callable[[int], None], paused: Path | None = None) -> None:
        self._stamp = stamp
        self._paused = paused
        self._is_open = asyncio.Event()
        if paused is None or not paused.exists():
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
        """Let nothing through any more; whether all that was inside ended within ``timeout_s``.

        Raises:
            OSError: a process started after a crash would not know that it is closed, so it stays open.
        """
        if self._paused is not None:
            self._paused.touch()
        self._is_open.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._is_quiet.wait(), timeout_s)
        return self._is_quiet.is_set()

    def open(self, version: int | None = None) -> None:
        """Let everything through; from now on under weight version ``version``, where one is given."""
        if version is not None:
            self._stamp(version)
        if self._paused is not None:
            self._paused.unlink(missing_ok=True)
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
        # Tokens of an attempt that starts anew when interrupted must not be streamed.
        is_given_up = "structured_outputs" in request.sampling and not self._moves_grammars
        on_tokens = None if is_given_up else request.on_tokens
        num_shown = 0

        def show(chunk: TokenChunk) -> None:
            nonlocal num_shown
            num_shown += len(chunk.token_ids)
            assert on_tokens is not None
            on_tokens(chunk)

        if request.resume_from is not None:
            if partial.resume(request.resume_from):
                return partial.generation()
            if on_tokens is not None:
                show(TokenChunk(token_ids=request.resume_from.token_ids, log_probs=request.resume_from.log_probs))
        num_attempts = 0
        while True:
            num_kept = len(partial.token_ids)
            attempt = replace(
                request,
                request_id=f"{request.request_id}-{num_attempts}" if num_attempts else request.request_id,
                prompt_ids=TokenPath.of(request.prompt_ids).then(array("i", partial.token_ids)),
                sampling=partial.sampling(),
                on_tokens=None if on_tokens is None else show,
                resume_from=None,
                on_progress=None,
            )
            num_attempts += 1
            try:
                async with self._gate:
                    generation = await self._engine.generate(attempt)
            except EngineUnavailable:
                if self._gate.is_open or num_shown > num_kept:
                    raise
                continue  # the engine went down while its weights change; it is back when the gate opens
            if partial.add(generation):
                return partial.generation()
            if request.on_progress is not None and (progress := partial.progress()) is not None:
                request.on_progress(progress)
            if self._gate.is_open and len(partial.token_ids) == num_kept:
                return partial.generation()  # the engine aborts by itself without a token: asking again is no use
