"""Pictures through a Hugging Face processor (Qwen-VL's, LLaVA's, Pixtral's, …)."""

from __future__ import annotations

import asyncio
import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from seamless_verl.proxy.text.pictures import BadImage

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


class ProcessorReader:
    """An :class:`~seamless_verl.proxy.text.pictures.ImageReader`.

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
        """See :class:`~seamless_verl.proxy.text.pictures.ImageReader`."""
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
