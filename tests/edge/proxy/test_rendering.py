"""The renderer on a real tokenizer, against templates with the difficulties of real model families."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.proxy.text.chat_template import RenderingFailed, TokenizerRenderer
from seamless_verl.proxy.text.tokenizer import FolderTokenizer
from seamless_verl.trajectory.generation import FinishReason
from seamless_verl.trajectory.messages import Message, ToolCall
from seamless_verl.trajectory.tokens import DriftReason, MatchKind
from tests.fakes import CHATML, ScriptedEdge, assistant, small_tokenizer, system, tool, user

# Thinking is dropped from every answer before the last question; the generation prompt opens the thinking.
THINKING = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Tool results in a row become one user message.
MERGED_TOOLS = (
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{%- if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user\n{% endif %}"
    "<result>{{ m.content }}</result>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}<|im_end|>\n{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# No closing: the model stops with the header of the next role.
HEADERS = (
    "{%- for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Plain text: the byte-level merges reach across the boundary, and a stop token the template does not know.
PLAIN = (
    "{%- for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{%- if add_generation_prompt %}assistant: {% endif %}"
)
# The tool list moves in front of the last question: history is rewritten on every turn.
MOVING_TOOLS = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}{% if tools and loop.index0 == ns.last %}[TOOLS]{{ tools | length }}[/TOOLS]{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _edge(template: str, **options: Any) -> tuple[ScriptedEdge, Any]:
    tokenizer = small_tokenizer(template, **options.pop("tokenizer", {}))
    return ScriptedEdge(TokenizerRenderer(tokenizer, **options)), tokenizer


def _say(
    edge: ScriptedEdge, tokenizer: Any, messages: list[Message], text: str, answer: Message, **options: Any
) -> Any:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return edge.ask(messages, answer, ids=ids, **options)


@pytest.mark.parametrize("template", [CHATML, MERGED_TOOLS])
def test_where_a_template_is_plain_the_prompt_grows_as_it_would_be_rendered(template: str) -> None:
    edge, tokenizer = _edge(template)
    history: list[Message] = [system("be good"), user("hi")]
    for number in range(3):
        turn = _say(edge, tokenizer, history, f"answer {number}<|im_end|>", assistant(f"answer {number}"))
        assert turn.kind is MatchKind.CLEAN
        history += [assistant(f"answer {number}"), user(f"more {number}")]
    (row,) = edge.rows()
    afresh = edge.renderer.render_initial(history[:-1], ())
    opening = len(tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False))
    newline = len(tokenizer.encode("\n", add_special_tokens=False))
    assert list(row.token_ids) == list(afresh)[: -opening - newline]


def test_thinking_dropped_by_the_template_stays_where_it_was_generated() -> None:
    edge, tokenizer = _edge(THINKING)
    spoken = "a reason\n</think>\n\nyes<|im_end|>"
    _say(edge, tokenizer, [user("hi")], spoken, assistant("yes", reasoning="a reason"))
    turn = _say(edge, tokenizer, [user("hi"), assistant("yes"), user("go")], "ok<|im_end|>", assistant("ok"))
    assert (turn.kind, turn.reasons) == (MatchKind.REALIGN, (DriftReason.REASONING_DROPPED,))
    (row,) = edge.rows()
    text = tokenizer.decode(row.token_ids)
    assert text == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n" + spoken + "\n"
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n<think>\nok<|im_end|>"
    )


def test_tool_results_in_a_row_are_merged_as_the_template_does() -> None:
    edge, tokenizer = _edge(MERGED_TOOLS)
    calls = tuple(ToolCall(id=f"c{n}", name="look", arguments="{}") for n in range(2))
    spoken = "<call>look</call><call>look</call><|im_end|>"
    _say(edge, tokenizer, [user("hi")], spoken, assistant("", *calls))
    history = [user("hi"), assistant("", *calls), tool("one", "c0"), tool("two", "c1")]
    assert _say(edge, tokenizer, history, "fine<|im_end|>", assistant("fine")).kind is MatchKind.CLEAN
    (row,) = edge.rows()
    merged = "\n<|im_start|>user\n<result>one</result><result>two</result><|im_end|>\n<|im_start|>assistant\nfine"
    assert merged in tokenizer.decode(row.token_ids)


@pytest.mark.parametrize(
    ("stop", "follows", "kind"), [("user", user("go"), "clean"), ("observation", user("go"), "fork")]
)
def test_a_stop_token_that_is_the_next_header_is_written_once(stop: str, follows: Message, kind: str) -> None:
    special = ("<|assistant|>", "<|observation|>", "<|user|>")
    edge, tokenizer = _edge(HEADERS, tokenizer={"special": special}, stop_token_ids=(1, 2))
    _say(edge, tokenizer, [user("hi")], f"yes<|{stop}|>", assistant("yes"))
    turn = _say(edge, tokenizer, [user("hi"), assistant("yes"), follows], "ok<|user|>", assistant("ok"))
    assert turn.kind.value == kind
    text = tokenizer.decode(edge.rows()[0].token_ids)
    assert text == "<|user|>\nhi<|assistant|>\nyes<|user|>\ngo<|assistant|>\nok<|user|>"


def test_text_templates_keep_the_generated_ids_where_merges_would_change_them() -> None:
    edge, tokenizer = _edge(PLAIN, tokenizer={"special": ("<eos>",)})
    ids = [*tokenizer.encode("yes\n", add_special_tokens=False), tokenizer.eos_token_id]
    edge.ask([user("hi")], assistant("yes"), ids=ids)
    edge.ask([user("hi"), assistant("yes"), user("go")], assistant("ok"), ids=ids)
    (row,) = edge.rows()
    assert list(row.token_ids[row.turns[0].start : row.turns[0].stop]) == ids


def test_an_answer_cut_by_length_is_closed() -> None:
    edge, tokenizer = _edge(CHATML)
    _say(edge, tokenizer, [user("hi")], "and so", assistant("and so"), finish=FinishReason.LENGTH)
    _say(edge, tokenizer, [user("hi"), assistant("and so"), user("on")], "ok<|im_end|>", assistant("ok"))
    (row,) = edge.rows()
    assert "and so<|im_end|>\n<|im_start|>user\non" in tokenizer.decode(row.token_ids)


def test_a_template_that_rewrites_history_is_not_trusted() -> None:
    edge, tokenizer = _edge(MOVING_TOOLS)
    tools = ('{"type": "function", "function": {"name": "t"}}',)
    _say(edge, tokenizer, [user("hi")], "yes<|im_end|>", assistant("yes"), tools=tools)
    history = [user("hi"), assistant("yes"), user("go")]
    turn = _say(edge, tokenizer, history, "ok<|im_end|>", assistant("ok"), tools=tools)
    assert (turn.kind, turn.reasons) == (MatchKind.FORK, (DriftReason.TEMPLATE_MISMATCH,))
    assert "before an earlier answer" in turn.turn.detail
    assert len(edge.rows()) == 2


def test_a_template_that_refuses_says_so() -> None:
    renderer = TokenizerRenderer(small_tokenizer("{{ raise_exception('no such role') }}"))
    with pytest.raises(RenderingFailed, match="no such role"):
        renderer.render_initial([user("hi")], ())


@pytest.mark.parametrize("opened", ["by transformers", "from its folder"])
def test_a_tokenizer_that_was_saved_while_it_cut_and_filled_texts_does_neither(opened: str, tmp_path: Path) -> None:
    tokenizer, plain = deepcopy(small_tokenizer()), TokenizerRenderer(small_tokenizer())
    tokenizer.backend_tokenizer.enable_truncation(max_length=8)
    tokenizer.backend_tokenizer.enable_padding(pad_to_multiple_of=64)
    tokenizer.save_pretrained(tmp_path)
    assert '"max_length": 8' in (tmp_path / "tokenizer.json").read_text()
    renderer = TokenizerRenderer(tokenizer if opened == "by transformers" else FolderTokenizer(tmp_path))
    text = "<|im_start|>user\n" + 20 * "the quick brown fox " + "é<|im_end|>\n"
    assert list(renderer.encode(text)) == list(plain.encode(text))
    assert renderer.encode_prompt(text) == plain.encode_prompt(text)
    assert renderer.render_initial([user(text)], []) == plain.render_initial([user(text)], [])
    assert tokenizer.backend_tokenizer.truncation is not None, "it is somebody else's, too"
