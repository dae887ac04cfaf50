"""One sample of one request: from its prompt to an answer in the journal and in the tree.

::

    render ─▶ prepare ─▶ budget ─▶ engine ─▶ (all samples there, and waited for?) ─▶ journal ─▶ commit ─▶ answer
                                     └─ tokens as they come ─▶ Progress ─▶ streams

Invariant: the end of an answer leaves only after the answer is in the journal and in the tree. Its beginning may leave
earlier, to a client that streams; whoever never saw the end was not answered, and no trace of it is kept.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from seamless_verl.proxy.attempt.drafts import Draft, tokens_of
from seamless_verl.proxy.attempt.samples import Sample
from seamless_verl.proxy.calls import Answer, ApiError, Call, StreamHead, bad_request
from seamless_verl.proxy.engine import (
    Engine,
    EngineRefused,
    EngineUnavailable,
    FinishReason,
    Generation,
    GenerationRequest,
)
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.metrics import Counters
from seamless_verl.proxy.session.flights import Arrival, Fate, Flight, Progress, Served
from seamless_verl.proxy.session.journal import AnsweredTurn, Journal, JournalFailed
from seamless_verl.proxy.session.sessions import Session
from seamless_verl.proxy.text.chat_template import Codec, RenderingFailed
from seamless_verl.proxy.text.constraints import structured_outputs
from seamless_verl.proxy.text.parsing import AnswerParser, Asked, find_stop
from seamless_verl.trajectory.generation import TrajectoryError
from seamless_verl.trajectory.matching import HistoryMatch, Renderer
from seamless_verl.trajectory.messages import Message, Role, Transcript
from seamless_verl.trajectory.segments import TurnRecord
from seamless_verl.trajectory.tree import PendingTurn

_BIG_RENDER_CHARS = 20_000
_PROMPT_TAIL = 16  # tokens; enough to see that a prompt ends with the opening tag of reasoning
_T = TypeVar("_T")


class Generator:
    """Generates and records the samples of all sessions of one proxy."""

    def __init__(
        self,
        *,
        engine: Engine,
        renderer: Renderer,
        codec: Codec,
        parser: AnswerParser,
        journal: Journal,
        limits: Limits,
        counters: Counters,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._codec = codec
        self._parser = parser
        self._journal = journal
        self._limits = limits
        self._counters = counters

    async def run(self, sample: Sample, flight: Flight) -> Served:
        """Generate one sample; its progress shows in ``flight``.

        Raises:
            ApiError: in the client's words.
        """
        session, call, generation_id = sample.session, sample.call, uuid.uuid4().hex
        try:
            pending = await self.prepare(session, sample.transcript, call)
            room = self._room(session, pending)
            sample.remember()
            wanted: int = sample.sampling.get("max_tokens", room)
            flight.progress.overrides = sample.overrides
            head = flight.progress.head = _head(generation_id, pending)
            flight.progress.tell()  # before the wait for budget: a stream has to be kept alive meanwhile
            granted = await _until_deadline(session, flight, sample.siblings.reserve(min(wanted, room)))
            clipped = "max_tokens" in call.sampling and granted < wanted
            overrides = (*sample.overrides, *([f"max_tokens={granted}"] if clipped else ()))
            flight.progress.overrides = overrides
            prompt_ids, images = session.images.prompt(pending.prompt_ids)
            asked = self._asked(call, prompt_ids, generation_id)
            sampling = dict(sample.sampling) | {"max_tokens": granted}
            constraint = structured_outputs(call, self._parser, thinking=asked.thinking)
            if constraint is not None:
                sampling["structured_outputs"] = constraint
            draft = self._draft(flight.progress, call, asked)
            on_tokens = draft.feed if call.stream else None
            request = GenerationRequest(
                request_id=generation_id,
                session_id=session.id,
                prompt_ids=prompt_ids,
                sampling=sampling,
                deadline=session.deadline,
                images=images,
                on_tokens=on_tokens,
            )
            generation = await self._generate(session, flight, request, pending)
            answer = self._read(head, generation, call, asked)
            draft.check(generation, answer.message)
            record = _sealed(pending, generation_id, generation, answer)
            served = Served(digest=sample.digest, answer=answer, match="", overrides=overrides)
            turn = record, session.ledger.entry(generation_id), served
            return await sample.siblings.land(sample.number, flight, turn, self._record)
        finally:
            sample.siblings.ended(flight)
            if not session.tree.has(generation_id):
                session.ledger.discard(generation_id, "its answer reached no client")
                self._counters.discarded += 1

    async def prepare(self, session: Session, transcript: Transcript, call: Call) -> PendingTurn:
        """The prompt of a request and its place in the tree.

        Raises:
            ApiError: 400, it cannot be rendered.
        """
        try:
            if call.prompt is not None:
                ids = call.prompt if isinstance(call.prompt, tuple) else await self._encode(call.prompt)
                if ids and max(ids) >= self._codec.num_tokens:
                    raise TrajectoryError(f"the model knows {self._codec.num_tokens} tokens, not {max(ids)}")
                named = next((token for token in self._codec.placeholders if token in ids), None)
                if named is not None:
                    raise TrajectoryError(f"token {named} stands for a picture or a video, and there is none")
                return session.tree.prepare_ids(transcript, ids)
            match = session.tree.match(transcript)
            if _num_chars_to_render(match) > _BIG_RENDER_CHARS:
                rendering = await asyncio.to_thread(match.render, self._renderer)
            else:
                rendering = match.render(self._renderer)
            return session.tree.prepare(match, rendering)
        except (RenderingFailed, TrajectoryError, UnicodeError) as error:
            param = "messages" if call.prompt is None else "prompt"
            raise bad_request(f"This cannot be rendered: {error}.", param=param) from None

    async def _encode(self, text: str) -> list[int]:
        if len(text) > _BIG_RENDER_CHARS:
            return await asyncio.to_thread(self._codec.encode_prompt, text)
        return self._codec.encode_prompt(text)

    def _room(self, session: Session, pending: PendingTurn) -> int:
        """How many tokens the model's length leaves for the answer.

        Raises:
            ApiError: 400, none.
        """
        limit = min(session.spec.max_model_len or self._limits.max_model_len, self._limits.max_model_len)
        num_prompt = len(pending.prompt_ids)
        if num_prompt >= limit:
            story = f"The prompt has {num_prompt} tokens; prompt and answer together may have {limit}."
            raise bad_request(story, param="messages", code="context_length_exceeded")
        return limit - num_prompt

    def _asked(self, call: Call, prompt_ids: Sequence[int], generation_id: str) -> Asked:
        thinking = False
        if self._parser.think_tags is not None:
            tail = self._codec.decode(prompt_ids[-_PROMPT_TAIL:])
            thinking = tail.rstrip().endswith(self._parser.think_tags[0])
        tools = call.raw_tools if call.parse_tools else ()
        return Asked(tools=tools, thinking=thinking, call_prefix=f"call_{generation_id[:20]}_")

    def _draft(self, progress: Progress, call: Call, asked: Asked) -> Draft:
        settler = self._parser.settler(asked) if call.prompt is None else None
        stops = call.sampling.get("stop", ())
        return Draft(progress, self._codec, settler, stops, show_tokens=call.logprobs is not None)

    async def _generate(
        self, session: Session, flight: Flight, request: GenerationRequest, pending: PendingTurn
    ) -> Generation:
        generating = session.ledger.generate(self._engine, request, pending.prompt_ids)
        try:
            generation = await _until_deadline(session, flight, generating)
        except EngineRefused as error:
            raise bad_request(f"The engine refuses this request: {error}.", code="engine_refused") from None
        except EngineUnavailable as error:
            raise ApiError(503, "engine_unavailable", f"No engine is available: {error}.", retry_after_s=1.0) from None
        if generation.finish_reason is FinishReason.ABORTED or not generation.token_ids:
            story = f"The engine gave up after {len(generation.token_ids)} tokens."
            raise ApiError(503, "engine_aborted", story, retry_after_s=1.0)
        return generation

    def _read(self, head: StreamHead, generation: Generation, call: Call, asked: Asked) -> Answer:
        """Text, reasoning and tool calls of a generation."""
        ids = list(generation.token_ids)
        if generation.finish_reason is FinishReason.STOP and ids[-1] in self._codec.stop_token_ids:
            ids.pop()
        text = self._codec.decode(ids)
        end, stop_text = find_stop(text, call.sampling.get("stop", ()))
        if call.prompt is None:
            message = self._parser.parse(text[:end], asked)
        else:
            message = Message(role=Role.ASSISTANT, content=text[:end])
        tokens = tokens_of(generation, range(len(ids)), self._codec) if call.logprobs is not None else []
        while stop_text and tokens and sum(len(token.text) for token in tokens[:-1]) >= end:
            tokens.pop()
        ended = FinishReason.STOP if stop_text else generation.finish_reason  # with the budget's last token, too
        return Answer(
            id=head.id,
            created=head.created,
            message=message,
            finish_reason="tool_calls" if message.tool_calls else ended.value,
            prompt_tokens=head.prompt_tokens,
            completion_tokens=len(generation.token_ids),
            cached_tokens=head.cached_tokens,
            tokens=tuple(tokens),
            stop_text=stop_text,
        )

    async def _record(self, session: Session, turns: Sequence[AnsweredTurn]) -> list[Served]:
        """Write down all samples of a request, then commit them, in one step of the event loop."""
        try:
            await self._journal.append(session.id, turns)
        except JournalFailed as error:
            story = f"The answer could not be recorded, so it is not given: {error}."
            raise ApiError(503, "journal_failed", story, retry_after_s=5.0) from None
        return [self._commit(session, record, entry.prompt_len, served) for record, entry, served in turns]

    def _commit(self, session: Session, record: TurnRecord, prompt_tokens: int, served: Served) -> Served:
        committed = session.tree.commit(record)
        num_generated = len(record.token_ids)
        session.num_generated += num_generated
        self._counters.turn_committed(committed, prompt_tokens=prompt_tokens, generated_tokens=num_generated)
        served = served.matched(committed.kind.value)
        session.board.record(served, Arrival.UNKNOWN)
        if not record.anchor_is_given:
            session.board.continued(record.anchor)
        return served


def _sealed(pending: PendingTurn, generation_id: str, generation: Generation, answer: Answer) -> TurnRecord:
    try:
        return pending.seal(generation_id=generation_id, generation=generation, answer=answer.message)
    except TrajectoryError as error:
        raise ApiError(502, "engine_error", f"The engine's answer contradicts itself: {error}.") from None


def _head(generation_id: str, pending: PendingTurn) -> StreamHead:
    num_prompt = len(pending.prompt_ids)
    num_known = num_prompt - len(pending.context_ids)
    return StreamHead(id=generation_id, created=int(time.time()), prompt_tokens=num_prompt, cached_tokens=num_known)


async def _until_deadline(session: Session, flight: Flight, work: Coroutine[Any, Any, _T]) -> _T:
    try:
        result = await asyncio.wait_for(work, timeout=max(0.0, session.deadline - time.time()))
    except asyncio.TimeoutError:
        story = f"Session {session.id} reached its deadline of {session.spec.deadline_s:g} s."
        raise ApiError(504, "deadline_exceeded", story) from None
    if flight.fate is Fate.CANCELLED:
        # `wait_for` forgets a cancellation that comes in the step in which the work ends. Remove with Python < 3.12.
        raise asyncio.CancelledError
    return result


def _num_chars_to_render(match: HistoryMatch) -> int:
    return sum(len(message.content) for message in match.transcript.messages[match.num_known :])
