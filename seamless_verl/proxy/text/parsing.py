"""How a model writes reasoning and tool calls: text becomes a message, and the engine is forced to write what is asked.

Invariants: no character is invented; what cannot be parsed stays content, so that the agent sees what the model said.
What :class:`Settler` lets out early is a prefix of what :meth:`AnswerParser.parse` says in the end.

What is forced (required tool calls, strict arguments, JSON answers) is written in the model's own format for tool calls
(an xgrammar structural tag), so that the recorded tokens read like every other call of this model, and reasoning in
front of it stays free::

    [ reasoning … </think> ]   calls | JSON
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol, TypeAlias

from seamless_verl.proxy.calls import Call, ToolChoice, bad_request
from seamless_verl.proxy.engine import Ability
from seamless_verl.trajectory.messages import Message, Role, ToolCall

# A call that does not end takes the rest with it: looking for an end from each beginning anew would be quadratic.
_CALL = re.compile(r"<tool_call>\s*(?:(\{.*?\})\s*</tool_call>|\{.*)", re.DOTALL)


Tools: TypeAlias = Sequence[Mapping[str, Any]]


class AnswerParser(Protocol):
    """Knows how one family of models writes reasoning and tool calls."""

    @property
    def think_tags(self) -> tuple[str, str] | None:
        """Opening and closing tag of reasoning; None for a model that does not reason aloud."""
        ...

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether special tokens mark tool calls, so that decoding must not drop them."""
        ...

    def parse(self, text: str, tools: Tools, *, thinking: bool, call_prefix: str) -> Message:
        """The message that an answer is.

        Args:
            tools: those offered, in OpenAI's shape; empty when calls are just text.
            thinking: whether the prompt ends inside the model's reasoning.
            call_prefix: start of the tool-call ids to hand out; unique per answer.
        """
        ...

    def settler(self, tools: Tools, *, thinking: bool) -> Settler:
        """For the same answer while it is generated."""
        ...

    def tool_format(self, tools: Tools, *, required: bool) -> dict[str, Any] | None:
        """How calls of these tools are written, as the ``format`` of an xgrammar structural tag.

        None when that is not known of this model; its calls cannot be forced then. Text without a call fits too,
        unless one is ``required``. Arguments follow ``parameters`` of each tool.
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

    def parse(self, text: str, tools: Tools, *, thinking: bool, call_prefix: str) -> Message:
        """See :class:`AnswerParser`. Reasoning that never ends is all there is: the answer was cut short."""
        reasoning, content = split_reasoning(text, self._think_tags, thinking)
        calls: list[ToolCall] = []
        if tools and "<tool_call>" in content:
            content, calls = _take_calls(content, call_prefix)
        return Message(role=Role.ASSISTANT, content=content, tool_calls=tuple(calls), reasoning=reasoning)

    def settler(self, tools: Tools, *, thinking: bool) -> Settler:
        marker = "<tool_call>" if tools else None
        return Settler(think_tags=self._think_tags, thinking=thinking, tool_marker=marker)

    def tool_format(self, tools: Tools, *, required: bool) -> dict[str, Any]:
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
            call = json.loads(match.group(1) or "")
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
    """Whether a journal and every dialect can write these texts; half a surrogate pair cannot be written."""
    try:
        return all(text.isascii() or text.encode() for text in texts)
    except UnicodeEncodeError:
        return False


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, str]:
    """Where the first of the stop strings begins and which it is; the text's length and "" for none."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found) if found else (len(text), "")


class StopCutter:
    """Lets text out up to the first stop string, and keeps back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._pending = ""
        self._stopped = False

    def feed(self, text: str) -> str:
        if self._stopped:
            return ""
        pending = self._pending + text
        ends = [at for stop in self._stops if (at := pending.find(stop)) >= 0]
        # A stop string that began earlier may still end; what it takes is then more.
        keep = max((overlap(pending, stop) for stop in self._stops), default=0)
        settled = min([len(pending) - keep, *ends])
        self._stopped = bool(ends)
        self._pending = pending[settled:]
        return pending[:settled]


class _Phase(Enum):
    START = "start"
    THINKING = "thinking"
    AFTER = "after"
    CONTENT = "content"
    HELD = "held"


class Settler:
    """Which part of an unfinished answer is settled, whatever comes next: that part may be streamed.

    ::

        START ──opening tag──▶ THINKING ──closing tag──▶ AFTER ──▶ CONTENT ──tool call begins──▶ HELD
          └──────────────anything else─────────────────────────────▶ │

    Held back are: text that may become a tag, white space that the end may strip, and everything from the first tool
    call on. Each character is looked at a bounded number of times.

    Args:
        think_tags: opening and closing tag of reasoning; None for none.
        thinking: the prompt already opened the reasoning.
        tool_marker: how a tool call begins; None when calls are just text; "" when it is not known, so that no content
            can be settled before the end.
        plain_start: whether text without an opening tag is surely content.
    """

    def __init__(
        self, *, think_tags: tuple[str, str] | None, thinking: bool, tool_marker: str | None, plain_start: bool = True
    ) -> None:
        self._opening, self._closing = think_tags or ("", "")
        self._marker = tool_marker
        self._pending = ""
        self._otherwise = _Phase.CONTENT if plain_start else _Phase.HELD
        self._phase = _Phase.START if think_tags is not None else self._otherwise
        self._thinking = thinking
        self._said_reasoning = False

    def feed(self, text: str) -> tuple[str, str]:
        """Reasoning and content that this text settles."""
        self._pending += text
        reasoning = ""
        if self._phase is _Phase.START:
            self._begin()
        if self._phase is _Phase.THINKING:
            reasoning = self._think()
        if self._phase is _Phase.AFTER:
            self._pending = self._pending.lstrip("\n")
            if self._pending:
                self._phase = _Phase.CONTENT
        return reasoning, self._say() if self._phase is _Phase.CONTENT else ""

    def _begin(self) -> None:
        head = self._pending.lstrip()
        if head.startswith(self._opening):
            self._pending, self._phase = head[len(self._opening) :], _Phase.THINKING
        elif not self._opening.startswith(head):
            self._phase = _Phase.THINKING if self._thinking else self._otherwise

    def _think(self) -> str:
        head, found, tail = self._pending.partition(self._closing)
        if found:
            self._pending, self._phase = tail, _Phase.AFTER
            settled = head.rstrip()
        else:
            settled = head[: len(head) - overlap(head, self._closing)].rstrip()
            self._pending = head[len(settled) :]
        if not self._said_reasoning:
            settled = settled.lstrip()
            self._said_reasoning = bool(settled)
        return settled

    def _say(self) -> str:
        if self._marker is None:
            settled, self._pending = self._pending, ""
            return settled
        if not self._marker:
            return ""
        head, found, _ = self._pending.partition(self._marker)
        if found:
            self._phase, self._pending = _Phase.HELD, ""
            return head.rstrip()
        settled = head[: len(head) - overlap(head, self._marker)].rstrip()
        self._pending = head[len(settled) :]
        return settled


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that begins ``tag`` without being all of it."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def preferences_against(call: Call, parser: AnswerParser) -> tuple[str, ...]:
    """Preferences that this proxy cannot honour: those of the call, and ``thinking`` if the model does the opposite."""
    thinks = parser.think_tags is not None
    return (*call.preferences, *(("thinking",) if call.thinking is not None and call.thinking is not thinks else ()))


def keeps_special_tokens(parser: AnswerParser, tokenizer: Any) -> bool:
    """Whether to decode answers with their special tokens, since some mark tool calls or the ends of reasoning."""
    tags = [tokenizer.encode(tag, add_special_tokens=False) for tag in parser.think_tags or ()]
    return parser.keeps_special_tokens or not all(tokenizer.decode(tag, skip_special_tokens=True) for tag in tags)


def refuse_unable(call: Call, parser: AnswerParser, abilities: frozenset[Ability]) -> None:
    """Refuse what this engine and this parser cannot honour.

    Raises:
        ApiError: 400, naming the field.
    """
    if call.logprobs and Ability.TOP_LOGPROBS not in abilities:
        raise _refusal("top_logprobs", "this engine tells the log-prob of the chosen token only")
    wishes = {
        "tool_choice": bool(call.tools_to_parse) and call.tool_choice is ToolChoice.REQUIRED,
        "parallel_tool_calls": bool(call.tools_to_parse) and not call.parallel_tool_calls,
        "tools": bool(call.tools_to_parse and call.strict_tools),
        call.schema_field: call.json_schema is not None,
    }
    asked = [field for field, is_asked in wishes.items() if is_asked]
    if asked and Ability.STRUCTURED_OUTPUTS not in abilities:
        raise _refusal(asked[0], "it needs constrained decoding, which this engine does not offer")
    if asked and call.tools_to_parse and parser.tool_format(call.raw_tools, required=True) is None:
        raise _refusal(asked[0], "nobody has described this model's tool calls as a grammar")


def _refusal(field: str, why: str) -> Exception:
    return bad_request(f"This value of {field} is not supported: {why}.", param=field, code="unsupported_value")


def structured_outputs(call: Call, parser: AnswerParser, *, thinking: bool) -> dict[str, Any] | None:
    """vLLM's ``structured_outputs`` for a request; None where nothing is forced.

    Args:
        thinking: whether the prompt ends inside the model's reasoning.
    """
    tools = _tool_format(call, parser)
    text = {"type": "json_schema", "json_schema": call.json_schema} if call.json_schema is not None else None
    if tools is None and text is None:
        return None
    if tools is None and parser.think_tags is None:
        return {"json": call.json_schema}
    if tools is None or text is None or call.tool_choice is ToolChoice.REQUIRED:
        body = tools if tools is not None else text
    else:
        body = {"type": "or", "elements": [tools, text]}
    assert body is not None
    return {
        "structural_tag": json.dumps({"type": "structural_tag", "format": _after_reasoning(body, parser, thinking)})
    }


def _tool_format(call: Call, parser: AnswerParser) -> dict[str, Any] | None:
    if not call.tools_to_parse:
        return None
    required = call.tool_choice is ToolChoice.REQUIRED
    # Beside a JSON answer, calls have to be told from it by the grammar.
    if not required and call.parallel_tool_calls and not call.strict_tools and call.json_schema is None:
        return None
    chosen = [_loosened(tool, call) for tool in call.raw_tools if call.tool_name in ("", tool["function"]["name"])]
    form = parser.tool_format(chosen, required=required or call.json_schema is not None)
    return form if form is None or (call.parallel_tool_calls and not call.tool_name) else _only_first(form)


def _loosened(tool: Mapping[str, Any], call: Call) -> Mapping[str, Any]:
    """The tool with any object as its arguments, unless it is strict or a call is required."""
    name = tool["function"]["name"]
    if name in call.strict_tools or call.tool_choice is ToolChoice.REQUIRED:
        return tool
    return {**tool, "function": {**tool["function"], "parameters": {"type": "object"}}}


def _only_first(form: Any) -> Any:
    """The same format with at most one call."""
    if isinstance(form, list):
        return [_only_first(part) for part in form]
    if not isinstance(form, dict):
        return form
    copy = {key: value if key == "json_schema" else _only_first(value) for key, value in form.items()}
    if form.get("type") in ("tags_with_separator", "triggered_tags"):
        copy["stop_after_first"] = True
    return copy


def _after_reasoning(body: dict[str, Any], parser: AnswerParser, thinking: bool) -> dict[str, Any]:
    if parser.think_tags is None:
        return body
    opening, closing = parser.think_tags
    gap = {"type": "regex", "pattern": r"\n{0,2}"}
    thought = {"type": "tag", "begin": "" if thinking else opening, "content": {"type": "any_text"}, "end": closing}
    reasoned = {"type": "sequence", "elements": [thought, gap, body]}
    return reasoned if thinking else {"type": "or", "elements": [reasoned, body]}
