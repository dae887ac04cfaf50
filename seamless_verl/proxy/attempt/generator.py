"""From an attempt to its answers: prompt, budget, engine, journal, tree.

::

    render ─▶ prepare ─▶ budget ─▶ engine, once per answer ─▶ (somebody waits?) ─▶ LANDING: journal ─▶ tree ─▶ ANSWERED
                                     └─ tokens as they come ─▶ Attempt.deltas ─▶ streams

Invariants: all answers of a request are in the journal and in the tree, or none is. The end of an answer leaves only
after that. Its beginning may leave earlier, to a client that streams; whoever never saw the end was not answered, and
no trace of it is kept. What was streamed is a prefix of the answer that is recorded.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from seamless_verl.proxy.calls import Answer, ApiError, Call, Delta, Token, bad_request
from seamless_verl.proxy.engine import (
    Engine,
    EngineRefused,
    EngineUnavailable,
    FinishReason,
    Generation,
    GenerationRequest,
    TokenChunk,
)
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.metrics import Counters
from seamless_verl.proxy.session.attempts import Attempt, State, answer_digest
from seamless_verl.proxy.session.journal import AnsweredTurn, Journal, JournalFailed
from seamless_verl.proxy.session.sessions import Session
from seamless_verl.proxy.text.chat_template import RenderingFailed, TokenizerRenderer
from seamless_verl.proxy.text.parsing import AnswerParser, Settler, StopCutter, find_stop, structured_outputs
from seamless_verl.proxy.text.tokenizer import TextDecoder
from seamless_verl.trajectory.generation import TrajectoryError
from seamless_verl.trajectory.matching import HistoryMatch
from seamless_verl.trajectory.messages import Message, Role, Transcript
from seamless_verl.trajectory.tokens import TurnRecord
from seamless_verl.trajectory.tree import PendingTurn

_BIG_RENDER_CHARS = 20_000
_PROMPT_TAIL = 16  # tokens; enough to see that a prompt ends with the opening tag of reasoning
_NOTHING_SAID = Message(role=Role.ASSISTANT)
_T = TypeVar("_T")


class Generator:
    """Generates and records the answers of all sessions of one proxy."""

    def __init__(
        self,
        *,
        engine: Engine,
        renderer: TokenizerRenderer,
        parser: AnswerParser,
        journal: Journal,
        limits: Limits,
        counters: Counters,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._parser = parser
        self._journal = journal
        self._limits = limits
        self._counters = counters

    async def run(
        self,
        attempt: Attempt,
        session: Session,
        call: Call,
        transcript: Transcript,
        *,
        sampling: Sequence[dict[str, Any]],
        overrides: tuple[str, ...],
        remember: Callable[[], None],
    ) -> None:
        """Generate and record all answers of an attempt.

        Args:
            sampling: what the engine will be asked for each answer, ``max_tokens`` still as wished.
            overrides: what the trainer decided against the agent's wish so far.
            remember: called once the request turns out to be one that the model can answer.

        Raises:
            ApiError: in the client's words.
        """
        ids = [uuid.uuid4().hex for _ in range(call.n)]
        try:
            pending = await self.prepare(session, transcript, call)
            room = self._room(session, pending)
            remember()
            attempt.answers = _heads(attempt.digest, ids, pending, overrides)
            attempt.tell()  # before the wait for budget: a stream has to be kept alive meanwhile
            wanted: int = sampling[0].get("max_tokens", room)
            granted = await _until_deadline(session, attempt, session.reserve(attempt, min(wanted, room)))
            if "max_tokens" in call.sampling and granted < wanted:
                known = (*overrides, f"max_tokens={granted}")
                attempt.answers = [replace(head, overrides=known) for head in attempt.answers]
            work = [
                self._generate(attempt, number, session, call, pending, asked | {"max_tokens": granted})
                for number, asked in enumerate(sampling)
            ]
            turns = await _until_deadline(session, attempt, _together(work))
            await self._land(attempt, session, turns)
        finally:
            session.release(attempt)
            for generation_id in ids:
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
                if ids and max(ids) >= self._renderer.num_tokens:
                    raise TrajectoryError(f"the model knows {self._renderer.num_tokens} tokens, not {max(ids)}")
                named = next((token for token in self._renderer.placeholders if token in ids), None)
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
            return await asyncio.to_thread(self._renderer.encode_prompt, text)
        return self._renderer.encode_prompt(text)

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

    async def _generate(
        self,
        attempt: Attempt,
        number: int,
        session: Session,
        call: Call,
        pending: PendingTurn,
        sampling: dict[str, Any],
    ) -> AnsweredTurn:
        """One of the answers, ready to be recorded."""
        head = attempt.answers[number]
        prompt_ids, images = session.images.prompt(pending.prompt_ids)
        thinking = self._is_thinking(prompt_ids)
        constraint = structured_outputs(call, self._parser, thinking=thinking)
        if constraint is not None:
            sampling["structured_outputs"] = constraint
        draft = self._draft(attempt, number, call, thinking) if call.stream else None
        request = GenerationRequest(
            request_id=head.id,
            session_id=session.id,
            prompt_ids=prompt_ids,
            sampling=sampling,
            deadline=session.deadline,
            images=images,
            on_tokens=draft.feed if draft is not None else None,
        )
        generation = await self._ask(session, request, pending)
        answer = self._read(head, generation, call, thinking)
        if draft is not None:
            draft.check(generation, answer.message)
        record = _sealed(pending, head.id, generation, answer)
        return record, session.ledger.entry(head.id), answer

    def _is_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends inside the model's reasoning."""
        if self._parser.think_tags is None:
            return False
        return self._renderer.decode(prompt_ids[-_PROMPT_TAIL:]).rstrip().endswith(self._parser.think_tags[0])

    def _draft(self, attempt: Attempt, number: int, call: Call, thinking: bool) -> Draft:
        settler = self._parser.settler(call.tools_to_parse, thinking=thinking) if call.prompt is None else None
        stops = call.sampling.get("stop", ())
        return Draft(attempt, number, self._renderer, settler, stops, show_tokens=call.logprobs is not None)

    async def _ask(self, session: Session, request: GenerationRequest, pending: PendingTurn) -> Generation:
        try:
            generation = await session.ledger.generate(self._engine, request, pending.prompt_ids)
        except EngineRefused as error:
            raise bad_request(f"The engine refuses this request: {error}.", code="engine_refused") from None
        except EngineUnavailable as error:
            raise ApiError(503, "engine_unavailable", f"No engine is available: {error}.", retry_after_s=1.0) from None
        if generation.finish_reason is FinishReason.ABORTED or not generation.token_ids:
            story = f"The engine gave up after {len(generation.token_ids)} tokens."
            raise ApiError(503, "engine_aborted", story, retry_after_s=1.0)
        return generation

    def _read(self, head: Answer, generation: Generation, call: Call, thinking: bool) -> Answer:
        """Text, reasoning and tool calls of a generation."""
        ids = list(generation.token_ids)
        if generation.finish_reason is FinishReason.STOP and ids[-1] in self._renderer.stop_token_ids:
            ids.pop()
        text = self._renderer.decode(ids)
        end, stop_text = find_stop(text, call.sampling.get("stop", ()))
        if call.prompt is None:
            prefix = f"call_{head.id[:20]}_"
            message = self._parser.parse(text[:end], call.tools_to_parse, thinking=thinking, call_prefix=prefix)
        else:
            message = Message(role=Role.ASSISTANT, content=text[:end])
        tokens = _tokens_of(generation, range(len(ids)), self._renderer) if call.logprobs is not None else []
        while stop_text and tokens and sum(len(token.text) for token in tokens[:-1]) >= end:
            tokens.pop()
        ended = FinishReason.STOP if stop_text else generation.finish_reason  # with the budget's last token, too
        return replace(
            head,
            message=message,
            finish_reason="tool_calls" if message.tool_calls else ended.value,
            completion_tokens=len(generation.token_ids),
            tokens=tuple(tokens),
            stop_text=stop_text,
        )

    async def _land(self, attempt: Attempt, session: Session, turns: Sequence[AnsweredTurn]) -> None:
        """Write all answers down once somebody waits for them, then commit them in one step of the event loop."""
        while not attempt.wanted.is_set():
            await attempt.wanted.wait()
        attempt.move(State.LANDING)
        try:
            await self._journal.append(session.id, turns)
        except JournalFailed as error:
            story = f"The answer could not be recorded, so it is not given: {error}."
            raise ApiError(503, "journal_failed", story, retry_after_s=5.0) from None
        attempt.answers = [self._commit(session, record, answer) for record, _, answer in turns]
        session.board.record(attempt, State.ANSWERED)
        for anchor in {record.anchor for record, _, _ in turns if not record.anchor_is_given}:
            session.board.continued(anchor)

    def _commit(self, session: Session, record: TurnRecord, answer: Answer) -> Answer:
        committed = session.tree.commit(record)
        session.num_generated += answer.completion_tokens
        self._counters.turn_committed(
            committed, prompt_tokens=answer.prompt_tokens, generated_tokens=answer.completion_tokens
        )
        return replace(answer, match=committed.kind.value)


class Draft:
    """One answer of a stream while it is generated: tokens in, settled text out.

    Args:
        attempt: takes the settled text as its ``deltas``.
        number: of the answer.
        settler: None for plain text.
        stops: stop strings; the text ends before the first of them.
        show_tokens: whether the client asked for log-probs.
    """

    def __init__(
        self,
        attempt: Attempt,
        number: int,
        renderer: TokenizerRenderer,
        settler: Settler | None,
        stops: Sequence[str],
        *,
        show_tokens: bool,
    ) -> None:
        self._attempt = attempt
        self._number = number
        self._renderer = renderer
        self._settler = settler
        self._decoder = TextDecoder(renderer.decode, renderer.open_ids)
        self._cutter = StopCutter(stops)
        # Which tokens a stop string takes with it is only known at the end.
        self._show_tokens = show_tokens and not stops
        self._has_stops = bool(stops)
        self._ids: list[int] = []

    def feed(self, chunk: TokenChunk) -> None:
        """Take tokens as the engine makes them."""
        self._ids.extend(chunk.token_ids)
        kept = [at for at, token in enumerate(chunk.token_ids) if token not in self._renderer.stop_token_ids]
        text = self._cutter.feed(self._decoder.feed([chunk.token_ids[at] for at in kept]))
        reasoning, content = self._settler.feed(text) if self._settler is not None else ("", text)
        tokens = tuple(_tokens_of(chunk, kept, self._renderer)) if self._show_tokens else ()
        if reasoning or content or tokens:
            self._attempt.deltas.append(Delta(index=self._number, reasoning=reasoning, content=content, tokens=tokens))
            self._attempt.tell()

    def check(self, generation: Generation, message: Message) -> None:
        """Refuse an answer that takes back what was shown.

        Raises:
            ApiError: 502.
        """
        num = len(generation.token_ids)
        # A stop string across an interruption ends the answer before tokens that were streamed; its text was held back.
        is_cut = num < len(self._ids) and self._has_stops
        if list(generation.token_ids[: len(self._ids)]) != (self._ids[:num] if is_cut else self._ids):
            raise ApiError(502, "engine_error", "The engine took back tokens that it had streamed.")
        shown = [delta for delta in self._attempt.deltas if delta.index == self._number]
        reasoning = "".join(delta.reasoning for delta in shown)
        if not message.reasoning.startswith(reasoning) or not message.content.startswith(
            "".join(delta.content for delta in shown)
        ):
            raise ApiError(502, "stream_differs", "The whole answer reads differently from what was streamed of it.")


def _tokens_of(chunk: TokenChunk | Generation, places: Sequence[int], renderer: TokenizerRenderer) -> list[Token]:
    """Tokens as clients see them; ``places`` are those to show."""
    shown = []
    for at in places:
        others = chunk.alternatives[at] if chunk.alternatives else ()
        alternatives = tuple((renderer.decode([token]), float(value)) for token, value in others)
        shown.append(Token(renderer.decode([chunk.token_ids[at]]), float(chunk.log_probs[at]), alternatives))
    return shown


def _heads(digest: bytes, ids: Sequence[str], pending: PendingTurn, overrides: tuple[str, ...]) -> list[Answer]:
    """What is known of answers before their first token."""
    num_prompt = len(pending.prompt_ids)
    return [
        Answer(
            id=generation_id,
            created=int(time.time()),
            message=_NOTHING_SAID,
            finish_reason="",
            prompt_tokens=num_prompt,
            completion_tokens=0,
            cached_tokens=num_prompt - len(pending.context_ids),
            digest=answer_digest(digest, number),
            overrides=overrides,
        )
        for number, generation_id in enumerate(ids)
    ]


def _sealed(pending: PendingTurn, generation_id: str, generation: Generation, answer: Answer) -> TurnRecord:
    try:
        return pending.seal(generation_id=generation_id, generation=generation, answer=answer.message)
    except TrajectoryError as error:
        raise ApiError(502, "engine_error", f"The engine's answer contradicts itself: {error}.") from None


async def _together(work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
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


async def _until_deadline(session: Session, attempt: Attempt, work: Coroutine[Any, Any, _T]) -> _T:
    try:
        result = await asyncio.wait_for(work, timeout=max(0.0, session.deadline - time.time()))
    except asyncio.TimeoutError:
        story = f"Session {session.id} reached its deadline of {session.spec.deadline_s:g} s."
        raise ApiError(504, "deadline_exceeded", story) from None
    if attempt.state is State.CANCELLED:
        # `wait_for` forgets a cancellation that comes in the step in which the work ends. Remove with Python < 3.12.
        raise asyncio.CancelledError
    return result


def _num_chars_to_render(match: HistoryMatch) -> int:
    return sum(len(message.content) for message in match.transcript.messages[match.num_known :])
