"""What a real engine tells of itself, and whose cache it takes first: verl's server, vLLM's engine, a small cache."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from seamless_verl.staleness.routing import EngineLoad
from seamless_verl.verl_adapter.vllm.engine_cache import Contexts, name_of_turn

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
BLOCK, BLOCKS, SEATS = 32, 48, 4  # one block is never given to anybody
_rng = random.Random(0)


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tests.live_replica import live_replica, tiny_model  # bring vLLM in, which warns at import

    rollout, vllm = "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.engine_kwargs.vllm"
    settings = (
        f"{rollout}.max_model_len=1024",
        f"{rollout}.max_num_seqs={SEATS}",
        f"{rollout}.enable_prefix_caching=true",
        f"{vllm}.num_gpu_blocks_override={BLOCKS}",
        f"+{vllm}.block_size={BLOCK}",
    )
    with live_replica(tiny_model(tmp_path_factory.mktemp("model")), *settings) as started:
        yield started


def tokens(blocks: int) -> list[int]:
    """Of a prompt that fills so many blocks, and that nobody else has."""
    return [_rng.randrange(5, 15) for _ in range(blocks * BLOCK)]


async def ask(replica: Any, prompt: list[int], *, conversation: str = "", length: int = 1) -> Any:
    name = name_of_turn(conversation or f"c{_rng.random()}", f"t{_rng.random()}")
    params = {"max_tokens": length, "ignore_eos": True, "logprobs": True}
    return await replica.server.generate.remote(prompt, params, name)


async def cached(replica: Any, prompt: list[int]) -> int:
    """Blocks of a prompt that are hit."""
    return int((await ask(replica, prompt)).extra_fields["num_cached_tokens"]) // BLOCK


@pytest.mark.parametrize("is_told", [True, False])
async def test_the_cache_of_a_session_that_has_ended_is_taken_before_that_of_one_that_comes_back(
    replica: Any, is_told: bool
) -> None:
    await replica.server.clear_kv_cache.remote()
    stays, ended, prompt = tokens(14), tokens(12), tokens(2)
    await ask(replica, stays, conversation="stays")
    await ask(replica, prompt + ended[: 6 * BLOCK], conversation="ended")
    await ask(replica, prompt + ended, conversation="ended")
    if is_told:
        await replica.server.let_go.remote([("ended", len(prompt)), ("nobody", 0)])
        again = await ask(replica, prompt + ended, conversation="ended")
        assert again.extra_fields["num_cached_tokens"] == 13 * BLOCK, "what nobody has taken may still be hit"
        await replica.server.let_go.remote([("ended", len(prompt))])
    await ask(replica, tokens(28))  # there are 47 blocks: more than 19 that are free without taking from anybody
    assert (await cached(replica, stays + tokens(1)) == 14) is is_told
    if is_told:
        assert await cached(replica, prompt + tokens(1)) == 2, "the others of its group begin with it as well"


async def test_an_engine_tells_its_queue_and_what_of_its_cache_is_in_use(replica: Any) -> None:
    await replica.server.clear_kv_cache.remote()
    assert await replica.server.engine_load.remote() == EngineLoad(0, 0, 0)
    prompt = tokens(10)
    asked = asyncio.gather(*(ask(replica, prompt, length=200) for _ in range(SEATS + 2)))
    while (said := await replica.server.engine_load.remote()).waiting != 2:
        assert not asked.done(), f"no queue was ever told: {said}"
    assert said.running == SEATS
    shared, most = 10 * BLOCK, (10 + SEATS * 14) * BLOCK
    assert shared <= said.kv_tokens <= most, "what four share counts once"
    assert said.kv_tokens < SEATS * shared
    await asked
    assert await replica.server.engine_load.remote() == EngineLoad(0, 0, 0)


def test_no_more_is_remembered_than_can_be_there() -> None:
    contexts = Contexts(most=10)
    contexts.left("one", "aaaa")
    contexts.left("two", "bbbb")
    contexts.left("one", "aaaaa")  # its next turn; with it "two" is the older one
    contexts.left("three", "cc")
    assert (contexts.pop("two"), contexts.pop("one"), contexts.pop("three")) == ((), "aaaaa", "cc")
    assert contexts.pop("one") == ()
    contexts.left("large", "d" * 11)
    assert contexts.pop("large") == ()
