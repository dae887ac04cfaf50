"""Rows on their way into verl, with a stamp by which what is trained can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from seamless_verl.proxy.text.pictures import open_image
from seamless_verl.trajectory.generation import FinishReason
from seamless_verl.trajectory.rows import Row

ROW_FIELD = "seamless"


class RowStamp(TypedDict):
    """``extra_fields["seamless"]`` of a row.

    Attributes:
        digest: `row_digest` of the row as it left the proxy.
        violations: what the proxy's audit of the session against the engine's record found; 0 is the only good value.
        made_by: ``(start, stop, weight version)`` of all generated tokens among the response's, also of those that the
            row does not train.
        cut_off: whether an answer that the row trains ended by length: of its turn, its session's budget, or as a
            straggler that was cut short.
    """

    digest: str
    violations: int
    made_by: list[tuple[int, int, int]]
    cut_off: bool


def stamps(extra_fields: Any) -> list[Mapping[str, Any]]:
    """The `RowStamp` of every row; empty for rows of verl's own agent loops."""
    infos = extra_fields.tolist() if hasattr(extra_fields, "tolist") else extra_fields
    return [(info or {}).get(ROW_FIELD) or {} for info in infos]


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
        made_by=[
            (span.start - len(prompt_ids), span.stop - len(prompt_ids), span.version) for span in row.version_spans
        ],
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
