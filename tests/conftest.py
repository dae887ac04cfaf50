"""Hypothesis: the same examples on every run, no time limits; ``--hypothesis-profile=explore`` looks for new ones."""

from hypothesis import settings

settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("same")
