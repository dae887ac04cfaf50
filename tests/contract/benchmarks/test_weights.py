"""verl's own client in `benchmarks.weights`: the second that it sleeps is verl's, and it is spared it when told so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import weights

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(("is_slow", "slept"), [(True, 1), (False, 0)])
async def test_verls_client_sleeps_before_it_sends_again_only_in_its_own_turns(
    monkeypatch: pytest.MonkeyPatch, is_slow: bool, slept: int
) -> None:
    from omegaconf import OmegaConf
    from verl.workers.rollout import llm_server
    from verl.workers.rollout.replica import TokenOutput

    sent: list[list[int]] = []
    delays: list[float] = []

    async def attempt(self: Any, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        sent.append(prompt_ids)
        return TokenOutput(
            token_ids=[len(sent)], log_probs=[-0.5], stop_reason="completed" if len(sent) == 3 else "aborted"
        )

    async def sleep(delay_s: float) -> None:
        delays.append(delay_s)

    monkeypatch.setattr(llm_server, "asyncio", llm_server.asyncio)  # which is put in its place again
    monkeypatch.setattr(llm_server.LLMServerClient, "generate", attempt)
    monkeypatch.setattr(weights, "asyncio", SimpleNamespace(sleep=sleep))
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"response_length": 9}}})
    client, sleeper = weights.verls_client(config, None)
    sleeper.is_slow = is_slow
    output = await client.generate("r", prompt_ids=[7], sampling_params={"max_tokens": 9})
    assert sent == [[7], [7, 1], [7, 1, 2]]
    assert output.token_ids == [1, 2, 3]
    assert delays == [slept, slept]
