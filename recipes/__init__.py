"""Recipes: what to train on, with which agent, at which scale."""
