"""Arithmetic recipe: verl's own `single_turn_agent` under our trainer, no agent process and no proxy."""
