"""Canonical chat messages, and what counts as the same message.

Two questions are kept apart. *Identity*: is this the message the session already knows? *Spelling*: is it also
written the same way? A request whose history is identical but spelled differently keeps the recorded tokens
(``REALIGN``); one whose history is not identical branches (``FORK``).

=============================  =========================================  ==============================
rule                           same spelling                              same identity only
=============================  =========================================  ==============================
``content``                    ``None`` = missing = ``""``; text parts    CRLF = LF; outer white space
                               = their texts joined by a newline
``role``                       ``developer`` = ``system``
tool-call ``arguments``        same characters                            same JSON value (key order, white
                                                                          space, ``1`` = ``1.0``)
tool-call ids                  same                                       any (position decides)
``reasoning``                  same up to outer white space               sent history has none, or only its
                                                                          end
pictures                       same bytes at the same places between the texts
``behind``                     same characters
=============================  =========================================  ==============================

Invariant: same spelling implies same identity.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

_END_CHARS = 64  # of reasoning: enough that two answers with the same text hardly ever end their thoughts alike


class Role(Enum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a function; ``arguments`` is the JSON text exactly as written."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A picture in a message.

    Attributes:
        digest: names its bytes.
        token_ids: what stands in a prompt for it, marked (:mod:`seamless_verl.trajectory.tokens`).
    """

    digest: str
    token_ids: tuple[int, ...] = dataclasses.field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message in canonical form; absent text is the empty string.

    ``parts`` are texts and pictures in their order, where there are pictures; ``content`` then joins the texts.
    """

    role: Role
    content: str = ""
    parts: tuple[str | Image, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    @property
    def num_chars(self) -> int:
        """Characters of what the model said, or was told: text, reasoning, arguments of calls."""
        return len(self.content) + len(self.reasoning) + sum(len(call.arguments) for call in self.tool_calls)

    @property
    def behind(self) -> str:
        """What its agent wrote behind the answer before it: part of the prompt, not of the answer."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterAddition(Message):
    """A message with something `behind` the answer before it. Journals hold none: it is no answer."""

    behind: str

    @classmethod
    def of(cls, message: Message, behind: str) -> AfterAddition:
        return cls(**{spec.name: getattr(message, spec.name) for spec in dataclasses.fields(message)}, behind=behind)


@dataclass(frozen=True, slots=True)
class MessageKey:
    """Digests of one message: ``identity`` routes, the others tell how the spelling differs."""

    identity: bytes
    content: bytes
    arguments: bytes
    reasoning: bytes
    call_ids: bytes
    is_assistant: bool
    reasoning_end: str = ""  # at most `_END_CHARS`

    def may_have_lost(self, known: MessageKey) -> bool:
        """Whether this one's reasoning is the end of ``known``'s, as far as the characters that are kept tell.

        openai for Node (6.49) keeps only the last delta of ``reasoning_content`` in a streamed message. Remove when it
        joins them as it joins ``content``.
        """
        return known.reasoning_end.endswith(self.reasoning_end)

    @property
    def spelling(self) -> bytes:
        return self.identity + self.content + self.arguments + self.reasoning + self.call_ids


def digest_of(*fields: str) -> bytes:
    """16 bytes that name a sequence of texts; fields cannot run into each other."""
    state = blake2b(digest_size=16)
    for field in fields:
        data = field.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


def join_text_parts(texts: tuple[str, ...]) -> str:
    """Text of a content given as parts: one line break between parts, as vLLM joins them for string templates."""
    return "\n".join(texts)


def canonical_json(text: str) -> str:
    """One spelling for every JSON text with the same value; a text that is not JSON stands for itself.

    Numbers with an integral value lose their fraction (JavaScript clients rewrite ``1.0`` as ``1``).
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        return json.dumps(_plain(value), sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):
        return text


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _plain(value: object) -> object:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def key_of(message: Message) -> MessageKey:
    """Digests of a message under the rules in this module's table."""
    content = message.content
    trimmed = (content.replace("\r\n", "\n") if "\r" in content else content).strip()
    content_spelling = b"" if trimmed == content and not message.parts else digest_of(content)
    behind = ("behind", message.behind) if message.behind else ()
    if not message.tool_calls:
        meaning = _meaning(message.parts) if message.parts else [trimmed]
        identity = digest_of(message.role.value, message.name, *meaning, *behind)
        call_ids = digest_of(message.tool_call_id) if message.tool_call_id else b""
        arguments = b""
    else:
        calls = message.tool_calls
        meaning = [part for call in calls for part in (call.name, canonical_json(call.arguments))]
        identity = digest_of(message.role.value, message.name, trimmed, *meaning, *behind)
        call_ids = digest_of(message.tool_call_id, *(call.id for call in calls))
        arguments = digest_of(*(call.arguments for call in calls))
    reasoning = message.reasoning.strip()
    return MessageKey(
        identity,
        content_spelling,
        arguments,
        digest_of(reasoning) if reasoning else b"",
        call_ids,
        message.role is Role.ASSISTANT,
        reasoning[-_END_CHARS:],
    )


def _meaning(parts: tuple[str | Image, ...]) -> list[str]:
    """Which picture stands where; nothing for text alone, whose parts are all in ``content``."""
    meaning: list[str] = []
    for part in parts:
        meaning += ("image", part.digest) if isinstance(part, Image) else ("text", part.replace("\r\n", "\n").strip())
    return meaning


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """What a request says: messages and tools, with a chained digest after every message.

    ``chain[i]`` names the first ``i`` messages by identity, ``spelled[i]`` by spelling; both have one entry more than
    there are messages. ``tools`` are JSON texts in the order sent, one per tool.
    """

    messages: tuple[Message, ...]
    tools: tuple[str, ...]
    tools_digest: bytes
    keys: tuple[MessageKey, ...]
    chain: tuple[bytes, ...]
    spelled: tuple[bytes, ...]

    @property
    def digest(self) -> bytes:
        """Names this transcript exactly as spelled."""
        return blake2b(self.spelled[-1] + self.tools_digest, digest_size=16).digest()


_EMPTY_CHAIN = bytes(16)


def link(chain: bytes, part: bytes) -> bytes:
    """The chained digest after one more part."""
    return blake2b(chain + part, digest_size=16).digest()


def transcript_of(
    messages: tuple[Message, ...], tools: tuple[str, ...] = (), *, known: Transcript | None = None, num_known: int = 0
) -> Transcript:
    """Digest a request.

    Args:
        messages: canonical messages, oldest first.
        tools: JSON text of every tool, in the order sent.
        known: a transcript whose first ``num_known`` messages equal this one's; their digests are taken over, so that
            a long history is hashed once.
    """
    num_known = min(num_known, len(messages)) if known is not None else 0
    keys = list(known.keys[:num_known]) if known is not None else []
    chain = list(known.chain[: num_known + 1]) if known is not None else [_EMPTY_CHAIN]
    spelled = list(known.spelled[: num_known + 1]) if known is not None else [_EMPTY_CHAIN]
    for message in messages[num_known:]:
        key = key_of(message)
        keys.append(key)
        chain.append(link(chain[-1], key.identity))
        spelled.append(link(spelled[-1], key.spelling))
    if known is not None and known.tools == tools:
        tools_digest = known.tools_digest
    else:
        tools_digest = digest_of(*(canonical_json(tool) for tool in tools))
    return Transcript(
        messages=messages,
        tools=tools,
        tools_digest=tools_digest,
        keys=tuple(keys),
        chain=tuple(chain),
        spelled=tuple(spelled),
    )
