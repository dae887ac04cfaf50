"""1,000 sessions at once, 50 turns each, an engine that takes 50 ms: errors, lost turns, overhead, memory.

Each agent asks again as soon as it is answered (an engine of this speed would allow 20,000 turns a second, so the
proxy's one core is the bottleneck, and the overhead is mostly queueing). The second part opens and closes sessions
for 100,000 turns and looks at the resident memory after the first tenth and after each further one.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import uvloop

from benchmarks import parts
from benchmarks.http_pool import HttpPool
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report
from benchmarks.traffic import (
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

_LATENCY_S = 0.05


async def _session(url: str, admin: HttpPool, first: bytes, nexts: list[bytes], tally: Tally) -> int:
    """One session to its end; trained turns in its rows."""
    opened = await open_ours(admin, max_turns=len(nexts) + 1)
    auth = {"authorization": f"Bearer {opened.api_key}"}
    await converse(url, auth, "/v1/chat/completions", first, nexts, tally, float("inf"))
    closed = await admin.request("POST", f"/sessions/{opened.id}/close", timeout_s=300.0)
    if closed.status != 200 or b'"violations":[]' not in closed.body or closed.body.count(b'"token_ids"') != 1:
        tally.errors.append(f"close: {closed.status}: {closed.body[:200]!r}")
    return closed.body.count(b',true,"stop",')


async def crowd(port: int, folder: Path, sessions: int, turns: int) -> tuple[Tally, int, float]:
    url, tally, writer = f"http://127.0.0.1:{port}", Tally(), Writer(folder, 5)
    admin = admin_pool(port)
    firsts = [message("user", writer.text(400)) for _ in range(sessions)]
    nexts = [message("user", writer.text(60)) for _ in range(turns - 1)]
    begun = time.perf_counter()
    trained = await asyncio.gather(*(_session(url, admin, first, nexts, tally) for first in firsts))
    admin.close()
    return tally, sum(trained), time.perf_counter() - begun


async def stream(port: int, pid: int, folder: Path, total: int) -> tuple[Tally, dict[int, float]]:
    """Sessions of ten turns, 32 at a time; MiB resident by the number of turns answered."""
    url, tally, writer = f"http://127.0.0.1:{port}", Tally(), Writer(folder, 6)
    admin, process = admin_pool(port), psutil.Process(pid)
    nexts = [message("user", writer.text(100)) for _ in range(9)]
    marks = iter([*range(total // 10, total, total // 10), total])
    memory: dict[int, float] = {}
    numbers: Iterator[int] = iter(range(total // 10))

    async def agent() -> None:
        for _ in numbers:
            await _session(url, admin, message("user", writer.text(800)), nexts, tally)
            while len(tally.latencies_s) >= (mark := peek[0]):
                memory[mark] = process.memory_info().rss / (1 << 20)
                peek[0] = next(marks, 1 << 62)

    peek = [next(marks)]
    await asyncio.gather(*(agent() for _ in range(32)))
    admin.close()
    return tally, memory


@contextlib.contextmanager
def _running(scratch: Path, folder: Path, latency_s: float) -> Iterator[tuple[int, int]]:
    """Port and process id of a fresh proxy on a core of its own."""
    engine, port, log = free_port(), free_port(), scratch / "log"
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock_engine(engine, folder, core=0, log=log, latency_s=latency_s))
        uvloop.run(until_up(f"http://127.0.0.1:{engine}", "/v1/models"))
        record = Path(tempfile.mkdtemp(dir=scratch))
        child = stack.enter_context(our_proxy(port, engine, folder, record, core=1, log=log))
        uvloop.run(until_up(f"http://127.0.0.1:{port}"))
        yield port, child.pid


def main() -> int:
    options = arguments(__doc__ or "", parts.extend)
    sessions, turns, total = (200, 10, 5_000) if options.quick else (1_000, 50, 100_000)
    kept = Parts(options)
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        folder = model_folder(scratch / "model")
        if not kept.of("crowd"):
            with _running(scratch, folder, _LATENCY_S) as (port, _):
                tally, trained, took = uvloop.run(crowd(port, folder, sessions, turns))
            overheads = [(tally.quantile(share) - _LATENCY_S) * 1e3 for share in (0.5, 0.99)]
            kept.add("crowd", {"errors": tally.errors, "trained": trained, "took": took, "overheads": overheads})
            print(f"{len(tally.latencies_s)} turns in {took:.0f} s, errors: {tally.errors[:2]}", flush=True)
        if not kept.of("memory"):
            if kept.out_of_time:
                return kept.pause()
            with _running(scratch, folder, 0.0) as (port, pid):
                steady, memory = uvloop.run(stream(port, pid, folder, total))
            kept.add("memory", {"errors": steady.errors, "resident": sorted(memory.items())})
    seen, resident = kept.of("crowd")[0], kept.of("memory")[0]["resident"]
    growth = max(mib for _, mib in resident) / resident[0][1] - 1
    lost = sessions * turns - seen["trained"]
    errors = len(seen["errors"]) + len(kept.of("memory")[0]["errors"])
    records = [
        Record(name=f"{sessions} sessions x {turns} turns: turns/s", value=sessions * turns / seen["took"], unit="1/s"),
        Record(name="overhead p50", value=seen["overheads"][0], unit="ms"),
        Record(name="overhead p99", value=seen["overheads"][1], unit="ms", bar="stated"),
        Record(name="errors", value=errors, unit="", bar="0", holds=errors == 0),
        Record(name="turns lost", value=lost, unit="", bar="0", holds=lost == 0),
        *(Record(name=f"resident after {mark} turns", value=mib, unit="MiB") for mark, mib in resident),
        Record(
            name=f"memory after {resident[0][0]} turns, and at most until {resident[-1][0]}: growth",
            value=growth * 100,
            unit="%",
            bar="<= 10",
            holds=growth <= 0.1,
        ),
    ]
    return report(records, options.json)


if __name__ == "__main__":
    sys.exit(main())
