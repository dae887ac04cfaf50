"""The parsers of the installed vLLM behind the proxy's protocol."""

from __future__ import annotations

import asyncio
import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import FastAPI, Request, Response

from seamless_verl.errors import ConfigError
from seamless_verl.proxy.calls import Call, ToolChoice
from seamless_verl.proxy.client import ProxyAdmin
from seamless_verl.proxy.deploy.http_server import ProxyServer
from seamless_verl.proxy.deploy.standalone import StandaloneConfig, serve
from seamless_verl.proxy.session.sessions import SessionSpec
from seamless_verl.proxy.text.parsing import TagParser, structured_outputs
from seamless_verl.run.check_references import registered_parsers
from tests.fakes import CHATML, small_tokenizer
from tests.standalone import save_tokenizer

pytest.importorskip("vllm")
from seamless_verl.verl_adapter.vllm.vllm_parsers import VllmParser, make_parser, parser_of

SPECIAL = ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|im_end|>")
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        },
    }
]
HERMES = 'I look. <tool_call>\n{"name": "run", "arguments": {"n": 3}}\n</tool_call>'
CODER = "I look.\n<tool_call>\n<function=run>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"


def _tokenizer() -> Any:
    return small_tokenizer(CHATML, special=SPECIAL)


@pytest.mark.parametrize(("name", "text"), [("hermes", HERMES), ("qwen3_coder", CODER)])
@pytest.mark.parametrize("reasoning", [None, "qwen3", "deepseek_r1"])
def test_calls_and_reasoning_of_several_families(name: str, text: str, reasoning: str | None) -> None:
    parser = VllmParser(_tokenizer(), name, reasoning)
    whole = text if reasoning is None else f"<think>\nhm\n</think>\n\n{text}"
    said = parser.parse(whole, TOOLS, thinking=False, call_prefix="call_x_")
    (call,) = said.tool_calls
    assert (call.id, call.name, json.loads(call.arguments)) == ("call_x_0", "run", {"n": 3})
    assert (said.content, said.reasoning) == ("I look.", "hm" if reasoning else "")
    settler = parser.settler(TOOLS, thinking=False)
    shown = [settler.feed(character) for character in whole]
    assert said.reasoning.startswith("".join(part for part, _ in shown))
    assert said.content.startswith("".join(part for _, part in shown))


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", None])
def test_a_call_that_nobody_can_write_stays_content(name: str | None) -> None:
    half = r"\ud83d"
    text = f'so <tool_call>\n{{"name": "run", "arguments": {{"n": "{half}"}}}}\n</tool_call>'
    said = VllmParser(_tokenizer(), name, None).parse(text, TOOLS, thinking=False, call_prefix="c")
    assert (said.content, said.tool_calls) == (text, ())


def test_reasoning_that_the_prompt_opened() -> None:
    parser = VllmParser(_tokenizer(), None, "qwen3")
    assert parser.think_tags == ("<think>", "</think>")
    said = parser.parse("hm\n</think>\n\nyes", (), thinking=True, call_prefix="c")
    assert (said.reasoning, said.content) == ("hm", "yes")
    settler = parser.settler((), thinking=True)
    assert [settler.feed(part) for part in ("hm, ", "so", "</think>", "\nyes")] == [
        ("hm,", ""),
        (" so", ""),
        ("", ""),
        ("", "yes"),
    ]


def test_without_an_opening_tag_nothing_is_shown_early() -> None:
    parser = VllmParser(_tokenizer(), None, "deepseek_r1")
    settler = parser.settler((), thinking=False)
    assert [settler.feed(part) for part in ("who knows", "</think>", "yes")] == [("", "")] * 3
    said = parser.parse("who knows</think>yes", (), thinking=False, call_prefix="c")
    assert (said.reasoning, said.content) == ("who knows", "yes")


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_required_calls_as_vllm_describes_them(name: str) -> None:
    xgrammar: Any = pytest.importorskip("xgrammar")
    call = Call(model="m", raw_tools=TOOLS, sampling={}, tool_choice=ToolChoice.REQUIRED)
    parser = VllmParser(_tokenizer(), name, None)
    constraint = structured_outputs(call, parser, thinking=False)
    assert constraint is not None
    grammar = xgrammar.Grammar.from_structural_tag(constraint["structural_tag"])
    text = (HERMES if name == "hermes" else CODER).removeprefix("I look.").strip()
    assert xgrammar.testing._is_grammar_accept_string(grammar, text)
    assert not xgrammar.testing._is_grammar_accept_string(grammar, "hello")
    said = parser.parse(text, TOOLS, thinking=False, call_prefix="c")
    assert [known.name for known in said.tool_calls] == ["run"]


def test_what_is_configured_wrongly_is_named() -> None:
    assert isinstance(make_parser(_tokenizer(), None, None), TagParser)
    with pytest.raises(ConfigError, match=r"seamless\.proxy\.tool_parser=nobody: vLLM has no such parser"):
        make_parser(_tokenizer(), "nobody", None)
    with pytest.raises(ConfigError, match=r"seamless\.proxy\.reasoning_parser=deepseek_r1: does not fit the tokenizer"):
        make_parser(small_tokenizer(), None, "deepseek_r1")


@pytest.mark.parametrize(
    ("package", "manager"), [("tool_parsers", "ToolParserManager"), ("reasoning", "ReasoningParserManager")]
)
def test_the_names_that_are_checked_before_the_start_are_vllms(package: str, manager: str) -> None:
    module = importlib.import_module(f"vllm.{package}")
    assert set(registered_parsers(Path(str(module.__file__)))) == set(getattr(module, manager).list_registered())


class Qwen:
    """Stands at the wire of a vLLM server: thinks, calls a tool, and ends once it has seen the tool's output."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.app = FastAPI()
        self.app.router.add_route("/v1/models", self._models)
        self.app.router.add_route("/v1/completions", self._complete, methods=["POST"])

    async def _models(self, request: Request) -> Response:
        return Response('{"data": [{"id": "tiny", "max_model_len": 4096}]}', media_type="application/json")

    async def _complete(self, request: Request) -> Response:
        prompt = self._tokenizer.decode((await request.json())["prompt"])
        text = "done" if "<|im_start|>tool" in prompt else f"<think>\nhm\n</think>\n\n{CODER}"
        ids = [*self._tokenizer.encode(text), self._tokenizer.eos_token_id]
        names = [f"token_id:{token}" for token in ids]
        told = {"tokens": names, "token_logprobs": [-0.5] * len(ids)}
        body = {"choices": [{"text": text, "finish_reason": "stop", "logprobs": told}]}
        return Response(json.dumps(body), media_type="application/json")


async def test_the_stand_alone_proxy_understands_other_families_than_hermes(tmp_path: Path) -> None:
    tokenizer = _tokenizer()
    folder = save_tokenizer(tmp_path / "model", tokenizer)
    with pytest.raises(ConfigError, match="--tool-parser=nobody: vLLM has no such parser"):
        parser_of(str(folder), tool_parser="nobody", reasoning_parser=None)
    vllm = ProxyServer(Qwen(tokenizer).app, drain_s=1)
    config = StandaloneConfig(
        engine=await vllm.start(),
        model="tiny",
        tokenizer=str(folder),
        record=None,
        host="127.0.0.1",
        port=0,
        admin_key="admin-key",
        parser=partial(parser_of, tool_parser="qwen3_coder", reasoning_parser="qwen3"),
    )
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(config, stop=stop, ready=ready.set_result))
    admin = ProxyAdmin((await ready).base_url, "admin-key")
    handle = await admin.open_session(SessionSpec())
    async with openai.AsyncOpenAI(base_url=handle.base_url, api_key=handle.api_key) as agent:
        history: list[Any] = [{"role": "user", "content": "hi"}]
        said = (await agent.chat.completions.create(model="m", messages=history, tools=TOOLS)).choices[0].message
        (call,) = said.tool_calls or []
        assert (said.content, call.function.name, json.loads(call.function.arguments)) == ("I look.", "run", {"n": 3})
        assert said.model_dump()["reasoning_content"] == "hm"
        history += [said.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "out"}]
        last = await agent.chat.completions.create(model="m", messages=history, tools=TOOLS)
        assert last.choices[0].message.content == "done"
    result = await admin.close_session(handle.id)
    assert (result.kinds, result.audit.is_clean, len(result.rows)) == ({"clean": 2}, True, 1)
    await admin.close()
    stop.set()
    await serving
    await vllm.stop()
