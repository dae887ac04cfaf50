"""Requests on one real replica: verl's server actor and vLLM's engine, through our router and our client."""

from __future__ import annotations

import asyncio
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from seamless_verl.trajectory.generation import FinishReason
from tests.fakes import scripted_generation

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
NUM_REQUESTS, NUM_TOKENS = 1500, 24  # an actor of Ray has 1,000 slots unless somebody asks for more
PROMPT = list(range(5, 37))
ENGINES = {  # and how long an answer is
    "as on CPUs": ({}, 900),
    "as on GPUs": ({"ahead": True}, 900),
    "as on GPUs, V2": ({"ahead": True, "gpu_runner": True}, 100),
}


@pytest.fixture(scope="module", params=ENGINES.values(), ids=ENGINES)
def replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tests.live_replica import live_replica, tiny_model  # bring vLLM in, which warns at import

    rollout = {"max_num_seqs": 256, "max_model_len": 1024, "disable_log_stats": False}
    settings = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in rollout.items()]
    kind, length = request.param
    with live_replica(tiny_model(tmp_path_factory.mktemp("model")), *settings, **kind) as started:
        started.long = {"max_tokens": length, "ignore_eos": True, "logprobs": True}
        yield started


def needs_speed(replica: Any) -> None:
    if replica.works()[1]:
        pytest.skip("Triton's interpreter takes 0.1 s for a step: this runs with the other two")


async def in_time(what: Callable[..., Any], *args: Any, seconds: float = 60) -> None:
    """Beside the event loop; a call that hangs fails the test instead of hanging it."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            what(*args)
            ended.append(None)
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            ended.append(error)

    threading.Thread(target=run, daemon=True).start()
    await until(lambda: bool(ended), f"{what} has not returned", seconds)
    if ended[0] is not None:
        raise ended[0]


async def until(is_so: Callable[[], bool], story: str, seconds: float = 60) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not is_so():
        assert asyncio.get_running_loop().time() < deadline, f"{story} for {seconds:.0f} s"
        await asyncio.sleep(0.02)


async def until_running(replica: Any, count: int) -> None:
    found = -1
    for _ in range(500):
        found = await asyncio.to_thread(replica.num_running)
        if found == count:
            return
    raise AssertionError(f"the engine decodes {found} requests, not {count}")


def ask(replica: Any, name: str, prompt: list[int] = PROMPT, **params: Any) -> asyncio.Task[Any]:
    """Straight to the server."""

    async def answer() -> Any:
        return await replica.server.generate.remote(prompt, {**replica.long, **params}, name)

    return asyncio.ensure_future(answer())


async def test_a_replica_tells_how_much_its_cache_holds(replica: Any) -> None:
    assert await replica.server.cache_tokens.remote() >= 1024, "a request of the longest length fits"


async def test_a_single_request_ends_with_its_tokens_and_the_others_go_on(replica: Any) -> None:
    names = [uuid.uuid4().hex for _ in range(3)]
    first, second, third = (ask(replica, name) for name in names)
    await until_running(replica, 3)
    seen = replica.num_generated()
    await until(lambda: replica.num_generated() >= seen + len(names), "there are no more tokens")
    told = await replica.server.abort_request.remote(names[1], reset_prefix_cache=False)
    assert told["aborted"]
    ended = await asyncio.wait_for(second, 30)
    assert not first.done()
    assert not third.done()
    await until_running(replica, 2)
    assert ended.stop_reason == "aborted"
    assert 0 < len(ended.token_ids) == len(ended.log_probs) < replica.long["max_tokens"]
    for other in (await first, await third):
        assert (len(other.token_ids), other.stop_reason) == (replica.long["max_tokens"], "completed")


async def test_an_answer_says_when_its_first_token_was_there(replica: Any) -> None:
    from seamless_verl.verl_adapter.rollout.request_log import FIRST_TOKEN

    began = asyncio.get_running_loop().time()
    output = await ask(replica, uuid.uuid4().hex)
    took = asyncio.get_running_loop().time() - began
    assert 0 < output.extra_fields[FIRST_TOKEN] < took / 2, "most of a long answer comes later"


@pytest.mark.parametrize("reset", [False, True])
async def test_the_prefix_cache_is_kept_unless_asked(replica: Any, reset: bool) -> None:
    prompt = [int(digit) + 5 for digit in f"{uuid.uuid4().int:040d}"[:40]] * 8
    name = uuid.uuid4().hex
    running = ask(replica, name, prompt, max_tokens=600)
    await until_running(replica, 1)
    await replica.server.abort_request.remote(name, reset_prefix_cache=reset)
    assert (await asyncio.wait_for(running, 30)).stop_reason == "aborted"
    again = await ask(replica, uuid.uuid4().hex, prompt, max_tokens=1)
    assert (again.extra_fields["num_cached_tokens"] == 0) is reset


async def test_a_cancelled_agent_leaves_nothing_running(replica: Any) -> None:
    other = ask(replica, "stays")
    await until_running(replica, 1)
    asking = asyncio.ensure_future(replica.client.generate("left", prompt_ids=PROMPT, sampling_params=replica.long))
    await until_running(replica, 2)
    asking.cancel()
    await until_running(replica, 1)
    assert not other.done(), "the other one ended, which began earlier: this one was never ended"
    assert (await other).stop_reason == "completed"


async def test_a_group_that_is_cut_short_keeps_what_it_has(replica: Any) -> None:
    from seamless_verl.verl_adapter.rollout.request_log import cut_groups, request_log

    with request_log.session("group", 0):
        asking = asyncio.ensure_future(replica.client.generate("slow", prompt_ids=PROMPT, sampling_params=replica.long))
    await until_running(replica, 1)
    try:
        cut_groups.cut(["group"])
        output = await asyncio.wait_for(asking, 30)
    finally:
        cut_groups.forget("group")
    assert output.stop_reason == "length"
    assert 0 < len(output.token_ids) < replica.long["max_tokens"]


async def test_a_request_that_waits_for_weights_can_be_ended_too(replica: Any) -> None:
    await in_time(replica.interrupt)
    parked, other = ask(replica, "parked"), ask(replica, "other", max_tokens=8)
    await replica.server.abort_request.remote("parked", reset_prefix_cache=False)
    await in_time(replica.update, 4)
    output = await asyncio.wait_for(parked, 30)
    assert (output.token_ids, output.stop_reason) == ([], "aborted")
    assert len((await other).token_ids) == 8


async def test_a_loan_that_is_given_up_sends_those_away_who_wait_for_its_weights(replica: Any) -> None:
    from tests.live_replica import SLICE

    await in_time(replica.slices.interrupt, [SLICE])
    await in_time(replica.slices.hold, [SLICE])
    waiting = ask(replica, "waits")
    await asyncio.sleep(0)  # until it is sent
    await replica.server.cache_tokens.remote()  # calls begin in their order: it waits
    await replica.server.abort_all_requests.remote(reject_request=True)
    output = await asyncio.wait_for(waiting, 30)
    assert (output.token_ids, output.stop_reason) == ([], "aborted")
    await in_time(replica.slices.wake, [SLICE], 4, [])
    assert len((await ask(replica, "next", max_tokens=8)).token_ids) == 8


async def test_a_grammar_that_refuses_the_kept_tokens_fails_its_request_alone(replica: Any) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    from seamless_verl.trajectory.generation import GRAMMAR_PREFIX
    from tests.fakes import small_tokenizer

    letters = small_tokenizer().encode("fox", add_special_tokens=False)
    digits: dict[str, Any] = {"max_tokens": 6, "structured_outputs": StructuredOutputsParams(regex="[0-9]+")}
    refused = {**digits, "extra_args": {GRAMMAR_PREFIX: len(letters)}}
    other = ask(replica, "beside")
    await until_running(replica, 1)
    with pytest.raises(RuntimeError, match="gave up on a request"):
        await asyncio.wait_for(
            replica.client.generate("refused", prompt_ids=PROMPT + letters, sampling_params=refused), 60
        )
    assert (await other).stop_reason == "completed"
    output = await replica.client.generate("allowed", prompt_ids=PROMPT, sampling_params=digits)
    assert small_tokenizer().decode(output.token_ids, skip_special_tokens=True).isdigit()


async def test_more_requests_than_ray_has_slots_survive_two_updates_and_a_loan(replica: Any) -> None:
    """They come while the first weights arrive, and are interrupted again as soon as they generate."""
    from tests.live_replica import SLICE

    needs_speed(replica)
    client, before = replica.client, replica.client.sent

    async def answer(number: int) -> Any:
        params = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": True}
        return await client.generate(f"session-{number}", prompt_ids=PROMPT, sampling_params=params)

    def waiting() -> int:
        return sum(not one.done() for one in answers)

    async def all_wait(before: int) -> None:
        """Whoever has no answer has been sent, and waits at the server; who has one gives its place to a new one."""
        await until(lambda: client.sent >= before + waiting(), "not all came back")
        before, total = client.sent, len(answers)
        missing = range(total, total + NUM_REQUESTS - waiting())
        answers.extend([asyncio.ensure_future(answer(number)) for number in missing])
        await until(lambda: client.sent >= before + len(missing), "the new ones were not sent")

    await in_time(replica.interrupt)
    answers: list[asyncio.Future[Any]] = []
    await all_wait(before)
    await in_time(replica.update, 5)
    before = client.sent
    await in_time(replica.interrupt)
    await all_wait(before)
    await in_time(replica.update, 6)
    before = client.sent
    await in_time(replica.slices.unregister, [SLICE])
    await in_time(replica.slices.interrupt, [SLICE])  # the trainer has its memory back here
    await in_time(replica.slices.hold, [SLICE])
    await in_time(replica.slices.register, [SLICE])
    await all_wait(before)
    await in_time(replica.slices.wake, [SLICE], 7, [])
    for output in await asyncio.wait_for(asyncio.gather(*answers), 120):
        assert len(output.token_ids) == len(output.log_probs) == NUM_TOKENS
        assert sum(tokens for _, tokens in output.extra_fields["version_spans"]) == NUM_TOKENS
        assert 5 <= output.extra_fields["min_global_steps"] <= output.extra_fields["max_global_steps"] <= 7


async def test_the_engine_tells_what_its_steps_take(replica):
    """Against the clock: eight requests at a time, of 64 tokens each, with 900 tokens that nobody has sent before."""
    if replica.works()[0]:
        # A GPU hands on a step's tokens when it has made them, and nothing of ours has timed it there.
        pytest.skip('a CPU computes the next step before it hands on this one: its times are told "as on CPUs" only')
    loop = asyncio.get_running_loop()

    async def answers(number: int, tokens: int) -> float:
        began = loop.time()
        prompts = [[random.randrange(5, 60) for _ in range(900)] for _ in range(number)]
        params = {"max_tokens": tokens, "ignore_eos": True, "logprobs": True}
        await asyncio.gather(
            *(replica.client.generate(uuid.uuid4().hex, prompt_ids=ids, sampling_params=params) for ids in prompts)
        )
        return loop.time() - began

    async def read_beside_another() -> None:
        """The step that reads a prompt is told from others where the engine was busy before it. Three times are more
        steps than the server keeps, so that those of other tests are gone."""
        other = asyncio.create_task(
            replica.client.generate(uuid.uuid4().hex, prompt_ids=PROMPT, sampling_params=replica.long)
        )
        for _ in range(24):
            await answers(1, 2)
        await other

    for _ in range(3):
        await read_beside_another()
    for number in (1, 2, 4, 8):
        took = await answers(number, 64)
    pace = await replica.server.pace.remote()
    assert pace.turn_tokens > 20
    assert pace.prefill_s_per_token > 0
    by_steps = 64 * pace.decode.step_s(8, 8 * 930) + 8 * 900 * pace.prefill_s_per_token
    assert took / 5 < by_steps < 2 * took


async def test_a_long_answer_leaves_its_replica_in_parts_and_whoever_has_them_goes_on(replica: Any) -> None:
    needs_speed(replica)
    every = int(replica.client.config.seamless.supervise.tokens_at_risk)
    told: list[Any] = []
    asked = {**replica.long, "temperature": 0.0}
    whole = await replica.client.generate("parts", prompt_ids=PROMPT, sampling_params=asked, on_progress=told.append)
    kept = [token for part in told for token in part.token_ids]
    log_probs = [log_prob for part in told for log_prob in part.log_probs]
    assert (kept, log_probs) == (whole.token_ids[: len(kept)], whole.log_probs[: len(kept)])
    # A busy server hears of several tokens at once, so that a part may be larger.
    assert min(len(part.token_ids) for part in told) >= every
    assert 0 < 900 - len(kept) < 2 * every
    versions = {version for version, _ in whole.extra_fields["version_spans"]}
    assert {span.version for part in told for span in part.version_spans} == versions
    more: list[Any] = []
    begun = told[0]
    later = await replica.client.generate(
        "later", prompt_ids=PROMPT, sampling_params=asked, resume_from=begun, on_progress=more.append
    )
    assert len(later.token_ids) == 900
    known = [token for part in (begun, *more) for token in part.token_ids]
    assert known == later.token_ids[: len(known)]
    assert 0 < 900 - len(known) < 2 * every


@pytest.mark.parametrize(
    ("finish", "reason"),
    [(FinishReason.STOP, "completed"), (FinishReason.LENGTH, "length"), (FinishReason.ABORTED, "length")],
)
async def test_an_answer_that_is_whole_and_one_that_is_cut_short_are_what_their_holder_had(
    replica: Any, finish: FinishReason, reason: str
) -> None:
    from seamless_verl.verl_adapter.rollout.request_log import cut_groups, request_log

    begun = scripted_generation(range(20, 40), num_versions=2, finish=finish)
    if finish is FinishReason.ABORTED:
        cut_groups.cut(["held"])
    with request_log.session("held", 0):
        output = await replica.client.generate(
            "held", prompt_ids=PROMPT, sampling_params=replica.long, resume_from=begun
        )
    cut_groups.forget("held")
    assert (output.token_ids, output.log_probs) == (list(begun.token_ids), list(begun.log_probs))
    assert output.stop_reason == reason
    spans = [(span.version, span.num_tokens) for span in begun.version_spans]
    assert output.extra_fields["version_spans"] == spans


async def test_an_answer_in_parts_is_ended_and_cancelled_like_any_other(replica: Any) -> None:
    from seamless_verl.verl_adapter.rollout.request_log import cut_groups, request_log

    needs_speed(replica)
    told: list[Any] = []

    def asking(name: str) -> asyncio.Task[Any]:
        generate = replica.client.generate(
            name, prompt_ids=PROMPT, sampling_params=replica.long, on_progress=told.append
        )
        return asyncio.ensure_future(generate)

    left = asking("left in parts")
    await until(lambda: bool(told), "no part has come")
    left.cancel()
    await until_running(replica, 0)
    told.clear()
    with request_log.session("slow in parts", 0):
        cut = asking("cut in parts")
    await until(lambda: bool(told), "no part has come")
    cut_groups.cut(["slow in parts"])
    output = await cut
    cut_groups.forget("slow in parts")
    assert len(told[0].token_ids) <= len(output.token_ids) < 900


async def test_the_replicas_own_http_api_answers(replica: Any) -> None:
    async with httpx.AsyncClient(base_url=replica.url, trust_env=False, timeout=60) as http:
        (model,) = (await http.get("/v1/models")).json()["data"]
        body = {"model": model["id"], "prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 5
