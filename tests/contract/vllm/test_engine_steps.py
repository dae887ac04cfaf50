"""Steps of an engine as they are read from what its output processor is given."""

from types import SimpleNamespace

import pytest

from seamless_verl.decode_cost import EngineStep

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def noted():
    """How to stand around a processor; verl and vLLM come with it."""
    from seamless_verl.verl_adapter.vllm.vllm_server import EngineSteps

    return EngineSteps


class Processor:
    """``request_states`` are the requests that the engine has; they leave with their last token."""

    def __init__(self, *requests):
        self.request_states = dict.fromkeys(requests)
        self.seen = []

    def process_outputs(self, outputs, timestamp=None, stats=None):
        self.seen.append((outputs, timestamp, stats))
        for output in outputs:
            if output.finished:
                self.request_states.pop(output.request_id)
        return "done"


def token(request, computed=None, last=False, tokens=(7,)):
    told = None if computed is None else SimpleNamespace(num_computed_tokens=computed)
    return SimpleNamespace(request_id=request, new_token_ids=list(tokens), prefill_stats=told, finished=last)


def test_a_step_has_its_seconds_its_requests_and_what_was_computed_for_new_ones(noted):
    processor = Processor("a", "b")
    steps = noted(processor)
    assert processor.process_outputs([token("a", computed=100)], 10.0, "stats") == "done"
    processor.process_outputs([token("a"), token("b", computed=40)], 10.5)
    processor.process_outputs([token("a")], 10.75)
    processor.process_outputs([token("b")], 10.75)  # the rest of that step
    processor.process_outputs([token("a"), token("b")], 11.0)
    assert list(steps.latest) == [EngineStep(0.5, 2, 1, 40), EngineStep(0.25, 2, 0, 0)]
    assert processor.seen[0][1:] == (10.0, "stats")


def test_a_step_has_the_contexts_of_those_that_got_a_token(noted):
    def state(prompt_len, so_far):
        detokenizer = SimpleNamespace(num_output_tokens=lambda: so_far)
        return SimpleNamespace(prompt_len=prompt_len, detokenizer=detokenizer, external_req_id="outside")

    processor = Processor()
    processor.request_states |= {"a": state(100, 7), "b": state(40, 0), "c": state(1000, 3)}
    steps = noted(processor)
    processor.process_outputs([token("a")], 1.0)
    processor.process_outputs([token("a"), token("b", computed=40), token("c", tokens=())], 1.5)
    processor.process_outputs([token("a")], 2.0)
    assert [step.cached for step in steps.latest] == [147]
    assert list(steps.first_tokens) == ["outside"]


def test_what_passes_while_the_engine_has_nothing_to_do_is_no_steps_time(noted):
    processor = Processor("a")
    steps = noted(processor)
    processor.process_outputs([token("a", computed=5)], 1.0)
    processor.process_outputs([token("a", last=True)], 2.0)
    processor.request_states["b"] = None
    processor.process_outputs([token("b", computed=5)], 100.0)
    processor.process_outputs([token("b")], 101.0)
    processor.process_outputs([], 150.0)
    processor.process_outputs([token("b")], 102.0)
    assert list(steps.latest) == [EngineStep(1.0, 1, 0, 0), EngineStep(1.0, 1, 0, 0)]


@pytest.mark.parametrize("outputs", [[], [token("a", tokens=())]])
def test_outputs_without_tokens_are_no_step(noted, outputs):
    processor = Processor("a")
    steps = noted(processor)
    for at in (1.0, 2.0, 3.0):
        processor.process_outputs(outputs, at)
    assert not steps.latest
