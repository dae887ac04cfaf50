"""A cache of what recipes build for themselves: content-addressed, built once, also when two processes build."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def root(cache: str | None) -> Path:
    """The given folder, or ``$SEAMLESS_CACHE``, or ``~/.cache/seamless_verl``."""
    return Path(cache or os.environ.get("SEAMLESS_CACHE") or "~/.cache/seamless_verl").expanduser().absolute()


def folder(name: str, sources: Sequence[Path], cache: str | None) -> Path:
    """The folder for what these very sources build; it exists once it is complete.

    Args:
        name: prefix of the folder's name.
        sources: files whose content decides what is built; a changed file means another folder.
        cache: see `root`.
    """
    digest = hashlib.blake2b(digest_size=6)
    for source in sorted(sources):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return root(cache) / f"{name}-{digest.hexdigest()}"


def build(name: str, sources: Sequence[Path], cache: str | None, builder: Callable[[Path], None]) -> Path:
    """Call ``builder`` with an empty folder unless its result is cached; return the folder.

    The folder appears under its final name in one rename, so nobody ever sees half of it. If ``builder`` raises,
    nothing is left behind. The other arguments are those of `folder`.
    """
    final = folder(name, sources, cache)
    final.parent.mkdir(parents=True, exist_ok=True)
    with (final.parent / f".{final.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.is_dir():
            return final
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=final.parent))
        try:
            builder(temporary)
            temporary.chmod(0o755)
            temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


def main(builder: Callable[[str | None], Path]) -> int:
    """Command line of a builder: ``[--cache DIR]``."""
    parser = argparse.ArgumentParser(description=sys.modules[builder.__module__].__doc__)
    parser.add_argument("--cache", help="folder of the cache (default: $SEAMLESS_CACHE or ~/.cache/seamless_verl)")
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `build` removes what it had
    built = builder(parser.parse_args().cache)
    sys.stdout.write(f"assets: {built} ({time.monotonic() - started:.0f} s)\n")
    return 0
