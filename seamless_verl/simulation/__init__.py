"""What a cluster would do, on virtual time: the kernels of the live system in front of modelled hardware.

    scenario ─► workload ─► fleet (replicas) ─► groups ─► trainer loop ─► books of every slice
                                ▲                 │            │
                                └── commands ── scheduling ◄───┘ events        staleness admits, routing places

The scheduler, the staleness protocol and the router are the objects that the live run uses; only what they command is
modelled: decoding, prefill, training, weight transfer, switches, failures. Deterministic for a seed.
"""
