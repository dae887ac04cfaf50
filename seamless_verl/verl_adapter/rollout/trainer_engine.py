"""The proxy's engine under the trainer: verl's balanced, resuming client behind the proxy's protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayError, RayTaskError
from verl.workers.rollout.llm_server import LLMServerClient

from seamless_verl.proxy.engine import Ability, EngineRefused, EngineUnavailable, GenerationRequest
from seamless_verl.proxy.text.pictures import open_image
from seamless_verl.trajectory.generation import Decode, FinishReason, Generation, VersionSpan


def abilities_of(engine: str) -> frozenset[Ability]:
    """What a rollout engine of verl's (``rollout.name``) can do for agents, beyond plain generation.

    verl's servers tell the log-prob of the chosen token only, and answer as a whole: no alternatives, no streaming.
    They hand sampling parameters on as they are, so a constraint has to be written in the engine's own words: vLLM's.
    """
    return frozenset({Ability.STRUCTURED_OUTPUTS}) if engine == "vllm" else frozenset()


class VerlEngine:
    """An `Engine` over `VersionedLLMClient`: interrupted generations continue, every token knows its version.

    Args:
        client: as verl hands it to agent loops.
        decode: token ids to text.
        max_model_len: prompt and answer together, in tokens.
        stop_token_ids: ids that end an answer.
        processor_args: of the model's processor, as the trainer calls it (``data.mm_processor_kwargs``).
    """

    def __init__(
        self,
        client: LLMServerClient,
        *,
        decode: Decode,
        max_model_len: int,
        stop_token_ids: frozenset[int],
        processor_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._client = client
        self._processor_args = dict(processor_args or {})
        self._decode = decode
        self._max_model_len = max_model_len
        self._stop_token_ids = stop_token_ids

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `Engine.generate`; ``request.session_id`` keeps a session on one replica for its prefix cache."""
        prompt_ids = list(request.prompt_ids)
        params: dict[str, Any] = {**request.sampling, "logprobs": True, "repetition_penalty": 1.0}
        if "structured_outputs" in params:
            params["structured_outputs"] = _constraint(params["structured_outputs"])
        shown: dict[str, Any] = {}
        if request.images:
            pictures = await asyncio.to_thread(lambda: [open_image(data) for data in request.images])
            shown = {"image_data": pictures, "mm_processor_kwargs": self._processor_args}
        try:
            output = await self._client.generate(
                request_id=request.session_id,
                prompt_ids=prompt_ids,
                sampling_params=params,
                decode=self._decode,
                resume_from=request.resume_from,
                on_progress=request.on_progress,
                **shown,
            )
        except RayTaskError as error:
            if isinstance(error.cause, _client_errors()):
                raise EngineRefused(str(error.cause)[:500]) from error
            raise EngineUnavailable(f"{type(error).__name__}: {error}") from error
        except (RayError, RuntimeError) as error:
            raise EngineUnavailable(f"{type(error).__name__}: {error}") from error
        room = min(int(request.sampling["max_tokens"]), self._max_model_len - len(prompt_ids))
        stopped = bool(output.token_ids) and output.token_ids[-1] in self._stop_token_ids
        # verl reports "stop" and "length" alike as "completed"; "length" is ours, of an answer that was cut short.
        short = len(output.token_ids) < room and output.stop_reason != "length"
        finish = FinishReason.STOP if stopped or short else FinishReason.LENGTH
        return Generation(
            token_ids=output.token_ids,
            log_probs=output.log_probs or [],
            version_spans=tuple(
                VersionSpan(version=version, num_tokens=tokens)
                for version, tokens in output.extra_fields["version_spans"]
            ),
            finish_reason=finish,
        )


def _constraint(structured_outputs: dict[str, Any]) -> Any:
    try:
        from vllm.sampling_params import StructuredOutputsParams
    except ImportError as error:
        raise EngineRefused("constrained decoding is written for vLLM, which is not installed here") from error
    try:
        return StructuredOutputsParams(**structured_outputs)
    except _client_errors() as error:
        raise EngineRefused(str(error)[:500]) from error


def _client_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises for parameters that it will never take: ValueError, since 0.26 an error of its own."""
    try:
        from vllm import exceptions
    except ImportError:
        return (TypeError, ValueError)
    return (TypeError, ValueError, getattr(exceptions, "VLLMClientError", ValueError))
