"""verl's manager of rollout workers, which replaces one that died and has its prompt groups begin again.

    generate_sequences ─► worker ─► dies ─► (noticed) replace ─► its places at the router, its rows are cleared
                             ▲                   │
                             └── its groups ◄────┘  those that have not ended, to the worker in its place

verl 0.9.1 starts its workers once. What is decided stands in `staleness.groups`. The proxy beside the new worker gives
its agents the answers that the dead ones had (`proxy.journal.left_sessions`). Invariant: the groups of a worker are
handed out again only once its process is gone and the rows that it wrote of them are cleared.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
import transfer_queue as tq
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils.tensordict_utils import index_select_tensor_dict

from seamless_verl.places import error_in_words
from seamless_verl.run.restarts import RunBroken
from seamless_verl.staleness.groups import MOST_LOSSES, SUCCESSOR, IssuedGroups
from seamless_verl.verl_adapter.rollout.attempt_watch import attended

_log = logging.getLogger(__name__)
_GONE_S = 10.0
_UNDER_WAY = ("pending", "running")


class ReplacingManager(AgentLoopManagerTQ):
    """See the module.

    Attributes:
        say: told in a line of every worker that died.
        note_death: told which one, by the id of its actor.
        look: called while a worker that is given prompts does not answer.
        floor_of: the oldest weights that may begin a prompt, those of its reservation; None: prompts have none.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.say: Callable[[str], None] = _log.warning
        self.note_death: Callable[[str], None] = lambda worker: None
        self.look: Callable[[], None] = lambda: None
        self.floor_of: Callable[[str], int] | None = None
        self._issued = IssuedGroups()
        self._replaced: dict[str, int] = {}  # workers that died -> their place among the others
        self._nodes: dict[int, str] = {}  # where workers have answered, by their place
        self._prompts: dict[str, tuple[TensorDict, int]] = {}  # of what is issued: where its prompt stands

    def generate_sequences(self, prompts: TensorDict) -> None:
        """As the parent's, to those with the fewest open groups first; a worker that is found dead is replaced."""
        self._settle(_under_way(tq.kv_list() or {}))
        held = self._issued.held()
        workers = sorted(self.agent_loop_workers, key=lambda worker: held[_name(worker)])
        # Most refills are of one prompt, which makes one chunk.
        for worker, error in self._hand_out(list(zip(workers, prompts.chunk(len(workers)), strict=False))):
            self.replace(worker, error)

    def replace(self, dead: Any, error: RayActorError) -> Any:
        """Start another worker in place of ``dead``, unless that was done, and have its groups begin again.

        Returns:
            Who is in its place now.

        Raises:
            RunBroken: a group has lost its worker again and again.
        """
        name = _name(dead)
        if name in self._replaced:
            return self.agent_loop_workers[self._replaced[name]]
        rank = self._replaced[name] = self.agent_loop_workers.index(dead)
        ray.kill(dead)  # `error` may only say that it could not be reached
        ray.wait([dead.__ray_ready__.remote()], timeout=_GONE_S)
        if hasattr(self.llm_client._load_balancer, "worker_died"):
            self.llm_client._load_balancer.worker_died.remote(name)
        self.note_death(name)
        listed = tq.kv_list() or {}  # it wrote until it was gone
        under_way = _under_way(listed)
        loss = self._issued.lost(name, under_way)
        self._settle(under_way)
        story = f"rollout worker {rank} died ({error_in_words(error)})"
        if loss.hopeless:
            raise RunBroken(f"{story}, the last of {MOST_LOSSES} workers that lost prompt group {loss.hopeless[0]}")
        for partition, keys in listed.items():
            rows = [key for key, tag in keys.items() if not tag.get("is_prompt") and key.split("_", 1)[0] in loss.again]
            if rows:
                tq.kv_clear(keys=rows, partition_id=partition)
        worker = self.agent_loop_workers[rank] = self._start(rank)
        self.say(f"{story}; {len(loss.again)} prompt groups begin again")
        chunks: dict[int, tuple[TensorDict, list[int]]] = {}
        for group in loss.again:
            chunk, row = self._prompts[group]
            chunks.setdefault(id(chunk), (chunk, []))[1].append(row)
        for died, why in self._hand_out([(worker, index_select_tensor_dict(*share)) for share in chunks.values()]):
            self.replace(died, why)
        return self.agent_loop_workers[rank]

    def _hand_out(self, shares: list[tuple[Any, TensorDict]]) -> list[tuple[Any, RayActorError]]:
        """Returns when the workers have begun, so that an error of theirs is raised here: which of them are dead."""
        calls, dead = [], []
        for worker, prompts in shares:
            groups = [str(uid) for uid in prompts["uid"]]
            self._prompts.update({group: (prompts, row) for row, group in enumerate(groups)})
            self._issued.issue(_name(worker), groups)
            floors = ({group: self.floor_of(group) for group in groups},) if self.floor_of else ()
            calls.append((worker, worker.generate_sequences.remote(prompts, *floors)))
        for worker, call in calls:
            try:
                if node := attended(call, self.look):  # which workers of a class of the user's own do not say
                    self._nodes[self.agent_loop_workers.index(worker)] = node
            except RayActorError as error:
                dead.append((worker, error))
        return dead

    def _start(self, rank: int) -> Any:
        """A worker as verl's `_init_agent_loop_workers` makes it, on the node of the one before, where its journal is.

        By its place the node may be another one now: nodes come and go.
        """
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        home = self._nodes.get(rank, "")
        node = home if home in nodes else nodes[rank % len(nodes)]
        options = self.agent_loop_workers_class.options(
            name=f"agent_loop_worker_{rank}_{SUCCESSOR}{uuid.uuid4().hex[:8]}",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
        )
        return options.remote(self.config, self.llm_client, self.teacher_client, self.reward_loop_worker_handles)

    def _settle(self, under_way: Collection[str]) -> None:
        self._issued.settle(under_way)
        self._prompts = {group: place for group, place in self._prompts.items() if group in self._issued}


def _name(worker: Any) -> str:
    """As the worker calls itself at the router."""
    return str(worker._actor_id.hex())


def _under_way(listed: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Groups that have not ended, in all partitions."""
    prompts = [(key, tag) for keys in listed.values() for key, tag in keys.items() if tag.get("is_prompt")]
    return {key for key, tag in prompts if tag["status"] in _UNDER_WAY}
