"""Agents that do everything agents do, at random, over HTTP: are the rows what the engine said, each answer once?

Each session makes sixteen moves on any conversation that it knows: go on (whole, as a stream, with several samples), go
on in parallel, rewind, ask the same again, repeat a request as an SDK does, leave in the middle of an answer, start a
sub-agent, compact the context, respell or rewrite the history. Meanwhile the weights change, again and again, behind
the proxy's gate. Engine and agents keep books of their own, outside the proxy. At the end of a session:

* violations   what the proxy's own audit found between its rows and its record of the engine
* changed      an answer in a row that the engine never gave to the tokens before it
* misread      tokens before an answer that are not what its agent said in the request
* misdated     an answer with another weight version than it was given under
* lost         an answer that the agent got, and that no row trains
* doubled      an answer that is trained twice
* unasked      an answer in a row that the agent never got, and not the one to a request that it left for good
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import uvloop

from benchmarks import parts
from benchmarks.engine_book import Book, NotedConnection
from benchmarks.http_pool import HttpFailed, HttpPool
from benchmarks.mock_engine import PreparedAnswers
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report
from benchmarks.traffic import (
    Writer,
    admin_pool,
    body_of,
    free_port,
    message,
    model_folder,
    open_ours,
    our_proxy,
    until_up,
)
from seamless_verl.proxy.text.tokenizer import FolderTokenizer

_AGENTS = 16
_MOVES = 16
_CHUNK = 5_000  # turns on one folder
_PUBLISH_S = 0.3  # between two versions of the weights
_GIVEN = ("extend", "extend", "stream", "samples", "parallel", "rewind", "again", "retry", "leave")
_NEW = ("sub_agent", "compact", "respell", "rewrite")


class _Said(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Said


class _Answer(msgspec.Struct):
    id: str
    choices: list[_Choice]


class _Delta(msgspec.Struct):
    content: str = ""


class _Piece(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    id: str
    choices: list[_Piece]


class _Row(msgspec.Struct):
    token_ids: list[int]
    mask: list[int]
    turns: list[tuple[str, int, int, bool, str, int]]
    version_spans: list[tuple[int, int, int]]


class _Audit(msgspec.Struct):
    violations: list[tuple[str, str]]


class _Closed(msgspec.Struct):
    rows: list[_Row]
    audit: _Audit
    kinds: dict[str, int]


_answers = msgspec.json.Decoder(_Answer)
_chunks = msgspec.json.Decoder(_Chunk)
_closed = msgspec.json.Decoder(_Closed)


@dataclass(slots=True)
class Found:
    """What all sessions came to; ``kinds`` and ``moves`` show that the traffic was as wild as it should be."""

    turns: int = 0
    violations: int = 0
    changed: int = 0
    misread: int = 0
    misdated: int = 0
    versions: int = 0
    lost: int = 0
    doubled: int = 0
    unasked: int = 0
    left: int = 0
    left_answered: int = 0
    refused: int = 0
    broken: int = 0
    stories: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)


class WildAgent:
    """One session; every conversation is a list of messages as JSON texts with their roles."""

    def __init__(self, url: str, key: str, writer: Writer, rng: random.Random, found: Found) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self._pool = HttpPool(url, headers)
        self._retries = HttpPool(url, {**headers, "x-stainless-retry-count": "1"})
        self._writer, self._rng, self._found = writer, rng, found
        self._known: list[list[tuple[str, str]]] = []
        self._asked: list[list[tuple[str, str]]] = []
        self.got: dict[str, list[tuple[str, str]]] = {}  # requests by the names of their (first) answers
        self.more: Counter[str] = Counter()  # answers by question that came without a name: further samples
        self.left: list[str] = []  # questions cut off and never repeated: whether they were answered nobody knows

    async def run(self) -> None:
        for _ in range(_MOVES):
            moves = (*_GIVEN, *_NEW) if self._known else ("sub_agent",)
            move = self._rng.choice(moves)
            self._found.moves[move] += 1
            await self._move(move)
        self._pool.close()
        self._retries.close()

    async def _move(self, move: str) -> None:
        if move in ("again", "retry"):
            request = self._rng.choice(self._asked)
            await self._ask(request, self._retries if move == "retry" else self._pool)
        elif move == "parallel":
            base = self._rng.choice(self._known)
            await asyncio.gather(*(self._ask([*base, self._question()]) for _ in range(self._rng.randint(2, 3))))
        elif move == "leave":
            await self._leave([*self._rng.choice(self._known), self._question()])
        elif move in ("stream", "samples"):
            n = self._rng.randint(2, 4) if move == "samples" else 1
            request = [*self._rng.choice(self._known), self._question()]
            await self._ask(request, n=n, stream=move == "stream")
        else:
            await self._ask([*self._history(move), self._question()])

    def _question(self) -> tuple[str, str]:
        return "user", self._writer.text(60)

    def _history(self, move: str) -> list[tuple[str, str]]:
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

    async def _ask(
        self, request: list[tuple[str, str]], pool: HttpPool | None = None, *, n: int = 1, stream: bool = False
    ) -> None:
        wishes = b'"stream":true,' if stream else b'"n":%d,' % n
        body = b"{" + wishes + body_of([message(role, content) for role, content in request])[1:]
        try:
            answer = await (pool or self._pool).request("POST", "/v1/chat/completions", body, timeout_s=60.0)
        except HttpFailed:  # an idle connection that the server was about to close: SDKs repeat the request
            self._found.broken += 1
            answer = await self._retries.request("POST", "/v1/chat/completions", body, timeout_s=60.0)
        if answer.status != 200:
            self._found.refused += 1
            self._found.stories.append(f"{answer.status}: {answer.body[:200]!r}")
            return
        name, texts = _streamed(answer.body) if stream else _whole(answer.body)
        self.got[name.removeprefix("chatcmpl-")] = request
        self.more[request[-1][1]] += len(texts) - 1
        self._asked.append(request)
        self._known.append([*request, ("assistant", self._rng.choice(texts))])

    async def _leave(self, request: list[tuple[str, str]]) -> None:
        """Cut the connection somewhere between sending and the answer; often come back with the same request."""
        asking = asyncio.ensure_future(self._ask(request))
        await asyncio.wait({asking}, timeout=self._rng.uniform(0, 0.02))
        asking.cancel()
        (end,) = await asyncio.gather(asking, return_exceptions=True)
        if self._rng.random() < 0.5:
            await self._ask(request, self._retries)
        elif isinstance(end, asyncio.CancelledError):
            self.left.append(request[-1][1])


def _whole(body: bytes) -> tuple[str, list[str]]:
    said = _answers.decode(body)
    return said.id, [choice.message.content for choice in said.choices]


def _streamed(body: bytes) -> tuple[str, list[str]]:
    lines = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
    if lines[-1:] != [b"[DONE]"] or b'"error"' in body:
        raise RuntimeError(f"a stream that ends with {body[-300:]!r}")
    chunks = [_chunks.decode(line) for line in lines[:-1]]
    return chunks[0].id, ["".join(choice.delta.content for chunk in chunks for choice in chunk.choices)]


def _read(prompt: str) -> list[tuple[str, str]]:
    """The messages of a prompt's text; white space around them is the template's or a spelling."""
    parts = [part.partition("\n") for part in prompt.split("<|im_start|>")[1:]]
    return [(role, content.partition("<|im_end|>")[0].strip()) for role, _, content in parts]


def judge(body: bytes, agent: WildAgent, book: Book, tokenizer: FolderTokenizer, found: Found) -> int:
    """Hold the rows of a closed session against the agent and the engine; answers in the rows."""
    closed = _closed.decode(body)
    found.kinds.update(closed.kinds)
    found.violations += len(closed.audit.violations)
    found.stories += [story for _, story in closed.audit.violations]
    trained: Counter[str] = Counter()
    asked: dict[str, list[int]] = {}
    for row in closed.rows:
        for name, start, stop, is_trained, _, _ in row.turns:
            given = book.answer_to(row.token_ids[:start])
            same = given is not None and given[: stop - start].tolist() == row.token_ids[start:stop]
            found.changed += not same or set(row.mask[start:stop]) != {int(is_trained)}
            trained[name] += is_trained
            asked[name] = row.token_ids[:start]
            known = book.versions_of(row.token_ids[:start])
            spans = [span for span in row.version_spans if start <= span[0] and span[1] <= stop]
            dated = sum(end - begin for begin, end, version in spans if version in known)
            found.misdated += dated != stop - start
    named = {name for name, times in trained.items() if times}
    found.lost += len(agent.got.keys() - named)
    for name, request in agent.got.items():
        said = [(role, content.strip()) for role, content in request]
        found.misread += name in asked and _read(tokenizer.decode(asked[name])) != [*said, ("assistant", "")]
    found.doubled += sum(times - 1 for times in trained.values() if times > 1)
    found.left += len(agent.left)
    left, more = list(agent.left), agent.more.copy()
    for name in named - agent.got.keys():
        last = _read(tokenizer.decode(asked[name]))[-2][1]
        if more[last]:
            more[last] -= 1
            continue
        question = next((text for text in left if text == last), None)
        if question is None:
            found.unasked += 1
            found.stories.append(f"{name}: an answer that nobody asked for")
        else:
            left.remove(question)
            found.left_answered += 1
    found.lost += more.total()
    return len(named)


async def _publish(port: int, book: Book, found: Found) -> None:
    """New weights behind the gate, for ever."""
    admin = admin_pool(port)
    while True:
        await asyncio.sleep(_PUBLISH_S)
        paused = await admin.request("POST", "/pause", b'{"timeout_s":30}', timeout_s=60.0)
        if paused.status != 200 or b'"quiet":true' not in paused.body:
            raise RuntimeError(f"pause: {paused.status}: {paused.body[:300]!r}")
        book.version += 1
        found.versions += 1
        await admin.request("POST", "/resume", b'{"version":%d}' % book.version, timeout_s=60.0)


async def wild(turns: int, scratch: Path, seed: int) -> Found:
    """Sessions until ``turns`` answers stand in rows."""
    folder, found = model_folder(scratch / "model"), Found()
    answers, tokenizer = PreparedAnswers(folder), FolderTokenizer(folder)
    book, engine, port = Book(answers), free_port(), free_port()
    server = await asyncio.get_running_loop().create_server(lambda: NotedConnection(answers, book), "127.0.0.1", engine)
    numbers = iter(range(1 << 30))

    async def agent() -> None:
        admin = admin_pool(port)
        while found.turns < turns:
            number = next(numbers)
            opened = await open_ours(admin, group=str(number))
            writer, rng = Writer(folder, seed + number), random.Random(seed + number)
            one = WildAgent(f"http://127.0.0.1:{port}", opened.api_key, writer, rng, found)
            await one.run()
            answer = await admin.request("POST", f"/sessions/{opened.id}/close", b"", timeout_s=60.0)
            if answer.status != 200:
                raise RuntimeError(f"close: {answer.status}: {answer.body[:300]!r}")
            found.turns += judge(answer.body, one, book, tokenizer, found)
        admin.close()

    with our_proxy(port, engine, folder, scratch / "record", core=None, log=scratch / "log"):
        await until_up(f"http://127.0.0.1:{port}")
        publishing = asyncio.ensure_future(_publish(port, book, found))
        await asyncio.gather(*(agent() for _ in range(_AGENTS)))
        publishing.cancel()
        await asyncio.wait({publishing})
        if not publishing.cancelled():
            publishing.result()
    server.close()
    return found


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=100_000)
    parts.extend(parser)


def main() -> int:
    options = arguments(__doc__ or "", _extend)
    total = 2_000 if options.quick else options.turns
    kept = Parts(options)
    taken = kept.of("audit")
    while (done := sum(part["turns"] for part in taken)) < total:
        if kept.out_of_time:
            return kept.pause()
        with tempfile.TemporaryDirectory() as temporary:
            found = uvloop.run(wild(min(_CHUNK, total - done), Path(temporary), seed=done * 1000))
        kept.add("audit", msgspec.to_builtins(found))
        print(f"{done + found.turns} turns: {found.kinds}, {found.stories[:2]}", flush=True)
    kinds = sum((Counter(part["kinds"]) for part in taken), Counter[str]())
    moves = sum((Counter(part["moves"]) for part in taken), Counter[str]())
    records = [
        Record(name="turns of randomised agents", value=done, unit="", bar=f">= {total}", holds=done >= total),
        *(Record(name=f"matched {kind}", value=count, unit="") for kind, count in sorted(kinds.items())),
        Record(name="versions of the weights", value=sum(part["versions"] for part in taken), unit=""),
        *(Record(name=f"moves of the kind {move}", value=moves[move], unit="") for move in ("stream", "samples")),
        Record(name="connections that broke", value=sum(part["broken"] for part in taken), unit=""),
        Record(name="requests left for good", value=sum(part["left"] for part in taken), unit=""),
        Record(name="of them recorded all the same", value=sum(part["left_answered"] for part in taken), unit=""),
    ]
    for name, what in (
        ("violations", "audit violations"),
        ("changed", "answers with other tokens than the engine's"),
        ("misread", "answers to another prompt than was asked"),
        ("misdated", "answers with another weight version"),
        ("lost", "answers lost"),
        ("doubled", "answers trained twice"),
        ("unasked", "answers that nobody got, to requests that nobody left"),
        ("refused", "requests refused"),
    ):
        count = sum(part[name] for part in taken)
        records.append(Record(name=what, value=count, unit="", bar="0", holds=count == 0))
    return report(records, options.json)


if __name__ == "__main__":
    sys.exit(main())
