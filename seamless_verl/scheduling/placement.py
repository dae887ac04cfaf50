"""Which node each group of GPUs goes to, decided for all of them before any is asked for.

Ray decides group by group, in the order in which it is asked: replicas that come first may be spread over the very
nodes that the trainer needs whole, and it then waits for ever. Here the largest come first, each where it leaves least
over. That is not a search: of unequal groups on nearly full nodes it may miss a way that exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoom:
    """What a node has, all of it or what is free.

    Attributes:
        id: Ray's.
        address: for people.
        gpus, cpus: in Ray's units.
        kinds: accelerator types.
    """

    id: str
    address: str
    gpus: float
    cpus: float
    kinds: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedGpus:
    """GPUs that are asked for together.

    Attributes:
        name: for people.
        groups: sizes of the placement groups, in order; each lies on one node.
        per_node: GPUs that the user wants on each node. Consecutive groups fill a node up to it, and the next node is
            another one, as far as that can be had.
        cpus_per_gpu: that verl asks for with each GPU.
        kind: accelerator type that a node must have; None: any.
    """

    name: str
    groups: tuple[int, ...]
    per_node: int
    cpus_per_gpu: int
    kind: str | None = None


def plan(rooms: Sequence[NodeRoom], asked: Sequence[GroupedGpus]) -> tuple[tuple[str, ...], ...] | None:
    """The node of every group of every entry of ``asked``; None: no way was found.

    Tried in this order: blocks of ``per_node`` GPUs on nodes of their own, blocks wherever they fit, groups wherever
    they fit.
    """
    for apart, in_blocks in ((True, True), (False, True), (False, False)):
        placed = _placed(rooms, asked, apart=apart, in_blocks=in_blocks)
        if placed is not None:
            return placed
    return None


def story(rooms: Sequence[NodeRoom], asked: Sequence[GroupedGpus], has: str = "free") -> str:
    """What was asked for and what each node has, ``free`` or in all, for people."""
    wanted = "; ".join(
        f"{entry.name}: {_counted(entry.groups)} GPUs on one node each, {entry.cpus_per_gpu} CPUs per GPU"
        + (f", {entry.kind}" if entry.kind else "")
        for entry in asked
    )
    nodes = "; ".join(f"{room.address} {room.gpus:g} GPUs, {room.cpus:g} CPUs" for room in rooms)
    return f"asked for {wanted}. Nodes have {has}: {nodes or 'there are none'}"


def _counted(sizes: Sequence[int]) -> str:
    return " and ".join(f"{sizes.count(size)} x {size}" for size in sorted(set(sizes), reverse=True))


def _placed(
    rooms: Sequence[NodeRoom], asked: Sequence[GroupedGpus], *, apart: bool, in_blocks: bool
) -> tuple[tuple[str, ...], ...] | None:
    gpus = {room.id: room.gpus for room in rooms}
    cpus = {room.id: room.cpus for room in rooms}
    nodes: list[list[str]] = [[""] * len(entry.groups) for entry in asked]
    blocks = [(number, block) for number, entry in enumerate(asked) for block in _blocks(entry, in_blocks)]
    for number, block in sorted(blocks, key=lambda item: -_size(asked[item[0]], item[1])):  # the first of equals first
        entry = asked[number]
        size = _size(entry, block)
        fitting = [
            room.id
            for room in rooms
            if gpus[room.id] >= size
            and cpus[room.id] >= size * entry.cpus_per_gpu
            and (entry.kind is None or entry.kind in room.kinds)
            and not (apart and room.id in nodes[number])
        ]
        if not fitting:
            return None
        node = min(fitting, key=lambda node: gpus[node])
        gpus[node] -= size
        cpus[node] -= size * entry.cpus_per_gpu
        for group in block:
            nodes[number][group] = node
    return tuple(tuple(entry) for entry in nodes)


def _blocks(entry: GroupedGpus, in_blocks: bool) -> list[list[int]]:
    """Numbers of the groups that go to one node together."""
    blocks: list[list[int]] = []
    room = 0
    for number, size in enumerate(entry.groups):
        if not in_blocks or not blocks or size > room:
            blocks.append([])
            room = entry.per_node
        blocks[-1].append(number)
        room -= size
    return blocks


def _size(entry: GroupedGpus, block: Sequence[int]) -> int:
    return sum(entry.groups[number] for number in block)
