"""What rows of a micro-batch share is computed once (``seamless.shared_prefix``), under verl's FSDP engines.

Tree training (arXiv 2511.00413) without a fork: `trie_engine` is registered with verl, `attention` with transformers.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import wrapt

from seamless_verl.checked import value_of
from seamless_verl.config import SeamlessConfig

VENDOR = "seamless"
"""``VERL_ENGINE_VENDOR``: verl's registry takes engines registered for it before its own."""
MODE = "SEAMLESS_SHARED_PREFIX"
"""Environment variable of workers: ``on`` or ``auto``."""
LONGEST = "SEAMLESS_LONGEST_ROW"
"""Environment variable of workers: tokens that a row may have, 0 where verl's keys do not tell."""


def register_engines(_: ModuleType) -> None:
    """With verl, for workers whose environment asks for them."""
    import seamless_verl.verl_adapter.shared_prefix.trie_engine  # noqa: F401


def hand_on(constants: ModuleType) -> None:
    """Workers know what the configuration asks for by the environment that verl gives them, under any trainer."""

    def environment(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = wrapped(*args, **kwargs)
        config = args[0] if args else kwargs.get("config")
        if config is None:
            return made
        asked = value_of(config, "seamless.shared_prefix", "off")
        mode = SeamlessConfig.from_mapping({"shared_prefix": asked}).shared_prefix
        if mode != "off":
            parts = [value_of(config, f"data.max_{part}_length", None) for part in ("prompt", "response")]
            longest = str(sum(parts) if all(parts) else 0)
            made["env_vars"] |= {"VERL_ENGINE_VENDOR": VENDOR, MODE: mode, LONGEST: longest}
        return made

    wrapt.wrap_function_wrapper(constants, "get_ppo_ray_runtime_env", environment)
