"""Who builds a recipe's model and data ends with the command that wanted them, and leaves no half of it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from tests.standalone import ROOT

BUILDER = """
import os, signal, sys
from pathlib import Path
from seamless_verl.recipes import cache as assets

def folder(cache=None):
    return assets.folder("slow", [Path(__file__)], cache)

def build(cache=None):
    return assets.build("slow", [Path(__file__)], cache, begin)

def begin(folder):
    (folder / "half").touch()
    print("builder", os.getpid(), flush=True)
    signal.pause()

if __name__ == "__main__":
    sys.exit(assets.main(build))
"""


def test_a_builder_ends_with_its_killed_command_and_removes_what_it_had(tmp_path: Path) -> None:
    (tmp_path / "slow_assets.py").write_text(BUILDER)
    cache = tmp_path / "cache"
    keys = ["+recipe=arithmetic", "seamless.assets.module=slow_assets", f"seamless.assets.cache={cache}"]
    command = subprocess.Popen(
        [sys.executable, "-m", "seamless_verl.main", *keys, f"hydra.run.dir={tmp_path / 'run'}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert command.stdout is not None
    builder = next(int(line.split()[1]) for line in command.stdout if line.startswith("builder "))
    assert list(cache.glob(".slow-*/half"))
    command.kill()
    command.wait()
    ended, _, _ = select.select([command.stdout], [], [], 60)  # both held it
    if not ended:
        os.kill(builder, signal.SIGKILL)
    command.stdout.close()
    assert ended
    assert not list(cache.glob(".slow-*/"))
