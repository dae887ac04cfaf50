"""Clients leave, sessions are closed and processes die at any instant of a recording: all samples or none, always?

In one process, on an event loop whose steps are counted (`tests.instants`): the real application, the real SQLite
journal (or none) in the loop's own thread, a scripted engine. Each session asks a question, often a second one behind
its answer, for one to four samples, whole or streamed. At random steps clients leave, repeat their request, the session
is closed, or a copy of the journal is what a killed process would leave; another process goes on from that copy.

* partial   a request of which some samples are in the rows and others are not
* unequal   other rows after a restart than before
* outside   turns that the journal or the tree holds, and no row
* lost      an answer that a client got, and that no row trains
* hung      something that never ended
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import parts
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report
from seamless_verl.proxy.engine import GenerationRequest
from seamless_verl.proxy.limits import Limits
from seamless_verl.trajectory.generation import Generation
from tests.fakes import ScriptedEngine, small_tokenizer
from tests.instants import Caller, House, SteppingJournal, steps

_SESSIONS = 10_000
_CHUNK = 500
_WITHIN = (8, 50)  # steps until the next event: soon, or anywhere; a request takes twenty to fifty
_LONG_S = 30.0
_ENDS = ("leave", "leave", "close", "close", "kill", "nothing")


@dataclass(slots=True)
class Found:
    """What all sessions came to; the first lines show that they were as wild as they should be."""

    sessions: int = 0
    journalled: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    all_recorded: int = 0
    none_recorded: int = 0
    restarts: int = 0
    partial: int = 0
    unequal: int = 0
    outside: int = 0
    lost: int = 0
    violations: int = 0
    hung: int = 0
    stories: list[str] = field(default_factory=list)


class UnevenEngine(ScriptedEngine):
    """Samples of one request end at different steps, some with the same words."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(small_tokenizer(), lambda prompt: f"answer {rng.randrange(4)}", num_versions=2, streams=True)
        self._rng = rng

    async def generate(self, request: GenerationRequest) -> Generation:
        await steps(self._rng.randrange(5))
        return await super().generate(request)


class Trial:
    """One session and whatever happens to it."""

    def __init__(self, rng: random.Random, found: Found, folder: Path, number: int) -> None:
        self._rng, self._found = rng, found
        self._copy = folder / f"{number}.sqlite"
        self._journal: SteppingJournal | None = None
        if rng.random() < 0.7:
            found.journalled += 1
            path = folder / f"{number}.journal"
            self._journal = SteppingJournal(path, before=rng.randrange(12), after=rng.randrange(12))
        self._house = self._start(self._journal)
        self._wanted: dict[str, int] = {}  # samples by question
        self._callers: list[Caller] = []
        self._names = count()

    def _start(self, journal: SteppingJournal | None) -> House:
        limits = Limits(orphan_grace_s=0.0)
        return House(journal, lambda prompt: "", engine=UnevenEngine(self._rng), limits=limits)

    async def run(self) -> None:
        session, key = await self._house.open()
        history: list[dict[str, str]] = []
        if self._rng.random() < 0.5:
            first = self._ask(key, history)
            answer = (await self._content(first))[0]
            history = [*first.messages, {"role": "assistant", "content": answer}]
        caller = self._ask(key, history)
        for end in self._rng.sample(_ENDS, self._rng.randint(1, 3)):
            await steps(self._rng.randrange(self._rng.choice(_WITHIN)))
            self._found.ends[end] += 1
            if end == "leave":
                self._callers[-1].caller.leave()
                if self._rng.random() < 0.5:
                    await steps(self._rng.randrange(6))
                    self._repeat(key, caller)
            elif end == "close":
                break
            elif end == "kill" and self._journal is not None:
                await self._kill(session, key, caller)
        result = await self._house.close(session)
        await self._judge(session, result, self._callers)
        if self._journal is not None:
            self._journal.copy_to(self._copy)
            again = await self._restarted(session)
            if any(again[name] != result[name] for name in ("rows", "kinds", "drift")):
                self._blame("unequal", f"{len(result['rows'])} rows, then {len(again['rows'])}")
            await self._journal.close()

    def clean(self) -> None:
        for left in self._copy.parent.iterdir():
            left.unlink()

    def _ask(self, key: str, history: list[dict[str, str]]) -> _Asked:
        question = f"question {next(self._names)}"
        n = self._wanted[question] = self._rng.randint(1, 4)
        messages = [*history, {"role": "user", "content": question}]
        body = {"messages": messages, "n": n, "stream": self._rng.random() < 0.3}
        asked = _Asked(caller=Caller(self._house.app, key, body), body=body, messages=messages)
        self._callers.append(asked)
        return asked

    def _repeat(self, key: str, asked: _Asked, house: House | None = None) -> _Asked:
        caller = Caller((house or self._house).app, key, asked.body, retry=1)
        again = _Asked(caller=caller, body=asked.body, messages=asked.messages)
        self._callers.append(again)
        return again

    async def _content(self, asked: _Asked) -> list[str]:
        answers = await asked.caller.answered()
        if asked.body["stream"]:
            pieces = [choice for event in answers for choice in event["choices"] if choice["index"] == 0]
            return ["".join(piece["delta"].get("content") or "" for piece in pieces)]
        return [choice["message"]["content"] for choice in answers["choices"]]

    async def _kill(self, session: str, key: str, asked: _Asked) -> None:
        """What is on disk now has what clients have now; another process answers who asks again, and ends well."""
        assert self._journal is not None
        known = [one for one in self._callers if one.caller.task.done()]
        self._journal.copy_to(self._copy)
        await self._judge(session, await self._restarted(session), known)
        self._journal.copy_to(self._copy)
        journal = SteppingJournal(self._copy, before=1, after=1)
        house = self._start(journal)
        again = Caller(house.app, key, asked.body, retry=1)
        await again.task
        if again.status != 200:
            self._blame("lost", f"{again.status} after a restart")
        later = await house.close(session)
        self._count(later)
        await journal.close()

    async def _restarted(self, session: str) -> Any:
        self._found.restarts += 1
        journal = SteppingJournal(self._copy)
        result = await self._start(journal).close(session)
        if (held := journal.num_turns()) != len(_trained(result)):
            self._blame("outside", f"{held} turns in the journal, {len(_trained(result))} in the rows")
        await journal.close()
        return result

    async def _judge(self, session: str, result: Any, callers: list[_Asked]) -> None:
        trained = self._count(result)
        for asked in callers:
            names = await asked.names()
            if not names <= trained.keys():
                self._blame("lost", f"{sorted(names - trained.keys())}")
        if set(trained.values()) - {1}:
            self._blame("outside", "an answer that is trained twice")

    def _count(self, result: Any) -> Counter[str]:
        """How often each answer is trained; samples of one request are all there, or none is."""
        trained = _trained(result)
        questions = Counter(_question(row, turn) for row in result["rows"] for turn in row["turns"] if turn[3])
        for question, n in self._wanted.items():
            found = questions[question]
            self._found.all_recorded += found == n
            self._found.none_recorded += found == 0
            if found not in (0, n):
                self._blame("partial", f"{found} of {n} samples")
        self._found.violations += len(result["audit"]["violations"])
        self._found.stories += [story for _, story in result["audit"]["violations"]]
        return trained

    def _blame(self, what: str, story: str) -> None:
        setattr(self._found, what, getattr(self._found, what) + 1)
        self._found.stories.append(f"{what}: {story}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    caller: Caller
    body: dict[str, Any]
    messages: list[dict[str, str]]

    async def names(self) -> set[str]:
        """Answers of which the client has the end."""
        if self.caller.status != 200 or self.caller.has_left:
            return set()
        answers = await self.caller.answered()
        if not self.body["stream"]:
            return {answers["id"].removeprefix("chatcmpl-")}
        ends = any(choice["finish_reason"] for event in answers for choice in event.get("choices", ()))
        return {answers[0]["id"].removeprefix("chatcmpl-")} if ends else set()


def _trained(result: Any) -> Counter[str]:
    return Counter(turn[0] for row in result["rows"] for turn in row["turns"] if turn[3])


def _question(row: Any, turn: Any) -> str:
    """The question that an answer in a row answers: the last one of its prompt."""
    text = small_tokenizer().decode(row["token_ids"][: turn[1]])
    return text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


async def instants(num: int, seed: int) -> Found:
    """So many sessions."""
    found = Found()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(num):
            trial = Trial(random.Random(seed + number), found, Path(folder), number)
            try:
                await asyncio.wait_for(trial.run(), _LONG_S)
            except asyncio.TimeoutError:
                found.hung += 1
                found.stories.append(f"session {seed + number} hangs")
            found.sessions += 1
            trial.clean()
    return found


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=_SESSIONS)
    parts.extend(parser)


def main() -> int:
    options = arguments(__doc__ or "", _extend)
    total = 300 if options.quick else options.sessions
    kept = Parts(options)
    taken = kept.of("instants")
    while (done := sum(part["sessions"] for part in taken)) < total:
        if kept.out_of_time:
            return kept.pause()
        found = asyncio.run(instants(min(_CHUNK, total - done), seed=done))
        kept.add("instants", msgspec.to_builtins(found))
        print(f"{done + found.sessions} sessions: {found.stories[:3]}", flush=True)
    sums = {spec.name: sum(part[spec.name] for part in taken) for spec in fields(Found) if spec.type == "int"}
    ends = sum((Counter(part["ends"]) for part in taken), Counter[str]())
    records = [
        Record(name="sessions", value=done, unit="", bar=f">= {total}", holds=done >= total),
        Record(name="of them with a journal", value=sums["journalled"], unit=""),
        *(Record(name=f"events of the kind {end}", value=ends[end], unit="") for end in dict.fromkeys(_ENDS)),
        Record(name="restarts", value=sums["restarts"], unit=""),
        Record(name="requests with all samples in the rows", value=sums["all_recorded"], unit=""),
        Record(name="requests with none", value=sums["none_recorded"], unit=""),
    ]
    for name, what in (
        ("partial", "requests with some samples in the rows"),
        ("unequal", "sessions with other rows after a restart"),
        ("outside", "sessions with turns outside their rows"),
        ("lost", "answers that a client got, in no row"),
        ("violations", "audit violations"),
        ("hung", "sessions that hung"),
    ):
        records.append(Record(name=what, value=sums[name], unit="", bar="0", holds=sums[name] == 0))
    return report(records, options.json)


if __name__ == "__main__":
    sys.exit(main())
