"""From a checked request to its attempt: retries are recognised, budgets checked, the trainer's decisions applied."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from typing import Any

from seamless_verl.proxy.attempt.generator import Generator
from seamless_verl.proxy.calls import ApiError, Call, bad_request
from seamless_verl.proxy.dialects.chat import canonical_message, canonical_tools
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.metrics import Counters
from seamless_verl.proxy.session.attempts import Attempt, Verdict, answer_digest
from seamless_verl.proxy.session.sessions import Session
from seamless_verl.trajectory.messages import Message, Role, Transcript, transcript_of
from seamless_verl.trajectory.tokens import pack_ids

_PROMPT_NAME = "\x00prompt"  # keeps prompts apart from messages; who gives this name to a message fools itself only


class AttemptService:
    """Begins the attempts of all sessions of one proxy."""

    def __init__(self, *, generator: Generator, limits: Limits, counters: Counters) -> None:
        self._generator = generator
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
        digest = _request_digest(transcript, call)
        earlier = session.board.find(digest, call.n)
        verdict = earlier.verdict(retry_count) if earlier is not None else Verdict.NEW
        if earlier is not None and verdict is not Verdict.NEW:
            if verdict is Verdict.REPLAY:
                self._counters.retries_replayed += call.n
            else:
                self._counters.retries_joined += call.n
            return earlier
        self._check_room(session, call.n)
        sampling, overrides = _decide_sampling(session, call, digest)
        attempt = Attempt(digest, call.n)
        session.num_started += call.n
        session.num_in_flight += call.n
        self._counters.generations_started(call.n, time.monotonic())

        def ended() -> None:
            session.num_in_flight -= call.n
            self._counters.generations_ended(call.n, time.monotonic())

        work = self._generator.run(
            attempt, session, call, transcript, sampling=sampling, overrides=overrides, remember=remember
        )
        session.board.launch(attempt, work, ended)
        return attempt

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


def _request_digest(transcript: Transcript, call: Call) -> bytes:
    """Names a request by everything that decides its answers; two with the same name may be a retry."""
    schema = "" if call.json_schema is None else json.dumps(call.json_schema, sort_keys=True)
    wishes = (
        sorted(call.sampling.items()),
        call.logprobs,
        call.tool_choice.value,
        call.tool_name,
        call.parallel_tool_calls,
        sorted(call.strict_tools),
        schema,
    )
    return blake2b(transcript.digest + repr(wishes).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _decide_sampling(session: Session, call: Call, digest: bytes) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """What the engine is asked for each answer, and which of the agent's wishes the trainer overrode.

    The answers differ in their seeds only, where there are any.
    """
    decided: Mapping[str, Any] = session.spec.sampling
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
    if call.logprobs:
        sampling["logprobs"] = call.logprobs
    each = [dict(sampling) for _ in range(call.n)]
    if "seed" in decided:
        for number, asked in enumerate(each):
            mixed = f"{decided['seed']}:{answer_digest(digest, number).hex()}:{session.num_started + number}".encode()
            asked["seed"] = int.from_bytes(blake2b(mixed, digest_size=4).digest(), "little") & 0x7FFFFFFF
    elif "seed" in sampling:
        for number, asked in enumerate(each):
            asked["seed"] += number
    return each, tuple(overrides)
