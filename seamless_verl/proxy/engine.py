"""The engine as the proxy needs it: token ids in; token ids, log-probs and weight versions out.

The ledger stands directly at this boundary: it writes down every prompt and every answer before the tree, the parsers
or the templates see them, and is what the audit compares rows against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from seamless_verl.trajectory.audit import LedgerEntry, digest_ids, ledger_entry
from seamless_verl.trajectory.generation import FinishReason, Generation, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        request_id: unique; also the generation's id in rows and audits.
        session_id: requests of one session share a prefix, so a router may want to keep them together.
        prompt_ids: the exact prompt; a sequence of int (an ``array``, cheap to pickle; ``list()`` it where needed).
        sampling: ``max_tokens`` always; ``temperature``, ``top_p``, ``top_k``, ``seed`` and ``stop`` (list of texts)
            where asked for.
        deadline: Unix time after which nobody waits for the answer.
    """

    request_id: str
    session_id: str
    prompt_ids: Sequence[int]
    sampling: Mapping[str, Any]
    deadline: float


class EngineUnavailable(Exception):
    """No engine can take the request now; trying again later may help."""


class Engine(Protocol):
    """Continues prompts. Weight updates, preemption and migration are its business and invisible here."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """The whole continuation. Cancelling the call frees the engine.

        Raises:
            EngineUnavailable: try again later.
        """
        ...


class Ledger:
    """What crossed the engine's boundary in one session."""

    def __init__(self) -> None:
        self._entries: dict[str, LedgerEntry] = {}

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        return tuple(self._entries.values())

    async def generate(self, engine: Engine, request: GenerationRequest) -> Generation:
        """Call the engine and write down both sides of the call."""
        digest, length = digest_ids(request.prompt_ids), len(request.prompt_ids)
        generation = await engine.generate(request)
        entry = ledger_entry(generation_id=request.request_id, prompt_ids=(), generation=generation)
        self._entries[request.request_id] = replace(entry, prompt_digest=digest, prompt_len=length)
        return generation

    def restore(self, entry: LedgerEntry) -> None:
        """Take over an entry written by an earlier process."""
        self._entries[entry.generation_id] = entry

    def entry(self, generation_id: str) -> LedgerEntry:
        return self._entries[generation_id]

    def discard(self, generation_id: str, reason: str) -> None:
        """An answer did not reach the session; it must be in no row."""
        entry = self._entries.get(generation_id)
        if entry is not None:
            self._entries[generation_id] = replace(entry, discarded=reason)


__all__ = [
    "Engine",
    "EngineUnavailable",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "Ledger",
    "VersionSpan",
]
