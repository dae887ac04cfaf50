"""The staleness kernel under load: safety over two million operations, what repair is worth, order, cost.

    python -m benchmarks.staleness [--quick] [--json FILE]

A million operations on the protocol alone, and a million on it with replicas of unlike versions around it.

Only the kernel runs here, on virtual time where time matters. Whole runs are measured by `benchmarks.staleness_live`.
"""

from __future__ import annotations

import heapq
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from benchmarks.records import Record, arguments, report
from benchmarks.unlike_storm import unlike_replicas
from seamless_verl.staleness.groups import StuckPolicy, Treatment
from seamless_verl.staleness.protocol import StalenessProtocol


@dataclass(slots=True)
class Audit:
    """What must never happen, counted apart from the protocol's own books."""

    bound_violated: int = 0
    consumed_twice: int = 0
    slots_leaked: int = 0
    too_many_in_flight: int = 0
    operations: int = 0
    consumed: set[str] = field(default_factory=set)


def storm(operations: int, seed: int, audit: Audit) -> None:
    """Random operations on one protocol: replicas that lag, groups that end in any order, fail, and are retried.

    Interrupts and migrations happen between ``reserve`` and ``occupy`` and are invisible to the protocol by
    construction; here they show as a first token that is newer than the reservation and as any order of completion.
    """
    rng = random.Random(seed)
    eta, batch = rng.randint(0, 4), rng.choice((1, 2, 4, 16, 64))
    protocol = StalenessProtocol(eta=eta, batch_size=batch, repair=rng.random() < 0.8)
    version, taken, number = 0, 0, 0
    in_flight: dict[str, tuple[int, bool]] = {}  # group -> (V_traj, finished), the audit's own book
    running: list[str] = []
    end = audit.operations + operations
    while audit.operations < end:
        audit.operations += 1
        choice = rng.random()
        if choice < 0.40:
            group, start = f"{seed}/{number}", version - (rng.randint(0, eta + 1) if rng.random() < 0.3 else 0)
            number += 1
            if protocol.reserve(group, start) is not None:
                in_flight[group] = (start, False)
                running.append(group)
        elif choice < 0.75 and running:
            position = rng.randrange(len(running))
            running[position], running[-1] = running[-1], running[position]
            group = running.pop()
            start = min(version, in_flight[group][0] + (rng.randint(0, 2) if rng.random() < 0.2 else 0))
            protocol.occupy(group, start)
            in_flight[group] = (start, True)
        elif choice < 0.80 and running:
            group = running.pop(rng.randrange(len(running)))
            protocol.abort(group)
            del in_flight[group]
        elif protocol.num_available:
            for entry in protocol.consume(rng.randint(1, protocol.num_available)).groups:
                start, finished = in_flight.pop(entry.group)
                audit.bound_violated += version - start > eta or start > version or not finished
                audit.consumed_twice += entry.group in audit.consumed
                audit.consumed.add(entry.group)
                taken += 1
            if taken == batch:
                version, taken = version + 1, 0
        audit.slots_leaked += protocol.capacity(version) + len(in_flight) + taken != (eta + 1) * batch
        audit.too_many_in_flight += len(in_flight) > (eta + 1) * batch


def safety(operations: int) -> list[Record]:
    audit, seed = Audit(), 0
    while audit.operations < operations:
        storm(min(5_000, operations - audit.operations), seed, audit)
        seed += 1
    counts = {
        "bound violated": audit.bound_violated,
        "group consumed twice": audit.consumed_twice,
        "slot leaked": audit.slots_leaked,
        "more than (eta+1)B in flight": audit.too_many_in_flight,
    }
    records = [Record(name="operations", value=audit.operations, unit="ops"), consumed_groups(audit)]
    return records + [
        Record(name=name, value=count, unit="times", bar="0", holds=count == 0) for name, count in counts.items()
    ]


def consumed_groups(audit: Audit) -> Record:
    return Record(name="groups consumed meanwhile", value=len(audit.consumed), unit="groups")


# ------------------------------------------------------------------ virtual time


@dataclass(frozen=True, slots=True)
class Outcome:
    wall: float
    stuck: float  # time that the trainer waits for a STUCK buffer
    idle: float  # all of its waiting
    order: list[str]
    staleness: Counter[int]
    retries: int


@dataclass(slots=True)
class _Rollout:
    """As many rollout slots as the bound admits; a group takes ``lengths`` seconds. ``now``: virtual seconds."""

    protocol: StalenessProtocol
    lengths: Callable[[random.Random], float]
    rng: random.Random
    now: float = 0.0
    attempts: int = 0
    ends: list[tuple[float, int, str]] = field(default_factory=list)
    alive: dict[str, int] = field(default_factory=dict)

    def start(self, group: str) -> None:
        self.alive[group] = self.attempts
        heapq.heappush(self.ends, (self.now + self.lengths(self.rng), self.attempts, group))
        self.attempts += 1

    def admit(self, version: int) -> None:
        while self.protocol.reserve(f"g{self.attempts}", version) is not None:
            self.start(f"g{self.attempts}")

    def retry(self, group: str, version: int) -> None:
        self.protocol.abort(group)
        self.protocol.reserve(group, version)
        self.start(group)

    def next_end(self) -> float:
        """Let the next attempt end (one that a retry has replaced ends unseen); returns the seconds until then."""
        then, attempt, group = heapq.heappop(self.ends)
        waited, self.now = then - self.now, then
        if self.alive.get(group) == attempt:
            self.protocol.occupy(group)
            del self.alive[group]
        return waited

    def go_on(self, seconds: float) -> None:
        until = self.now + seconds
        while self.ends and self.ends[0][0] <= until:
            self.next_end()
        self.now = until


def simulate(
    *,
    eta: int,
    batch: int,
    steps: int,
    lengths: Callable[[random.Random], float],
    seed: int,
    repair: bool = True,
    treatment: Treatment = Treatment.WAIT,
    train: float = 1.0,
) -> Outcome:
    """One trainer, whose step takes ``train`` seconds, and `_Rollout`.

    Lengths belong to the prompts, in order, so runs that differ in one switch see the same work.
    """
    protocol = StalenessProtocol(eta=eta, batch_size=batch, repair=repair)
    rollout = _Rollout(protocol, lengths, random.Random(seed))
    policy = StuckPolicy(treatment=treatment, patience_s=train)
    stuck = idle = 0.0
    retries = 0
    order: list[str] = []
    lags: Counter[int] = Counter()
    for version in range(steps):
        rollout.admit(version)
        waiting_since = rollout.now
        while protocol.num_available < batch:
            blocked = bool(protocol.stuck())
            for group in policy.treat(protocol, rollout.now - waiting_since) if blocked else []:
                rollout.retry(group, version)
                retries += 1
            if protocol.num_available >= batch:
                break
            waited = rollout.next_end()
            stuck += waited if blocked else 0.0
            idle += waited
        for entry in protocol.consume(batch).groups:
            order.append(entry.group)
            lags[entry.staleness] += 1
        rollout.go_on(train)
    return Outcome(rollout.now, stuck, idle, order, lags, retries)


def skewed(rng: random.Random) -> float:
    """Log-normal with a mean of about a training step and a long tail, cut off as a length limit would."""
    return min(8.0, rng.lognormvariate(-0.7, 1.2))


def ablation(seeds: range, steps: int) -> list[Record]:
    """Repair on and off on the same work; then more lag on skewed and on constant lengths."""
    records = []
    for eta in (1, 2, 3):
        ratios, walls = [], []
        for seed in seeds:
            kept, off = (
                simulate(eta=eta, batch=32, steps=steps, lengths=skewed, seed=seed, repair=repair)
                for repair in (True, False)
            )
            assert max(kept.staleness) <= eta
            assert max(off.staleness) <= eta
            ratios.append(off.stuck / kept.stuck)
            walls.append(off.wall / kept.wall)
        ratio = statistics.median(ratios)
        records.append(
            Record(
                name=f"STUCK time without repair / with, eta {eta}",
                value=ratio,
                unit="ratio",
                bar="> 1" if eta > 1 else "",
                holds=ratio > 1 if eta > 1 else None,
            )
        )
        records.append(
            Record(name=f"wall time without repair / with, eta {eta}", value=statistics.median(walls), unit="ratio")
        )
    for name, lengths in (("skewed", skewed), ("constant", lambda rng: 1.0)):
        base = {seed: simulate(eta=0, batch=32, steps=steps, lengths=lengths, seed=seed).wall for seed in seeds}
        for eta in (1, 2, 3):
            gain = statistics.median(
                base[seed] / simulate(eta=eta, batch=32, steps=steps, lengths=lengths, seed=seed).wall for seed in seeds
            )
            records.append(
                Record(name=f"virtual speed-up over eta 0, {name} lengths, eta {eta}", value=gain, unit="ratio")
            )
    return records


def stragglers(seeds: range, steps: int) -> list[Record]:
    runs = [
        (
            simulate(eta=1, batch=32, steps=steps, lengths=skewed, seed=seed),
            simulate(eta=1, batch=32, steps=steps, lengths=skewed, seed=seed, treatment=Treatment.RETRY),
        )
        for seed in seeds
    ]
    value = statistics.median(retried.idle / waited.idle for waited, retried in runs)
    share = statistics.median(retried.retries / (32 * steps) for _, retried in runs)
    return [
        Record(name="trainer idle with retry of stragglers / waiting", value=value, unit="ratio"),
        Record(name="groups started anew by it", value=share, unit="share"),
    ]


def synchronous_order(seeds: range, steps: int, batch: int = 16) -> Record:
    """A synchronous trainer, written down independently: start B, wait for all B, train them as they finished."""
    different = 0
    for seed in seeds:
        rng, expected, number = random.Random(seed), [], 0
        for _ in range(steps):
            ends = []
            for _ in range(batch):
                ends.append((skewed(rng), number))
                number += 1
            expected += [f"g{name}" for _, name in sorted(ends)]
        different += simulate(eta=0, batch=batch, steps=steps, lengths=skewed, seed=seed).order != expected
    return Record(
        name="eta 0: runs whose order is not the synchronous one",
        value=different,
        unit=f"of {len(seeds)}",
        bar="0",
        holds=different == 0,
    )


# ------------------------------------------------------------------ cost


def timed(operation: Callable[..., object], arguments: Iterable[tuple[object, ...]]) -> list[float]:
    """Microseconds of each call."""
    spent = []
    for values in arguments:
        begin = time.perf_counter()
        operation(*values)
        spent.append(1e6 * (time.perf_counter() - begin))
    return spent


def cost(entries: int, repeats: int) -> list[Record]:
    """Microseconds per operation while about ``entries`` groups are in flight."""
    eta = 3
    spent: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats):
        rng, protocol = random.Random(repeat), StalenessProtocol(eta=eta, batch_size=entries // (eta + 1), version=eta)
        # Some lag behind, so that repair has reservations of several versions to choose from.
        starts = [(f"g{number}", eta - rng.choice((0, 0, 0, 1, 2))) for number in range(entries)]
        spent["reserve"] += timed(protocol.reserve, starts)
        held = [(group,) for group, _ in protocol.groups()]
        rng.shuffle(held)
        half, few = len(held) // 2, entries // 20
        spent["occupy with repair"] += timed(protocol.occupy, held[:half])
        spent["abort"] += timed(protocol.abort, held[half : half + few])
        spent["consume one"] += timed(protocol.consume, [(1,)] * min(few, protocol.num_available))
    records = []
    for name, values in spent.items():
        median = statistics.median(values)
        records.append(
            Record(name=f"{name}, {entries} entries: median", value=median, unit="us", bar="<= 50", holds=median <= 50)
        )
        p99 = sorted(values)[int(0.99 * len(values))]
        records.append(Record(name=f"{name}, {entries} entries: 99th percentile", value=p99, unit="us"))
    return records


def main() -> int:
    options = arguments("The staleness kernel: safety, repair, order, cost.")
    seeds = range(3 if options.quick else 20)
    steps = 40 if options.quick else 200
    records = safety(50_000 if options.quick else 1_000_000)
    records += unlike_replicas(20_000 if options.quick else 1_000_000)
    records += ablation(seeds, steps)
    records += stragglers(seeds, steps)
    records.append(synchronous_order(seeds, steps))
    records += cost(100_000, 1 if options.quick else 3)
    return report(records, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
