"""Bodies that no client should send, on every route: server errors, and requests that get no answer in time.

Three parts, on a proxy over real HTTP whose engine is scripted:

* good bodies with up to three values replaced (seeded; ``--bodies`` per route);
* hostile bytes on every route: deep JSON, huge numbers, broken UTF-8, floods (``tests/bodies.py``);
* schemathesis over our OpenAPI description, as the agent and as the admin, where an interpreter that has it is named:
  ``SEAMLESS_FRAMEWORKS_PYTHON=/path/to/python python -m benchmarks.fuzz`` (the ``clients`` extra).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.records import Record, arguments, report
from seamless_verl.proxy.engine import Ability
from seamless_verl.proxy.text.parsing import TagParser
from tests.bodies import CALLING, GOOD, broken, hostile
from tests.fakes import Served, serving

_PATIENCE_S = 30.0
_SEED = 20
_TESTED = re.compile(r"(\d+) generated")


@dataclass(slots=True)
class Tally:
    """Answers by status; what went wrong, in words."""

    statuses: Counter[int] = field(default_factory=Counter)
    server_errors: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    broken_off: list[str] = field(default_factory=list)
    dirty: int = 0
    slowest_s: float = 0.0

    @property
    def num_requests(self) -> int:
        return sum(self.statuses.values()) + len(self.hangs) + len(self.broken_off)


async def _ask(proxy: Served, path: str, name: str, content: bytes, tally: Tally) -> None:
    handle = await proxy.open(max_tokens=1000)
    key = "admin-key" if path.startswith("/sessions") else handle.api_key
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    url, begun = path.replace("{id}", handle.id), time.perf_counter()
    try:
        response = await asyncio.wait_for(proxy.http.post(url, content=content, headers=headers), _PATIENCE_S)
    except (asyncio.TimeoutError, httpx.TimeoutException):
        tally.hangs.append(f"{path}: {name}")
        return
    except httpx.TransportError as error:
        tally.broken_off.append(f"{path}: {name}: {error}")
        return
    tally.slowest_s = max(tally.slowest_s, time.perf_counter() - begun)
    tally.statuses[response.status_code] += 1
    if response.status_code >= 500 or "internal_error" in response.text:
        tally.server_errors.append(f"{path}: {name}: {response.status_code} {response.text[:200]}")
    if not path.endswith("/close"):
        tally.dirty += not (await proxy.admin.close_session(handle.id)).audit.is_clean


async def _replaced(proxy: Served, per_route: int) -> Tally:
    tally, rng = Tally(), random.Random(_SEED)
    for path, good in GOOD.items():
        for _ in range(per_route):
            body = json.dumps(broken(good, rng))
            await _ask(proxy, path, body[:300], body.encode(), tally)
    return tally


async def _hostile(proxy: Served) -> Tally:
    tally = Tally()
    for path, good in GOOD.items():
        for name, content in hostile(good):
            await _ask(proxy, path, name, content, tally)
    return tally


async def _schemathesis(proxy: Served, interpreter: str, examples: int) -> tuple[int, int]:
    """Test cases that were tried, and runs (of two) in which a server error or a timeout was found."""
    handle = await proxy.open(max_turns=1 << 30, max_tokens=1 << 30, deadline_s=86400.0)
    cases = failed = 0
    for key in (handle.api_key, "admin-key"):
        command = [
            *(interpreter, "-m", "schemathesis.cli", "run", f"{proxy.server.base_url}/openapi.json"),
            *("--checks", "not_a_server_error", "--header", f"Authorization: Bearer {key}"),
            *("--max-examples", str(examples), "--phases", "examples,coverage,fuzzing", "--seed", str(_SEED)),
            *("--request-timeout", str(_PATIENCE_S), "--suppress-health-check", "all"),
            *("--generation-database", "none"),
        ]
        ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
        found = _TESTED.findall(ran.stdout)
        cases += int(found[-1]) if found else 0
        if ran.returncode:
            failed += 1
            print(ran.stdout[-3000:], ran.stderr[-1000:])
    return cases, failed


async def run(bodies: int, examples: int) -> list[Record]:
    options: dict[str, Any] = {"abilities": frozenset(Ability), "parser": TagParser(("<think>", "</think>"))}
    records = []
    async with serving(lambda prompt: CALLING, streams=True, **options) as proxy:
        for name, tally in (("replaced", await _replaced(proxy, bodies)), ("hostile", await _hostile(proxy))):
            for story in [*tally.server_errors, *tally.hangs, *tally.broken_off][:20]:
                print(story)
            refused = sum(count for status, count in tally.statuses.items() if 400 <= status < 500)
            records += [
                Record(name=f"{name}: requests", value=tally.num_requests, unit=""),
                Record(name=f"{name}: refused (4xx)", value=refused, unit=""),
                _none(f"{name}: server errors", len(tally.server_errors)),
                _none(f"{name}: no answer in {_PATIENCE_S:g} s", len(tally.hangs)),
                _none(f"{name}: answers that broke off", len(tally.broken_off)),
                _none(f"{name}: audits that are not clean", tally.dirty),
                Record(name=f"{name}: slowest answer", value=round(tally.slowest_s, 3), unit="s"),
            ]
        interpreter = os.environ.get("SEAMLESS_FRAMEWORKS_PYTHON")
        if interpreter:
            cases, failed = await _schemathesis(proxy, interpreter, examples)
            records.append(Record(name="schemathesis: requests generated", value=cases, unit=""))
            records.append(_none("schemathesis: runs with a server error or timeout", failed))
        else:
            print("schemathesis: not run, SEAMLESS_FRAMEWORKS_PYTHON is not set")
    return records


def _none(name: str, value: int) -> Record:
    return Record(name=name, value=value, unit="", bar="0", holds=value == 0)


def main() -> int:
    def extend(parser: Any) -> None:
        parser.add_argument("--bodies", type=int, default=500, help="bodies with replaced values per route (500)")
        parser.add_argument("--examples", type=int, default=100, help="schemathesis' examples per operation (100)")

    options = arguments(__doc__ or "", extend)
    few = options.quick
    return report(asyncio.run(run(20 if few else options.bodies, 5 if few else options.examples)), options.json)


if __name__ == "__main__":
    sys.exit(main())
