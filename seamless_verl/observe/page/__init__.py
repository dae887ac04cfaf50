"""The report of a run: one HTML file that needs nothing else, neither a network nor the run folder."""
