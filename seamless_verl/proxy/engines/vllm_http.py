"""A stock vLLM server as engine: token ids in and out, over ``/v1/completions`` or, with pictures, the generate route.

Works with any vLLM that knows ``return_tokens_as_token_ids``, which names every token ``token_id:…`` (0.24 to 0.27 were
looked at; ``return_token_ids`` would send the prompt back, too). The generate route answers as vLLM 0.27 writes it.
Such a server tells no weight version, so the caller names the one that it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from cachetools import LRUCache

from seamless_verl.errors import ConfigError
from seamless_verl.proxy.engine import EngineRefused, EngineUnavailable, GenerationRequest, TokenChunk
from seamless_verl.proxy.engines.vllm_pictures import VllmPictures
from seamless_verl.trajectory.generation import FinishReason, Generation, VersionSpan
from seamless_verl.trajectory.tokens import EMPTY, TokenPath

GENERATE_ROUTE = "/inference/v1/generate"
# A server takes them from the model's generation_config.json; its log-probs are of the policy without them.
_PLAIN = {"repetition_penalty": 1.0, "min_p": 0.0}
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
_MAX_ALTERNATIVES = 20  # what vLLM takes unless told otherwise (its --max-logprobs)
_CONNECT_S = 10.0
# Servers close connections that stayed idle (uvicorn: 5 s); one that is about to be closed must not be taken.
_IDLE_S = 3.0
_TOKEN_ID = "token_id:"
_Ranked: TypeAlias = tuple[tuple[int, float], ...]
# Ids, their log-probs, and per token the alternatives, best first; or none of these where nobody asked for any.
_Tokens: TypeAlias = tuple[list[int], list[float], list[_Ranked]]
_Choice = TypeVar("_Choice")
_tops = msgspec.json.Decoder(list[dict[str, float] | None] | None)


class VllmServer:
    """Requests to one server, over connections that are kept. Made inside a running event loop.

    Raises:
        ConfigError: the URL cannot be one of a server.
    """

    def __init__(self, base_url: str, api_key: str) -> None:
        parts = urlsplit(base_url)
        try:
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is none
            is_address = False
        if not is_address or parts.path.strip("/"):
            fix = "write it as http://host:port, without a path"
            raise ConfigError("--engine", base_url, "is not the address of a server", fix)
        self.base_url = f"{parts.scheme}://{parts.netloc}"
        headers = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            headers={**headers, "authorization": f"Bearer {api_key}"} if api_key else headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        timeout_s: float,
        on_chunk: Callable[[bytes], None] | None = None,
    ) -> tuple[int, bytes]:
        """Status and body of the answer. Cancelling closes the connection, which aborts a generation in vLLM.

        Args:
            on_chunk: takes the body of a 200 as it comes; what is returned in the end then has none.

        Raises:
            EngineUnavailable: no connection, a broken one, or no answer in time.
        """
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        try:
            async with self._session.request(
                method, self.base_url + path, data=body, timeout=limits, allow_redirects=False
            ) as answer:
                if on_chunk is None or answer.status != 200:
                    return answer.status, await answer.read()
                async for chunk in answer.content.iter_any():
                    on_chunk(chunk)
                return answer.status, b""
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            story = str(cause) or f"no answer within {timeout_s:g} s"
            raise EngineUnavailable(f"{type(cause).__name__} from {self.base_url}: {story}") from error

    async def close(self) -> None:
        await self._session.close()


class VllmHttpEngine:
    """An :class:`~seamless_verl.proxy.engine.Engine` over HTTP.

    Args:
        base_url: the server, without a path (:class:`VllmServer`).
        model: the name it serves.
        version: weight version that its answers are stamped with.
        api_key: the server's key, "" for none.
        banned: tokens that no answer may contain, id to text.

    Attributes:
        pictures: reads them through the server; None where it reads none.
    """

    def __init__(
        self, base_url: str, model: str, *, version: int = 0, api_key: str = "", banned: Mapping[int, str] | None = None
    ) -> None:
        self.model = model
        self.server = VllmServer(base_url, api_key)
        self.pictures: VllmPictures | None = None
        self._version = version
        self._banned = dict(banned or {})
        self._prompts = PromptTexts()

    def forget(self, session_id: str) -> None:
        """A session has ended; no further prompt goes on from its last."""
        self._prompts.forget(session_id)

    def stamp(self, version: int) -> None:
        """From now on, requests that are sent get answers under this weight version."""
        self._version = version

    async def generate(self, request: GenerationRequest) -> Generation:
        """See :class:`~seamless_verl.proxy.engine.Engine`."""
        num_alternatives = int(request.sampling.get("logprobs", 0))
        version = self._version
        decoder = TOKENS if request.images else COMPLETION
        path, content = await self._asked(request, num_alternatives)
        left_s = max(0.1, request.deadline - time.time())
        reader = EventReader(request.on_tokens, num_alternatives, decoder) if request.on_tokens else None
        feed = reader.feed if reader is not None else None
        where = self.server.base_url
        try:
            status, body = await self.server.request("POST", path, content, timeout_s=left_s, on_chunk=feed)
            if status != 200:
                story = f"{where} answered {status}: {body[:300].decode('utf-8', 'replace')}"
                raise EngineRefused(story) if status in (400, 422) else EngineUnavailable(story)
            answer = reader.answer() if reader is not None else read_answer(body, num_alternatives, decoder)
        except BadAnswer as error:
            raise EngineUnavailable(f"{where}: no completion with token ids: {error}") from error
        (token_ids, log_probs, alternatives), finish_reason = answer
        if not self._banned.keys().isdisjoint(token_ids):
            # vLLM's /v1/completions ignores `bad_words` where it does not know them (vllm-project/vllm#46793).
            raise EngineUnavailable(f"{where} generated a placeholder of pictures, which it was told not to")
        return Generation(
            token_ids=token_ids,
            log_probs=log_probs,
            version_spans=(VersionSpan(version=version, num_tokens=len(token_ids)),) if token_ids else (),
            finish_reason=_FINISH.get(finish_reason or "", FinishReason.ABORTED),
            alternatives=alternatives,
        )

    async def _asked(self, request: GenerationRequest, num_alternatives: int) -> tuple[str, bytes]:
        """Route and body of a request."""
        prompt_ids = request.prompt_ids
        sampling: dict[str, Any] = {**_PLAIN, **request.sampling, "skip_special_tokens": False}
        if self._banned:
            sampling["bad_words"] = list(self._banned.values())
        extra_args = sampling.pop("extra_args", None)
        body: dict[str, Any] = {
            "model": self.model,
            "request_id": request.request_id,
            "stream": request.on_tokens is not None,
        }
        if request.images:
            if self.pictures is None:
                raise EngineRefused("this session shows pictures, and the server takes none; the proxy said why")
            # Of as many as are asked for, this route tells the chosen token first, so that the last one may be missing.
            sampling["logprobs"] = min(num_alternatives + 1, _MAX_ALTERNATIVES) if num_alternatives else 0
            body["features"] = await self.pictures.features(request.images, prompt_ids)
            body["sampling_params"] = {**self.pictures.defaults, **sampling, "extra_args": extra_args or {}}
            path, field = GENERATE_ROUTE, b"token_ids"
        else:
            # 0 alternatives: the log-prob of the chosen token only
            body |= {**sampling, "logprobs": num_alternatives, "return_tokens_as_token_ids": True}
            if extra_args:
                body["vllm_xargs"] = extra_args
            path, field = "/v1/completions", b"prompt"
        prompt = self._prompts.encode(request.session_id, prompt_ids)
        return path, b"".join((msgspec.json.encode(body)[:-1], b',"', field, b'":', *prompt, b"}"))

    async def close(self) -> None:
        await self.server.close()


class LogProbs(msgspec.Struct):
    """``top_logprobs`` is read only where alternatives were asked for; servers send it anyway."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: msgspec.Raw = msgspec.Raw(b"null")


class Choice(msgspec.Struct):
    """What is read of a completion."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: LogProbs | None = None

    @property
    def has_tokens(self) -> bool:
        return bool(self.text or (self.logprobs is not None and self.logprobs.tokens))

    def tokens(self, num_alternatives: int) -> _Tokens:
        """What was generated.

        Raises:
            BadAnswer: ids and log-probs do not fit together.
        """
        if self.logprobs is None:
            raise BadAnswer("it returns no log-probs")
        ids = _ids(self.logprobs.tokens)
        log_probs = [value for value in self.logprobs.token_logprobs if value is not None]
        if len(log_probs) != len(ids):
            raise BadAnswer(f"{len(ids)} tokens but {len(log_probs)} log-probs")
        tops = _tops.decode(self.logprobs.top_logprobs) if num_alternatives else None
        return ids, log_probs, [_ranked(top or {})[:num_alternatives] for top in tops or ()]


class NamedToken(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[NamedToken] = []


class ChosenTokens(msgspec.Struct):
    content: list[NamedToken]


class TokensChoice(msgspec.Struct):
    """What is read of an answer in tokens."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: ChosenTokens | None = None

    @property
    def has_tokens(self) -> bool:
        return bool(self.token_ids)

    def tokens(self, num_alternatives: int) -> _Tokens:
        """See :meth:`Choice.tokens`."""
        if self.token_ids is None or self.logprobs is None:
            raise BadAnswer("it returns no token ids, or no log-probs")
        told = self.logprobs.content
        if _ids([token.token for token in told]) != self.token_ids:
            raise BadAnswer("its log-probs are not those of its tokens")
        tops = ({top.token: top.logprob for top in token.top_logprobs} for token in told) if num_alternatives else ()
        return self.token_ids, [token.logprob for token in told], [_ranked(top)[:num_alternatives] for top in tops]


class Answer(msgspec.Struct, Generic[_Choice]):
    """An answer, or one event of it. ``error`` stands in the place of choices when a stream breaks off."""

    choices: list[_Choice] = []
    error: object = None


Decoder: TypeAlias = msgspec.json.Decoder[Answer[Choice]] | msgspec.json.Decoder[Answer[TokensChoice]]
COMPLETION: Decoder = msgspec.json.Decoder(Answer[Choice])
TOKENS: Decoder = msgspec.json.Decoder(Answer[TokensChoice])


class BadAnswer(Exception):
    """The server did not answer with token ids and log-probs."""


class EventReader:
    """Joins the events of a stream into one answer, and tells each event's tokens as they arrive.

    Args:
        num_alternatives: how many were asked for; the server adds the chosen token to them.
        decoder: of one event.
    """

    def __init__(self, on_tokens: Callable[[TokenChunk], None], num_alternatives: int, decoder: Decoder) -> None:
        self._on_tokens = on_tokens
        self._num_alternatives = num_alternatives
        self._decoder = decoder
        self._rest = b""
        self._tokens: _Tokens = ([], [], [])
        self._finish_reason: str | None = None

    def answer(self) -> tuple[_Tokens, str | None]:
        """All that came, and why it ended; None where the stream ended too soon."""
        return self._tokens, self._finish_reason

    def feed(self, data: bytes) -> None:
        """Take bytes as they come from the network.

        Raises:
            BadAnswer: an event is none, or tells of an error.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            event = line.removeprefix(b"data:").strip()
            if len(event) < len(line) and event != b"[DONE]":
                self._take(event)

    def _take(self, data: bytes) -> None:
        try:
            event = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise BadAnswer(f"an event is no completion: {error}") from error
        if event.error is not None:
            raise BadAnswer(f"the stream broke off: {event.error}")
        for choice in event.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
            if not choice.has_tokens:
                continue  # the last one says only why it ended
            token_ids, log_probs, alternatives = choice.tokens(self._num_alternatives)
            self._tokens[0].extend(token_ids)
            self._tokens[1].extend(log_probs)
            self._tokens[2].extend(alternatives)
            self._on_tokens(TokenChunk(token_ids=token_ids, log_probs=log_probs, alternatives=alternatives))


def read_answer(body: bytes, num_alternatives: int, decoder: Decoder) -> tuple[_Tokens, str | None]:
    """A whole answer, and why it ended.

    Raises:
        BadAnswer: it is none.
    """
    try:
        choice = decoder.decode(body).choices[0]
        return choice.tokens(num_alternatives), choice.finish_reason
    except (msgspec.MsgspecError, IndexError) as error:
        raise BadAnswer(str(error)) from error


def _ids(names: list[str]) -> list[int]:
    try:
        ids = [int(name[len(_TOKEN_ID) :]) for name in names if name.startswith(_TOKEN_ID)]
    except ValueError as error:
        raise BadAnswer(f"it returns token ids that are none: {error}") from error
    if len(ids) != len(names):
        raise BadAnswer("it returns no token ids; a vLLM of 0.24 or later does")
    return ids


def _ranked(top: Mapping[str, float]) -> _Ranked:
    named = ((name.removeprefix(_TOKEN_ID), value) for name, value in top.items() if name.startswith(_TOKEN_ID))
    return tuple(sorted(((int(number), value) for number, value in named), key=lambda pair: -pair[1]))


class PromptTexts:
    """JSON of growing prompts: a session's next prompt usually begins with its last one, whose text is kept.

    Writing 128,000 ids takes six milliseconds, writing the thousand that are new takes none. Holds the last prompt of
    each session, as long as all of them together stay below ``max_bytes``.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._known: LRUCache[str, tuple[TokenPath, bytearray]] = LRUCache(
            max_bytes, getsizeof=lambda known: known[0].num_bytes + len(known[1])
        )

    @property
    def num_bytes(self) -> int:
        return int(self._known.currsize)

    def encode(self, session_id: str, token_ids: Sequence[int]) -> tuple[bytes, bytearray, bytes]:
        """The ids as a JSON list, in pieces: to be joined at once, for the session's next prompt changes them."""
        path = TokenPath.of(token_ids)
        earlier, text = self._known.pop(session_id, (EMPTY, bytearray()))
        added = path.since(earlier) if earlier else None
        if added is None:
            text = bytearray(_items(path.flat()))
        elif added:
            text += b",%b" % _items(added)
        with contextlib.suppress(ValueError):  # this one alone is larger than all may be
            self._known[session_id] = (path, text)
        return b"[", text, b"]"

    def forget(self, session_id: str) -> None:
        """The session has ended."""
        self._known.pop(session_id, None)


def _items(ids: array[int]) -> bytes:
    return msgspec.json.encode(ids.tolist())[1:-1]
