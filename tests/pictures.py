"""A real multimodal processor and real picture files, made on the spot."""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

from tests.fakes import small_tokenizer

VISION_TOKENS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_end|>")
PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>")
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


def save_model(folder: Path) -> Path:
    """A Qwen2.5-VL of two layers that likes to write placeholders, and its processor; needs torchvision."""
    import torch
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    make: Any
    tokenizer = small_tokenizer(VISION_CHATML, special=VISION_TOKENS)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in VISION_TOKENS}
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    text = dict(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    text |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, rope_scaling=rope)
    vision = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=4, out_hidden_size=128, patch_size=14)
    vision |= dict(fullatt_block_indexes=[1], window_size=112, spatial_merge_size=2, temporal_patch_size=2)
    config = Qwen2_5_VLConfig(
        text_config={**text, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": ids["<|im_end|>"]},
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    make = Qwen2_5_VLForConditionalGeneration
    model = make(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)  # far from indifferent
        for placeholder, liked in zip(PLACEHOLDERS, ("e", "o"), strict=True):
            rows = model.lm_head.weight
            rows[ids[placeholder]] = 4 * rows[tokenizer.convert_tokens_to_ids(liked)]
    model.save_pretrained(folder)
    make = Qwen2_5_VLProcessor
    sizes: Any = dict(min_pixels=4 * 28 * 28, max_pixels=64 * 28 * 28)
    images, videos = Qwen2VLImageProcessor(**sizes), Qwen2VLVideoProcessor(**sizes)
    processor = make(image_processor=images, tokenizer=tokenizer, video_processor=videos, chat_template=VISION_CHATML)
    processor.save_pretrained(folder)
    return folder
