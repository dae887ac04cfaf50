"""A rollout worker dies: who notices, what is cleared, and what the one in its place is given.

Ray is scripted here; the runs in tests/e2e kill real workers.
"""

import asyncio

import pytest

from seamless_verl.run.restarts import RunBroken
from seamless_verl.scheduling import events as ev
from tests.fakes import ScriptedTransferQueue

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


class Call:
    """A scripted Ray call: an answer, an error, or not answered yet."""

    def __init__(self, answer=None, error=None, open=False):
        self.answer, self.error, self.open = answer, error, open

    def get(self):
        assert not self.open
        if self.error is not None:
            raise self.error
        return self.answer


class Handle:
    """A rollout worker's handle: every method is remote, and fails once the worker is dead."""

    def __init__(self, name, **answers):
        self._actor_id = name.encode()
        self.name, self.answers, self.dead, self.told, self.news_calls = name, answers, False, [], []

    def __getattr__(self, method):
        if method.startswith("_") and method != "__ray_ready__":
            raise AttributeError(method)

        class Method:
            @staticmethod
            def remote(*arguments):
                self.told.append((method, *arguments))
                call = Call(self.answers.get(method), error=died() if self.dead else None)
                if method == "news" and not self.dead:
                    call.open = True
                    self.news_calls.append(call)
                return call

        return Method

    def die(self):
        self.dead = True
        for call in self.news_calls:
            call.open, call.error = False, died()

    def given(self):
        """Prompts by the uid, as the worker reads them."""
        from seamless_verl.verl_adapter.dataloader.rollout_workers import NotifyingWorker

        read = []
        worker = object.__new__(NotifyingWorker)
        worker.config, worker.background_tasks = config(), set()

        async def run_prompt(prompt, sampling_params, trajectory, trace):
            read.append((prompt["uid"], prompt["raw_prompt"][0]["content"], trajectory["validate"]))

        async def read_all():
            worker._run_prompt = run_prompt
            for method, *arguments in self.told:
                if method == "generate_sequences":
                    await worker.generate_sequences(arguments[0].clone())
            await asyncio.gather(*worker.background_tasks)

        asyncio.run(read_all())
        return read


def died():
    from ray.exceptions import ActorDiedError

    return ActorDiedError()


def config(workers=2):
    from omegaconf import OmegaConf

    values = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
    rollout = {**values, "calculate_log_probs": True, "val_kwargs": values, "agent": {"num_workers": workers}}
    rollout["agent"]["default_agent_loop"] = "single_turn_agent"
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "model": {}}})


def prompts(uids, validate=False):
    import numpy as np
    import torch
    import verl.utils.tensordict_utils as tu

    def column(values):
        return np.array([*values, None], dtype=object)[:-1]

    batch = tu.get_tensordict(
        {
            "uid": column(uids),
            "raw_prompt": column([{"role": "user", "content": f"the task of {uid}"}] for uid in uids),
            "index": column(range(len(uids))),
            "dummy_tensor": torch.arange(len(uids)),
        }
    )
    tu.assign_non_tensor_data(batch, "global_steps", 3)
    if validate:
        tu.assign_non_tensor_data(batch, "validate", True)
    return batch


class Fleet:
    """A manager with two scripted workers, and TransferQueue over a dict."""

    def __init__(self, monkeypatch):
        import ray

        from seamless_verl.verl_adapter.dataloader import replaced_workers

        self.queue = ScriptedTransferQueue().install(monkeypatch)
        self.killed, self.said = [], []
        monkeypatch.setattr(ray, "get", lambda call: call.get())
        monkeypatch.setattr(ray, "kill", self.killed.append)
        monkeypatch.setattr(ray, "wait", self.wait)
        self.router = Handle("router")
        client = type("Client", (), {"_load_balancer": self.router})
        self.manager = replaced_workers.ReplacingManager(config(), client)
        self.manager.agent_loop_workers = [Handle("w0"), Handle("w1")]
        self.manager.say = self.said.append
        monkeypatch.setattr(self.manager, "_start", lambda rank: Handle(f"new{len(self.said)}"))

    @staticmethod
    def wait(calls, num_returns=1, timeout=None):
        ready = [call for call in calls if not call.open]
        return ready, [call for call in calls if call.open]

    def submit(self, uids, partition="train"):
        tags = [{"is_prompt": True, "status": "pending", "global_steps": 3} for _ in uids]
        self.queue.kv_batch_put(uids, partition, tags)
        self.manager.generate_sequences(prompts(uids, validate=partition == "val"))

    def mark(self, status, *uids, partition="train"):
        self.queue.kv_batch_put(uids, partition, [{"status": status} for _ in uids])

    def rows(self, *keys, partition="train"):
        self.queue.kv_batch_put(keys, partition, [{"status": "success"} for _ in keys])


@pytest.fixture
def fleet(monkeypatch):
    return Fleet(monkeypatch)


def test_the_groups_of_a_dead_worker_that_have_not_ended_go_to_the_one_in_its_place(fleet):
    first, second = fleet.manager.agent_loop_workers
    fleet.submit(["a", "b", "c", "d"])
    assert [uid for uid, *_ in first.given()] == ["a", "b"]
    fleet.mark("running", "b", "c", "d")
    fleet.mark("finished", "a")
    fleet.rows("a_0_0", "b_0_0", "b_1_0", "c_0_0")
    first.die()
    new = fleet.manager.replace(first, died())
    assert fleet.manager.agent_loop_workers == [new, second]
    assert new.given() == [("b", "the task of b", False)]
    assert [uid for uid, *_ in second.given()] == ["c", "d"], "nothing twice"
    assert sorted(key for key in fleet.queue.tags["train"] if "_" in key) == ["a_0_0", "c_0_0"]
    assert fleet.queue.tags["train"]["b"]["is_prompt"]
    assert fleet.killed == [first]
    assert fleet.router.told == [("worker_died", first._actor_id.hex())]
    assert "rollout worker 0 died (ActorDiedError" in fleet.said[0]
    assert fleet.said[0].endswith("; 1 prompt groups begin again")


def test_floors_go_with_their_prompts_also_to_the_worker_in_the_place_of_a_dead_one(fleet, monkeypatch):
    from seamless_verl.verl_adapter.dataloader.rollout_workers import NotifyingWorker
    from seamless_verl.verl_adapter.rollout.request_log import request_log

    first, second = fleet.manager.agent_loop_workers
    fleet.manager.floor_of = {"a": 3, "b": 4, "c": 4}.__getitem__
    fleet.submit(["a", "b", "c"])
    assert (first.told[0][2], second.told[0][2]) == ({"a": 3, "b": 4}, {"c": 4})
    fleet.mark("running", "b", "c")
    fleet.mark("finished", "a")
    first.die()
    _, batch, floors = fleet.manager.replace(first, died()).told[0]
    assert floors == {"b": 4}
    worker = object.__new__(NotifyingWorker)
    worker.config, worker.background_tasks, worker._groups = config(), set(), None
    worker._news, worker._waiting, seen = 0, [], []

    async def run_prompt(self, prompt, *_):
        with request_log.session(prompt["uid"], 0):
            seen.append(request_log.floor("any turn of it"))

    monkeypatch.setattr(NotifyingWorker.__mro__[1], "_run_prompt", run_prompt)

    async def read():
        await worker.generate_sequences(batch.clone(), floors)
        await asyncio.gather(*worker.background_tasks)

    asyncio.run(read())
    assert seen == [4]
    assert not request_log._floors, "those of prompts that ended are forgotten"


def test_validation_prompts_are_generated_again_as_such(fleet):
    first, _ = fleet.manager.agent_loop_workers
    fleet.submit(["v", "w"], partition="val")
    fleet.rows("v_0_0", partition="val")
    first.die()
    new = fleet.manager.replace(first, died())
    assert new.given() == [("v", "the task of v", True)]
    assert "v_0_0" not in fleet.queue.tags["val"]


def test_a_worker_that_is_dead_when_it_is_given_prompts_is_replaced_once(fleet):
    from seamless_verl.verl_adapter.dataloader.woken_buffer import Bell

    first, second = fleet.manager.agent_loop_workers
    bell = Bell(fleet.manager.agent_loop_workers, fleet.manager.replace)
    first.die()
    fleet.submit(["a", "b"])
    new = fleet.manager.agent_loop_workers[0]
    assert [uid for uid, *_ in new.given()] == ["a"]
    bell.wait(5.0)
    assert fleet.manager.agent_loop_workers[0] is new, "the bell hears of the same death"
    assert ("news", 0) in new.told, "and waits for the one in its place"
    new.die()
    bell.wait(5.0)
    assert [uid for uid, *_ in fleet.manager.agent_loop_workers[0].given()] == ["a"]
    assert [uid for uid, *_ in second.given()] == ["b"]


def test_without_a_manager_that_replaces_workers_the_wait_ends_with_the_death(fleet):
    from ray.exceptions import ActorDiedError

    from seamless_verl.verl_adapter.dataloader.woken_buffer import Bell

    first, _ = fleet.manager.agent_loop_workers
    bell = Bell(fleet.manager.agent_loop_workers)
    first.die()
    with pytest.raises(ActorDiedError):
        bell.wait(5.0)


def test_a_group_that_loses_its_worker_again_and_again_ends_the_run(fleet):
    fleet.submit(["a", "b"])
    for _ in range(2):
        worker = fleet.manager.agent_loop_workers[0]
        worker.die()
        fleet.manager.replace(worker, died())
    worker = fleet.manager.agent_loop_workers[0]
    with pytest.raises(RunBroken, match="rollout worker 0 died .*the last of 3 workers that lost prompt group a"):
        fleet.manager.replace(worker, died())


def test_a_worker_is_made_as_verl_makes_its_workers(monkeypatch):
    import ray

    from seamless_verl.verl_adapter.dataloader.replaced_workers import ReplacingManager

    made = []

    class Workers:
        def options(self, *, name, scheduling_strategy):
            made.append([name.rpartition("_")[0], vars(scheduling_strategy)])
            return self

        def remote(self, *arguments):
            made[-1].append(arguments)

    ids = ["a1" * 28, "b2" * 28, "c3" * 28]
    nodes = [{"NodeID": name, "Alive": name != ids[1], "Resources": {"CPU": 4.0}} for name in ids]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    manager = ReplacingManager(config(workers=3), "client", "teachers", ["rewards"])
    manager.agent_loop_workers_class = Workers()
    asyncio.run(manager._init_agent_loop_workers())
    for rank in range(3):
        manager._start(rank)
    assert made[3:] == made[:3]
    manager.agent_loop_workers = [Handle(f"w{rank}", generate_sequences=ids[2 * (rank % 2)]) for rank in range(3)]
    monkeypatch.setattr(ray, "get", lambda call: call.get())
    monkeypatch.setattr(ray, "wait", Fleet.wait)
    manager._hand_out([(worker, prompts(["a"])) for worker in manager.agent_loop_workers])
    nodes[1]["Alive"] = True  # the list by which verl chose has changed
    for rank in range(3):
        manager._start(rank)
    nodes[2]["Alive"] = False
    manager._start(1)
    expected = [ids[0], ids[2], ids[0], ids[1]]
    assert [strategy["node_id"] for _, strategy, _ in made[6:]] == expected, "where its journal is, while that lives"


def test_what_has_ended_is_forgotten(fleet):
    fleet.submit(["a", "b"])
    fleet.mark("finished", "a")
    fleet.queue.kv_clear(["b"], "train")
    fleet.submit(["c", "d"])
    assert set(fleet.manager._prompts) == {"c", "d"}


def test_prompts_go_to_the_workers_with_the_fewest_open_groups(fleet):
    """Most refills are of one prompt; all of them went to the first worker."""
    fleet.manager.agent_loop_workers = workers = [Handle(f"w{number}") for number in range(4)]
    fleet.submit([f"b{number}" for number in range(8)])
    assert [[uid for uid, *_ in worker.given()] for worker in workers] == [
        ["b0", "b1"],
        ["b2", "b3"],
        ["b4", "b5"],
        ["b6", "b7"],
    ]
    for number in range(8):
        fleet.submit([f"r{number}"])
    assert [len(worker.given()) for worker in workers] == [4, 4, 4, 4]
    fleet.mark("finished", "b6")
    fleet.mark("failure", "b7")
    for uid in ("s0", "s1"):
        fleet.submit([uid])
    assert [uid for uid, *_ in workers[3].given()][-2:] == ["s0", "s1"], "what has ended does not count"


def test_stragglers_are_treated_without_the_dead(fleet):
    from seamless_verl.verl_adapter.dataloader.woken_buffer import living

    first, second = Handle("w0", restart_groups=["a"]), Handle("w1", restart_groups=["b"])
    first.die()
    assert living([worker.restart_groups.remote(["a", "b"]) for worker in (first, second)], print) == [["b"]]


def test_requests_and_sessions_of_a_dead_worker_end_for_the_scheduler(fleet):
    from seamless_verl.verl_adapter.rollout.request_reports import RequestReports

    def started(request, session):
        return ev.RequestStarted(at=1.0, request=request, session=session, group="u", slice="s", context_tokens=1)

    begun = [
        started("r0", "u_0"),
        started("r1", "u_1"),
        ev.RequestFinished(at=2.0, request="r0", tokens=5),
        ev.SessionFinished(at=2.0, session="u_0", group="u"),
        started("r2", "u_2"),
        ev.RequestFinished(at=3.0, request="r2", tokens=5),
    ]
    workers = [Handle("w0", take_request_events=begun), Handle("w1", take_request_events=[])]
    reports = RequestReports(workers)
    assert reports.fetch() == begun
    workers[0].die()
    assert reports.fetch() == [], "until it is replaced"
    workers[0] = Handle("new", take_request_events=[])
    told = reports.fetch()
    assert [(type(event).__name__, getattr(event, "request", getattr(event, "session", ""))) for event in told] == [
        ("RequestFinished", "r1"),
        ("SessionFinished", "u_1"),
        ("SessionFinished", "u_2"),
    ]
    assert told[0].ending is ev.Ending.FAILED
    assert [event.cut for event in told[1:]] == [True, True]
    assert reports.fetch() == []


def test_a_worker_whose_event_loop_stands_keeps_nobody_waiting_and_tells_later(fleet):
    from seamless_verl.verl_adapter.rollout.request_reports import RequestReports

    first, second = ([ev.SessionFinished(at=at, session=f"s{at}", group="u")] for at in (1.0, 2.0))
    workers = [Handle("w0", news=first), Handle("w1", take_request_events=second)]
    workers[0].take_request_events = workers[0].news  # is not answered until somebody says so
    reports = RequestReports(workers)
    assert reports.fetch() == second
    assert reports.fetch() == second
    assert len(workers[0].news_calls) == 1, "it is not asked again meanwhile"
    workers[0].news_calls[0].open = False
    assert reports.fetch() == [*first, *second]


def test_while_a_worker_does_not_take_its_prompts_somebody_looks_why(fleet):
    stands, looks = Call(open=True), []

    def look():
        looks.append(len(looks))
        stands.open = len(looks) < 3

    fleet.manager.agent_loop_workers[0].generate_sequences = type("Method", (), {"remote": lambda *prompts: stands})
    fleet.manager.look = look
    fleet.submit(["a", "b"])
    assert looks == [0, 1, 2]
