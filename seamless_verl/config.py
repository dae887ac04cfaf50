"""The ``seamless`` section of the configuration as frozen, validated dataclasses. No torch, no verl, no Hydra.

An unknown key is refused with the nearest known one; a value that cannot work is refused with its key, the value and
what to write instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from seamless_verl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessConfig:
    """How old the weights may be that a trained trajectory started with.

    Attributes:
        eta: bound in weight versions (training steps). 0 is synchronous, 1 the one-step lag of SeamlessFlow. Larger
            bounds need the order of consumption that the streaming dataloader will bring; until then they are refused.
    """

    eta: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.eta, bool) or not isinstance(self.eta, int) or self.eta < 0:
            raise ConfigError("seamless.staleness.eta", self.eta, "must be an integer >= 0", "write 1 (one-step lag)")
        if self.eta > 1:
            raise ConfigError(
                "seamless.staleness.eta", self.eta, "bounds above 1 are not guaranteed yet", "write 0 or 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """The agents that rows named ``agent_name: seamless_agent`` are rolled out with.

    Attributes:
        runner: fully qualified name of an `AgentRunner`; ``None`` when no row needs one.
        kwargs: arguments of the runner.
        deadline_s: seconds one attempt may take, test runs included.
        max_turns: model calls one attempt may make.
        max_tokens_per_turn: tokens one model call may generate.
    """

    runner: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float = 600.0
    max_turns: int = 64
    max_tokens_per_turn: int | None = None

    def __post_init__(self) -> None:
        _positive("seamless.agent.deadline_s", self.deadline_s, "600")
        _positive("seamless.agent.max_turns", self.max_turns, "64")
        if self.max_tokens_per_turn is not None:
            _positive("seamless.agent.max_tokens_per_turn", self.max_tokens_per_turn, "1024")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """The trajectory proxy that agents talk to.

    Attributes:
        host: address to bind to; agents on other machines need one that they can reach.
        port: 0 lets the system choose. With several rollout workers on a machine it must be 0.
        tool_parser, reasoning_parser: names as of ``vllm serve --tool-call-parser`` and ``--reasoning-parser``;
            ``None``: Hermes-style tool calls, and no reasoning told from content.
    """

    host: str = "127.0.0.1"
    port: int = 0
    tool_parser: str | None = None
    reasoning_parser: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port < 65536:
            raise ConfigError("seamless.proxy.port", self.port, "is not a TCP port", "write 0 to let the system choose")


@dataclass(frozen=True, slots=True, kw_only=True)
class AssetsConfig:
    """A model and data that a recipe builds by itself, once, and caches.

    Attributes:
        module: module with ``folder(cache) -> Path`` and a command line that builds it; ``None``: nothing to build.
        cache: folder of the cache; ``None`` means ``$SEAMLESS_CACHE`` or ``~/.cache/seamless_verl``.
        dir: filled in when the assets exist; recipes refer to it as ``${seamless.assets.dir}``.
    """

    module: str | None = None
    cache: str | None = None
    dir: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeamlessConfig:
    """Everything under ``seamless:``.

    Attributes:
        recipe: name of the recipe, for messages and folder names.
        run_dir: folder of this run; ``None`` (verl's own entry point) writes no run folder.
        notes: lines printed beside the results at the end, e.g. what a recipe's figures mean.
    """

    recipe: str | None = None
    run_dir: str | None = None
    notes: tuple[str, ...] = ()
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    assets: AssetsConfig = field(default_factory=AssetsConfig)

    @classmethod
    def from_mapping(cls, section: Mapping[str, Any] | None) -> SeamlessConfig:
        """Build from the plain mapping that the ``seamless`` section resolves to.

        Raises:
            ConfigError: an unknown key, a wrong type or an impossible value.
        """
        return typing.cast(SeamlessConfig, _build(cls, section or {}, "seamless"))


def _positive(key: str, value: float, example: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ConfigError(key, value, "must be a number above 0", f"write for example {example}")


def _build(cls: type, section: Mapping[str, Any], path: str) -> Any:
    if not isinstance(section, Mapping):
        raise ConfigError(path, section, "must be a section with keys", f"write {path}.KEY=VALUE")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in section.items():
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{path}.{key}", value, "is not a known key", f"did you mean {path}.{near}?")
        nested = dataclasses.is_dataclass(hints[key])
        values[key] = _build(hints[key], {} if value is None else value, f"{path}.{key}") if nested else value
    if isinstance(values.get("notes"), list):
        values["notes"] = tuple(values["notes"])
    return cls(**values)
