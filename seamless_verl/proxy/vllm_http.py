"""A stock vLLM server as engine: token ids in and out over ``/v1/completions``.

Works with any vLLM that knows ``return_token_ids``. Such a server tells no weight version, so the caller names the one
that it serves.
"""

from __future__ import annotations

import time
from typing import Any

import httpx

from seamless_verl.proxy.engine import EngineUnavailable, FinishReason, Generation, GenerationRequest, VersionSpan

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


class VllmHttpEngine:
    """An :class:`~seamless_verl.proxy.engine.Engine` over HTTP.

    Args:
        base_url: the server, without a path.
        model: the name it serves.
        version: weight version that its answers are stamped with.
        api_key: the server's key, "" for none.
    """

    def __init__(self, base_url: str, model: str, *, version: int = 0, api_key: str = "") -> None:
        self._model = model
        self._version = version
        self._client = httpx.AsyncClient(
            base_url=base_url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=10.0),
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )

    async def generate(self, request: GenerationRequest) -> Generation:
        """See :class:`~seamless_verl.proxy.engine.Engine`; cancelling closes the connection, which aborts in vLLM."""
        body = {
            **request.sampling,
            "model": self._model,
            "prompt": list(request.prompt_ids),
            "logprobs": 0,  # the chosen token's only
            "return_token_ids": True,
            "skip_special_tokens": False,
            "request_id": request.request_id,
        }
        left_s = max(0.1, request.deadline - time.time())
        try:
            response = await self._client.post("/v1/completions", json=body, timeout=left_s)
        except httpx.TransportError as error:
            raise EngineUnavailable(f"{type(error).__name__} from {self._client.base_url}") from error
        if response.is_error:
            raise EngineUnavailable(f"{self._client.base_url} answered {response.status_code}: {response.text[:300]}")
        return self._generation(response.json()["choices"][0])

    def _generation(self, choice: dict[str, Any]) -> Generation:
        ids = choice.get("token_ids")
        if ids is None:
            raise EngineUnavailable(f"{self._client.base_url} returns no token ids; it needs a vLLM that does")
        return Generation(
            token_ids=ids,
            log_probs=choice["logprobs"]["token_logprobs"] if ids else [],
            version_spans=(VersionSpan(version=self._version, num_tokens=len(ids)),) if ids else (),
            finish_reason=_FINISH.get(choice["finish_reason"], FinishReason.ABORTED),
        )

    async def close(self) -> None:
        await self._client.aclose()
