"""Kernel of bounded staleness (StaleFlow, arXiv 2601.12784): which prompts may start, which groups a step trains.

Pure code: no clock, no I/O, no randomness. The same objects run under verl's trainer and in the simulator.
"""
