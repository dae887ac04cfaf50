"""Turns per second of recording proxies on "rl" traffic (`benchmarks.traffic`), one process each, side by side.

The proxy has one core for itself; engine and agents share the other. Ours does everything a user gets: a session opened
and closed for every eight turns, tokenisation, the session tree, the durable journal, audited rows written to files.
The others record what the engine returns (litellm: nothing). All get the same requests and the same engine. The first
two seconds of each run do not count: all agents open their first session at once then, and everything is cold.
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

from benchmarks import parts
from benchmarks.parts import Parts
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
_RAMP_S = 2.0
_FIGURES = (("turns/s", "1/s"), ("p50", "ms"), ("p99", "ms"), ("processor time per turn", "ms"), ("resident", "MiB"))


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
    tally = Tally(counts_from=time.perf_counter() + _RAMP_S)
    until, numbers = tally.counts_from + seconds, iter(range(len(plan.sessions)))
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
    return tally, time.perf_counter() - tally.counts_from


def _measure(
    name: str,
    peer: Peer | None,
    options: argparse.Namespace,
    scratch: Path,
    folder: Path,
    plan: Plan,
    concurrency: int,
    log: Path,
) -> tuple[float, ...]:
    """The figures of `_FIGURES` for one fresh process."""
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
        before = _cpu_s(child.pid)
        tally, took = uvloop.run(_agents(url, plan, peer, concurrency, options.seconds))
        cpu_s = _cpu_s(child.pid) - before
        if tally.errors or not tally.latencies_s:
            raise RuntimeError(f"{name}: {len(tally.errors)} errors, the first: {tally.errors[:1]}; see {log}")
        memory = sum(member.memory_info().rss for member in _family(child.pid)) / (1 << 20)
    turns = len(tally.latencies_s)
    cpu_ms = cpu_s / (tally.early + turns) * 1e3
    return turns / took, tally.quantile(0.5) * 1e3, tally.quantile(0.99) * 1e3, cpu_ms, memory


def _family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def _cpu_s(pid: int) -> float:
    return sum(sum(member.cpu_times()[:2]) for member in _family(pid))


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", type=Path, default=Path("/tmp/peers"), help="environments; see benchmarks.peers")
    parser.add_argument("--seconds", type=float, default=5.0, help="of traffic per repeat and recorder")
    parser.add_argument("--only", action="append", default=[], help="recorders to run, by the start of their name")
    parser.add_argument("--concurrency", type=int, action="append", default=[], help="default: 32 and 1")
    parts.extend(parser)


def main() -> int:
    options = arguments(__doc__ or "", _extend)
    repeats = 1 if options.quick else 5
    sides: list[tuple[str, Peer | None]] = [(OURS, None), *((peer.name, peer) for peer in PEERS)]
    sides = [side for side in sides if not options.only or any(side[0].startswith(name) for name in options.only)]
    os.sched_setaffinity(0, {0})
    found = Parts(options)
    concurrencies = options.concurrency or (32, 1)
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        folder = model_folder(scratch / "model")
        plan = Plan(folder, 2_000)
        log = Path(tempfile.gettempdir()) / "benchmark-recorder.log"
        for concurrency in concurrencies:
            for repeat in range(repeats):
                for name, peer in sides:
                    key = f"{concurrency} {name}"
                    if len(found.of(key)) > repeat:
                        continue
                    if found.out_of_time:
                        return found.pause()
                    found.add(key, _measure(name, peer, options, scratch, folder, plan, concurrency, log))
                    turns, p50, p99, cpu, memory = found.of(key)[-1]
                    told = (
                        f"{turns:.0f} turns/s, p50 {p50:.1f} ms, p99 {p99:.0f} ms, {cpu:.2f} ms CPU, {memory:.0f} MiB"
                    )
                    print(f"c={concurrency} repeat {repeat + 1}/{repeats} {name}: {told}", flush=True)
    records: list[Record] = []
    for concurrency in concurrencies:
        records += _records({name: found.of(f"{concurrency} {name}") for name, _ in sides}, concurrency)
    return report(records, options.json)


def _records(seen: dict[str, list[tuple[float, ...]]], concurrency: int) -> list[Record]:
    """Medians of all, and ratios to the recorder with the most turns per second: medians of the repeats' own ratios."""
    tag = f"rl c={concurrency}"
    medians = {name: [statistics.median(column) for column in zip(*runs, strict=True)] for name, runs in seen.items()}
    records = [
        Record(name=f"{tag} {name}: {figure}", value=value, unit=unit)
        for name, values in medians.items()
        for value, (figure, unit) in zip(values, _FIGURES, strict=True)
    ]
    others = {name: values for name, values in medians.items() if name != OURS}
    if not others or OURS not in medians:
        return records
    best = max(others, key=lambda name: others[name][0])
    pairs = list(zip(seen[OURS], seen[best], strict=True))
    ratios = [statistics.median(ours[at] / theirs[at] for ours, theirs in pairs) for at in (0, 2, 3)]
    is_bar = concurrency == 32
    bars = ((">= 3", ratios[0] >= 3), ("<= 0.1", ratios[1] <= 0.1), ("", None))
    for figure, ratio, (bar, holds) in zip(("turns/s", "p99", "processor time per turn"), ratios, bars, strict=True):
        records.append(
            Record(
                name=f"{tag} {figure}, ours / {best}",
                value=ratio,
                unit="x",
                bar=bar if is_bar else "",
                holds=holds if is_bar else None,
            )
        )
    return records


if __name__ == "__main__":
    sys.exit(main())
