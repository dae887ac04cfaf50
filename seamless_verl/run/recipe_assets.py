"""Model and data that a recipe builds: found, or built once, and checked with whatever else the keys name."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from seamless_verl.agents.ties import die_with_parent
from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.places import error_in_words, places_of
from seamless_verl.run.check_references import check_files

_KEY = "seamless.assets.module"


def find_or_build(config: DictConfig, seamless: SeamlessConfig) -> list[str]:
    """Check what the configuration names; a recipe's model and data are built where they are missing.

    Returns:
        Warnings.

    Raises:
        ConfigError: something is missing or malformed, or could not be built.
        SeamlessError: what a runner's own checks find.
    """
    pending = None
    if seamless.assets.module is not None and seamless.assets.dir is None:
        folder = _folder(seamless.assets.module, seamless.assets.cache)
        config.seamless.assets.dir = str(folder)
        pending = None if folder.is_dir() else folder
    warnings = check_files(plain(config), seamless, pending)
    if pending is not None:
        _build(str(seamless.assets.module), seamless.assets.cache, pending)
        warnings = check_files(plain(config), seamless)
    return warnings


def _folder(module: str, cache: str | None) -> Path:
    """Where a module builds, or has built."""
    try:
        folder: Path = importlib.import_module(module).folder(cache)
    except Exception as error:
        lines = f" ({' | '.join(places_of(error, only_own=True))})".replace(" ()", "")
        fix = f"mend it, or start the command in the folder that holds {module.partition('.')[0]}"
        raise ConfigError(_KEY, module, f"raises {error_in_words(error)}{lines}", fix) from error
    return folder


def _build(module: str, cache: str | None, folder: Path) -> None:
    """In a process of its own, which says how far it is, and ends with this one."""
    sys.stdout.write("model and data of this recipe are not built yet; building them once:\n")
    sys.stdout.flush()
    command = [sys.executable, "-m", module, *(["--cache", cache] if cache else [])]
    # Threads that spin while they wait would starve whatever else runs on a small machine.
    with tempfile.TemporaryDirectory(prefix="sv-build-") as temporary:
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "TMPDIR": temporary}
        tie = partial(die_with_parent, os.getpid(), signal.SIGTERM)  # else it keeps the lock of the cache
        code = subprocess.call(command, env=environment, preexec_fn=tie)
    if code or not folder.is_dir():
        raise ConfigError(_KEY, module, f"building ended with exit code {code}", "see above")


def plain(config: DictConfig) -> dict[str, Any]:
    """Its values, interpolations resolved."""
    return dict(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]
