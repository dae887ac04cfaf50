"""A real replica takes new weights under a request that runs: verl's server, vLLM's engine, weights of two versions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
PROMPT = list(range(5, 37))
SEATS = 8  # requests that the engine decodes at a time
ENGINES = {  # and how long an answer is
    "as on CPUs": ({}, 600),
    "as on GPUs": ({"ahead": True}, 600),
    "as on GPUs, V2": ({"ahead": True, "gpu_runner": True}, 60),
}


@pytest.fixture(scope="module", params=ENGINES.values(), ids=ENGINES)
def replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from seamless_verl.verl_adapter.vllm.pulling_server import PullingReplica
    from tests.live_replica import live_replica, tiny_model  # bring vLLM in, which warns at import

    model = tiny_model(tmp_path_factory.mktemp("model"))
    rollout = "actor_rollout_ref.rollout"
    settings = (
        f"{rollout}.max_model_len=1024",
        f"{rollout}.max_num_seqs={SEATS}",
        f"{rollout}.scheduling_policy=priority",
    )
    kind, length = request.param
    with live_replica(model, *settings, **kind, replica_class=PullingReplica) as started:
        folder = tmp_path_factory.mktemp("published")
        yield SimpleNamespace(live=started, model=model, folder=folder, length=length)


def weights(model: Path, version: int) -> dict[str, Any]:
    """Of unlike versions, so that a token made by one is unlikely under the other."""
    import torch
    from safetensors.torch import load_file

    noise = torch.Generator().manual_seed(version)
    state = load_file(model / "model.safetensors")
    return {
        name: value + 0.3 * torch.randn(value.shape, generator=noise) if value.dim() > 1 else value
        for name, value in state.items()
    }


def publish(replica: Any, version: int, *, leave_out: str = "", instead: dict[str, Any] | None = None) -> Any:
    from seamless_verl.verl_adapter.weights import weight_store

    tensors = weights(replica.model, version) | (instead or {})
    tensors.pop(leave_out, None)
    return weight_store.publish(replica.folder, version, tensors.items())


def cut_off(manifest: Any) -> None:
    file = Path(manifest.file)
    file.write_bytes(file.read_bytes()[:-1])


async def pull(replica: Any, version: int, *, keep: bool = False) -> Any:
    live = replica.live
    return await live.server.pull.remote(str(replica.folder), version, keep, live.router, "here")


def ask(replica: Any, name: str, **kwargs: Any) -> asyncio.Future[Any]:
    async def answer() -> Any:
        params = {"max_tokens": replica.length, "ignore_eos": True, "logprobs": True}
        return await replica.live.server.generate.remote(PROMPT, params, name, **kwargs)

    return asyncio.ensure_future(answer())


async def until_it_runs(replica: Any) -> None:
    for _ in range(2000):
        if (await replica.live.server.requests.remote())[0]:
            return
    raise AssertionError("no request has a token")


async def until_there_are(replica: Any, running: int, waiting: int) -> None:
    for _ in range(2000):
        said = await replica.live.server.engine_load.remote()
        if (said.running, said.waiting) == (running, waiting):
            return
    raise AssertionError(f"there are never {running} requests that run and {waiting} in the queue: {said}")


def log_probs(model: Path, version: int, tokens: list[int]) -> list[float]:
    """Of each token of an answer, all of it under one version, computed in fp32 beside the engine."""
    import torch
    from transformers import AutoModelForCausalLM

    made: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made.load_state_dict(weights(model, version))
    with torch.no_grad():
        logits = made(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    found: list[float] = logits.log_softmax(-1)[range(len(tokens)), tokens].tolist()
    return found


def test_a_load_that_is_not_whole_serves_nobody_until_one_is(replica: Any) -> None:
    """vLLM takes weights that lack tensors without a word."""
    from ray.exceptions import RayTaskError

    async def run() -> None:
        publish(replica, 1, leave_out="model.layers.1.mlp.down_proj.weight")
        with pytest.raises(RayTaskError, match="leaves 1 parameters unset"):
            await pull(replica, 1)
        waiting = ask(replica, "early")
        publish(replica, 2)
        done = await pull(replica, 2)
        assert (done.before, done.version) == (None, 2)
        assert (await waiting).extra_fields["version_spans"] == [(2, replica.length)]

    asyncio.run(run())


def test_each_token_is_of_the_version_that_made_it(replica: Any) -> None:
    """``refill``: before the seam the engine's log-probs are those of the old version, after it those of the new."""

    async def run() -> Any:
        publish(replica, 3)
        await pull(replica, 3)
        asked = ask(replica, "crossing")
        await until_it_runs(replica)
        publish(replica, 4)
        done = await pull(replica, 4)
        assert (done.before, done.version, done.running) == (3, 4, 1)
        return await asked

    output = asyncio.run(run())
    (old, before), (new, after) = output.extra_fields["version_spans"]
    assert (old, new, before + after) == (3, 4, replica.length)
    assert before
    assert after
    expected = log_probs(replica.model, 3, output.token_ids)[:before]
    expected += log_probs(replica.model, 4, output.token_ids)[before:]
    assert max(abs(a - b) for a, b in zip(output.log_probs, expected, strict=True)) <= 1e-4


def test_so_is_each_of_many_requests_that_run_and_queue_across_two_seams(replica: Any) -> None:
    async def run() -> Any:
        publish(replica, 5)
        await pull(replica, 5)
        asked = [ask(replica, f"first {number}") for number in range(SEATS + 4)]
        await until_it_runs(replica)
        publish(replica, 6)
        first = await pull(replica, 6)
        asked += [ask(replica, f"second {number}") for number in range(4)]
        publish(replica, 7)
        await pull(replica, 7)
        return first, await asyncio.gather(*asked)

    first, outputs = asyncio.run(run())
    assert first.running
    seen = set()
    for output in outputs:
        spans = output.extra_fields["version_spans"]
        assert sum(count for _, count in spans) == replica.length
        seen.add(tuple(version for version, _ in spans))
        start, expected = 0, []
        for version, count in spans:
            expected += log_probs(replica.model, version, output.token_ids)[start : start + count]
            start += count
        assert max(abs(a - b) for a, b in zip(output.log_probs, expected, strict=True)) <= 1e-4
    assert (5, 6, 7) in seen, "two seams in one answer"
    assert (7,) in seen, "what queued began with the newest"


def test_keep_goes_on_with_the_cache_and_gives_it_to_nobody_else(replica: Any) -> None:
    async def run() -> Any:
        publish(replica, 8)
        await pull(replica, 8, keep=True)
        asked = ask(replica, "kept")
        await until_it_runs(replica)
        publish(replica, 9)
        await pull(replica, 9, keep=True)
        return await asked, await ask(replica, "fresh")

    kept, fresh = asyncio.run(run())
    assert [version for version, _ in kept.extra_fields["version_spans"]] == [8, 9]
    assert fresh.extra_fields["version_spans"] == [(9, replica.length)]
    assert not fresh.extra_fields["num_cached_tokens"]  # the same prompt lies there, of version 8
    expected = log_probs(replica.model, 9, fresh.token_ids)
    assert max(abs(a - b) for a, b in zip(fresh.log_probs, expected, strict=True)) <= 1e-4


def test_what_is_refused_leaves_the_replica_as_it_was(replica: Any) -> None:
    from ray.exceptions import RayTaskError

    async def run() -> Any:
        import torch

        publish(replica, 10)
        await pull(replica, 10)
        wrong = {
            "lacks 1 tensors": {"leave_out": "lm_head.weight"},
            "has unknown 1 tensors": {"instead": {"model.norm.bias": torch.zeros(3)}},
            "another shape or type of 1 tensors": {"instead": {"model.norm.weight": torch.zeros(3)}},
        }
        for version, (story, change) in enumerate(wrong.items(), 11):
            publish(replica, version, **change)
            with pytest.raises(RayTaskError, match=story):
                await pull(replica, version)
        cut_off(publish(replica, 14))
        with pytest.raises(RayTaskError, match="bytes"):
            await pull(replica, 14)
        return await ask(replica, "after")

    output = asyncio.run(run())
    assert output.extra_fields["version_spans"] == [(10, replica.length)]
    expected = log_probs(replica.model, 10, output.token_ids)
    assert max(abs(a - b) for a, b in zip(output.log_probs, expected, strict=True)) <= 1e-4


def test_a_lent_replica_wakes_with_what_is_published_and_serves_when_it_is_told_to(replica: Any) -> None:
    from ray.exceptions import RayTaskError

    from tests.live_replica import SLICE

    live, folder = replica.live, str(replica.folder)

    async def run() -> Any:
        publish(replica, 15)
        with pytest.raises(RayTaskError, match="here serves"):
            await live.server.wake_with.remote(folder, 15, False, live.router, "here")
        await asyncio.to_thread(live.slices.interrupt, [SLICE])
        await asyncio.to_thread(live.slices.hold, [SLICE])
        asked = ask(replica, "lent")
        with pytest.raises(RayTaskError, match="has version 15, not version 16"):
            await live.server.wake_with.remote(folder, 16, False, live.router, "here")
        await live.server.wake_with.remote(folder, 15, False, live.router, "here")
        assert not asked.done()
        assert (await live.server.requests.remote()) == (0, 0), "its gate is closed until somebody opens it"
        await live.server.resume_generation.remote()
        return await asked

    output = asyncio.run(run())
    assert output.extra_fields["version_spans"] == [(15, replica.length)]
    expected = log_probs(replica.model, 15, output.token_ids)
    assert max(abs(a - b) for a, b in zip(output.log_probs, expected, strict=True)) <= 1e-4


def test_a_replica_on_another_node_takes_a_copy_of_what_is_published(replica: Any, tmp_path: Path) -> None:
    """The node is another one by its name only; the copy goes through Ray, into a folder of the replica's own."""
    import ray

    from seamless_verl.verl_adapter.weights.weight_carrier import Carrier, Holder

    make: Any = ray.remote(num_cpus=0, max_concurrency=4)(Holder)
    carrier = Carrier(node="another", holder=make.remote(str(replica.folder)))

    async def run() -> Any:
        publish(replica, 17)
        live = replica.live
        done = await live.server.pull.remote(str(tmp_path / "there"), 17, False, live.router, "here", carrier)
        assert done.version == 17
        again = await live.server.pull.remote(str(tmp_path / "there"), 17, False, live.router, "here", carrier)
        assert (again.before, again.version) == (17, 17)
        return await ask(replica, "far")

    output = asyncio.run(run())
    assert sorted(path.name for path in (tmp_path / "there").glob("[0-9]*")) == ["17.json", "17.weights"]
    assert output.extra_fields["version_spans"] == [(17, replica.length)]
    expected = log_probs(replica.model, 17, output.token_ids)
    assert max(abs(a - b) for a, b in zip(output.log_probs, expected, strict=True)) <= 1e-4


def test_an_older_session_that_queues_may_go_first_after_a_seam(replica: Any) -> None:
    """All who ran wait behind it then, with their tokens."""

    async def run() -> Any:
        publish(replica, 18)
        await pull(replica, 18)
        young = [ask(replica, f"young {number}", priority=2) for number in range(SEATS)]
        await until_there_are(replica, SEATS, 0)
        old = ask(replica, "old", priority=1)
        await until_there_are(replica, SEATS, 1)
        publish(replica, 19)
        assert (await pull(replica, 19)).running
        return await asyncio.gather(*young), await old

    young, old = asyncio.run(run())
    assert old.extra_fields["version_spans"] == [(19, replica.length)]
    for output in young:
        assert [version for version, _ in output.extra_fields["version_spans"]] == [18, 19]
        assert len(output.token_ids) == replica.length
