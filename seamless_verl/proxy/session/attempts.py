"""States of one request from `AttemptService.begin` to its answers, and what a session remembers for later requests.

::

    GENERATING ──all answers are there, and a client waits──▶ LANDING ──recorded──▶ ANSWERED
      │    └──engine, budget, deadline─▶ FAILED ◀─journal───────┘                      │
      └──no client waits, and the grace period is over; session closed─▶ CANCELLED     │
                                                                                       ▼
                              CONTINUED ◀──a later request goes on from an answer── DELIVERED

An attempt runs as a task of its own, so that its client may leave and a retry may join. The module
`seamless_verl.proxy.attempt.service` lists the steps of that task.

Invariant: an attempt is either cancelled or lands, whichever is decided first. So what the journal may already have
reaches the tree even if all clients leave meanwhile, and no retry joins a cancelled attempt.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from hashlib import blake2b
from typing import Any, TypeVar

from seamless_verl.errors import SeamlessError
from seamless_verl.proxy.calls import Answer, ApiError, Delta
from seamless_verl.trajectory.messages import Message

_T = TypeVar("_T")
_MAX_CONTINUED = 8  # their clients have them: the same request again wants another sample, or is a very late retry
_NUM_ASKED = 4  # conversations; as many as `RecentTranscripts` keeps, whose messages they share
_BYTES_PER_TOKEN = 150  # text, log-prob and the objects that hold them


class State(Enum):
    """Where an attempt is; see the module's picture."""

    GENERATING = "generating"
    LANDING = "landing"
    ANSWERED = "answered"  # it is not known yet whether the answers arrived
    DELIVERED = "delivered"
    CONTINUED = "continued"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Verdict(Enum):
    """What to do with a request that says exactly what an earlier one said."""

    NEW = "new"
    JOIN = "join"
    REPLAY = "replay"


_RECORDED = frozenset({State.ANSWERED, State.DELIVERED, State.CONTINUED})
_UNSEEN = frozenset({State.GENERATING, State.LANDING, State.ANSWERED})  # the answers may have reached no client
_MOVES: dict[State, frozenset[State]] = {
    State.GENERATING: frozenset({State.LANDING, State.FAILED, State.CANCELLED}),
    State.LANDING: frozenset({State.ANSWERED, State.FAILED}),
    State.ANSWERED: frozenset({State.DELIVERED, State.CONTINUED}),
    State.DELIVERED: frozenset({State.DELIVERED, State.CONTINUED}),  # a retry had them delivered again
    State.CONTINUED: frozenset({State.DELIVERED, State.CONTINUED}),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}

# Client libraries repeat a request after a timeout or a broken connection and say so in a header. An agent may also ask
# the same thing twice on purpose. A retry must not be generated again: the first answer would stay in the tree as a
# branch that no agent ever saw.
_VERDICTS: dict[State, tuple[Verdict, Verdict, Verdict]] = {
    # the earlier one    says nothing     "not a retry"    "a retry"
    State.GENERATING: (Verdict.JOIN, Verdict.NEW, Verdict.JOIN),
    State.LANDING: (Verdict.JOIN, Verdict.NEW, Verdict.JOIN),
    State.ANSWERED: (Verdict.REPLAY, Verdict.REPLAY, Verdict.REPLAY),
    State.DELIVERED: (Verdict.NEW, Verdict.NEW, Verdict.REPLAY),
    State.CONTINUED: (Verdict.NEW, Verdict.NEW, Verdict.REPLAY),
    State.FAILED: (Verdict.NEW, Verdict.NEW, Verdict.NEW),
    State.CANCELLED: (Verdict.NEW, Verdict.NEW, Verdict.NEW),
}


class IllegalMove(SeamlessError):
    """A move that the table does not have: a bug in the proxy."""


class Attempt:
    """One request; all of its answers are recorded, or none.

    Attributes:
        digest: names the request by what it says.
        num_answers: how many it wants.
        answers: as far as they are known: none; their heads, once the prompt is rendered; all, once recorded.
        deltas: the text of a stream that is settled so far, of all its answers, in the order in which it came.
        num_reserved: tokens of the session's budget that are set aside for it.
        num_waiting: clients that wait for the answers.
        wanted: set while there are any.
    """

    def __init__(self, digest: bytes, num_answers: int) -> None:
        self.digest = digest
        self.num_answers = num_answers
        self.state = State.GENERATING
        self.answers: Sequence[Answer] = ()
        self.deltas: list[Delta] = []
        self.num_reserved = 0
        self.num_waiting = 0
        self.wanted = asyncio.Event()
        self._listeners: set[asyncio.Event] = set()
        self._task: asyncio.Task[None] | None = None
        self._grace: asyncio.TimerHandle | None = None

    @property
    def name(self) -> tuple[bytes, int]:
        """Two attempts with the same name answer the same request."""
        return self.digest, self.num_answers

    def move(self, state: State) -> None:
        """Change the state.

        Raises:
            IllegalMove: the table has no such move.
        """
        if state not in _MOVES[self.state]:
            story = f"{self.num_waiting} clients wait for {self.num_answers} answers, {len(self.answers)} are known"
            raise IllegalMove(
                f"{state.name}: the attempt at request {self.digest.hex()} is {self.state.name}; its next state can be "
                f"{', '.join(sorted(next.name for next in _MOVES[self.state])) or 'no other'} ({story})"
            )
        self.state = state

    def verdict(self, retry_count: int | None) -> Verdict:
        """What to do with a request that repeats this one.

        Args:
            retry_count: number the client put into its retry header; None when it sent none.
        """
        if self.state in (State.GENERATING, State.LANDING) and not self.num_waiting:
            return Verdict.JOIN  # its client went away
        # While a client still receives the answers, a request that says it is no retry wants answers of its own.
        state = State.LANDING if self.state is State.ANSWERED and self.num_waiting else self.state
        return _VERDICTS[state][0 if retry_count is None else min(retry_count, 1) + 1]

    def tell(self) -> None:
        """Set the events of all clients that wait for the answers."""
        for listener in self._listeners:
            listener.set()

    def start(self, work: Coroutine[Any, Any, None], ended: Callable[[], None]) -> None:
        """Run ``work``, which moves the attempt to ANSWERED or raises; ``ended`` is called once, however it ends."""

        def end(task: asyncio.Task[None]) -> None:
            if self.state in _RECORDED:
                self._task = None
            elif not task.cancelled() and task.exception() is not None and self.state is not State.CANCELLED:
                self.move(State.FAILED)  # `exception()` has marked it as retrieved: asyncio does not log it
            self.deltas = []
            ended()

        self._task = asyncio.create_task(work)
        self._task.add_done_callback(end)

    @contextmanager
    def attended(self, news: asyncio.Event, *, orphan_grace_s: float) -> Iterator[None]:
        """While the block runs, a client waits for the answers; ``news`` is set whenever there is more of them.

        The last client to leave starts the grace period, and the next one to join ends it.
        """
        if self._grace is not None:
            self._grace.cancel()
        self.num_waiting += 1
        self.wanted.set()
        self._listeners.add(news)
        try:
            yield
        finally:
            self._listeners.discard(news)
            self.num_waiting -= 1
            if not self.num_waiting and self._task is not None and not self._task.done():
                self.wanted.clear()
                self._grace = asyncio.get_running_loop().call_later(orphan_grace_s, self.cancel)

    async def landed(self) -> Sequence[Answer]:
        """All answers, in order, once they are recorded.

        Raises:
            ApiError: why there are none.
        """
        task = self._task
        if task is not None:
            await asyncio.wait({task})
            if task.cancelled():
                raise ApiError(409, "session_closed", "The session was closed while this answer was generated.")
            task.result()
        return self.answers

    def cancel(self) -> None:
        """End it, unless it is landing."""
        if self.state is State.GENERATING and self._task is not None:
            self.move(State.CANCELLED)
            self._task.cancel()

    async def ended(self) -> None:
        """Returns when it has ended, in whatever way."""
        if self._task is not None:
            await asyncio.wait({self._task})


class AttemptBoard:
    """Attempts of one session: those under way, and the recent ones that a retry may ask for.

    Args:
        max_parallel: answers that the session may have in flight at once, so that it may have to give as many again.
            Twice as many are kept of those that were delivered, and of those that may not have been; few of those
            that a later request went on from.
    """

    def __init__(self, max_parallel: int) -> None:
        most = max(8, 2 * max_parallel)
        self._most = {State.ANSWERED: most, State.DELIVERED: most, State.CONTINUED: _MAX_CONTINUED}
        self._under_way: dict[Attempt, None] = {}  # oldest first
        self._recorded: dict[Attempt, None] = {}  # likewise, by when they got their state

    @property
    def num_bytes(self) -> int:
        """About how much memory the tokens of its answers take, as far as clients asked to see them."""
        answers = [answer for attempt in self._recorded for answer in attempt.answers if answer.tokens]
        return sum(_BYTES_PER_TOKEN * len(said.tokens) * (1 + len(said.tokens[0].alternatives)) for said in answers)

    def find(self, digest: bytes, num_answers: int, *, is_retry: bool) -> Attempt | None:
        """The latest attempt at a request that was not given up.

        An agent may ask the same several times at once. Each retry then gets answers of its own: the latest ones that
        have no waiting client and that no client may have seen, if there are such.
        """
        name = digest, num_answers
        known = (*self._recorded, *self._under_way)
        same = [attempt for attempt in known if attempt.name == name and attempt.state is not State.CANCELLED]
        lost = [attempt for attempt in same if is_retry and attempt.state in _UNSEEN and not attempt.num_waiting]
        return next(reversed(lost or same), None)

    def launch(
        self, attempt: Attempt, work: Coroutine[Any, Any, None], ended: Callable[[], None] = lambda: None
    ) -> None:
        """Have an attempt run; ``ended`` is called once, however it ends."""

        def forget() -> None:
            del self._under_way[attempt]
            ended()

        self._under_way[attempt] = None
        attempt.start(work, forget)

    def record(self, attempt: Attempt, state: State) -> None:
        """Move an attempt to one of the recorded states and keep it for retries."""
        attempt.move(state)
        self._keep(attempt)

    def _keep(self, attempt: Attempt) -> None:
        """Too many answers of one state push the oldest out."""
        self._recorded.pop(attempt, None)
        self._recorded[attempt] = None
        known = [kept for kept in self._recorded if kept.state is attempt.state]
        while len(known) > 1 and sum(kept.num_answers for kept in known) > self._most[attempt.state]:
            del self._recorded[known.pop(0)]

    def continued(self, answer_id: str) -> None:
        """A request goes on from this answer, so it was delivered, whatever a restart had left open."""
        for attempt in tuple(self._recorded):
            if any(answer.id == answer_id for answer in attempt.answers):
                self.record(attempt, State.CONTINUED)

    def restore(self, answers: Sequence[Answer], state: State) -> None:
        """Take over the answers of one request, in their order, that an earlier process recorded."""
        attempt = Attempt(answers[0].digest, len(answers))
        attempt.answers = answers
        for step in dict.fromkeys((State.LANDING, State.ANSWERED, state)):
            attempt.move(step)
        self._keep(attempt)

    def undelivered(self) -> frozenset[str]:
        """Ids of the answers that may have reached no client."""
        lost = [attempt for attempt in self._recorded if attempt.state is State.ANSWERED]
        return frozenset(answer.id for attempt in lost for answer in attempt.answers)

    async def cancel_all(self) -> None:
        """End every attempt, those that are landing with their answers; returns when all have ended."""
        attempts = tuple(self._under_way)
        for attempt in attempts:
            attempt.cancel()
        for attempt in attempts:
            await attempt.ended()


class Continuations:
    """What a session has said, for requests that refer to it instead of sending it again: an `Earlier` of
    `seamless_verl.proxy.calls`.

    What was said is known of every answer, also after a restart: answers are in the journal. What was asked is not, and
    is kept for the last few responses only; a client goes on from one of these.

    Attributes:
        said: what each answer said, by the id of its generation.
        num_chars: of all that was said.
        stopped: what answers said that a stop string ended, and that string, by both together.
    """

    def __init__(self, answers: Iterable[Answer] = ()) -> None:
        self.said: dict[str, Message] = {}
        self.num_chars = 0
        self.stopped: dict[str, tuple[str, str]] = {}
        self._contents: set[str] = set()  # of what was said
        self._asked: deque[tuple[Attempt, Sequence[Mapping[str, Any]]]] = deque(maxlen=_NUM_ASKED)
        for answer in answers:
            self.answered(answer)

    def answered(self, answer: Answer) -> None:
        """An answer was recorded."""
        said = answer.message
        self.said[answer.id] = said
        self._contents.add(said.content.strip())
        if answer.stop_text:
            self.stopped[f"{said.content}{answer.stop_text}".strip()] = said.content, answer.stop_text
        self.num_chars += said.num_chars

    def without_addition(self, message: Message) -> tuple[Message, str]:
        """An assistant's message as its answer was told, and what its agent wrote behind it.

        Agents put the stop string back that ended an answer, and may write more behind it (smolagents does both). The
        model did write the string; alone it is no addition.
        """
        text = message.content.strip()
        whole = max((known for known in self.stopped if text.startswith(known)), key=len, default="")
        if not whole or text in self._contents:  # another answer may begin like that
            return message, ""
        content, stop = self.stopped[whole]
        if text == whole:
            return replace(message, content=content), ""
        if message.tool_calls or not whole.endswith(stop):  # calls stand behind the text; white space tells nothing
            return message, ""
        return replace(message, content=content), text[len(whole) - len(stop) :]

    def asked(self, attempt: Attempt, conversation: Sequence[Mapping[str, Any]]) -> None:
        """``attempt`` answers this conversation; its id is known later."""
        self._asked.append((attempt, conversation))

    def conversation(self, answer_id: str) -> Sequence[Mapping[str, Any]] | None:
        """What an answer was given to; None: it is not known, or no longer."""
        asked = ((attempt.answers[:1], conversation) for attempt, conversation in self._asked)
        return next((found for answers, found in asked if answers and answers[0].id == answer_id), None)


def answer_digest(request: bytes, number: int) -> bytes:
    """Names one of a request's answers; the first bears the request's own name."""
    return request if not number else blake2b(request + number.to_bytes(4, "little"), digest_size=16).digest()


async def together(work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """All results; the first failure cancels the others."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
