"""Random moves around replicas of unlike versions (`benchmarks.unlike_replicas`); a part of `benchmarks.staleness`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from benchmarks.records import Record
from benchmarks.unlike_replicas import World
from seamless_verl.config import WeightsConfig
from seamless_verl.decode_cost import PUBLISHED, EnginePace
from seamless_verl.staleness.affinity import MovePrice
from seamless_verl.staleness.cache_aware import CacheAware
from seamless_verl.staleness.routing import LeastRequests, MarginalGain

Move = tuple[float, str, Callable[[], object]]  # how often compared with others, its name, what it does


def moves(world: World, rng: random.Random) -> list[Move]:
    """What may happen next."""
    found: list[Move] = [(8, "admit", world.admit), (16, "route", world.route), (8, "ask who pulls", world.begin_pulls)]
    if running := world.running():
        number = rng.choice(running)
        found += [(16, "token", lambda: world.token(number)), (30, "turn ends", lambda: world.end_turn(number))]
    if ready := world.may_consume:
        found.append((12, "consume", lambda: world.consume(rng.randint(1, ready))))
    if world.may_publish:
        found.append((12, "publish", world.publish))
    if pulling := [name for name, each in world.replicas.items() if each.pulling]:
        name = rng.choice(pulling)
        found.append((10, "pull ends", lambda: world.pulled(name)))
        found.append((2, "pull fails", lambda: world.pull_failed(name, breaks=False)))
        found.append((1, "replica breaks in mid-load", lambda: world.pull_failed(name, breaks=True)))
    one = rng.choice(list(world.replicas))
    if world.replicas[one].away:
        found.append((5, "replica is lent or restarted", lambda: world.join(one)))
    else:
        found.append((0.7, "replica dies or is taken back", lambda: world.leave(one)))
    if world.members:
        found.append((0.5, "group fails", lambda: world.give_up(rng.choice(sorted(world.members)))))
    return found


def unlike_storm(operations: int, seed: int, done: Counter[str]) -> World:
    """Random moves around replicas that take new weights one after the other; then one is frozen, and it must go on."""
    rng = random.Random(seed)
    eta = rng.randint(0, 3)
    weights = WeightsConfig(sync="rolling", at_once=rng.choice((1, 1, 2)), max_lag=rng.randint(1, max(1, eta)))
    cost = PUBLISHED["7b-tp1"]
    by_cache = CacheAware(pace=EnginePace(decode=cost, prefill_s_per_token=1e-4), price=MovePrice())
    world = World(
        eta=eta,
        batch=rng.choice((1, 2, 4)),
        weights=weights,
        router=rng.choice((LeastRequests(), MarginalGain(cost=cost), by_cache)),
        replicas=rng.randint(2, 5),
        cache_tokens=rng.choice((150, 350, 1000, 1 << 30)),  # a context has 100
    )
    for number in range(operations):
        found = moves(world, rng)
        (move,) = rng.choices(found, weights=[weight for weight, _, _ in found])
        done[move[1]] += 1
        move[2]()
        if number % 8 == 0:
            world.check()
    frozen, *others = world.replicas
    for name in others:
        if world.replicas[name].away:
            world.join(name)
    world.broken["it stands still beside a frozen replica"] += not world.settle(2, frozen=frozen)
    world.check()
    return world


def unlike_replicas(operations: int) -> list[Record]:
    done, broken, trained, seed = Counter[str](), Counter[str](), 0, 0
    while done.total() < operations:
        world = unlike_storm(min(2_000, operations - done.total()), seed, done)
        broken.update(world.broken)
        trained += len(world.trained)
        seed += 1
    return [
        Record(name="operations on replicas of unlike versions", value=done.total(), unit="ops"),
        *(Record(name=f"  of them: {name}", value=count, unit="ops") for name, count in done.most_common()),
        Record(name="groups trained meanwhile", value=trained, unit="groups"),
        *(
            Record(name=f"unlike versions: {name}", value=count, unit="times", bar="0", holds=count == 0)
            for name, count in broken.items()
        ),
    ]
