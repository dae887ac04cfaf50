"""What a rollout worker's process started for the whole run: each part enters how it is ended, the worker ends them.

A module of its own, so that a worker without agents need not import what agents need.
"""

from contextlib import AsyncExitStack

lasting = AsyncExitStack()
