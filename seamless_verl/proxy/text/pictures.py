"""Pictures of a session: taken in once, named by what they look like, kept for as long as its tokens.

::

    data: URL ─▶ known? ─▶ decoded, processed ─▶ journal ─▶ table of the session ─▶ Image in a message
                   └───────────────────────────────────────────▲

Invariant: a picture is in the journal before any turn that shows it, and keeps its number for ever.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from io import BytesIO
from typing import Any, Protocol

import msgspec

from seamless_verl.proxy.calls import ApiError, Call, bad_request
from seamless_verl.proxy.engine import EngineUnavailable
from seamless_verl.proxy.limits import Limits
from seamless_verl.trajectory.messages import Image
from seamless_verl.trajectory.rows import Row
from seamless_verl.trajectory.tokens import EMPTY, TokenPath, mark, numbers_in, plain

TEXT_ONLY = "this model takes text only"
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # what OpenAI and Anthropic take
# What Pillow's decoders raise for files that were cut off or tampered with.
_DECODER_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    TypeError,
    EOFError,
    LookupError,
    ArithmeticError,
    struct.error,
    zlib.error,
)


class BadImage(Exception):
    """Bytes that are no picture, or one that is too large."""


class ImageReader(Protocol):
    """What a model's processor makes of pictures."""

    @property
    def placeholder(self) -> int:
        """Id of the token that the chat template writes for a picture, and that stands many times in its place."""
        ...

    async def read(self, data: bytes) -> Sequence[int]:
        """Token ids of one picture. Takes a while.

        Raises:
            BadImage: this is none.
            EngineUnavailable: the model's server reads pictures, and does not answer.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """One picture of a session; ``token_ids`` are the model's own, ``data`` the file as it was sent."""

    digest: str
    placeholder: int
    token_ids: Sequence[int]
    data: bytes


class ImageTable:
    """Pictures of one session, by number."""

    def __init__(self) -> None:
        self._stored: list[StoredImage] = []
        self._by_digest: dict[str, Image] = {}
        self._last: tuple[TokenPath, TokenPath, tuple[int, ...]] = (EMPTY, EMPTY, ())
        self.num_bytes = 0
        self.adding = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._stored)

    def find(self, digest: str) -> Image | None:
        return self._by_digest.get(digest)

    def add(self, stored: StoredImage) -> Image:
        """Give a picture the next number."""
        marked = mark(stored.token_ids, stored.placeholder, len(self._stored))
        image = self._by_digest[stored.digest] = Image(digest=stored.digest, token_ids=marked)
        self._stored.append(stored)
        self.num_bytes += len(stored.data)
        return image

    def prompt(self, marked: TokenPath) -> tuple[TokenPath, list[bytes]]:
        """A prompt as the model knows it, and the files of its pictures in its order.

        Only what is new since the last prompt is looked at, where that one is continued.
        """
        if not self._stored:
            return marked, []
        earlier, plain_ids, numbers = self._last
        added = marked.since(earlier)
        if added is None:
            added, plain_ids, numbers = marked.flat(), EMPTY, ()
        plain_ids, numbers = plain_ids.then(plain(added, self._stored[0].placeholder)), numbers + numbers_in(added)
        self._last = (marked, plain_ids, numbers)
        return plain_ids, [self._stored[number].data for number in numbers]

    def released(self, row: Row) -> Row:
        """A row as it leaves: with the model's own ids, and its pictures by name."""
        if not self._stored:
            return row
        images = tuple(self._stored[number].digest for number in numbers_in(row.token_ids))
        ids = tuple(plain(row.token_ids, self._stored[0].placeholder))
        return msgspec.structs.replace(row, token_ids=ids, images=images)

    def files(self, rows: Sequence[Row]) -> dict[str, bytes]:
        """The pictures of some rows by their digests."""
        wanted = {digest for row in rows for digest in row.images}
        return {stored.digest: stored.data for stored in self._stored if stored.digest in wanted}


class ImageStore(Protocol):
    """Where pictures outlive the process; a slice of the journal."""

    async def pictured(self, session_id: str, number: int, stored: StoredImage) -> None: ...


class ImageIntake:
    """Takes the pictures of requests in.

    Args:
        reader: None for a model, or an engine, that takes text only.
        no_images_reason: told to a client that sends a picture although there is no reader.
    """

    def __init__(self, reader: ImageReader | None, limits: Limits, no_images_reason: str) -> None:
        self._reader = reader
        self._limits = limits
        self._no_images_reason = no_images_reason

    async def take(self, session_id: str, table: ImageTable, store: ImageStore, call: Call) -> Call:
        """The same call with an :class:`Image` in place of each picture's URL.

        Raises:
            ApiError: 400 or 413, naming the picture at fault; 503, the journal failed.
        """
        places = [
            (number, at)
            for number, message in enumerate(call.raw_messages)
            if isinstance(message.get("content"), list)
            for at, part in enumerate(message["content"])
            if part.get("type") == "image_url" and not isinstance(part.get("image_url"), Image)
        ]
        if not places:
            return call
        messages: list[Mapping[str, Any]] = list(call.raw_messages)
        async with table.adding:
            for number, at in places:
                message = messages[number]
                # Other dialects say where the picture stands in what they were sent.
                where = message["content"][at].get("place", f"messages.{number}.content.{at}")
                if self._reader is None:
                    raise _unsupported(where, self._no_images_reason)
                if message.get("role") not in ("user", "tool"):
                    raise _unsupported(where, "pictures stand in user and tool messages")
                part = message["content"][at]
                image = await self._taken(session_id, table, store, part, where, self._reader)
                parts = [*message["content"]]
                parts[at] = {"type": "image_url", "image_url": image}
                messages[number] = {**message, "content": parts}
        return replace(call, raw_messages=messages)

    async def _taken(
        self,
        session_id: str,
        table: ImageTable,
        store: ImageStore,
        part: Mapping[str, Any],
        where: str,
        reader: ImageReader,
    ) -> Image:
        payload = _payload(part.get("image_url"), where)
        digest = blake2b(payload, digest_size=16).hexdigest()
        known = table.find(digest)
        if known is not None:
            return known
        if len(table) >= self._limits.max_session_images:
            story = f"A session may show {self._limits.max_session_images} pictures."
            raise ApiError(413, "too_many_images", story, param=where)
        if len(payload) * 3 // 4 > self._limits.max_image_bytes:
            story = f"{where} is larger than {self._limits.max_image_bytes} bytes."
            raise ApiError(413, "image_too_large", story, param=where)
        try:
            data = base64.b64decode(payload, validate=True)
            token_ids = await reader.read(data)
        except (binascii.Error, BadImage) as error:
            raise bad_request(f"{where} is no picture: {error}.", param=where, code="invalid_image") from None
        except EngineUnavailable as error:
            raise ApiError(503, "engine_unavailable", f"{where} cannot be read: {error}.", retry_after_s=1.0) from None
        if table.num_bytes + len(data) > self._limits.max_session_image_bytes:
            story = f"The pictures of a session may have {self._limits.max_session_image_bytes} bytes together."
            raise ApiError(413, "too_many_images", story, param=where)
        stored = StoredImage(digest=digest, placeholder=reader.placeholder, token_ids=token_ids, data=data)
        await store.pictured(session_id, len(table), stored)
        return table.add(stored)


def _payload(source: Any, where: str) -> bytes:
    """The base64 text of a ``data:`` URL."""
    url = source.get("url") if isinstance(source, Mapping) else None
    if not isinstance(url, str):
        raise bad_request(f"{where}.image_url.url is missing or no text.", param=where)
    if source.get("detail") == "low":
        raise bad_request(f"{where}: pictures are read in full detail, not low.", param=where, code="unsupported_value")
    head, comma, _ = url[:100].partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        story = "send the picture itself as data:image/…;base64,… (nothing is fetched for an agent)"
        raise _unsupported(where, story)
    try:
        return url[len(head) + 1 :].encode("ascii")
    except UnicodeEncodeError:
        raise bad_request(f"{where} is not base64.", param=where, code="invalid_image") from None


def _unsupported(where: str, why: str) -> ApiError:
    return bad_request(f"{where} is a picture; {why}.", param=where, code="unsupported_content")


class ProcessorReader:
    """An :class:`ImageReader` by a Hugging Face processor (Qwen-VL's, LLaVA's, Pixtral's, …).

    Args:
        processor: with ``image_token``, which its chat template writes once per picture.
        arguments: of its calls, as everybody else who processes these pictures gives them.
        max_pixels: of one picture.
    """

    def __init__(self, processor: Any, arguments: Mapping[str, Any], *, max_pixels: int) -> None:
        self._processor = processor
        self._arguments = dict(arguments)
        self._max_pixels = max_pixels
        self._lock = threading.Lock()  # its tokenizer sets padding on an object that threads would share
        self.placeholder = int(processor.tokenizer.convert_tokens_to_ids(processor.image_token))

    async def read(self, data: bytes) -> Sequence[int]:
        """See :class:`ImageReader`."""
        return await asyncio.to_thread(self._read, data)

    def _read(self, data: bytes) -> Sequence[int]:
        picture = open_image(data, max_pixels=self._max_pixels)
        try:
            with self._lock:
                made = self._processor(text=[self._processor.image_token], images=[picture], **self._arguments)
        except (ValueError, TypeError) as error:  # e.g. 200 times as wide as high
            raise BadImage(f"the model's processor refuses it: {error}") from error
        return [int(token) for token in made["input_ids"][0]]


def open_image(data: bytes, *, max_pixels: int | None = None) -> Any:
    """A file as an RGB picture (``PIL.Image.Image``); of an animation the first frame.

    Raises:
        BadImage: it is none, or has more than ``max_pixels``.
    """
    from PIL import Image

    try:
        with Image.open(BytesIO(data), formats=_FORMATS) as picture:
            width, height = picture.size
            if max_pixels is not None and width * height > max_pixels:
                raise BadImage(f"it has {width} x {height} pixels; {max_pixels} are the limit")
            return picture.convert("RGB")
    except (*_DECODER_ERRORS, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImage(f"it cannot be read as {', '.join(_FORMATS)}: {error}") from error
