"""Turns per second of recording proxies on "rl" traffic (`benchmarks.traffic`), one process each, side by side.

The proxy has one core for itself; engine and agents share the other. Ours does everything a user gets: a session opened
and closed for every eight turns, tokenisation, the session tree, the durable journal, audited rows written to files.
The others record what the engine returns (litellm: nothing). All get the same requests and the same engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
import uvloop

from benchmarks.peers import PEERS, Peer
from benchmarks.records import Record, arguments, report
from benchmarks.traffic import (
    FIRST_BYTES,
    NEXT_BYTES,
    TURNS,
    Tally,
    Writer,
    admin_pool,
    converse,
    free_port,
    message,
    mock_engine,
    model_folder,
    open_ours,
    our_proxy,
    until_up,
)

OURS = "seamless_verl"


class Plan:
    """The same conversations for everybody, written before the clock starts."""

    def __init__(self, folder: Path, num_sessions: int) -> None:
        writer = Writer(folder, seed=11)
        self.sessions = [
            (
                message("user", writer.text(FIRST_BYTES)),
                [message("user", writer.text(NEXT_BYTES)) for _ in range(TURNS - 1)],
            )
            for _ in range(num_sessions)
        ]


async def _agents(url: str, plan: Plan, peer: Peer | None, concurrency: int, seconds: float) -> tuple[Tally, float]:
    tally, started = Tally(), time.perf_counter()
    until, numbers = started + seconds, iter(range(len(plan.sessions)))
    admin = admin_pool(int(url.rpartition(":")[2]))

    async def agent() -> None:
        for number in numbers:
            first, nexts = plan.sessions[number]
            if peer is None:
                opened = await open_ours(admin, group=str(number))
                headers, path = {"authorization": f"Bearer {opened.api_key}"}, "/v1/chat/completions"
                await converse(url, headers, path, first, nexts, tally, until)
                closed = await admin.request("POST", f"/sessions/{opened.id}/close", b"", timeout_s=60.0)
                if closed.status != 200 or b'"violations":[]' not in closed.body:
                    tally.errors.append(f"close: {closed.status}: {closed.body[:200]!r}")
            else:
                path = peer.path.format(session=f"s{number}")
                await converse(url, {"authorization": f"Bearer {peer.key}"}, path, first, nexts, tally, until)
            tally.sessions += 1
            if time.perf_counter() > until:
                return

    await asyncio.gather(*(agent() for _ in range(concurrency)))
    admin.close()
    return tally, time.perf_counter() - started


def _measure(
    name: str,
    peer: Peer | None,
    options: argparse.Namespace,
    scratch: Path,
    folder: Path,
    plan: Plan,
    concurrency: int,
    log: Path,
) -> tuple[float, float, float, float]:
    """Turns per second, p50 and p99 in milliseconds, resident MiB at the end, of one fresh process."""
    engine, port = free_port(), free_port()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock_engine(engine, folder, core=0, log=log))
        uvloop.run(until_up(f"http://127.0.0.1:{engine}", "/v1/models"))
        if peer is None:
            record = Path(tempfile.mkdtemp(dir=scratch))
            child = stack.enter_context(our_proxy(port, engine, folder, record, core=1, log=log))
        else:
            child = stack.enter_context(peer.start(options.peers, scratch, port, engine, core=1, log=log))
        url = f"http://127.0.0.1:{port}"
        uvloop.run(until_up(url, "/healthz" if peer is None else peer.health))
        uvloop.run(_agents(url, plan, peer, concurrency, 1.0))  # warm
        tally, took = uvloop.run(_agents(url, plan, peer, concurrency, options.seconds))
        if tally.errors or not tally.latencies_s:
            raise RuntimeError(f"{name}: {len(tally.errors)} errors, the first: {tally.errors[:1]}; see {log}")
        family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
        memory = sum(member.memory_info().rss for member in family) / (1 << 20)
    return len(tally.latencies_s) / took, tally.quantile(0.5) * 1e3, tally.quantile(0.99) * 1e3, memory


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", type=Path, default=Path("/tmp/peers"), help="environments; see benchmarks.peers")
    parser.add_argument("--seconds", type=float, default=5.0, help="of traffic per repeat and recorder")
    parser.add_argument("--only", action="append", default=[], help="recorders to run, by the start of their name")
    parser.add_argument("--concurrency", type=int, action="append", default=[], help="default: 32 and 1")


def main() -> int:
    options = arguments(__doc__ or "", _extend)
    repeats = 1 if options.quick else 5
    sides: list[tuple[str, Peer | None]] = [(OURS, None), *((peer.name, peer) for peer in PEERS)]
    sides = [side for side in sides if not options.only or any(side[0].startswith(name) for name in options.only)]
    os.sched_setaffinity(0, {0})
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        folder = model_folder(scratch / "model")
        plan = Plan(folder, 2_000)
        log = Path(tempfile.gettempdir()) / "benchmark-recorder.log"
        for concurrency in options.concurrency or (32, 1):
            seen: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name, _ in sides}
            for repeat in range(repeats):
                for name, peer in sides:
                    seen[name].append(_measure(name, peer, options, scratch, folder, plan, concurrency, log))
                    turns, p50, p99, memory = seen[name][-1]
                    told = f"{turns:.0f} turns/s, p50 {p50:.1f} ms, p99 {p99:.0f} ms, {memory:.0f} MiB"
                    print(f"c={concurrency} repeat {repeat + 1}/{repeats} {name}: {told}", flush=True)
            records += _records(seen, concurrency)
    return report(records, options.json)


def _records(seen: dict[str, list[tuple[float, float, float, float]]], concurrency: int) -> list[Record]:
    tag = f"rl c={concurrency}"
    medians = {name: [statistics.median(column) for column in zip(*runs, strict=True)] for name, runs in seen.items()}
    records = []
    for name, (turns, p50, p99, memory) in medians.items():
        records += [
            Record(name=f"{tag} {name}: turns/s", value=turns, unit="1/s"),
            Record(name=f"{tag} {name}: p50", value=p50, unit="ms"),
            Record(name=f"{tag} {name}: p99", value=p99, unit="ms"),
            Record(name=f"{tag} {name}: resident", value=memory, unit="MiB"),
        ]
    others = {name: values for name, values in medians.items() if name != OURS}
    if others and OURS in medians:
        best = max(others, key=lambda name: others[name][0])
        ratio, tail = medians[OURS][0] / others[best][0], medians[OURS][2] / others[best][2]
        is_bar = concurrency == 32
        records.append(
            Record(
                name=f"{tag} turns/s, ours / {best}",
                value=ratio,
                unit="x",
                bar=">= 3" if is_bar else "",
                holds=ratio >= 3 if is_bar else None,
            )
        )
        records.append(
            Record(
                name=f"{tag} p99, ours / {best}",
                value=tail,
                unit="x",
                bar="<= 0.1" if is_bar else "",
                holds=tail <= 0.1 if is_bar else None,
            )
        )
    return records


if __name__ == "__main__":
    sys.exit(main())
