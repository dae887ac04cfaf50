"""What the proxy adds to a turn when the history is long: 500 turns of one session, up to 128k tokens and beyond.

Overhead = time of a turn through the proxy, less the time that the engine takes for the very same prompt when it is
asked directly, right after. Both carry the whole history, so what remains is the proxy's own work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import uvloop

from benchmarks import parts
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report
from benchmarks.traffic import (
    Completion,
    Writer,
    admin_pool,
    body_of,
    free_port,
    message,
    mock_engine,
    model_folder,
    open_ours,
    our_proxy,
    until_up,
)
from seamless_verl.proxy.http_pool import HttpPool
from seamless_verl.proxy.tokenizer import FolderTokenizer

_EDGE = 50  # turns at each end whose medians are compared


async def talk(
    port: int, engine: int, folder: Path, turns: int
) -> tuple[list[float], list[float], list[int], list[int]]:
    """Overhead in seconds, the engine's own time, tokens of the prompt and bytes of the body, for each turn."""
    writer, tokenizer = Writer(folder, 3), FolderTokenizer(folder)
    admin = admin_pool(port)
    opened = await open_ours(admin, max_turns=turns + 1)
    pool = HttpPool(f"http://127.0.0.1:{port}", {"authorization": f"Bearer {opened.api_key}"})
    direct = HttpPool(f"http://127.0.0.1:{engine}")
    history = [message("user", writer.text(1_000))]
    overheads: list[float] = []
    alone: list[float] = []
    lengths: list[int] = []
    sizes: list[int] = []
    num_tokens = len(tokenizer.encode(history[0].decode()))
    for _ in range(turns):
        body = body_of(history)
        prompt = [(7 * at) % 15_000 + 2 for at in range(num_tokens)]
        asked = msgspec.json.encode({"model": "mock", "prompt": prompt, "max_tokens": 900_000, "logprobs": 0})
        begun = time.perf_counter()
        answer = await pool.request("POST", "/v1/chat/completions", body, timeout_s=60.0)
        through = time.perf_counter() - begun
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.body[:300]!r}")
        begun = time.perf_counter()
        await direct.request("POST", "/v1/completions", asked, timeout_s=60.0)
        alone.append(time.perf_counter() - begun)
        overheads.append(through - alone[-1])
        sizes.append(len(body))
        lengths.append(num_tokens)
        num_tokens = json.loads(answer.body)["usage"]["total_tokens"] + 30
        text = msgspec.json.decode(answer.body, type=Completion).text
        history += [message("assistant", text), message("user", writer.text(80))]
    closed = await admin.request("POST", f"/sessions/{opened.id}/close", timeout_s=60.0)
    if b'"violations":[]' not in closed.body or closed.body.count(b'"token_ids"') != 1:
        raise RuntimeError(f"the session did not end as one clean row: {closed.body[:200]!r}")
    return overheads, alone, lengths, sizes


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=500)
    parts.extend(parser)


def main() -> int:
    options = arguments(__doc__ or "", _extend)
    turns = 100 if options.quick else options.turns
    kept = Parts(options)
    repeats: list[tuple[list[float], list[float], list[int], list[int]]] = kept.of(f"{turns} turns")
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        folder, log = model_folder(scratch / "model"), scratch / "log"
        while len(repeats) < (1 if options.quick else 3):
            if kept.out_of_time:
                return kept.pause()
            engine, port = free_port(), free_port()
            record = Path(tempfile.mkdtemp(dir=scratch))
            with contextlib.ExitStack() as stack:
                stack.enter_context(mock_engine(engine, folder, core=0, log=log))
                uvloop.run(until_up(f"http://127.0.0.1:{engine}", "/v1/models"))
                stack.enter_context(our_proxy(port, engine, folder, record, core=1, log=log))
                uvloop.run(until_up(f"http://127.0.0.1:{port}"))
                kept.add(f"{turns} turns", uvloop.run(talk(port, engine, folder, turns)))
            print(f"repeat {len(repeats)}: {statistics.median(repeats[-1][0]) * 1e3:.2f} ms (median)", flush=True)
    begin = statistics.median(statistics.median(run[0][5 : _EDGE + 5]) for run in repeats) * 1e3
    end = statistics.median(statistics.median(run[0][-_EDGE:]) for run in repeats) * 1e3
    own = statistics.median(statistics.median(run[1][-_EDGE:]) for run in repeats) * 1e3
    worst = statistics.median(sorted(run[0])[int(0.99 * turns)] for run in repeats) * 1e3
    length, size = repeats[0][2][-_EDGE // 2], repeats[0][3][-_EDGE // 2]
    records = [
        Record(name="turns of one session", value=turns, unit=""),
        Record(name="tokens of history, last 50 turns", value=length, unit=""),
        Record(name="bytes of a request, last 50 turns", value=size, unit="B"),
        Record(name="engine alone, last 50 turns (median)", value=own, unit="ms"),
        Record(name="overhead per turn, first 50 turns (median)", value=begin, unit="ms"),
        Record(name="overhead per turn, last 50 turns (median)", value=end, unit="ms", bar="<= 10", holds=end <= 10),
        Record(name="overhead per turn, p99 of all", value=worst, unit="ms"),
        Record(name="overhead growth per 1,000 tokens of history", value=(end - begin) / length * 1e3, unit="ms"),
    ]
    return report(records, options.json)


if __name__ == "__main__":
    sys.exit(main())
