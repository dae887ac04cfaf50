"""Kernel of the curriculum (SRPO, arXiv 2504.14286): which prompts are still worth their rollouts, and in which order.

Pure code: no clock, no I/O; randomness comes in as a seed and is part of the state.
"""
