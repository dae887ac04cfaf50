"""What the proxy adds to a turn when the history is long: 500 turns of one session, up to 128k tokens and beyond.

Overhead = time of a turn through the proxy, less the time that the engine takes for the very same prompt when it is
asked directly, right after. Both carry the whole history, so what remains is the proxy's own work.

Reading the request = time of the same body with a parameter that the proxy refuses once it has read all of it. What is
left of the overhead should grow with the new tokens only: its bar is 0.01 ms per 1,000 tokens of history, 1.3 ms at
128k. ``--quick`` ends long before 128k tokens and is held against no bar.
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
from benchmarks.http_pool import HttpPool
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
from seamless_verl.proxy.text.tokenizer import FolderTokenizer

_MIN_TOKENS = 128_000
_MAX_MS = 10.0  # overhead of a turn
_MAX_GROWTH_MS = 0.01  # of everything but reading the request, per 1,000 tokens of history
_EDGE = 50  # turns at each end whose medians are compared


async def talk(port: int, engine: int, folder: Path, turns: int) -> dict[str, list[float]]:
    """Per turn: overhead, the engine's own time and reading in seconds; tokens of the prompt; bytes of the body."""
    writer, tokenizer = Writer(folder, 3), FolderTokenizer(folder)
    admin = admin_pool(port)
    opened = await open_ours(admin, max_turns=turns + 1)
    pool = HttpPool(f"http://127.0.0.1:{port}", {"authorization": f"Bearer {opened.api_key}"})
    direct = HttpPool(f"http://127.0.0.1:{engine}")
    history = [message("user", writer.text(1_000))]
    taken: dict[str, list[float]] = {name: [] for name in ("overhead", "alone", "reading", "tokens", "bytes")}
    num_tokens = len(tokenizer.encode(history[0].decode()))
    for _ in range(turns):
        body = body_of(history)
        prompt = [(7 * at) % 15_000 + 2 for at in range(num_tokens)]
        asked = msgspec.json.encode({"model": "mock", "prompt": prompt, "max_tokens": 900_000, "logprobs": 0})
        refused = b'{"frequency_penalty":1,' + body[1:]
        begun = time.perf_counter()
        answer = await pool.request("POST", "/v1/chat/completions", body, timeout_s=60.0)
        through = time.perf_counter() - begun
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.body[:300]!r}")
        begun = time.perf_counter()
        await direct.request("POST", "/v1/completions", asked, timeout_s=60.0)
        alone = time.perf_counter() - begun
        begun = time.perf_counter()
        status = (await pool.request("POST", "/v1/chat/completions", refused, timeout_s=60.0)).status
        reading = time.perf_counter() - begun
        if status != 400:
            raise RuntimeError(f"{status} where a refusal was expected")
        for name, value in zip(taken, (through - alone, alone, reading, num_tokens, len(body)), strict=True):
            taken[name].append(value)
        num_tokens = json.loads(answer.body)["usage"]["total_tokens"] + 30
        text = msgspec.json.decode(answer.body, type=Completion).text
        history += [message("assistant", text), message("user", writer.text(80))]
    closed = await admin.request("POST", f"/sessions/{opened.id}/close", timeout_s=60.0)
    if b'"violations":[]' not in closed.body or closed.body.count(b'"token_ids"') != 1:
        raise RuntimeError(f"the session did not end as one clean row: {closed.body[:200]!r}")
    return taken


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=500)
    parts.extend(parser)


def main() -> int:
    options = arguments(__doc__ or "", _extend)
    turns = 100 if options.quick else options.turns
    kept = Parts(options)
    repeats: list[dict[str, list[float]]] = kept.of(f"{turns} turns")
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
            print(
                f"repeat {len(repeats)}: {statistics.median(repeats[-1]['overhead']) * 1e3:.2f} ms (median)", flush=True
            )
    return report(_records(repeats, turns, held=not options.quick), options.json)


def _records(repeats: list[dict[str, list[float]]], turns: int, *, held: bool) -> list[Record]:
    """Figures of all repeats; they are ``held`` against their bars where the run was long enough."""

    def barred(name: str, value: float, unit: str, bar: str, holds: bool) -> Record:
        return Record(name=name, value=value, unit=unit, bar=bar if held else "", holds=holds if held else None)

    first, last = slice(5, _EDGE + 5), slice(-_EDGE, None)

    def typical(name: str, where: slice) -> float:
        return statistics.median(statistics.median(run[name][where]) for run in repeats)

    def rest(where: slice) -> float:
        pairs = (zip(run["overhead"][where], run["reading"][where], strict=True) for run in repeats)
        return statistics.median(statistics.median(own - reading for own, reading in pair) for pair in pairs) * 1e3

    begin, end, num = typical("overhead", first) * 1e3, typical("overhead", last) * 1e3, typical("tokens", last)
    grown = (num - typical("tokens", first)) / 1e3
    read = [typical("reading", where) * 1e3 for where in (first, last)]
    left = [rest(where) for where in (first, last)]
    rate = (left[1] - left[0]) / grown
    worst = statistics.median(sorted(run["overhead"])[int(0.99 * turns)] for run in repeats) * 1e3
    return [
        Record(name="turns of one session", value=turns, unit=""),
        barred("tokens of history, last 50 turns", num, "", f">= {_MIN_TOKENS}", num >= _MIN_TOKENS),
        Record(name="bytes of a request, last 50 turns", value=typical("bytes", last), unit="B"),
        Record(name="engine alone, last 50 turns (median)", value=typical("alone", last) * 1e3, unit="ms"),
        Record(name="overhead per turn, first 50 turns (median)", value=begin, unit="ms"),
        barred("overhead per turn, last 50 turns (median)", end, "ms", f"<= {_MAX_MS:g}", end <= _MAX_MS),
        Record(name="overhead per turn, p99 of all", value=worst, unit="ms"),
        Record(name="reading the request, first 50 turns (median)", value=read[0], unit="ms"),
        Record(name="reading the request, last 50 turns (median)", value=read[1], unit="ms"),
        Record(name="everything else, first 50 turns (median)", value=left[0], unit="ms"),
        Record(name="everything else, last 50 turns (median)", value=left[1], unit="ms"),
        Record(name="growth per 1,000 tokens: overhead", value=(end - begin) / grown, unit="ms"),
        Record(name="growth per 1,000 tokens: reading", value=(read[1] - read[0]) / grown, unit="ms"),
        barred(
            "growth per 1,000 tokens: everything else", rate, "ms", f"<= {_MAX_GROWTH_MS:g}", rate <= _MAX_GROWTH_MS
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
