"""Kill -9 at random instants under load, start again on the same folder, go on: what was lost, doubled or changed?

Twelve agents open sessions, talk, and close them, and simply repeat whatever request was cut off, two in three of them
with the header by which SDKs say so. They ask for one answer, whole or as a stream, for twelve samples at once, or send
out twelve sub-agents at once. A quarter of the kills hits the proxy before it takes requests. The engine keeps its own
book of every prompt and answer. At the end each row on disk is held against that book and against what the agents saw:

* lost     an answer that an agent got, but that no row trains
* doubled  more answers to a question than the agent got, an answer that is trained twice, or a session with two files
* changed  a prompt or an answer in a row that the engine never saw or gave in that form, or other rows on disk than the
           close of their session told
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import uvloop

from benchmarks import parts
from benchmarks.engine_book import Book, NotedConnection
from benchmarks.http_pool import Answer, HttpFailed, HttpPool
from benchmarks.mock_engine import PreparedAnswers
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report
from benchmarks.traffic import (
    Opened,
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

AGENTS = 12
_CHUNK = 25  # rounds on one folder
_MANY = 12  # samples, or sub-agents, at once
_WAYS = ("plain", "plain", "stream", "samples", "parallel")
_EARLY_SHARE = 0.25  # of the kills: before requests are taken
_USER, _END = "<|im_start|>user\n", "<|im_end|>"
_QUESTION = 600  # tokens at the end of a prompt in which the whole of its question stands


class _Text(msgspec.Struct):
    content: str = ""


class _Choice(msgspec.Struct):
    message: _Text = msgspec.field(default_factory=_Text)
    delta: _Text = msgspec.field(default_factory=_Text)


class _Said(msgspec.Struct):
    choices: list[_Choice]


_said = msgspec.json.Decoder(_Said)


@dataclass(slots=True)
class Seen:
    """What the agents saw: answers by session and question, rows by closed session."""

    answers: dict[str, Counter[str]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    ways: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    refusals: list[str] = field(default_factory=list)


class _Refused(Exception):
    """An answer that no agent should get."""


class Agents:
    """Clients that outlive the proxy."""

    def __init__(self, port: int, folder: Path) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._port = port
        self._folder = folder
        self.up = asyncio.Event()
        self.stopping = False
        self.seen = Seen()

    async def run(self, number: int) -> None:
        writer, rng = Writer(self._folder, number), random.Random(number)
        admin = admin_pool(self._port)
        while not self.stopping:
            try:
                await self.up.wait()
                opened = await open_ours(admin, group=str(number))
            except HttpFailed:  # a session that nobody will ever use may be left behind
                await asyncio.sleep(0.01)
                continue
            try:
                await self._session(admin, opened, writer, rng)
            except _Refused as refusal:
                self.seen.refusals.append(str(refusal))
        admin.close()

    async def _session(self, admin: HttpPool, opened: Opened, writer: Writer, rng: random.Random) -> None:
        auth = {"authorization": f"Bearer {opened.api_key}"}
        told = {"x-stainless-retry-count": "1"} if rng.random() < 2 / 3 else {}
        pools = HttpPool(self._url, auth), HttpPool(self._url, auth | told)
        seen = self.seen.answers[opened.id] = Counter()
        history, question = [], writer.text(600)
        for _ in range(rng.randrange(2, 8)):
            way = rng.choice(_WAYS)
            self.seen.ways[way] += 1
            if way == "parallel":
                tasks = [[message("system", f"you are agent {number}")] for number in range(_MANY)]
                await asyncio.gather(*(self._ask(pools, seen, task, writer.text(100), "plain") for task in tasks))
                continue
            text = await self._ask(pools, seen, history, question, way)
            history += [message("user", question), message("assistant", text)]
            question = writer.text(200)
        for pool in pools:
            pool.close()
        answer = await self._insist((admin, admin), f"/sessions/{opened.id}/close", b'{"reward":1.0}')
        self.seen.rows[opened.id] = answer.body.count(b'"token_ids"')

    async def _ask(
        self, pools: tuple[HttpPool, HttpPool], seen: Counter[str], history: Sequence[bytes], question: str, way: str
    ) -> str:
        """One question; the text of its (first) answer."""
        wishes = {"stream": b'"stream":true,', "samples": b'"n":%d,' % _MANY}.get(way, b"")
        body = b"{" + wishes + body_of([*history, message("user", question)])[1:]
        answer = await self._insist(pools, "/v1/chat/completions", body)
        if way == "stream":
            lines = [line[6:] for line in answer.body.splitlines() if line.startswith(b"data: ")]
            if lines[-1:] != [b"[DONE]"] or b'"error"' in answer.body:
                raise _Refused(f"a stream that ends with {answer.body[-200:]!r}")
            seen[question] += 1
            return "".join(choice.delta.content for line in lines[:-1] for choice in _said.decode(line).choices)
        choices = _said.decode(answer.body).choices
        seen[question] += len(choices)
        return choices[0].message.content

    async def _insist(self, pools: tuple[HttpPool, HttpPool], path: str, body: bytes) -> Answer:
        """Repeat a request until it is answered, in the second of the pools."""
        pool = pools[0]
        while True:
            await self.up.wait()
            try:
                answer = await pool.request("POST", path, body, timeout_s=30.0)
            except HttpFailed:
                self.seen.repeated += 1
                pool = pools[1]
                await asyncio.sleep(0.01)
                continue
            if answer.status == 200:
                return answer
            if answer.status != 503:
                raise _Refused(f"{path}: {answer.status} {answer.body[:200]!r}")
            await asyncio.sleep(0.05)


@dataclass(slots=True)
class Verdict:
    answered: int = 0
    lost: int = 0
    doubled: int = 0
    changed: int = 0


def judge(seen: Seen, book: Book, tokenizer: FolderTokenizer, rows: Path) -> Verdict:
    """Hold the rows on disk against what agents and engine saw."""
    verdict = Verdict()
    for session, num_rows in seen.rows.items():
        files = list(rows.glob(f"{session}*"))
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        trained: Counter[str] = Counter()
        questions: dict[str, str] = {}
        for row in lines:
            for name, start, stop, is_trained, *_ in row["turns"]:
                prompt = row["token_ids"][:start]
                given = book.answer_to(prompt)
                same = given is not None and given.tolist() == row["token_ids"][start:stop]
                verdict.changed += not same or set(row["mask"][start:stop]) != {int(is_trained)}
                trained[name] += is_trained
                text = tokenizer.decode(prompt[-_QUESTION:])
                questions[name] = text.rpartition(_USER)[2].partition(_END)[0]
        got, recorded = seen.answers[session], Counter(questions[name] for name, times in trained.items() if times)
        verdict.answered += got.total()
        verdict.lost += (got - recorded).total()
        verdict.doubled += (recorded - got).total() + sum(max(0, times - 1) for times in trained.values())
        verdict.doubled += max(0, len(files) - 1)
        verdict.changed += len(lines) != num_rows
    return verdict


@dataclass(slots=True)
class Rounds:
    """Seconds that each start took until requests were taken; kills that came before."""

    starts: list[float] = field(default_factory=list)
    early: int = 0


async def crash(rounds: int, scratch: Path, seed: int) -> tuple[Verdict, Seen, Rounds]:
    """Run all rounds."""
    folder = model_folder(scratch / "model")
    answers, rng = PreparedAnswers(folder), random.Random(seed)
    book, record, log = Book(answers), scratch / "record", scratch / "log"
    engine, port = free_port(), free_port()
    server = await asyncio.get_running_loop().create_server(lambda: NotedConnection(answers, book), "127.0.0.1", engine)
    agents, taken = Agents(port, folder), Rounds()
    tasks = [asyncio.create_task(agents.run(number)) for number in range(AGENTS)]
    for number in range(rounds + 1):
        with our_proxy(port, engine, folder, record, core=None, log=log) as child:
            if number < rounds and rng.random() < _EARLY_SHARE:
                taken.early += 1
                await asyncio.sleep(rng.uniform(0, 1.5))
            else:
                begun = time.perf_counter()
                await until_up(f"http://127.0.0.1:{port}")
                taken.starts.append(time.perf_counter() - begun)
                agents.up.set()
                if number == rounds:
                    agents.stopping = True
                    await asyncio.gather(*tasks)
                    break
                await asyncio.sleep(rng.uniform(0.05, 0.6))
            agents.up.clear()
            os.killpg(child.pid, signal.SIGKILL)
            await asyncio.to_thread(child.wait)
    server.close()
    return judge(agents.seen, book, FolderTokenizer(folder), record / "rows"), agents.seen, taken


def main() -> int:
    options = arguments(__doc__ or "", parts.extend)
    rounds = 20 if options.quick else 200
    found = Parts(options)
    taken = found.of("crash")
    while (done := sum(part["rounds"] for part in taken)) < rounds:
        if found.out_of_time:
            return found.pause()
        num = min(_CHUNK, rounds - done)
        with tempfile.TemporaryDirectory() as temporary:
            verdict, seen, times = uvloop.run(crash(num, Path(temporary), seed=1 + done))
        told = {"repeated": seen.repeated, "refusals": seen.refusals, "ways": seen.ways, "rounds": num}
        found.add("crash", {**asdict(verdict), **told, **asdict(times)})
        print(f"{done + num} kills: {verdict}", flush=True)
    counted = ("answered", "lost", "doubled", "changed", "repeated", "early")
    total = {name: sum(part[name] for part in taken) for name in counted}
    ways = sum((Counter(part["ways"]) for part in taken), Counter[str]())
    refusals = [refusal for part in taken for refusal in part["refusals"]]
    for refusal in refusals[:5]:
        print(refusal)
    starts = sorted(start for part in taken for start in part["starts"][1:])
    records = [
        Record(name="kill -9 under load, restarts", value=done, unit="", bar=f">= {rounds}", holds=done >= rounds),
        Record(name="of them before requests were taken", value=total["early"], unit=""),
        Record(name="turns that agents got an answer to", value=total["answered"], unit=""),
        *(Record(name=f"requests of the kind {way}", value=ways[way], unit="") for way in dict.fromkeys(_WAYS)),
        Record(name="requests that were cut off and repeated", value=total["repeated"], unit=""),
        Record(name="restart until requests are taken (median)", value=starts[len(starts) // 2], unit="s"),
        *(
            Record(name=name, value=value, unit="", bar="0", holds=value == 0)
            for name, value in (
                ("turns lost", total["lost"]),
                ("turns doubled", total["doubled"]),
                ("turns with other tokens than the engine's", total["changed"]),
                ("requests refused", len(refusals)),
            )
        ),
    ]
    return report(records, options.json)


if __name__ == "__main__":
    sys.exit(main())
