"""Agents: how a run starts them and what they report. An agent itself knows a base URL and an API key, nothing else."""
