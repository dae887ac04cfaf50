"""A stock vLLM server as engine: token ids in and out, over ``/v1/completions`` or, with pictures, the generate route.

Works with any vLLM that knows ``return_tokens_as_token_ids`` (0.24 to 0.27 were looked at). Such a server tells no
weight version, so the caller names the one that it serves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from seamless_verl.proxy.engines.http_pool import HttpFailed, HttpPool
from seamless_verl.proxy.engines.vllm_pictures import NEEDS, NoPictures, VllmPictures, plain_picture
from seamless_verl.proxy.engines.vllm_wire import (
    AnswerShape,
    BadAnswer,
    Completion,
    EventReader,
    PromptTexts,
    Read,
    TokensAnswer,
    read_answer,
)
from seamless_verl.proxy.text.pictures import BadImage, ImageReader
from seamless_verl.trajectory.generation import GRAMMAR_PREFIX, Decode

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
_PROBE_S = 30.0
_GENERATE_ROUTE = "/inference/v1/generate"
_FORCED = "seamless 0123456789 goes on"  # more than two tokens for any tokenizer
_MAX_ALTERNATIVES = 20  # what vLLM takes unless told otherwise (its --max-logprobs)
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
        banned: tokens that no answer may contain, id to text.

    Raises:
        ConfigError: ``base_url`` is not the address of a server.
    """

    def __init__(
        self, base_url: str, model: str, *, version: int = 0, api_key: str = "", banned: Mapping[int, str] | None = None
    ) -> None:
        self._model = model
        self._version = version
        self._banned = dict(banned or {})
        self._pool = HttpPool(base_url, {"authorization": f"Bearer {api_key}"} if api_key else {})
        self._pictures: VllmPictures | None = None
        self._encoder = msgspec.json.Encoder()
        self._prompts = PromptTexts()

    def forget(self, session_id: str) -> None:
        """A session has ended; no further prompt goes on from its last."""
        self._prompts.forget(session_id)

    def stamp(self, version: int) -> None:
        """From now on, requests that are sent get answers under this weight version."""
        self._version = version

    async def generate(self, request: GenerationRequest) -> Generation:
        """See :class:`~seamless_verl.proxy.engine.Engine`; cancelling closes the connection, which aborts in vLLM."""
        num_alternatives = int(request.sampling.get("logprobs", 0))
        version = self._version
        shape: AnswerShape = TokensAnswer if request.images else Completion
        reader = EventReader(request.on_tokens, num_alternatives, shape) if request.on_tokens is not None else None
        path, content = await self._asked(request, num_alternatives)
        left_s = max(0.1, request.deadline - time.time())
        where, feed = self._pool.base_url, reader.feed if reader is not None else None
        try:
            answer = await self._pool.request("POST", path, content, timeout_s=left_s, on_chunk=feed)
        except HttpFailed as error:
            raise EngineUnavailable(f"{error} ({where})") from error
        if answer.status != 200:
            story = f"{where} answered {answer.status}: {answer.body[:300].decode('utf-8', 'replace')}"
            raise EngineRefused(story) if answer.status in (400, 422) else EngineUnavailable(story)
        try:
            if reader is None:
                read = read_answer(answer.body, num_alternatives, shape)
            else:
                read = reader.whole
                if reader.failure is not None:
                    raise reader.failure
        except (msgspec.MsgspecError, BadAnswer) as error:
            raise EngineUnavailable(f"{where}: no completion with token ids: {error}") from error
        if not self._banned.keys().isdisjoint(read.token_ids):
            # vLLM's /v1/completions ignores `bad_words` where it does not know them (vllm-project/vllm#46793).
            raise EngineUnavailable(f"{where} generated a placeholder of pictures, which it was told not to")
        return _generation(read, version)

    async def _asked(self, request: GenerationRequest, num_alternatives: int) -> tuple[str, bytes]:
        """Route and body of a request."""
        prompt_ids = request.prompt_ids
        sampling: dict[str, Any] = {**request.sampling, "skip_special_tokens": False}
        if self._banned:
            sampling["bad_words"] = list(self._banned.values())
        extra_args = sampling.pop("extra_args", None)
        body: dict[str, Any] = {
            "model": self._model,
            "request_id": request.request_id,
            "stream": request.on_tokens is not None,
        }
        if request.images:
            if self._pictures is None:
                raise EngineRefused("this session shows pictures, and the server takes none; the proxy said why")
            # Of as many as are asked for, this route tells the chosen token first, so that the last one may be missing.
            sampling["logprobs"] = min(num_alternatives + 1, _MAX_ALTERNATIVES) if num_alternatives else 0
            body["features"] = await self._pictures.features(request.images, prompt_ids)
            body["sampling_params"] = {**self._pictures.defaults, **sampling, "extra_args": extra_args or {}}
            path, field = _GENERATE_ROUTE, b"token_ids"
        else:
            # 0 alternatives: the log-prob of the chosen token only
            body |= {**sampling, "logprobs": num_alternatives, "return_tokens_as_token_ids": True}
            if extra_args:
                body["vllm_xargs"] = extra_args
            path, field = "/v1/completions", b"prompt"
        prompt = self._prompts.encode(request.session_id, prompt_ids)
        return path, b"".join((self._encoder.encode(body)[:-1], b',"', field, b'":', *prompt, b"}"))

    async def show(self, placeholder: int, *, max_pixels: int) -> ImageReader:
        """Enable pictures, read by the server's own processor.

        Args:
            placeholder: id of the token that stands for pictures.
            max_pixels: of one picture.

        Raises:
            NoPictures: it cannot, and what would help.
        """
        pictures = self._pictures = VllmPictures(self._pool, self._model, placeholder, max_pixels=max_pixels)
        try:
            black, white = [await self._look(pictures, plain_picture(grey)) for grey in (0, 255)]
            if black == white:  # a server that does not know `features` ignores them
                raise NoPictures(f"{_GENERATE_ROUTE} of this server does not look at pictures; {NEEDS}")
        except NoPictures:
            self._pictures = None
            raise
        return pictures

    async def _look(self, pictures: VllmPictures, data: bytes) -> float:
        """The log-prob of the model's first token after a picture."""
        try:
            prompt_ids = await pictures.prompt(data)
            return (await self._try(prompt_ids, {"max_tokens": 1, "temperature": 0.0}, (data,))).log_probs[0]
        except NoPictures:
            raise
        except (BadImage, EngineUnavailable, EngineRefused, IndexError) as error:
            raise NoPictures(f"a picture that was tried: {error}; {NEEDS}") from error

    async def continues_grammars(self, decode: Decode) -> bool:
        """Whether our plug-in is in the server's process, so that an interrupted answer under a grammar goes on.

        Tried with a text whose end is asked for: where nobody moves the grammar, the text begins anew.
        """
        ids: list[int] = []
        try:
            for max_tokens in (2, 64):
                forced = {"max_tokens": max_tokens, "structured_outputs": {"choice": [_FORCED]}}
                moved = {"extra_args": {GRAMMAR_PREFIX: len(ids)}} if ids else {}
                ids += (await self._try((0, *ids), {**forced, **moved})).token_ids
        except (EngineUnavailable, EngineRefused):
            return False
        return decode(ids).startswith(_FORCED)

    async def _try(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], images: Sequence[bytes] = ()
    ) -> Generation:
        request = GenerationRequest(
            request_id=f"probe-{time.time_ns()}",
            session_id="",
            prompt_ids=prompt_ids,
            sampling=sampling,
            deadline=time.time() + _PROBE_S,
            images=images,
        )
        return await self.generate(request)

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
        try:
            await self._try((0,), {"max_tokens": 1})
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
