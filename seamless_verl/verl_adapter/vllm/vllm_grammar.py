"""An interrupted answer under a grammar goes on: vLLM's matcher first takes the tokens that the answer already has.

    prompt │ kept tokens │ ▶          extra_args: {seamless_grammar_prefix: number of kept tokens}
           └─ grammar ───┘

vLLM 0.27 creates a matcher for each request and begins it at the first token that this request generates
(``StructuredOutputManager._create_grammar``); no parameter tells it that the end of the prompt belongs to the answer.
Here the matcher is moved over these tokens before the request sees it. Remove when a request can say so itself.

A grammar that does not take them, or does not compile, fails its own request. vLLM 0.24 would end the whole engine:
what the factory raises surfaces in its scheduler (0.27 catches it there). Here the request gets a grammar that refuses
its first token, which either version answers with finish reason "error".
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from seamless_verl.trajectory.generation import GRAMMAR_PREFIX

_log = logging.getLogger(__name__)


class RefusedGrammar:
    """Stands for a grammar that cannot be followed, in the place of vLLM's ``StructuredOutputGrammar``.

    It says that it has ended, so that no mask is asked of it, and takes no token, so its request fails at the first.
    """

    def is_terminated(self) -> bool:
        return True

    def accept_tokens(self, request_id: str, tokens: Sequence[int]) -> bool:
        return False

    def validate_tokens(self, tokens: Sequence[int]) -> list[int]:
        return []

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        bitmask[batch_index].fill_(-1)

    def rollback(self, num_tokens: int) -> None:
        pass

    def reset(self) -> None:
        pass


def install(structured_output: Any) -> None:
    """Wrap the factory of ``vllm.v1.structured_output``, in the process of the engine.

    Raises:
        AttributeError: vLLM creates its grammars elsewhere now. The engine then does not start, which is better than
            an answer whose grammar begins a second time in its middle.
    """
    manager = structured_output.StructuredOutputManager
    create = manager._create_grammar
    if hasattr(create, "__wrapped__"):
        return
    structured_output.StructuredOutputGrammar.register(RefusedGrammar)  # vLLM's scheduler asserts what it is

    @functools.wraps(create)
    def create_and_advance(self: Any, request: Any) -> Any:
        try:
            grammar = create(self, request)
        except (RuntimeError, TypeError, ValueError) as error:  # what backends raise for a specification
            _log.error("request %s fails: its grammar does not compile: %s", request.request_id, error)
            return RefusedGrammar()
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        num_kept = int(extra.get(GRAMMAR_PREFIX, 0))
        if num_kept and not grammar.accept_tokens(request.request_id, list(request.prompt_token_ids[-num_kept:])):
            problem = "request %s fails: its grammar does not accept the %d tokens that the answer already has"
            _log.error(problem, request.request_id, num_kept)
            return RefusedGrammar()
        return grammar

    manager._create_grammar = create_and_advance
