"""Pictures through the processor of the vLLM server that answers: read once, sent with every prompt that shows them.

::

    file ─▶ its pixels ──/v1/chat/completions/render──▶ features ─▶ cache ─┐
                                                            prompt ids ────┴──▶ /inference/v1/generate

Invariants: the pixels are those that training reads of the same file; each placeholder of a prompt belongs to exactly
one picture, and the prompt's ids stay as they were recorded.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Protocol

import msgspec
from cachetools import LRUCache

from seamless_verl.proxy.engine import EngineRefused, EngineUnavailable
from seamless_verl.proxy.text.pictures import BadImage, open_image
from seamless_verl.trajectory.tokens import TokenPath

RENDER_ROUTE = "/v1/chat/completions/render"
_RENDER_S = 60.0
_MAX_BYTES = 1 << 30  # of tensors, in the cache and in one request
NEEDS = "pictures need a vLLM of 0.27 or later"
# What `/v1/completions` takes from the model's generation config where a request is silent; the other route does not.
_DEFAULTS = ("temperature", "top_p", "top_k")


class NoPictures(EngineUnavailable):
    """This server cannot read pictures; the message says what would help."""


class _Range(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Range]]
    kwargs_data: dict[str, list[msgspec.Raw]] | None = None


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None
    sampling_params: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """One picture as the server's processor encoded it.

    Attributes:
        prompt_ids: the server's own prompt of a chat that is this picture.
        data: JSON of its tensors, which only vLLM reads.
        num_bytes: of the file and of ``data``.
    """

    digest: str
    num_tokens: int
    prompt_ids: Sequence[int]
    data: msgspec.Raw
    num_bytes: int


class Server(Protocol):
    """Requests to one vLLM server (:class:`seamless_verl.proxy.engines.vllm_http.VllmServer`)."""

    base_url: str

    async def request(self, method: str, path: str, body: bytes, *, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of the answer.

        Raises:
            EngineUnavailable: there is none.
        """
        ...


class VllmPictures:
    """An :class:`~seamless_verl.proxy.text.pictures.ImageReader`.

    Args:
        server: that answers.
        model: the name that it serves.
        placeholder: id of the token that stands, alone and many times, in the place of a picture.
        max_pixels: of one picture.

    Attributes:
        defaults: sampling of the server where a request is silent; known once a picture was read.
    """

    def __init__(self, server: Server, model: str, placeholder: int, *, max_pixels: int) -> None:
        self.placeholder = placeholder
        self.defaults: Mapping[str, Any] = {}
        self._server = server
        self._model = model
        self._max_pixels = max_pixels
        self._decoder = msgspec.json.Decoder(_Rendered)
        self._seen: LRUCache[bytes, _Seen] = LRUCache(_MAX_BYTES, getsizeof=lambda seen: seen.num_bytes)

    async def read(self, data: bytes) -> Sequence[int]:
        """See :class:`~seamless_verl.proxy.text.pictures.ImageReader`."""
        return [self.placeholder] * (await self._see(data)).num_tokens

    async def prompt(self, data: bytes) -> Sequence[int]:
        """A chat that is one picture, as the server's own chat template writes it. Errors as of :meth:`read`."""
        return (await self._see(data)).prompt_ids

    async def features(self, images: Sequence[bytes], prompt_ids: Sequence[int]) -> dict[str, Any]:
        """``features`` of a generate request: what each picture is, and where it stands in the prompt.

        Raises:
            EngineUnavailable: the server cannot read them now.
            EngineRefused: it never will, or reads other tokens than were recorded.
        """
        seen, num_bytes = [], 0
        for data in images:
            try:
                one = await self._see(data)
            except BadImage as error:
                raise EngineRefused(f"a picture of this session: {error}") from error
            num_bytes += len(one.data)
            if num_bytes > _MAX_BYTES:
                story = f"the tensors of this prompt's {len(images)} pictures have more than {_MAX_BYTES >> 20} MiB"
                raise EngineRefused(f"{story}; give the server smaller ones (--mm-processor-kwargs, max_pixels)")
            seen.append(one)
        return {
            "mm_hashes": {"image": [one.digest for one in seen]},
            "mm_placeholders": {"image": self._places(seen, TokenPath.of(prompt_ids))},
            "kwargs_data": {"image": [one.data for one in seen]},
        }

    def _places(self, seen: Sequence[_Seen], prompt: TokenPath) -> list[_Range]:
        ids, end, places = prompt.flat(), 0, []
        num_placeholders, num_tokens = ids.count(self.placeholder), sum(one.num_tokens for one in seen)
        for one in seen if num_placeholders == num_tokens else ():
            start = ids.index(self.placeholder, end)
            end = start + one.num_tokens
            if ids[start:end].count(self.placeholder) != one.num_tokens:
                break
            places.append(_Range(start, one.num_tokens))
        if len(places) != len(seen):
            # E.g. started again with another --mm-processor-kwargs while a session was open.
            told = f"{num_placeholders} tokens of pictures were recorded, the server reads {num_tokens}"
            raise EngineRefused(f"{told}; serve the model with the settings that this session began with")
        return places

    async def _see(self, data: bytes) -> _Seen:
        """A picture as the server's processor reads it, from the cache where it is there.

        Raises:
            BadImage: it is none, or the processor refuses it.
            EngineUnavailable: no answer from the server, or (:class:`NoPictures`) one without features.
        """
        found = self._seen.get(data)
        if found is None:
            picture = await asyncio.to_thread(_pixels, data, self._max_pixels)
            found = await self._render(picture, len(data))
            with contextlib.suppress(ValueError):  # this one alone is larger than all may be
                self._seen[data] = found
        return found

    async def _render(self, picture: bytes, file_bytes: int) -> _Seen:
        url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"model": self._model, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
        status, data = await self._server.request("POST", RENDER_ROUTE, msgspec.json.encode(body), timeout_s=_RENDER_S)
        said = data[:300].decode("utf-8", "replace")
        if status in (400, 422):
            raise BadImage(f"the model's processor refuses it: {said}")
        if status in (404, 405):
            raise NoPictures(f"the vLLM server has no {RENDER_ROUTE}; {NEEDS}")
        if status != 200:
            raise EngineUnavailable(f"{self._server.base_url}{RENDER_ROUTE} answered {status}: {said}")
        try:
            rendered = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise NoPictures(f"{RENDER_ROUTE} answers no token ids ({error}); {NEEDS}") from error
        self.defaults = {name: value for name, value in rendered.sampling_params.items() if name in _DEFAULTS}
        return self._read(rendered, file_bytes)

    def _read(self, rendered: _Rendered, file_bytes: int) -> _Seen:
        features = rendered.features
        if features is None or features.kwargs_data is None:
            raise NoPictures(f"{RENDER_ROUTE} answers no tensors of a picture; {NEEDS}")
        try:
            (digest,), (place,) = features.mm_hashes["image"], features.mm_placeholders["image"]
            (data,) = features.kwargs_data["image"]
        except (KeyError, ValueError) as error:
            raise NoPictures(f"{RENDER_ROUTE} makes something else of one picture than one picture") from error
        if bytes(data) == b"null":  # older servers send the tensors of the same picture only once
            raise NoPictures(f"{RENDER_ROUTE} keeps the tensors; {NEEDS}, or one with --mm-processor-cache-gb 0")
        if rendered.token_ids[place.offset : place.offset + place.length] != [self.placeholder] * place.length:
            story = f"this model's pictures are not a run of its image token {self.placeholder} alone"
            raise NoPictures(f"{story}, and vLLM's {RENDER_ROUTE} tells no finer places")
        return _Seen(
            digest=digest,
            num_tokens=place.length,
            prompt_ids=array("i", rendered.token_ids),
            data=data.copy(),
            num_bytes=file_bytes + len(data),
        )


def _pixels(data: bytes, max_pixels: int) -> bytes:
    """A file as a plain RGB one. vLLM would turn it by its EXIF data and put white behind it; training does neither."""
    picture = open_image(data, max_pixels=max_pixels)
    file = BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()


def plain_picture(grey: int) -> bytes:
    """A small file of one colour, to try a server with.

    Raises:
        NoPictures: Pillow is not installed here.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise NoPictures("pictures need Pillow beside the proxy: pip install pillow") from error
    file = BytesIO()
    Image.new("RGB", (64, 64), (grey, grey, grey)).save(file, "PNG")
    return file.getvalue()
