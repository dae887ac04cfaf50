"""Sessions of one proxy: who may talk, how much, until when.

::

    OPEN ──close──▶ CLOSED ──rows handed over──▶ forgotten          only OPEN takes requests
      └──deadline─▶ EXPIRED ──close──▶ CLOSED

A session that nobody uses may let its turns go (:meth:`Session.unload`); the journal brings them back.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Container, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any, TypeVar

from seamless_verl.proxy.calls import Answer, ApiError, Call, bad_request
from seamless_verl.proxy.engine import Ledger
from seamless_verl.proxy.session.attempts import Attempt, AttemptBoard, Continuations, State, answer_digest
from seamless_verl.proxy.text.pictures import ImageTable
from seamless_verl.trajectory.generation import UnfinishedAnswers
from seamless_verl.trajectory.messages import Transcript
from seamless_verl.trajectory.tree import SessionTree

TASK = "task"
"""Where the trainer notes in `SessionSpec.metadata` what the data calls the task."""
RESERVED = "reserved"
"""Where it notes there for which weight version the prompt's place is reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """What the trainer asks for when it opens a session.

    Attributes:
        group: prompt uid; sessions of one group answer the same task.
        index: number of this session in its group; mixed with every seed.
        deadline_s: seconds from opening after which the session takes no more requests.
        max_turns, max_tokens: budgets of the whole session, in answers and in generated tokens.
        max_model_len: prompt and answer of one turn together, in tokens; None for the model's own limit.
        max_parallel: requests of this session that may be in flight at once.
        sampling: parameters the trainer decides, whatever the agent asks for: ``temperature``, ``top_p``, ``top_k``,
            ``seed``, ``max_tokens`` (a cap per turn). A ``seed`` is mixed with each request and a group's ``index``, so
            that two turns, or two rollouts, never share their noise.
        metadata: the trainer's own notes, JSON-compatible.
    """

    group: str = ""
    index: int = 0
    deadline_s: float = 3600.0
    max_turns: int = 1000
    max_tokens: int = 1 << 30
    max_model_len: int | None = None
    max_parallel: int = 16
    sampling: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


_T = TypeVar("_T")
_BYTES_PER_TOKEN = 40  # id, log-prob, and both again in the ledger
_BYTES_PER_TURN = 8_000  # records, digests
_BYTES_PER_CHAR = 3  # as sent, and in messages made of an earlier request
_BYTES_PER_MESSAGE = 1_500  # both objects, and their digests


class SessionState(Enum):
    OPEN = "open"
    EXPIRED = "expired"
    CLOSED = "closed"


class Session:
    """One attempt at one task: its tree, its ledger, its budgets, what it has in flight.

    Attributes:
        ignored: how often preferences of requests could not be honoured, by name; of this process.
        is_resident: tree, ledger and answers are in memory; not at first of one that an earlier process left.
        is_gone: it was dropped for good; requests that still hold it are its last.
        num_users: requests that are looking at it right now; it is not unloaded under them.
        num_arriving: requests whose bodies are being read.
        damage: why its journal could not be read to the end, "" when it could.
    """

    def __init__(
        self, *, session_id: str, key_digest: bytes, spec: SessionSpec, opened_at: float, is_resident: bool = True
    ) -> None:
        self.id = session_id
        self.key_digest = key_digest
        self.spec = spec
        self.opened_at = opened_at
        self.deadline = opened_at + spec.deadline_s
        self.state = SessionState.OPEN
        self.tree = SessionTree()
        self.ledger = Ledger()
        self.images = ImageTable()
        self.num_in_flight = 0
        self.num_generated = 0
        self.num_reserved = 0
        self.num_started = 0
        self.reward: float | None = None
        self.rewards: dict[str, float] = {}
        self.ignored = Counter[str]()
        self.recent = RecentTranscripts()
        self.board = AttemptBoard(spec.max_parallel)
        self.continuations = Continuations()
        self.unfinished = UnfinishedAnswers()
        self._released = asyncio.Event()

        self.is_resident = is_resident
        self.is_gone = False
        self.num_users = 0
        self.num_arriving = 0
        self.damage = ""
        self._undelivered: frozenset[str] | None = None

    @property
    def is_idle(self) -> bool:
        return not self.num_users and not self.num_in_flight

    @property
    def weight_bytes(self) -> int:
        """About how much memory its turns take."""
        tokens, turns = self.tree.num_stored_tokens + self.unfinished.num_tokens, self.tree.num_turns
        kept = self.images.num_bytes + self.board.num_bytes + self.recent.num_bytes + self.continuations.num_chars
        return _BYTES_PER_TOKEN * tokens + _BYTES_PER_TURN * turns + kept

    def unload(self) -> None:
        """Drop the turns from memory, but remember which answers may not have arrived: a retry gets these again."""
        self._undelivered = self.board.undelivered()
        self.tree, self.ledger, self.images = SessionTree(), Ledger(), ImageTable()
        self.recent, self.board = RecentTranscripts(), AttemptBoard(self.spec.max_parallel)
        self.continuations, self.unfinished = Continuations(), UnfinishedAnswers()
        self.is_resident = False

    def loaded(self, answers: Iterable[Answer], continued: Container[str]) -> None:
        """Take over the answers after the journal has put the turns back.

        Args:
            answers: in the order in which they were recorded; those of one request follow each other.
            continued: ids of those that a later request goes on from, so that they were delivered.
        """
        answers = list(answers)
        self.continuations = Continuations(answers)
        requests: list[list[Answer]] = []
        for answer in answers:
            last = requests[-1] if requests else []
            if last and answer.digest == answer_digest(last[0].digest, len(last)):
                last.append(answer)
            else:
                requests.append([answer])
        for request in requests:
            state = State.DELIVERED
            if any(answer.id in continued for answer in request):
                state = State.CONTINUED
            elif self._undelivered is None or request[0].id in self._undelivered:
                # After an unload it is known which answers arrived. Of an earlier process that is not known.
                state = State.ANSWERED
            self.board.restore(request, state)
        self.num_generated = sum(len(answer.tokens) for answer in self.tree.answers)
        self.num_started = max(self.num_started, self.tree.num_turns)
        self.is_resident = True

    def take_reward(self, reward: float | None, rewards: Mapping[str, float]) -> None:
        """Note what is known of the outcome; what is left out stays."""
        if reward is not None:
            self.reward = reward
        self.rewards.update(rewards)

    def view(self) -> dict[str, Any]:
        """What people want to see of it: no keys, no token lists."""
        tree = self.tree
        return {
            "id": self.id,
            "group": self.spec.group,
            "index": self.spec.index,
            "state": self.state.value,
            "opened_at": self.opened_at,
            "deadline": self.deadline,
            "metadata": dict(self.spec.metadata),
            "reward": self.reward,
            "rewards": self.rewards,
            "in_flight": self.num_in_flight,
            "generated_tokens": self.num_generated,
            "stored_tokens": tree.num_stored_tokens,
            "kinds": {kind.value: count for kind, count in tree.kinds.items()},
            "ignored": dict(self.ignored),
            "drift": {reason.value: count for reason, count in tree.drift.items()},
            "turns": [
                {
                    "ordinal": segment.ordinal,
                    "generation_id": turn.generation_id,
                    "parent": segment.parent_ordinal,
                    "kind": segment.kind.value,
                    "reasons": [reason.value for reason in segment.reasons],
                    "detail": turn.detail,
                    "prompt_tokens": segment.end - len(segment.tokens),
                    "generated_tokens": len(segment.tokens),
                    "versions": [[span.version, span.num_tokens] for span in turn.version_spans],
                    "finish_reason": turn.finish_reason.value,
                    "is_leaf": segment.is_leaf,
                }
                for segment in tree.answers
                if (turn := segment.turn) is not None
            ],
        }

    def state_at(self, now: float) -> SessionState:
        """The state, after looking at the clock."""
        if self.state is SessionState.OPEN and now >= self.deadline:
            self.state = SessionState.EXPIRED
        return self.state

    def check_open(self, now: float) -> None:
        """Raise unless the session takes requests."""
        if self.damage:
            story = f"Session {self.id} cannot go on: {self.damage}. Closing it gives the turns before that."
            raise ApiError(409, "session_damaged", story)
        self.state_at(now)
        if self.state is SessionState.EXPIRED:
            late = f"Its deadline of {self.spec.deadline_s:g} s has passed."
            raise ApiError(409, "session_expired", f"Session {self.id} is over. {late}")
        if self.state is SessionState.CLOSED:
            raise ApiError(409, "session_closed", f"Session {self.id} is closed; its trajectory was handed over.")

    def check_budget(self, num: int) -> None:
        """Raise when ``num`` more turns would exceed a budget or the session's share of the engine."""
        spec = self.spec
        if num > spec.max_parallel:
            raise bad_request(f"This session may have {spec.max_parallel} answers in flight.", param="n")
        if self.tree.num_turns + self.num_in_flight + num > spec.max_turns:
            raise ApiError(429, "turn_budget_exhausted", f"Session {self.id} has used its {spec.max_turns} turns.")
        if self.num_generated >= spec.max_tokens:
            raise self._out_of_tokens()
        if self.num_in_flight + num > spec.max_parallel:
            story = f"Session {self.id} has {self.num_in_flight} requests in flight; {spec.max_parallel} are its limit."
            raise ApiError(429, "too_many_requests", story, retry_after_s=1.0)

    async def reserve(self, attempt: Attempt, wanted: int) -> int:
        """Set up to ``wanted`` tokens of the budget aside for each answer of an attempt; returns how many for each.

        Answers in flight cannot overshoot the budget that way. All answers of a request get theirs at once: none holds
        tokens while it waits for another. While other attempts hold what is left, this waits; they rarely use it all.

        Raises:
            ApiError: 429, not enough is left and no other attempt holds any.
        """
        while True:
            left = (self.spec.max_tokens - self.num_generated - self.num_reserved) // attempt.num_answers
            if left > 0:
                break
            if not self.num_reserved:
                raise self._out_of_tokens()
            await self._released.wait()
        granted = min(wanted, left)
        attempt.num_reserved = granted * attempt.num_answers
        self.num_reserved += attempt.num_reserved
        return granted

    def release(self, attempt: Attempt) -> None:
        """Take back what :meth:`reserve` granted; what was used of it counts as generated by then."""
        self.num_reserved -= attempt.num_reserved
        attempt.num_reserved = 0
        self._released.set()
        self._released = asyncio.Event()

    def decide_sampling(self, call: Call, digest: bytes) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
        """What the engine is asked for each answer, and which of the agent's wishes the trainer overrode.

        The answers differ in their seeds only, where there are any.

        Args:
            digest: names the request.
        """
        decided = self.spec.sampling
        sampling, overrides = dict(call.sampling), []
        for key, value in decided.items():
            if key == "max_tokens" and sampling.get(key, value) <= value:
                sampling.setdefault(key, value)  # a cap, not a wish
                continue
            if key in call.sampling and call.sampling[key] != value:
                overrides.append(f"{key}={value}")
            sampling[key] = value
        if call.thinking_budget is not None:
            overrides.append("thinking.budget_tokens=max_tokens")  # reasoning and answer share one limit
        overrides += [f"{name}=ignored" for name in call.preferences]
        if call.logprobs:
            sampling["logprobs"] = call.logprobs
        each = [dict(sampling) for _ in range(call.n)]
        member = (self.spec.index,) if self.spec.group else ()  # or the rollouts of a group would be copies of one
        if "seed" in sampling and "seed" not in decided and member:
            overrides.append("seed=mixed")
        for number, asked in enumerate(each):
            if "seed" in decided:
                name = answer_digest(digest, number).hex()
                asked["seed"] = _mixed(decided["seed"], *member, name, self.num_started + number)
            elif "seed" in sampling and member:
                asked["seed"] = _mixed(sampling["seed"], *member, number)
            elif "seed" in sampling:
                asked["seed"] += number
        return each, tuple(overrides)

    async def until_deadline(self, attempt: Attempt, work: Coroutine[Any, Any, _T]) -> _T:
        """What ``work`` for an attempt returns.

        Raises:
            ApiError: 504, the session's deadline came first.
        """
        try:
            result = await asyncio.wait_for(work, timeout=max(0.0, self.deadline - time.time()))
        except asyncio.TimeoutError:
            story = f"Session {self.id} reached its deadline of {self.spec.deadline_s:g} s."
            raise ApiError(504, "deadline_exceeded", story) from None
        if attempt.state is State.CANCELLED:
            # `wait_for` forgets a cancellation that comes in the step in which the work ends.
            # Remove with Python < 3.12.
            raise asyncio.CancelledError
        return result

    def _out_of_tokens(self) -> ApiError:
        return ApiError(429, "token_budget_exhausted", f"Session {self.id} has used its {self.spec.max_tokens} tokens.")


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
            num_chars=num_chars + sum(message.num_chars for message in transcript.messages[num_known:]),
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


def _mixed(*parts: object) -> int:
    mixed = ":".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(mixed, digest_size=4).digest(), "little") & 0x7FFFFFFF


def _common_length(one: list[Mapping[str, Any]], other: list[Mapping[str, Any]]) -> int:
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(at for at in range(shorter) if one[at] != other[at])
