"""The stamp that travels with a row from the proxy to the trainer, so that what is trained can be compared."""

from __future__ import annotations

import hashlib
from typing import Any, TypedDict

import numpy as np

ROW_FIELD = "seamless"


class RowStamp(TypedDict):
    """``extra_fields["seamless"]`` of a row.

    Attributes:
        digest: `row_digest` of the row as it left the proxy.
        violations: what the proxy's audit of the session against the engine's record found; 0 is the only good value.
        version_spans: ``(weight version, policy tokens)`` along the row.
    """

    digest: str
    violations: int
    version_spans: list[tuple[int, int]]


def row_digest(prompt_ids: Any, response_ids: Any, response_mask: Any, log_probs: Any) -> str:
    """Digest of a row's tokens, mask and float32 log-probs; any sequence or CPU tensor will do."""
    digest = hashlib.blake2b(digest_size=16)
    for values, kind in ((prompt_ids, np.int64), (response_ids, np.int64), (response_mask, np.int64)):
        array = np.asarray(values, dtype=kind)
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(array.tobytes())
    digest.update(np.asarray(log_probs, dtype=np.float32).tobytes())
    return digest.hexdigest()
