"""A real multimodal processor and real picture files, made on the spot."""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO
from typing import Any

from tests.fakes import small_tokenizer

VISION_TOKENS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_end|>")
VISION_CHATML = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{%- endfor %}{% endif %}"
    "{%- for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@lru_cache(maxsize=1)
def small_processor() -> Any:
    """A real Qwen2.5-VL processor over a small tokenizer; its video half, which needs torchvision, is left out."""
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class Qwen2_5_VLImagesProcessor(Qwen2_5_VLProcessor):
        def check_argument_for_proper_class(self, *_: Any) -> None:
            return None

    tokenizer = small_tokenizer(VISION_CHATML, special=VISION_TOKENS)
    images: Any = Qwen2VLImageProcessorPil
    make: Any = Qwen2_5_VLImagesProcessor
    return make(
        image_processor=images(min_pixels=4 * 28 * 28, max_pixels=64 * 28 * 28),
        tokenizer=tokenizer,
        video_processor=None,
        chat_template=VISION_CHATML,
    )


def picture(colour: tuple[int, int, int], size: tuple[int, int] = (100, 80), form: str = "PNG") -> bytes:
    """A file of one colour."""
    from PIL import Image

    file = BytesIO()
    Image.new("RGB", size, colour).save(file, form)
    return file.getvalue()
