"""Settings of the real software-engineering runner, checked before anything starts."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError

KEY = "seamless.agent.kwargs"
IMAGE_KINDS = ("docker", "modal", "fargate", "daytona")
"""Sandboxes started from the task's image, one per attempt."""
SHARED_KINDS = ("local", "remote")
"""Machines that exist already; every attempt gets a folder of its own there and fetches the repository into it."""

MAX_COMMAND_S = 270.0
"""swe-rex 1.4's HTTP client gives a request 300 s in all. Remove when the limit can be set."""

_ENV: Mapping[str, str] = {"PAGER": "cat", "MANPAGER": "cat", "PIP_PROGRESS_BAR": "off", "TQDM_DISABLE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """Where commands run.

    Attributes:
        kind: ``docker``, ``modal``, ``fargate``, ``daytona`` (from the task's image), ``remote`` (a swe-rex server) or
            ``local`` (this machine, for tests).
        options: arguments of swe-rex's deployment configuration of that kind, e.g. ``docker_args``.
        allow_unsandboxed: has to be set for ``local``: commands a model writes then run as this user.
        env: variables of every command.
        setup_command: run in the repository before the agent and before the tests.
        repo_url: where shared machines fetch ``owner/name`` from; has ``{repo}``.
        command_timeout_s: limit of one command of the agent.
        output_limit_bytes: output kept of one command.
        start_attempts: tries to start a sandbox before the attempt is given up.
    """

    kind: str = "docker"
    options: Mapping[str, Any] = field(default_factory=dict)
    allow_unsandboxed: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    setup_command: str = ""
    repo_url: str = "https://github.com/{repo}.git"
    command_timeout_s: float = 60.0
    output_limit_bytes: int = 1_000_000
    start_attempts: int = 2

    def __post_init__(self) -> None:
        kinds = (*IMAGE_KINDS, *SHARED_KINDS)
        if self.kind not in kinds:
            near = difflib.get_close_matches(str(self.kind), kinds, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{KEY}.sandbox.kind", self.kind, "is no kind of sandbox", f"did you mean {near}?")
        if self.kind == "local" and not self.allow_unsandboxed:
            raise ConfigError(
                f"{KEY}.sandbox.kind",
                self.kind,
                "runs the model's commands on this machine without a sandbox",
                f"use docker, or set {KEY}.sandbox.allow_unsandboxed=true where that is meant",
            )
        if not 0 < self.command_timeout_s <= MAX_COMMAND_S:
            raise ConfigError(
                f"{KEY}.sandbox.command_timeout_s",
                self.command_timeout_s,
                f"must be above 0 and at most {MAX_COMMAND_S:g}",
                "write for example 60",
            )
        for name in ("output_limit_bytes", "start_attempts"):
            _positive(f"{KEY}.sandbox.{name}", getattr(self, name))
        _no_text(f"{KEY}.sandbox.options.docker_args", self.options.get("docker_args", ()))
        if "{repo}" not in self.repo_url:
            raise ConfigError(
                f"{KEY}.sandbox.repo_url", self.repo_url, "has no {repo}", "write https://HOST/{repo}.git"
            )

    @property
    def shared(self) -> bool:
        """True where attempts share a machine and bring their own copy of the repository."""
        return self.kind in SHARED_KINDS

    @property
    def command_env(self) -> dict[str, str]:
        """Variables of every command. The images of SWE-bench activate their environment in ``.bashrc``."""
        bash = {} if self.shared else {"BASH_ENV": "/root/.bashrc"}
        return {**_ENV, **bash, **self.env}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """Everything `MiniSweRunner` takes.

    Attributes:
        sandbox: where commands run.
        reward: ``all`` (1.0 when every test passed, else 0.0) or ``share`` (share of the tests that passed).
        action_format: ``toolcall`` (the model calls a ``bash`` tool) or ``text`` (one fenced block per turn).
        harness_config: mini-swe-agent configuration (name or path of a .yaml); empty: its SWE-bench one for the format.
        model_kwargs: extra fields of every model request, e.g. ``temperature``.
        step_limit: model calls of one attempt; 0 is no limit here (the session's budget still holds).
        grade_timeout_s: part of the job's deadline kept for grading.
        max_concurrent: attempts at a time in this process, where `seamless.agent.max_concurrent` allows more; others
            wait; their deadline starts when they do.
        protected_paths: patterns of files that an agent's patch may not change; such parts are dropped, and so are
            those that touch a file of the test patch or of the tests that have to pass. Yours replace these four.
        forward_env: variables of this process that the attempt's processes get, beside paths, locale and proxies.
        log_dir: keeps logs and trajectories of every attempt; ``None`` keeps none.
    """

    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    reward: str = "all"
    action_format: str = "toolcall"
    harness_config: str = ""
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    step_limit: int = 50
    grade_timeout_s: float = 600.0
    max_concurrent: int = 32
    protected_paths: tuple[str, ...] = ("conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth")
    forward_env: tuple[str, ...] = ()
    log_dir: str | None = None

    def __post_init__(self) -> None:
        _one_of(f"{KEY}.reward", self.reward, ("all", "share"))
        _one_of(f"{KEY}.action_format", self.action_format, ("toolcall", "text"))
        _positive(f"{KEY}.grade_timeout_s", self.grade_timeout_s)
        _positive(f"{KEY}.max_concurrent", self.max_concurrent)
        if self.step_limit < 0:
            raise ConfigError(f"{KEY}.step_limit", self.step_limit, "is negative", "write 0 for no limit")

    @property
    def config_name(self) -> str:
        """The harness configuration in use."""
        if self.harness_config:
            return self.harness_config
        return "swebench.yaml" if self.action_format == "toolcall" else "swebench_backticks.yaml"

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> RunnerSettings:
        """Build from plain data (``seamless.agent.kwargs``).

        Raises:
            ConfigError: an unknown key (names the nearest) or an impossible value.
        """
        values = _known(cls, options, KEY)
        if isinstance(values.get("sandbox"), Mapping):
            values["sandbox"] = SandboxSettings(**_known(SandboxSettings, values["sandbox"], f"{KEY}.sandbox"))
        for name in ("protected_paths", "forward_env"):
            if name in values:
                _no_text(f"{KEY}.{name}", values[name])
                values[name] = tuple(values[name])
        # The process that reads it works in a folder of its own.
        if Path(str(values.get("harness_config") or "")).is_file():
            values["harness_config"] = str(Path(values["harness_config"]).absolute())
        return cls(**values)


def _known(cls: type[Any], options: Mapping[str, Any], path: str) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(cls)]
    for key, value in options.items():
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{path}.{key}", value, "is not a known key", f"did you mean {path}.{near}?")
    return dict(options)


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(key, value, "is not a choice", f"write one of {', '.join(allowed)}")


def _no_text(key: str, value: object) -> None:
    if isinstance(value, str):
        raise ConfigError(key, value, "is one text, and each of its letters would count", f"write [{value}]")


def _positive(key: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ConfigError(key, value, "must be a number above 0", "write a number above 0")
