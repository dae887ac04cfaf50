"""vLLM's server under our trainer: interrupts do not wait for queued requests, and a single request can be ended.

Before verl 0.9.1 interrupts a server (new weights, a replica handed back), it waits until no request is half-way into
the engine, and counts a request as half-way until its first token. A request that queues for a seat has none, so every
interrupt lasts as long as the queue: seconds in each step of a busy replica (up to verl's limit of 60). Here a request
counts until the engine has it, from where a pause reaches it. Remove when verl counts like that.

With several engine cores (``data_parallel_size``) verl's count stays. There the first request after a rest also starts
the other cores, through a coordinator; should that start come in after a pause has ended, the coordinator takes the
cores to be running for good and the next drain times out (verl #7511). A first token proves that the start is over.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any

import ray
from cachetools import LRUCache
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from seamless_verl.decode_cost import EnginePace, EngineStep, measured_pace
from seamless_verl.errors import SeamlessError
from seamless_verl.staleness.routing import EngineLoad
from seamless_verl.verl_adapter.cpu.cpu_device import name_device
from seamless_verl.verl_adapter.rollout.request_log import FIRST_TOKEN, PART, VERSION_SPANS
from seamless_verl.verl_adapter.vllm import engine_cache
from seamless_verl.verl_adapter.vllm.engine_death import EngineNotStarted

_PLUGINS = "VLLM_PLUGINS"
_DEVICES = {RolloutMode.HYBRID: "trainer", RolloutMode.STANDALONE: "standing"}
_LATEST_STEPS = 2048
_MOST_REQUESTS = 10_000
_MOST_ENDED = 10_000  # names remembered, of requests that were ended before the engine had them


def load_plug_in(environment: MutableMapping[str, str]) -> None:
    """Grammars of interrupted answers need ours in the engine's process (`vllm_grammar`), whatever a user lists."""
    listed = environment.get(_PLUGINS)
    if listed is not None and "seamless_verl" not in listed.split(","):
        environment[_PLUGINS] = f"{listed},seamless_verl"


class EngineSteps:
    """How long an engine's steps take; stands around ``process_outputs`` of its output processor (vLLM 0.24 to 0.27).

    Steps come with the time at which the engine's process had done them; the tokens of one may come in several calls.
    What passes while the engine has no requests is no step's time.

    Attributes:
        latest: of the last steps, the newest last.
        first_tokens: request, by the name that it came with -> when its first token was there (monotonic clock).
    """

    def __init__(self, processor: Any) -> None:
        self.latest: deque[EngineStep] = deque(maxlen=_LATEST_STEPS)
        self.first_tokens: LRUCache[str, float] = LRUCache(maxsize=_MOST_REQUESTS)
        self._at = 0.0  # when the step was done whose tokens come
        self._after: float | None = None  # when the one before it was; None: there were no requests
        self._running = self._num_first = self._prefilled = self._cached = 0
        self._busy = False
        self._processor = processor
        self._process = processor.process_outputs
        processor.process_outputs = self._noted

    def _noted(self, outputs: Any, timestamp: float | None = None, *args: Any, **kwargs: Any) -> Any:
        if timestamp is None or not outputs:
            return self._process(outputs, timestamp, *args, **kwargs)
        if timestamp != self._at:
            self._end_step()
            self._after, self._at = self._at if self._busy else None, timestamp
        for output in outputs:
            state = self._processor.request_states.get(output.request_id)
            if output.new_token_ids:
                self._running += 1
                self._cached += state.prompt_len + state.detokenizer.num_output_tokens() if state else 0
            if output.prefill_stats is not None:
                if state:
                    self.first_tokens[state.external_req_id] = time.monotonic()
                self._num_first += 1
                self._prefilled += output.prefill_stats.num_computed_tokens
        done = self._process(outputs, timestamp, *args, **kwargs)
        self._busy = bool(self._processor.request_states)
        return done

    def _end_step(self) -> None:
        if self._after is not None and self._running:
            seconds = self._at - self._after
            self.latest.append(EngineStep(seconds, self._running, self._num_first, self._prefilled, self._cached))
        self._running = self._num_first = self._prefilled = self._cached = 0


class _Parts:
    """Tokens of one request, told in parts while it runs.

    Args:
        spans: weight versions of those between two places.
    """

    def __init__(self, every: int, spans: Callable[[int, int], list[tuple[int, int]]]) -> None:
        self._every = every
        self._spans = spans
        self._num_told = 0
        self.waiting: asyncio.Queue[TokenOutput | None] = asyncio.Queue()

    async def noted(self, outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Hands the engine's outputs on, each of which has all tokens so far; looks at them."""
        async for output in outputs:
            if not output.finished and output.outputs:
                self._look(output.outputs[0])
            yield output

    def _look(self, so_far: Any) -> None:
        start, end = self._num_told, len(so_far.token_ids)
        if end - start < self._every:
            return
        ids = so_far.token_ids[start:]
        told = so_far.logprobs  # None with rollout.calculate_log_probs=false
        log_probs = None if told is None else [told[start + at][token].logprob for at, token in enumerate(ids)]
        spans = self._spans(start, end)
        part = TokenOutput(token_ids=ids, log_probs=log_probs, stop_reason=PART, extra_fields={VERSION_SPANS: spans})
        self.waiting.put_nowait(part)
        self._num_told = end


class HalfAwake(SeamlessError):
    """Nobody knows which memory the engine holds: a wake or a sleep failed half-way, or is under way."""


class InterruptibleServer(vLLMHttpServer):
    """Keeps its own account of the requests on their way into the engine, by the names they came with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        load_plug_in(os.environ)
        self._on_their_way: set[str] = set()
        self._parts: dict[str, _Parts] = {}  # of those that are handed over in parts
        self._ended: LRUCache[str, bool] = LRUCache(maxsize=_MOST_ENDED)  # by name, before the engine had them
        self._asleep: set[str] | None = set()  # tags; None: see `HalfAwake`
        self._without_token = 0  # verl's count
        self._has_cores = False  # more than one
        self._steps: EngineSteps | None = None
        super().__init__(*args, **kwargs)
        if self.rollout_mode in _DEVICES:
            workers = self.config.tensor_model_parallel_size * self.config.pipeline_model_parallel_size
            name_device(_DEVICES[self.rollout_mode], self.replica_rank * workers)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        asleep, self._asleep = self._asleep, None
        await super().wake_up(tags)
        if asleep is not None:
            self._asleep = asleep - set(tags or self._get_wake_up_tags())

    async def sleep(self) -> None:
        """As verl's. Where only the weights are awake, vLLM 0.24 to 0.27 only warns (`Executor.sleep`), so it is woken
        whole before. Remove when vLLM sleeps from there.

        Raises:
            HalfAwake: its memory comes back only when it ends.
        """
        if self._asleep is None:
            raise HalfAwake(f"nobody knows what the engine of rollout replica {self.replica_rank} holds; it has to end")
        every = set(self._get_wake_up_tags())
        if self._asleep and self._asleep != every:
            await self.wake_up(sorted(self._asleep))
        self._asleep = None
        await super().sleep()  # type: ignore[no-untyped-call]
        self._asleep = every

    async def weights_checksum(self) -> str:
        """Checksum of the weights that the engine holds (`weight_checks`)."""
        (found,) = await self.engine.collective_rpc("weights_checksum")
        return str(found)

    async def cache_tokens(self) -> int:
        """Tokens that the KV cache holds, of all engine cores."""
        cache = self.engine.vllm_config.cache_config
        return int((cache.num_gpu_blocks or 0) * cache.block_size)

    async def pace(self) -> EnginePace | None:
        """What the engine takes, by its latest steps; None: nobody knows yet."""
        return measured_pace(list(self._steps.latest)) if self._steps else None

    async def engine_load(self) -> EngineLoad | None:
        """What the engine has to do now; None: it has several cores, each with a queue of its own."""
        return None if self._has_cores else EngineLoad(*await self._call(engine_cache.LOAD))

    async def let_go(self, conversations: list[tuple[str, int]]) -> None:
        """These will not be gone on with here, but for their first so many tokens: their cache is taken first."""
        await self._call(engine_cache.LET_GO, conversations)

    async def _call(self, method: str, *args: Any) -> Any:
        return await self.engine.engine_core.call_utility_async(method, *args)

    @property
    def _admitting(self) -> int:
        return self._without_token if self._has_cores else len(self._on_their_way)

    @_admitting.setter
    def _admitting(self, count: int) -> None:
        self._without_token = count

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """Start the engine as verl does.

        Raises:
            EngineNotStarted: with the engine's own words; verl hands on that its process ended, or ends with it.
        """
        try:
            await super().launch_server(*args, **kwargs)
        except (Exception, SystemExit) as error:
            raise EngineNotStarted.because(error, self.replica_rank) from error

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        self._has_cores = self.engine.vllm_config.parallel_config.data_parallel_size > 1
        if not self._has_cores:
            self._steps = EngineSteps(self.engine.output_processor)
        add_request = self.engine.add_request
        generate: Any = self.engine.generate

        async def noted(request_id: str, *args: Any, **kwargs: Any) -> Any:
            added = await add_request(request_id, *args, **kwargs)
            self._on_their_way.discard(request_id)
            if request_id in self._ended:
                await self.engine.abort(request_id)
            return added

        # verl names its arguments, vLLM's own HTTP API does not.
        def in_parts(prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
            outputs = generate(prompt, sampling_params, request_id, *args, **kwargs)
            parts = self._parts.get(request_id)
            return outputs if parts is None else parts.noted(outputs)

        self.engine.add_request = noted  # type: ignore[method-assign]
        self.engine.generate = in_parts  # type: ignore[method-assign]

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """As verl's; ``reject_request`` sends those away, too, that wait for weights since before.

        verl 0.9.1 reads that flag when a request arrives only: they would wait for the replica's next loan. Remove when
        it wakes them.
        """
        aborted = await super().abort_all_requests(reset_prefix_cache, reject_request)
        if reject_request:
            self._resume_event.set()
            self._resume_event.clear()
        return aborted

    async def _park_until_admitted(self, request_id: str) -> TokenOutput | None:
        rejected = await super()._park_until_admitted(request_id)
        if rejected is None and request_id in self._ended:
            self._admitting -= 1
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self.global_steps})
        if rejected is None:
            self._on_their_way.add(request_id)
        return rejected

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, *args: Any, **kwargs: Any
    ) -> TokenOutput:
        began = time.monotonic()
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, *args, **kwargs)
            if self._steps and (at := self._steps.first_tokens.pop(request_id, None)):
                output.extra_fields[FIRST_TOKEN] = at - began
            return output
        finally:
            self._on_their_way.discard(request_id)  # refused or cancelled before the engine had it
            self._ended.pop(request_id, None)

    async def generate_in_parts(self, every: int, request_id: str, **kwargs: Any) -> AsyncIterator[TokenOutput]:
        """What `generate` returns, and before it what there is: after every ``every`` tokens those that are new.

        Their ``stop_reason`` is `PART`; all of them can be gone on from.
        """
        parts = self._parts[request_id] = _Parts(every, lambda start, end: self._spans(request_id, start, end))
        whole = asyncio.ensure_future(self.generate(request_id=request_id, **kwargs))
        whole.add_done_callback(lambda _: parts.waiting.put_nowait(None))
        try:
            while (part := await parts.waiting.get()) is not None:
                yield part
            yield await whole
        finally:
            del self._parts[request_id]
            whole.cancel()

    def _spans(self, request_id: str, start: int, end: int) -> list[tuple[int, int]]:
        """``[(version, tokens), …]`` of a request's tokens from ``start`` to ``end``, while it goes on."""
        return [(self.global_steps or 0, end - start)]

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """End one request; whoever waits for it gets the tokens it has, and the others go on.

        verl 0.9.1 looks the request up under the name it came with. vLLM keeps it under that name and a random suffix,
        so verl never finds it. Remove when verl calls ``AsyncLLM.abort``, which knows both names.

        A request that is still on its way here, or waits for new weights, ends as soon as it gets on.
        """
        if self.node_rank != 0:  # the engine is with the first node's server
            return {"aborted": False, "request_id": request_id}
        if request_id in self.engine.output_processor.external_req_ids:
            await self.engine.abort(request_id)
        else:
            self._ended[request_id] = True
        if reset_prefix_cache:
            await self.clear_kv_cache()  # type: ignore[no-untyped-call]
        return {"aborted": True, "request_id": request_id}


class InterruptibleReplica(vLLMReplica):
    """A replica of such servers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(InterruptibleServer)
