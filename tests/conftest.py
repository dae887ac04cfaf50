"""What every tier needs.

Hypothesis: the same examples on every run, no time limits; ``--hypothesis-profile=explore`` looks for new ones.
"""

import fcntl
import logging
import os
from collections.abc import Iterator

import pytest
from _pytest.logging import LogCaptureHandler
from hypothesis import settings

settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("same")

_LEVEL = logging.getLogger().level  # before anything was imported that sets it


@pytest.fixture
def alone_in_shared_memory() -> Iterator[None]:
    """One test at a time makes segments and sweeps: a sweep takes all young ones of its user that nobody maps."""
    folder = os.open("/dev/shm", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    yield
    os.close(folder)


@pytest.fixture(autouse=True)
def _root_logger_as_it_was() -> Iterator[None]:
    """Hydra, vLLM, verl and what they import set up the root logger when a test runs them in this process.

    Their handlers write to streams that pytest closes after the test. And importing a dependency of vLLM
    (``model_hosting_container_standards``) gives the root logger and every handler that is there, also pytest's own,
    a level of ERROR; where a fixture of a whole module imports it, that is before this one runs.
    """
    root = logging.getLogger()
    root.setLevel(_LEVEL)
    for own in root.handlers:
        if isinstance(own, LogCaptureHandler):
            own.setLevel(logging.NOTSET)
    before = [(each, each.level, each.formatter) for each in root.handlers]
    yield
    root.setLevel(_LEVEL)
    for handler, its_level, formatter in before:
        handler.setLevel(its_level)
        handler.setFormatter(formatter)
    for handler in set(root.handlers) - {each for each, _, _ in before}:
        root.removeHandler(handler)
        handler.close()
