"""Bodies of Anthropic's messages, as they are checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WrapValidator

from seamless_verl.proxy.dialects.shared import Strict, tool_or_server_tool


class Block(BaseModel):
    """Blocks carry notes of newer SDKs; what matters of them is checked block by block."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    type: str


class Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Strict):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    # Hints: about prices (the proxy keeps every prefix anyway), and about the pace of a stream.
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None


class Choice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    display: Literal["summarized", "omitted"] | None = None


class Format(Strict):
    model_config = ConfigDict(populate_by_name=True)
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: str | None = Field(default=None, max_length=32)
    format: Format | None = None


class Edit(BaseModel):
    """A change of the history that Anthropic's servers would make."""

    model_config = ConfigDict(extra="ignore")
    type: str
    keep: Any = None

    @property
    def is_done_anyway(self) -> bool:
        return self.type.startswith("clear_thinking") and self.keep == "all"


class ContextManagement(Strict):
    edits: list[Edit] = Field(default_factory=list)


class CountRequest(Strict):
    """Body of ``POST /v1/messages/count_tokens``."""

    model: str = Field(max_length=256)
    messages: list[Turn] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[Annotated[Tool, WrapValidator(tool_or_server_tool)]] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    """Body of ``POST /v1/messages``."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
