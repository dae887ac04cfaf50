"""A stock vLLM server as engine: token ids in and out over ``/v1/completions``.

Works with any vLLM that knows ``return_token_ids`` (0.24 to 0.27 were looked at). Such a server tells no weight
version, so the caller names the one that it serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
    TokenChunk,
    VersionSpan,
)
from seamless_verl.proxy.http_pool import HttpFailed, HttpPool

#: what a vLLM server can do beyond plain generation
ABILITIES = frozenset({Ability.STRUCTURED_OUTPUTS, Ability.TOP_LOGPROBS})
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
_PROBE_S = 30.0


class _LogProbs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] = []


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None


class _Completion(msgspec.Struct):
    """What is read of an answer, or of one event of a stream; the prompt's ids, which come too, are skipped unread."""

    choices: list[_Choice]


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
        self._encoder = msgspec.json.Encoder()

    async def generate(self, request: GenerationRequest) -> Generation:
        """See :class:`~seamless_verl.proxy.engine.Engine`; cancelling closes the connection, which aborts in vLLM."""
        alternatives = request.sampling.get("logprobs") or 0
        body = {
            **request.sampling,
            "model": self._model,
            "prompt": list(request.prompt_ids),
            "logprobs": alternatives,
            "return_token_ids": True,
            "return_tokens_as_token_ids": bool(alternatives),
            "skip_special_tokens": False,
            "request_id": request.request_id,
            "stream": request.on_tokens is not None,
        }
        left_s = max(0.1, request.deadline - time.time())
        where = self._pool.base_url
        answer = _Collector(self._version, alternatives, request.on_tokens)
        try:
            response = await self._pool.request(
                "POST",
                "/v1/completions",
                self._encoder.encode(body),
                timeout_s=left_s,
                on_body=answer.feed if request.on_tokens is not None else None,
            )
            if response.status == 200 and request.on_tokens is None:
                answer.take(response.body)
        except (HttpFailed, _Unreadable) as error:
            raise EngineUnavailable(f"{error} ({where})") from error
        if response.status != 200:
            story = f"{where} answered {response.status}: {response.body[:300].decode('utf-8', 'replace')}"
            raise EngineRefused(story) if response.status in (400, 422) else EngineUnavailable(story)
        return answer.generation()

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


class _Unreadable(Exception):
    """The server answered something else than a completion with token ids and log-probs."""


class _Collector:
    """One answer, taken whole or event by event."""

    def __init__(self, version: int, num_alternatives: int, on_tokens: Callable[[TokenChunk], None] | None) -> None:
        self._version = version
        self._num_alternatives = num_alternatives
        self._on_tokens = on_tokens
        self._buffer = b""
        self._ids: list[int] = []
        self._log_probs: list[float] = []
        self._alternatives: list[list[tuple[int, float]]] = []
        self._finish = FinishReason.ABORTED

    def feed(self, data: bytes) -> None:
        """A piece of a stream of server-sent events."""
        *events, self._buffer = (self._buffer + data).split(b"\n\n")
        for event in events:
            payload = event.strip().removeprefix(b"data:").strip()
            if payload and payload != b"[DONE]":
                self.take(payload)

    def take(self, payload: bytes) -> None:
        """A completion, or the next part of one.

        Raises:
            _Unreadable: it is none.
        """
        try:
            choices = _decoder.decode(payload).choices
        except msgspec.MsgspecError as error:
            raise _Unreadable(f"no completion: {error}: {payload[:200].decode('utf-8', 'replace')}") from error
        for choice in choices[:1]:
            self._add(choice)

    def _add(self, choice: _Choice) -> None:
        ids = choice.token_ids
        if ids is None:
            raise _Unreadable("it returns no token ids; use a vLLM that does")
        given = choice.logprobs.token_logprobs if choice.logprobs is not None else []
        log_probs = [value for value in given if value is not None]
        if len(log_probs) != len(ids):
            raise _Unreadable(f"{len(ids)} tokens but {len(log_probs)} log-probs")
        others: list[list[tuple[int, float]]] = []
        if self._num_alternatives and choice.logprobs is not None:
            others = [_best(top or {}, self._num_alternatives) for top in choice.logprobs.top_logprobs]
        self._ids += ids
        self._log_probs += log_probs
        self._alternatives += others
        if choice.finish_reason is not None:
            self._finish = _FINISH.get(choice.finish_reason, FinishReason.ABORTED)
        if self._on_tokens is not None and ids:
            self._on_tokens(TokenChunk(token_ids=ids, log_probs=log_probs, alternatives=others))

    def generation(self) -> Generation:
        num = len(self._ids)
        return Generation(
            token_ids=self._ids,
            log_probs=self._log_probs,
            version_spans=(VersionSpan(version=self._version, num_tokens=num),) if num else (),
            finish_reason=self._finish,
            alternatives=self._alternatives,
        )


_decoder = msgspec.json.Decoder(_Completion)


def _best(top: dict[str, float], number: int) -> list[tuple[int, float]]:
    """vLLM names tokens ``token_id:ID`` where asked to; the chosen one may come on top of the number wanted."""
    found = [(int(name.removeprefix("token_id:")), value) for name, value in top.items()]
    return sorted(found, key=lambda pair: -pair[1])[:number]
