"""Kernel of the control plane: which slice does what, and when it changes.

Pure code: events go in, commands come out (`scheduler.Scheduler.handle`); no clock, no I/O, no randomness. The live
edge (``seamless_verl.verl_adapter``) and the simulator run the same objects.
"""
