"""An interrupted answer under a grammar goes on: vLLM's matcher first takes the tokens that the answer already has.

    prompt │ kept tokens │ ▶          extra_args: {seamless_grammar_prefix: number of kept tokens}
           └─ grammar ───┘

vLLM 0.27 creates a matcher for each request and begins it at the first token that this request generates
(``StructuredOutputManager._create_grammar``); no parameter tells it that the end of the prompt belongs to the answer.
Here the matcher is moved over these tokens before the request sees it. Remove when a request can say so itself.
"""

from __future__ import annotations

import functools
from typing import Any

from seamless_verl.trajectory.partial import GRAMMAR_PREFIX


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

    @functools.wraps(create)
    def create_and_advance(self: Any, request: Any) -> Any:
        grammar = create(self, request)
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        num_kept = int(extra.get(GRAMMAR_PREFIX, 0))
        if num_kept and not grammar.accept_tokens(request.request_id, list(request.prompt_token_ids[-num_kept:])):
            raise ValueError(f"the grammar does not accept the {num_kept} tokens that this answer already has")
        return grammar

    manager._create_grammar = create_and_advance
