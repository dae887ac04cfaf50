"""Stands at the engine boundary: writes token by token, and can be interrupted, as a replica whose weights change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from seamless_verl.proxy.engine import GenerationRequest, TokenChunk
from seamless_verl.trajectory.generation import FinishReason, Generation, VersionSpan
from tests.agents import chat_message


class InterruptibleEngine:
    """Writes what ``script`` says for a prompt; a prompt that ends inside an answer is continued.

    Attributes:
        version: stamped on the tokens of attempts that begin.
        num_interrupted: attempts that ended before their time with at least one token.
        due: set after every ``tokens_per_update`` tokens, ``num_updates`` times; the attempt that made the last of them
            then waits to be interrupted, so that every update comes while an answer is under way.
    """

    def __init__(
        self, tokenizer: Any, script: Callable[[str], str], *, tokens_per_update: int, num_updates: int
    ) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self._tokens_per_update = tokens_per_update
        self._num_updates = num_updates
        self._num_tokens = 0
        self._round = 0
        self._interrupted = asyncio.Event()
        self._header: list[int] = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
        self.version = 1
        self.num_interrupted = 0
        self.due = asyncio.Event()

    def stamp(self, version: int) -> None:
        self.version = version

    def interrupt(self) -> None:
        """End all attempts at their next token."""
        self._round += 1
        self._interrupted.set()
        self._interrupted = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> Generation:
        prompt, known = self._split(list(request.prompt_ids))
        text = self._script(self._tokenizer.decode(prompt))
        answer = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        assert answer[: len(known)] == known, "asked to go on with tokens that were never generated"
        version, begun, ids = self.version, self._round, list[int]()
        finish = FinishReason.STOP
        for token in answer[len(known) :]:
            await asyncio.sleep(0)
            if self._round != begun:
                finish = FinishReason.ABORTED
                self.num_interrupted += bool(ids)
                break
            ids.append(token)
            if request.on_tokens is not None:
                request.on_tokens(TokenChunk(token_ids=(token,), log_probs=(self.log_prob(token),)))
            self._num_tokens += 1
            if self._num_tokens % self._tokens_per_update == 0 and self._num_updates:
                self._num_updates -= 1
                self.due.set()
                while self._round == begun:
                    await self._interrupted.wait()
            if len(ids) == request.sampling["max_tokens"]:
                finish = FinishReason.STOP if token == answer[-1] else FinishReason.LENGTH
                break
        return Generation(
            token_ids=ids,
            log_probs=[self.log_prob(token) for token in ids],
            version_spans=(VersionSpan(version=version, num_tokens=len(ids)),) if ids else (),
            finish_reason=finish,
        )

    @staticmethod
    def log_prob(token: int) -> float:
        return -0.001 * (1 + token % 13)

    def _split(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The prompt up to the last generation prompt, and what of the answer follows it."""
        width = len(self._header)
        at = max(at for at in range(len(ids) - width + 1) if list(ids[at : at + width]) == self._header)
        return list(ids[: at + width]), list(ids[at + width :])


NUM_TURNS = 3
TOOLS: list[Any] = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]


def script(prompt: str) -> str:
    """A tool call in each turn but the last; long enough to be interrupted more than once."""
    turn = prompt.count("<|im_start|>tool")
    words = f"step {turn}: the quick brown fox says hello to the user, and the assistant answers"
    if turn == NUM_TURNS - 1:
        return f"{words}. Done."
    return f'{words}. <tool_call>\n{{"name": "run", "arguments": {{"turn": {turn}}}}}\n</tool_call>'


async def chat_agent(sdk: Any, name: str, *, stream: bool) -> list[str]:
    """An agent on chat completions; what it was told, turn by turn."""
    messages: list[Any] = [{"role": "user", "content": f"I am {name}"}]
    told = []
    for _ in range(NUM_TURNS):
        options: dict[str, Any] = dict(model="m", messages=messages, tools=TOOLS)
        message = await chat_message(sdk, stream=stream, **options)
        calls = message.get("tool_calls", [])
        told.append(f"{message.get('content')}|{[call['function']['arguments'] for call in calls]}")
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "out"} for call in calls]
    return told


def expected_of_chat() -> list[str]:
    words = "step {}: the quick brown fox says hello to the user, and the assistant answers."
    calls = [f"{words.format(turn)}|['{{\"turn\": {turn}}}']" for turn in range(NUM_TURNS - 1)]
    return [*calls, f"{words.format(NUM_TURNS - 1)} Done.|[]"]
