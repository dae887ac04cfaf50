"""From generated text to an assistant message: reasoning, content, tool calls.

Invariant: no character is invented. What cannot be parsed stays content, so that the agent sees what the model said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from seamless_verl.trajectory.messages import Message, Role, ToolCall

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def parse_answer(text: str, *, call_prefix: str, parse_tools: bool, think_tags: tuple[str, str] | None) -> Message:
    """Split an answer into its parts.

    Args:
        call_prefix: start of the tool-call ids to hand out; unique per answer.
        parse_tools: whether Hermes-style ``<tool_call>{…}</tool_call>`` blocks are calls (tools were offered).
        think_tags: opening and closing tag of reasoning; the opening one may be part of the prompt.
    """
    reasoning = ""
    if think_tags is not None:
        opening, closing = think_tags
        head, found, tail = text.partition(closing)
        if found:
            reasoning, text = head.replace(opening, "", 1).strip(), tail.lstrip("\n")
    calls: list[ToolCall] = []
    if parse_tools and "<tool_call>" in text:
        text, calls = _take_calls(text, call_prefix)
    return Message(role=Role.ASSISTANT, content=text, tool_calls=tuple(calls), reasoning=reasoning)


def _take_calls(text: str, call_prefix: str) -> tuple[str, list[ToolCall]]:
    calls: list[ToolCall] = []
    rest: list[str] = []
    at = 0
    for match in _CALL.finditer(text):
        try:
            call = json.loads(match.group(1))
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, RecursionError):
            continue
        if not isinstance(name, str):
            continue
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(ToolCall(id=f"{call_prefix}{len(calls)}", name=name, arguments=written))
        rest.append(text[at : match.start()])
        at = match.end()
    if not calls:
        return text, calls
    rest.append(text[at:])
    return "".join(rest).strip(), calls


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The part of a text before the first of the stop strings."""
    ends = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return text[: min(ends)] if ends else text
