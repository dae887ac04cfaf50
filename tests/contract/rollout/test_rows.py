"""Rows as verl's samples: what verl's own post-processing makes of them is the rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopWorker

from seamless_verl.trajectory.generation import FinishReason
from seamless_verl.trajectory.rows import Row
from seamless_verl.verl_adapter.rollout.verl_samples import ROW_FIELD, row_digest, row_to_output
from seamless_verl.verl_adapter.trainer.batches import interpolation_weights
from tests.fakes import ScriptedEdge, assistant, small_tokenizer, system, user

PROMPT, RESPONSE = 12, 40


@pytest.fixture
def rows() -> tuple[Row, ...]:
    """Three rows of one session: a conversation, a branch off its first answer, another agent."""
    edge = ScriptedEdge()
    start = [system("s"), user("hi there")]
    edge.ask(start, "first answer")
    edge.ask([*start, assistant("first answer"), user("go on")], "second")
    edge.ask([*start, assistant("first answer"), user("or not")], "third longer answer")
    edge.ask([user("alone")], "x")
    found = edge.rows()
    assert len(found) == 3
    assert {row.num_trained for row in found} != {0}
    return found


def _tokenizer() -> Any:
    tokenizer = small_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _verls_own(rows: tuple[Row, ...], rewards: list[float | None]) -> Any:
    """The batch that verl's worker makes; only what needs a running cluster is left out of the worker."""
    worker = object.__new__(AgentLoopWorker)
    worker.tokenizer = _tokenizer()
    worker.processor = None
    worker.rollout_config = SimpleNamespace(prompt_length=PROMPT, response_length=RESPONSE)
    worker.reward_loop_worker_handles = None
    worker.distillation_enabled = False
    worker.mm_processor_kwargs = {}

    async def finish() -> Any:
        outputs = [
            await worker._agent_loop_postprocess(
                row_to_output(row, reward=reward, metrics=AgentLoopMetrics(), extra_fields={}, violations=0, images={}),
                validate=False,
                raw_prompt=[],
            )
            for row, reward in zip(rows, rewards, strict=True)
        ]
        return worker._postprocess(outputs)

    import asyncio

    return asyncio.run(finish())


@pytest.mark.parametrize("rewards", [[1.0, 0.0, -0.5], [None] * 3])
def test_what_verl_makes_of_our_samples_is_the_rows(rows: tuple[Row, ...], rewards: list[float | None]) -> None:
    batch = _verls_own(rows, rewards)
    assert ("rm_scores" in set(batch.batch.keys())) == (rewards[0] is not None)
    for number, (row, reward) in enumerate(zip(rows, rewards, strict=True)):
        seen = batch.batch["attention_mask"][number].bool()
        said = slice(0, len(row.token_ids) - row.prompt_len)
        assert batch.batch["input_ids"][number][seen].tolist() == list(row.token_ids)
        assert batch.batch["prompts"][number][-row.prompt_len :].tolist() == list(row.token_ids[: row.prompt_len])
        assert batch.batch["response_mask"][number][said].tolist() == list(row.mask[row.prompt_len :])
        log_probs = torch.tensor(row.log_probs[row.prompt_len :], dtype=torch.float32)
        assert torch.equal(batch.batch["rollout_log_probs"][number][said], log_probs)
        if reward is not None:
            assert batch.batch["rm_scores"][number].nonzero().flatten().tolist() == [said.stop - 1] * bool(reward)
        assert batch.non_tensor_batch["min_global_steps"][number] == min(span.version for span in row.version_spans)
    assert int(batch.batch["response_mask"].sum()) == sum(row.num_trained for row in rows)


def test_a_sample_carries_its_versions_and_a_stamp_of_what_left_the_proxy(rows: tuple[Row, ...]) -> None:
    row = rows[0]
    output = row_to_output(
        row, reward=1.0, metrics=AgentLoopMetrics(), extra_fields={"drift": {}}, violations=2, images={}
    )
    assert (*output.prompt_ids, *output.response_ids) == row.token_ids
    assert output.response_mask == list(row.mask[row.prompt_len :])
    assert sum(output.response_mask) == row.num_trained
    stamp = output.extra_fields[ROW_FIELD]
    assert stamp["violations"] == 2
    changed = [*output.response_ids[:-1], output.response_ids[-1] + 1]
    rest = (output.response_mask, output.response_logprobs)
    assert row_digest(output.prompt_ids, output.response_ids, *rest) == stamp["digest"]
    assert row_digest(output.prompt_ids, changed, *rest) != stamp["digest"]


def test_the_stamp_says_whether_an_answer_that_the_row_trains_was_cut_off() -> None:
    edge = ScriptedEdge()
    start = [user("hi there")]
    edge.ask(start, "cut", finish=FinishReason.LENGTH)
    edge.ask([*start, assistant("cut"), user("go on")], "a longer second answer")
    edge.ask([*start, assistant("cut"), user("or not")], "third")
    edge.ask([user("alone")], "x")
    outputs = [
        row_to_output(row, reward=1.0, metrics=AgentLoopMetrics(), extra_fields={}, violations=0, images={})
        for row in edge.rows()
    ]
    # The first row has most tokens and trains the answer that it shares with the second.
    assert [output.extra_fields[ROW_FIELD]["cut_off"] for output in outputs] == [True, False, False]


def test_each_trained_token_has_the_lag_of_the_weights_that_made_it_behind_an_answer_that_another_row_trains() -> None:
    edge = ScriptedEdge()
    start = [user("hi there")]
    edge.ask(start, "one")
    edge.ask([*start, assistant("one"), user("go on")], "two three four")
    edge.ask([*start, assistant("one"), user("or not")], "five six")
    told = {
        entry.generation_id: [span.version for span in entry.version_spans for _ in range(span.num_tokens)]
        for entry in edge.ledger
    }
    rows = edge.rows()
    assert any(not turn.trained for row in rows for turn in row.turns), "else nothing is shared"
    assert len({version for versions in told.values() for version in versions}) > 1
    for row in rows:
        output = row_to_output(row, reward=1.0, metrics=AgentLoopMetrics(), extra_fields={}, violations=0, images={})
        expected = [1.0] * len(output.response_ids)
        for turn in row.turns:
            if turn.trained:
                at = slice(turn.start - row.prompt_len, turn.stop - row.prompt_len)
                expected[at] = [1 / (9 - version) for version in told[turn.generation_id]]
        stamp, tag = output.extra_fields[ROW_FIELD], {"min_global_steps": output.extra_fields["min_global_steps"]}
        weights = interpolation_weights(torch.tensor(output.response_mask), tag, stamp["made_by"], version=9)
        assert weights.tolist() == pytest.approx(expected)
