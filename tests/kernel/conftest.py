"""The kernel tier stays light: what it tests is pure, so nothing here may bring torch in."""

import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_torch():
    yield
    assert "torch" not in sys.modules, "a kernel or its test imported torch"
