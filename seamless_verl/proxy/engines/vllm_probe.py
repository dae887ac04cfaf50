"""What a vLLM server can do, found out by trying, once, before requests are taken."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from seamless_verl.errors import ConfigError
from seamless_verl.proxy.engine import Ability, EngineRefused, EngineUnavailable, GenerationRequest
from seamless_verl.proxy.engines.vllm_http import GENERATE_ROUTE, VllmHttpEngine
from seamless_verl.proxy.engines.vllm_pictures import NEEDS, NoPictures, VllmPictures, plain_picture
from seamless_verl.proxy.text.pictures import BadImage, ImageReader
from seamless_verl.trajectory.generation import GRAMMAR_PREFIX, Decode, Generation

_log = logging.getLogger(__name__)
ABILITIES = frozenset({Ability.STRUCTURED_OUTPUTS, Ability.TOP_LOGPROBS})  # of every server
_PROBE_S = 30.0
_PAUSED_PROBE_S = 5.0  # so much longer each time, since its queue may be long instead
_FORCED = "seamless 0123456789 goes on"  # more than two tokens for any tokenizer


class ServedModel(msgspec.Struct):
    """A model as a vLLM server lists it; ``max_model_len`` in tokens, None where the server does not say."""

    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[ServedModel]


async def served_model(engine: VllmHttpEngine, *, is_paused: bool = False) -> ServedModel:
    """What the server serves under our model's name; also that it returns token ids, with a completion of one.

    Args:
        is_paused: an earlier process was, so the server may be as well, and is waited for.

    Raises:
        ConfigError: no server, another model, or one that returns no token ids.
    """
    where = engine.server.base_url
    try:
        status, body = await engine.server.request("GET", "/v1/models", timeout_s=_PROBE_S)
    except EngineUnavailable as error:
        raise ConfigError("--engine", where, str(error), "start it first: vllm serve MODEL --port PORT") from error
    try:
        cards = {card.id: card for card in msgspec.json.decode(body, type=_Models).data}
    except msgspec.MsgspecError as error:
        story = f"GET /v1/models answered {status}, which is no list of models"
        raise ConfigError("--engine", where, story, "name a vLLM server (and its key, if it has one)") from error
    card = cards.get(engine.model)
    if card is None:
        fix = f"--served-model {' or '.join(sorted(cards)) or 'NAME'}"
        raise ConfigError("--served-model", engine.model, f"{where} does not serve it", fix)
    for number in count():
        try:
            timeout_s = min((number + 1) * _PAUSED_PROBE_S, _PROBE_S) if is_paused else _PROBE_S
            await _try(engine, (0,), {"max_tokens": 1}, timeout_s=timeout_s)
            break
        except (EngineUnavailable, EngineRefused) as error:
            if not isinstance(error.__cause__, asyncio.TimeoutError):
                raise ConfigError("--engine", where, str(error), "use a vLLM of 0.24 or later") from error
            if not is_paused:
                fix = "is it paused or asleep? Resume or wake it (POST /resume, POST /wake_up)"
                raise ConfigError("--engine", where, f"answers no completion: {error}", fix) from error
            if not number:
                _log.warning("%s answers no completion: is it paused, too, or asleep? Waiting until it does", where)
    return card


async def continues_grammars(engine: VllmHttpEngine, decode: Decode) -> bool:
    """Whether our plug-in is in the server's process, so that an interrupted answer under a grammar goes on.

    Tried with a text whose end is asked for: where nobody moves the grammar, the text begins anew.
    """
    ids: list[int] = []
    try:
        for max_tokens in (2, 64):
            forced = {"max_tokens": max_tokens, "structured_outputs": {"choice": [_FORCED]}}
            moved = {"extra_args": {GRAMMAR_PREFIX: len(ids)}} if ids else {}
            ids += (await _try(engine, (0, *ids), {**forced, **moved})).token_ids
    except (EngineUnavailable, EngineRefused):
        return False
    return decode(ids).startswith(_FORCED)


async def show_pictures(engine: VllmHttpEngine, placeholder: int, *, max_pixels: int) -> ImageReader:
    """Enable pictures, read by the server's own processor.

    Args:
        placeholder: id of the token that stands for pictures.
        max_pixels: of one picture.

    Raises:
        NoPictures: it cannot, and what would help.
    """
    pictures = engine.pictures = VllmPictures(engine.server, engine.model, placeholder, max_pixels=max_pixels)
    try:
        black, white = [await _look(engine, pictures, plain_picture(grey)) for grey in (0, 255)]
        if black == white:  # a server that does not know `features` ignores them
            raise NoPictures(f"{GENERATE_ROUTE} of this server does not look at pictures; {NEEDS}")
    except NoPictures:
        engine.pictures = None
        raise
    return pictures


async def _look(engine: VllmHttpEngine, pictures: VllmPictures, data: bytes) -> float:
    """The log-prob of the model's first token after a picture."""
    try:
        prompt_ids = await pictures.prompt(data)
        return (await _try(engine, prompt_ids, {"max_tokens": 1, "temperature": 0.0}, (data,))).log_probs[0]
    except NoPictures:
        raise
    except (BadImage, EngineUnavailable, EngineRefused, IndexError) as error:
        raise NoPictures(f"a picture that was tried: {error}; {NEEDS}") from error


async def _try(
    engine: VllmHttpEngine,
    prompt_ids: Sequence[int],
    sampling: Mapping[str, Any],
    images: Sequence[bytes] = (),
    *,
    timeout_s: float = _PROBE_S,
) -> Generation:
    request = GenerationRequest(
        request_id=f"probe-{time.time_ns()}",
        session_id="",
        prompt_ids=prompt_ids,
        sampling=sampling,
        deadline=time.time() + timeout_s,
        images=images,
    )
    return await engine.generate(request)
