"""The thirteen checks: what each shows, what it needs, how long it may take. Imports nothing heavy."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.records import Record


class CannotRun(Exception):
    """Something is missing here; the message says what. The check is skipped and does not count as held."""


class PartlySkipped(CannotRun):
    """A part of the check could not run; ``records`` are those of the others."""

    def __init__(self, reason: str, records: list[Record]) -> None:
        super().__init__(reason)
        self.records = records


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Where a check runs.

    Attributes:
        platform: ``gpu`` or ``cpu``: the same code, at sizes that each can take.
        folder: the check's own; models are shared in its parent.
        beside: how many checks have the card together, this one included.
    """

    platform: str
    folder: Path
    beside: int = 1

    @property
    def on_gpu(self) -> bool:
        return self.platform == "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        shows: what is known when it holds.
        target: ``module:function`` below this package, called with a `Context`; returns the records.
        packages: modules that it imports beside verl's and vLLM's own.
        limit_s: after so many seconds on a GPU it is ended; on the CPU it has `_CPU_FACTOR` times as long. Much of it
            is start: on a fresh machine each of four processes imports vLLM for 20 s (seen on 16 cores).
    """

    number: int
    name: str
    shows: str
    target: str
    packages: tuple[str, ...] = ()
    limit_s: float = 150.0

    def limit(self, platform: str) -> float:
        return self.limit_s * (_CPU_FACTOR if platform == "cpu" else 1.0)

    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in self.packages if importlib.util.find_spec(name) is None)

    def function(self) -> Callable[[Context], list[Record]]:
        module, _, name = self.target.partition(":")
        found: Callable[[Context], list[Record]] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return found


_CPU_FACTOR = 4.0  # two cores start seven interpreters one after the other

CHECKS: tuple[Check, ...] = (
    Check(
        number=1,
        name="offload round trip",
        shows="parameters on the host and back; weights that are saved meanwhile are copies",
        target="offloading:run",
        limit_s=120,
    ),
    Check(
        number=2,
        name="buckets of the weight transfer",
        shows="the checkpoint engine gives back what it takes of the device",
        target="buckets:run",
        limit_s=120,
    ),
    Check(
        number=3,
        name="interrupt and go on",
        shows="an interrupted answer goes on: no token is lost, log-probs are the model's own",
        target="interrupting:run",
        limit_s=300,
    ),
    Check(
        number=4,
        name="ten cycles of sleep",
        shows="sleep level 2, weights, cache: memory, weights and greedy output as before",
        target="sleeping:run",
        limit_s=300,
    ),
    Check(
        number=5,
        name="a run with and without offloading",
        shows="rows, log-probs and the memory of each phase",
        target="whole_runs:run_offload",
        limit_s=540,
    ),
    Check(
        number=6,
        name="weights at every loan",
        shows="four mini-batches, greedy lending: the engine has what was published",
        target="whole_runs:run_mini_batches",
        limit_s=420,
    ),
    Check(
        number=7,
        name="1,200 requests through a loan",
        shows="more requests than verl's server has slots for wait, and all are answered",
        target="crowding:run_loan",
        limit_s=360,
    ),
    Check(
        number=8,
        name="a cache that is too small",
        shows="requests that lose their cache end whole, the oldest first",
        target="crowding:run_pressure",
        limit_s=300,
    ),
    Check(
        number=9,
        name="a replica that is killed",
        shows="server and engine, while generating and while training: the run goes on",
        target="dying:run",
        limit_s=600,
    ),
    Check(
        number=10,
        name="grammars and pictures",
        shows="interrupted answers keep to their grammar and to their pictures",
        target="constraining:run",
        limit_s=420,
    ),
    Check(
        number=11,
        name="an adapter apart from its base",
        shows="unmerged LoRA on one device: the engine samples with the adapter",
        target="whole_runs:run_adapter",
        limit_s=360,
    ),
    Check(
        number=12,
        name="prices at 8B shapes",
        shows="seconds to lend, to take back, and per token of prefill, for the simulator",
        target="prices:run",
        limit_s=540,
    ),
    Check(
        number=13,
        name="shared prefixes",
        shows="eight rows with one prompt of 8k tokens: the same numbers as verl's engine, sooner",
        target="sharing:run",
        limit_s=240,
    ),
)
BY_NUMBER = {check.number: check for check in CHECKS}
