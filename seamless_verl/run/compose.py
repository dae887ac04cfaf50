"""From a command line to Hydra's: adds our groups in front of what the user wrote, and explains what Hydra refuses.

The primary configuration stays verl's own (`ppo_trainer`, or what `--config-name` says), so that any override list
which `python -m verl.trainer.main_ppo` accepts composes here to the same configuration plus ours.
"""

from __future__ import annotations

import difflib
import importlib.resources
import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from seamless_verl.config import TRAINER_MODE
from seamless_verl.errors import ConfigError, MachineError
from seamless_verl.machine import identity, is_alive

_WITH_VALUE = re.compile("--(config-(path|name|dir)|package|cfg|info|experimental-rerun)|-(c[pnd]?|p|i)")
# What Hydra may be asked to do instead of one run; it takes one of them at a time.
_MODES = {"-r": "--run", "-m": "--multirun", "-c": "--cfg", "-i": "--info", "-sc": "--shell-completion"}
GROUPS = ("seamless", "platform", "recipe")
_WRITTEN = tuple(f"trainer.{name}_dir" for name in ("default_local", "rollout_data", "validation_data"))
_READ = (
    "trainer.resume_from_path",
    *(f"{p}.model.{n}path" for p in ("actor_rollout_ref", "critic") for n in ("", "tokenizer_", "hf_config_")),
    "actor_rollout_ref.model.lora_adapter_path",
    *(f"actor_rollout_ref.rollout.multi_turn.{name}_path" for name in ("tool_config", "function_tool")),
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
    *(f"reward.{name}" for name in ("custom_reward_function.path", "reward_manager.module.path")),
    "reward.reward_model.model_path",
    *("custom_reward_function.path", "reward_model.model.path"),  # of an older verl, compared with the newer ones again
    "data.custom_cls.path",
)
_QUIET_S = 300.0  # without a sign of life, after which the run on another machine is taken for dead
_LOOK_S = 1.0


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


_PROVIDER = "seamless_verl"
# verl's configuration has a mode of its own; the rest is filled in, and would come along from a run's ``config.yaml``.
_BEHIND = {
    "trainer": {"v1": {"trainer_mode": TRAINER_MODE}},
    "seamless": {"run_dir": "${hydra:runtime.output_dir}", "assets": {"dir": None}},
}


class OurConfigurations(SearchPathPlugin):
    """Puts our folder behind that of the primary configuration.

    A plugin and not ``hydra.searchpath``, of which Hydra reads one only: that of the command line, or else that of the
    primary configuration. Both are the user's. Folders named there or in ``--config-dir`` come after ours
    (`check_hidden`).
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(_PROVIDER, f"file://{our_config_dir()}")


def register_ours() -> None:
    """Make Hydra find our configurations, and our help text what it lists, in this process.

    Our section is composed with Hydra's own, in front of the primary configuration, so that one of the user's has the
    last word on it; what ``+GROUP=NAME`` names comes behind that. `_BEHIND` is what must.
    """
    Plugins.instance().register(OurConfigurations)
    section = OmegaConf.load(our_config_dir() / "seamless" / "default.yaml")
    ConfigStore.instance().store("seamless", section, group="hydra/env", package="_global_")
    ConfigStore.instance().store("seamless", _BEHIND, group="trainer_mode", package="_global_")
    OmegaConf.register_new_resolver("seamless_known", lambda group: " | ".join(known(group)), replace=True)


def check_hidden(choices: Mapping[str, str | None], sources: Sequence[tuple[str, str, str]]) -> None:
    """Refuse a chosen configuration of ours that hides one of the user's.

    Args:
        choices: Hydra's; the name chosen in each group.
        sources: provider, scheme and folder or package of each place where Hydra looks, in its order.

    Raises:
        ConfigError: a folder behind ours has a configuration of that name.
    """
    providers = [provider for provider, _, _ in sources]
    for _, scheme, folder in sources[providers.index(_PROVIDER) + 1 :]:
        place = None
        with suppress(ImportError, TypeError, ValueError):  # a package that Hydra has not found either
            place = importlib.resources.files(folder) if scheme == "pkg" else Path(folder)
        for group in GROUPS:
            name = choices.get(group)
            if place and name in known(group) and (place / group / f"{name}.yaml").is_file():
                problem = f"is a configuration of ours, which hides that in {folder}"
                raise ConfigError(f"+{group}", name, problem, "give yours another name")


def check_packages(config: DictConfig, choices: Mapping[str, str | None]) -> None:
    """Refuse a configuration of the user's whose keys Hydra has put below its group's name, where nobody reads them.

    Args:
        config: composed.
        choices: the name chosen in each group.

    Raises:
        ConfigError: a file without its first line.
    """
    for group, section in (("recipe", "recipe"), ("platform", "platform"), ("seamless", "seamless.seamless")):
        if choices.get(group) and OmegaConf.select(config, section) is not None:
            problem = f"its keys stand under {section}.* and nobody reads them"
            raise ConfigError(f"+{group}", choices[group], problem, "begin its file with '# @package _global_'")


def hydra_arguments(arguments: Sequence[str], *, platform: str, runs: Path, now: float, pid: int) -> list[str]:
    """The arguments for Hydra.

    Args:
        arguments: the user's, without the program name.
        platform: ``cpu`` or ``gpu``; used unless the user chose one.
        runs: folder under which run folders are made; used unless the user set ``hydra.run.dir``.
        now: seconds since the epoch, for the name of the run folder.
        pid: makes the name unique among runs started in the same second.

    Raises:
        ConfigError: flags that exclude each other.
    """
    flags, overrides = _split_flags(arguments)
    _check_flags(flags)
    chosen = {group: _group_choice(arguments, group) for group in GROUPS}
    # A sweep's choice holds commas, which in `hydra.run.dir` would be a sweep over folders.
    recipe = re.sub(r"[^\w.]+", "-", chosen["recipe"] or "run").strip("-")
    name = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{pid}"
    ours = []
    if not _sets(arguments, "hydra.run.dir"):
        resumed = _folder_to_resume(arguments, recipe if chosen["recipe"] else None, runs)
        ours.append(f"hydra.run.dir={quoted(resumed or runs / name)}")
    if not _sets(arguments, "hydra.sweep.dir"):
        ours.append(f"hydra.sweep.dir={quoted(runs / name)}")
    ours += ["hydra.job.chdir=false", "hydra.output_subdir=.hydra"]
    ours += ["hydra/env=seamless", "+trainer_mode=seamless"]  # `register_ours`
    if chosen["platform"] is None:
        ours.append(f"+platform={platform}")
    return [*flags, *ours, *overrides]


def explain(error: Exception, keys: Sequence[str]) -> str:
    """A refusal of Hydra's or OmegaConf's in our words: the key, the value, the nearest key that exists.

    Args:
        error: what Hydra or OmegaConf raised.
        keys: dotted keys of values, without those of sections, which would be near to whatever is typed below them.
    """
    if isinstance(error, MissingConfigException):
        return _explain_missing(error)
    text = str(error).strip()
    if (match := re.search(r"Could not override '([^']+)'", text)) is None:
        return text
    wrong = match.group(1).lstrip("+~")
    if wrong in keys:
        given = text.partition("use +")[2] or f"{wrong}=VALUE"
        return f"{given}: has keys that {wrong} does not have. Fix: write ++{given} to add them."
    near = difflib.get_close_matches(wrong, keys, n=1, cutoff=0.75)  # below, what they share is mostly the section
    meant = f"did you mean {near[0]}? " if near else ""
    return f"{wrong}: no such key. Fix: {meant}+{wrong}=VALUE adds a key that the configuration does not have."


def _explain_missing(error: MissingConfigException) -> str:
    """Say in one line which configuration was not found; Hydra takes a line per option and folder."""
    group, _, name = str(error.missing_cfg_file or "").rpartition("/")
    options = list(error.options or [])
    if group in GROUPS and options:
        near = (difflib.get_close_matches(name, options, n=1) or options)[0]
        own = next(Path().glob(f"*/{group}/{name}.yaml"), None)  # as `seamless-verl new` makes it
        fix = f"--config-dir {own.parts[0]}" if own else f"+{group}={near}"
        problem = f"is not a configuration of this group; known: {', '.join(options)}"
        return str(ConfigError(f"+{group}", name, problem, f"write {fix}"))
    text, _, folders = str(error).partition("\nConfig search path:")
    text = " ".join(text.split())
    looked_in = re.findall(r"path=(\S+)", folders)
    return f"{text} Looked in: {', '.join(looked_in)}" if looked_in and not options else text


def folder_refused(arguments: Sequence[str], error: OSError) -> ConfigError:
    """Why Hydra could not make the folder of a run or a sweep.

    Args:
        arguments: Hydra's, which name both folders (`hydra_arguments`).
        error: what the system answered.
    """
    key = "hydra.sweep.dir" if {"-m", "--multirun"} & set(arguments) else "hydra.run.dir"
    folder = [argument.partition("=")[2] for argument in arguments if argument.lstrip("+").startswith(f"{key}=")][-1]
    return ConfigError(key, folder, f"cannot be made a folder ({error})", "name one that you may write to")


def known_keys() -> list[str]:
    """Dotted keys of the values in the plain configuration, to suggest the nearest one for a typo."""
    with hydra.initialize_config_dir(str(verl_config_dir()), version_base=None):
        config = hydra.compose("ppo_trainer", overrides=["+seamless=default"])
    return list(_flatten(OmegaConf.to_container(config, resolve=False), ""))  # type: ignore[arg-type]


def _flatten(section: Mapping[str, Any], prefix: str) -> list[str]:
    keys: list[str] = []
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            keys += _flatten(value, f"{prefix}{key}.")
        else:
            keys.append(prefix + str(key))
    return keys


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
        if _WITH_VALUE.fullmatch(argument):
            flags += [argument, *pending[:1]]
            pending = pending[1:]
        elif argument.startswith("-"):
            flags.append(argument)
        else:
            overrides.append(argument)
    return [_absolute_config_path(flag, flags[i - 1] if i else "") for i, flag in enumerate(flags)], overrides


def _check_flags(flags: Sequence[str]) -> None:
    """Refuse what Hydra refuses with a traceback."""
    names = [_MODES.get(name := flag.partition("=")[0], name) for flag in flags]
    modes = list(dict.fromkeys(name for name in names if name in _MODES.values()))
    if len(modes) > 1:
        problem = "exclude each other"
        raise ConfigError("flags", " ".join(modes), problem, f"give one of them; {modes[0]} alone, for example")
    if "--resolve" in names and not {"--cfg", "--help", "-h"} & set(names):
        raise ConfigError("flags", "--resolve", "says how to print a configuration", "add --cfg job")


def _absolute_config_path(flag: str, before: str) -> str:
    prefix, _, path = flag.rpartition("=") if flag.startswith("--config-path=") else ("", "", flag)
    if not (prefix or before in ("--config-path", "-cp")) or os.path.isabs(path):
        return flag
    relative = verl_config_dir().parent / path
    if not relative.is_dir():
        return flag
    return f"{prefix}={relative}" if prefix else str(relative)


def make_absolute(config: DictConfig) -> None:
    """Relative paths become those that the user means, from the folder of the command.

    Actors on a Ray cluster that was there before would open them from the folder of its ``ray start``.
    """
    for key in (*_WRITTEN, *_READ):
        path = OmegaConf.select(config, key)
        if path and "://" not in path and (key in _WRITTEN or Path(path).exists()):  # else a model of the hub
            OmegaConf.update(config, key, os.path.abspath(path))


def check_launcher(choices: Mapping[str, Any]) -> None:
    """Refuse launchers that run a sweep's points in processes of their own, whose exit codes nobody here would see.

    Raises:
        HydraException: Hydra brings it back from such a process, other than errors of ours.
    """
    if (launcher := choices.get("hydra/launcher")) not in (None, "basic"):
        problem = "would run points side by side, in processes that the command knows nothing of"
        raise HydraException(str(ConfigError("hydra/launcher", launcher, problem, "leave it out")))


def quoted(value: object) -> str:
    """As a value of Hydra's grammar, which knows few characters outside quotes."""
    text = str(value)
    if re.fullmatch(r"[\w/.+-]+", text, re.ASCII):
        return text
    return "'" + text.replace("'", "\\'") + "'"


def _folder_to_resume(arguments: Sequence[str], recipe: str | None, runs: Path) -> Path | None:
    """With ``trainer.resume_mode=auto`` on the command line: the newest unfinished run of the same recipe.

    Without a recipe the value is verl's own default and means verl's own checkpoint folder. A run that may still go on
    on another machine is not passed over: an older one is not what was asked for, and `claimed` waits for it.
    """
    if "trainer.resume_mode=auto" not in arguments or recipe is None or not runs.is_dir():
        return None
    started = re.compile(re.escape(recipe) + r"(-\d+){3}")  # `my-*` would also be the runs of a recipe `my-task`
    candidates = [folder for folder in runs.iterdir() if started.fullmatch(folder.name)]
    for folder in sorted(candidates, key=lambda path: path.stat().st_mtime, reverse=True):
        if (folder / "summary.json").exists() or not (folder / "config.yaml").exists():
            continue
        if not run_is_alive(folder) or is_alive((folder / "pid").read_text()) is None:
            return folder
    return None


@contextmanager
def claimed(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """A run folder is this process's, from the checks of its run to the end of its last life.

    Where it was another machine's or container's, that one may be gone: it is given time to give a sign of life.

    Raises:
        ConfigError: the run whose folder it is goes on.
    """
    pid = folder / "pid"
    fix = f"choose another folder; where its machine is gone, remove {pid}"
    refusal = ConfigError("hydra.run.dir", folder, "belongs to a run that is still going", fix)
    sign = None
    while run_is_alive(folder):
        try:
            owner, before, sign = pid.read_text(), sign, pid.stat().st_mtime
        except FileNotFoundError:  # it has just ended
            break
        if is_alive(owner) is not None or before not in (None, sign):
            raise refusal
        if before is None:
            host, ago = owner.rpartition(" ")[2], max(0.0, time.time() - sign)
            say(f"{folder} is of a run on {host}, heard of {ago:.0f} s ago; waiting for {_QUIET_S:.0f} s of silence")
        time.sleep(_LOOK_S)
    pid.unlink(missing_ok=True)  # a dead run's
    mine = identity(os.getpid())
    try:
        file = pid.open("x")
    except FileExistsError:
        raise refusal from None
    try:
        with file:
            file.write(mine)
        yield
    finally:
        with suppress(OSError):
            if pid.read_text() in (mine, ""):  # not of one that heard nothing of us for so long; "": the disk was full
                pid.unlink()


def run_is_alive(folder: Path) -> bool:
    """Whether the process that owns a run folder lives; one that is not seen from here touches its file meanwhile."""
    pid = folder / "pid"
    try:
        alive = is_alive(pid.read_text())
        return time.time() < _QUIET_S + pid.stat().st_mtime if alive is None else alive
    except (OSError, ValueError):
        return False
