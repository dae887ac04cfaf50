"""Rows on their way into verl: as padded batches, and with a stamp by which what is trained can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.model import compute_position_id_with_mask

from seamless_verl.proxy.text.pictures import open_image
from seamless_verl.trajectory.generation import FinishReason
from seamless_verl.trajectory.rows import Row

ROW_FIELD = "seamless"


class RowStamp(TypedDict):
    """``extra_fields["seamless"]`` of a row.

    Attributes:
        digest: `row_digest` of the row as it left the proxy.
        violations: what the proxy's audit of the session against the engine's record found; 0 is the only good value.
        version_spans: ``(weight version, policy tokens)`` along the row.
        cut_off: whether an answer that the row trains ended by length: of its turn, its session's budget, or as a
            straggler that was cut short.
    """

    digest: str
    violations: int
    version_spans: list[tuple[int, int]]
    cut_off: bool


def row_digest(prompt_ids: Any, response_ids: Any, response_mask: Any, log_probs: Any) -> str:
    """Digest of a row's tokens, mask and float32 log-probs; any sequence or CPU tensor will do."""
    digest = hashlib.blake2b(digest_size=16)
    for values, kind in ((prompt_ids, np.int64), (response_ids, np.int64), (response_mask, np.int64)):
        array = np.asarray(values, dtype=kind)
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(array.tobytes())
    digest.update(np.asarray(log_probs, dtype=np.float32).tobytes())
    return digest.hexdigest()


def row_to_output(
    row: Row,
    *,
    reward: float | None,
    metrics: AgentLoopMetrics,
    extra_fields: Mapping[str, Any],
    violations: int,
    images: Mapping[str, bytes],
) -> AgentLoopOutput:
    """One row as verl's V1 path takes it.

    Args:
        extra_fields: further fields of the sample; versions and stamp are added.
        violations: of the audit of the row's session.
        images: files of the row's pictures, by digest; verl computes the model's inputs from them.
    """
    prompt_ids, response_ids = row.token_ids[: row.prompt_len], row.token_ids[row.prompt_len :]
    mask, log_probs = row.mask[row.prompt_len :], row.log_probs[row.prompt_len :]
    versions = [span.version for span in row.version_spans]
    stamp = RowStamp(
        digest=row_digest(prompt_ids, response_ids, mask, log_probs),
        violations=violations,
        version_spans=[(span.version, span.stop - span.start) for span in row.version_spans],
        cut_off=any(turn.trained and turn.finish_reason is FinishReason.LENGTH for turn in row.turns),
    )
    return AgentLoopOutput(
        prompt_ids=list(prompt_ids),
        response_ids=list(response_ids),
        response_mask=list(mask),
        response_logprobs=list(log_probs),
        multi_modal_data={"images": [open_image(images[digest]) for digest in row.images]} if row.images else None,
        reward_score=reward,
        num_turns=len(row.turns),
        metrics=metrics,
        extra_fields={
            **extra_fields,
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            ROW_FIELD: stamp,
            "turn_scores": [],
            "tool_rewards": [],
        },
    )


def rows_to_dataproto(
    rows: Sequence[Row],
    *,
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
    rewards: Sequence[float] | None = None,
) -> DataProto:
    """Rows as the padded batch that verl's legacy path and its loss functions take.

    Args:
        rows: of any number of sessions; one entry of the batch per row.
        prompt_length, response_length: widths of the two halves, in tokens; prompts are padded on the left.
        rewards: one per row, placed on the row's last token as ``rm_scores``; None leaves that field out.

    Returns:
        ``prompts`` [n, prompt_length]; ``responses``, ``response_mask``, ``rollout_log_probs``, ``rm_scores``
        [n, response_length]; ``input_ids``, ``attention_mask``, ``position_ids`` [n, prompt_length + response_length];
        ``__num_turns__``, ``min_global_steps``, ``max_global_steps`` beside them. The same values as
        `AgentLoopWorker._postprocess` of verl 0.9.1 makes of the same rows (held by a contract test).

    Raises:
        ValueError: no rows, a row that does not fit or has pictures (their inputs need the model's processor:
            `row_to_output`), or another number of rewards. Nothing is cut silently.
    """
    if not rows or (rewards is not None and len(rewards) != len(rows)):
        raise ValueError(f"{len(rows)} rows and {len(rewards or ())} rewards: at least one row, one reward per row")
    ids, seen, mask, log_probs, scores = [], [], [], [], []
    for number, row in enumerate(rows):
        num_prompt, num_response = _sizes(number, row, prompt_length, response_length)
        before, after = prompt_length - num_prompt, response_length - num_response
        ids.append([pad_token_id] * before + [*row.token_ids] + [pad_token_id] * after)
        seen.append([0] * before + [1] * len(row.token_ids) + [0] * after)
        mask.append([*row.mask[num_prompt:]] + [0] * after)
        log_probs.append([*row.log_probs[num_prompt:]] + [0.0] * after)
        scores.append([0.0] * (num_response - 1) + [rewards[number] if rewards else 0.0] + [0.0] * after)
    input_ids, attention = torch.tensor(ids), torch.tensor(seen)
    tensors = {
        "prompts": input_ids[:, :prompt_length],
        "responses": input_ids[:, prompt_length:],
        "response_mask": torch.tensor(mask, dtype=torch.int64),
        "input_ids": input_ids,
        "attention_mask": attention,
        "position_ids": compute_position_id_with_mask(attention),
        "rollout_log_probs": torch.tensor(log_probs, dtype=torch.float32),
        **({} if rewards is None else {"rm_scores": torch.tensor(scores, dtype=torch.float32)}),
    }
    batch: DataProto = DataProto.from_dict(tensors=tensors, non_tensors=_beside(rows))
    return batch


def _beside(rows: Sequence[Row]) -> dict[str, Any]:
    """What a batch has of its rows beside tensors."""
    versions = [[span.version for span in row.version_spans] for row in rows]
    return {
        "__num_turns__": np.array([len(row.turns) for row in rows], dtype=np.int32),
        "min_global_steps": np.array([min(found) for found in versions], dtype=object),
        "max_global_steps": np.array([max(found) for found in versions], dtype=object),
    }


def _sizes(number: int, row: Row, prompt_length: int, response_length: int) -> tuple[int, int]:
    """Tokens of a row's prompt and response.

    Raises:
        ValueError: see `rows_to_dataproto`.
    """
    num_prompt, num_response = row.prompt_len, len(row.token_ids) - row.prompt_len
    if row.images:
        raise ValueError(f"row {number} has {len(row.images)} pictures, which a batch of tokens cannot carry")
    if num_prompt > prompt_length or num_response > response_length:
        raise ValueError(
            f"row {number} has {num_prompt} prompt and {num_response} response tokens; "
            f"the batch has room for {prompt_length} and {response_length}"
        )
    return num_prompt, num_response
