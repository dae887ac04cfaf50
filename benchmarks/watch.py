"""What `seamless-verl watch` takes on a large run: each click, the server's memory, the index behind the run.

The run is generated in the formats that runs write: a recording with an end per attempt, verl's dump of every step, and
sessions of ten turns in a journal's format, as many as a worker keeps by default; they share one session's turns. The
server is the command's, in a process of its own; every figure is taken over HTTP.

    python -m benchmarks.watch --steps 200 --attempts 512
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.records import Record, arguments, report
from seamless_verl.observe.flight import RequestEnded, RequestStarted, RunStarted, SessionEnded, StepBegan, StepEnded
from seamless_verl.observe.page.words import quantile
from seamless_verl.observe.recording import FLIGHT, FlightHeader, encode_event, encode_header
from seamless_verl.observe.reporter import STEPS, StepReport, as_record
from seamless_verl.proxy.calls import Answer
from seamless_verl.proxy.journal.kept_sessions import KEPT, KeepingJournal
from seamless_verl.proxy.journal.turn_bytes import pack
from seamless_verl.proxy.session.sessions import SessionSpec
from seamless_verl.trajectory.generation import FinishReason, Generation, VersionSpan
from seamless_verl.trajectory.messages import Message, Role, transcript_of
from seamless_verl.trajectory.rows import ledger_entry
from seamless_verl.trajectory.tree import SessionTree

_ROLLOUTS = 8
_TURNS, _GIVEN, _GENERATED = 10, 200, 60  # turns of an attempt, tokens of each
_KEPT_BYTES = 256 << 20
_FOLLOWED_S, _ATTEMPTS_PER_S, _LOOKS_S = 30, 40, 2.0  # 4,096 attempts in 100 s; as often as the page of steps looks
_HEADER = FlightHeader(writer="generated", clock_s=0.0, wall_s=1.7e9)


def session_bodies() -> list[bytes]:
    """The turns of one attempt as a journal writes them."""
    tree, rng, bodies = SessionTree(), random.Random(0), []
    ids = array("i")
    for number in range(_TURNS):
        ids = ids + array("i", [rng.randrange(1000) for _ in range(_GIVEN)])
        generation = Generation(
            token_ids=[rng.randrange(1000) for _ in range(_GENERATED)],
            log_probs=[-rng.expovariate(2) for _ in range(_GENERATED)],
            version_spans=(VersionSpan(version=1, num_tokens=_GENERATED),),
            finish_reason=FinishReason.STOP,
        )
        message = Message(role=Role.ASSISTANT, content="answer")
        pending = tree.prepare_ids(transcript_of(()), ids)
        record = pending.seal(generation_id=f"{number:032x}", generation=generation, answer=message)
        tree.commit(record)
        entry = ledger_entry(
            generation_id=record.generation_id,
            prompt_digest=pending.prompt_ids.digest(),
            prompt_len=len(ids),
            generation=generation,
        )
        answer = Answer(
            id=record.generation_id, created=0, message=message, finish_reason="stop", prompt_tokens=len(ids),
            completion_tokens=_GENERATED, cached_tokens=0,
        )  # fmt: skip
        bodies.append(pack(record, entry, answer))
        ids = ids + record.token_ids
    return bodies


def generate(run: Path, steps: int, attempts: int) -> None:
    """A run of so many steps and attempts in each, in groups of `_ROLLOUTS`."""
    rng = random.Random(1)
    (run / FLIGHT).mkdir(parents=True)
    (run / "rows").mkdir()
    with (run / FLIGHT / "generated.jsonl").open("w") as recording, (run / STEPS).open("w") as records:
        recording.write(encode_header(_HEADER) + "\n")
        start = RunStarted(at=0.0, name="generated", policy="", eta=1, bound=1, total_steps=steps)
        recording.write(encode_event(start) + "\n")
        for step in range(1, steps + 1):
            recording.write(encode_event(StepBegan(at=100.0 * step, step=step)) + "\n")
            lines = []
            for number in range(attempts):
                recording.write(encode_event(_ended(step, number, rng)) + "\n")
                group, index = divmod(number, _ROLLOUTS)
                text = {"input": "q" * 400, "output": "a" * 400, "gts": "", "score": rng.random(), "step": step}
                lines.append(json.dumps(text | {"uid": f"{step}-{group}_{index}_0"}))
            (run / "rows" / f"{step}.jsonl").write_text("\n".join(lines) + "\n")
            recording.write(encode_event(StepEnded(at=100.0 * step + 99, step=step)) + "\n")
            records.write(json.dumps(as_record(_report(step, steps, attempts))) + "\n")
    _keep(run / "proxy" / "agent_loop_worker_0", steps, attempts)


def _ended(step: int, number: int, rng: random.Random) -> SessionEnded:
    group, index = divmod(number, _ROLLOUTS)
    return SessionEnded(
        at=100.0 * step + rng.random() * 90, session=f"{step}-{number}", group=f"{step}-{group}", index=index,
        seconds=rng.expovariate(0.05), turns=_TURNS, rows=1, reward=rng.choice((0.0, 1.0)), status="finished",
    )  # fmt: skip


def _report(step: int, steps: int, attempts: int) -> StepReport:
    return StepReport(
        step=step, total_steps=steps, step_s=99.0, reward=0.5, pass_rate=None, tokens_per_s=1e4, staleness_mean=1.0,
        staleness_max=1, rows=attempts, rollouts=attempts, rows_audited=attempts, audit_violations=0,
        max_logprob_diff=None,
    )  # fmt: skip


def _keep(folder: Path, steps: int, attempts: int) -> None:
    """The latest attempts, whole, as many as are kept by default."""
    folder.mkdir(parents=True)
    asyncio.run(_made(folder / "journal.sqlite"))
    bodies = session_bodies()
    size = sum(map(len, bodies))
    latest = [(step, number) for step in range(steps, 0, -1) for number in range(attempts)][: _KEPT_BYTES // size]
    db = sqlite3.connect(folder / KEPT)
    for step, number in reversed(latest):
        name, (group, index) = f"{step}-{number}", divmod(number, _ROLLOUTS)
        spec = json.dumps(asdict(SessionSpec(group=f"{step}-{group}", index=index)))
        db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, 'closed', '[0.5, {}]')", (name, b"", 1.7e9, spec))
        db.executemany("INSERT INTO turns (session_id, body) VALUES (?, ?)", ((name, body) for body in bodies))
        db.execute("INSERT INTO kept (id, num_bytes) VALUES (?, ?)", (name, size))
    db.commit()
    db.close()


async def _made(journal: Path) -> None:
    await KeepingJournal(journal, max_bytes=_KEPT_BYTES).close()


# ---------------------------------------------------------------- measured


def timed(http: httpx.Client, path: str, **query: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    answer = http.get(f"api/{path}", params=query)
    answer.raise_for_status()
    return time.perf_counter() - started, answer.json()


def until_read(http: httpx.Client, at: str) -> float:
    """Seconds until the whole run is in the index, looking as the page does."""
    started = time.perf_counter()
    while timed(http, f"{at}/steps")[1]["is_behind"]:
        time.sleep(0.3)
    return time.perf_counter() - started


def clicks(http: httpx.Client, at: str, steps: int, attempts: int, repeats: int) -> list[Record]:
    """Each click at a random place, as it comes to it: step, group's attempt, its tokens."""
    rng, found = random.Random(2), []
    whole = list(range(min(attempts, 200)))

    def attempt() -> tuple[float, Any]:
        return timed(http, f"{at}/attempt", key=f"{steps}-{rng.choice(whole)}")

    views: dict[str, Callable[[], tuple[float, Any]]] = {
        "list of steps": lambda: timed(http, f"{at}/steps"),
        "step": lambda: timed(http, f"{at}/groups", step=rng.randint(1, steps)),
        "conversation": attempt,
        "tokens": lambda: timed(http, f"{at}/tokens", key=f"{steps}-{rng.choice(whole)}"),
    }
    for name, look in views.items():
        taken = [look()[0] * 1000 for _ in range(repeats)]
        middle, tail = statistics.median(taken), quantile(taken, 0.99)
        found.append(Record(name=f"{name}, median", value=middle, unit="ms", bar="<= 300 ms", holds=middle <= 300))
        found.append(Record(name=f"{name}, 99 %", value=tail, unit="ms", bar="<= 1000 ms", holds=tail <= 1000))
    return found


def behind(http: httpx.Client, run: Path, at: str, steps: int, attempts: int) -> float:
    """Seconds until an attempt that ends now is on the page."""
    late = _ended(steps, attempts, random.Random(3))
    with (run / FLIGHT / "generated.jsonl").open("a") as recording:
        recording.write(encode_event(late) + "\n")
    started = time.perf_counter()
    while True:
        groups = timed(http, f"{at}/groups", step="none", text=late.session)[1]["groups"]
        if groups:
            return time.perf_counter() - started
        time.sleep(0.05)


def followed(http: httpx.Client, run: Path, at: str, server: psutil.Process, steps: int) -> list[Record]:
    """Share of a core while the recording grows as that of a run, and the list of steps is on the screen."""
    rng, asked, number = random.Random(4), 0.0, 0
    before, began = sum(server.cpu_times()[:2]), time.monotonic()
    with (run / FLIGHT / "generated.jsonl").open("a") as recording:
        while (now := time.monotonic() - began) < _FOLLOWED_S:
            while number < now * _ATTEMPTS_PER_S:
                number += 1
                recording.writelines(_attempt(steps, 1_000_000 + number, rng))
            recording.flush()
            if now >= asked:
                timed(http, f"{at}/steps")
                asked += _LOOKS_S
            time.sleep(0.05)
    share = (sum(server.cpu_times()[:2]) - before) / (time.monotonic() - began)
    name = f"server while {_ATTEMPTS_PER_S} attempts of {_TURNS} turns end each second, looked at every {_LOOKS_S:g} s"
    return [Record(name=name, value=100 * share, unit="% of a core", bar="<= 1", holds=share <= 0.01)]


def _attempt(step: int, number: int, rng: random.Random) -> Iterator[str]:
    """Lines of a recording: its requests and its end."""
    ended = _ended(step, number, rng)
    for turn in range(_TURNS):
        which: dict[str, Any] = {"at": ended.at, "request": f"{number}-{turn}", "slice": "rollouts/0"}
        yield encode_event(RequestStarted(**which, prompt_tokens=400, session=ended.session)) + "\n"
        yield encode_event(RequestEnded(**which, tokens=60, finish="completed", cached_tokens=300)) + "\n"
    yield encode_event(ended) + "\n"


def measure(run: Path, steps: int, attempts: int, repeats: int) -> list[Record]:
    command = [sys.executable, "-m", "seamless_verl.cli", "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            with httpx.Client(base_url=url, trust_env=False, timeout=300) as http:
                at = f"run/{http.get('api/runs').json()['runs'][0]['id']}"
                first, _ = timed(http, f"{at}/steps")
                read_s = until_read(http, at)
                found = [
                    Record(name="first answer of a run never seen", value=first, unit="s"),
                    Record(name="until all of it is read", value=first + read_s, unit="s"),
                    *clicks(http, at, steps, attempts, repeats),
                ]
                late_s = behind(http, run, at, steps, attempts)
                found.append(
                    Record(
                        name="an attempt that ends is there after",
                        value=late_s,
                        unit="s",
                        bar="<= 2 s",
                        holds=late_s <= 2,
                    )
                )
                found += followed(http, run, at, psutil.Process(server.pid), steps)
                used = psutil.Process(server.pid).memory_info().rss / 2**20
                found.append(
                    Record(name="memory of the server", value=used, unit="MiB", bar="<= 500 MB", holds=used <= 476)
                )
        finally:
            server.terminate()
    return found


def main() -> int:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--steps", type=int, default=1000)
        parser.add_argument("--attempts", type=int, default=4096, help="of each step")

    parsed = arguments(__doc__ or "", options)
    with tempfile.TemporaryDirectory(prefix="watch-") as folder:
        run = Path(folder) / "run"
        generate(run, parsed.steps, parsed.attempts)
        size = sum(file.stat().st_size for file in run.rglob("*") if file.is_file()) / 2**20
        records = [Record(name="files of the run", value=size, unit="MiB")]
        records += measure(run, parsed.steps, parsed.attempts, 20 if parsed.quick else 100)
    return report(records, parsed.json)


if __name__ == "__main__":
    sys.exit(main())
