"""Kill -9 at random instants under load, start again on the same folder, go on: what was lost, doubled or changed?

Twelve agents open sessions, talk, and close them, and simply repeat whatever request was cut off. The engine keeps
its own book of every prompt and answer. At the end each row on disk is held against that book and against what the
agents saw:

* lost     an answer that an agent got, but that no row trains
* doubled  a session with more than one row or more answers than the agent got (agents here never branch), or two files
* changed  a prompt or an answer in a row that the engine never saw or gave in that form
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
from array import array
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import uvloop

from benchmarks import parts
from benchmarks.mock_engine import Connection, PreparedAnswers
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report
from benchmarks.traffic import (
    Completion,
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
from seamless_verl.proxy.http_pool import Answer, HttpFailed, HttpPool

AGENTS = 12
_CHUNK = 25  # rounds on one folder


class Book:
    """What crossed the engine's wire: answers by prompt. The engine is a function of the prompt, so one is enough."""

    def __init__(self, answers: PreparedAnswers) -> None:
        self._ids = [array("i", ids) for ids in answers.ids]
        self._by_prompt: dict[bytes, array[int]] = {}
        self.asked = 0

    def note(self, prompt: bytes, number: int) -> None:
        self.asked += 1
        self._by_prompt[array("i", msgspec.json.decode(prompt)).tobytes()] = self._ids[number]

    def answer_to(self, prompt: list[int]) -> array[int] | None:
        return self._by_prompt.get(array("i", prompt).tobytes())


class NotedConnection(Connection):
    """The mock engine with a book."""

    def __init__(self, answers: PreparedAnswers, book: Book) -> None:
        super().__init__(answers, lambda: 0.004)
        self._book = book

    def _answered(self, prompt: bytes, number: int) -> None:
        self._book.note(prompt, number)


@dataclass(slots=True)
class Seen:
    """What the agents saw."""

    turns: dict[str, int] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    repeated: int = 0
    refusals: list[str] = field(default_factory=list)


class Agents:
    """Clients that outlive the proxy."""

    def __init__(self, port: int, folder: Path) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._port = port
        self._folder = folder
        self.up = asyncio.Event()
        self.stopping = False
        self.seen = Seen()

    async def _insist(self, pool: HttpPool, method: str, path: str, body: bytes = b"") -> Answer:
        """Repeat a request until it is answered."""
        while True:
            await self.up.wait()
            try:
                answer = await pool.request(method, path, body, timeout_s=30.0)
            except HttpFailed:
                self.seen.repeated += 1
                await asyncio.sleep(0.01)
                continue
            if answer.status != 503:
                return answer
            await asyncio.sleep(0.05)

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
            await self._session(admin, opened.id, opened.api_key, writer, rng.randrange(2, 12))
        admin.close()

    async def _session(self, admin: HttpPool, session: str, key: str, writer: Writer, turns: int) -> None:
        pool = HttpPool(self._url, {"authorization": f"Bearer {key}"})
        history = [message("user", writer.text(600))]
        self.seen.turns[session] = 0
        for _ in range(turns):
            answer = await self._insist(pool, "POST", "/v1/chat/completions", body_of(history))
            if answer.status != 200:
                self.seen.refusals.append(f"turn: {answer.status} {answer.body[:200]!r}")
                return
            self.seen.turns[session] += 1
            text = msgspec.json.decode(answer.body, type=Completion).text
            history += [message("assistant", text), message("user", writer.text(200))]
        pool.close()
        answer = await self._insist(admin, "POST", f"/sessions/{session}/close", b'{"reward":1.0}')
        if answer.status != 200 or answer.body.count(b'"token_ids"') != 1:
            self.seen.refusals.append(f"close: {answer.status} {answer.body[:200]!r}")
        self.seen.closed.add(session)


@dataclass(slots=True)
class Verdict:
    answered: int = 0
    lost: int = 0
    doubled: int = 0
    changed: int = 0


def judge(seen: Seen, book: Book, rows: Path) -> Verdict:
    """Hold the rows on disk against what agents and engine saw."""
    verdict = Verdict()
    for session in seen.closed:
        files = list(rows.glob(f"{session}*"))
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        wanted = seen.turns[session]
        verdict.answered += wanted
        trained = sum(1 for row in lines for turn in row["turns"] if turn[3])
        verdict.lost += max(0, wanted - trained)
        verdict.doubled += max(0, trained - wanted) + max(0, len(lines) - 1) + max(0, len(files) - 1)
        for row in lines:
            for _, start, stop, *_ in row["turns"]:
                given = book.answer_to(row["token_ids"][:start])
                same = given is not None and given.tolist() == row["token_ids"][start:stop]
                verdict.changed += not same or set(row["mask"][start:stop]) != {1}
    return verdict


async def crash(rounds: int, scratch: Path, seed: int) -> tuple[Verdict, Seen, list[float]]:
    """Run all rounds; also the seconds that each restart took until requests were taken."""
    folder = model_folder(scratch / "model")
    answers, rng = PreparedAnswers(folder), random.Random(seed)
    book, record, log = Book(answers), scratch / "record", scratch / "log"
    engine, port = free_port(), free_port()
    server = await asyncio.get_running_loop().create_server(lambda: NotedConnection(answers, book), "127.0.0.1", engine)
    agents = Agents(port, folder)
    tasks = [asyncio.create_task(agents.run(number)) for number in range(AGENTS)]
    starts: list[float] = []
    for number in range(rounds + 1):
        with our_proxy(port, engine, folder, record, core=None, log=log) as child:
            begun = time.perf_counter()
            await until_up(f"http://127.0.0.1:{port}")
            starts.append(time.perf_counter() - begun)
            agents.up.set()
            if number < rounds:
                await asyncio.sleep(rng.uniform(0.05, 0.6))
                agents.up.clear()
                os.killpg(child.pid, signal.SIGKILL)
                await asyncio.to_thread(child.wait)
            else:
                agents.stopping = True
                await asyncio.gather(*tasks)
    server.close()
    return judge(agents.seen, book, record / "rows"), agents.seen, starts


def main() -> int:
    options = arguments(__doc__ or "", parts.extend)
    rounds = 20 if options.quick else 200
    found = Parts(options)
    taken = found.of("crash")
    while (done := sum(len(part["starts"]) - 1 for part in taken)) < rounds:
        if found.out_of_time:
            return found.pause()
        with tempfile.TemporaryDirectory() as temporary:
            verdict, seen, starts = uvloop.run(crash(min(_CHUNK, rounds - done), Path(temporary), seed=1 + done))
        told = {"repeated": seen.repeated, "refusals": seen.refusals, "starts": starts}
        found.add("crash", {**asdict(verdict), **told})
        print(f"{done + len(starts) - 1} kills: {verdict}", flush=True)
    total = {name: sum(part[name] for part in taken) for name in ("answered", "lost", "doubled", "changed", "repeated")}
    refusals = [refusal for part in taken for refusal in part["refusals"]]
    for refusal in refusals[:5]:
        print(refusal)
    starts = sorted(start for part in taken for start in part["starts"][1:])
    records = [
        Record(name="kill -9 under load, restarts", value=rounds, unit=""),
        Record(name="turns that agents got an answer to", value=total["answered"], unit=""),
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
