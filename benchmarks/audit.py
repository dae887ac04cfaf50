"""Agents that do everything agents do, at random, over HTTP: is what is trained what the engine said, each answer once?

Sessions of `benchmarks.wild_agent`, under three chat templates. Meanwhile weights change behind the proxy's gate, again
and again, which breaks off what is under way, and the proxy is killed and started from its journal. Engine and agents
keep books of their own (`benchmarks.wire_ledger`), outside the proxy. At the end of a session its rows, as they are
answered, as they lie on the disk and as verl's samples, are held against both:

* violations   what the proxy's own audit found between its rows and its record of the engine
* changed      an answer in a row that the engine never gave to the tokens before it, or another than the agent was told
* misread      tokens before an answer that are not what its agent said in the request
* masked       a mask or a log-prob that is not the engine's: 1 on the answers that the row trains, 0 elsewhere
* misdated     tokens with another weight version than they were made by
* lost         an answer that the agent got, and that no row trains
* doubled      an answer that is trained twice
* unasked      an answer in a row that the agent never got, and not the one to a request that it left for good
* unlike       rows on the disk, or samples of verl, that differ from the rows, or have another reward
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics

from benchmarks import parts
from benchmarks.http_pool import HttpFailed
from benchmarks.mock_engine import PreparedAnswers
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report
from benchmarks.traffic import (
    Opened,
    Writer,
    admin_pool,
    free_port,
    model_folder,
    our_proxy,
    until_up,
)
from benchmarks.wild_agent import STYLES, Met, Style, WildAgent, squeezed
from benchmarks.wire_ledger import LedgerConnection, WireLedger
from seamless_verl.proxy.text.tokenizer import FolderTokenizer
from seamless_verl.trajectory.rows import Row
from seamless_verl.verl_adapter.rollout.verl_samples import row_to_output

_AGENTS = 16
_CHUNK = 5_000  # turns on one folder
_PUBLISH_S = 0.3  # between two versions of the weights
_VERSIONS = 4  # between two deaths of the proxy
_BROKEN = ("violations", "changed", "misread", "masked", "misdated", "lost", "doubled", "unasked", "unlike", "refused")


@dataclass(slots=True)
class Found:
    """What all sessions came to; ``kinds`` and ``moves`` show that the traffic was as wild as it should be."""

    turns: int = 0
    violations: int = 0
    changed: int = 0
    misread: int = 0
    masked: int = 0
    misdated: int = 0
    lost: int = 0
    doubled: int = 0
    unasked: int = 0
    unlike: int = 0
    refused: int = 0
    left: int = 0
    left_answered: int = 0
    broken: int = 0
    versions: int = 0
    seams: int = 0
    seams_trained: int = 0
    cuts: int = 0
    restarts: int = 0
    stories: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)


class Judge:
    """Holds rows against the agents and the engine.

    Args:
        records: the folder with the rows of closed sessions.
    """

    def __init__(self, style: Style, tokenizer: FolderTokenizer, ledger: WireLedger, records: Path, found: Found):
        self._style, self._tokenizer, self._ledger = style, tokenizer, ledger
        self._records, self._found = records, found

    def judge(self, body: bytes, agent: WildAgent, reward: float) -> int:
        """Answers that a closed session trains."""
        closed: dict[str, Any] = msgspec.json.decode(body)
        found = self._found
        found.kinds.update(closed["kinds"])
        found.violations += len(closed["audit"]["violations"])
        found.stories += [story for _, story in closed["audit"]["violations"]]
        trained: Counter[str] = Counter()
        asked: dict[str, str] = {}
        for row in msgspec.convert(closed["rows"], tuple[Row, ...]):
            self._row(row, agent, trained, asked)
            self._sample(row, reward)
        self._disk(closed, reward)
        named = {name for name, times in trained.items() if times}
        found.lost += len(agent.got.keys() - named)
        for name, request in agent.got.items():
            said = squeezed(request) if isinstance(request, str) else self._style.text(request)
            found.misread += name in asked and asked[name] != said
        found.doubled += sum(times - 1 for times in trained.values() if times > 1)
        self._unnamed([asked[name] for name in named - agent.got.keys()], agent)
        return len(named)

    def _row(self, row: Row, agent: WildAgent, trained: Counter[str], asked: dict[str, str]) -> None:
        found, ids = self._found, list(row.token_ids)
        mask, log_probs, versions = [0] * len(ids), [0.0] * len(ids), [-1] * len(ids)
        dated = [-1] * len(ids)
        for span in row.version_spans:
            dated[span.start : span.stop] = [span.version] * (span.stop - span.start)
        for turn in row.turns:
            place = slice(turn.start, turn.stop)
            trained[turn.generation_id] += turn.trained
            asked[turn.generation_id] = squeezed(self._tokenizer.decode(ids[: turn.start]))
            told = agent.told.get(turn.generation_id)
            readings = list(self._ledger.readings(ids[: turn.start], ids[place], turn.num_cut))
            ended = ids[turn.start : turn.stop - (not turn.num_cut)]  # a cut one has lost its stop token
            found.changed += not readings or told not in (None, self._tokenizer.decode(ended))
            fitting = [said for said in readings if said.versions == dated[place]]
            found.misdated += not fitting and bool(readings)
            found.cuts += bool(turn.num_cut)
            if not readings:
                continue
            believed = fitting or readings
            said = next((one for one in believed if one.log_probs == list(row.log_probs[place])), believed[0])
            versions[place] = said.versions
            found.seams_trained += turn.trained and len(set(said.versions)) > 1
            if turn.trained:
                mask[place], log_probs[place] = [1] * len(said.log_probs), said.log_probs
        found.misdated += [version >= 0 for version in dated] != [version >= 0 for version in versions]
        found.masked += list(row.mask) != mask or list(row.log_probs) != log_probs
        found.masked += row.prompt_len != (row.turns[0].start if row.turns else len(ids))

    def _sample(self, row: Row, reward: float) -> None:
        """The row as verl takes it."""
        sample = row_to_output(row, reward=reward, metrics=AgentLoopMetrics(), extra_fields={}, violations=0, images={})
        versions = [span.version for span in row.version_spans]
        same = (
            [*sample.prompt_ids, *sample.response_ids] == list(row.token_ids)
            and len(sample.prompt_ids) == row.prompt_len
            and sample.response_mask == list(row.mask[row.prompt_len :])
            and sample.response_logprobs == list(row.log_probs[row.prompt_len :])
            and sample.reward_score == reward
            and sample.extra_fields["min_global_steps"] == min(versions)
            and sample.extra_fields["max_global_steps"] == max(versions)
        )
        self._found.unlike += not same

    def _disk(self, closed: dict[str, Any], reward: float) -> None:
        """The rows that were written: all of them, each with its reward."""
        lines = (self._records / f"{closed['id']}.jsonl").read_bytes().splitlines()
        written = [msgspec.json.decode(line) for line in lines]
        kept = [{name: line[name] for name in row} for line, row in zip(written, closed["rows"], strict=False)]
        self._found.unlike += kept != closed["rows"] or len(written) != len(closed["rows"])
        self._found.unlike += any(line["reward"] != reward for line in (*written, closed))

    def _unnamed(self, prompts: list[str], agent: WildAgent) -> None:
        """Answers whose names the agent never saw: further samples, and what it left."""
        found, more, left = self._found, agent.more.copy(), list(agent.left)
        found.left += len(left)
        for prompt in prompts:
            if (question := next((q for q in more if more[q] and self._ends(prompt, q)), None)) is not None:
                more[question] -= 1
            elif (question := next((q for q in left if self._ends(prompt, q)), None)) is not None:
                left.remove(question)
                found.left_answered += 1
            else:
                found.unasked += 1
                found.stories.append(f"an answer that nobody asked for, to …{prompt[-80:]}")
        found.lost += more.total()

    def _ends(self, prompt: str, question: tuple[str, str]) -> bool:
        return prompt.endswith(self._style.text([question]))


class World:
    """The proxy, which changes weights and dies, and the engine behind it."""

    def __init__(self, scratch: Path, folder: Path, ledger: WireLedger, found: Found, seed: int) -> None:
        self._scratch, self._folder, self._ledger, self._found = scratch, folder, ledger, found
        self._rng = random.Random(seed)
        self._engine, self.port = free_port(), free_port()
        self._admin = admin_pool(self.port)

    async def call(self, path: str, body: bytes) -> bytes:
        """An admin's request, repeated while the proxy is away."""
        while True:
            try:
                answer = await self._admin.request("POST", path, body, timeout_s=60.0)
            except HttpFailed:
                await asyncio.sleep(0.05)
                continue
            if answer.status in (200, 201, 204):
                return answer.body
            if answer.status != 503:
                raise RuntimeError(f"{path}: {answer.status}: {answer.body[:300]!r}")
            await asyncio.sleep(0.05)

    async def run(self, work: asyncio.Future[Any]) -> None:
        """Until the work is done."""
        answers, ledger = PreparedAnswers(self._folder), self._ledger
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: LedgerConnection(answers, ledger), "127.0.0.1", self._engine)
        while not work.done():
            with ExitStack() as stack:
                log, record = self._scratch / "log", self._scratch / "record"
                child = stack.enter_context(
                    our_proxy(self.port, self._engine, self._folder, record, core=None, log=log)
                )
                await until_up(f"http://127.0.0.1:{self.port}")
                for _ in range(_VERSIONS):
                    await asyncio.wait({work}, timeout=_PUBLISH_S)
                    if work.done():
                        break
                    await self._publish()
                else:
                    await asyncio.wait({work}, timeout=_PUBLISH_S)
                    await asyncio.to_thread(_kill, child)
                    self._found.restarts += 1
        server.close()
        self._admin.close()
        await work

    async def _publish(self) -> None:
        """New weights behind the gate; what is under way breaks off."""
        await self.call("/pause", b'{"timeout_s":0}')
        self._ledger.break_off(self._rng)
        paused = await self.call("/pause", b'{"timeout_s":30}')
        if b'"quiet":true' not in paused:
            raise RuntimeError(f"pause: {paused[:300]!r}")
        self._ledger.version += 1
        self._found.versions += 1
        await self.call("/resume", b'{"version":%d}' % self._ledger.version)


def _kill(child: subprocess.Popen[bytes]) -> None:
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


async def wild(turns: int, scratch: Path, folder: Path, style: Style, seed: int) -> Found:
    """Sessions until ``turns`` answers stand in rows."""
    found, met, ledger = Found(), Met(), WireLedger()
    world = World(scratch, folder, ledger, found, seed)
    judge = Judge(style, FolderTokenizer(folder), ledger, scratch / "record" / "rows", found)
    numbers = iter(range(1 << 30))

    async def agent() -> None:
        while found.turns < turns:
            number = next(numbers)
            opened = msgspec.json.decode(await world.call("/sessions", b'{"group":"%d"}' % number), type=Opened)
            writer, rng = Writer(folder, seed + number), random.Random(seed + number)
            one = WildAgent(f"http://127.0.0.1:{world.port}", opened.api_key, writer, rng, met)
            await one.run()
            one.closing = True
            last, reward = asyncio.ensure_future(one.last_words()), round(rng.random(), 6)
            await asyncio.wait({last}, timeout=rng.uniform(0, 0.02))
            closed = await world.call(f"/sessions/{opened.id}/close", f'{{"reward":{reward}}}'.encode())
            await last
            one.close()
            found.turns += judge.judge(closed, one, reward)

    await world.run(asyncio.gather(*(agent() for _ in range(_AGENTS))))
    found.moves, found.broken, found.seams = met.moves, met.broken, ledger.num_seams
    found.refused, found.stories = len(met.refused), found.stories + met.refused
    return found


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=100_000)
    parser.add_argument("--until-broken", action="store_true", help="end with the first template under which it is")
    parts.extend(parser)


def _records(taken: list[dict[str, Any]], done: int, total: int) -> list[Record]:
    kinds = sum((Counter(part["kinds"]) for part in taken), Counter[str]())
    moves = sum((Counter(part["moves"]) for part in taken), Counter[str]())
    plain = (
        ("versions", "versions of the weights"),
        ("restarts", "kill -9 and restarts from the journal"),
        ("seams", "answers that new weights broke off"),
        ("seams_trained", "trained answers of more than one version"),
        ("cuts", "answers in rows that cut their end"),
        ("broken", "connections that broke"),
        ("left", "requests left for good"),
        ("left_answered", "of them recorded all the same"),
    )
    bad = {
        "violations": "audit violations",
        "changed": "answers with other tokens than the engine's",
        "misread": "answers to another prompt than was asked",
        "masked": "rows with another mask or log-prob",
        "misdated": "answers with another weight version",
        "lost": "answers lost",
        "doubled": "answers trained twice",
        "unasked": "answers that nobody got, to requests that nobody left",
        "unlike": "rows on disk or samples of verl that differ, or rewards",
        "refused": "requests refused",
    }
    sums = {name: sum(part[name] for part in taken) for name in (*dict(plain), *bad)}
    return [
        Record(name="turns of randomised agents", value=done, unit="", bar=f">= {total}", holds=done >= total),
        *(Record(name=f"matched {kind}", value=count, unit="") for kind, count in sorted(kinds.items())),
        *(Record(name=f"moves of the kind {move}", value=count, unit="") for move, count in sorted(moves.items())),
        *(Record(name=what, value=sums[name], unit="") for name, what in plain),
        *(Record(name=what, value=sums[name], unit="", bar="0", holds=sums[name] == 0) for name, what in bad.items()),
    ]


def main() -> int:
    options = arguments(__doc__ or "", _extend)
    total = 2_000 if options.quick else options.turns
    most = min(_CHUNK, -(-total // len(STYLES)))
    kept = Parts(options)
    taken = kept.of("audit")
    with tempfile.TemporaryDirectory() as temporary:
        base = model_folder(Path(temporary, "model"))
        while (done := sum(part["turns"] for part in taken)) < total:
            if kept.out_of_time:
                return kept.pause()
            name, style = list(STYLES.items())[len(taken) % len(STYLES)]
            scratch = Path(temporary, str(len(taken)))
            scratch.mkdir()
            folder = style.make(base, scratch / "model")
            found = uvloop.run(wild(min(most, total - done), scratch, folder, style, seed=done * 1000))
            kept.add("audit", msgspec.to_builtins(found))
            told = {what: getattr(found, what) for what in _BROKEN if getattr(found, what)}
            print(f"{done + found.turns} turns, template {name!r}: {told or 'clean'} {found.stories[:2]}", flush=True)
            if told and options.until_broken:
                return 1
    return report(_records(taken, done, total), options.json)


if __name__ == "__main__":
    sys.exit(main())
