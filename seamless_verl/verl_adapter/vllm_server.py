"""vLLM's server under our trainer: an interrupt does not wait for requests that are still queued.

Before verl 0.9.1 interrupts a server (new weights, a replica handed back), it waits until no request is half-way into
the engine, and counts a request as half-way until its first token. A request that queues for a seat has none, so every
interrupt lasts as long as the queue: seconds in each step of a busy replica (up to verl's limit of 60). Here a request
counts until the engine has it, from where a pause reaches it. Remove when verl counts like that.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

_PLUGINS = "VLLM_PLUGINS"


def load_plug_in(environment: MutableMapping[str, str]) -> None:
    """Grammars of interrupted answers need ours in the engine's process (`vllm_grammar`), whatever a user lists."""
    listed = environment.get(_PLUGINS)
    if listed is not None and "seamless_verl" not in listed.split(","):
        environment[_PLUGINS] = f"{listed},seamless_verl"


class InterruptibleServer(vLLMHttpServer):
    """Keeps its own account of the requests on their way into the engine, by request id."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        load_plug_in(os.environ)
        self._on_their_way: set[str] = set()
        super().__init__(*args, **kwargs)

    @property
    def _admitting(self) -> int:
        return len(self._on_their_way)

    @_admitting.setter
    def _admitting(self, count: int) -> None:
        """verl's own counting, which is left alone."""

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        add_request = self.engine.add_request

        async def noted(request_id: str, *args: Any, **kwargs: Any) -> Any:
            added = await add_request(request_id, *args, **kwargs)
            self._on_their_way.discard(request_id)
            return added

        self.engine.add_request = noted

    async def _park_until_admitted(self, request_id: str) -> TokenOutput | None:
        rejected = await super()._park_until_admitted(request_id)
        if rejected is None:
            self._on_their_way.add(request_id)
        return rejected

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> TokenOutput:
        try:
            return await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        finally:
            self._on_their_way.discard(request_id)  # refused or cancelled before the engine had it


class InterruptibleReplica(vLLMReplica):
    """A replica of such servers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(InterruptibleServer)
