"""From a checked request to its answers: retries are recognised, budgets checked, samples launched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b

from seamless_verl.proxy.attempt.generating import Generator
from seamless_verl.proxy.attempt.samples import Sample, Siblings
from seamless_verl.proxy.attempt.sampling import decide_sampling, request_digest, sample_digest
from seamless_verl.proxy.calls import ApiError, Call, bad_request
from seamless_verl.proxy.dialects.chat import canonical_message, canonical_tools
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.metrics import Counters
from seamless_verl.proxy.session.flights import Arrival, Flight, FlightBoard, Served, results_of
from seamless_verl.proxy.session.sessions import Session
from seamless_verl.trajectory.matching import Verdict, recognise
from seamless_verl.trajectory.messages import Message, Role, Transcript, transcript_of
from seamless_verl.trajectory.tokens import pack_ids

_PROMPT_NAME = "\x00prompt"  # keeps prompts apart from messages; who gives this name to a message fools itself only


class Ask:
    """One request under way: an answer that is known already, or a flight, for each sample wanted.

    ``news`` is set whenever something may have changed.
    """

    def __init__(self, board: FlightBoard, parts: Sequence[Flight | Served], *, orphan_grace_s: float) -> None:
        self.parts = tuple(parts)
        self.news = asyncio.Event()
        self._board = board
        self._orphan_grace_s = orphan_grace_s

    @property
    def flights(self) -> list[Flight]:
        return [part for part in self.parts if isinstance(part, Flight)]

    @contextmanager
    def attended(self) -> Iterator[None]:
        """While the block runs, somebody waits for the answers."""
        flights = self.flights
        with self._board.attended(flights, orphan_grace_s=self._orphan_grace_s):
            for flight in flights:
                flight.progress.listeners.add(self.news)
            try:
                yield
            finally:
                for flight in flights:
                    flight.progress.listeners.discard(self.news)

    async def landed(self) -> list[Served]:
        """All answers, in order.

        Raises:
            ApiError: whatever kept one of them from being given.
        """
        flights = self.flights
        if flights:
            tasks = {flight.task for flight in flights if flight.task is not None}
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            results_of(flights)
        return [part if isinstance(part, Served) else results_of([part])[0] for part in self.parts]

    def delivered(self, answers: Sequence[Served]) -> None:
        """The client has these answers; only a declared retry gets them again."""
        for served in answers:
            self._board.record(served, Arrival.DELIVERED)


class TurnService:
    """Answers the requests of all sessions of one proxy."""

    def __init__(self, *, generator: Generator, limits: Limits, counters: Counters) -> None:
        self._generator = generator
        self._limits = limits
        self._counters = counters

    def begin(self, session: Session, call: Call, *, retry_count: int | None) -> Ask:
        """Start answering a request.

        Args:
            retry_count: what the client's retry header said; None without one.

        Raises:
            ApiError: in the client's words.
        """
        session.check_open(time.time())
        transcript, remember = self._transcript(session, call)
        request = request_digest(transcript, call)
        digests = [sample_digest(request, number) for number in range(call.n)]
        board = session.board
        verdicts = [recognise(board.earlier(digest), retry_count) for digest in digests]
        num_new = verdicts.count(Verdict.NEW)
        if num_new:
            self._check_room(session, num_new)
        siblings = Siblings(session, num_new)
        parts: list[Flight | Served] = []
        for number, (digest, verdict) in enumerate(zip(digests, verdicts, strict=True)):
            if verdict is Verdict.REPLAY:
                self._counters.retries_replayed += 1
                parts.append(board.recorded(digest))
            elif verdict is Verdict.JOIN:
                self._counters.retries_joined += 1
                parts.append(board.flight(digest))
            else:
                sampling, overrides = decide_sampling(session, call, digest, number)
                sample = Sample(
                    session=session,
                    call=call,
                    number=number,
                    transcript=transcript,
                    digest=digest,
                    sampling=sampling,
                    overrides=overrides,
                    siblings=siblings,
                    remember=remember,
                )
                parts.append(self._launch(sample))
        return Ask(board, parts, orphan_grace_s=self._limits.orphan_grace_s)

    async def count_prompt(self, session: Session, call: Call) -> int:
        """Tokens of the prompt that a request would be given; nothing is generated or kept."""
        session.check_open(time.time())
        pending = await self._generator.prepare(session, self._transcript(session, call)[0], call)
        return len(pending.prompt_ids)

    def _check_room(self, session: Session, num: int) -> None:
        session.check_budget(num)
        if self._counters.in_flight + num > self._limits.max_in_flight:
            story = f"The proxy has {self._counters.in_flight} generations in flight; its limit is near."
            raise ApiError(429, "too_many_requests", story, retry_after_s=1.0)

    def _launch(self, sample: Sample) -> Flight:
        session = sample.session
        session.num_started += 1
        session.num_in_flight += 1
        self._counters.generation_started(time.monotonic())

        def landed() -> None:
            session.num_in_flight -= 1
            self._counters.generation_ended(time.monotonic())

        return session.board.launch(sample.digest, lambda flight: self._generator.run(sample, flight), landed)

    def _transcript(self, session: Session, call: Call) -> tuple[Transcript, Callable[[], None]]:
        """What a request says, and how to remember it for the next one."""
        if call.prompt is not None:
            return _prompt_transcript(call.prompt), lambda: None
        if len(call.raw_messages) > self._limits.max_messages:
            story = f"{len(call.raw_messages)} messages; the limit is {self._limits.max_messages}."
            raise ApiError(413, "too_many_messages", story, param="messages")
        raw, raw_tools = list(call.raw_messages), list(call.raw_tools)
        length, known, known_tools = session.recent.best(raw)
        try:
            messages = (
                *(known.messages[:length] if known is not None else ()),
                *(canonical_message(raw[number], number) for number in range(length, len(raw))),
            )
            same_tools = known is not None and known_tools == raw_tools
            tools = known.tools if known is not None and same_tools else canonical_tools(raw_tools)
            transcript = transcript_of(messages, tools, known=known, num_known=length)
        except (UnicodeError, RecursionError) as error:
            raise bad_request(f"The messages hold text that cannot be encoded: {error}.", param="messages") from None
        continues = known is not None and length == len(known.messages)
        return transcript, partial(
            session.recent.add, raw, raw_tools, transcript, replaces=known if continues else None
        )


def _prompt_transcript(prompt: str | tuple[int, ...]) -> Transcript:
    """A text completion has no messages; its prompt stands for them, so that retries are recognised."""
    if isinstance(prompt, str):
        name, text = _PROMPT_NAME, prompt
    else:
        name, text = _PROMPT_NAME + "_ids", blake2b(pack_ids(prompt).tobytes(), digest_size=16).hexdigest()
    return transcript_of((Message(role=Role.USER, content=text, name=name),))
