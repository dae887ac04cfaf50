"""What an engine returned for one prompt, in one attempt or in several, and what it leaves where an attempt fails.

Invariant: one log-prob and one weight version per token, in the order in which the engine produced them.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import blake2b
from typing import Any

from seamless_verl.errors import SeamlessError

Decode = Callable[[Sequence[int]], str]
# In ``extra_args``: over how many tokens of the prompt's end the engine is to move the grammar first.
GRAMMAR_PREFIX = "seamless_grammar_prefix"
_MOST_UNFINISHED = 64  # answers of one session; the oldest unclaimed one is dropped


class TrajectoryError(SeamlessError):
    """A move that the session's state does not allow; the message tells the story."""


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """``num_tokens`` tokens in a row that were generated under weight version ``version``."""

    version: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Answer of the engine, token by token.

    Attributes:
        token_ids: generated ids, including the stop token where one was generated.
        log_probs: behaviour log-probability of each, in nats.
        version_spans: weight versions in order; the lengths add up to ``len(token_ids)``.
        finish_reason: ``ABORTED``: the engine stopped before the end of the answer.
        alternatives: per token the most likely ``(id, log-prob)`` pairs, best first. Shown to the client, not recorded;
            empty where not asked for.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    alternatives: Sequence[Sequence[tuple[int, float]]] = ()

    def after(self, start: int) -> Generation:
        """What lies behind its first ``start`` tokens."""
        spans, done = [], 0
        for span in self.version_spans:
            left = done + span.num_tokens - max(start, done)
            done += span.num_tokens
            if left > 0:
                spans.append(VersionSpan(version=span.version, num_tokens=left))
        rest = {name: getattr(self, name)[start:] for name in ("token_ids", "log_probs", "alternatives")}
        return replace(self, version_spans=tuple(spans), **rest)

    def check(self, story: str) -> None:
        """Refuse a generation that contradicts itself; ``story`` names whose it is."""
        num_tokens = len(self.token_ids)
        if len(self.log_probs) != num_tokens:
            raise TrajectoryError(f"{story}: {num_tokens} tokens but {len(self.log_probs)} log-probs")
        covered = sum(span.num_tokens for span in self.version_spans)
        if covered != num_tokens or any(span.num_tokens <= 0 for span in self.version_spans):
            raise TrajectoryError(f"{story}: {num_tokens} tokens but weight versions for {covered}")
        if num_tokens and min(self.token_ids) < 0:
            raise TrajectoryError(f"{story}: negative token id {min(self.token_ids)}")
        if not math.isfinite(sum(self.log_probs)):
            raise TrajectoryError(f"{story}: a log-prob is not finite")


class PartialGeneration:
    """One answer generated in several attempts, because weights changed or a replica was needed elsewhere.

        resume() ─▶ sampling() ─▶ attempt ─add─▶ interrupted: its tokens are kept, sampling() asks for the rest
                                     │        └▶ complete: generation()
                                     └─part─▶ tokens told so far ─break_off─▶ the replica died: these are kept

    `progress` returns the tokens that are safe so far. Here an attempt is one call of the engine.

    The answer is one that a single attempt could have given: the token budget is counted over all attempts; the first
    stop string ends the answer even where it lies across two attempts, which neither alone can see; noise drawn from a
    seed is not drawn twice; every token keeps its log-prob and its weight version.

    Under a grammar an interrupted attempt goes on only where the engine moves the grammar over the kept tokens first;
    it is given up otherwise. Engines start grammars at the first token they generate themselves, so that a
    continuation would be forced to begin the text again in its middle.

    Source: SeamlessFlow (arXiv 2508.11553), data plane.

    Args:
        sampling: what the whole answer was asked for; ``max_tokens``, ``seed``, ``stop`` and ``structured_outputs``
            are understood, the rest is handed on.
        decode: token ids to text; without it, stop strings across a seam are not found.
        moves_grammars: the engine understands `GRAMMAR_PREFIX`.
    """

    def __init__(self, sampling: Mapping[str, Any], decode: Decode | None, *, moves_grammars: bool = False) -> None:
        self._sampling = dict(sampling)
        self._is_forced = self._sampling.get("structured_outputs") is not None
        self._moves_grammars = moves_grammars
        self._decode = decode
        self._log_probs: list[float] = []
        self._alternatives: list[Sequence[tuple[int, float]]] = []
        self._versions: list[VersionSpan] = []
        self._finish = FinishReason.ABORTED
        self._parts: list[Generation] = []  # of the attempt under way
        self._num_reported = 0
        self.token_ids: list[int] = []

    def sampling(self) -> dict[str, Any]:
        """What the next attempt is asked for."""
        asked = dict(self._sampling)
        num_kept = len(self.token_ids)
        if num_kept and "max_tokens" in asked:
            asked["max_tokens"] -= num_kept
        if num_kept and self._is_forced:
            asked["extra_args"] = {**(asked.get("extra_args") or {}), GRAMMAR_PREFIX: num_kept}
        if num_kept and asked.get("seed") is not None:
            # The same seed again would give token ``num_kept + i`` the noise that token ``i`` has had.
            mixed = blake2b(f"{asked['seed']}:{num_kept}".encode(), digest_size=4).digest()
            asked["seed"] = int.from_bytes(mixed, "little") & 0x7FFFFFFF
        return asked

    def resume(self, kept: Generation) -> bool:
        """Start with tokens that were generated earlier, as far as the budget goes; whether the answer is complete."""
        is_whole = kept.finish_reason is not FinishReason.ABORTED and len(kept.token_ids) <= self._most
        self.add(kept if is_whole else replace(kept, finish_reason=FinishReason.ABORTED))
        end = None if is_whole else self._end_of_stop(0)  # the process that died may not have looked
        if end is not None:
            self._finish = FinishReason.STOP
        self._cut(min(len(self.token_ids) if end is None else end, self._most))
        self._num_reported = len(self.token_ids)
        return self._finish is not FinishReason.ABORTED

    @property
    def _most(self) -> int:
        return int(self._sampling.get("max_tokens", sys.maxsize))

    def part(self, tokens: Generation) -> None:
        """Note tokens that the attempt under way has made; it continues, and `add` brings them again."""
        self._parts.append(tokens)

    def break_off(self) -> bool:
        """The replica of the attempt under way died: keep its noted tokens; whether the answer is complete."""
        for tokens in tuple(self._parts):
            if self.add(replace(tokens, finish_reason=FinishReason.ABORTED)):
                break
        return self._finish is not FinishReason.ABORTED

    def progress(self) -> Generation | None:
        """Tokens that are kept, or would be after `break_off`, and that no earlier call returned; None without any."""
        whole, parts = self.generation(), tuple(self._parts)
        if self._is_forced and not self._moves_grammars:
            parts = ()
        whole = replace(
            whole,
            token_ids=[*whole.token_ids, *(token for part in parts for token in part.token_ids)],
            log_probs=[*whole.log_probs, *(log_prob for part in parts for log_prob in part.log_probs)],
            version_spans=tuple(_joined(whole.version_spans, [span for part in parts for span in part.version_spans])),
            alternatives=(),
        )
        progress = whole.after(self._num_reported)
        self._num_reported = max(self._num_reported, len(whole.token_ids))
        return progress if progress.token_ids else None

    def add(self, attempt: Generation) -> bool:
        """Append what an attempt returned; whether the answer is complete."""
        self._parts.clear()
        num_kept = len(self.token_ids)
        self._finish = attempt.finish_reason
        is_interrupted = attempt.finish_reason is FinishReason.ABORTED
        if is_interrupted and self._is_forced and not self._moves_grammars:
            return False
        self.token_ids.extend(attempt.token_ids)
        self._log_probs.extend(attempt.log_probs)
        self._alternatives.extend(attempt.alternatives)
        self._versions = _joined(self._versions, attempt.version_spans)
        end = self._end_of_stop(num_kept) if num_kept else None
        if end is not None:
            self._cut(end)
            self._finish = FinishReason.STOP
        elif is_interrupted and len(self.token_ids) >= self._most:
            self._finish = FinishReason.LENGTH
        return self._finish is not FinishReason.ABORTED

    def cut_short(self) -> bool:
        """End the answer where it is, by length; whether it is complete (an empty one still gets one token)."""
        self._sampling["max_tokens"] = max(1, len(self.token_ids))
        if self.token_ids and self._finish is FinishReason.ABORTED:
            self._finish = FinishReason.LENGTH
        return self._finish is not FinishReason.ABORTED

    def generation(self) -> Generation:
        """The answer so far; ``ABORTED`` while it is not complete."""
        return Generation(
            token_ids=self.token_ids,
            log_probs=self._log_probs,
            version_spans=tuple(self._versions),
            finish_reason=self._finish,
            alternatives=self._alternatives,
        )

    def _end_of_stop(self, num_kept: int) -> int | None:
        """Length of the answer up to the token that completes the first stop string; None where there is none.

        Only a string across the seam is looked for: one within an attempt has ended that attempt.
        """
        stops, decode = self._sampling.get("stop") or (), self._decode
        if not stops or decode is None:
            return None

        def has_stop(length: int) -> bool:
            text = decode(self.token_ids[:length])
            return any(stop in text for stop in stops)

        low, high = num_kept, len(self.token_ids)
        if not has_stop(high):
            return None
        while high - low > 1:  # low has none (it was asked to go on), high has one
            middle = (low + high) // 2
            low, high = (low, middle) if has_stop(middle) else (middle, high)
        return high

    def _cut(self, length: int) -> None:
        """Drop all beyond ``length`` tokens: without the seam it would not have been generated."""
        del self.token_ids[length:], self._log_probs[length:], self._alternatives[length:]
        left, kept = length, []
        for span in self._versions:
            taken = min(left, span.num_tokens)
            if taken:
                kept.append(VersionSpan(version=span.version, num_tokens=taken))
            left -= taken
        self._versions = kept


def _joined(spans: Sequence[VersionSpan], more: Sequence[VersionSpan]) -> list[VersionSpan]:
    joined = list(spans)
    for span in more:
        if joined and joined[-1].version == span.version:
            joined[-1] = VersionSpan(version=span.version, num_tokens=joined[-1].num_tokens + span.num_tokens)
        else:
            joined.append(span)
    return joined


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedPart:
    """Progress of one answer: some of its tokens, in a row. With a finish reason other than ``ABORTED``, the last ones.

    Attributes:
        answer: the generation's id; an attempt that claims the answer keeps it.
        digest: names the answer by its request (`answer_digest`).
        prompt: digest of the prompt's tokens.
        start: how many tokens of the answer come before these.
    """

    answer: str
    digest: bytes
    prompt: bytes
    start: int
    tokens: Generation


class UnfinishedAnswers:
    """Progress of the answers of one session that are not recorded yet, for the next attempt at the same request.

    ::

        progressed ─▶ kept here and in the journal ─▶ the answer is recorded: release forgets its progress
                         └ its attempt failed, or the process died ─▶ claimed by the next attempt at the request
        answers of a dead rollout worker's agents (`left_sessions`) ──┘

    Invariants: what is claimed has the prompt that it was generated for, token for token; nothing is claimed twice.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[UnfinishedPart, PartialGeneration]] = OrderedDict()
        self._whole: set[str] = set()
        self._claimed: set[str] = set()

    @property
    def num_tokens(self) -> int:
        return sum(len(partial.token_ids) for _, partial in self._known.values())

    def add(self, part: UnfinishedPart) -> None:
        """Add a part; one that does not follow the known tokens is ignored, and so are all after it."""
        first, partial = self._known.get(part.answer) or (part, PartialGeneration({}, None))
        if part.start != len(partial.token_ids):
            return
        partial.resume(part.tokens)
        self._known[part.answer] = first, partial
        if part.tokens.finish_reason is not FinishReason.ABORTED:
            self._whole.add(part.answer)
        if len(self._known) - len(self._whole) > _MOST_UNFINISHED:
            needed = self._claimed | self._whole
            self._known.pop(next((answer for answer in self._known if answer not in needed), ""), None)

    def progressed(self, answer: str, digest: bytes, prompt: bytes, tokens: Generation) -> UnfinishedPart:
        """Keep more tokens of an answer; returns them as a part, to be written to the journal."""
        known = self._known.get(answer)
        start = len(known[1].token_ids) if known else 0
        part = UnfinishedPart(answer=answer, digest=digest, prompt=prompt, start=start, tokens=tokens)
        self.add(part)
        return part

    def claim(self, digest: bytes, prompt: bytes, *, new: str, is_whole: bool = False) -> tuple[str, Generation | None]:
        """Id of an answer to generate, and the tokens known of it; no other attempt can claim it until `release`.

        Args:
            new: the id, if no known answer can be claimed.
            is_whole: generate the whole answer; claim no known one.
        """
        for answer, (first, partial) in self._known.items():
            if (first.digest, first.prompt) == (digest, prompt) and answer not in self._claimed and not is_whole:
                self._claimed.add(answer)
                return answer, partial.generation().after(0)  # a copy: what is known grows
        self._claimed.add(new)
        return new, None

    def release(self, answer: str, *, is_over: bool) -> None:
        """Its attempt has ended. ``is_over``: the engine finished the answer, so its progress is of no more use."""
        self._claimed.discard(answer)
        if is_over:
            self._known.pop(answer, None)
            self._whole.discard(answer)
