"""What the engine is asked for: the agent's wishes, the trainer's decisions, and what names a request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from seamless_verl.proxy.calls import Call
from seamless_verl.proxy.session.sessions import Session
from seamless_verl.trajectory.messages import Transcript


def decide_sampling(session: Session, call: Call, digest: bytes, number: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the engine is asked for, and which of the agent's wishes the trainer overrode.

    Args:
        number: which of the request's samples this is; each gets a seed of its own.
    """
    sampling, overrides = dict(call.sampling), []
    if "seed" in sampling:
        sampling["seed"] += number
    for key, value in session.spec.sampling.items():
        if key == "max_tokens" and sampling.get(key, value) <= value:
            sampling.setdefault(key, value)  # a cap, not a wish
            continue
        if key in call.sampling and call.sampling[key] != value:
            overrides.append(f"{key}={value}")
        sampling[key] = value
    if "seed" in session.spec.sampling:
        mixed = f"{sampling['seed']}:{digest.hex()}:{session.num_started}".encode()
        sampling["seed"] = int.from_bytes(blake2b(mixed, digest_size=4).digest(), "little") & 0x7FFFFFFF
    if call.thinking_budget is not None:
        overrides.append("thinking.budget_tokens=max_tokens")  # reasoning and answer share one limit
    if call.logprobs:
        sampling["logprobs"] = call.logprobs
    return sampling, tuple(overrides)


def request_digest(transcript: Transcript, call: Call) -> bytes:
    """Names a request by everything that decides its answer; two with the same name may be a retry."""
    wishes = (
        sorted(call.sampling.items()),
        call.logprobs,
        call.tool_choice.value,
        call.tool_name,
        call.parallel_tool_calls,
        sorted(call.strict_tools),
        _plain(call.json_schema),
    )
    return blake2b(transcript.digest + repr(wishes).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def sample_digest(request: bytes, number: int) -> bytes:
    """Names one of a request's samples; the first bears the request's own name."""
    return request if not number else blake2b(request + number.to_bytes(4, "little"), digest_size=16).digest()


def _plain(schema: Mapping[str, Any] | None) -> str:
    return "" if schema is None else json.dumps(schema, sort_keys=True)
