"""A vLLM server that takes published weights by itself (``seamless.weights.sync=rolling``): under the requests that it
runs, or on the trainer's GPUs when it wakes for a loan, where nothing runs yet.

    published ─► checked, opened ─► gate closed ─► paused, tokens counted ─► loaded ─► router told ─► resumed, gate open
                   │ refused                              requests keep their tokens     │ failed
                   ▼                                                                     ▼
                 keeps its version, goes on                                 BROKEN: serves nobody until a whole load

Invariants: nothing is generated between the pause and the end of a whole load; every token's version is exact
(`trajectory.seams`); the version only rises, except for what a new run publishes.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from seamless_verl.errors import SeamlessError
from seamless_verl.trajectory.seams import Seams
from seamless_verl.verl_adapter.vllm.vllm_server import InterruptibleServer
from seamless_verl.verl_adapter.weights import weight_store
from seamless_verl.verl_adapter.weights.weight_carrier import Carrier
from seamless_verl.verl_adapter.weights.weight_store import Manifest, TensorSpec, WeightsRefused

_ON_THEIR_WAY_S = 10.0  # for requests to get into the engine, past a gate that has closed
_ADMIT_LOOK_S = 0.002


class ReplicaBroken(SeamlessError):
    """A load failed half-way: the replica has no version, and serves nobody until it has loaded a whole one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What a pull did.

    Attributes:
        before, version: of the replica's weights, before and now; the same: there was nothing newer.
        seconds: by stage; what lies between ``pause`` and ``resume`` is what requests notice.
        running, waiting: requests that had tokens when they were held up, and that had none.
    """

    before: int | None
    version: int
    seconds: dict[str, float] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0


class _Stages:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage], self._last = now - self._last, now


class PullingServer(InterruptibleServer):
    """See the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seams = Seams()
        self._changing = asyncio.Lock()  # a pull, or an interruption by verl: they share its gate
        self._tensors: tuple[TensorSpec, ...] | None = None  # of the whole version that the engine has
        self._is_broken = False
        self._keeps_cache = False
        self._carrier: Carrier | None = None  # None: what is published is on this node
        super().__init__(*args, **kwargs)

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        generate = self.engine.generate

        def salted(prompt: Any, *args: Any, **kwargs: Any) -> Any:
            if self._keeps_cache:  # no block that older weights filled is hit
                prompt = {**prompt, "cache_salt": f"weights-{self.global_steps}"}
            return generate(prompt, *args, **kwargs)

        self.engine.generate = salted  # type: ignore[method-assign]

    async def requests(self) -> tuple[int, int]:
        """How many have tokens, and how many have none yet."""
        so_far = self._so_far()
        running = sum(tokens > 0 for tokens in so_far.values())
        return running, len(so_far) - running

    # ---------------------------------------------------------------- versions of tokens

    async def _park_until_admitted(self, request_id: str) -> TokenOutput | None:
        rejected = await super()._park_until_admitted(request_id)
        if rejected is None:
            self._seams.begin(request_id)
        return rejected

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, *args: Any, **kwargs: Any
    ) -> TokenOutput:
        """As the parent's, with ``extra_fields["version_spans"]``: ``[(version, tokens), …]``."""
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, *args, **kwargs)
            spans = self._seams.end(request_id, len(output.token_ids), self._version)
            output.extra_fields["version_spans"] = spans
            return output
        finally:
            self._seams.forget(request_id)

    def _spans(self, request_id: str, start: int, end: int) -> list[tuple[int, int]]:
        return self._seams.spans(request_id, start, end, self._version)

    @property
    def _version(self) -> int:
        """verl's number of the weights; what is generated before there are any counts as the first version."""
        version: Any = self.global_steps
        return version or 0

    def _so_far(self) -> dict[str, int]:
        """Tokens of every request in the engine, by the name that it came with."""
        states: Any = self.engine.output_processor.request_states.values()
        return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}

    # ---------------------------------------------------------------- a pull

    async def pull(
        self, folder: str, at_least: int, keep: bool, router: Any, address: str, carrier: Carrier | None = None
    ) -> Pulled:
        """Take the newest version that is published in ``folder``.

        Args:
            keep: requests go on with their cache; else their context is computed again.
            router: told the new version of ``address`` before requests may come in again; None: nobody is.
            carrier: takes it here from another node.

        Raises:
            WeightsRefused: the replica goes on with what it has.
            ReplicaBroken: it does not.
        """
        async with self._changing:
            if self._submission_paused and not self._is_broken:
                raise WeightsRefused(f"{address} is interrupted: whoever did that gives it weights")
            stages, self._carrier = _Stages(), carrier
            before = self._version if self._tensors is not None else None
            manifest = await self._opened(Path(folder), at_least, before)
            if manifest is None:
                return Pulled(before=before, version=self._version)
            stages.end("prefetch")
            self._keeps_cache = keep
            running, waiting = (0, 0) if self._is_broken else await self._hold_up(keep, stages)
            await self._load(manifest, stages)
            await self.set_global_steps(manifest.version)
            told = router.set_version.remote([address], manifest.version) if router is not None else None
            await self.resume_engine_generation()  # type: ignore[no-untyped-call]
            if told is not None:
                await told
            await self.open_submission_gate()  # type: ignore[no-untyped-call]
            stages.end("resume")
            seconds = {name: round(spent, 6) for name, spent in stages.seconds.items()}
            return Pulled(before=before, version=manifest.version, seconds=seconds, running=running, waiting=waiting)

    async def wake_with(
        self, folder: str, version: int, keep: bool, router: Any, address: str, carrier: Carrier | None = None
    ) -> None:
        """A replica of the trainer's GPUs, which sleeps behind a closed gate, wakes with a published version.

        Args:
            version: the least; what is newest is loaded.
            keep: as for `pull`, later.

        Raises:
            WeightsRefused, ReplicaBroken: it serves nobody.
        """
        async with self._changing:
            if not self._submission_paused:
                raise WeightsRefused(f"{address} serves: whoever does so pulls")
            self._carrier = carrier
            manifest = await self._opened(Path(folder), version, None)
            assert manifest is not None  # whatever the engine had, it lost when it went to sleep
            if self.config.free_cache_engine:
                await self.wake_up(tags=["weights"])
            await self._load(manifest, _Stages())
            await self.set_global_steps(manifest.version)
            self._keeps_cache = keep
            if self.config.free_cache_engine:
                await self.wake_up(tags=["kv_cache"])
            await router.set_version.remote([address], manifest.version)

    async def _opened(self, folder: Path, at_least: int, before: int | None) -> Manifest | None:
        """The newest version, which from now on cannot go away; None: the engine has it."""
        while True:
            manifest = await asyncio.to_thread(self._checked, folder, at_least, before)
            if manifest is None:
                return None
            told = weight_store.encode(manifest)
            if all(await self.engine.collective_rpc("open_published", args=(told,))):
                return manifest

    def _checked(self, folder: Path, at_least: int, before: int | None) -> Manifest | None:
        """The newest version, whole and of the shapes that the engine has; None: it has it already."""
        try:
            manifest = weight_store.newest(folder) if self._carrier is None else self._carrier.newest(folder)
        except FileNotFoundError as error:  # superseded while it was copied; asked again, it finds the next one
            raise WeightsRefused(f"{error}") from error
        if manifest is None or manifest.version < at_least:
            found = "nothing" if manifest is None else f"version {manifest.version}"
            raise WeightsRefused(f"{folder} on {ray.util.get_node_ip_address()} has {found}, not version {at_least}")
        if manifest.version == before:
            return None
        try:
            manifest.check(self._tensors)
            manifest.verify()
        except FileNotFoundError:
            return self._checked(folder, at_least, before)
        return manifest

    async def _hold_up(self, keep: bool, stages: _Stages) -> tuple[int, int]:
        """Nothing generates from the return on; every request's tokens so far are of the version up to now."""
        self._submission_paused, self._rejecting = True, False
        self._resume_event.clear()
        try:
            until = time.monotonic() + _ON_THEIR_WAY_S
            while self._admitting and time.monotonic() < until:  # noqa: ASYNC110 - verl counts, and tells nobody
                await asyncio.sleep(_ADMIT_LOOK_S)
            stages.end("gate")
            if not keep:
                await self.engine.renderer.clear_mm_cache_async()
            # What AsyncLLM.pause_generation does, but for the 20 ms that it sleeps for the sake of logs.
            await self.engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=not keep)
            if keep and self.engine.vllm_config.model_config.is_multimodal_model:
                await self.engine.reset_encoder_cache()  # it knows pictures by their bytes: no salt tells weights apart
            await self._settle()
        except BaseException:
            await self.resume_generation()  # type: ignore[no-untyped-call]
            raise
        so_far = self._so_far()
        self._seams.cut(self._version, so_far, frozenset(self._on_their_way))
        stages.end("pause")
        running = sum(tokens > 0 for tokens in so_far.values())
        return running, len(so_far) - running

    async def _settle(self) -> None:
        """All that the engine made before its pause has been counted: its answer came behind the last tokens."""
        while not self.engine.engine_core.outputs_queue.empty():  # noqa: ASYNC110 - vLLM's handler empties it
            await asyncio.sleep(0)
        seats = self.engine.vllm_config.scheduler_config.max_num_seqs
        for _ in range(8 + 4 * math.ceil(seats / 128)):  # vLLM's handler yields once per 128 outputs of a frame
            await asyncio.sleep(0)

    async def _load(self, manifest: Manifest, stages: _Stages) -> None:
        first = self._tensors is None
        self._is_broken, self._tensors = True, None
        try:
            await self.engine.collective_rpc("load_published", args=(first,))
        except Exception as error:
            raise ReplicaBroken(f"version {manifest.version}: {type(error).__name__}: {error}") from error
        self._is_broken, self._tensors = False, manifest.tensors
        stages.end("load")

    # ---------------------------------------------------------------- what must not come in between

    async def abort_all_requests(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        async with self._changing:
            aborted: dict[str, Any] = await super().abort_all_requests(*args, **kwargs)
            return aborted


class PullingReplica(vLLMReplica):
    """A replica of such servers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(PullingServer)
