"""The engine as the proxy needs it: token ids in; token ids, log-probs and weight versions out.

The ledger stands directly at this boundary: it writes down every prompt and every answer before the tree, the parsers
or the templates see them, and is what the audit compares rows against.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

from seamless_verl.trajectory.audit import LedgerEntry, ledger_entry
from seamless_verl.trajectory.generation import FinishReason, Generation, VersionSpan
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
        deadline: Unix time after which nobody waits for the answer.
        images: pictures in the prompt, in its order, as the files that were sent; none to an engine that takes none.
        on_tokens: takes tokens as they come, so that clients see them at once. An engine that cannot stream never
            calls it. What the call returns in the end repeats all of them.
    """

    request_id: str
    session_id: str
    prompt_ids: Sequence[int]
    sampling: Mapping[str, Any]
    deadline: float
    images: Sequence[bytes] = ()
    on_tokens: Callable[[TokenChunk], None] | None = None


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
    """What crossed the engine's boundary in one session.

    Of what was discarded it keeps the names only, and only the latest: a row that held one would be found out by its
    name, or by being unknown.
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
            generation_id=request.request_id,
            prompt_digest=digest,
            prompt_len=len(prompt_ids),
            generation=generation,
        )
        return generation

    def restore(self, entry: LedgerEntry) -> None:
        """Take over an entry written by an earlier process."""
        self._entries[entry.generation_id] = entry

    def entry(self, generation_id: str) -> LedgerEntry:
        return self._entries[generation_id]

    def discard(self, generation_id: str, reason: str) -> None:
        """An answer did not reach the session; it must be in no row."""
        entry = self._entries.get(generation_id)
        if entry is None:
            return
        nothing: dict[str, Any] = {"token_ids": array("i"), "log_probs": array("d"), "version_spans": ()}
        self._entries[generation_id] = replace(entry, discarded=reason, **nothing)
        self._discarded.append(generation_id)
        if len(self._discarded) > _MAX_DISCARDED:
            del self._entries[self._discarded.popleft()]


__all__ = [
    "Ability",
    "Engine",
    "EngineRefused",
    "EngineUnavailable",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "Ledger",
    "TokenChunk",
    "VersionSpan",
]
