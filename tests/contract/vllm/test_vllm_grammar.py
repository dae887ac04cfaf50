"""An answer under a grammar that is interrupted goes on, with vLLM's own manager and its own backends."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch
import vllm.v1.structured_output as structured_output
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from seamless_verl.trajectory.generation import GRAMMAR_PREFIX, FinishReason, Generation, PartialGeneration, VersionSpan
from seamless_verl.verl_adapter.vllm import vllm_grammar
from tests.fakes import small_tokenizer

pytestmark = [  # what vLLM's backends call
    pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning"),
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "arguments": {"enum": ["user", "tool", "fox"]}},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(params=[XgrammarBackend, GuidanceBackend])
def manager(request: Any, monkeypatch: Any) -> Any:
    """vLLM's manager with a real backend over a small tokenizer, as the engine's process would have it."""
    monkeypatch.setattr(
        structured_output.StructuredOutputManager,
        "_create_grammar",
        structured_output.StructuredOutputManager._create_grammar,
    )
    vllm_grammar.install(structured_output)
    tokenizer = small_tokenizer()
    settings = SimpleNamespace(
        disable_any_whitespace=True, disable_additional_properties=False, backend=request.param.__name__
    )
    config = SimpleNamespace(structured_outputs_config=settings, speculative_config=None, model_config=None)
    made = object.__new__(structured_output.StructuredOutputManager)
    made.backend = request.param(vllm_config=config, tokenizer=tokenizer, vocab_size=len(tokenizer))
    made.tokenizer = tokenizer
    return made


def _grammar(manager: Any, prompt: list[int], extra_args: dict[str, Any] | None) -> Any:
    key = (StructuredOutputOptions.JSON, json.dumps(SCHEMA))
    return manager._create_grammar(
        SimpleNamespace(
            request_id="r",
            prompt_token_ids=prompt,
            sampling_params=SimpleNamespace(extra_args=extra_args),
            structured_output_request=SimpleNamespace(structured_output_key=key),
        )
    )


def _allowed(manager: Any, grammar: Any) -> list[int]:
    mask = manager.backend.allocate_token_bitmask(1)
    grammar.fill_bitmask(mask, 0)
    bits = torch.arange(32, dtype=torch.int32)
    flags = ((mask[0].unsqueeze(1) >> bits) & 1).flatten()[: len(manager.tokenizer)]
    return [int(token) for token in flags.nonzero().flatten()]


def _generate(manager: Any, grammar: Any, rng: random.Random, most: int) -> list[int]:
    """What an engine does: any token that the grammar allows, until it ends or ``most`` tokens are there."""
    ids: list[int] = []
    while len(ids) < most:
        token = rng.choice(_allowed(manager, grammar))
        assert grammar.accept_tokens("r", [token])
        ids.append(token)
        if token == manager.tokenizer.eos_token_id:
            break
    return ids


@pytest.mark.parametrize("seed", range(8))
def test_the_matcher_of_a_continuation_is_where_the_interrupted_one_was(manager: Any, seed: int) -> None:
    rng = random.Random(seed)
    first = _grammar(manager, PROMPT, None)
    kept = _generate(manager, first, rng, 1 + seed)
    assert manager.tokenizer.eos_token_id not in kept
    moved = _grammar(manager, [*PROMPT, *kept], {GRAMMAR_PREFIX: len(kept), "other": 1})
    assert _allowed(manager, moved) == _allowed(manager, first)
    anew = _grammar(manager, [*PROMPT, *kept], {"other": 1})
    assert _allowed(manager, anew) == _allowed(manager, _grammar(manager, PROMPT, None)) != _allowed(manager, moved)


def test_an_answer_in_many_attempts_follows_its_schema(manager: Any) -> None:
    rng = random.Random(7)
    for _ in range(5):
        partial = PartialGeneration(
            {"max_tokens": 400, "structured_outputs": SCHEMA}, manager.tokenizer.decode, moves_grammars=True
        )
        is_complete, num_attempts = False, 0
        while not is_complete:
            sampling = partial.sampling()
            grammar = _grammar(manager, [*PROMPT, *partial.token_ids], sampling.get("extra_args"))
            ids = _generate(manager, grammar, rng, min(3, sampling["max_tokens"]))
            ended = ids[-1] == manager.tokenizer.eos_token_id
            num_attempts += 1
            is_complete = partial.add(
                Generation(
                    token_ids=ids,
                    log_probs=[-1.0] * len(ids),
                    version_spans=(VersionSpan(version=num_attempts, num_tokens=len(ids)),),
                    finish_reason=FinishReason.STOP if ended else FinishReason.ABORTED,
                )
            )
        text = manager.tokenizer.decode(partial.token_ids[:-1])
        assert num_attempts > 2
        value = json.loads(text, strict=False)  # xgrammar lets control characters stand in a string
        assert set(value) == {"name", "arguments"}
        assert value["arguments"] in SCHEMA["properties"]["arguments"]["enum"]


def _fails_alone(grammar: Any, manager: Any) -> None:
    """As vLLM's scheduler and manager use it: every token may be sampled, and the first one ends the request."""
    assert isinstance(grammar, StructuredOutputGrammar)
    assert grammar.is_terminated()
    assert not grammar.accept_tokens("r", [1])
    assert grammar.validate_tokens([1]) == []
    grammar.rollback(1)
    assert _allowed(manager, grammar) == list(range(len(manager.tokenizer)))
    asked = {name for name, method in vars(StructuredOutputGrammar).items() if hasattr(method, "__isabstractmethod__")}
    assert asked == {name for name in asked if hasattr(grammar, name)}


def test_tokens_that_the_grammar_would_not_have_allowed_end_the_request_alone(manager: Any) -> None:
    wrong = manager.tokenizer.encode("no json", add_special_tokens=False)
    _fails_alone(_grammar(manager, [*PROMPT, *wrong], {GRAMMAR_PREFIX: len(wrong)}), manager)


def test_a_grammar_that_does_not_compile_ends_the_request_alone(manager: Any, monkeypatch: Any) -> None:
    def compile_grammar(*_: Any) -> Any:
        raise RuntimeError("EBNF parser error")

    monkeypatch.setattr(manager.backend, "compile_grammar", compile_grammar)
    _fails_alone(_grammar(manager, PROMPT, None), manager)


def test_the_plug_in_reaches_the_engines_process(monkeypatch: Any) -> None:
    from seamless_verl.verl_adapter.vllm import vllm_plugin

    manager = structured_output.StructuredOutputManager
    monkeypatch.setattr(manager, "_create_grammar", manager._create_grammar)
    monkeypatch.setenv("VERL_PLATFORM", "cuda")
    before = manager._create_grammar
    assert not hasattr(before, "__wrapped__")
    vllm_plugin.register()
    assert manager._create_grammar.__wrapped__ is before
    vllm_plugin.register()  # vLLM may load its plug-ins more than once
    assert manager._create_grammar.__wrapped__ is before


def test_a_server_with_a_list_of_plug_ins_keeps_ours(monkeypatch: Any) -> None:
    from seamless_verl.verl_adapter.vllm.vllm_server import load_plug_in

    for given, wanted in ((None, None), ("a,b", "a,b,seamless_verl"), ("seamless_verl", "seamless_verl")):
        environment = {} if given is None else {"VLLM_PLUGINS": given}
        load_plug_in(environment)
        assert environment.get("VLLM_PLUGINS") == wanted


def test_an_engine_that_makes_its_grammars_elsewhere_does_not_start() -> None:
    with pytest.raises(AttributeError):
        vllm_grammar.install(SimpleNamespace(StructuredOutputManager=object))
