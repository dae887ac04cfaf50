"""Chat templates of Hugging Face tokenizers, for prompts that grow and are never rendered twice.

An extension is taken from a short stand-in conversation, so that its cost does not depend on the history::

    before   [system] user  assistant:MARK<closing>
    after    [system] user  assistant:MARK<closing> new messages … generation prompt
                                          └──────── appended ────────┘

What the engine already generated of ``<closing>`` (usually the stop token) is not appended again. What the template
writes *before* the mark may shrink or grow right at the mark (templates that drop thinking from history do that): the
recorded tokens of the real answer stand there anyway. Any other difference means that the template rewrites history,
and the extension is refused. So it is where a question reads differently once it is answered: a template that writes
the system message into the last question only (Mistral v0.3) would otherwise have it in every turn of the prompt.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
from array import array
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from cachetools import LRUCache

from seamless_verl.proxy.text.tokenizer import UNDECODED, WordCache, bytes_of, open_ids_of
from seamless_verl.trajectory.matching import ExtensionRefused, Rendering
from seamless_verl.trajectory.messages import Image, Message, Role, ToolCall, digest_of

_MARK = "Zq7SeamlessMark7qZ"
_MOST_STOP_TOKENS = 64  # that a stop string has


class RenderingFailed(Exception):
    """The chat template refuses these messages; the client can correct that."""


_Key = TypeVar("_Key", bound="str | tuple[str, ...]")
_Value = TypeVar("_Value")
_ENTRY_BYTES = 200  # of an entry beside its texts


class TextCache(Generic[_Key, _Value]):
    """The most recently used results of a function of texts. Threads may share one.

    Invariant: ``num_bytes``, of keys and values, is at most ``max_bytes``: how long a text is, its sender decides.

    Args:
        make: the function.
        factor: how many times the memory of its texts a result takes, at most.
        max_bytes: of all; a result with more than a quarter of it is not kept.
    """

    def __init__(self, make: Callable[[_Key], _Value], *, factor: int, max_bytes: int) -> None:
        self._make = make
        self._factor = factor
        self._entries: LRUCache[_Key, tuple[_Value, int]] = LRUCache(max_bytes, getsizeof=lambda entry: entry[1])
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return int(self._entries.currsize)

    def get(self, key: _Key) -> _Value:
        with self._lock:
            known = self._entries.get(key)
        if known is not None:
            return known[0]
        value = self._make(key)
        texts = (key,) if isinstance(key, str) else key
        size = _ENTRY_BYTES + (1 + self._factor) * sum(map(sys.getsizeof, texts))
        if size <= self._entries.maxsize // 4:
            with self._lock:
                self._entries[key] = (value, size)
        return value


class TokenizerRenderer:
    """A :class:`~seamless_verl.trajectory.matching.Renderer` over one tokenizer, and the way back from ids to text.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        template_args: extra arguments of the template, e.g. ``{"enable_thinking": False}``.
        stop_token_ids: ids that end an answer; the tokenizer's end-of-sequence token when None.
        keep_special_tokens: whether decoded text shows special tokens, for parsers that look for them.
        placeholder: id of the token that the template writes for a picture; None for a model that takes none.
        others: ids that stand for what the proxy does not take, e.g. videos; no text may name one either.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template_args: dict[str, Any] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        keep_special_tokens: bool = False,
        placeholder: int | None = None,
        others: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._placeholder = placeholder
        self._others = frozenset(others) - {placeholder}
        # The tokenizer's own `encode` sets padding on a shared object, which concurrent threads must not do.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None and (self._backend.truncation or self._backend.padding):
            # As whoever saved it called it last; transformers sets both anew at each call.
            self._backend = copy.deepcopy(self._backend)
            self._backend.no_truncation()
            self._backend.no_padding()
        self._words = WordCache.of(self._backend) if self._backend is not None else None
        self._template_args = dict(template_args or {})
        self._skip_special_tokens = not keep_special_tokens
        eos = tokenizer.eos_token_id
        found = stop_token_ids if stop_token_ids is not None else ([] if eos is None else [eos])
        self._stop_token_ids = frozenset(int(token) for token in found)
        # Attempts at the same task begin with the same prompt, so one of a group pays for all.
        self._encoded = TextCache(self._encode_array, factor=6, max_bytes=16 << 20)
        self._closings = TextCache(self._plain_closing, factor=1, max_bytes=1 << 20)
        self._tools = TextCache(_template_tools, factor=8, max_bytes=8 << 20)
        self._keeps_questions = TextCache(self._keeps_question, factor=1, max_bytes=8 << 20)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids that end an answer and are no part of its text."""
        return self._stop_token_ids

    @property
    def placeholders(self) -> frozenset[int]:
        """Ids that stand for pictures and videos only; empty for a model that takes none."""
        return self._others if self._placeholder is None else self._others | {self._placeholder}

    @cached_property
    def open_ids(self) -> frozenset[int]:
        """Ids whose text may change with the next token, like that of a run of such ids."""
        return open_ids_of(self._backend, skips_special=self._skip_special_tokens) if self._backend else frozenset()

    @cached_property
    def prints_names(self) -> bool:
        """Whether the template writes who an assistant's message is from; one that it refuses may."""
        named = [Message(role=Role.USER, content="?"), Message(role=Role.ASSISTANT, content="?", name=_MARK)]
        try:
            return _MARK in self._text(named, (), add_generation_prompt=False)
        except RenderingFailed:
            return True

    @cached_property
    def _name_of(self) -> Callable[[str], str]:
        """From the id of a tool call to what the template is given: some, as Mistral v0.3's, take nine letters only."""
        call = Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id=_MARK, name="f", arguments="{}"),))
        asked = [Message(role=Role.USER, content="?"), call, Message(role=Role.TOOL, content="?", tool_call_id=_MARK)]
        for name_of in (str, _nine_letters):
            with suppress(RenderingFailed):
                self._text(asked, (), add_generation_prompt=True, name_of=name_of)
                return name_of
        return str

    def decode(self, token_ids: Sequence[int]) -> str:
        if self._backend is not None and not getattr(self._tokenizer, "clean_up_tokenization_spaces", False):
            plain: str = self._backend.decode(list(token_ids), skip_special_tokens=self._skip_special_tokens)
            return plain
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=self._skip_special_tokens)
        return text

    def bytes_of(self, token: int) -> bytes:
        """The token's own bytes, also where they are part of a character only."""
        text = self.decode([token])
        piece = self._backend.id_to_token(token) if self._backend is not None and UNDECODED in text else None
        own = bytes_of(piece) if piece is not None else None
        return text.encode("utf-8", "replace") if own is None else own

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary; every id is below it."""
        return len(self._tokenizer) if self._backend is None else int(self._backend.get_vocab_size())

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text completion's prompt, with the special tokens that the tokenizer puts around a text."""
        if self._backend is not None:
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=True)[0].ids
            return ids
        return list(self._tokenizer.encode(text))

    def encode(self, text: str) -> list[int]:
        """Ids of a text that already contains its special tokens."""
        known = self._words.encode(text) if self._words is not None else None
        if known is not None:
            return known
        if self._backend is not None:
            # The fast variant leaves out character offsets, which nobody here reads; it takes half the time.
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return ids
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def render_initial(self, messages: Sequence[Message], tools: Sequence[str]) -> Sequence[int]:
        """See :class:`seamless_verl.trajectory.matching.Renderer`."""
        return self._with_images(self._encoded.get(self._text(messages, tools, add_generation_prompt=True)), messages)

    def _encode_array(self, text: str) -> array[int]:
        return array("i", self.encode(text))

    def render_extension(
        self,
        previous_messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[str],
        known_ids: Sequence[int],
    ) -> Rendering:
        """See :class:`seamless_verl.trajectory.matching.Renderer`."""
        stub = _stub(previous_messages)
        system = [stub[0].content] if stub[0].role is Role.SYSTEM else []
        try:
            if not self._keeps_questions.get((str(len(system)), *system, *tools)):
                raise ExtensionRefused("the template writes a question differently once an answer follows it")
            behind = new_messages[0].behind if new_messages else ""
            asked = [*stub[:-1], replace(stub[-1], content=_MARK + behind)]
            before = self._text(asked, tools, add_generation_prompt=False)
            after = self._text([*stub, *new_messages], tools, add_generation_prompt=True)
        except RenderingFailed as error:
            raise ExtensionRefused(f"the template refuses a short form of this conversation: {error}") from error
        head_before, _, tail_before = before.partition(_MARK)
        head_after, mark, tail_after = after.partition(_MARK)
        if not mark or _MARK in tail_after:
            raise ExtensionRefused("the template does not write an earlier answer exactly once")
        if not head_before.startswith(head_after) and not head_after.startswith(head_before):
            raise ExtensionRefused("the template changes what stands before an earlier answer when messages follow it")
        if not tail_after.startswith(tail_before):
            raise ExtensionRefused("the template changes what stands after an earlier answer when messages follow it")
        closing = self._closing(tail_before, tools)
        added = self._with_images(self.encode(tail_after[len(tail_before) :]), new_messages)
        more = self._unwritten(known_ids, tail_before.removesuffix(closing)) if behind else ""
        if more:
            return Rendering(token_ids=[*self.encode(more + closing), *added])
        return self._join(known_ids, list(self._encoded.get(closing)), list(added))

    def _unwritten(self, known_ids: Sequence[int], behind: str) -> str:
        """What the agent wrote ``behind`` an answer, without the stop string that the model wrote itself.

        Raises:
            ExtensionRefused: the model ended the answer, or wrote more than the stop string.
        """
        written = "" if known_ids[-1] in self._stop_token_ids else self.decode(known_ids[-_MOST_STOP_TOKENS:])
        text = written.rstrip()
        for length in range(min(len(behind), len(text)), 0, -1):
            if text.endswith(behind[:length]):
                return behind[length:].removeprefix(written[len(text) :])
        raise ExtensionRefused("the agent wrote on where the model had ended its answer")

    def _with_images(self, ids: Sequence[int], messages: Sequence[Message]) -> Sequence[int]:
        """The ids with each picture in its place.

        Raises:
            RenderingFailed: a text contains a placeholder, or the template writes no picture where there is one.
        """
        named = next((token for token in self._others if token in ids), None)
        if named is not None:
            raise RenderingFailed(f"a text names token {named}, which stands for a video, and there is none")
        if self._placeholder is None:
            return ids
        images = [part for message in messages for part in message.parts if isinstance(part, Image)]
        if not images and self._placeholder not in ids:
            return ids
        places = [at for at, token in enumerate(ids) if token == self._placeholder]
        if len(places) != len(images):
            story = f"the prompt has {len(places)} places for {len(images)} pictures; no text may name one"
            raise RenderingFailed(story)
        filled, start = array("i"), 0
        for at, image in zip(places, images, strict=True):
            filled.extend(ids[start:at])
            filled.extend(image.token_ids)
            start = at + 1
        filled.extend(ids[start:])
        return filled

    def _join(self, known_ids: Sequence[int], closing: list[int], added: list[int]) -> Rendering:
        """Continue after whatever part of the closing the model generated itself."""
        last = known_ids[-1]
        if not closing:
            # Templates without a closing let the model stop with the header of the next role.
            if last in self._stop_token_ids and added and added[0] in self._stop_token_ids:
                return Rendering(token_ids=added, num_dropped=1)
            return Rendering(token_ids=added)
        for length in range(min(len(closing), len(known_ids)), 0, -1):
            if list(known_ids[-length:]) == closing[:length]:
                return Rendering(token_ids=closing[length:] + added)
        return Rendering(token_ids=closing + added)

    def _closing(self, tail: str, tools: Sequence[str]) -> str:
        """The end of an assistant message, without the tool calls that ``tail`` may begin with."""
        plain = self._closings.get(tuple(tools))
        if tail.endswith(plain):
            return plain
        texts = [self._tokenizer.decode([token]) for token in self._stop_token_ids]
        at = max((tail.rfind(text) for text in texts), default=-1)
        if at < 0:
            raise ExtensionRefused("the template ends an answer with tool calls in a way of its own")
        return tail[at:]

    def _plain_closing(self, tools: tuple[str, ...]) -> str:
        text = self._text(
            [Message(role=Role.USER, content="?"), Message(role=Role.ASSISTANT, content=_MARK)],
            tools,
            add_generation_prompt=False,
        )
        return text.partition(_MARK)[2]

    def _keeps_question(self, key: tuple[str, ...]) -> bool:
        """Whether a prompt is the beginning of the conversation that it becomes.

        Args:
            key: whether there is a system message ("0" or "1"), its text, and the tools.
        """
        num_system = int(key[0])
        question = [Message(role=Role.SYSTEM, content=text) for text in key[1 : 1 + num_system]]
        question.append(Message(role=Role.USER, content=_MARK))
        tools = key[1 + num_system :]
        prompt = self._text(question, tools, add_generation_prompt=True)
        asked = self._text(question, tools, add_generation_prompt=False)
        if not prompt.startswith(asked):  # some end a text that nobody answers in a way of its own
            asked = "".join(prompt.partition(_MARK)[:2])
        answered = [*question, Message(role=Role.ASSISTANT, content="?")]
        return self._text(answered, tools, add_generation_prompt=False).startswith(asked)

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[str],
        *,
        add_generation_prompt: bool,
        name_of: Callable[[str], str] | None = None,
    ) -> str:
        from jinja2 import TemplateError

        name_of = name_of or self._name_of
        try:
            text: str = self._tokenizer.apply_chat_template(
                [_template_message(message, name_of) for message in _with_additions(messages)],
                tools=self._tools.get(tuple(tools)) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._template_args,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, RecursionError) as error:
            raise RenderingFailed(f"the model's chat template refuses these messages: {error}") from error
        return text


def _stub(previous: Sequence[Message]) -> list[Message]:
    """A short conversation that ends like ``previous``: same system message, same tool calls, marked content."""
    answer = Message(role=Role.ASSISTANT, content=_MARK, tool_calls=previous[-1].tool_calls)
    system = [previous[0]] if previous[0].role is Role.SYSTEM else []
    return [*system, Message(role=Role.USER, content="?"), answer]


def _with_additions(messages: Sequence[Message]) -> list[Message]:
    """The messages for a template: each answer is followed by what its agent wrote behind it."""
    behind = [*(message.behind for message in messages[1:]), ""]
    return [replace(m, content=m.content + more) if more else m for m, more in zip(messages, behind, strict=True)]


def _nine_letters(call_id: str) -> str:
    return call_id if len(call_id) == 9 else digest_of(call_id).hex()[:9]


def _template_message(message: Message, name_of: Callable[[str], str]) -> dict[str, Any]:
    parts = [{"type": "image"} if isinstance(p, Image) else {"type": "text", "text": p} for p in message.parts]
    plain: dict[str, Any] = {"role": message.role.value, "content": parts or message.content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": name_of(c.id), "type": "function", "function": {"name": c.name, "arguments": _value(c.arguments)}}
            for c in message.tool_calls
        ]
    if message.tool_call_id:
        plain["tool_call_id"] = name_of(message.tool_call_id)
    if message.name:
        plain["name"] = message.name
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    return plain


def _value(arguments: str) -> Any:
    """Templates write arguments with ``tojson`` and expect a value; what is not an object stays text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _template_tools(tools: tuple[str, ...]) -> list[dict[str, Any]]:
    return [json.loads(tool) for tool in tools]
