"""Rows as verl's samples and batches, held against verl's own post-processing of the same rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopWorker

from seamless_verl.trajectory.generation import FinishReason
from seamless_verl.trajectory.rows import Row
from seamless_verl.verl_adapter.rollout.padded_rows import ROW_FIELD, row_digest, row_to_output, rows_to_dataproto
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


@pytest.mark.parametrize("rewards", [[1.0, 0.0, -0.5], None])
def test_a_batch_is_what_verl_would_make_of_the_same_rows(rows: tuple[Row, ...], rewards: list[float] | None) -> None:
    theirs = _verls_own(rows, [None] * 3 if rewards is None else list(rewards))
    ours = rows_to_dataproto(
        rows,
        prompt_length=PROMPT,
        response_length=RESPONSE,
        pad_token_id=_tokenizer().pad_token_id,
        rewards=rewards,
    )
    assert set(ours.batch.keys()) == set(theirs.batch.keys())
    assert ("rm_scores" in set(ours.batch.keys())) == (rewards is not None)
    for name in list(ours.batch.keys()):
        assert ours.batch[name].dtype == theirs.batch[name].dtype, name
        assert torch.equal(ours.batch[name], theirs.batch[name]), name
    for name, values in ours.non_tensor_batch.items():
        assert np.array_equal(values, theirs.non_tensor_batch[name]), name
        assert values.dtype == theirs.non_tensor_batch[name].dtype, name
    assert int(ours.batch["response_mask"].sum()) == sum(row.num_trained for row in rows)


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


def test_what_does_not_fit_is_named(rows: tuple[Row, ...]) -> None:
    with pytest.raises(ValueError, match=r"row 0 has \d+ prompt and \d+ response tokens; the batch has room for 2 and"):
        rows_to_dataproto(rows, prompt_length=2, response_length=RESPONSE, pad_token_id=0)
    with pytest.raises(ValueError, match="one reward per row"):
        rows_to_dataproto(rows, prompt_length=PROMPT, response_length=RESPONSE, pad_token_id=0, rewards=[1.0])
    with pytest.raises(ValueError, match="at least one row"):
        rows_to_dataproto([], prompt_length=PROMPT, response_length=RESPONSE, pad_token_id=0)
