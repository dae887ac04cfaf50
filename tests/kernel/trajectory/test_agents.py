"""Random agents against the tree: whatever they do, rows are what the engine said, each token trained once."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from seamless_verl.trajectory.messages import Message, ToolCall, transcript_of
from seamless_verl.trajectory.rows import Row, build_rows
from seamless_verl.trajectory.tokens import MatchKind, TurnRecord
from seamless_verl.trajectory.tree import SessionTree
from tests.fakes import ScriptedEdge, ScriptedRenderer, assistant, prepare_with, system, tool, user

WORDS = ("yes", "no", "maybe later", "look", "")
SPELLINGS = ("as_is", "arguments", "whitespace", "reasoning", "ids", "rewritten")
small = st.integers(0, 7)

STEP = st.fixed_dictionaries(
    {
        "move": st.sampled_from(
            ["extend", "extend", "extend", "rewind", "resample", "sub_agent", "compact", "abandon", "tools", "mismatch"]
        ),
        "history": small,
        "words": st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
        "spelling": st.sampled_from(SPELLINGS),
        "answer": st.tuples(st.sampled_from(WORDS), st.sampled_from(("", "since")), st.booleans()),
        "number": small,
        "twice": st.booleans(),
    }
)
STEPS = st.lists(STEP, min_size=1, max_size=14)


class RandomAgent:
    """Remembers every history it has seen and continues any of them, in any spelling."""

    def __init__(self) -> None:
        self.edge = ScriptedEdge()
        self.histories: list[tuple[list[Message], tuple[str, ...]]] = []
        self.records: list[TurnRecord] = []
        self.kinds: dict[MatchKind, int] = {}

    def step(self, step: dict) -> None:  # type: ignore[type-arg]
        messages, tools = self._request(step)
        pending = prepare_with(self.edge.tree, self.edge.renderer, transcript_of(tuple(messages), tools))
        self._renderer.refuses = False
        words, reasoning, calls = step["answer"]
        call = ToolCall(id=f"c{len(self.records)}", name="run", arguments='{"n": 1.0, "a": "x"}')
        answer = assistant(words, *([call] if calls else []), reasoning=reasoning)
        ids = self._renderer.answer_ids(f"{reasoning} {words} w{step['number']}")
        for _ in range(1 + step["twice"]):  # two samples of one request may say the same
            record = self.edge.seal(pending, answer, ids=ids)
            if step["move"] == "abandon":
                self.edge.ledger[-1] = replace(self.edge.ledger[-1], discarded="client left")
                continue
            turn = self.edge.tree.commit(record)
            assert bool(turn.reasons) == (turn.kind is not MatchKind.CLEAN)
            self.records.append(record)
            self.kinds[turn.kind] = self.kinds.get(turn.kind, 0) + 1
            self.histories.append(([*messages, answer], tools))

    @property
    def _renderer(self) -> ScriptedRenderer:
        assert isinstance(self.edge.renderer, ScriptedRenderer)
        return self.edge.renderer

    def _request(self, step: dict) -> tuple[list[Message], tuple[str, ...]]:  # type: ignore[type-arg]
        news: list[Message] = [user(word) for word in step["words"]]
        if not self.histories or step["move"] == "sub_agent":
            return [system(f"agent {step['number'] % 2}"), *news], ()
        history, tools = self.histories[step["history"] % len(self.histories)]
        if step["move"] == "compact":
            return [history[0], user("summary"), *news], tools
        if step["move"] == "resample":
            return history[:-1], tools
        if step["move"] == "rewind":
            history = history[: 2 + step["number"] % len(history)]
        if step["move"] == "tools":
            tools = (json.dumps({"name": f"t{step['number'] % 2}"}),)
        self._renderer.refuses = step["move"] == "mismatch"
        spelled = [_respell(message, step["spelling"]) for message in history]
        return [*spelled, *([tool("out")] if history[-1].tool_calls else []), *news], tools


def _respell(message: Message, spelling: str) -> Message:
    if message.role.value != "assistant":
        return message
    calls = message.tool_calls
    if spelling == "arguments":
        return replace(message, tool_calls=tuple(replace(call, arguments='{"a":"x","n":1}') for call in calls))
    if spelling == "ids":
        return replace(message, tool_calls=tuple(replace(call, id="other") for call in calls))
    if spelling == "whitespace":
        return replace(message, content=f" {message.content}\n")
    if spelling == "reasoning":
        return replace(message, reasoning="")
    return replace(message, content="forged") if spelling == "rewritten" else message


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_any_agent_leaves_clean_rows(steps: list[dict]) -> None:  # type: ignore[type-arg]
    agent = RandomAgent()
    for step in steps:
        agent.step(step)
    rows = agent.edge.rows()
    answers = [entry for entry in agent.edge.ledger if not entry.discarded]
    assert sum(sum(row.mask) for row in rows) == sum(len(entry.token_ids) for entry in answers)
    assert agent.edge.tree.num_turns == len(answers) == sum(agent.kinds.values())
    assert agent.edge.tree.num_stored_tokens <= sum(len(row.token_ids) for row in rows)
    assert sum(agent.edge.tree.drift.values()) >= agent.kinds.get(MatchKind.FORK, 0)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_a_restored_tree_is_the_same_tree(steps: list[dict]) -> None:  # type: ignore[type-arg]
    agent = RandomAgent()
    for step in steps:
        agent.step(step)
    restored = SessionTree()
    for record in agent.records:
        restored.commit(record)
    assert build_rows(restored) == build_rows(agent.edge.tree)
    assert (restored.kinds, restored.drift) == (agent.edge.tree.kinds, agent.edge.tree.drift)
    assert restored.num_stored_tokens == agent.edge.tree.num_stored_tokens


@settings(max_examples=300, deadline=None)
@given(STEPS, st.data())
def test_a_tree_has_the_same_rows_in_whatever_order_its_turns_were_committed(
    steps: list[dict],  # type: ignore[type-arg]
    data: st.DataObject,
) -> None:
    agent = RandomAgent()
    for step in steps:
        agent.step(step)
    other, waiting = SessionTree(), list(agent.records)
    while waiting:
        ready = [at for at, record in enumerate(waiting) if not record.anchor or other.has(record.anchor)]
        other.commit(waiting.pop(data.draw(st.sampled_from(ready))))
    assert build_rows(other) == build_rows(agent.edge.tree)
    assert other.num_stored_tokens == agent.edge.tree.num_stored_tokens


@settings(max_examples=150, deadline=None)
@given(STEPS, st.lists(small, max_size=4), st.data())
def test_the_engine_is_sent_the_very_ids_that_were_asked_for(
    steps: list[dict],  # type: ignore[type-arg]
    more: list[int],
    data: st.DataObject,
) -> None:
    agent = RandomAgent()
    for step in steps:
        agent.step(step)
    known = data.draw(st.sampled_from([row.token_ids for row in agent.edge.rows()] or [(5,)]))
    ids = [*known[: data.draw(st.integers(0, len(known)))], *more, 1]
    pending = agent.edge.tree.prepare_ids(transcript_of((user("ids"),)), ids)
    assert list(pending.prompt_ids) == ids
    assert [*pending.anchor.path.without(pending.num_cut), *pending.context_ids] == ids


BRANCH = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(("yes", "no no", "go"))), min_size=1, max_size=4)


def _play(branches: list[list[tuple[str, str]]], order: list[int]) -> list[Row]:
    """Parallel branches off one answer, their turns committed in the given order."""
    renderer = ScriptedRenderer()
    for word in ["s", "start", "begin", "a", "b", "c", "yes", "no", "go"]:
        renderer.word(word)  # the vocabulary is older than the session
    edge = ScriptedEdge(renderer)
    edge.ask([system("s"), user("start")], "begin")
    histories = [[system("s"), user("start"), assistant("begin")] for _ in branches]
    progress = [0] * len(branches)
    for number in order:
        question, answer = branches[number][progress[number]]
        progress[number] += 1
        edge.ask([*histories[number], user(question)], answer)
        histories[number] += [user(question), assistant(answer)]
    unnamed = [tuple(structs.replace(turn, generation_id="") for turn in row.turns) for row in edge.rows()]
    return [structs.replace(row, turns=turns) for row, turns in zip(edge.rows(), unnamed, strict=True)]


@settings(max_examples=200, deadline=None)
@given(st.lists(BRANCH, min_size=2, max_size=4), st.data())
def test_the_order_of_parallel_branches_does_not_change_the_rows(
    branches: list[list[tuple[str, str]]], data: st.DataObject
) -> None:
    in_turn = [number for number, branch in enumerate(branches) for _ in branch]
    other_order = data.draw(st.permutations(in_turn))
    assert _play(branches, in_turn) == _play(branches, other_order)


def test_tokens_of_a_long_linear_session_are_stored_once() -> None:
    edge = ScriptedEdge()
    history: list[Message] = [system("s"), user("start")]
    for number in range(200):
        edge.ask(history, f"answer {number}")
        history += [assistant(f"answer {number}"), user(f"go {number}")]
    (row,) = edge.rows()
    assert edge.tree.num_stored_tokens == len(row.token_ids)
