"""Checks of single values, and dataclasses built from plain mappings. A refusal names key, value and what to write."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from typing import Any

from seamless_verl.errors import ConfigError

T = typing.TypeVar("T")


def build(cls: type[T], section: Mapping[str, Any] | None, path: str) -> T:
    """A dataclass from a section; ``path`` is its dotted key.

    Raises:
        ConfigError: a key is unknown or missing, or what it holds is of another shape.
    """
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in _section(section, path).items():
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{path}.{key}", value, "is not a known key", f"did you mean {path}.{near}?")
        values[key] = _value(hints[key], value, f"{path}.{key}")
    missing = [field.name for field in dataclasses.fields(cls) if _is_required(field) and field.name not in values]  # type: ignore[arg-type]
    if missing:
        raise ConfigError(f"{path}.{missing[0]}", "(nothing)", "is missing", f"write {path}.{missing[0]}: …")
    return cls(**values)


def _section(value: Any, path: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(path, value, "must be a section with keys", f"write {path}.KEY=VALUE")
    return value or {}  # None: YAML's for a key without anything below it


def _value(hint: Any, value: Any, path: str) -> Any:
    """A section becomes its dataclass, a list a tuple of what it holds; anything else is the dataclass's to check."""
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, path)
    if typing.get_origin(hint) is Mapping:
        return _section(value, path)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(path, value, "must be a list", "write [A, B]")
        return tuple(_value(arguments[0], item, f"{path}[{position}]") for position, item in enumerate(value))
    nested = [argument for argument in arguments if dataclasses.is_dataclass(argument)]
    return _value(nested[0], value, path) if nested and value is not None else value


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def is_number(value: object) -> typing.TypeGuard[float]:
    """Whether it is a finite number, and no switch."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def positive(key: str, value: float, example: str) -> None:
    if not is_number(value) or value <= 0:
        raise ConfigError(key, value, "must be a number above 0", f"write for example {example}")


def one_of(key: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.0)[0]
        raise ConfigError(key, value, f"is none of {', '.join(known)}", f"write {near}")


def whole(key: str, value: object, least: int, fix: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(key, value, f"must be an integer >= {least}", fix)


def switch(key: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(key, value, "is not a switch", "write true or false")


def check_bound(eta: int, in_flight: float | None) -> None:
    """Staleness bound and batches under way (`StalenessConfig`).

    Raises:
        ConfigError: ``eta`` is no whole number of at least 0, or ``in_flight`` not between 1 and eta + 1.
    """
    whole("seamless.staleness.eta", eta, 0, "write 1 (one-step lag)")
    if in_flight is None:
        return
    if not is_number(in_flight) or not 1 <= in_flight <= eta + 1:
        problem = f"must be a number of batches from 1 to {eta + 1} (seamless.staleness.eta + 1)"
        raise ConfigError("seamless.staleness.in_flight", in_flight, problem, f"write {eta + 1}, the most")


def check_redundancy(name: str, value: float) -> None:
    """``seamless.staleness.redundancy`` or ``group_redundancy``.

    Raises:
        ConfigError: it is no finite number of at least 1.
    """
    if not is_number(value) or value < 1:
        surplus = "rollouts" if name == "group_redundancy" else "prompts"
        key = f"seamless.staleness.{name}"
        raise ConfigError(key, value, "must be a number >= 1", f"write 1 (no surplus {surplus})")


_REQUIRED = object()
_MISSING = "???"  # OmegaConf's for a value that the user has to give


def value_of(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> Any:
    """What stands under a dotted key.

    Raises:
        ConfigError: nothing does, and there is no default.
    """
    section: Any = config
    for name in key.split("."):
        section = section.get(name, _MISSING) if isinstance(section, Mapping) else _MISSING
    if section != _MISSING:
        return section
    if default is _REQUIRED:
        raise ConfigError(key, "nothing", "is missing", "leave it to verl's defaults, or give it a value")
    return default


def whole_number(config: Mapping[str, Any], key: str, *, least: int = 1, default: Any = _REQUIRED) -> int:
    """What stands under a dotted key.

    Raises:
        ConfigError: it is no whole number, or less than ``least``.
    """
    value = value_of(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        problem = "must be a whole number above 0" if least == 1 else f"must be a whole number of at least {least}"
        raise ConfigError(key, "null" if value is None else value, problem, f"write {least} or more")
    return value


def asked_devices(config: Mapping[str, Any]) -> tuple[int, int]:
    """The devices that train and those that only roll out, by verl's keys.

    Raises:
        ConfigError: a number of devices is none.
    """
    train = whole_number(config, "trainer.nnodes") * whole_number(config, "trainer.n_gpus_per_node")
    rollout = "actor_rollout_ref.rollout"
    nodes = whole_number(config, f"{rollout}.nnodes", least=0, default=0)
    return train, nodes * whole_number(config, f"{rollout}.n_gpus_per_node", least=0, default=0)
