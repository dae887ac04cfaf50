"""Tokens that are prefilled again when a replica is lent and taken back, under verl's balancer and under ours.

    python -m benchmarks.prefixes [--quick] [--json FILE]

Agents with growing contexts ask two replicas; a third one joins, all ask twice, it leaves, all ask again. The balancers
are those that run; engines are counted, not run: a token is prefilled again if another replica has it in its cache, or
had it and was taken back. No GPU, no Ray.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.records import Record, arguments, report

_CONTEXTS = (1_000, 4_000, 16_000, 64_000)
_TURN_TOKENS = 500


class Agents:
    """``busy``: share of the agents that generate at a time, the others wait for their tools."""

    def __init__(self, balancer: Any, *, number: int, context: int, busy: float, tells: bool, seed: int) -> None:
        self._balancer, self._tells = balancer, tells
        self._contexts = dict.fromkeys((f"agent-{n}" for n in range(number)), context)
        self._cached: dict[str, dict[str, int]] = {name: {} for name in self._contexts}
        self._longest = dict.fromkeys(self._contexts, 0)  # that some replica ever had of it
        self._running: list[tuple[str, str]] = []
        self._most = max(1, round(busy * number))
        self._rng = random.Random(seed)
        self.again = 0

    @property
    def tokens(self) -> int:
        return sum(self._contexts.values())

    def turn_each(self) -> None:
        names = list(self._contexts)
        self._rng.shuffle(names)
        for name in names:
            said = {"context_tokens": self._contexts[name]} if self._tells else {}
            place, _ = self._balancer.acquire_server(name, **said)
            self.again += self._longest[name] - self._cached[name].get(place, 0)
            self._contexts[name] += _TURN_TOKENS
            self._cached[name][place] = self._longest[name] = self._contexts[name]
            self._running.append((place, name))
            if len(self._running) > self._most:
                self._balancer.release_server(*self._running.pop(0))

    def lose(self, replica: str) -> None:
        for cached in self._cached.values():
            cached.pop(replica, None)


def cycle(*, ours: bool, number: int, context: int, busy: float, seed: int) -> float:
    """Prefilled again, as a share of all contexts."""
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    from seamless_verl.verl_adapter.rollout.load_balancer import MeteredLoadBalancer

    made = MeteredLoadBalancer if ours else GlobalRequestLoadBalancer
    random.seed(seed)  # verl's balancer draws among equals
    balancer = made(servers={"a": "A", "b": "B"})
    agents = Agents(balancer, number=number, context=context, busy=busy, tells=ours, seed=seed)
    agents.turn_each()
    agents.turn_each()
    began = agents.tokens
    balancer.add_servers({"c": "C"})
    if not ours:
        balancer.clear_sticky_cache()  # as verl's trainers do when replicas join
    agents.turn_each()
    agents.turn_each()
    agents.lose("c")
    balancer.remove_servers(["c"])
    agents.turn_each()
    return agents.again / began


def measured(*, number: int, seeds: int) -> Iterator[Record]:
    for busy in (0.1, 0.5):
        for context in _CONTEXTS:
            theirs, own = (
                sum(cycle(ours=ours, number=number, context=context, busy=busy, seed=seed) for seed in range(seeds))
                / seeds
                for ours in (False, True)
            )
            name = f"prefixes, {number} agents of {context} tokens, {busy:.0%} generate"
            yield Record(name=f"{name}: prefilled again, verl's balancer", value=100 * theirs, unit="% of all contexts")
            yield Record(
                name=f"{name}: prefilled again, ours",
                value=100 * own,
                unit="% of all contexts",
                bar="<= a half of verl's",
                holds=own <= theirs / 2,
            )


def main() -> int:
    options = arguments(__doc__ or "")
    records = list(measured(number=100 if options.quick else 256, seeds=1 if options.quick else 5))
    return report(records, options.json)


if __name__ == "__main__":
    sys.exit(main())
