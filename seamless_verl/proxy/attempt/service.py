"""From a checked request to its recorded answers.

The life of an attempt and of each of its answers, in order::

    begin     AttemptService.begin            a retry joins or replays an earlier attempt; else a new one is launched
    prepare   SessionTree.prepare             render the prompt and find its place in the tree
    claim     UnfinishedAnswers.claim         an id for each answer, with the tokens that an earlier attempt left of it
    reserve   Session.reserve                 set tokens of the session's budget aside for all answers; may wait
    generate  Ledger.generate                 once per answer: the engine continues after the claimed tokens
    stream    Draft.feed                      meanwhile: settled text goes to `Attempt.deltas`, for clients that stream
    progress  UnfinishedAnswers.progressed    meanwhile: tokens that survive their replica are kept, also in the journal
    land      AttemptService._land            LANDING, once a client waits: `Journal.append` writes all answers
    commit    SessionTree.commit              put each answer into the tree
    record    AttemptBoard.record             ANSWERED: the board keeps the answers for retries
    release   Session.release, UnfinishedAnswers.release    always: free the budget and the claims. An answer that the
                                              engine did not finish keeps its progress, for the next attempt to claim

Invariants: all answers of a request are in the journal and in the tree, or none is. The end of an answer is sent only
after that. A stream may send its beginning earlier; if the attempt fails then, no answer of it is recorded. What was
streamed is a prefix of the answer that is recorded.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from seamless_verl.proxy.attempt.drafts import Draft, tokens_of
from seamless_verl.proxy.calls import Answer, ApiError, Call, bad_request, prompt_transcript
from seamless_verl.proxy.dialects.chat import canonical_message, canonical_tools
from seamless_verl.proxy.engine import Engine, EngineRefused, EngineUnavailable, GenerationRequest
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.metrics import Counters
from seamless_verl.proxy.session.attempts import Attempt, State, Verdict, answer_digest, together
from seamless_verl.proxy.session.journal import AnsweredTurn, Journal
from seamless_verl.proxy.session.sessions import Session
from seamless_verl.proxy.text.chat_template import RenderingFailed, TokenizerRenderer
from seamless_verl.proxy.text.parsing import AnswerParser, find_stop, structured_outputs
from seamless_verl.trajectory.generation import FinishReason, Generation, TrajectoryError
from seamless_verl.trajectory.matching import HistoryMatch
from seamless_verl.trajectory.messages import AfterAddition, Message, Role, Transcript, transcript_of
from seamless_verl.trajectory.tokens import TurnRecord
from seamless_verl.trajectory.tree import PendingTurn

_BIG_RENDER_CHARS = 20_000
_PROMPT_TAIL = 16  # tokens; enough to see that a prompt ends with the opening tag of reasoning
_NOTHING_SAID = Message(role=Role.ASSISTANT)


class AttemptService:
    """Answers the requests of all sessions of one proxy."""

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

    def begin(self, session: Session, call: Call, *, retry_count: int | None) -> Attempt:
        """Start answering a request, or find the attempt that it repeats.

        Args:
            retry_count: what the client's retry header said; None without one.

        Raises:
            ApiError: in the client's words.
        """
        session.check_open(time.time())
        transcript, remember = self._transcript(session, call)
        digest = call.digest(transcript.digest)
        earlier = session.board.find(digest, call.n, is_retry=bool(retry_count))
        verdict = earlier.verdict(retry_count) if earlier is not None else Verdict.NEW
        if earlier is not None and verdict is not Verdict.NEW:
            if verdict is Verdict.REPLAY:
                self._counters.retries_replayed += call.n
            else:
                self._counters.retries_joined += call.n
            return earlier
        self._check_room(session, call.n)
        sampling, overrides = session.decide_sampling(call, digest)
        attempt = Attempt(digest, call.n)
        session.num_started += call.n
        session.num_in_flight += call.n
        self._counters.generations_started(call.n, time.monotonic())

        def ended() -> None:
            session.num_in_flight -= call.n
            self._counters.generations_ended(call.n, time.monotonic())

        work = self._run(attempt, session, call, transcript, sampling=sampling, overrides=overrides, remember=remember)
        session.board.launch(attempt, work, ended)
        return attempt

    async def count_prompt(self, session: Session, call: Call) -> int:
        """Tokens of the prompt that a request would be given; nothing is generated or kept."""
        session.check_open(time.time())
        pending = await self._prepare(session, self._transcript(session, call)[0], call)
        return len(pending.prompt_ids)

    def _check_room(self, session: Session, num: int) -> None:
        session.check_budget(num)
        if self._counters.in_flight + num > self._limits.max_in_flight:
            story = f"The proxy has {self._counters.in_flight} generations in flight; its limit is near."
            raise ApiError(429, "too_many_requests", story, retry_after_s=1.0)

    def _transcript(self, session: Session, call: Call) -> tuple[Transcript, Callable[[], None]]:
        """What a request says, and how to remember it for the next one."""
        if call.prompt is not None:
            return prompt_transcript(call.prompt), lambda: None
        if len(call.raw_messages) > self._limits.max_messages:
            story = f"{len(call.raw_messages)} messages; the limit is {self._limits.max_messages}."
            raise ApiError(413, "too_many_messages", story, param="messages")
        raw, raw_tools = list(call.raw_messages), list(call.raw_tools)
        length, known, known_tools = session.recent.best(raw)
        try:
            messages = list(known.messages[:length]) if known is not None else []
            for number in range(length, len(raw)):
                messages.append(self._canonical(session, raw, number, messages))
            tools = known.tools if known is not None and known_tools == raw_tools else canonical_tools(raw_tools)
            transcript = transcript_of(tuple(messages), tools, known=known, num_known=length)
        except (UnicodeError, RecursionError) as error:
            raise bad_request(f"The messages hold text that cannot be encoded: {error}.", param="messages") from None
        continues = known is not None and length == len(known.messages)
        return transcript, partial(
            session.recent.add, raw, raw_tools, transcript, replaces=known if continues else None
        )

    def _canonical(self, session: Session, raw: Sequence[Any], number: int, before: list[Message]) -> Message:
        """One message without what agents add to answers: a name that the template drops, text behind a stop string."""
        message, said = canonical_message(raw[number], number), session.continuations
        if message.role is Role.ASSISTANT:
            message = message if self._renderer.prints_names else replace(message, name="")
            told, behind = said.without_addition(message)
            return message if behind and number + 1 == len(raw) else told
        if not number or before[-1].role is not Role.ASSISTANT or not said.stopped:
            return message
        told, behind = said.without_addition(canonical_message(raw[number - 1], number - 1))
        return AfterAddition.of(message, behind) if behind and told.content == before[-1].content else message

    async def _run(
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
            remember: called once the prompt is known to fit the model.

        Raises:
            ApiError: in the client's words.
        """
        ids: list[str] = []
        try:
            pending = await self._prepare(session, transcript, call)
            room = self._room(session, pending)
            remember()
            claimed = self._claim(session, attempt.digest, pending, call)
            ids = list(claimed)
            attempt.answers = _heads(attempt.digest, ids, pending, overrides)
            attempt.tell()  # before the wait for budget: a stream has to be kept alive meanwhile
            wanted: int = sampling[0].get("max_tokens", room)
            granted = await session.until_deadline(attempt, session.reserve(attempt, min(wanted, room)))
            if "max_tokens" in call.sampling and granted < wanted:
                known = (*overrides, f"max_tokens={granted}")
                attempt.answers = [replace(head, overrides=known) for head in attempt.answers]
            work = [
                self._generate(
                    attempt, number, session, call, pending, asked | {"max_tokens": granted}, claimed[ids[number]]
                )
                for number, asked in enumerate(sampling)
            ]
            turns = await session.until_deadline(attempt, together(work))
            await self._land(attempt, session, turns)
        finally:
            session.release(attempt)
            for generation_id in ids:
                is_recorded = session.tree.has(generation_id)
                is_over = is_recorded or session.ledger.discard(generation_id, "its answer reached no client")
                session.unfinished.release(generation_id, is_over=is_over)
                self._counters.discarded += not is_recorded

    async def _prepare(self, session: Session, transcript: Transcript, call: Call) -> PendingTurn:
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
            # Clients like litellm know an overflow by OpenAI's and Anthropic's phrases, not by its code.
            long = f"prompt is too long: {num_prompt} tokens > {limit} maximum"
            story = f"This model's maximum context length is {limit} tokens, and the prompt has {num_prompt} ({long})."
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
        resume_from: Generation | None,
    ) -> AnsweredTurn:
        """Generate one of the answers; returns its turn, ready to land."""
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
            resume_from=resume_from,
            on_progress=partial(self._progressed, session, head, pending),
        )
        generation = await self._ask(session, request, pending)
        answer = self._read(head, generation, call, thinking)
        if draft is not None:
            draft.check(generation, answer.message)
        record = _sealed(pending, head.id, generation, answer)
        return record, session.ledger.entry(head.id), answer

    def _claim(self, session: Session, digest: bytes, pending: PendingTurn, call: Call) -> dict[str, Generation | None]:
        """Ids of the answers, in order, with the tokens that an earlier attempt left of each. Its alternatives were not
        kept, so a request that asks for them resumes nothing."""
        digests = [answer_digest(digest, number) for number in range(call.n)]
        prompt, is_whole = pending.prompt_ids.digest(), bool(call.logprobs)
        known = session.unfinished
        return dict(known.claim(one, prompt, new=uuid.uuid4().hex, is_whole=is_whole) for one in digests)

    def _progressed(self, session: Session, head: Answer, pending: PendingTurn, tokens: Generation) -> None:
        part = session.unfinished.progressed(head.id, head.digest, pending.prompt_ids.digest(), tokens)
        self._journal.progressed(session.id, part)

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
        tokens = tokens_of(generation, range(len(ids)), self._renderer) if call.logprobs is not None else []
        if stop_text and tokens:  # by the text as a whole: a character may take several tokens
            del tokens[bisect_left(range(len(ids)), end, key=lambda length: len(self._renderer.decode(ids[:length]))) :]
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
        """Once a client waits, write all answers to the journal; then commit and record them without an ``await``."""
        while not attempt.wanted.is_set():
            await attempt.wanted.wait()
        attempt.move(State.LANDING)
        await self._journal.append(session.id, turns)
        attempt.answers = [self._commit(session, record, answer) for record, _, answer in turns]
        session.board.record(attempt, State.ANSWERED)
        for anchor in {record.anchor for record, _, _ in turns if not record.anchor_is_given}:
            session.board.continued(anchor)

    def _commit(self, session: Session, record: TurnRecord, answer: Answer) -> Answer:
        committed = session.tree.commit(record)
        session.num_generated += answer.completion_tokens
        session.continuations.answered(answer)
        self._counters.turn_committed(
            committed, prompt_tokens=answer.prompt_tokens, generated_tokens=answer.completion_tokens
        )
        return replace(answer, match=committed.kind.value)


def _heads(digest: bytes, ids: Sequence[str], pending: PendingTurn, overrides: tuple[str, ...]) -> list[Answer]:
    """The answers before their first token: ids and counts of the prompt."""
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


def _num_chars_to_render(match: HistoryMatch) -> int:
    """Characters that a template has to write, which include the continued answer and the tools."""
    messages = match.transcript.messages[max(0, match.num_known - 1) :]
    return sum(message.num_chars for message in messages) + sum(map(len, match.transcript.tools))
