"""Policies: when to lend idle training slices to rollout, and when to take them back."""
