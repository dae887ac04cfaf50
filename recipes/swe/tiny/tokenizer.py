"""The tokenizer of the tiny model: a regular expression splits code into short pieces, byte-level BPE merges them.

It has exactly ``VOCABULARY`` entries, the size of the model's embedding. The first three ids are fixed; the last four
are the marks of tool calls, ordinary text to the tokenizer's user (they survive ``skip_special_tokens``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 1024
MAX_LENGTH = 2048
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, TURN_START_ID, TURN_END_ID = 0, 1, 2
TOOL_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Digits stand alone, an operator keeps the blank before it, a word too; a docstring's quotes are one piece.
_PIECE = (
    r"\d| ?[A-Za-z]+|_| ?->| ?(?:[<>=!+\-*/%]=|//|[<>=+\-*/%])|\"\"\"\.?|[()\[\]|:,.']+|\n|\s+"
)  # fmt: skip


def train(conversations: Iterable[Sequence[str]]) -> PreTrainedTokenizerFast:
    """Train on conversations (user and assistant texts); entries that they do not fill are reserved marks."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TOOL_MARKS),
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(("user\nassistant\n".join(texts) for texts in conversations), trainer)
    unused = VOCABULARY - len(TOOL_MARKS) - bpe.get_vocab_size()
    bpe.add_special_tokens([AddedToken(f"<|reserved_{index}|>", special=True) for index in range(unused)])
    bpe.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in TOOL_MARKS])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=files(__package__).joinpath("chat_template.jinja").read_text(encoding="utf-8"),
    )
    assert len(tokenizer) == VOCABULARY
    return tokenizer


def render(texts: Sequence[str], *, open_turn: bool) -> str:
    """What the chat template makes of alternating user and assistant texts; much faster, for bulk data."""
    roles = ("user", "assistant")
    turns = (f"{TURN_START}{roles[index % 2]}\n{text}{TURN_END}\n" for index, text in enumerate(texts))
    return "".join(turns) + (f"{TURN_START}assistant\n" if open_turn else "")


def encode_conversation(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> tuple[list[int], list[int]]:
    """Token ids of a whole conversation and a mask that is 1 on assistant tokens, the closing mark included."""
    ids: list[int] = []
    mask: list[int] = []
    for index in range(0, len(texts), 2):
        prompt = ("\n" if index else "") + render(texts[index : index + 1], open_turn=True)
        for text, flag in ((prompt, 0), (texts[index + 1] + TURN_END, 1)):
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            mask += [flag] * len(piece)
    return ids, mask
