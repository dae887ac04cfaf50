"""Bodies of OpenAI's responses, as they are checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WrapValidator

from seamless_verl.proxy.dialects.shared import StreamOptions, Strict, tool_or_server_tool


class Function(Strict):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Strict):
    model_config = ConfigDict(populate_by_name=True)
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: str | None = Field(default=None, max_length=32)


class Reasoning(Strict):
    effort: str | None = Field(default=None, max_length=32)
    summary: str | None = Field(default=None, max_length=32)
    generate_summary: str | None = Field(default=None, max_length=32)


class ResponsesRequest(Strict):
    """Body of ``POST /v1/responses``."""

    model: str = Field(max_length=256)
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[Annotated[Function, WrapValidator(tool_or_server_tool)]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    truncation: Literal["disabled", "auto"] | None = None
    background: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    # Hints about caches, abuse and streams; they change no answer.
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    stream_options: StreamOptions | None = None
    client_metadata: dict[str, Any] | None = None
