"""JSON of prompts that grow: the next prompt of a session usually begins with its last, whose text is known.

Writing 128,000 ids takes six milliseconds, writing the thousand that are new takes none.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from seamless_verl.trajectory.tokens import EMPTY, TokenPath

_MAX_BYTES = 64 << 20


class PromptTexts:
    """The last prompt of each session, as long as all of them together stay below ``max_bytes``."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._known: OrderedDict[str, tuple[TokenPath, bytearray]] = OrderedDict()
        self.num_bytes = 0

    def encode(self, session_id: str, token_ids: Sequence[int]) -> tuple[bytes, bytearray, bytes]:
        """The ids as a JSON list, in pieces: to be joined at once, for the session's next prompt changes them."""
        path = TokenPath.of(token_ids)
        begun, text = self._known.pop(session_id, (EMPTY, bytearray()))
        self.num_bytes -= _size(begun, text)
        added = path.since(begun) if begun else None
        if added is None:
            text = bytearray(_items(path.flat()))
        elif added:
            text += b",%b" % _items(added)
        self._known[session_id] = (path, text)
        self.num_bytes += _size(path, text)
        while self.num_bytes > self._max_bytes:
            _, oldest = self._known.popitem(last=False)
            self.num_bytes -= _size(*oldest)
        return b"[", text, b"]"

    def forget(self, session_id: str) -> None:
        """The session has ended."""
        if (known := self._known.pop(session_id, None)) is not None:
            self.num_bytes -= _size(*known)


def _items(ids: array[int]) -> bytes:
    return msgspec.json.encode(ids.tolist())[1:-1]


def _size(path: TokenPath, text: bytearray) -> int:
    return path.num_bytes + len(text)
