"""verl's data set with a system prompt before each conversation, by the source of its data."""

from __future__ import annotations

from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset

from seamless_verl.errors import ConfigError


class SystemPromptDataset(RLHFDataset):
    """For ``data.custom_cls``. ``data.system_prompts`` has a text per ``data_source``, and one under ``default`` for
    all others; a conversation that begins with a system prompt of its own keeps that.

    Raises:
        ConfigError: there is no text at all.
    """

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """verl calls it once for all that was read; it counts what the data has, so the prompts must be in it."""
        prompts, key = dict(self.config.get("system_prompts") or {}), self.prompt_key
        if not prompts:
            problem, fix = "is empty", "write +data.system_prompts.default='…', or take data.custom_cls out"
            raise ConfigError("data.system_prompts", None, problem, fix)

        def with_prompt(row: dict[str, Any]) -> dict[str, Any]:
            messages, text = row[key], prompts.get(row["data_source"], prompts.get("default"))
            if not text or messages[0]["role"] == "system":
                return {key: messages}
            return {key: [{"role": "system", "content": text}, *messages]}

        return super().maybe_filter_out_long_prompts(dataframe.map(with_prompt, load_from_cache_file=False))
