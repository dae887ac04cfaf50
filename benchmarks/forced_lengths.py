"""A workload whose answers have prescribed lengths: verl's single-turn agent loop, told when to stop by its data row.

Every system under comparison then generates the same number of tokens for the same prompts, whatever it samples. Rows
carry our stamp, so the trainer audits them: an answer that was interrupted must come back whole.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from seamless_verl.recipes.arithmetic import assets
from seamless_verl.recipes.arithmetic.reward import compute_score
from seamless_verl.verl_adapter.rollout.verl_samples import ROW_FIELD, RowStamp, row_digest

NAME = "forced_length"


class ForcedLengthAgentLoop(SingleTurnAgentLoop):
    """``extra_info["lengths"]`` has a length in tokens for each session of the prompt."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        lengths = kwargs["extra_info"]["lengths"]
        length = int(lengths[int(kwargs.get("session_id", 0)) % len(lengths)])
        output = await super().run({**sampling_params, "max_tokens": length, "ignore_eos": True}, **kwargs)
        spans = output.extra_fields.get("version_spans")
        if spans is not None:  # verl's own client does not tell
            whole = len(output.response_ids) == length == sum(tokens for _, tokens in spans)
            output.extra_fields[ROW_FIELD] = RowStamp(
                digest=row_digest(
                    output.prompt_ids, output.response_ids, output.response_mask, output.response_logprobs
                ),
                violations=int(not whole),
                version_spans=spans,
                cut_off=False,  # the length stands for where an answer ends by itself
            )
        return output


GRADED = "graded_forced_length"


class GradedForcedLengthAgentLoop(ForcedLengthAgentLoop):
    """What an answer says up to its end mark is graded and trained; the tokens behind it only take their time."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        ids = output.response_ids
        end = ids.index(self.tokenizer.eos_token_id) + 1 if self.tokenizer.eos_token_id in ids else len(ids)
        output.response_mask = [1] * end + [0] * (len(ids) - end)
        answer = self.tokenizer.decode(ids[:end], skip_special_tokens=True)
        output.reward_score = compute_score("", answer, kwargs["reward_model"]["ground_truth"])
        output.extra_fields["reward_extra_info"] = {}
        if stamp := output.extra_fields.get(ROW_FIELD):  # none under verl's own trainers
            stamp["digest"] = row_digest(output.prompt_ids, ids, output.response_mask, output.response_logprobs)
        return output


def write_graded(folder: Path, *, prompts: int, sessions: int, longest: int, seed: int, shots: int = 0) -> Path:
    """The arithmetic recipe's own training prompts with skewed lengths, and the agent loop; returns the data file.

    Args:
        shots: sums with their answers before each prompt's own, some thirty tokens each.
    """
    import pandas as pd

    rng = random.Random(seed)
    rows = pd.read_parquet(assets.build() / "train.parquet").to_dict("records")
    rows = [dict(rows[number % len(rows)]) for number in range(prompts)]
    for index, row in enumerate(rows):
        lengths = [skewed(rng, longest) for _ in range(sessions)]
        row["prompt"] = [message for _ in range(shots) for message in _solved(rng)] + [*row["prompt"]]
        row |= {"agent_name": GRADED, "extra_info": {"index": index, "split": "train", "lengths": lengths}}
    file = folder / "graded.parquet"
    pd.DataFrame(rows).to_parquet(file)
    target = f"{GradedForcedLengthAgentLoop.__module__}.{GradedForcedLengthAgentLoop.__name__}"
    (folder / "agent_loops.yaml").write_text(f"- name: {GRADED}\n  _target_: {target}\n")
    return file


def _solved(rng: random.Random) -> list[dict[str, str]]:
    a, b = rng.randint(0, 19), rng.randint(0, 19)
    said = (("user", f"{a:>2}+{b:>2}"), ("assistant", f"{a + b:>2}"))
    return [{"role": role, "content": content} for role, content in said]


def skewed(rng: random.Random, longest: int) -> int:
    """Log-normal: most answers are short, a few reach the limit."""
    return max(8, min(longest, round(rng.lognormvariate(4.2, 0.9))))


def write_workload(folder: Path, *, lengths: str, prompts: int, sessions: int, longest: int, seed: int = 0) -> Path:
    """Data and agent loop for a run; returns the data file.

    Args:
        lengths: ``skewed``, or ``constant`` with the same mean.
    """
    import pandas as pd

    rng = random.Random(seed)
    drawn = [[skewed(rng, longest) for _ in range(sessions)] for _ in range(prompts)]
    if lengths == "constant":
        mean = round(sum(map(sum, drawn)) / (prompts * sessions))
        drawn = [[mean] * sessions for _ in drawn]
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": f"{rng.randint(0, 19):>2}+{rng.randint(0, 19):>2}"}],
            "agent_name": NAME,
            "reward_model": {"style": "rule", "ground_truth": str(index % 7)},
            "extra_info": {"index": index, "split": "train", "lengths": each},
        }
        for index, each in enumerate(drawn)
    ]
    file = folder / f"{lengths}.parquet"
    pd.DataFrame(rows).to_parquet(file)
    (folder / "agent_loops.yaml").write_text(
        f"- name: {NAME}\n  _target_: benchmarks.forced_lengths.ForcedLengthAgentLoop\n"
    )
    return file
