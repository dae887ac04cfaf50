"""What agents write behind an answer before they send it back: smolagents' that write code do, behind a stop string."""

from __future__ import annotations

from typing import Any

import pytest

from seamless_verl.proxy.client import SessionResult
from tests.fakes import Served, serving

_HI: list[Any] = [{"role": "user", "content": "hi"}]
_CALLED = "\nCalling tools:\n[print(1)]"


def _with(said: str | None, behind: str, question: str = "more") -> list[Any]:
    content = f"{(said or '').removesuffix('</code>')}</code>{behind}"
    return [{"role": "assistant", "content": content}, {"role": "user", "content": question}]


def _texts(proxy: Served, result: SessionResult) -> list[str]:
    return [proxy.engine.tokenizer.decode(list(row.token_ids)) for row in result.rows]


async def _three_turns(proxy: Served, behind: str, stop: list[str]) -> SessionResult:
    handle = await proxy.open()
    messages = _HI
    async with proxy.sdk(handle) as sdk:
        for _ in range(3):
            answer = await sdk.chat.completions.create(model="m", messages=messages, stop=stop)
            messages = [*messages, *_with(answer.choices[0].message.content, behind)]
    return await proxy.admin.close_session(handle.id)


@pytest.mark.parametrize("behind", ["", "\n", _CALLED, " and on", "</code>"])
async def test_behind_a_stop_string_it_is_read_and_not_trained(behind: str) -> None:
    async with serving(lambda prompt: f"print({prompt.count('more')})</code>") as proxy:
        result = await _three_turns(proxy, behind, ["</code>"])
        assert (result.kinds, result.audit.is_clean) == ({"clean": 3}, True)
        (text,) = _texts(proxy, result)
        (row,) = result.rows
        for number in (0, 1):
            assert f"assistant\nprint({number})</code>{behind.rstrip()}<|im_end|>" in text
        trained = [proxy.engine.tokenizer.decode(row.token_ids[turn.start : turn.stop]) for turn in row.turns]
    assert trained == [f"print({number})</code>" for number in range(3)]
    assert sum(row.mask) == sum(turn.stop - turn.start for turn in row.turns)


async def test_behind_an_end_that_the_model_chose_it_is_another_history() -> None:
    async with serving(lambda prompt: f"print({prompt.count('more')})</code>") as proxy:
        result = await _three_turns(proxy, _CALLED, [])
        assert (result.kinds, result.audit.is_clean) == ({"clean": 1, "fork": 2}, True)
        assert f"</code>{_CALLED}<|im_end|>" in _texts(proxy, result)[2]


async def test_two_additions_to_one_answer_are_two_histories() -> None:
    async with serving(lambda prompt: "print(1)</code>") as proxy:
        handle = await proxy.open()
        async with proxy.sdk(handle) as sdk:
            first = await sdk.chat.completions.create(model="m", messages=_HI, stop=["</code>"])
            for behind in ("one", "two", "one"):
                messages = [*_HI, *_with(first.choices[0].message.content, behind)]
                for question in ("and", "end"):
                    answer = await sdk.chat.completions.create(model="m", messages=messages, stop=["</code>"])
                    messages = [*messages, *_with(answer.choices[0].message.content, "", question)]
        result = await proxy.admin.close_session(handle.id)
        texts = _texts(proxy, result)
    assert sorted("</code>one" in text for text in texts) == [False, True, True], texts
    assert all(("</code>one" in text) != ("</code>two" in text) for text in texts)
    assert result.audit.is_clean


async def test_an_addition_to_the_last_message_is_not_lost() -> None:
    """Nothing follows it that could carry it, so the whole message is written anew."""
    async with serving(lambda prompt: "print(1)</code>") as proxy:
        handle = await proxy.open()
        async with proxy.sdk(handle) as sdk:
            first = await sdk.chat.completions.create(model="m", messages=_HI, stop=["</code>"])
            back, question = _with(first.choices[0].message.content, _CALLED)
            await sdk.chat.completions.create(model="m", messages=[*_HI, back])
            await sdk.chat.completions.create(model="m", messages=[*_HI, back, question])
        prompts = [proxy.engine.tokenizer.decode(list(sent.prompt_ids)) for sent in proxy.engine.requests]
    assert [prompt.count(f"print(1)</code>{_CALLED}<|im_end|>") for prompt in prompts] == [0, 1, 1]


async def test_an_answer_that_begins_like_another_one_and_its_stop_string_is_itself() -> None:
    """The model began with the stop string; asked without it, it wrote code."""
    code = "```print(1)```"
    async with serving(lambda prompt: code) as proxy:
        handle = await proxy.open()
        async with proxy.sdk(handle) as sdk:
            first = await sdk.chat.completions.create(model="m", messages=_HI, stop=["```"])
            assert not first.choices[0].message.content
            question: list[Any] = [{"role": "user", "content": "code"}]
            second = await sdk.chat.completions.create(model="m", messages=question)
            assert second.choices[0].message.content == code
            said: list[Any] = [{"role": "assistant", "content": code}, {"role": "user", "content": "more"}]
            await sdk.chat.completions.create(model="m", messages=[*question, *said])
        result = await proxy.admin.close_session(handle.id)
    assert result.kinds == {"clean": 2, "fork": 1}
