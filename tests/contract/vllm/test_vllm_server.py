"""Interrupting a verl server whose requests queue, with verl's own code around an engine that never has a seat."""

import asyncio
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


class FullEngine:
    """As vLLM's ``AsyncLLM``: `generate` adds the request, then waits for tokens, which here only a pause brings."""

    def __init__(self, num_cores):
        self.output_processor = SimpleNamespace(
            request_states={}, external_req_ids={}, process_outputs=lambda *args: None
        )
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=num_cores))
        self.let_in = asyncio.Event()
        self.paused = asyncio.Event()

    async def add_request(self, request_id, prompt, params, **kwargs):
        await self.let_in.wait()
        self.output_processor.request_states[request_id] = params

    async def generate(self, prompt, sampling_params, request_id, **kwargs):
        await self.add_request(request_id, prompt, sampling_params)
        await self.paused.wait()
        yield SimpleNamespace(outputs=[])

    async def pause_generation(self, **kwargs):
        self.paused.set()


async def serve(cls, monkeypatch, num_cores=1):
    """A server of ``cls`` around such an engine; nothing of its construction needs a GPU, a port or a model."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    async def run_server(self, args):
        self.engine = FullEngine(num_cores)

    monkeypatch.setattr(vLLMHttpServer, "run_server", run_server)
    monkeypatch.setattr(vLLMHttpServer, "lora_as_adapter", False)
    server = object.__new__(cls)
    if hasattr(cls, "_admitting"):  # ours
        vars(server).update(_on_their_way=set(), _parts={}, _ended={}, _without_token=0, _has_cores=False, _steps=None)
        server._asleep = set()
    vars(server).update(
        node_rank=0,
        replica_rank=0,
        global_steps=3,
        config=OmegaConf.create({"max_model_len": 64, "full_determinism": False}),
        model_config=SimpleNamespace(processor=None),
        _disaggregation_role="null",
        _submission_paused=False,
        _rejecting=False,
        _resume_event=asyncio.Event(),
    )
    server._admitting = 0
    await server.run_server(None)
    return server


async def one_arriving(server):
    task = asyncio.create_task(server.generate([1, 2], {"max_tokens": 4}, "r1"))
    while not server._admitting:
        if task.done():
            task.result()
        await asyncio.sleep(0)
    return task


async def one_queued(server):
    task = await one_arriving(server)
    server.engine.let_in.set()
    for _ in range(20):  # it arrives, and whoever waits for that has been told
        await asyncio.sleep(0)
    assert "r1" in server.engine.output_processor.request_states
    return task


def test_a_queued_request_is_interrupted_at_once(monkeypatch):
    from seamless_verl.verl_adapter.vllm.vllm_server import InterruptibleServer

    async def scenario():
        server = await serve(InterruptibleServer, monkeypatch)
        request = await one_queued(server)
        assert server._admitting == 0
        report = await server.abort_all_requests()
        assert report["request_ids"] == ["r1"]
        output = await request
        assert (output.token_ids, output.stop_reason) == ([], "aborted")

    asyncio.run(scenario())


def test_a_request_half_way_into_the_engine_is_waited_for(monkeypatch):
    from seamless_verl.verl_adapter.vllm.vllm_server import InterruptibleServer

    async def scenario():
        server = await serve(InterruptibleServer, monkeypatch)
        request = await one_arriving(server)
        abort = asyncio.create_task(server.abort_all_requests())
        await asyncio.sleep(0.05)  # several of verl's looks
        assert not server.engine.paused.is_set()
        server.engine.let_in.set()
        await abort
        await request
        assert server._admitting == 0

    asyncio.run(scenario())


def test_a_request_that_is_cancelled_on_its_way_is_not_waited_for(monkeypatch):
    from seamless_verl.verl_adapter.vllm.vllm_server import InterruptibleServer

    async def scenario():
        server = await serve(InterruptibleServer, monkeypatch)
        request = await one_arriving(server)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await server.abort_all_requests()

    asyncio.run(scenario())


def test_verls_own_server_would_wait_for_the_queue(monkeypatch):
    """When this fails, verl counts as `InterruptibleServer` does, which can then go."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    async def scenario():
        server = await serve(vLLMHttpServer, monkeypatch)
        request = await one_queued(server)
        assert server._admitting == 1
        server.engine.paused.set()
        await request

    asyncio.run(scenario())


def test_with_several_engine_cores_the_first_token_counts_as_under_verl(monkeypatch):
    """Before it, the start of the other cores may still be on its way, and come in after the pause has ended."""
    from seamless_verl.verl_adapter.vllm.vllm_server import InterruptibleServer

    async def scenario():
        server = await serve(InterruptibleServer, monkeypatch, num_cores=2)
        request = await one_queued(server)
        assert server._admitting == 1
        abort = asyncio.create_task(server.abort_all_requests())
        await asyncio.sleep(0.05)  # several of verl's looks
        assert not abort.done()
        server.engine.paused.set()
        await request
        assert server._admitting == 0
        await abort

    asyncio.run(scenario())


class SleepingEngine(FullEngine):
    """With vLLM's own account of what sleeps.

    Attributes:
        held: tags whose memory it has.
        told: of wakes, in order.
        fails: the next wake gets half of what it wants.
    """

    def __init__(self, num_cores):
        super().__init__(num_cores)
        self.held, self.told, self.fails = {"weights", "kv_cache"}, [], False
        self.executor = SimpleNamespace(is_sleeping=False, sleeping_tags=set(), collective_rpc=self._work)

    def _work(self, method, kwargs):
        if method == "sleep":
            self.held = set()
            return
        self.told.append(kwargs["tags"])
        self.held |= set(kwargs["tags"])
        if self.fails:
            raise RuntimeError("out of memory")

    async def sleep(self, level):
        from vllm.v1.executor.abstract import Executor

        Executor.sleep(self.executor, level)

    async def wake_up(self, tags):
        from vllm.v1.executor.abstract import Executor

        Executor.wake_up(self.executor, tags)

    async def reset_prefix_cache(self, **kwargs):
        pass

    async def reset_encoder_cache(self):
        pass


async def sleeping_server(monkeypatch):
    """As it is after a hybrid replica was launched."""
    from verl.workers.rollout.replica import RolloutMode

    from seamless_verl.verl_adapter.vllm.vllm_server import InterruptibleServer

    server = await serve(InterruptibleServer, monkeypatch)
    server.engine, server.rollout_mode = SleepingEngine(1), RolloutMode.HYBRID
    server.config.free_cache_engine = True
    await server.sleep()
    assert server.engine.held == set()
    return server


@pytest.mark.parametrize("woken", [["weights"], ["kv_cache"], ["weights", "kv_cache"], []])
async def test_an_engine_that_is_awake_in_part_holds_nothing_once_it_sleeps(monkeypatch, woken):
    """As those that live are when one dies in a transfer into the trainer's replicas."""
    server = await sleeping_server(monkeypatch)
    for _ in range(2):
        for tag in woken:
            await server.wake_up([tag])
        await server.sleep()
        assert server.engine.held == set()
    assert all(len(tags) == 1 for tags in server.engine.told), "nothing is mapped twice"
    await server.wake_up()
    assert server.engine.held == {"weights", "kv_cache"}


async def test_an_engine_that_woke_half_way_cannot_be_handed_back(monkeypatch):
    from seamless_verl.verl_adapter.vllm.vllm_server import HalfAwake

    server = await sleeping_server(monkeypatch)
    server.engine.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        await server.wake_up(["weights"])
    server.engine.fails = False
    for _ in range(2):
        with pytest.raises(HalfAwake, match="rollout replica 0"):
            await server.sleep()
        await server.wake_up(["weights"])


@pytest.mark.parametrize(
    ("keep", "sees", "told"),
    [(True, True, ["keep", "forget pictures"]), (True, False, ["keep"]), (False, True, ["keep, forget all"])],
)
async def test_no_picture_is_kept_as_older_weights_saw_it(monkeypatch, keep, sees, told):
    """vLLM knows them by their bytes alone, where it knows blocks by the version, too (salted prompts)."""
    from seamless_verl.trajectory.seams import Seams
    from seamless_verl.verl_adapter.vllm.pulling_server import PullingServer, _Stages

    server, found = await serve(PullingServer, monkeypatch), []

    async def pause(mode, clear_cache):
        found.append(f"{mode}, forget all" if clear_cache else mode)

    async def forget():
        found.append("forget pictures")

    async def nothing():
        pass

    server._seams, engine = Seams(), server.engine
    engine.reset_encoder_cache, engine.renderer = forget, SimpleNamespace(clear_mm_cache_async=nothing)
    engine.engine_core = SimpleNamespace(pause_scheduler_async=pause, outputs_queue=asyncio.Queue())
    engine.vllm_config.scheduler_config = SimpleNamespace(max_num_seqs=8)
    engine.vllm_config.model_config = SimpleNamespace(is_multimodal_model=sees)
    await server._hold_up(keep, _Stages())
    assert found == told


def test_a_request_goes_on_when_the_picture_that_it_is_at_is_forgotten():
    """With vLLM's own account of what its encoder's cache holds; the worker's has the same entries."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    class Request:
        request_id, mm_features = "r1", [SimpleNamespace(identifier="picture")]

        def get_num_encoder_embeds(self, input_id):
            return 7

    cache, request = EncoderCacheManager(cache_size=10), Request()
    for _ in range(2):
        assert not cache.check_and_update_cache(request, 0), "it is computed, again with new weights"
        assert cache.can_allocate(request, 0, 10, 0)
        cache.allocate(request, 0)
        assert cache.check_and_update_cache(request, 0)
        cache.reset()
    cache.free(request)
    assert cache.num_free_slots == cache.num_freeable_slots == 10


@pytest.mark.parametrize("num_cores", [1, 2])
def test_a_request_that_was_ended_before_it_came_is_told_so_once(monkeypatch, num_cores):
    from seamless_verl.verl_adapter.vllm.vllm_server import InterruptibleServer

    async def scenario():
        server = await serve(InterruptibleServer, monkeypatch, num_cores)
        assert (await server.abort_request("r1", reset_prefix_cache=False))["aborted"]
        output = await server.generate([1, 2], {"max_tokens": 4}, "r1")
        assert (output.token_ids, output.stop_reason, server._admitting) == ([], "aborted", 0)
        request = await one_queued(server)  # the same name may come again
        server.engine.paused.set()
        await request

    asyncio.run(scenario())


def test_a_request_that_is_ended_half_way_into_the_engine_is_ended_there(monkeypatch):
    from seamless_verl.verl_adapter.vllm.vllm_server import InterruptibleServer

    async def scenario():
        server = await serve(InterruptibleServer, monkeypatch)
        aborted = []

        async def abort(name):
            aborted.append(name)
            server.engine.paused.set()

        server.engine.abort = abort
        request = await one_arriving(server)
        await server.abort_request("r1", reset_prefix_cache=False)
        assert aborted == []
        server.engine.let_in.set()
        await request
        assert aborted == ["r1"]

    asyncio.run(scenario())


async def test_parts_of_an_answer_need_no_log_probs():
    from seamless_verl.verl_adapter.vllm.vllm_server import _Parts

    async def answering():
        for num in (1, 2, 3):
            answer = SimpleNamespace(token_ids=[7, 8, 9][:num], logprobs=None)
            yield SimpleNamespace(finished=False, outputs=[answer])

    parts = _Parts(2, lambda start, end: [(5, end - start)])
    assert len([output async for output in parts.noted(answering())]) == 3
    part = parts.waiting.get_nowait()
    assert (part.token_ids, part.log_probs, part.extra_fields["version_spans"]) == ([7, 8], None, [(5, 2)])


@pytest.mark.parametrize("sync", ["together", "rolling"])
def test_our_trainer_starts_such_servers(sync):
    from verl.workers.rollout.replica import RolloutReplicaRegistry
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    from seamless_verl.verl_adapter.slices.standing import replica_loader

    before = RolloutReplicaRegistry._registry["vllm"]
    try:
        RolloutReplicaRegistry.register("vllm", replica_loader(sync))
        replica = RolloutReplicaRegistry.get("vllm")
    finally:
        RolloutReplicaRegistry._registry["vllm"] = before
    assert issubclass(replica, vLLMReplica)
    assert replica.__name__ == {"together": "InterruptibleReplica", "rolling": "PullingReplica"}[sync]


def test_every_engines_servers_have_more_slots_than_anything_fills():
    from verl.workers.rollout.vllm_rollout.vllm_pd_replica import vLLMPDReplica

    from seamless_verl.verl_adapter.vllm.vllm_server import InterruptibleReplica
    from seamless_verl.verl_adapter.workarounds import NUM_SLOTS

    for cls in (InterruptibleReplica, vLLMPDReplica):
        assert object.__new__(cls).max_concurrency == NUM_SLOTS


@pytest.mark.parametrize("error", [ValueError("no such device"), SystemExit(2)], ids=repr)
def test_a_launch_that_fails_is_told_as_the_engines(monkeypatch, error):
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    from seamless_verl.verl_adapter.vllm.engine_death import EngineNotStarted
    from seamless_verl.verl_adapter.vllm.vllm_server import InterruptibleServer

    async def launch_server(self, *args, **kwargs):
        raise error

    async def scenario():
        server = await serve(InterruptibleServer, monkeypatch)
        monkeypatch.setattr(vLLMHttpServer, "launch_server", launch_server)
        with pytest.raises(EngineNotStarted, match="rollout replica 0"):
            await server.launch_server()

    asyncio.run(scenario())
