"""The token-in-token-out client under our trainer: resumes interrupted generations and keeps versions per token.

verl's ``FullyAsyncLLMServerClient`` keeps the lowest and highest weight version of an answer and sleeps a second
before each resumption. Here every attempt contributes a span ``(version, tokens)``, and an interrupted attempt goes
straight back: the replica holds it until its weights are new.
"""

from __future__ import annotations

import asyncio
from typing import Any

from omegaconf import OmegaConf
from ray.exceptions import RayActorError, RayError, RayTaskError
from verl.utils import normalize_token_ids
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from seamless_verl.verl_adapter.attempts import RecordedAttempt, recorder_of_process
from seamless_verl.verl_adapter.request_log import request_log

_INTERRUPTED = ("aborted", "abort")
# Only reached when a replica refuses outright (it is being handed to the trainer and already off the balancer).
_REFUSED_BACKOFF_S = 0.05
_NOBODY_SERVES_S = 0.5


class VersionedLLMClient(FullyAsyncLLMServerClient):
    """Adds ``extra_fields["version_spans"]``: ``[(weight version, tokens), …]`` in generation order."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Generate to the end, across any number of interruptions (SeamlessFlow 1.1, partial rollout).

        ``sampling_params`` is not changed. The token budget is counted over all attempts: verl's server would
        otherwise derive a fresh one from the grown prompt. An answer that must follow a grammar starts anew after an
        interruption: vLLM's grammar always begins at the first token that it generates itself.
        """
        prompt_ids = normalize_token_ids(prompt_ids)
        params = dict(sampling_params)
        budget = params.pop("max_tokens", params.pop("max_new_tokens", None)) or self._configured_response_length()
        merged = TokenOutput(token_ids=[], log_probs=[], num_preempted=0)
        spans: list[tuple[int, int]] = []
        cached_tokens: int | None = None
        while True:
            attempt_params = dict(params)
            if budget is not None:
                attempt_params["max_tokens"] = budget - len(merged.token_ids)
            with self._recorded(
                request_id, len(prompt_ids) + len(merged.token_ids), resumed=bool(merged.token_ids)
            ) as attempt:
                try:
                    output = await LLMServerClient.generate(
                        self,
                        request_id=request_id,
                        prompt_ids=prompt_ids + merged.token_ids,
                        sampling_params=attempt_params,
                        **kwargs,
                    )
                except RayError as error:
                    if not self._outlives_replicas or not replica_died(error):
                        raise
                    # What the dead replica had not handed over is lost, unseen by anybody, and is sampled afresh.
                    await self._leave(attempt.server, error)
                    continue
                attempt.answered(output)
            version = output.extra_fields.get("global_steps")
            if "structured_outputs" in params and output.stop_reason in _INTERRUPTED:
                output.token_ids, output.log_probs, output.routed_experts = [], None, None
            _append(merged, output)
            if output.token_ids:
                spans = _extended(spans, version, len(output.token_ids))
            if cached_tokens is None:
                cached_tokens = output.extra_fields.get("num_cached_tokens")
            if budget is not None and len(merged.token_ids) >= budget:
                if output.stop_reason in _INTERRUPTED:
                    merged.stop_reason = "length"
                break
            if output.stop_reason not in _INTERRUPTED:
                break
            if not output.token_ids:
                await asyncio.sleep(_REFUSED_BACKOFF_S)
        versions = [span[0] for span in spans] or [version]
        merged.extra_fields.update(
            global_steps=version,
            min_global_steps=versions[0],
            max_global_steps=versions[-1],
            num_cached_tokens=cached_tokens,
            version_spans=spans,
        )
        return merged

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        while True:
            try:
                server_id, handle = await super()._acquire_server(request_id, **extra)
            except RuntimeError as error:
                if not self._outlives_replicas or "No available servers" not in str(error):
                    raise
                # The last replica died; the scheduler lends another, or refuses and ends the run.
                await asyncio.sleep(_NOBODY_SERVES_S)
                continue
            RecordedAttempt.routed(server_id)
            return server_id, handle

    @property
    def _outlives_replicas(self) -> bool:
        """A scheduler that is told of a dead replica goes on without it; verl's own trainer cannot."""
        return OmegaConf.select(self.config, "seamless.scheduler.policy") is not None

    async def _leave(self, server: str | None, error: RayError) -> None:
        if server is not None:
            request_log.died(server, type(error).__name__)
            await self._load_balancer.remove_servers.remote([server])

    def _recorded(self, request_id: str, prompt_tokens: int, *, resumed: bool) -> RecordedAttempt:
        recorder = recorder_of_process(OmegaConf.select(self.config, "seamless.run_dir"), "rollout")
        return RecordedAttempt(recorder, request_id, prompt_tokens=prompt_tokens, resumed=resumed)


def replica_died(error: RayError) -> bool:
    """Whether the server's process is gone, or the engine process behind it (vLLM's ``EngineDeadError``)."""
    if isinstance(error, RayTaskError):
        return type(error.cause).__name__ == "EngineDeadError"
    return isinstance(error, RayActorError)


def _append(merged: TokenOutput, output: TokenOutput) -> None:
    merged.token_ids.extend(output.token_ids)
    if output.log_probs is not None:
        merged.log_probs.extend(output.log_probs)
    if output.num_preempted is not None:
        merged.num_preempted += output.num_preempted
    if output.routed_experts is not None and output.token_ids:
        if merged.routed_experts is None:
            merged.routed_experts = output.routed_experts
        else:
            import numpy as np

            new = output.routed_experts[-len(output.token_ids) :]
            merged.routed_experts = np.concatenate([merged.routed_experts, new])
    merged.stop_reason = output.stop_reason


def _extended(spans: list[tuple[int, int]], version: int, tokens: int) -> list[tuple[int, int]]:
    if spans and spans[-1][0] == version:
        return [*spans[:-1], (version, spans[-1][1] + tokens)]
    return [*spans, (version, tokens)]
