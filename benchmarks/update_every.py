"""Tokens per second with new weights every five seconds: replicas that pull in turn, beside verl's stop of all.

The two real replicas of `benchmarks.weights`, under its load. Every five seconds come new weights, each time in another
way (none at all is one), since a machine's speed drifts by more than the ways differ; a round has so many of
each. With ``--siblings 8 --router cache_aware`` prompts are shared by eight requests that stay together, as under the
GPU recipes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from benchmarks.records import Record, arguments, report
from benchmarks.weights import WAYS, Replicas, load, started

_EVERY_S = 5.0


def one_round(replicas: Replicas, updates: int) -> dict[str, float]:
    """Tokens per second of each way, the seconds of its updates included."""
    tokens, seconds = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, 0.0)
    for turn in range(updates):
        for way in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:
            began = time.time()
            replicas.update(way)
            time.sleep(max(0.0, began + _EVERY_S - time.time()))
            ended = time.time()
            seconds[way] += ended - began
            tokens[way] += sum(f.tokens for frames in replicas.tokens(began) for f in frames if f.at < ended)
    return {way: tokens[way] / seconds[way] for way in WAYS}


def judged(rounds: list[dict[str, float]]) -> list[Record]:
    records = []
    for way, name in zip(WAYS, ("no update", "verl's stop", "rolling, refill", "rolling, keep"), strict=True):
        value = statistics.median(found[way] for found in rounds)
        records.append(Record(name=name, value=value, unit="tokens/s"))
    for way in ("refill", "keep"):
        ratios = [found[way] / found["together"] for found in rounds]
        median, least = statistics.median(ratios), min(ratios)
        records += [
            Record(name=f"{way} beside verl's stop, median round", value=median, unit="x"),
            Record(name=f"{way} beside verl's stop, least round", value=least, unit="x", bar="> 1", holds=least > 1),
        ]
    return records


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--updates", type=int, default=8, help="of each way in a round")
    parser.add_argument("--running", type=int, default=32, metavar="N", help="requests under way")
    parser.add_argument("--siblings", type=int, default=1, metavar="N", help="requests with the same prompt")
    parser.add_argument("--router", default="least_requests", metavar="POLICY", help="seamless.router.policy")


def main() -> int:
    options = arguments(__doc__ or "", _options)
    rounds: list[dict[str, float]] = []
    with started(router=options.router) as replicas, load(replicas, options.running, options.siblings):
        time.sleep(_EVERY_S)
        for _ in range(1 if options.quick else options.rounds):
            rounds.append(one_round(replicas, 1 if options.quick else options.updates))
            print("  ".join(f"{way} {value:.0f}" for way, value in rounds[-1].items()), flush=True)
    return report(judged(rounds), options.json)


if __name__ == "__main__":
    sys.exit(main())
