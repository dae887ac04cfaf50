"""An agent that does at random everything that agents do, over HTTP, and keeps its own book of it.

Sixteen moves on any conversation that it knows: go on (whole, as a stream, with several samples), go on in parallel,
rewind, ask the same again, repeat a request as an SDK does, leave in the middle of an answer, continue a plain text,
start a sub-agent, compact the context, respell or rewrite the history. At last it asks once more, and its session may
be closed before the answers are there.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.http_pool import Answer, HttpFailed, HttpPool
from benchmarks.traffic import Writer, body_of, message

_MOVES = 16
_GIVEN = ("extend", "extend", "stream", "samples", "parallel", "rewind", "again", "retry", "leave", "plain")
_NEW = ("sub_agent", "compact", "respell", "rewrite")
_TRIES, _PAUSE_S = 600, 0.05  # while the proxy is started again

Said = tuple[str, str]  # role and content


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """A chat template, and what it writes, said once more in Python.

    Attributes:
        template: Jinja.
        stops: texts of the tokens that end an answer; the engine ends its answers with the first.
        part: one message; ``{role}`` and ``{content}``.
        end: follows each message, but is not written twice where the next part begins with a stop token.
        now: follows the last message: such a template writes each conversation anew with every turn.
    """

    template: str
    stops: tuple[str, ...]
    part: str
    end: str = ""
    now: str = ""

    def text(self, messages: Sequence[Said]) -> str:
        """A prompt, without its white space, which spellings may change."""
        parts = [self.part.format(role=role, content=content) + self.end for role, content in messages]
        return squeezed(
            "".join(parts)[: -len(self.end) or None]
            + self.now
            + self.end
            + self.part[: self.part.index("{c")].format(role="assistant")
        )

    def make(self, base: Path, folder: Path) -> Path:
        """A model's folder with this template, from one with another."""
        from tokenizers import Tokenizer

        folder.mkdir(exist_ok=True)
        tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
        tokenizer.add_special_tokens([stop for stop in self.stops if tokenizer.token_to_id(stop) is None])
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "words.txt").write_text((base / "words.txt").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": self.stops[0]}))
        stops = [tokenizer.token_to_id(stop) for stop in self.stops]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
        (folder / "chat_template.jinja").write_text(self.template)
        return folder


_CHATML = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}NOW<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PART = "<|im_start|>{role}\n{content}"
STYLES = {
    "ends": Style(template=_CHATML.replace("NOW", ""), stops=("<|im_end|>",), part=_PART, end="<|im_end|>"),
    # A role's header ends the answer before it: what follows from another role cuts the stop token.
    "headers": Style(
        template="{%- for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{%- if add_generation_prompt %}<|assistant|>\n{% endif %}",
        stops=("<|user|>", "<|system|>"),
        part="<|{role}|>\n{content}",
    ),
    "moves": Style(
        template=_CHATML.replace("NOW", "{% if loop.last %}(now){% endif %}"),
        stops=("<|im_end|>",),
        part=_PART,
        end="<|im_end|>",
        now="(now)",
    ),
}


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


@dataclass(slots=True)
class Met:
    """What the traffic of all agents was like."""

    moves: Counter[str] = field(default_factory=Counter)
    broken: int = 0
    refused: list[str] = field(default_factory=list)


class WildAgent:
    """One session; every conversation is a list of roles with contents.

    Attributes:
        got: requests by the names of their (first) answers; a text where it was a plain prompt.
        told: what these said.
        more: answers by question that came without a name: further samples.
        left: questions that were cut off, and not asked again before the session was closed: whether they were answered
        nobody knows.
        closing: the session is being closed.
    """

    def __init__(self, url: str, key: str, writer: Writer, rng: random.Random, met: Met) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self._pool = HttpPool(url, headers)
        self._retries = HttpPool(url, {**headers, "x-stainless-retry-count": "1"})
        self._writer, self._rng, self._met = writer, rng, met
        self._known: list[list[Said]] = []
        self._asked: list[list[Said]] = []
        self.got: dict[str, list[Said] | str] = {}
        self.told: dict[str, str] = {}
        self.more: Counter[Said] = Counter()
        self.left: list[Said] = []
        self.closing = False

    async def run(self) -> None:
        for _ in range(_MOVES):
            moves = (*_GIVEN, *_NEW) if self._known else ("sub_agent",)
            move = self._rng.choice(moves)
            self._met.moves[move] += 1
            await self._move(move)

    async def last_words(self) -> None:
        """Requests that may be under way while the session is closed."""
        base = self._rng.choice(self._known)
        await asyncio.gather(*(self._ask([*base, self._question()]) for _ in range(4)))

    def close(self) -> None:
        self._pool.close()
        self._retries.close()

    async def _move(self, move: str) -> None:
        if move in ("again", "retry"):
            await self._ask(self._rng.choice(self._asked), is_retry=move == "retry")
        elif move == "parallel":
            base = self._rng.choice(self._known)
            await asyncio.gather(*(self._ask([*base, self._question()]) for _ in range(self._rng.randint(2, 3))))
        elif move == "leave":
            await self._leave([*self._rng.choice(self._known), self._question()])
        elif move in ("stream", "samples"):
            n = self._rng.randint(2, 4) if move == "samples" else 1
            await self._ask([*self._rng.choice(self._known), self._question()], n=n, stream=move == "stream")
        elif move == "plain":
            await self._continue()
        else:
            await self._ask([*self._history(move), self._question()])

    def _question(self) -> Said:
        return self._rng.choice(("user", "user", "user", "system")), self._writer.text(60)

    def _history(self, move: str) -> list[Said]:
        if move == "sub_agent":
            return [("system", f"you are agent {self._rng.randrange(3)}")]
        known = self._rng.choice(self._known)
        if move == "compact":
            return [known[0], ("user", "so far: " + self._writer.text(80))]
        if move == "rewind":
            return known[: self._rng.randrange(1, len(known) + 1)]
        if move == "extend":
            return known
        at = self._rng.choice([at for at, (role, _) in enumerate(known) if role == "assistant"])
        content = f"{known[at][1]}\n" if move == "respell" else "I never said this"
        return [*known[:at], ("assistant", content), *known[at + 1 :]]

    async def _continue(self) -> None:
        """A text completion."""
        plain = [name for name, asked in self.got.items() if isinstance(asked, str)]
        name = self._rng.choice(plain) if plain and self._rng.random() < 0.5 else ""
        text = f"{self.got[name]}{self.told[name]} {self._writer.text(40)}" if name else self._writer.text(60)
        answer = await self._post(
            "/v1/completions", json.dumps({"model": "mock", "prompt": text, "max_tokens": 1000}).encode()
        )
        if answer is not None:
            said = json.loads(answer.body)
            self._keep(said["id"], text, said["choices"][0]["text"])

    async def _ask(self, request: list[Said], *, is_retry: bool = False, n: int = 1, stream: bool = False) -> None:
        wishes = b'"stream":true,' if stream else b'"n":%d,' % n
        body = b"{" + wishes + body_of([message(role, content) for role, content in request])[1:]
        answer = await self._post("/v1/chat/completions", body, is_retry=is_retry, question=request[-1])
        if answer is None:
            return
        name, texts = _streamed(answer.body) if stream else _whole(answer.body)
        self._keep(name, request, texts[0])
        self.more[request[-1]] += len(texts) - 1
        self._asked.append(request)
        self._known.append([*request, ("assistant", self._rng.choice(texts))])

    def _keep(self, name: str, request: list[Said] | str, text: str) -> None:
        name = name.partition("-")[2]
        self.got[name], self.told[name] = request, text

    async def _post(
        self, path: str, body: bytes, *, is_retry: bool = False, question: Said | None = None
    ) -> Answer | None:
        """The answer; None where the session was closed before. What breaks off is repeated, as SDKs do."""
        broke = False
        for _ in range(_TRIES):
            pool = self._retries if is_retry else self._pool
            try:
                answer = await pool.request("POST", path, body, timeout_s=60.0)
            except HttpFailed:
                self._met.broken += 1
                is_retry = broke = True
            else:
                if answer.status == 200 and not _broke_off(answer.body):
                    return answer
                if self.closing and answer.status in (401, 404, 409):
                    if broke and question is not None:  # it may have been answered before it broke
                        self.left.append(question)
                    return None
                if answer.status not in (200, 503):
                    self._met.refused.append(f"{answer.status}: {answer.body[:200]!r}")
                    return None
                is_retry = True
            await asyncio.sleep(_PAUSE_S)
        raise RuntimeError(f"no answer in {_TRIES} tries")

    async def _leave(self, request: list[Said]) -> None:
        """Cut the connection somewhere between sending and the answer; often come back with the same request."""
        asking = asyncio.ensure_future(self._ask(request))
        await asyncio.wait({asking}, timeout=self._rng.uniform(0, 0.02))
        asking.cancel()
        (end,) = await asyncio.gather(asking, return_exceptions=True)
        if self._rng.random() < 0.5:
            await self._ask(request, is_retry=True)
        elif isinstance(end, asyncio.CancelledError):
            self.left.append(request[-1])


def _whole(body: bytes) -> tuple[str, list[str]]:
    said: dict[str, Any] = json.loads(body)
    return said["id"], [choice["message"]["content"] for choice in said["choices"]]


def _broke_off(body: bytes) -> bool:
    return body.startswith(b"data: ") and (not body.rstrip().endswith(b"data: [DONE]") or b'"error"' in body)


def _streamed(body: bytes) -> tuple[str, list[str]]:
    lines = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
    chunks = [json.loads(line) for line in lines[:-1]]
    return chunks[0]["id"], ["".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])]
