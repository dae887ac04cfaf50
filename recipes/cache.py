"""A cache of what recipes build for themselves: content-addressed, built once, also when two processes build."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def root(cache: str | None) -> Path:
    """The given folder, or ``$SEAMLESS_CACHE``, or ``~/.cache/seamless_verl``."""
    return Path(cache or os.environ.get("SEAMLESS_CACHE") or "~/.cache/seamless_verl").expanduser().absolute()


def locate(name: str, sources: Sequence[Path], cache: str | None) -> Path | None:
    """The folder built by these very sources, or ``None``."""
    folder = _folder(name, sources, cache)
    return folder if folder.is_dir() else None


def build(name: str, sources: Sequence[Path], cache: str | None, builder: Callable[[Path], None]) -> Path:
    """Call ``builder`` with an empty folder unless its result is cached; return the folder.

    The folder appears under its final name in one rename, so nobody ever sees half of it.

    Args:
        name: prefix of the folder's name.
        sources: files whose content decides what is built; a changed file means another folder.
        cache: see `root`.
        builder: fills the folder; if it raises, nothing is left behind.
    """
    folder = _folder(name, sources, cache)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
        try:
            builder(temporary)
            temporary.chmod(0o755)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def main(builder: Callable[[str | None], Path]) -> int:
    """Command line of a builder: ``[--cache DIR]``."""
    parser = argparse.ArgumentParser(description=sys.modules[builder.__module__].__doc__)
    parser.add_argument("--cache", help="folder of the cache (default: $SEAMLESS_CACHE or ~/.cache/seamless_verl)")
    started = time.monotonic()
    folder = builder(parser.parse_args().cache)
    sys.stdout.write(f"assets: {folder} ({time.monotonic() - started:.0f} s)\n")
    return 0


def _folder(name: str, sources: Sequence[Path], cache: str | None) -> Path:
    digest = hashlib.blake2b(digest_size=6)
    for source in sorted(sources):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return root(cache) / f"{name}-{digest.hexdigest()}"
