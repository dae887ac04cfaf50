"""Which part of an unfinished answer is settled, whatever comes next: that part may be streamed.

::

    START ──opening tag──▶ THINKING ──closing tag──▶ AFTER ──▶ CONTENT ──tool call begins──▶ HELD
      └──────────────anything else─────────────────────────────▶ │

Held back are: text that may become a tag, white space that the end may strip, and everything from the first tool call
on. Each character is looked at a bounded number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNDECODED = "�"  # what a decoder writes for bytes that are no character yet
_MAX_UNDECODED = 64


class TextDecoder:
    """Token ids to text, as they come; only whole characters leave.

    Decodes a window of the last few tokens, so that an answer costs linear time. Bytes that do not become a character
    within a few tokens end the early decoding; the whole answer is decoded at its end anyway.

    Args:
        open_ids: tokens that may still change what stands before them (:attr:`~.rendering.Codec.open_ids`).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], open_ids: frozenset[int] = frozenset()) -> None:
        self._decode = decode
        self._open_ids = open_ids
        self._ids: list[int] = []
        self._start = self._read = self._num_undecoded = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens settle."""
        self._ids.extend(token_ids)
        if self._num_undecoded > _MAX_UNDECODED or (self._ids and self._ids[-1] in self._open_ids):
            return ""
        known = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(known) or text.endswith(_UNDECODED):
            self._num_undecoded += len(token_ids)
            return ""
        # The window starts with what was read last: some decoders treat the first token of a text in a special way.
        self._start, self._read, self._num_undecoded = self._read, len(self._ids), 0
        return text[len(known) :]


def open_ids_of(backend: Tokenizer, *, skips_special: bool) -> frozenset[int]:
    """Single bytes of a vocabulary that falls back to them (``<0xE2>``: Llama 2, Mistral, Gemma); others have none.

    Their decoder reads a run of bytes as a whole: one cut character makes each byte of the run a replacement character,
    also those of whole characters before it. Special tokens that are not shown do not end a run.
    """
    named = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    singles = frozenset(token for token in named if token is not None)
    if not singles or not skips_special:
        return singles
    return singles | {token for token, added in backend.get_added_tokens_decoder().items() if added.special}


class StopCutter:
    """Lets text out up to the first stop string, and keeps back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._pending = ""
        self._stopped = False

    def feed(self, text: str) -> str:
        if self._stopped:
            return ""
        pending = self._pending + text
        ends = [at for stop in self._stops if (at := pending.find(stop)) >= 0]
        # A stop string that began earlier may still end; what it takes is then more.
        keep = max((overlap(pending, stop) for stop in self._stops), default=0)
        settled = min([len(pending) - keep, *ends])
        self._stopped = bool(ends)
        self._pending = pending[settled:]
        return pending[:settled]


class _Phase(Enum):
    START = "start"
    THINKING = "thinking"
    AFTER = "after"
    CONTENT = "content"
    HELD = "held"


class Settler:
    """See the module.

    Args:
        think_tags: opening and closing tag of reasoning; None for none.
        thinking: the prompt already opened the reasoning.
        tool_marker: how a tool call begins; None when calls are just text; "" when nobody knows, so that no content
            can be settled before the end.
        plain_start: whether text without an opening tag is surely content.
    """

    def __init__(
        self,
        *,
        think_tags: tuple[str, str] | None,
        thinking: bool,
        tool_marker: str | None,
        plain_start: bool = True,
    ) -> None:
        self._opening, self._closing = think_tags or ("", "")
        self._marker = tool_marker
        self._pending = ""
        self._otherwise = _Phase.CONTENT if plain_start else _Phase.HELD
        self._phase = _Phase.START if think_tags is not None else self._otherwise
        self._thinking = thinking
        self._said_reasoning = False

    def feed(self, text: str) -> tuple[str, str]:
        """Reasoning and content that this text settles."""
        self._pending += text
        reasoning = ""
        if self._phase is _Phase.START:
            self._begin()
        if self._phase is _Phase.THINKING:
            reasoning = self._think()
        if self._phase is _Phase.AFTER:
            self._pending = self._pending.lstrip("\n")
            if self._pending:
                self._phase = _Phase.CONTENT
        return reasoning, self._say() if self._phase is _Phase.CONTENT else ""

    def _begin(self) -> None:
        head = self._pending.lstrip()
        if head.startswith(self._opening):
            self._pending, self._phase = head[len(self._opening) :], _Phase.THINKING
        elif not self._opening.startswith(head):
            self._phase = _Phase.THINKING if self._thinking else self._otherwise

    def _think(self) -> str:
        head, found, tail = self._pending.partition(self._closing)
        if found:
            self._pending, self._phase = tail, _Phase.AFTER
            settled = head.rstrip()
        else:
            settled = head[: len(head) - overlap(head, self._closing)].rstrip()
            self._pending = head[len(settled) :]
        if not self._said_reasoning:
            settled = settled.lstrip()
            self._said_reasoning = bool(settled)
        return settled

    def _say(self) -> str:
        if self._marker is None:
            settled, self._pending = self._pending, ""
            return settled
        if not self._marker:
            return ""
        head, found, _ = self._pending.partition(self._marker)
        if found:
            self._phase, self._pending = _Phase.HELD, ""
            return head.rstrip()
        settled = head[: len(head) - overlap(head, self._marker)].rstrip()
        self._pending = head[len(settled) :]
        return settled


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that begins ``tag`` without being all of it."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
