"""The token-in-token-out client under our trainer: resumes interrupted generations and keeps versions per token.

verl's ``FullyAsyncLLMServerClient`` keeps the lowest and highest weight version of an answer and sleeps a second
before each resumption. Here every call of a replica contributes a span ``(version, tokens)``, and what was interrupted
goes straight back: the replica holds it until its weights are new.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from ray.exceptions import RayActorError, RayError, RayTaskError
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from seamless_verl.config import SeamlessConfig
from seamless_verl.trajectory.generation import Decode, FinishReason, Generation, PartialGeneration, VersionSpan
from seamless_verl.verl_adapter.rollout.load_balancer import NONE_NEW_ENOUGH
from seamless_verl.verl_adapter.rollout.request_log import (
    PART,
    VERSION_SPANS,
    ReplicaCall,
    cut_groups,
    recorder_of_worker,
    request_log,
    this_worker,
)
from seamless_verl.verl_adapter.vllm.engine_cache import name_of_turn

OnKept = Callable[[Generation], None]
_ABORT_REASONS = ("aborted", "abort")
_ERROR_REASON = "error"
# By how often in a row a replica has refused outright: it is handed to the trainer, or verl's enable_switch registers
# it while it sleeps, which lasts until the standing ones have their weights.
_BACKOFFS_S = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0)
_RETRY_S = 0.5


class InParts:
    """A replica's handle whose ``generate`` tells what there is after every so many tokens.

    Args:
        every: tokens.
        take: given each part; the output in the end has all of them.
    """

    def __init__(self, server: Any, *, every: int, take: Callable[[TokenOutput], None]) -> None:
        self._server = server
        self._every = every
        self._take = take
        self.generate = self

    async def remote(self, **kwargs: Any) -> TokenOutput:
        """As the method of the replica's actor."""
        outputs = self._server.generate_in_parts.options(num_returns="streaming").remote(self._every, **kwargs)
        async for coming in outputs:
            output: TokenOutput = await coming
            if output.stop_reason != PART:
                return output
            self._take(output)
        raise RuntimeError("a replica ended an answer without its whole")


class VersionedLLMClient(FullyAsyncLLMServerClient):
    """Adds ``extra_fields["version_spans"]``: ``[(weight version, tokens), …]`` in generation order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asked: dict[int, asyncio.Future[None]] = {}  # floor -> tells when a replica serves it
        section = OmegaConf.select(self.config, "seamless")
        given: Any = OmegaConf.to_container(section, resolve=True) if section else None
        self._seamless = SeamlessConfig.from_mapping(given)
        # `adopt_config` always writes the section. Where it did not, servers may be verl's own, which know no parts.
        self._part_tokens = self._seamless.supervise.tokens_at_risk if section else 0

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        decode: Decode | None = None,
        begun: Generation | None = None,
        on_kept: OnKept | None = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Generate to the end, across any number of interruptions; see `PartialGeneration`.

        ``begun`` and ``on_kept`` are those of a `GenerationRequest`.
        ``sampling_params`` is not changed. A budget is always told: verl's server would otherwise derive a fresh one
        from the grown prompt. Without ``decode`` (token ids to text) stop strings are found within a call
        only, as under verl's own client.

        Raises:
            RuntimeError: the engine gave up on this request; what it had generated is no answer.
        """
        request_log.name(request_id)  # before it is placed: a session that ends first tells the router so
        prompt_ids = normalize_token_ids(prompt_ids)
        budget, params = self._with_budget(sampling_params, len(prompt_ids))
        partial = PartialGeneration(params, decode, moves_grammars=self._rollout("name") == "vllm")
        group = request_log.group_of(request_id)
        if self._oldest_first and not kwargs.get("priority"):  # verl's single_turn_agent says 0, which is none
            kwargs["priority"] = request_log.began_ms(request_id)
        merged = TokenOutput(token_ids=[], log_probs=[], num_preempted=0, stop_reason="aborted")
        is_complete = begun is not None and partial.begin(begun)
        if not is_complete and cut_groups.is_cut(group):
            is_complete = partial.cut_short()
        request_log.generated(request_id, _told(partial.generation().version_spans))
        refused = 0
        while not is_complete:
            num_kept = len(partial.token_ids)
            output = await self._call_replica(request_id, group, prompt_ids, partial, on_kept, **kwargs)
            if output is None:  # its replica died
                is_complete = partial.break_off()
            else:
                is_complete = partial.add(_generation(output))
                _merge(merged, output, len(partial.token_ids) - num_kept)
            request_log.generated(request_id, _told(partial.generation().after(num_kept).version_spans))
            if is_complete or (cut_groups.is_cut(group) and partial.cut_short()):
                break
            _tell(partial, on_kept)
            refused = refused + 1 if output is not None and not output.token_ids else 0
            await asyncio.sleep(_BACKOFFS_S[min(refused, len(_BACKOFFS_S) - 1)])
        return _output(merged, partial, request_log.newest(request_id), budget)

    async def _call_replica(
        self,
        request_id: str,
        group: str,
        prompt_ids: list[int],
        partial: PartialGeneration,
        on_kept: OnKept | None,
        **kwargs: Any,
    ) -> TokenOutput | None:
        """Generate on one replica, until it interrupts; None where it died.

        Raises:
            RuntimeError: as `generate`.
        """
        recorder = recorder_of_worker(self._seamless.run_dir)
        kept, asked = partial.token_ids, partial.sampling()
        call = ReplicaCall(recorder, request_id, prompt_tokens=len(prompt_ids) + len(kept), resumed=bool(kept))

        def take(output: TokenOutput) -> None:
            call.num_told += len(output.token_ids)
            partial.part(_generation(output))
            _tell(partial, on_kept)

        every = self._tokens_at_risk(is_journalled=on_kept is not None)
        if 0 < every < asked.get("max_tokens", every):
            call.in_parts = functools.partial(InParts, every=every, take=take)
        with self._freed(group, call), call.recorded():
            try:
                output: TokenOutput = await LLMServerClient.generate(
                    self, request_id=request_id, prompt_ids=prompt_ids + kept, sampling_params=asked, **kwargs
                )
            except RayError as error:
                if not self._outlives_replicas or not replica_died(error):
                    raise
                # What the dead replica had not handed over is lost, unseen by anybody, and is sampled afresh.
                await self._leave(call.address, error)
                return None
            call.answered(output)
        if output.stop_reason == _ERROR_REASON:
            raise RuntimeError(f"{call.address} gave up on a request with an error; its log tells which")
        return output

    def _with_budget(self, sampling_params: dict[str, Any], num_prompt: int) -> tuple[int | None, dict[str, Any]]:
        """The budget, and a copy that says ``max_tokens``, where one is known: what the prompt leaves of the engine's
        length at most, since verl's server refuses to go on with an answer that fills it."""
        params = dict(sampling_params)
        budget = params.pop("max_tokens", params.pop("max_new_tokens", None)) or self._configured_response_length()
        if budget is None:
            return None, params
        length = self._rollout("max_model_len")
        return budget, {**params, "max_tokens": min(budget, max(1, int(length) - num_prompt)) if length else budget}

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        extra["context_tokens"] = len(extra.get("prompt_ids", ()))  # a number travels, where the tokens need not
        call = ReplicaCall.current()
        if call is not None:  # named before it is placed, so that a balancer may name it, too
            turn = super()._vllm_request_id(request_id)  # under full_determinism it is what it was given
            call.engine_name = turn if turn == request_id else name_of_turn(request_id, turn)
            extra["engine_name"] = call.engine_name
            extra["worker"] = this_worker()
        floor = request_log.floor(request_id) if self._seamless.weights.sync == "rolling" else 0
        if floor:
            extra["floor"] = floor
        extra["group"], extra["session"] = request_log.group_of(request_id), request_log.session_of(request_id)
        while True:
            try:
                server_id, handle = await self._seat(request_id, **extra)
            except RuntimeError as error:
                # All replicas are with the trainer, or the last one died: the scheduler lends one, or ends the run.
                is_alone = self._outlives_replicas and "No available servers" in str(error)
                if not is_alone and NONE_NEW_ENOUGH not in str(error):
                    raise
                await self._someone_serves(floor)
                continue
            if call is None:
                return server_id, handle
            call.routed(server_id, handle)
            return server_id, call.in_parts(handle) if call.in_parts else handle

    async def _seat(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        """verl's acquire; where the caller is cancelled meanwhile, the seat is given back as soon as it is granted.

        Cancelling an await on a Ray call does not cancel the call: the balancer would count the seat for ever.
        """
        asked = asyncio.ensure_future(super()._acquire_server(request_id, **extra))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(functools.partial(self._give_back, request_id))
            raise

    def _give_back(self, request_id: str, asked: asyncio.Task[tuple[str, Any]]) -> None:
        if not asked.cancelled() and asked.exception() is None:
            server_id, _ = asked.result()
            self._release_server(server_id, request_id=request_id)

    def conversations_over(self, request_ids: list[str]) -> None:
        """Their session has ended: their caches, and the room that a router keeps for them, may go to others."""
        told = getattr(self._load_balancer, "conversations_over", None)
        if told is not None and request_ids:
            told.remote(request_ids)

    async def _someone_serves(self, floor: int = 0) -> None:
        """Wait until a replica serves requests with this floor, with one call for all of this process. Each call holds
        one of the 1,000 places that Ray gives the router; were all taken, nobody could tell it of a new replica."""
        told = getattr(self._load_balancer, "someone_serves", None)
        if told is None:  # a router of the user's own
            await asyncio.sleep(_RETRY_S)
            return
        if floor not in self._asked or self._asked[floor].done():
            self._asked = {of: asked for of, asked in self._asked.items() if not asked.done()}
            self._asked[floor] = asyncio.ensure_future(told.remote(floor))
        await asyncio.shield(self._asked[floor])

    def _rollout(self, key: str) -> str | None:
        value: str | None = OmegaConf.select(self.config, f"actor_rollout_ref.rollout.{key}")
        return value

    @property
    def _is_ours(self) -> bool:
        """Servers of ours can end a single request and hand answers over in parts; where prefill and decode are apart
        verl starts its own. The engine processes of both load our plug-in (`vllm_grammar`)."""
        return self._rollout("name") == "vllm" and not self._rollout("disaggregation.enabled")

    @property
    def _oldest_first(self) -> bool:
        """The engine's queue is ordered by when sessions began, also after an interruption and from turn to turn."""
        return self._seamless.router.oldest_first and self._rollout("scheduling_policy") == "priority"

    @property
    def _outlives_replicas(self) -> bool:
        """A scheduler that is told of a dead replica goes on without it; verl's own trainer cannot."""
        return self._seamless.scheduler.policy is not None

    def _tokens_at_risk(self, *, is_journalled: bool) -> int:
        """After how many tokens those of an answer leave their replica; 0: at its end.

        Nobody but a trainer that outlives replicas, or a journal, has a use for them before; and which experts made
        them is not known before.
        """
        is_useful = self._is_ours and (is_journalled or self._outlives_replicas)
        if not is_useful or self._rollout("enable_rollout_routing_replay"):
            return 0
        return self._part_tokens

    async def _leave(self, server: str | None, error: RayError) -> None:
        if server is not None:
            request_log.died(server, type(error).__name__)
            await self._load_balancer.remove_servers.remote([server])

    def _vllm_request_id(self, request_id: str) -> str:
        call = ReplicaCall.current()
        return super()._vllm_request_id(request_id) if call is None else call.engine_name

    @contextmanager
    def _freed(self, group: str, call: ReplicaCall) -> Iterator[None]:
        """Cancelling a call frees its replica, cutting its group ends it; verl leaves it generating for nobody."""

        def abort() -> None:
            if self._is_ours and call.server is not None and call.engine_name:
                call.server.abort_request.remote(call.engine_name, reset_prefix_cache=False)

        try:
            with cut_groups.running(group, abort):
                yield
        except asyncio.CancelledError:
            abort()
            raise


def replica_died(error: RayError) -> bool:
    """Whether the server's process is gone, or the engine process behind it (vLLM's ``EngineDeadError``)."""
    if isinstance(error, RayTaskError):
        return type(error.cause).__name__ == "EngineDeadError"
    return isinstance(error, RayActorError)


def _generation(output: TokenOutput) -> Generation:
    is_interrupted = output.stop_reason in _ABORT_REASONS
    num_tokens = len(output.token_ids)
    version: Any = output.extra_fields.get("global_steps")
    # A server that takes weights under its requests tells them itself; verl's tells the version at the end only.
    spans = output.extra_fields.get(VERSION_SPANS) or ([(version, num_tokens)] if num_tokens else [])
    return Generation(
        token_ids=output.token_ids,
        log_probs=output.log_probs or [],
        version_spans=tuple(VersionSpan(version=made_by, num_tokens=count) for made_by, count in spans),
        # verl reports "stop" and "length" alike as "completed".
        finish_reason=FinishReason.ABORTED if is_interrupted else FinishReason.STOP,
    )


def _merge(merged: TokenOutput, output: TokenOutput, num_kept: int) -> None:
    """What of a call is not tokens; ``num_kept`` of its tokens were taken over."""
    merged.stop_reason = output.stop_reason
    merged.num_preempted = (merged.num_preempted or 0) + (output.num_preempted or 0)
    merged.extra_fields["global_steps"] = output.extra_fields.get("global_steps")
    if merged.extra_fields.get("num_cached_tokens") is None:
        merged.extra_fields["num_cached_tokens"] = output.extra_fields.get("num_cached_tokens")
    if output.routed_experts is None or not num_kept:
        return
    dropped = len(output.token_ids) - num_kept
    routed = output.routed_experts[: len(output.routed_experts) - dropped]
    if merged.routed_experts is None:
        merged.routed_experts = routed
    else:
        merged.routed_experts = np.concatenate([merged.routed_experts, routed[-num_kept:]])


def _output(merged: TokenOutput, partial: PartialGeneration, newest: int, budget: int | None) -> TokenOutput:
    """``newest``: version in the session so far; verl's agent loops take over what the last turn says."""
    whole = partial.generation()
    merged.token_ids, merged.log_probs = list(whole.token_ids), list(whole.log_probs)
    if merged.stop_reason in _ABORT_REASONS:
        merged.stop_reason = "length" if whole.finish_reason is FinishReason.LENGTH else "completed"
    if budget is not None and len(merged.token_ids) >= budget:  # as verl's own client has it
        merged.stop_reason = "length"
    reported = merged.extra_fields.get("global_steps")
    versions = _told(whole.version_spans) or ([] if reported is None else [reported])
    merged.extra_fields.update(
        min_global_steps=min(versions, default=None),
        max_global_steps=max([*versions, newest]) if versions else None,
        version_spans=[(span.version, span.num_tokens) for span in whole.version_spans],
    )
    return merged


def _told(spans: Sequence[VersionSpan]) -> list[int]:
    """Versions, without those of servers that tell none."""
    return [span.version for span in spans if span.version is not None]


def _tell(partial: PartialGeneration, on_kept: OnKept | None) -> None:
    if on_kept is not None and (news := partial.news()) is not None:
        on_kept(news)
