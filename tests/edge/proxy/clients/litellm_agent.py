"""An agent on litellm, run by an interpreter that has it: ``litellm_agent.py BASE_URL API_KEY``; prints JSON."""

import gc
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

# litellm leaves an Anthropic stream before its last byte. Where the garbage collector closes that while httpcore holds
# the lock of its connections, httpcore waits for itself forever: collected where it holds none. Until httpcore mends
# that (encode/httpcore, pull request 1108).
gc.disable()
BASE_URL, KEY = sys.argv[1:3]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "run", "description": "runs", "parameters": PARAMETERS}}]
WAYS = {
    "openai": dict(model="openai/m", api_base=BASE_URL, api_key=KEY),
    "anthropic": dict(model="anthropic/m", api_base=BASE_URL.removesuffix("/v1"), api_key=KEY),
}


def ask(way: str, messages: list, stream: bool) -> object:
    options = dict(messages=messages, tools=TOOLS, max_tokens=500, num_retries=0, **WAYS[way])
    if not stream:
        return litellm.completion(**options)
    chunks = list(litellm.completion(stream=True, **options))
    gc.collect()
    return litellm.stream_chunk_builder(chunks, messages=messages)


def respond(stream: bool) -> list:
    tools = [{"type": "function", "name": "run", "parameters": PARAMETERS}]
    items: list = [{"role": "user", "content": f"hi responses {stream}"}]
    said = []
    for _ in range(5):
        response = litellm.responses(input=items, tools=tools, stream=stream, **WAYS["openai"])
        if stream:
            response = next(event.response for event in response if event.type == "response.completed")
        output = [item if isinstance(item, dict) else item.model_dump() for item in response.output]
        said.append(output)
        items += output
        items += [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "out"}
            for item in output
            if item["type"] == "function_call"
        ]
    return [
        [
            "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"]),
            [[item["name"], json.loads(item["arguments"])] for item in output if item["type"] == "function_call"],
        ]
        for output in said
    ]


def complete(way: str, stream: bool) -> list:
    messages: list = [{"role": "user", "content": f"hi {way} {stream}"}]
    said = []
    for _ in range(5):
        message = ask(way, messages, stream).choices[0].message
        calls = message.tool_calls or []
        said.append([message.content, [[call.function.name, json.loads(call.function.arguments)] for call in calls]])
        messages.append(message.model_dump())
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "out"} for call in calls]
    return said


report = {}
for stream in (False, True):
    for way in WAYS:
        report[f"{way} {stream}"] = complete(way, stream)
    report[f"responses {stream}"] = respond(stream)
sys.stdout.write(json.dumps(report) + "\n")
