"""Bodies for every route that takes one, and ways to spoil them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

CALLING = '<think>hm</think>\n\nso <tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
_TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
_TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "content": "x",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "out"},
]
_SAMPLING = {"temperature": 0.5, "top_p": 0.9, "stream": True}
# One good body per route; the fuzzer breaks it in a few places.
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **_SAMPLING,
        "model": "m",
        "messages": _TURNS,
        "tools": [_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "run"}},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        "stop": ["x"],
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 9,
        "seed": 1,
        "stream_options": {"include_usage": True},
        "parallel_tool_calls": False,
    },
    "/v1/completions": {**_SAMPLING, "model": "m", "prompt": [[1, 2]], "max_tokens": 9, "logprobs": 1, "stop": "x"},
    "/v1/responses": {
        **_SAMPLING,
        "model": "m",
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "run", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "out"},
        ],
        "tools": [{"type": "function", "name": "run", "parameters": {"type": "object"}, "strict": True}],
        "tool_choice": {"type": "function", "name": "run"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "max_output_tokens": 9,
    },
    "/v1/messages": {
        **_SAMPLING,
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "run", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "out"}]},
        ],
        "tools": [{"name": "run", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "run", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "stop_sequences": ["x"],
    },
}
GOOD["/v1/messages/count_tokens"] = {
    key: GOOD["/v1/messages"][key] for key in ("model", "system", "messages", "tools", "tool_choice")
}
GOOD["/sessions"] = {
    "group": "g",
    "index": 1,
    "deadline_s": 5.0,
    "max_turns": 5,
    "max_tokens": 50,
    "max_parallel": 2,
    "sampling": {"temperature": 1.0, "seed": 3},
    "metadata": {"a": [1]},
}
GOOD["/sessions/{id}/reward"] = {"reward": 1.0, "rewards": {"style": 0.5}}
GOOD["/sessions/{id}/close"] = GOOD["/sessions/{id}/reward"]

#: left out, as the value of a key
GONE = object()


def places_of(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every value inside a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(place for key, item in inner for place in places_of(item, (*here, key)))]


def changed(body: Any, place: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """The body with one value replaced; a key whose value becomes ``GONE`` is left out."""
    if not place:
        return change(body)
    copy = dict(body) if isinstance(body, dict) else list(body) if isinstance(body, list) else body
    try:
        value = changed(copy[place[0]], place[1:], change)
        if value is GONE and isinstance(copy, dict):
            del copy[place[0]]
        else:
            copy[place[0]] = None if value is GONE else value
    except (KeyError, IndexError, TypeError):
        pass  # an earlier change took this place away
    return copy


def broken(good: dict[str, Any], rng: random.Random) -> Any:
    """A good body with up to three values replaced by others."""
    body: Any = good
    for _ in range(rng.randint(1, 3)):
        value = _ODD[rng.randrange(len(_ODD))]
        body = changed(body, rng.choice(places_of(good)[1:]), lambda _, value=value: value)
    return body


_ODD: list[Any] = [
    GONE,
    None,
    True,
    0,
    -1,
    2**31,
    2**63,
    10**40,
    1e308,
    0.5,
    float("inf"),
    float("nan"),
    "",
    "x",
    "\ud800",
    "\x00",
    "auto",
    "required",
    "function",
    "text",
    "image_url",
    "assistant",
    "y" * 5000,
    [],
    [None],
    [[[]]],
    [1, "a", {}],
    {},
    {"": None},
    {"type": "text"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"type": ["nonsense"]},
]


def hostile(good: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Bytes that are no body at all, or no reasonable one; each with its name."""
    plain = json.dumps(good).encode()
    key = next(iter(good))
    for depth in (100, 2_000, 200_000):
        yield f"{depth} lists deep", b'{"%s":' % key.encode() + b"[" * depth + b"]" * depth + b"}"
        yield f"{depth} objects deep", b'{"metadata":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
        yield f"{depth} lists deep, never closed", b"[" * depth
    for number in ("9" * 5_000, "1e999999", "-1e400", "0." + "1" * 10_000, "NaN", "Infinity", "00", "1.", "0x10"):
        for field in ("seed", "temperature", "max_tokens", "reward", "deadline_s"):
            yield f"{field} is {number[:12]}", plain[:-1] + f', "{field}": {number}}}'.encode()
    for name, text in {
        "broken UTF-8": b"\xff\xfe\xc3(",
        "an overlong slash": b"\xc0\xaf",
        "half a surrogate in UTF-8": b"\xed\xa0\x80",
        "half a surrogate, escaped": b"\\ud800",
        "a zero byte": b"\x00",
        "a zero byte, escaped": b"\\u0000",
        "a bad escape": b"\\q",
        "a line break": b"\n",
    }.items():
        yield f"{name} in a text", plain[:-1] + b', "model": "' + text + b'"}'
        yield f"{name} in a key", plain[:-1] + b', "' + text + b'": 1}'
    yield "nothing", b""
    yield "white space", b" \n\t "
    yield "a byte order mark", b"\xef\xbb\xbf" + plain
    yield "UTF-16", plain.decode().encode("utf-16")
    yield "twice", plain + plain
    yield "cut in the middle", plain[: len(plain) // 2]
    yield "keys twice", plain[:-1] + b"," + plain[1:]
    yield "a hundred thousand keys", b"{" + b",".join(b'"k%d":1' % at for at in range(100_000)) + b"}"
    yield "a million spaces", b" " * 1_000_000 + plain
    yield "one long text", b'{"model":"' + b"x" * 3_000_000 + b'"}'
    yield "gzip that is none", b"\x1f\x8b\x08\x00" + plain
