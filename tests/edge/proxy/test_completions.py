"""Text completions with the real SDK: prompts as text or token ids, continued as they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from seamless_verl.proxy.calls import ApiError
from seamless_verl.proxy.dialects.completions import parse_completion
from tests.fakes import serving


async def test_token_ids_that_begin_with_an_answer_extend_it() -> None:
    async with serving(lambda prompt: "the quick brown fox", streams=True) as proxy:
        handle = await proxy.open()
        tokenizer = proxy.engine.tokenizer
        prompt = tokenizer.encode("hello", add_special_tokens=False)
        async with proxy.sdk(handle) as sdk:
            first = await sdk.completions.create(model="m", prompt=prompt, max_tokens=100)
            assert (first.choices[0].text, first.choices[0].finish_reason) == ("the quick brown fox", "stop")
            answer = tokenizer.encode(first.choices[0].text, add_special_tokens=False)
            longer = [*prompt, *answer, tokenizer.eos_token_id, *tokenizer.encode("more", add_special_tokens=False)]
            stream = await sdk.completions.create(
                model="m", prompt=longer, stream=True, max_tokens=2, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.prompt_tokens_details is not None
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == len(prompt) + len(answer) + 1
        assert chunks[-2].choices[0].finish_reason == "length"
        assert list(proxy.engine.requests[1].prompt_ids) == longer
        result = await proxy.admin.close_session(handle.id)
        assert result.audit.is_clean
        assert (len(result.rows), result.kinds) == (1, {"clean": 2})


async def test_texts_branch_where_they_differ_and_every_answer_is_recorded() -> None:
    async with serving(lambda prompt: f"answer {len(prompt)}") as proxy:
        handle = await proxy.open()
        async with proxy.sdk(handle) as sdk:
            answer = await sdk.completions.create(model="m", prompt=["one"], n=2, logprobs=0, seed=5, max_tokens=50)
            assert [choice.index for choice in answer.choices] == [0, 1]
            known = answer.choices[0].logprobs
            assert known is not None
            assert "".join(known.tokens or []) == answer.choices[0].text
            assert (known.text_offset or [])[0] == 0
            await sdk.completions.create(model="m", prompt="two", max_tokens=50)
        assert [request.sampling["seed"] for request in proxy.engine.requests[:2]] == [5, 6]
        result = await proxy.admin.close_session(handle.id)
        assert result.audit.is_clean
        assert (len(result.rows), result.drift) == (3, {"resampled": 1, "root_changed": 1})


async def test_parts_of_a_character_begin_where_it_does() -> None:
    async with serving(lambda prompt: "é🙂é", streams=True) as proxy:
        handle = await proxy.open()
        async with proxy.sdk(handle) as sdk:
            whole = await sdk.completions.create(model="m", prompt="one", logprobs=0, max_tokens=50)
            stream = await sdk.completions.create(model="m", prompt="two", logprobs=0, max_tokens=50, stream=True)
            parts = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices]
        known = whole.choices[0].logprobs
        assert known is not None
        assert known.text_offset == [0, 0, 1, 1, 1, 1, 2, 2]
        assert [offset for part in parts if part for offset in part.text_offset or []] == known.text_offset


async def test_a_chat_does_not_take_a_prompt_for_its_history() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        await proxy.post(handle, {"model": "m", "prompt": "hi"}, "/v1/completions")
        chat = await proxy.post(handle, {"model": "m", "messages": [{"role": "user", "content": "hi"}]})
        assert chat.headers["x-seamless-match"] == "fork"
        assert (await proxy.admin.close_session(handle.id)).audit.is_clean


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"n": 200}, "n"),
        ({"logit_bias": []}, "logit_bias"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_completion(json.dumps({"model": "m", "prompt": "hi", **change}).encode())
    assert (refused.value.status, refused.value.param) == (400, param)


async def test_ids_that_the_model_does_not_know_are_refused() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        answer = await proxy.post(handle, {"model": "m", "prompt": [10**6]}, "/v1/completions")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
