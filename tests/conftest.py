"""What every tier needs.

Hypothesis: the same examples on every run, no time limits; ``--hypothesis-profile=explore`` looks for new ones.
"""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("same")


@pytest.fixture(autouse=True)
def _root_logger_as_it_was() -> Iterator[None]:
    """Hydra, vLLM and verl set up the root logger when a test runs them in this process; their handlers write to
    streams that pytest closes after the test, and the next test's records went there instead of to ``caplog``."""
    root = logging.getLogger()
    level, handlers = root.level, set(root.handlers)
    yield
    root.setLevel(level)
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)
        handler.close()
