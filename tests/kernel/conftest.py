"""The kernel tier stays light: what it tests is pure, so nothing here may bring torch in."""

import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_torch(request):
    yield
    here = Path(__file__).parent
    if all(here in item.path.parents for item in request.session.items):  # other tiers in this process may need it
        assert "torch" not in sys.modules, "a kernel or its test imported torch"
