"""What a run shows: a line per step, files for machines, a summary at the end."""
