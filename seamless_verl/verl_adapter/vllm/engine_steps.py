"""How long the steps of a vLLM engine take, noted where their tokens arrive."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from cachetools import LRUCache

from seamless_verl.decode_cost import EngineStep

_LATEST = 2048
_MOST_REQUESTS = 10_000


class EngineSteps:
    """Stands around ``process_outputs`` of an engine's output processor (vLLM 0.24 to 0.27).

    Steps come with the time at which the engine's process had done them; the tokens of one may come in several calls.
    What passes while the engine has no requests is no step's time.

    Attributes:
        latest: of the last steps, the newest last.
        first_tokens: request, by the name that it came with -> when its first token was there (monotonic clock).
    """

    def __init__(self, processor: Any) -> None:
        self.latest: deque[EngineStep] = deque(maxlen=_LATEST)
        self.first_tokens: LRUCache[str, float] = LRUCache(maxsize=_MOST_REQUESTS)
        self._at = 0.0  # when the step was done whose tokens come
        self._after: float | None = None  # when the one before it was; None: there were no requests
        self._running = self._begun = self._prefilled = self._cached = 0
        self._busy = False
        self._processor = processor
        self._process = processor.process_outputs
        processor.process_outputs = self._noted

    def _noted(self, outputs: Any, timestamp: float | None = None, *args: Any, **kwargs: Any) -> Any:
        if timestamp is None or not outputs:
            return self._process(outputs, timestamp, *args, **kwargs)
        if timestamp != self._at:
            self._end_step()
            self._after, self._at = self._at if self._busy else None, timestamp
        for output in outputs:
            state = self._processor.request_states.get(output.request_id)
            if output.new_token_ids:
                self._running += 1
                self._cached += state.prompt_len + state.detokenizer.num_output_tokens() if state else 0
            if output.prefill_stats is not None:
                if state:
                    self.first_tokens[state.external_req_id] = time.monotonic()
                self._begun += 1
                self._prefilled += output.prefill_stats.num_computed_tokens
        done = self._process(outputs, timestamp, *args, **kwargs)
        self._busy = bool(self._processor.request_states)
        return done

    def _end_step(self) -> None:
        if self._after is not None and self._running:
            seconds = self._at - self._after
            self.latest.append(EngineStep(seconds, self._running, self._begun, self._prefilled, self._cached))
        self._running = self._begun = self._prefilled = self._cached = 0
