"""Published weights for replicas on other nodes: copied there through Ray, once for all replicas of a node.

    the trainer's node            another node
    store ◄── Holder ══ Ray ═════► store ◄── its replicas map it, as they would at home

What the holder says is published counts, not what lies in the other node's store: that may be of an earlier life of the
run. A copy is listed when all of it is there, as a publication is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from seamless_verl.verl_adapter.weights import weight_store
from seamless_verl.verl_adapter.weights.weight_store import Manifest, WeightsRefused

_CHUNK = 16 << 20  # bytes
_AHEAD = 4  # chunks that wait for whoever copies
_AT_A_TIME = 64  # nodes
_ANSWER_S = 30.0


class Holder:
    """An actor on the trainer's node. It keeps nothing, so Ray may start it again."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def newest(self) -> str | None:
        """The manifest of the newest version, encoded."""
        manifest = weight_store.newest(self._folder)
        return None if manifest is None else weight_store.encode(manifest)

    def content(self, file: str) -> Iterator[bytes]:
        """The bytes of a published file, in pieces.

        Raises:
            FileNotFoundError: that version was superseded.
        """
        memory = weight_store.map_file(file)
        for start in range(0, len(memory), _CHUNK):
            yield memory[start : start + _CHUNK]


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """What a replica's server needs to get at the weights.

    Attributes:
        node: where they are published, by Ray's id.
        holder: the actor there.
    """

    node: str
    holder: Any

    def newest(self, folder: Path) -> Manifest | None:
        """The newest version, which is in this node's store now; None: nothing is published.

        Raises:
            WeightsRefused: it could not be copied.
            FileNotFoundError: it was superseded meanwhile.
        """
        if _node() == self.node:
            return weight_store.newest(folder)
        weight_store.hold(folder)
        try:
            with _alone(folder):
                return self._copied(folder)
        except FileNotFoundError:
            raise
        except (OSError, RayActorError, GetTimeoutError) as error:
            raise WeightsRefused(
                f"{ray.util.get_node_ip_address()} could not copy the published weights into {folder} ({error}). If it "
                "is full: more shared memory (two versions; containers: --shm-size), or seamless.weights.sync=together."
            ) from error

    def _copied(self, folder: Path) -> Manifest | None:
        told = ray.get(self.holder.newest.remote(), timeout=_ANSWER_S)
        if told is None:
            return None
        there = weight_store.decode(told)
        here = replace(there, file=str(folder / Path(there.file).name))
        if weight_store.newest(folder) != here:
            weight_store.copy(here, self._content(there))
        return here

    def _content(self, manifest: Manifest) -> Iterator[bytes]:
        if not manifest.nbytes:
            return
        asked = {"num_returns": "streaming", "_generator_backpressure_num_objects": _AHEAD}
        for chunk in self.holder.content.options(**asked).remote(manifest.file):
            yield ray.get(chunk)


def carrier_of(worker: Any, folder: Path) -> Carrier | None:
    """How weights get to other nodes that ``worker`` publishes; None: there are no others."""
    if sum(node["Alive"] for node in ray.nodes()) < 2:
        return None
    node = ray.get(worker.__ray_call__.remote(node_of))
    on_it = NodeAffinitySchedulingStrategy(node, soft=False)
    make: Any = ray.remote(Holder)
    options = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": _AT_A_TIME, "scheduling_strategy": on_it}
    return Carrier(node=node, holder=make.options(**options).remote(str(folder)))


def node_of(worker: Any) -> str:
    return _node()


def _node() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process of this node at a time; whoever is killed lets go."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
