"""The supervisor's sweep of a cluster: ``python -m seamless_verl.verl_adapter.far_sweep RUN_ID SINCE JOURNALS``.

A Ray cluster that a run joined outlives it. Ray ends the run's actors and tasks on every node when their driver ends,
but not what those have started (engines, agents), nor the shared memory and the journals of those that were killed. The
supervisor starts this when the trainer has ended, however it ended; it joins the cluster named by ``RAY_ADDRESS`` as a
job of its own and sweeps each node by a task there: also this one, whose container may hide from the supervisor what
Ray has started in another. Neither the job nor its tasks carry the run's mark.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from seamless_verl.run.supervisor import sweep_node

_LIMIT_S = 60.0


def sweep_nodes(run_id: str, since: float, journals: str, limit_s: float = _LIMIT_S) -> dict[str, str]:
    """Sweep every living node, all at once.

    Args:
        run_id: mark of the run's processes.
        since: start of the run, seconds since the epoch.
        journals: the run's `JOURNAL_DIR`; empty: it has none.
        limit_s: of all nodes together.

    Returns:
        What is left or went wrong, by the node's address; empty: nothing.
    """
    there = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    task: Any = ray.remote(num_cpus=0, max_retries=0)(sweep_node)
    asked = {}
    for node in there:
        on_it = NodeAffinitySchedulingStrategy(node, soft=False)
        asked[task.options(scheduling_strategy=on_it).remote(run_id, since, journals)] = there[node]
    ended, waiting = ray.wait(list(asked), num_returns=len(asked), timeout=limit_s)
    problems = {asked[task]: f"no answer within {limit_s:.0f} s" for task in waiting}
    for task in ended:
        try:
            left = ray.get(task)
        except RayError as error:
            left = f"not swept ({type(error).__name__})"
        if left:
            problems[asked[task]] = left
    return problems


def main(run_id: str, since: str, journals: str) -> int:
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.ERROR)
    problems = sweep_nodes(run_id, float(since), journals)
    ray.shutdown()
    for address, problem in problems.items():
        sys.stderr.write(f"on {address}: {problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
