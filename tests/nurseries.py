"""A nursery for tests: processes that find what they import imported already (`seamless_verl.nursery`)."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seamless_verl import nursery

_STANDIN = Path(nursery.__path__[0]) / "standin.py"


def standin_in(home: Path) -> Path:
    """The path of what stands in for the interpreter, with or without a nursery behind it."""
    executable = home / "python"
    words = [sys.executable, "-I", "-S", str(_STANDIN), str(home / "nursery"), sys.executable]
    executable.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    executable.chmod(0o755)
    return executable


@contextmanager
def nursery_of(home: Path, *imported: str, **settings: Any) -> Iterator[Path]:
    """Within, a nursery with these modules stands behind the stand-in, whose path this is."""
    executable = standin_in(home)
    command = [sys.executable, "-m", "seamless_verl.nursery.nursery_server", str(home / "nursery"), *imported]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **settings) as server:
        assert server.stderr is not None
        try:
            assert any(line.startswith("nursery: ready") for line in server.stderr)
            yield executable
        finally:
            server.kill()
