"""Which replicas died: asked again and again without waiting, since whoever lives may be too busy to answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from seamless_verl.verl_adapter.vllm.engine_watch import engine_died


class ReplicaHealth:
    """Of replicas that take part in something.

    A replica consists of servers, the engine processes behind them, and, unless it lives in the trainer's workers, of
    workers of its own that hand weights to it. Any of them may die alone.
    """

    def __init__(self, replicas: Sequence[RolloutReplica]) -> None:
        self._replicas = list(replicas)
        self._asked: dict[tuple[RolloutReplica, str, Any], tuple[Any, float]] = {}
        for replica in self._replicas:
            for server in replica.servers:
                self._ask(replica, "server", server)
            if replica.rollout_mode is RolloutMode.STANDALONE:
                for worker in replica.workers:
                    self._ask(replica, "worker", worker)

    def deaths(self, wait_s: float = 0.0) -> dict[RolloutReplica, str]:
        """Those found dead, and why; the others answered, or have not answered yet."""
        calls = [call for call, _ in self._asked.values()]
        if wait_s and calls:
            ray.wait(calls, num_returns=len(calls), timeout=wait_s)
        found: dict[RolloutReplica, str] = {}
        for (replica, part, actor), (call, _) in list(self._asked.items()):
            if not ray.wait([call], timeout=0)[0]:
                continue
            try:
                if ray.get(call):
                    found.setdefault(replica, "its engine process died")
            except RayError as error:
                found.setdefault(replica, f"its {part}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
            else:
                self._ask(replica, part, actor)
        return found

    def silent(self, for_s: float) -> dict[RolloutReplica, str]:
        """Those one of whose servers has not answered for so long; a worker is silent whenever it works."""
        now = time.monotonic()
        return {
            replica: f"its server has not answered for {now - since:.0f} s"
            for (replica, part, _), (_, since) in self._asked.items()
            if part == "server" and now - since >= for_s
        }

    def _ask(self, replica: RolloutReplica, part: str, actor: Any) -> None:
        question = engine_died if part == "server" else _nothing
        self._asked[replica, part, actor] = (actor.__ray_call__.remote(question), time.monotonic())


def _nothing(_: Any) -> bool:
    """Runs in a worker's process: whether it lives shows in whether this answers."""
    return False
