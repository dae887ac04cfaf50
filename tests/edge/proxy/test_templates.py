"""Random conversations under templates with the difficulties of real model families, on a real tokenizer.

For each family three things hold, whatever is said: the tree hands the engine a prompt whose *text* is what the
template writes for these messages (up to thinking that the template drops and the model once generated); the answers
in it keep the very *tokens* that were generated; and a conversation that only grows is one row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.proxy.text.chat_template import TokenizerRenderer
from seamless_verl.proxy.text.steadiness import moving_note
from seamless_verl.trajectory.generation import FinishReason
from seamless_verl.trajectory.messages import Message, Role, ToolCall, transcript_of
from seamless_verl.trajectory.tokens import DriftReason, MatchKind
from tests.edge.proxy.test_rendering import HEADERS, MERGED_TOOLS, MOVING_TOOLS, PLAIN, THINKING
from tests.fakes import CHATML, ScriptedEdge, assistant, prepare_with, small_tokenizer, system, tool, user

# The generation prompt ends with an empty thought that the template never writes into history.
NO_THINKING = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
# No generation prompt at all; the answer begins with a space that merges with its first word.
INSTRUCT = (
    "{%- for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{%- elif m.role == 'tool' %}[RESULT] {{ m.content }} [/RESULT]"
    "{%- else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
# The system message, and with tools their list, stand in the last question only (Mistral v0.3).
MOVING_SYSTEM = (
    "{%- set system = messages[0].content if messages[0].role == 'system' %}"
    "{%- for m in (messages[1:] if system else messages) %}"
    "{%- if m.role == 'assistant' %} {{ m.content }}</s>"
    "{%- elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{%- else %}[INST]{% if loop.last and system %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]{% endif %}"
    "{%- endfor %}"
)
_THOUGHT = re.compile(r"<think>\n.*?</think>\n\n", re.DOTALL)


def _as_it_is(text: str) -> str:
    return text


def _without_thoughts(text: str) -> str:
    return _THOUGHT.sub("", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One template, how its model speaks, and what of a prompt's text the template itself would not have written.

    Attributes:
        spoken: an answer as generated, before the stop token.
        same: makes the prompt's text and the template's comparable.
        stops: tokens that the model may end an answer with.
    """

    template: str
    spoken: Callable[[Message], str] = lambda answer: answer.content
    same: Callable[[str], str] = _as_it_is
    special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")
    stops: tuple[str, ...] = ("<|im_end|>",)
    has_tools: bool = False
    thinks: bool = False


def _with_calls(answer: Message) -> str:
    return answer.content + "".join(f"<call>{call.name}</call>" for call in answer.tool_calls)


FAMILIES = {
    "chatml": Family(template=CHATML),
    "thinking is dropped from history, and opened by the prompt": Family(
        template=THINKING,
        spoken=lambda answer: f"{answer.reasoning}\n</think>\n\n{answer.content}",
        same=_without_thoughts,
        thinks=True,
    ),
    "the prompt ends with an empty thought": Family(template=NO_THINKING, same=_without_thoughts),
    "tool results are merged": Family(template=MERGED_TOOLS, spoken=_with_calls, has_tools=True),
    "the next header is the stop token": Family(
        template=HEADERS,
        special=("<|system|>", "<|assistant|>", "<|observation|>", "<|user|>"),
        stops=("<|observation|>", "<|user|>"),
        has_tools=True,
    ),
    "plain text, merged across the boundary": Family(
        template=PLAIN, special=("<eos>",), stops=("<eos>",), same=lambda text: text.replace("<eos>", "")
    ),
    "no generation prompt, a space before the answer": Family(
        template=INSTRUCT,
        spoken=lambda answer: f" {answer.content}",
        special=("[INST]", "[/INST]", "[RESULT]", "[/RESULT]", "</s>"),
        stops=("</s>",),
        has_tools=True,
    ),
}

WORD = st.sampled_from(["yes", "no", "hello", "the user", "name:", "1 2", "a\nb", "é", "fox\n\nthe", "x" * 9])
WORDS = st.lists(WORD, min_size=1, max_size=3).map(" ".join)
STEP = st.fixed_dictionaries(
    {
        "answer": WORDS,
        "reasoning": WORDS,
        "question": WORDS,
        "num_calls": st.integers(0, 3),
        "stop": st.integers(0, 3),
        "cut": st.booleans(),
        "keeps_reasoning": st.booleans(),
    }
)


class Conversation:
    """Talks under one family and checks each prompt."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.tokenizer = small_tokenizer(family.template, special=family.special)
        stops = [self.tokenizer.convert_tokens_to_ids(stop) for stop in family.stops]
        self.edge = ScriptedEdge(TokenizerRenderer(self.tokenizer, stop_token_ids=stops))
        self.history: list[Message] = [system("be good"), user("hi")]
        self.kinds: list[MatchKind] = []

    def turn(self, step: dict[str, Any]) -> None:
        pending = prepare_with(self.edge.tree, self.edge.renderer, transcript_of(tuple(self.history)))
        text = self.tokenizer.decode(list(pending.prompt_ids))
        self._check(text)
        answer, ids, finish = self._answer(step)
        record = self.edge.seal(pending, answer, ids=ids, finish=finish)
        turn = self.edge.tree.commit(record)
        assert set(turn.reasons) <= {DriftReason.REASONING_DROPPED, DriftReason.BOUNDARY_TRIMMED}, turn.turn.detail
        self.kinds.append(turn.kind)
        self._go_on(step, answer)

    def _check(self, text: str) -> None:
        plain = [Message(role=m.role, content=m.content, tool_calls=m.tool_calls) for m in self.history]
        raw = [{"role": m.role.value, "content": m.content, "tool_calls": _wire(m)} for m in plain]
        rendered = self.tokenizer.apply_chat_template(raw, tokenize=False, add_generation_prompt=True)
        assert self.family.same(text) == self.family.same(rendered)

    def _answer(self, step: dict[str, Any]) -> tuple[Message, list[int], FinishReason]:
        num_calls = step["num_calls"] if self.family.has_tools and self.family.spoken is _with_calls else 0
        calls = tuple(ToolCall(id=f"c{number}", name="look", arguments="{}") for number in range(num_calls))
        reasoning = step["reasoning"] if self.family.thinks else ""
        answer = assistant(step["answer"], *calls, reasoning=reasoning)
        ids = self.tokenizer.encode(self.family.spoken(answer), add_special_tokens=False)
        if step["cut"]:
            return answer, ids, FinishReason.LENGTH
        stop = self.family.stops[step["stop"] % len(self.family.stops)]
        return answer, [*ids, self.tokenizer.convert_tokens_to_ids(stop)], FinishReason.STOP

    def _go_on(self, step: dict[str, Any], answer: Message) -> None:
        kept = answer if step["keeps_reasoning"] else assistant(answer.content, *answer.tool_calls)
        results = [tool(step["question"], call.id) for call in answer.tool_calls]
        if self.family.has_tools and not results and step["num_calls"]:
            results = [tool(step["question"])]
        self.history += [kept, *(results or [user(step["question"])])]


def _wire(message: Message) -> list[dict[str, Any]]:
    return [{"function": {"name": call.name, "arguments": {}}} for call in message.tool_calls]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_that_grows_is_one_row_of_what_the_template_writes(name: str) -> None:
    family = FAMILIES[name]

    @settings(max_examples=25, deadline=None)
    @given(st.lists(STEP, min_size=2, max_size=5))
    def holds(steps: list[dict[str, Any]]) -> None:
        talk = Conversation(family)
        for step in steps:
            talk.turn(step)
        rows = talk.edge.rows()
        trained = sum(sum(row.mask) for row in rows)
        assert trained == sum(len(entry.token_ids) for entry in talk.edge.ledger)
        # A model that stopped with the wrong header leaves that stop token in a row of its own.
        assert len(rows) == 1 + talk.kinds.count(MatchKind.FORK)
        assert MatchKind.FORK not in talk.kinds or len(family.stops) > 1

    holds()


@settings(max_examples=25, deadline=None)
@given(st.lists(STEP, min_size=2, max_size=4))
def test_a_template_that_rewrites_history_forks_and_loses_nothing(steps: list[dict[str, Any]]) -> None:
    tools = ('{"type": "function", "function": {"name": "t"}}',)
    tokenizer = small_tokenizer(MOVING_TOOLS)
    edge = ScriptedEdge(TokenizerRenderer(tokenizer))
    history: list[Message] = [user("hi")]
    for number, step in enumerate(steps):
        pending = prepare_with(edge.tree, edge.renderer, transcript_of(tuple(history), tools))
        raw = [{"role": message.role.value, "content": message.content} for message in history]
        rendered = tokenizer.apply_chat_template(raw, tools=[{}], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(list(pending.prompt_ids)) == rendered
        ids = [*tokenizer.encode(step["answer"], add_special_tokens=False), tokenizer.eos_token_id]
        turn = edge.tree.commit(edge.seal(pending, step["answer"], ids=ids))
        assert (turn.kind is MatchKind.FORK) == (number > 0)
        history += [assistant(step["answer"]), user(step["question"])]
    rows = edge.rows()
    assert len(rows) == len(steps)
    assert edge.tree.drift == {DriftReason.TEMPLATE_MISMATCH: len(steps) - 1}


# With tools, their list stands in the last question only, answered or not (Mistral v0.3).
MOVING_LIST = (
    "{%- set questions = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %} {{ m.content }}</s>"
    "{%- else %}{% if tools and m == questions[-1] %}[TOOLS]{{ tools | tojson }}{% endif %}[INST]{{ m.content }}[/INST]"
    "{%- endif %}{%- endfor %}"
)
REFUSES_SYSTEM = (
    "{%- if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{%- for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{%- if add_generation_prompt %}assistant: {% endif %}"
)
COUNTING = (
    "{{ messages | length }} messages"
    "{%- for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{%- if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        *((family.template, "") for family in FAMILIES.values()),
        (REFUSES_SYSTEM, ""),
        (MOVING_SYSTEM, "writes conversations with a system message anew"),
        (MOVING_LIST, "writes conversations with tools anew"),
        (COUNTING, "writes every conversation anew"),
    ],
)
def test_what_a_template_moves_is_told_before_anybody_asks(template: str, told: str) -> None:
    special = ("[INST]", "[/INST]", "<|im_start|>", "<|im_end|>", "</s>", "<eos>")
    note = moving_note(TokenizerRenderer(small_tokenizer(template, special=special)))
    assert told in note
    assert bool(told) == bool(note)


@settings(max_examples=25, deadline=None)
@given(st.lists(STEP, min_size=2, max_size=4), st.booleans())
def test_a_template_that_moves_the_system_message_forks_where_there_is_one(
    steps: list[dict[str, Any]], has_system: bool
) -> None:
    """Each prompt is what the template writes, with the system message once; what it leaves out is not recorded."""
    tokenizer = small_tokenizer(MOVING_SYSTEM, special=("[INST]", "[/INST]", "[RESULT]", "[/RESULT]", "</s>"))
    edge = ScriptedEdge(TokenizerRenderer(tokenizer))
    history: list[Message] = [*([system("be good")] if has_system else []), user("hi")]
    for number, step in enumerate(steps):
        pending = prepare_with(edge.tree, edge.renderer, transcript_of(tuple(history)))
        raw = [{"role": message.role.value, "content": message.content} for message in history]
        rendered = tokenizer.apply_chat_template(raw, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(list(pending.prompt_ids)) == rendered
        ids = [*tokenizer.encode(f" {step['answer']}", add_special_tokens=False), tokenizer.eos_token_id]
        turn = edge.tree.commit(edge.seal(pending, step["answer"], ids=ids))
        if has_system and number:
            assert turn.reasons == (DriftReason.TEMPLATE_MISMATCH,)
            assert "writes a question differently" in turn.turn.detail
        else:
            assert turn.kind is MatchKind.CLEAN
        # Behind a tool's result it stands nowhere, and the prompt after that one goes on from it, token by token.
        assert (turn.kind is MatchKind.FORK) == (has_system and number > 0 and history[-3].role is not Role.TOOL)
        follows = tool(step["question"]) if step["num_calls"] == 1 else user(step["question"])
        history += [assistant(step["answer"]), follows]
    assert len(edge.rows()) == 1 + edge.tree.kinds.get(MatchKind.FORK, 0)
