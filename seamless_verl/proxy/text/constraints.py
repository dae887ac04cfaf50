"""What the engine is forced to write: required tool calls, strict arguments, JSON answers.

The constraint is written in the model's own format for tool calls (an xgrammar structural tag), so that the recorded
tokens read like every other call of this model, and reasoning in front of it stays free::

    [ reasoning … </think> ]   calls | JSON
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from seamless_verl.proxy.calls import Call, ToolChoice, bad_request
from seamless_verl.proxy.engine import Ability
from seamless_verl.proxy.text.parsing import AnswerParser


def refuse_unable(call: Call, parser: AnswerParser, abilities: frozenset[Ability]) -> None:
    """Refuse what this engine and this parser cannot honour.

    Raises:
        ApiError: 400, naming the field.
    """
    if call.logprobs and Ability.TOP_LOGPROBS not in abilities:
        raise _refusal("top_logprobs", "this engine tells the log-prob of the chosen token only")
    if call.thinking is not None and call.thinking is not (parser.think_tags is not None):
        does = "always reasons" if parser.think_tags is not None else "does not reason aloud"
        raise _refusal("thinking", f"this model {does}, whatever a request says")
    wishes = {
        "tool_choice": call.parse_tools and call.tool_choice is ToolChoice.REQUIRED,
        "parallel_tool_calls": call.parse_tools and not call.parallel_tool_calls,
        "tools": call.parse_tools and bool(call.strict_tools),
        "response_format": call.json_schema is not None,
    }
    asked = [field for field, is_asked in wishes.items() if is_asked]
    if asked and Ability.STRUCTURED_OUTPUTS not in abilities:
        raise _refusal(asked[0], "it needs constrained decoding, which this engine does not offer")
    if asked and asked != ["response_format"] and parser.tool_format(call.raw_tools, required=True) is None:
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
    if not call.parse_tools:
        return None
    required = call.tool_choice is ToolChoice.REQUIRED
    # Beside a JSON answer, calls have to be told from it by the grammar.
    if not required and call.parallel_tool_calls and not call.strict_tools and call.json_schema is None:
        return None
    chosen = [_loosened(tool, call) for tool in call.raw_tools if call.tool_name in ("", tool["function"]["name"])]
    form = parser.tool_format(chosen, required=required or call.json_schema is not None)
    return form if form is None or (call.parallel_tool_calls and not call.tool_name) else _only_first(form)


def _loosened(tool: Mapping[str, Any], call: Call) -> Mapping[str, Any]:
    """Arguments of a tool that nobody called strict, and that nobody forces, may be any object."""
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
