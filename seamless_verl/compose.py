"""From a command line to Hydra's: adds our groups in front of what the user wrote, and explains what Hydra refuses.

The primary configuration stays verl's own (`ppo_trainer`, or what `--config-name` says), so that any override list
which `python -m verl.trainer.main_ppo` accepts composes here to the same configuration plus ours.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from seamless_verl.errors import ConfigError, MachineError
from seamless_verl.supervisor import is_alive

_FLAGS_WITH_VALUE = frozenset(
    [
        "--config-path",
        "-cp",
        "--config-name",
        "-cn",
        "--config-dir",
        "-cd",
        "--package",
        "-p",
        "--cfg",
        "-c",
        "--info",
        "-i",
        "--experimental-rerun",
    ]
)
GROUPS = ("seamless", "platform", "recipe")


def verl_config_dir() -> Path:
    """Folder of verl's configurations, found without importing verl (which takes seconds).

    Raises:
        MachineError: verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise MachineError("verl", "is not installed", "pip install verl==0.9.1, or `make demo` for the tested CPU set")
    return Path(spec.origin).parent / "trainer" / "config"


def our_config_dir() -> Path:
    import seamless_verl.hydra_configs as package

    return Path(package.__path__[0])


def known(group: str) -> list[str]:
    """Names of our configurations in a group, e.g. the recipes."""
    return sorted(path.stem for path in (our_config_dir() / group).glob("*.yaml"))


def hydra_arguments(arguments: Sequence[str], *, platform: str, runs: Path, now: float, pid: int) -> list[str]:
    """The arguments for Hydra.

    Args:
        arguments: the user's, without the program name.
        platform: ``cpu`` or ``gpu``; used unless the user chose one.
        runs: folder under which run folders are made; used unless the user set ``hydra.run.dir``.
        now: seconds since the epoch, for the name of the run folder.
        pid: makes the name unique among runs started in the same second.
    """
    chosen = {group: _group_choice(arguments, group) for group in GROUPS}
    own_groups = any(argument.startswith(("--config-dir", "-cd", "hydra.searchpath")) for argument in arguments)
    recipes = set((chosen["recipe"] or "").split(",")) - {""}
    if recipes - set(known("recipe")) and not own_groups:
        names = known("recipe")
        near = difflib.get_close_matches(str(chosen["recipe"]), names, n=1)
        raise ConfigError(
            "+recipe",
            chosen["recipe"],
            f"is not a recipe; known: {', '.join(names)}",
            f"write +recipe={near[0] if near else 'swe'}",
        )
    name = f"{chosen['recipe'] or 'run'}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{pid}"
    ours = [f"hydra.searchpath=[file://{our_config_dir()}]"]
    if not _sets(arguments, "hydra.run.dir"):
        resumed = _folder_to_resume(arguments, chosen["recipe"], runs)
        ours.append(f"hydra.run.dir={resumed or runs / name}")
    if not _sets(arguments, "hydra.sweep.dir"):
        ours.append(f"hydra.sweep.dir={runs / name}")
    ours += ["hydra.job.chdir=false", "hydra.output_subdir=.hydra"]
    if chosen["seamless"] is None:
        ours.append("+seamless=default")
    if chosen["platform"] is None:
        ours.append(f"+platform={platform}")
    flags, overrides = _split_flags(arguments)
    return [*flags, *ours, *overrides]


def explain(error: Exception, keys: Sequence[str]) -> str:
    """A refusal of Hydra's or OmegaConf's in our words: the key, the value, the nearest key that exists."""
    text = str(error).strip()
    match = re.search(r"Could not override '([^']+)'", text)
    if match is None:
        return text
    wrong = match.group(1).lstrip("+~")
    near = difflib.get_close_matches(wrong, keys, n=1, cutoff=0.6)
    fix = f"did you mean {near[0]}?" if near else f"write +{wrong}=… if you mean to add a new key"
    return f"{wrong}: no such key. Fix: {fix}"


def _group_choice(arguments: Sequence[str], group: str) -> str | None:
    for argument in arguments:
        match = re.fullmatch(rf"\+{{0,2}}{group}=(.*)", argument)
        if match:
            return match.group(1)
    return None


def _sets(arguments: Sequence[str], key: str) -> bool:
    return any(argument.lstrip("+").startswith(f"{key}=") for argument in arguments)


def _split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's own flags (with ``--config-path`` seen from verl's trainer, as there) and the overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        if argument in _FLAGS_WITH_VALUE:
            flags += [argument, *pending[:1]]
            pending = pending[1:]
        elif argument.startswith("-"):
            flags.append(argument)
        else:
            overrides.append(argument)
    return [_absolute_config_path(flag, flags[i - 1] if i else "") for i, flag in enumerate(flags)], overrides


def _absolute_config_path(flag: str, before: str) -> str:
    prefix, _, path = flag.rpartition("=") if flag.startswith("--config-path=") else ("", "", flag)
    if not (prefix or before in ("--config-path", "-cp")) or os.path.isabs(path):
        return flag
    relative = verl_config_dir().parent / path
    if not relative.is_dir():
        return flag
    return f"{prefix}={relative}" if prefix else str(relative)


def _folder_to_resume(arguments: Sequence[str], recipe: str | None, runs: Path) -> Path | None:
    """With ``trainer.resume_mode=auto`` on the command line: the newest unfinished run of the same recipe.

    Without a recipe the value is verl's own default and means verl's own checkpoint folder.
    """
    if "trainer.resume_mode=auto" not in arguments or recipe is None or not runs.is_dir():
        return None
    candidates = sorted(runs.glob(f"{recipe}-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in candidates:
        if (folder / "summary.json").exists() or not (folder / "config.yaml").exists():
            continue
        if not run_is_alive(folder):
            return folder
    return None


def run_is_alive(folder: Path) -> bool:
    """Whether the process that owns a run folder still lives."""
    try:
        return is_alive((folder / "pid").read_text())
    except OSError:
        return False
