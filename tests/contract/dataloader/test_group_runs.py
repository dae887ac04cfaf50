"""Surplus rollouts and stragglers under verl's rollout worker: who is stopped, cleared, started anew."""

import asyncio
from types import SimpleNamespace

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.observe.flight import BEGUN_ANEW, GIVEN_UP, GROUP_FAILED, SURPLUS
from seamless_verl.staleness.groups import StuckPolicy, Treatment
from tests.fakes import ScriptedTransferQueue

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came")


class Members:
    """Rollouts of one prompt that end when the test says so, and the rows they wrote."""

    def __init__(self, redundancy):
        from seamless_verl.verl_adapter.dataloader.rollout_workers import GroupRuns

        self.runs = GroupRuns(redundancy, self.clear)
        self.rows = set()
        self.starts = []
        self.cancelled = []
        self.told = set()
        self.ends = {}
        self.announced = asyncio.Event()
        self.announced.set()
        self.while_clearing = lambda: None

    async def roll_out(self, member):
        self.starts.append(member)
        self.ends[member] = asyncio.get_running_loop().create_future()
        try:
            rows = await self.ends[member]
        except asyncio.CancelledError as cancelled:
            self.cancelled.append(member)
            self.told |= set(cancelled.args)
            raise
        self.runs.writing("u", member, rows)
        self.rows |= {(member, index) for index in range(rows)}
        await asyncio.sleep(0)  # writing takes its time, and is not interrupted

    async def clear(self, group, rows):
        assert group == "u"
        self.rows -= set(rows)
        self.while_clearing()

    def start(self, needed):
        return asyncio.ensure_future(self.runs.run("u", needed, self.roll_out, self.announced.wait))


async def test_the_first_to_finish_are_the_group_and_the_others_are_stopped():
    members = Members(redundancy=1.5)
    group = members.start(needed=2)
    await until(lambda: len(members.ends) == 3)
    members.ends[2].set_result(2)
    members.ends[0].set_result(1)
    complete, errors = await group
    assert (complete, errors) == (True, [])
    assert (members.cancelled, members.told) == ([1], {SURPLUS})
    assert members.rows == {(0, 0), (2, 0), (2, 1)}


async def test_a_surplus_rollout_that_ends_at_the_same_moment_leaves_no_row():
    members = Members(redundancy=2)
    group = members.start(needed=2)
    await until(lambda: len(members.ends) == 4)
    for member in range(4):
        members.ends[member].set_result(1)
    assert (await group)[0]
    assert members.rows == {(0, 0), (1, 0)}
    assert members.cancelled == []


async def test_failures_that_the_surplus_makes_up_for_do_not_fail_the_group():
    members = Members(redundancy=1.5)
    group = members.start(needed=2)
    await until(lambda: len(members.ends) == 3)
    members.ends[0].set_exception(RuntimeError("no"))
    await asyncio.sleep(0)
    members.ends[1].set_result(1)
    members.ends[2].set_result(1)
    complete, errors = await group
    assert complete
    assert [str(error) for error in errors] == ["no"]


async def test_a_group_that_cannot_be_completed_fails_and_stops():
    members = Members(redundancy=1)
    group = members.start(needed=2)
    await until(lambda: len(members.ends) == 2)
    members.ends[0].set_exception(RuntimeError("no"))
    assert (await group)[0] is False
    assert (members.cancelled, members.told) == ([1], {GROUP_FAILED})


async def test_a_cancellation_that_nobody_asked_for_is_an_error_of_the_group():
    members = Members(redundancy=1)
    group = members.start(needed=2)
    await until(lambda: len(members.ends) == 2)
    members.ends[1].cancel()
    complete, errors = await group
    assert complete is False
    assert [str(error) for error in errors] == ["rollout 1 of its group was cancelled, and not by its group"]
    assert isinstance(errors[0].__cause__, asyncio.CancelledError)


async def test_a_group_started_anew_begins_with_its_prompt_and_keeps_no_row_of_before():
    members = Members(redundancy=1)
    group = members.start(needed=2)
    await until(lambda: len(members.ends) == 2)
    members.ends[0].set_result(3)
    await until(lambda: (0, 2) in members.rows)
    assert members.runs.restart(["u", "unknown"]) == ["u"]
    assert members.runs.restart(["u"]) == [], "it is under way"
    await until(lambda: len(members.starts) == 4)
    assert (members.cancelled, members.told) == ([1], {BEGUN_ANEW})
    assert members.rows == set()
    for member in (0, 1):
        members.ends[member].set_result(1)
    assert (await group)[0]
    assert members.rows == {(0, 0), (1, 0)}
    assert members.runs.restart(["u"]) == []


@pytest.mark.parametrize("begun_anew", [False, True])
async def test_a_group_that_is_given_up_is_stopped_for_good(begun_anew):
    members = Members(redundancy=1)
    group = members.start(needed=2)
    await until(lambda: len(members.ends) == 2)
    members.ends[0].set_result(1)
    await until(lambda: (0, 0) in members.rows)
    if begun_anew:
        members.runs.restart(["u"])
    members.runs.give_up(["u", "unknown"])
    assert members.runs.restart(["u"]) == []
    assert await group == (False, [])
    assert (members.starts, members.cancelled) == ([0, 1], [1])
    assert members.told == {BEGUN_ANEW if begun_anew else GIVEN_UP}


async def test_a_group_that_is_given_up_before_it_began_or_just_before_it_begins_anew_does_not():
    members = Members(redundancy=1)
    members.announced.clear()
    group = members.start(needed=2)
    await asyncio.sleep(0)
    members.runs.give_up(["u"])
    members.announced.set()
    assert (await group, members.starts) == ((False, []), [])
    group = members.start(needed=2)
    await until(lambda: len(members.ends) == 2)
    members.while_clearing = lambda: members.runs.give_up(["u"])
    assert members.runs.restart(["u"]) == ["u"]
    assert (await group, members.starts) == ((False, []), [0, 1])
    assert members.runs.restart(["u"]) == []


async def test_a_group_that_is_started_anew_before_it_began_begins_once():
    members = Members(redundancy=1)
    members.announced.clear()
    group = members.start(needed=2)
    await asyncio.sleep(0)
    assert members.runs.restart(["u"]) == ["u"]
    members.announced.set()
    await until(lambda: len(members.ends) == 2)
    for member in (0, 1):
        members.ends[member].set_result(1)
    assert (await group, members.starts) == ((True, []), [0, 1])


async def test_a_worker_that_is_ended_takes_its_rollouts_along():
    members = Members(redundancy=1)
    group = members.start(needed=2)
    await until(lambda: len(members.ends) == 2)
    group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await group
    await until(lambda: sorted(members.cancelled) == [0, 1])


# ---------------------------------------------------------------- verl's worker


def worker(monkeypatch, queue, redundancy, n=2):
    """Our worker class without its actor's start; TransferQueue is scripted, agent loops end when the test says so."""
    import transfer_queue as tq
    from omegaconf import OmegaConf

    from seamless_verl.verl_adapter.dataloader import rollout_workers
    from seamless_verl.verl_adapter.dataloader.rollout_workers import GroupRuns

    async def put(key, partition_id, tag):
        queue.kv_batch_put([key], partition_id, [tag])
        await asyncio.sleep(0)

    async def clear(keys, partition_id):
        queue.kv_clear(keys, partition_id)

    monkeypatch.setattr(tq, "async_kv_put", put)
    monkeypatch.setattr(tq, "async_kv_clear", clear)
    made = object.__new__(rollout_workers.NotifyingWorker)
    made.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"n": n}}})
    made._news, made._waiting = 0, []
    made._groups = GroupRuns(redundancy, rollout_workers._clear)
    made.ends = {}

    async def run_agent_loop(params, *, trajectory, trace, session_id, uid, **kwargs):
        made.ends[session_id] = asyncio.get_running_loop().create_future()
        await made.ends[session_id]
        made._groups.writing(uid, session_id, 1)
        queue.kv_batch_put([f"{uid}_{session_id}_0"], "train", [{"status": "success", "min_global_steps": 0}])

    monkeypatch.setattr(made, "_run_agent_loop", run_agent_loop, raising=False)
    return made


async def test_a_prompt_is_finished_with_exactly_as_many_rollouts_as_the_trainer_wants(monkeypatch):
    queue = ScriptedTransferQueue()
    ours = worker(monkeypatch, queue, redundancy=1.5)
    group = asyncio.ensure_future(ours._run_prompt({"uid": "u"}, {}, {"validate": False}))
    await until(lambda: len(ours.ends) == 3)
    assert queue.tags["train"]["u"] == {"status": "running"}
    for session in (1, 2):
        ours.ends[session].set_result(None)
    await group
    assert {key: tag["status"] for key, tag in queue.tags["train"].items()} == {
        "u": "finished",
        "u_1_0": "success",
        "u_2_0": "success",
    }
    assert await ours.news(0) == 1


@pytest.mark.parametrize("begun", [2, 0])
async def test_a_surplus_prompt_is_stopped_and_ends_as_one_that_the_trainer_clears(monkeypatch, begun):
    queue = ScriptedTransferQueue()
    ours = worker(monkeypatch, queue, redundancy=1)
    group = asyncio.ensure_future(ours._run_prompt({"uid": "u"}, {}, {"validate": False}))
    await until(lambda: len(ours.ends) == begun and "u" in queue.tags.get("train", ()))
    await ours.give_up_groups(["u"])
    await group
    assert queue.tags["train"] == {"u": {"status": "failure"}}
    assert len(ours.ends) == begun
    assert all(end.cancelled() for end in ours.ends.values())
    assert await ours.news(0) == 1


async def test_a_teacher_is_asked_for_every_row_of_a_session(monkeypatch):
    """verl asks it for the last only; what one row lacks, TransferQueue leaves out of the whole batch."""
    import torch
    import transfer_queue as tq
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    stored, asked = {}, []

    async def put(keys, fields, tags, partition_id):
        stored.update(zip(keys, fields["teacher_logprobs"].unbind(), strict=True))

    async def teach(*, sequence_ids, routing_key, **_):
        asked.append(routing_key)
        return torch.tensor([sequence_ids]).T, torch.tensor([sequence_ids]).T / 10

    ours = worker(monkeypatch, ScriptedTransferQueue(), redundancy=1)
    monkeypatch.setattr(tq, "async_kv_batch_put", put)
    ours.reward_loop_worker_handles = ours.processor = None
    ours.distillation_enabled, ours.teacher_key = True, "data_source"
    ours.teacher_server_manager = SimpleNamespace(compute_teacher_logprobs_single=teach)

    def row(*response):
        mask, log_probs, extra = [1] * len(response), [-1.0] * len(response), {"reward_extra_info": {}}
        given = {"response_mask": mask, "response_logprobs": log_probs, "extra_fields": extra}
        return AgentLoopOutput(
            prompt_ids=[1], response_ids=response, reward_score=1.0, metrics=AgentLoopMetrics(), **given
        )

    sample = {"uid": "u", "session_id": 0, "global_steps": 1, "data_source": "math"}
    await ours._agent_loop_postprocess([row(2), row(3, 4), row(5)], False, **sample)
    found = {key: [round(10 * value) for value in row.flatten().tolist()] for key, row in stored.items()}
    assert found == {"u_0_0": [1, 2], "u_0_1": [1, 3, 4], "u_0_2": [1, 5]}
    assert asked == ["math"] * 3


@pytest.mark.parametrize(("staleness", "managed"), [({}, False), ({"redundancy": 1.5}, True)])
def test_workers_can_stop_a_prompt_where_there_are_surplus_ones(monkeypatch, staleness, managed):
    from omegaconf import OmegaConf

    from seamless_verl.verl_adapter.dataloader import rollout_workers

    def init(self, config, client):
        self.config, self.llm_client = config, client

    monkeypatch.setattr(rollout_workers.NotifyingWorker.__mro__[1], "__init__", init)
    monkeypatch.setattr(rollout_workers, "request_log", SimpleNamespace())
    config = OmegaConf.create({"seamless": {"staleness": staleness, "agent": {"deadline_s": 50.0}}})
    ours = rollout_workers.NotifyingWorker(config, SimpleNamespace(conversations_over=None))
    assert (ours._groups is not None) is managed
    assert ours._late_s == 60.0, "a fifth beyond the deadline, as the documents say"
    asyncio.run(ours.give_up_groups(["u"]))


async def test_a_worker_cuts_short_what_it_rolls_out_and_remembers_no_other_group():
    """The trainer tells all workers."""
    from seamless_verl.verl_adapter.dataloader.rollout_workers import NotifyingWorker, cut_groups

    members, worker = Members(redundancy=1), object.__new__(NotifyingWorker)
    worker._groups = members.runs
    group = members.start(needed=1)
    await worker.cut_groups(["elsewhere", "u"])
    assert not cut_groups.is_cut("u"), "it has not begun here; the trainer asks again"
    await until(lambda: members.ends)
    await worker.cut_groups(["elsewhere", "u"])
    assert (cut_groups.is_cut("u"), cut_groups.is_cut("elsewhere")) == (True, False)
    cut_groups.forget("u")
    members.ends[0].set_result(1)
    await group


# ---------------------------------------------------------------- the trainer's end


class ScriptedHandle:
    """Stands at a rollout worker's handle: answers as the worker would, at once."""

    def __init__(self, rollout):
        self.rollout = rollout
        self.told = []

    @property
    def restart_groups(self):
        return self._remote(
            lambda uids, floor: [uid for uid in uids if uid in self.rollout.running and floor == self.rollout.version],
            "restart",
        )

    @property
    def cut_groups(self):
        return self._remote(lambda uids: None, "cut")

    @property
    def give_up_groups(self):
        return self._remote(lambda uids: None, "give up")

    def _remote(self, answer, name):
        class Method:
            @staticmethod
            def remote(uids, *rest):
                self.told.append((name, list(uids)))
                return answer(uids, *rest)

        return Method


@pytest.fixture
def queue(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "get", lambda answers: answers)
    monkeypatch.setattr(ray, "wait", lambda calls, timeout: (calls, []))
    return ScriptedTransferQueue().install(monkeypatch)


def waiting(queue, treatment, patience_s=2.0):
    """A trainer whose step 2 waits for the stragglers u0 and u1 while the whole batch of step 3 is finished.

    Each time that it waits takes a second.
    """
    import verl.trainer.ppo.v1  # noqa: F401

    from tests.contract.dataloader.test_streaming import Rollout

    rollout = Rollout(queue, eta=1, batch_size=2, stuck=StuckPolicy(treatment=treatment, patience_s=patience_s))
    handle = ScriptedHandle(rollout)
    rollout.buffer.listen([handle])
    rollout.buffer.stragglers._clock = lambda: -len(rollout.while_waiting)
    rollout.buffer.admit(1)
    for uid in ("u2", "u3"):
        rollout.finish(uid)
    rollout.sample(2)
    rollout.end_step()
    rollout.buffer.admit(2)
    for uid in ("u4", "u5"):
        rollout.finish(uid)
    return rollout, handle


def test_stragglers_are_started_anew_and_finished_groups_take_their_place(queue):
    rollout, handle = waiting(queue, Treatment.RETRY)
    rollout.while_waiting = [lambda: None, lambda: None]
    uids, _, metrics = rollout.sample(2)
    assert (uids, handle.told) == (["u4", "u5"], [("restart", ["u0", "u1"])])
    assert metrics["training/stuck/retried_total"] == 2
    rollout.end_step()
    assert rollout.buffer.admit(3) == 2, "u0 and u1 have slots of step 3, so that much of the bound is left"
    for uid in ("u0", "u1"):
        rollout.finish(uid, version=1)  # the weights they were started anew with
    uids, _, metrics = rollout.sample(2)
    assert sorted(uids) == ["u0", "u1"]
    assert metrics["training/staleness/max"] == 1


def test_a_straggler_that_ended_meanwhile_is_not_started_anew(queue):
    rollout, handle = waiting(queue, Treatment.RETRY)
    rollout.while_waiting = [lambda: None, lambda: rollout.running.pop("u0")]
    rollout.while_waiting.append(lambda: [rollout.running.update(u0=0), rollout.finish("u0")])
    uids, _, metrics = rollout.sample(2)
    assert handle.told[0] == ("restart", ["u0", "u1"])
    assert uids == ["u0", "u4"]
    assert metrics["training/stuck/retried_total"] == 1


def test_what_a_step_does_about_stragglers_is_added_up_over_its_mini_batches(queue):
    """What verl does not know it averages (`MetricsAggregator`)."""
    from verl.trainer.ppo.v1.utils import MetricsAggregator

    rollout, _ = waiting(queue, Treatment.TRUNCATE)
    step = MetricsAggregator()
    for uid in ("u0", "u1"):
        rollout.while_waiting = [lambda: None, lambda: None, lambda uid=uid: rollout.finish(uid)]
        step.add_step_metrics(rollout.sample(1)[2], sample_count=2)
    assert step.get_aggregated_metrics()["training/stuck/truncated_total"] == 3, "both, then the one that was left"


def test_stragglers_are_cut_short_and_trained(queue):
    rollout, handle = waiting(queue, Treatment.TRUNCATE)
    rollout.while_waiting = [lambda: None, lambda: None, lambda: [rollout.finish(uid) for uid in ("u0", "u1")]]
    uids, _, metrics = rollout.sample(2)
    assert (uids, handle.told) == (["u0", "u1"], [("cut", ["u0", "u1"])])
    assert metrics["training/stuck/truncated_total"] == 2


def test_the_surplus_of_a_step_is_stopped(queue):
    import verl.trainer.ppo.v1  # noqa: F401

    from tests.contract.dataloader.test_streaming import Rollout

    rollout = Rollout(queue, eta=0, batch_size=2, redundancy=2)
    handle = ScriptedHandle(rollout)
    rollout.buffer.listen([handle])
    rollout.buffer.admit(1)
    for uid in ("u1", "u2", "u3"):
        rollout.finish(uid)
    assert rollout.sample(1)[0] == ["u1"]
    assert handle.told == []
    assert rollout.sample(1)[0] == ["u2"]
    assert [(name, sorted(uids)) for name, uids in handle.told] == [("give up", ["u0", "u3"])]
    rollout.fail("u0")
    rollout.buffer.get_sampleable_count(2, "train")
    assert not {"u0", "u3"} & {key.split("_")[0] for key in queue.tags["train"]}


def test_only_time_in_which_the_trainer_waits_for_a_step_counts_as_patience(queue):
    """It looks for groups before it publishes weights and validates, too; it waits for nobody meanwhile."""
    rollout, handle = waiting(queue, Treatment.TRUNCATE, patience_s=60)
    now = 0.0

    def pass_time(seconds):
        nonlocal now
        now += seconds

    stragglers = rollout.buffer.stragglers
    stragglers._clock = lambda: now
    assert rollout.buffer.take_stock(2) == (0, 2), "at the end of a step"
    pass_time(300)  # weights, validation, a checkpoint
    with stragglers.waiting(2):
        rollout.buffer.take_stock(2)
        pass_time(30)  # for its GPUs
        rollout.buffer.take_stock(2)
    pass_time(300)
    assert handle.told == []
    rollout.while_waiting = [
        lambda: pass_time(29),
        lambda: [pass_time(1), handle.told.append("a minute")],
        lambda: pass_time(59),
        lambda: [pass_time(1), handle.told.append("another one")],
        lambda: [rollout.finish(uid) for uid in ("u0", "u1")],
    ]
    rollout.sample(2)
    cut = ("cut", ["u0", "u1"])
    assert handle.told == ["a minute", cut, "another one", cut], "who was cut short is given as much time again"
    with stragglers.waiting(2):
        pass_time(59)
    with stragglers.waiting(3):
        pass_time(59)
        assert stragglers.treat(rollout.buffer.protocol, 2) == {}, "patience begins anew with a step"


def test_patience_runs_out_while_the_trainer_waits_for_its_gpus_too(queue):
    from contextlib import nullcontext
    from types import SimpleNamespace

    from seamless_verl.verl_adapter.trainer.lending import Lending, StepShape
    from tests.contract.slices.test_slice_driver import Run

    rollout, handle = waiting(queue, Treatment.TRUNCATE)
    rollout.while_waiting = [lambda: None, lambda: None, lambda: [rollout.finish(uid) for uid in ("u0", "u1")]]
    rollout.buffer.wait_for_news = lambda timeout_s: rollout.wait("train", 0.0)
    lending = Lending(
        scheduler=None,
        driver=Run().driver,
        replicas=None,
        weights=None,
        rows=rollout.buffer,
        flight=SimpleNamespace(phase=lambda phase: nullcontext(), progress=lambda ready, needed: None),
        shape=StepShape(batch=2, mini_batch=2, rollouts=2, saves=False),
        gang=1,
        step=2,
    )
    lending.acquire_gang()
    assert handle.told == [("cut", ["u0", "u1"])]
    assert rollout.while_waiting == []


def test_by_default_the_trainer_waits(queue):
    rollout, handle = waiting(queue, Treatment.WAIT)
    rollout.while_waiting = [lambda: None, lambda: [rollout.finish(uid) for uid in ("u0", "u1")]]
    assert (rollout.sample(2)[0], handle.told) == (["u0", "u1"], [])


# ---------------------------------------------------------------- an answer that is cut short


def test_an_answer_is_cut_where_it_is_and_an_empty_one_gets_a_token():
    from seamless_verl.trajectory.generation import FinishReason, Generation, PartialGeneration, VersionSpan

    def attempt(count):
        spans = (VersionSpan(version=3, num_tokens=count),) if count else ()
        log_probs = [-0.5] * count
        return Generation(
            token_ids=list(range(count)), log_probs=log_probs, version_spans=spans, finish_reason=FinishReason.ABORTED
        )

    partial = PartialGeneration({"max_tokens": 9}, None)
    assert partial.add(attempt(4)) is False
    assert partial.cut_short()
    assert partial.generation().finish_reason is FinishReason.LENGTH
    assert partial.generation().token_ids == [0, 1, 2, 3]
    empty = PartialGeneration({"max_tokens": 9}, None)
    assert empty.add(attempt(0)) is False
    assert not empty.cut_short()
    assert empty.sampling()["max_tokens"] == 1


def test_cutting_reaches_the_attempts_under_way_and_is_forgotten():
    from seamless_verl.verl_adapter.rollout.request_log import CutGroups

    cutting, aborted = CutGroups(), []
    with cutting.running("u", lambda: aborted.append("first")), cutting.running("v", lambda: aborted.append("other")):
        cutting.cut(["u"])
    cutting.cut(["u"])
    assert aborted == ["first"]
    assert cutting.is_cut("u")
    assert not cutting.is_cut("v")
    cutting.forget("u")
    assert not cutting.is_cut("u")


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["+seamless.staleness.stuck=retry", "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=my.Manager"],
            r"agent_loop_manager_class=my\.Manager.*leave it out",
        ),
        (
            ["+seamless.router={policy: marginal_gain, migrate: true}", "actor_rollout_ref.rollout.name=sglang"],
            r"migrate=True.*write false",
        ),
        (["+seamless.staleness.stuck=truncate", "actor_rollout_ref.rollout.name=sglang"], r"stuck=truncate.*retry or"),
    ],
)
def test_settings_that_this_rollout_cannot_follow_are_refused(overrides, said):
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    from seamless_verl.run import compose
    from seamless_verl.verl_adapter.trainer.adoption import adopt_config

    with initialize_config_dir(str(compose.verl_config_dir()), version_base=None):
        config = hydra_compose("ppo_trainer", overrides=overrides)
    with pytest.raises(ConfigError, match=said):
        adopt_config(config)
