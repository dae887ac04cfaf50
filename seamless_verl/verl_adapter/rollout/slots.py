"""Slots of the rollout servers: how many calls Ray lets an actor work on at a time.

    generate ×1,000 ─► parked while weights change ─► resume_generation ─► waits for a slot, for ever

verl 0.9.1 gives a server max(1000, max_num_seqs + 16) of them (``RolloutReplica.max_concurrency``). A call to generate
keeps its slot while it queues for the engine and while it is parked, so with more requests than slots on one replica
the call that would let them go on never runs (verl #7587, #7990).

The number here is one that nothing reaches, not one derived from batch sizes: a fleet that dies down to one replica
brings all its requests there. To Ray it is where a counter starts, it costs nothing. Concurrency groups are no way out:
Ray gives each a thread and an event loop of its own, and vLLM's client belongs to one loop.

Remove when verl's control calls cannot queue behind generate.
"""

from __future__ import annotations

from verl.workers.rollout.replica import RolloutReplica

NUM_SLOTS = 1_000_000


def raise_slots() -> None:
    """For the servers of all engines that this process starts from now on."""
    RolloutReplica.max_concurrency = property(lambda replica: NUM_SLOTS)
