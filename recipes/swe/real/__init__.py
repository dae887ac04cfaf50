"""SWE-bench / SWE-Gym data and a real harness (mini-swe-agent) for runs with GPUs."""
