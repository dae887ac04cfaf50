"""A stock vLLM server as engine: token ids in and out over ``/v1/completions``.

Works with any vLLM that knows ``return_tokens_as_token_ids`` (0.24 to 0.27 were looked at). Such a server tells no
weight version, so the caller names the one that it serves.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from seamless_verl.errors import ConfigError
from seamless_verl.proxy.engine import (
    Ability,
    EngineRefused,
    EngineUnavailable,
    FinishReason,
    Generation,
    GenerationRequest,
    VersionSpan,
)
from seamless_verl.proxy.http_pool import HttpFailed, HttpPool
from seamless_verl.proxy.prompt_texts import PromptTexts
from seamless_verl.proxy.vllm_wire import BadAnswer, Completion, EventReader, Read, read_choice

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
_PROBE_S = 30.0
ABILITIES = frozenset({Ability.STRUCTURED_OUTPUTS, Ability.TOP_LOGPROBS})


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as a vLLM server lists it; ``max_model_len`` in tokens, None where the server does not say."""

    name: str
    max_model_len: int | None


class VllmHttpEngine:
    """An :class:`~seamless_verl.proxy.engine.Engine` over HTTP.

    Args:
        base_url: the server, without a path.
        model: the name it serves.
        version: weight version that its answers are stamped with.
        api_key: the server's key, "" for none.

    Raises:
        ConfigError: ``base_url`` is not the address of a server.
    """

    def __init__(self, base_url: str, model: str, *, version: int = 0, api_key: str = "") -> None:
        self._model = model
        self._version = version
        self._pool = HttpPool(base_url, {"authorization": f"Bearer {api_key}"} if api_key else {})
        self._decoder = msgspec.json.Decoder(Completion)
        self._encoder = msgspec.json.Encoder()
        self._prompts = PromptTexts()

    def stamp(self, version: int) -> None:
        """From now on, requests that are sent get answers under this weight version."""
        self._version = version

    async def generate(self, request: GenerationRequest) -> Generation:
        """See :class:`~seamless_verl.proxy.engine.Engine`; cancelling closes the connection, which aborts in vLLM."""
        num_alternatives = int(request.sampling.get("logprobs", 0))
        version = self._version
        reader = EventReader(request.on_tokens, num_alternatives) if request.on_tokens is not None else None
        body = {
            **request.sampling,
            "model": self._model,
            "logprobs": num_alternatives,  # 0: the chosen token's only
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "request_id": request.request_id,
            "stream": reader is not None,
        }
        left_s = max(0.1, request.deadline - time.time())
        where, feed = self._pool.base_url, reader.feed if reader is not None else None
        prompt = self._prompts.encode(request.session_id, request.prompt_ids)
        content = b"".join((self._encoder.encode(body)[:-1], b',"prompt":', *prompt, b"}"))
        try:
            answer = await self._pool.request("POST", "/v1/completions", content, timeout_s=left_s, on_chunk=feed)
        except HttpFailed as error:
            raise EngineUnavailable(f"{error} ({where})") from error
        if answer.status != 200:
            story = f"{where} answered {answer.status}: {answer.body[:300].decode('utf-8', 'replace')}"
            raise EngineRefused(story) if answer.status in (400, 422) else EngineUnavailable(story)
        try:
            if reader is None:
                choice = self._decoder.decode(answer.body).choices[0]
                return _generation(read_choice(choice, num_alternatives), version)
            if reader.failure is not None:
                raise reader.failure
            return _generation(reader.whole, version)
        except (msgspec.MsgspecError, IndexError, BadAnswer) as error:
            raise EngineUnavailable(f"{where}: no completion with token ids: {error}") from error

    async def probe(self) -> ServedModel:
        """What the server serves under our model's name; also that it returns token ids, with a completion of one.

        Raises:
            ConfigError: no server, another model, or one that returns no token ids.
        """
        where = self._pool.base_url
        try:
            answer = await self._pool.request("GET", "/v1/models", timeout_s=_PROBE_S)
        except HttpFailed as error:
            raise ConfigError("--engine", where, str(error), "start it first: vllm serve MODEL --port PORT") from error
        try:
            cards = {card.id: card for card in msgspec.json.decode(answer.body, type=_Models).data}
        except msgspec.MsgspecError as error:
            story = f"GET /v1/models answered {answer.status}, which is no list of models"
            raise ConfigError("--engine", where, story, "name a vLLM server (and its key, if it has one)") from error
        card = cards.get(self._model)
        if card is None:
            fix = f"--served-model {' or '.join(sorted(cards)) or 'NAME'}"
            raise ConfigError("--served-model", self._model, f"{where} does not serve it", fix)
        request = GenerationRequest(
            request_id=f"probe-{time.time_ns()}",
            session_id="",
            prompt_ids=(0,),
            sampling={"max_tokens": 1},
            deadline=time.time() + _PROBE_S,
        )
        try:
            await self.generate(request)
        except (EngineUnavailable, EngineRefused) as error:
            raise ConfigError("--engine", where, str(error), "use a vLLM of 0.24 or later") from error
        return ServedModel(name=card.id, max_model_len=card.max_model_len)

    async def close(self) -> None:
        self._pool.close()


def _generation(read: Read, version: int) -> Generation:
    num_tokens = len(read.token_ids)
    return Generation(
        token_ids=read.token_ids,
        log_probs=read.log_probs,
        version_spans=(VersionSpan(version=version, num_tokens=num_tokens),) if num_tokens else (),
        finish_reason=_FINISH.get(read.finish_reason or "", FinishReason.ABORTED),
        alternatives=read.alternatives,
    )
