"""From generated text to an assistant message: reasoning, content, tool calls.

Invariants: no character is invented; what cannot be parsed stays content, so that the agent sees what the model said.
What :class:`Settler` lets out early is a prefix of what :meth:`AnswerParser.parse` says in the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from seamless_verl.proxy.text.settling import Settler
from seamless_verl.trajectory.messages import Message, Role, ToolCall

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a parser has to know about the request.

    Attributes:
        tools: those offered, in OpenAI's shape; empty when calls are just text.
        thinking: whether the prompt ends inside the model's reasoning.
        call_prefix: start of the tool-call ids to hand out; unique per answer.
    """

    tools: Sequence[Mapping[str, Any]]
    thinking: bool
    call_prefix: str


class AnswerParser(Protocol):
    """Knows how one family of models writes reasoning and tool calls."""

    @property
    def think_tags(self) -> tuple[str, str] | None:
        """Opening and closing tag of reasoning; None for a model that does not reason aloud."""
        ...

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether calls are told by special tokens, which the text then has to show."""
        ...

    def parse(self, text: str, asked: Asked) -> Message: ...

    def settler(self, asked: Asked) -> Settler: ...

    def tool_format(self, tools: Sequence[Mapping[str, Any]], *, required: bool) -> dict[str, Any] | None:
        """How calls of these tools are written, as the ``format`` of an xgrammar structural tag.

        None when nobody has written that down for this model; such calls can then not be forced. Text without a call
        fits too, unless one is ``required``. Arguments follow ``parameters`` of each tool.
        """
        ...


class TagParser:
    """Hermes-style ``<tool_call>{…}</tool_call>`` blocks (Qwen and many others) and reasoning between two tags.

    Args:
        think_tags: None for a model that does not reason aloud. The opening tag may be the end of the prompt.
    """

    def __init__(self, think_tags: tuple[str, str] | None = None) -> None:
        self._think_tags = think_tags

    @property
    def think_tags(self) -> tuple[str, str] | None:
        return self._think_tags

    @property
    def keeps_special_tokens(self) -> bool:
        return False

    def parse(self, text: str, asked: Asked) -> Message:
        """See :class:`AnswerParser`. Reasoning that never ends is all there is: the answer was cut short."""
        reasoning, content = split_reasoning(text, self._think_tags, asked.thinking)
        calls: list[ToolCall] = []
        if asked.tools and "<tool_call>" in content:
            content, calls = _take_calls(content, asked.call_prefix)
        return Message(role=Role.ASSISTANT, content=content, tool_calls=tuple(calls), reasoning=reasoning)

    def settler(self, asked: Asked) -> Settler:
        marker = "<tool_call>" if asked.tools else None
        return Settler(think_tags=self._think_tags, thinking=asked.thinking, tool_marker=marker)

    def tool_format(self, tools: Sequence[Mapping[str, Any]], *, required: bool) -> dict[str, Any]:
        tags = [
            {
                "type": "tag",
                "begin": f'<tool_call>\n{{"name": {json.dumps(tool["function"]["name"])}, "arguments": ',
                "content": {"type": "json_schema", "json_schema": tool["function"].get("parameters") or _ANY_OBJECT},
                "end": "}\n</tool_call>",
            }
            for tool in tools
        ]
        if required:
            return {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
        return {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags}


_ANY_OBJECT = {"type": "object"}


def split_reasoning(text: str, think_tags: tuple[str, str] | None, thinking: bool) -> tuple[str, str]:
    """Reasoning and the rest; text is reasoning only after an opening tag, in the text or before it."""
    if think_tags is None:
        return "", text
    opening, closing = think_tags
    if text.lstrip().startswith(opening):
        text = text.lstrip()[len(opening) :]
    elif not thinking:
        return "", text
    reasoning, _, content = text.partition(closing)
    return reasoning.strip(), content.lstrip("\n")


def _take_calls(text: str, call_prefix: str) -> tuple[str, list[ToolCall]]:
    calls: list[ToolCall] = []
    rest: list[str] = []
    at = 0
    for match in _CALL.finditer(text):
        try:
            call = json.loads(match.group(1))
            name, arguments = call["name"], call.get("arguments", {})
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, KeyError, RecursionError):
            continue
        if not isinstance(name, str) or not is_writable(name, arguments):
            continue
        calls.append(ToolCall(id=f"{call_prefix}{len(calls)}", name=name, arguments=arguments))
        rest.append(text[at : match.start()])
        at = match.end()
    if not calls:
        return text, calls
    rest.append(text[at:])
    return "".join(rest).rstrip(), calls


def is_writable(*texts: str) -> bool:
    """Whether a journal and every dialect can write these texts; half a surrogate pair in a JSON string is none."""
    try:
        return all(text.isascii() or text.encode() for text in texts)
    except UnicodeEncodeError:
        return False


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, str]:
    """Where the first of the stop strings begins and which it is; the text's length and "" for none."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found) if found else (len(text), "")
