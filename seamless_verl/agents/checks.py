"""Refuses an agent runner that could not be built, in the user's process and without building it.

Rollout workers build theirs when all replicas have been loaded; whatever can be known before that is asked here, of the
signature of the runner's class and of the checks that it may define (`seamless_verl.agents.contract.AgentRunner`).
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from seamless_verl.config import AgentConfig
from seamless_verl.errors import ConfigError, meant

_RUNNER, _KWARGS = "seamless.agent.runner", "seamless.agent.kwargs"


def check_runner(agent: AgentConfig, *, here: bool) -> Any:
    """The class that ``agent.runner`` names, when nothing speaks against calling it with ``agent.kwargs``.

    Args:
        agent: with a runner.
        here: attempts will run on this machine, so that what it lacks matters.

    Raises:
        ConfigError: it cannot be imported or called, or does not take these arguments.
        SeamlessError: what its own checks find.
    """
    module, _, name = str(agent.runner).rpartition(".")
    try:
        runner = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            _RUNNER,
            agent.runner,
            f"cannot be imported ({error})",
            "give the full name of an AgentRunner class, for example "
            "seamless_verl.recipes.swe.tiny.runner.TinySweRunner",
        ) from error
    _check_signature(runner, agent)
    if (check_options := getattr(runner, "check_options", None)) is not None:
        check_options(agent.kwargs)
    if here and (check_machine := getattr(runner, "check_machine", None)) is not None:
        check_machine(agent.kwargs)
    return runner


def _check_signature(runner: Any, agent: AgentConfig) -> None:
    try:
        parameters = inspect.signature(runner).parameters.values()
    except ValueError:  # a class written in C may have none
        return
    except TypeError as error:
        raise ConfigError(_RUNNER, agent.runner, "cannot be called", "name an AgentRunner class") from error
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = (
        [] if any(p.kind is p.VAR_KEYWORD for p in parameters) else [key for key in agent.kwargs if key not in named]
    )
    for key in unknown:
        fix = meant(key, named) if named else f"leave {_KWARGS} empty"
        raise ConfigError(f"{_KWARGS}.{key}", agent.kwargs[key], f"is no argument of {agent.runner}", fix)
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in agent.kwargs:
            raise ConfigError(f"{_KWARGS}.{name}", None, f"is not set, and {agent.runner} needs it", "set it")
