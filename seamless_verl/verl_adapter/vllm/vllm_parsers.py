"""vLLM's tool-call and reasoning parsers behind the proxy's protocol, so that every model family it knows is ours.

Invariant: as in `proxy.text.parsing`. vLLM's own streaming parsers are not used: what may be shown early is
settled by the parsers' tags, and where those are unknown nothing is shown before the end.
"""

from __future__ import annotations

from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.proxy.text.parsing import AnswerParser, Settler, TagParser, Tools, is_writable, split_reasoning
from seamless_verl.trajectory.messages import Message, Role, ToolCall

# How vLLM's tool parsers call the text that a tool call begins with; a parser without any of them settles nothing.
_MARKERS = ("tool_call_start_token", "tool_calls_start_token", "bot_token", "tool_call_start", "tool_calls_begin")
_KEYS = ("seamless.proxy.tool_parser", "seamless.proxy.reasoning_parser")
_OPTIONS = ("--tool-parser", "--reasoning-parser")


def make_parser(tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None) -> AnswerParser:
    """The parser for a run; Hermes-style calls and no reasoning where nothing is configured.

    Raises:
        ConfigError: vLLM has no parser of that name, or it does not fit the tokenizer.
    """
    if tool_parser is None and reasoning_parser is None:
        return TagParser()
    return VllmParser(tokenizer, tool_parser, reasoning_parser)


def parser_of(folder: str, *, tool_parser: str | None, reasoning_parser: str | None) -> AnswerParser:
    """The parser of a stand-alone proxy, whose model has this folder or name on the Hub.

    Raises:
        ConfigError: vLLM is not installed here, has no parser of that name, or it does not fit the tokenizer.
    """
    try:
        import vllm.tool_parsers  # noqa: F401
        from transformers import AutoTokenizer
    except ImportError as error:
        named = next((key, name) for key, name in zip(_OPTIONS, (tool_parser, reasoning_parser), strict=True) if name)
        raise ConfigError(*named, f"needs vLLM beside the proxy: {error}", "pip install vllm, or drop it") from error
    return VllmParser(AutoTokenizer.from_pretrained(folder), tool_parser, reasoning_parser, keys=_OPTIONS)


class VllmParser:
    """An `AnswerParser` made of two of vLLM's parsers.

    Args:
        tool_parser, reasoning_parser: names as of ``vllm serve --tool-call-parser`` and ``--reasoning-parser``.
        keys: what the two are called where the user wrote them.
    """

    def __init__(
        self, tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None, *, keys: tuple[str, str] = _KEYS
    ) -> None:
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        self._tokenizer = tokenizer
        self._tool_class: Any = None
        self._reasoning: Any = None
        self._fallback = TagParser()
        if tool_parser is not None:
            self._tool_class = _found(keys[0], tool_parser, ToolParserManager.get_tool_parser)
            _fitting(keys[0], tool_parser, lambda: self._tool_class(tokenizer))
        if reasoning_parser is not None:
            made = _found(keys[1], reasoning_parser, ReasoningParserManager.get_reasoning_parser)
            self._reasoning = _fitting(keys[1], reasoning_parser, lambda: made(tokenizer))

    @property
    def think_tags(self) -> tuple[str, str] | None:
        if self._reasoning is None:
            return None
        opening, closing = (getattr(self._reasoning, f"reasoning_{end}_str", None) for end in ("start", "end"))
        return (opening, closing) if opening and closing else None

    @property
    def keeps_special_tokens(self) -> bool:
        """See `AnswerParser`."""
        request = _request([{"type": "function", "function": {"name": "f", "parameters": {}}}])
        if self._tool_class is None:
            return False
        return not self._tool_class(self._tokenizer, request.tools).adjust_request(request).skip_special_tokens

    def parse(self, text: str, tools: Tools, *, thinking: bool, call_prefix: str) -> Message:
        """See `AnswerParser.parse`; white space around reasoning and calls goes the way it goes everywhere here."""
        request = _request(tools)
        reasoning, content = self._split(text, thinking, request)
        if not tools:
            return Message(role=Role.ASSISTANT, content=content, reasoning=reasoning)
        if self._tool_class is None:
            said = self._fallback.parse(content, tools, thinking=thinking, call_prefix=call_prefix)
            return Message(role=Role.ASSISTANT, content=said.content, tool_calls=said.tool_calls, reasoning=reasoning)
        told = self._tool_class(self._tokenizer, request.tools).extract_tool_calls(content, request)
        calls = tuple(
            ToolCall(id=f"{call_prefix}{number}", name=call.function.name, arguments=call.function.arguments)
            for number, call in enumerate(told.tool_calls)
        )
        if not is_writable(*(text for call in calls for text in (call.name, call.arguments))):
            calls = ()
        content = (told.content or "").rstrip() if calls else content
        return Message(role=Role.ASSISTANT, content=content, tool_calls=calls, reasoning=reasoning)

    def _split(self, text: str, thinking: bool, request: Any) -> tuple[str, str]:
        tags = self.think_tags
        if self._reasoning is None:
            return "", text
        if tags is not None and (thinking or text.lstrip().startswith(tags[0])):
            return split_reasoning(text, tags, thinking)
        if tags is not None and tags[1] not in text:
            return "", text  # the prompt closed the reasoning, or there is none
        found, rest = self._reasoning.extract_reasoning(text, request)
        return (found or "").strip(), (rest or "").lstrip("\n") if found else rest or ""

    def settler(self, tools: Tools, *, thinking: bool) -> Settler:
        marker: str | None = None
        if tools:
            names = (
                [getattr(self._tool_class, name, None) for name in _MARKERS] if self._tool_class else ["<tool_call>"]
            )
            marker = next((name for name in names if isinstance(name, str) and name), "")
        if self._reasoning is None:
            return Settler(think_tags=None, thinking=False, tool_marker=marker)
        # Text without an opening tag may still turn out to be reasoning, for some of vLLM's parsers.
        return Settler(think_tags=self.think_tags, thinking=thinking, tool_marker=marker, plain_start=False)

    def tool_format(self, tools: Tools, *, required: bool) -> dict[str, Any] | None:
        if self._tool_class is None:
            return self._fallback.tool_format(tools, required=required)
        model = getattr(self._tool_class, "structural_tag_model", None)
        if model is None:
            return None
        try:
            from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag
        except ImportError:  # vLLM before 0.27 has no such register
            return self._fallback.tool_format(tools, required=required) if model == "hermes" else None
        tag = get_model_structural_tag(
            model=model,
            tools=_request(tools, strict=True).tools,
            tool_choice="required" if required else "auto",
            reasoning=False,
        )
        return None if tag is None else dict(tag.model_dump()["format"])


def _found(key: str, name: str, find: Any) -> Any:
    try:
        return find(name)
    except (KeyError, ImportError) as error:
        fix = "write a name that `vllm serve --help` lists"
        raise ConfigError(key, name, f"vLLM has no such parser: {error}", fix) from error


def _fitting(key: str, name: str, make: Any) -> Any:
    try:
        return make()
    except (RuntimeError, ValueError, KeyError) as error:
        fix = "write the parser of this model's family"
        raise ConfigError(key, name, f"does not fit the tokenizer: {error}", fix) from error


def _request(tools: Tools, *, strict: bool = False) -> Any:
    """The request as vLLM's parsers want to see it; they read the tools' schemas and nothing else."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    offered = [{**tool, "function": {**tool["function"], **({"strict": True} if strict else {})}} for tool in tools]
    asked = {"messages": [{"role": "user", "content": ""}], "tools": offered or None}
    return ChatCompletionRequest.model_validate(asked)
