"""The least agent: one question to the model behind the proxy, for benchmarks whose rows are to be audited."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI


async def attempt(task: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        question = {"role": "user", "content": task["question"]}
        answer = await client.chat.completions.create(model=model, messages=[question])
        return answer.choices[0].message.content or ""


def score(task: dict[str, Any], outcome: str | None) -> float:
    return float(outcome is not None and outcome.strip() == task["answer"])


def digits(task: dict[str, Any], outcome: str | None) -> float:
    """How much of the answer is digits: something to reinforce in a model that knows nothing."""
    return sum(character.isdigit() for character in outcome or "") / max(1, len(outcome or ""))
