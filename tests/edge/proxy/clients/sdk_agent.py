"""An agent on the Python SDKs of OpenAI and Anthropic: ``sdk_agent.py BASE_URL API_KEY``; prints JSON.

For each way to talk what the model said in each of five turns: its text and its calls.
"""

import json
import sys

import anthropic
import openai

BASE_URL, KEY = sys.argv[1:3]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
gpt = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
claude = anthropic.Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key=KEY, max_retries=0)


def chat(stream: bool) -> list:
    tools = [{"type": "function", "function": {"name": "run", "parameters": PARAMETERS}}]
    messages: list = [{"role": "user", "content": f"hi chat {stream}"}]
    said = []
    for _ in range(5):
        options: dict = dict(model="m", messages=messages, tools=tools)
        if stream:
            said.append(joined(gpt.chat.completions.create(stream=True, **options)))
        else:
            said.append(gpt.chat.completions.create(**options).choices[0].message.model_dump())
        messages.append(said[-1])
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "out"} for call in said[-1]["tool_calls"] or []
        ]
    return [
        [
            one["content"],
            [[c["function"]["name"], json.loads(c["function"]["arguments"])] for c in one["tool_calls"] or []],
        ]
        for one in said
    ]


def joined(chunks: openai.Stream) -> dict:
    """The message that a stream spells; the SDK's own helper takes strict tools only."""
    content, calls = "", []
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.index == len(calls):
                    calls.append({"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}})
                calls[call.index]["function"]["name"] += call.function.name or ""
                calls[call.index]["function"]["arguments"] += call.function.arguments or ""
    return {"role": "assistant", "content": content, "tool_calls": calls or None}


def responses(stream: bool) -> list:
    tools = [{"type": "function", "name": "run", "parameters": PARAMETERS, "strict": False}]
    items: list = [{"role": "user", "content": f"hi responses {stream}"}]
    said = []
    for _ in range(5):
        options: dict = dict(model="m", input=items, tools=tools)
        if stream:
            with gpt.responses.stream(**options) as events:
                response = events.get_final_response()
        else:
            response = gpt.responses.create(**options)
        said.append(response)
        items += response.output
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "out"}
            for item in response.output
            if item.type == "function_call"
        ]
    return [
        [
            one.output_text,
            [[item.name, json.loads(item.arguments)] for item in one.output if item.type == "function_call"],
        ]
        for one in said
    ]


def messages(stream: bool) -> list:
    tools = [{"name": "run", "input_schema": PARAMETERS}]
    turns: list = [{"role": "user", "content": f"hi messages {stream}"}]
    said = []
    for _ in range(5):
        options: dict = dict(model="m", max_tokens=500, messages=turns, tools=tools)
        if stream:
            with claude.messages.stream(**options) as events:
                message = events.get_final_message()
        else:
            message = claude.messages.create(**options)
        said.append(message)
        uses = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "out"} for use in uses]
        turns += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    return [
        [
            "".join(block.text for block in one.content if block.type == "text"),
            [[block.name, block.input] for block in one.content if block.type == "tool_use"],
        ]
        for one in said
    ]


report = {
    f"{talk.__name__} {'stream' if stream else 'whole'}": talk(stream)
    for talk in (chat, responses, messages)
    for stream in (False, True)
}
sys.stdout.write(json.dumps(report) + "\n")
