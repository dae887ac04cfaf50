"""SeamlessFlow for verl: agents behind a trajectory proxy, tokens trained bit for bit, GPUs that never idle.

This module imports nothing heavy: it is loaded in every process of a run (verl plug-in, vLLM plug-in, agents).
"""

__version__ = "0.1.0"
