"""Tokens per second with new weights every five seconds: replicas that pull in turn, beside verl's stop of all.

The two real replicas of `benchmarks.weights`, under its load, for so many seconds of each way in turns. With
``--siblings 8 --router cache_aware`` prompts are shared by eight requests that stay together, as under the GPU recipes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from benchmarks.records import Record, arguments, report
from benchmarks.weights import WAYS, Replicas, load, started

_EVERY_S = 5.0


def pace(replicas: Replicas, way: str, seconds: float) -> float:
    """Tokens per second, the first update at once."""
    began = time.time()
    due = began
    while time.time() < began + seconds:
        replicas.update(way)
        due += _EVERY_S
        time.sleep(max(0.0, min(due, began + seconds) - time.time()))
    elapsed = time.time() - began
    return sum(frame.tokens for frames in replicas.tokens(began) for frame in frames) / elapsed


def judged(rounds: list[dict[str, float]]) -> list[Record]:
    records = []
    for way in WAYS:
        value = statistics.median(found[way] for found in rounds)
        records.append(
            Record(name={"nothing": "no update", "together": "verl's stop"}.get(way, way), value=value, unit="tokens/s")
        )
    for way in ("refill", "keep"):
        ratios = [found[way] / found["together"] for found in rounds]
        records.append(Record(name=f"{way} beside verl's, median", value=statistics.median(ratios), unit="x"))
        least = min(ratios)
        records.append(
            Record(name=f"{way} beside verl's, least round", value=least, unit="x", bar="> 1", holds=least > 1)
        )
    return records


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each way in a round")
    parser.add_argument("--running", type=int, default=32, metavar="N", help="requests under way")
    parser.add_argument("--siblings", type=int, default=1, metavar="N", help="requests with the same prompt")
    parser.add_argument("--router", default="least_requests", metavar="POLICY", help="seamless.router.policy")


def main() -> int:
    options = arguments(__doc__ or "", _options)
    rounds: list[dict[str, float]] = []
    with started(router=options.router) as replicas, load(replicas, options.running, options.siblings):
        time.sleep(_EVERY_S)
        for number in range(1 if options.quick else options.rounds):
            order = WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]
            rounds.append({way: pace(replicas, way, options.seconds) for way in order})
            print("  ".join(f"{way} {value:.0f}" for way, value in rounds[-1].items()), flush=True)
    return report(judged(rounds), options.json)


if __name__ == "__main__":
    sys.exit(main())
