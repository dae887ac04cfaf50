"""verl's data set with a system prompt before each conversation, by the source of its data."""

from __future__ import annotations

from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset


class SystemPromptDataset(RLHFDataset):
    """For ``data.custom_cls``. ``data.system_prompts`` has a text per ``data_source``, and one under ``default`` for
    all others; a conversation that begins with a system prompt of its own keeps that."""

    def _build_messages(self, example: dict[str, Any], key: str) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = super()._build_messages(example, key)
        prompts = self.config.system_prompts
        text = prompts.get(example["data_source"], prompts.get("default"))
        if not text or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": text}, *messages]
