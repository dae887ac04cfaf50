"""From a checked request to a committed answer.

::

    route ─▶ render ─▶ prepare ─▶ gate ─▶ engine ─▶ (does anybody still wait?) ─▶ journal ─▶ commit ─▶ answer

Invariant: an answer is in the journal and in the tree before the first byte of it leaves, or in neither.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Protocol

from seamless_verl.proxy.chat import ChatCall, canonical_message, canonical_tools
from seamless_verl.proxy.chat_answer import ChatAnswer
from seamless_verl.proxy.engine import Engine, EngineUnavailable, FinishReason, Generation, GenerationRequest
from seamless_verl.proxy.errors import ApiError, bad_request
from seamless_verl.proxy.flights import Flight, Served
from seamless_verl.proxy.journal import Journal, JournalFailed
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.metrics import Counters
from seamless_verl.proxy.parsing import cut_at_stop, parse_answer
from seamless_verl.proxy.rendering import Codec, RenderingFailed
from seamless_verl.proxy.sessions import Session
from seamless_verl.trajectory.generation import TrajectoryError
from seamless_verl.trajectory.matching import Route
from seamless_verl.trajectory.messages import Transcript, transcript_of
from seamless_verl.trajectory.rendering import Renderer
from seamless_verl.trajectory.retries import Verdict, recognise
from seamless_verl.trajectory.segments import TurnRecord
from seamless_verl.trajectory.tree import PendingTurn

_BIG_RENDER_CHARS = 20_000


class Gate(Protocol):
    """Holds requests back, e.g. while weights change."""

    async def wait_open(self) -> None: ...


class TurnService:
    """Answers the requests of all sessions of one proxy."""

    def __init__(
        self,
        *,
        engine: Engine,
        renderer: Renderer,
        codec: Codec,
        journal: Journal,
        limits: Limits,
        counters: Counters,
        gate: Gate | None,
        think_tags: tuple[str, str] | None,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._codec = codec
        self._journal = journal
        self._limits = limits
        self._counters = counters
        self._gate = gate
        self._think_tags = think_tags

    async def answer(
        self, session: Session, call: ChatCall, *, retry_count: int | None, gone: Callable[[], Awaitable[None]]
    ) -> Served:
        """Answer one request.

        Args:
            retry_count: what the client's retry header said; None without one.
            gone: returns when the client has left.

        Raises:
            ApiError: in the client's words.
            ClientGone: the client left first.
        """
        session.check_open(time.time())
        transcript = self._transcript(session, call)
        digest = _digest(transcript, call.sampling)
        board = session.board
        verdict = recognise(board.earlier(digest), retry_count)
        if verdict is Verdict.REPLAY:
            self._counters.retries_replayed += 1
            served = board.recorded(digest)
        else:
            if verdict is Verdict.JOIN:
                self._counters.retries_joined += 1
                flight = board.flight(digest)
            else:
                flight = self._launch(session, call, transcript, digest)
            served = await board.wait(flight, gone, orphan_grace_s=self._limits.orphan_grace_s)
        board.record(served, delivered=True)
        return served

    def _transcript(self, session: Session, call: ChatCall) -> Transcript:
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
        session.recent.add(raw, raw_tools, transcript, replaces=known if continues else None)
        return transcript

    def _launch(self, session: Session, call: ChatCall, transcript: Transcript, digest: bytes) -> Flight:
        session.check_budget()
        if self._counters.in_flight >= self._limits.max_in_flight:
            story = f"The proxy has {self._limits.max_in_flight} generations in flight, which is its limit."
            raise ApiError(429, "too_many_requests", story, retry_after_s=1.0)
        sampling, overrides = _decide_sampling(session, call, digest)
        session.num_started += 1
        session.num_in_flight += 1
        self._counters.generation_started(time.monotonic())

        def landed() -> None:
            session.num_in_flight -= 1
            self._counters.generation_ended(time.monotonic())

        async def fly(flight: Flight) -> Served:
            generation_id = uuid.uuid4().hex
            try:
                pending = await self._prepare(session, transcript)
                clipped = self._clip(session, pending, sampling, asked="max_tokens" in call.sampling)
                generation = await self._generate(session, generation_id, pending, sampling)
                await flight.wanted.wait()
                answer = self._read(generation_id, generation, pending, call, sampling)
                served = Served(digest=digest, answer=answer, match="", overrides=(*overrides, *clipped))
                return await self._commit(session, generation_id, generation, pending, served)
            finally:
                if not session.tree.has(generation_id):
                    session.ledger.discard(generation_id, "its answer reached no client")
                    self._counters.discarded += 1

        return session.board.launch(digest, fly, landed)

    async def _prepare(self, session: Session, transcript: Transcript) -> PendingTurn:
        route = session.tree.route(transcript)
        try:
            if _num_chars_to_render(route) > _BIG_RENDER_CHARS:
                rendering = await asyncio.to_thread(route.render, self._renderer)
            else:
                rendering = route.render(self._renderer)
            return session.tree.prepare(route, rendering)
        except (RenderingFailed, TrajectoryError, UnicodeError) as error:
            raise bad_request(f"These messages cannot be rendered: {error}.", param="messages") from None

    def _clip(
        self, session: Session, pending: PendingTurn, sampling: dict[str, Any], *, asked: bool
    ) -> tuple[str, ...]:
        """Fit ``max_tokens`` into the model's length and the session's budget; says so where the agent had asked."""
        limit = min(session.spec.max_model_len or self._limits.max_model_len, self._limits.max_model_len)
        num_prompt = len(pending.prompt_ids)
        if num_prompt >= limit:
            story = f"The prompt has {num_prompt} tokens; prompt and answer together may have {limit}."
            raise bad_request(story, param="messages", code="context_length_exceeded")
        room = min(limit - num_prompt, session.spec.max_tokens - session.num_generated)
        wanted = sampling.get("max_tokens", room)
        sampling["max_tokens"] = min(wanted, room)
        return (f"max_tokens={room}",) if asked and room < wanted else ()

    async def _generate(
        self, session: Session, generation_id: str, pending: PendingTurn, sampling: Mapping[str, Any]
    ) -> Generation:
        request = GenerationRequest(
            request_id=generation_id,
            session_id=session.id,
            prompt_ids=pending.prompt_ids,
            sampling=sampling,
            deadline=session.deadline,
        )
        try:
            generation = await asyncio.wait_for(
                self._through_gate(session, request), timeout=max(0.0, session.deadline - time.time())
            )
        except asyncio.TimeoutError:
            story = f"Session {session.id} reached its deadline of {session.spec.deadline_s:g} s."
            raise ApiError(504, "deadline_exceeded", story) from None
        except EngineUnavailable as error:
            raise ApiError(503, "engine_unavailable", f"No engine is available: {error}.", retry_after_s=1.0) from None
        if generation.finish_reason is FinishReason.ABORTED or not generation.token_ids:
            story = f"The engine gave up after {len(generation.token_ids)} tokens."
            raise ApiError(503, "engine_aborted", story, retry_after_s=1.0)
        return generation

    async def _through_gate(self, session: Session, request: GenerationRequest) -> Generation:
        if self._gate is not None:
            await self._gate.wait_open()
        return await session.ledger.generate(self._engine, request)

    def _read(
        self,
        generation_id: str,
        generation: Generation,
        pending: PendingTurn,
        call: ChatCall,
        sampling: Mapping[str, Any],
    ) -> ChatAnswer:
        """Text, reasoning and tool calls of a generation."""
        ids = list(generation.token_ids)
        if generation.finish_reason is FinishReason.STOP and ids[-1] in self._codec.stop_token_ids:
            ids.pop()
        text = cut_at_stop(self._codec.decode(ids), sampling.get("stop", ()))
        message = parse_answer(
            text, call_prefix=f"call_{generation_id[:20]}_", parse_tools=call.parse_tools, think_tags=self._think_tags
        )
        tokens: tuple[tuple[str, float], ...] = ()
        if call.logprobs:
            pairs = zip(ids, generation.log_probs, strict=False)
            tokens = tuple((self._codec.decode([token]), float(value)) for token, value in pairs)
        return ChatAnswer(
            id=f"chatcmpl-{generation_id}",
            created=int(time.time()),
            message=message,
            finish_reason="tool_calls" if message.tool_calls else generation.finish_reason.value,
            prompt_tokens=len(pending.prompt_ids),
            completion_tokens=len(generation.token_ids),
            cached_tokens=len(pending.prompt_ids) - len(pending.context_ids),
            tokens=tokens,
        )

    async def _commit(
        self, session: Session, generation_id: str, generation: Generation, pending: PendingTurn, served: Served
    ) -> Served:
        try:
            record = pending.seal(generation_id=generation_id, generation=generation, answer=served.answer.message)
        except TrajectoryError as error:
            raise ApiError(502, "engine_error", f"The engine's answer contradicts itself: {error}.") from None
        landing = asyncio.ensure_future(self._journal_and_commit(session, record, pending, served))
        try:
            return await asyncio.shield(landing)
        except asyncio.CancelledError:
            # What the journal may already hold must reach the tree, whoever loses interest meanwhile.
            await asyncio.wait({landing})
            raise

    async def _journal_and_commit(
        self, session: Session, record: TurnRecord, pending: PendingTurn, served: Served
    ) -> Served:
        try:
            await self._journal.append(session.id, record, session.ledger.entry(record.generation_id), served)
        except JournalFailed as error:
            story = f"The answer could not be recorded, so it is not given: {error}."
            raise ApiError(503, "journal_failed", story, retry_after_s=5.0) from None
        turn = session.tree.commit(record)
        num_generated = len(record.token_ids)
        session.num_generated += num_generated
        self._counters.turn_committed(turn, prompt_tokens=len(pending.prompt_ids), generated_tokens=num_generated)
        served = replace(served, match=turn.kind.value)
        session.board.record(served, delivered=False)
        return served


def _decide_sampling(session: Session, call: ChatCall, digest: bytes) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the engine is asked for, and which of the agent's wishes the trainer overrode."""
    sampling, overrides = dict(call.sampling), []
    for key, value in session.spec.sampling.items():
        if key == "max_tokens" and sampling.get(key, value) <= value:
            sampling.setdefault(key, value)  # a cap, not a wish
            continue
        if key in sampling and sampling[key] != value:
            overrides.append(f"{key}={value}")
        sampling[key] = value
    if "seed" in session.spec.sampling:
        mixed = f"{sampling['seed']}:{digest.hex()}:{session.num_started}".encode()
        sampling["seed"] = int.from_bytes(blake2b(mixed, digest_size=4).digest(), "little") & 0x7FFFFFFF
    return sampling, tuple(overrides)


def _digest(transcript: Transcript, sampling: Mapping[str, Any]) -> bytes:
    return blake2b(transcript.digest + repr(sorted(sampling.items())).encode(), digest_size=16).digest()


def _num_chars_to_render(route: Route) -> int:
    return sum(len(message.content) for message in route.transcript.messages[route.num_known :])
