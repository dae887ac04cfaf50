"""Small agents on the real SDKs."""

from __future__ import annotations

from typing import Any


async def chat_message(sdk: Any, *, stream: bool, **options: Any) -> dict[str, Any]:
    """The assistant message of a chat completion, as an agent sends it back with its next request."""
    if not stream:
        whole = await sdk.chat.completions.create(**options)
        message: dict[str, Any] = whole.choices[0].message.model_dump(exclude_none=True)
        return message
    content, calls = "", list[dict[str, Any]]()
    async for chunk in await sdk.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.index == len(calls):
                    calls.append({"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}})
                function = calls[call.index]["function"]
                function["name"] += call.function.name or ""
                function["arguments"] += call.function.arguments or ""
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
