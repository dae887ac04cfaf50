"""The agent: adds two numbers with a model's help, and asks once more where the answer cannot be right.

It is a program like any other that uses OpenAI's API: it knows an address, a key and the name of a model, and imports
nothing of the trainer. Each attempt is one call of `attempt`, in a thread of a worker process.
"""

from collections.abc import Callable
from typing import Any

from openai import OpenAI

MOST_TURNS = 2


def attempt(task: dict[str, Any], base_url: str, api_key: str, model: str) -> dict[str, Any]:
    """One attempt at one task; what is returned is handed to the reward. `async def` works, too."""
    with OpenAI(base_url=base_url, api_key=api_key) as client:

        def ask(messages: list[dict[str, str]]) -> str:
            answer = client.chat.completions.create(model=model, messages=messages)
            return answer.choices[0].message.content or ""

        return converse(task, ask)


def converse(task: dict[str, Any], ask: Callable[[list[dict[str, str]]], str]) -> dict[str, Any]:
    """The conversation, whoever answers."""
    messages, turns = [{"role": "user", "content": task["question"]}], 0
    while True:
        text = ask(messages)
        turns += 1
        if turns == MOST_TURNS or can_be_right(text, task):
            return {"answer": text.strip(), "turns": turns}
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": task["question"]}]


def can_be_right(text: str, task: dict[str, Any]) -> bool:
    """What the agent may know of the answer: its remainder by 3. Others would run tests or a compiler here."""
    return text.strip().isdigit() and int(text) % 3 == task["remainder"]
