"""Sessions of one proxy: who may talk, how much, until when.

::

    OPEN ──close──▶ CLOSED ──rows handed over──▶ forgotten          only OPEN takes requests
      └──deadline─▶ EXPIRED ──close──▶ CLOSED

A session that nobody uses may let its turns go (:meth:`Session.unload`); the journal brings them back.

Keys are kept as digests only. Looking a key up compares digests, whose bytes an attacker cannot steer, and the final
comparison takes constant time.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from typing import Any

from seamless_verl.proxy.call_errors import ApiError, bad_request
from seamless_verl.proxy.engine import Ledger
from seamless_verl.proxy.session.address_book import KEY_PREFIX
from seamless_verl.proxy.session.flights import Arrival, FlightBoard, Served
from seamless_verl.proxy.session.recent import RecentTranscripts
from seamless_verl.proxy.text.pictures import ImageTable
from seamless_verl.trajectory.tree import SessionTree


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """What the trainer asks for when it opens a session.

    Attributes:
        group: prompt uid; sessions of one group answer the same task.
        index: number of this session in its group.
        deadline_s: seconds from opening after which the session takes no more requests.
        max_turns, max_tokens: budgets of the whole session, in answers and in generated tokens.
        max_model_len: prompt and answer of one turn together, in tokens; None for the model's own limit.
        max_parallel: requests of this session that may be in flight at once.
        sampling: parameters the trainer decides, whatever the agent asks for: ``temperature``, ``top_p``, ``top_k``,
            ``seed``, ``max_tokens`` (a cap per turn). A ``seed`` is mixed with each request, so that two turns never
            share their noise.
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


NUM_TOMBSTONES = 10_000  # sessions that are remembered to be gone
_BYTES_PER_TOKEN = 40  # id, log-prob, and both again in the ledger
_BYTES_PER_TURN = 8_000  # records, digests


class SessionState(Enum):
    OPEN = "open"
    EXPIRED = "expired"
    CLOSED = "closed"


class Session:
    """One attempt at one task: its tree, its ledger, its budgets, what it has in flight.

    Attributes:
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
        self.recent = RecentTranscripts()
        self.board = FlightBoard(spec.max_parallel)
        self._released = asyncio.Event()

        self.is_resident = is_resident
        self.is_gone = False
        self.num_users = 0
        self.num_arriving = 0
        self.damage = ""
        self._unknown: frozenset[bytes] | None = None

    @property
    def is_idle(self) -> bool:
        return not self.num_users and not self.num_in_flight

    @property
    def weight_bytes(self) -> int:
        """About how much memory its turns take."""
        tokens, turns = self.tree.num_stored_tokens, self.tree.num_turns
        kept = self.images.num_bytes + self.board.num_bytes + self.recent.num_bytes
        return _BYTES_PER_TOKEN * tokens + _BYTES_PER_TURN * turns + kept

    def unload(self) -> None:
        """Let the turns go; who may not have been answered is remembered: a retry and a second sample stay apart."""
        self._unknown = self.board.unknown()
        self.tree, self.ledger, self.images = SessionTree(), Ledger(), ImageTable()
        self.recent, self.board = RecentTranscripts(), FlightBoard(self.spec.max_parallel)
        self.is_resident = False

    def loaded(self, answers: Iterable[tuple[Served, bool]]) -> None:
        """Its turns are back; ``answers`` say of each whether a later request shows that it was delivered."""
        for served, is_continued in answers:
            # After an unload it is known who was answered. What an earlier process left may have died with it.
            is_unknown = self._unknown is None or served.digest in self._unknown
            arrival = Arrival.CONTINUED if is_continued else Arrival.UNKNOWN if is_unknown else Arrival.DELIVERED
            self.board.record(served, arrival)
        self.num_generated = sum(len(answer.tokens) for answer in self.tree.answers)
        self.num_started = max(self.num_started, self.tree.num_turns)
        self.is_resident = True

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

    def reserve(self, wanted: int, num: int) -> int:
        """Set up to ``wanted`` tokens of the budget aside for each of ``num`` answers; returns how many for each.

        Answers in flight cannot overshoot the budget that way. 0: others hold what is left; they rarely use all of it,
        so that :meth:`released` is worth waiting for.

        Raises:
            ApiError: 429, there is not enough left and nobody to wait for.
        """
        left = (self.spec.max_tokens - self.num_generated - self.num_reserved) // num
        if left <= 0 and not self.num_reserved:
            raise self._out_of_tokens()
        granted = max(0, min(wanted, left))
        self.num_reserved += granted * num
        return granted

    async def released(self) -> None:
        """Returns when somebody has given back what :meth:`reserve` granted."""
        await self._released.wait()

    def release(self, granted: int) -> None:
        """Give back what :meth:`reserve` granted to one answer; what was used of it counts as generated by then."""
        self.num_reserved -= granted
        self._released.set()
        self._released = asyncio.Event()

    def _out_of_tokens(self) -> ApiError:
        return ApiError(429, "token_budget_exhausted", f"Session {self.id} has used its {self.spec.max_tokens} tokens.")


class SessionStore:
    """All sessions of one process, by id and by key; ids and keys begin with ``prefix``.

    One that was closed is found until its rows are handed over. After that it leaves its id and key digest behind (the
    last `NUM_TOMBSTONES` do), so that late agents are told what happened instead of being taken for strangers.

    Args:
        on_drop: told of the id of every session that has ended.
    """

    def __init__(self, *, prefix: str = "", on_drop: Callable[[str], None] = lambda session_id: None) -> None:
        self._prefix = prefix
        self._on_drop = on_drop
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[bytes, Session] = {}
        self._gone: OrderedDict[bytes, str] = OrderedDict()
        self._gone_ids: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Any:
        return iter(tuple(self._by_id.values()))

    def open(self, spec: SessionSpec, *, now: float) -> tuple[Session, str]:
        """A new session and its key; the key exists nowhere else."""
        api_key = f"{KEY_PREFIX}{self._prefix}{secrets.token_urlsafe(24)}"
        session = Session(
            session_id=f"{self._prefix}{secrets.token_hex(12)}",
            key_digest=key_digest(api_key),
            spec=spec,
            opened_at=now,
        )
        self.adopt(session)
        return session, api_key

    def adopt(self, session: Session) -> None:
        """Take over a session, e.g. one that an earlier process left in its journal."""
        self._by_id[session.id] = session
        self._by_key[session.key_digest] = session

    def bury(self, session_id: str, digest: bytes) -> None:
        """Remember of a session, perhaps of an earlier process, that it is gone."""
        self._gone[digest] = session_id
        self._gone_ids.add(session_id)
        while len(self._gone) > NUM_TOMBSTONES:
            self._gone_ids.discard(self._gone.popitem(last=False)[1])

    def is_gone(self, session_id: str) -> bool:
        return session_id in self._gone_ids

    def by_id(self, session_id: str) -> Session:
        session = self._by_id.get(session_id)
        if session is not None:
            return session
        if session_id in self._gone_ids:
            raise ApiError(409, "session_closed", f"Session {session_id} is closed; its trajectory was handed over.")
        raise ApiError(404, "session_not_found", f"There is no session {session_id[:64]!r}.")

    def by_key(self, api_key: str) -> Session:
        digest = key_digest(api_key)
        session = self._by_key.get(digest)
        if session is not None and hmac.compare_digest(session.key_digest, digest):
            return session
        if digest in self._gone:
            raise ApiError(409, "session_closed", "The session of this key is closed; its trajectory was handed over.")
        raise ApiError(401, "invalid_api_key", "This API key belongs to no session.")

    def drop(self, session: Session) -> None:
        """Forget a session's tokens; late requests still learn that it is closed."""
        session.state, session.is_gone = SessionState.CLOSED, True
        if self._by_id.pop(session.id, None) is None:
            return
        del self._by_key[session.key_digest]
        self.bury(session.id, session.key_digest)
        session.tree.dissolve()
        self._on_drop(session.id)


def key_digest(api_key: str) -> bytes:
    return sha256(api_key.encode("utf-8", "surrogatepass")).digest()


def same_key(one: str, other: str) -> bool:
    """Whether two keys are equal, in constant time."""
    return hmac.compare_digest(key_digest(one), key_digest(other))
