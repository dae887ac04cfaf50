"""The streaming dataloader against verl's own replay buffer, loop and names; TransferQueue is scripted."""

import asyncio
import importlib
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest

from seamless_verl.curriculum_config import CurriculumConfig, StageConfig
from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.observe.reporter import epoch_line
from tests.fakes import ScriptedTransferQueue

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


STOCK = [("finished", 3), ("failure", 3), ("running", 2)]  # status, step in which it was submitted


class Rollout:
    """The trainer and its rollout workers around a buffer: prompts come in, groups end when the test says so."""

    def __init__(self, queue, eta=1, batch_size=4, n=2, dataset=None, curriculum=None, **options):
        from seamless_verl.verl_adapter.dataloader.streaming_buffer import StreamingReplayBuffer

        self.queue, self.n, self.step, self.version = queue, n, 1, 0
        self.running: dict[str, int] = {}  # uid -> version of its first token
        self.submitted: list[str] = []
        self.loader = None
        self.buffer = StreamingReplayBuffer(
            eta=eta,
            batch_size=batch_size,
            trainer_config={},
            sampler_kwargs={},
            refill_fn=self.submit,
            **options,
        )
        if dataset is not None:
            from seamless_verl.verl_adapter.dataloader.curriculum_dataloader import CurriculumLoader

            self.said = []
            self.loader = CurriculumLoader(
                dataset,
                curriculum,
                train_batch_size=batch_size,
                shuffle=False,
                seed=1,
                on_epoch=lambda report: self.said.append(epoch_line(report)),
                say=self.said.append,
            )
            self.prompts = iter(self.loader)
            self.prompt_of = {}
            self.buffer.follow(self.loader)
        self.buffer._wait_for_next_poll = self.wait
        self.while_waiting = []  # what happens at each wait

    def submit(self, count):
        rows = [next(self.prompts) for _ in range(count)] if self.loader is not None else []
        uids = [f"u{len(self.submitted) + number}" for number in range(count)]
        for uid, row in zip(uids, rows, strict=False):
            self.prompt_of[uid] = int(row["index"][0])
        self.buffer.reserve(uids, self.step)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": self.step} for _ in uids]
        self.queue.kv_batch_put(uids, "train", tags)
        self.submitted += uids
        self.running |= dict.fromkeys(uids, self.version)
        return count

    def finish(self, uid, accuracies=(1.0, 0.0), version=None, seq_len=3, stamp=None, **beside):
        """``version``: of the first token of its rows, or a list with that of each; ``stamp``: our proxy's, where the
        rows are its; ``beside``: what verl's manager brings with the accuracy.
        """
        version = self.running.pop(uid) if version is None else version
        self.running.pop(uid, None)
        keys = [f"{uid}_{member}_0" for member in range(self.n)]
        versions = version if isinstance(version, list) else [version] * self.n
        tags = [{"status": "success", "seq_len": seq_len, "min_global_steps": began} for began in versions]
        fields = [
            {
                "extra_fields": {"reward_extra_info": {"acc": accuracy, **beside}, "seamless": stamp},
                "rm_scores": accuracy,
            }
            for accuracy in accuracies
        ]
        self.queue.kv_batch_put(keys, "train", tags, fields)
        self.queue.kv_batch_put([uid], "train", [{"status": "finished"}])

    def fail(self, uid):
        del self.running[uid]
        self.queue.kv_batch_put([uid], "train", [{"status": "failure"}])

    def wait(self, partition, last_debug_time):
        assert self.while_waiting, "the trainer waits and nothing is going to happen"
        self.while_waiting.pop(0)()
        return last_debug_time

    def sample(self, count):
        batch, metrics = self.buffer.sample(global_steps=self.step, partition_id="train", batch_size=count)
        return list(dict.fromkeys(key.split("_")[0] for key in batch.keys)), batch, metrics

    def end_step(self):
        if self.loader is not None:
            self.loader.step_ended(self.step)
        self.version, self.step = self.version + 1, self.step + 1


@pytest.fixture(scope="module", autouse=True)
def plug_in():
    return importlib.import_module("verl.trainer.ppo.v1")  # which brings in our trainer


@pytest.fixture
def queue(monkeypatch):
    return ScriptedTransferQueue().install(monkeypatch)


def test_eta_zero_is_one_batch_at_a_time(queue):
    rollout = Rollout(queue, eta=0)
    assert (rollout.buffer.admit(1), rollout.buffer.admit(1)) == (4, 0)
    for uid in ("u2", "u0", "u3", "u1"):
        rollout.finish(uid)
    uids, batch, metrics = rollout.sample(4)
    assert sorted(uids) == ["u0", "u1", "u2", "u3"]
    assert len(batch.keys) == 8
    assert metrics["training/staleness/max"] == 0
    assert rollout.buffer.admit(1) == 0, "the weights of step 1 are not out"
    rollout.end_step()
    assert rollout.buffer.admit(2) == 4


def test_prompts_are_reserved_for_the_oldest_version_that_serves_where_a_step_has_room_for_one_so_old(queue):
    rollout = Rollout(queue, eta=1)
    buffer = rollout.buffer
    buffer.admit(1)
    assert {buffer.floor_of(uid) for uid in rollout.submitted} == {0}
    for uid in ("u0", "u1", "u2", "u3"):
        rollout.finish(uid)
    rollout.sample(4)
    rollout.end_step()
    serving = [0, 1]
    buffer.follow_versions(lambda: min(serving, default=None), max_lag=2)
    rollout.fail("u4")
    buffer.take_stock(2)
    new = rollout.submitted[8:]
    assert sorted(buffer.floor_of(uid) for uid in new) == [0, 1, 1, 1, 1], "one place is left in the next step"
    assert buffer.floor_of("of a validation") == 1
    for uid in new:
        rollout.finish(uid, version=buffer.floor_of(uid))
    buffer.take_stock(2)
    for behind in ([], [1], [7]):  # nobody is known to lag; who knows more than was published knows nothing
        serving[:] = behind
        rollout.fail(next(iter(rollout.running)))
        buffer.take_stock(2)
        assert buffer.floor_of(rollout.submitted[-1]) == 1


@pytest.mark.parametrize("versions", [[0, 1], [1, 0]])
def test_a_group_is_as_old_as_the_row_of_it_that_began_first(queue, versions):
    rollout = Rollout(queue, eta=1, batch_size=1)
    rollout.buffer.admit(1)
    rollout.finish("u0")
    rollout.sample(1)
    rollout.end_step()
    rollout.finish("u1", version=versions)  # reserved at 0; one of its agents asked when the weights of 1 were there
    uids, _, metrics = rollout.sample(1)
    assert (uids, metrics["training/staleness/max"]) == (["u1"], 1)


def test_the_groups_with_the_most_tokens_are_handed_out_first(queue):
    rollout = Rollout(queue, eta=0)
    rollout.buffer.admit(1)
    for uid, seq_len in (("u0", 3), ("u1", 9), ("u2", 5), ("u3", 3)):
        rollout.finish(uid, seq_len=seq_len)
    assert rollout.sample(2)[0] == ["u1", "u2"]


def test_stock_counts_what_took_the_place_of_groups_that_failed(queue):
    """A scheduler that hears of no group on its way stops those that would generate it."""
    rollout = Rollout(queue, eta=0)
    assert rollout.buffer.take_stock(1) == (0, 4)
    for uid in ("u0", "u1", "u2"):
        rollout.finish(uid)
    rollout.fail("u3")
    assert rollout.buffer.take_stock(1) == (3, 1)
    assert rollout.submitted[4:] == ["u4"]


def test_a_step_that_has_handed_out_its_batch_admits_nothing_until_its_weights_are_out(queue):
    """A scheduler asks at its end; a prompt that is admitted then begins with the old weights."""
    for options, left in (({"in_flight": 1}, []), ({}, ["u4", "u5", "u6"])):
        queue.tags.clear()
        rollout = Rollout(queue, eta=1, **options)
        assert rollout.buffer.take_stock(0) == (0, 0), "a validation before the first step"
        rollout.buffer.take_stock(1)
        for uid in ("u0", "u1", "u2", "u3"):
            rollout.finish(uid)
        rollout.sample(2)
        assert rollout.buffer.take_stock(1) == (2, len(rollout.running))
        rollout.sample(2)
        if left:
            rollout.fail("u7")
        admitted = len(rollout.submitted)
        assert rollout.buffer.take_stock(1) == (0, len(left))
        assert list(rollout.running) == left
        rollout.end_step()
        assert len(rollout.submitted) == admitted
        assert rollout.buffer.take_stock(2) == (0, 8 if left else 4), "the next step begins"
        assert {rollout.buffer.floor_of(uid) for uid in rollout.submitted[admitted:]} == {1}


def test_under_verls_policy_stock_replaces_what_failed_and_waits_for_what_is_too_old_to_miss(queue):
    from seamless_verl.verl_adapter.dataloader.woken_buffer import WokenReplayBuffer

    submitted = []

    def submit(count):
        uids = [f"n{len(submitted) + number}" for number in range(count)]
        tags = [{"is_prompt": True, "status": "pending", "global_steps": 3} for _ in uids]
        queue.kv_batch_put(uids, "train", tags)
        submitted.extend(uids)

    buffer = WokenReplayBuffer(
        trainer_mode="seamless",
        trainer_config={},
        max_off_policy_threshold=2,
        max_off_policy_strategy="wait",
        sampler_kwargs={},
        refill_fn=submit,
    )
    tags = [{"is_prompt": True, "status": status, "global_steps": step} for status, step in STOCK]
    queue.kv_batch_put([f"u{number}" for number in range(len(tags))], "train", tags)
    assert buffer.take_stock(3) == (0, 2), "u2 must be in this batch"
    assert submitted == ["n0"]
    queue.kv_batch_put(["u2"], "train", [{"status": "finished"}])
    assert buffer.take_stock(3) == (2, 1)
    waited = []
    buffer.attend(lambda: waited.append(queue.kv_batch_put(["n0"], "train", [{"status": "finished"}])))
    keys, metrics = buffer.wait_for_sampleable(3, "train", 3)
    assert (keys, len(waited)) == ({"u0", "u2", "n0"}, 1)
    assert metrics["training/rollout_failure/evicted_samples"] == 1


def test_mini_batches_stream_while_the_rest_is_generated_and_stragglers_are_waited_for(queue):
    rollout = Rollout(queue, eta=1)
    assert rollout.buffer.admit(1) == 8
    rollout.finish("u7")
    rollout.finish("u1")
    assert rollout.sample(2)[0] == ["u1", "u7"]
    rollout.while_waiting = [lambda: rollout.finish("u5"), lambda: rollout.finish("u0")]
    assert rollout.sample(2)[0] == ["u0", "u5"], "by name: longest first would order verl's optimizer steps"
    rollout.end_step()
    assert rollout.buffer.admit(2) == 4
    for uid in ("u8", "u9", "u10"):
        rollout.finish(uid)
    assert rollout.buffer.get_sampleable_count(2, "train") == 0, "u2, u3, u4, u6 must be trained in this step"
    rollout.while_waiting = [lambda: [rollout.finish(uid) for uid in ("u2", "u3", "u4", "u6")]]
    assert sorted(rollout.sample(4)[0]) == ["u2", "u3", "u4", "u6"]


def test_failed_groups_return_their_slot_and_are_refilled_in_the_same_step(queue):
    rollout = Rollout(queue, eta=0)
    rollout.buffer.admit(1)
    rollout.fail("u1")
    for uid in ("u0", "u2", "u3"):
        rollout.finish(uid)
    rollout.while_waiting = [lambda: rollout.finish("u4")]
    uids, _, metrics = rollout.sample(4)
    assert sorted(uids) == ["u0", "u2", "u3", "u4"]
    assert metrics["training/rollout_failure/evicted_samples"] == 1
    assert set(queue.tags["train"]) == {f"{uid}_{member}_0" for uid in uids for member in (0, 1)}


@pytest.mark.parametrize("options", [{"eta": 0}, {"eta": 1, "in_flight": 1}])
def test_a_group_that_a_count_finds_failed_is_refilled_by_the_next_sample(queue, options):
    """verl's switch counts right before each mini-batch."""
    rollout = Rollout(queue, **options)
    rollout.buffer.admit(1)
    for uid in ("u0", "u1"):
        rollout.finish(uid)
    rollout.sample(2)
    rollout.fail("u2")
    rollout.finish("u3")
    assert rollout.buffer.get_sampleable_count(1, "train") == 1
    rollout.while_waiting = [lambda: rollout.finish("u4")]
    assert sorted(rollout.sample(2)[0]) == ["u3", "u4"]
    assert rollout.buffer.get_sampleable_count(2, "train") == 0
    assert len(rollout.submitted) == 5, "nothing is admitted for the next step before its weights are out"


@pytest.mark.parametrize("asked_by", ["a scheduler", "verl's switch", "nobody"])
def test_beside_replayed_rollouts_as_many_are_submitted_as_failed(queue, asked_by):
    """A replay brings a batch of its own; more would train what was not replayed."""
    rollout = Rollout(queue, eta=1, admits=False)
    rollout.submit(4)
    rollout.fail("u1")
    if asked_by == "a scheduler":
        assert rollout.buffer.take_stock(1) == (0, 4)
    elif asked_by == "verl's switch":
        assert rollout.buffer.get_sampleable_count(1, "train") == 0
    rollout.while_waiting = [lambda: [rollout.finish(uid) for uid in sorted(rollout.running)]]
    uids, _, metrics = rollout.sample(4)
    assert (sorted(uids), rollout.submitted[4:]) == (["u0", "u2", "u3", "u4"], ["u4"])
    assert metrics["training/rollout_failure/evicted_samples"] == 1


def test_verl_calls_a_step_idle_by_its_own_measure_and_without_a_bell_the_buffer_looks_often(queue, monkeypatch):
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

    from seamless_verl.verl_adapter.dataloader import woken_buffer

    trainer = object.__new__(PPOTrainerSeparateAsync)
    trainer.replay_buffer = buffer = Rollout(queue).buffer
    trainer._step_sample_wait_seconds = 1.5
    assert not trainer._step_had_idle()
    trainer._step_sample_wait_seconds = 2.5
    assert trainer._step_had_idle()
    slept, attended = [], []
    monkeypatch.setattr(woken_buffer, "time", SimpleNamespace(sleep=slept.append))
    buffer.attend(lambda: attended.append(1))
    type(buffer)._wait_for_next_poll(buffer, "train", 0.0)
    assert (slept, attended) == ([0.05], [1])


def test_what_keeps_rows_from_coming_ends_the_wait_for_them(queue):
    def broken():
        raise RuntimeError("nobody takes new weights any more")

    buffer = Rollout(queue).buffer
    buffer.check = broken
    with pytest.raises(RuntimeError, match="nobody takes new weights"):
        type(buffer)._wait_for_next_poll(buffer, "train", 0.0)


def test_groups_without_signal_are_filtered_and_refilled(queue):
    from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY

    rollout = Rollout(queue, eta=0, batch_size=2, filter_groups_metric="acc")
    rollout.buffer.admit(1)
    rollout.finish("u0", (1.0, 1.0))
    rollout.finish("u1", (0.0, 1.0))
    rollout.while_waiting = [
        lambda: rollout.finish("u2", (0.0, 0.0)),
        lambda: rollout.finish("u3", (1.0, 1.0)),
        lambda: rollout.finish("u4", (0.0, 1.0)),
    ]
    uids, _, metrics = rollout.sample(2)
    assert uids == ["u1", "u4"]
    assert metrics["training/filter_groups/evicted_samples"] == 3
    assert metrics[DAPO_FILTERED_REWARD_COUNTS_KEY] == {1.0: 2, 0.0: 1}, "of which verl makes a table"


def test_a_group_that_fails_again_and_again_ends_the_run(queue):
    rollout = Rollout(queue, eta=0, batch_size=1)
    rollout.buffer.admit(1)
    rollout.while_waiting = [lambda: rollout.fail(rollout.submitted[-1])] * 40
    with pytest.raises(SeamlessError, match="32 prompt groups failed in a row"):
        rollout.sample(1)


def test_a_group_that_finishes_has_failures_counted_anew(queue):
    buffer = Rollout(queue).buffer
    buffer.count_failures(31, False)
    buffer.count_failures(0, True)
    buffer.count_failures(31, False)
    with pytest.raises(SeamlessError, match="32 prompt groups failed in a row"):
        buffer.count_failures(1, False)


@pytest.mark.parametrize("metric", [None, "acc"])
def test_a_group_without_rows_counts_as_failed(queue, metric):
    rollout = Rollout(queue, eta=0, batch_size=1, redundancy=2, filter_groups_metric=metric)
    rollout.buffer.admit(1)
    queue.kv_batch_put(["u0"], "train", [{"status": "finished"}])
    rollout.while_waiting = [lambda: rollout.finish("u2")]
    assert rollout.sample(1)[0] == ["u2"]
    queue.kv_batch_put(["u1"], "train", [{"status": "finished"}])  # it was surplus
    rollout.end_step()
    assert rollout.buffer.take_stock(2) == (0, 2)
    assert "u1" not in queue.tags["train"]


def test_an_older_first_token_than_was_reserved_ends_the_run(queue):
    rollout = Rollout(queue, eta=1, batch_size=1)
    rollout.step, rollout.version = 1, 0
    rollout.buffer.admit(1)
    for uid in ("u0", "u1"):
        rollout.finish(uid)
    rollout.sample(1)
    rollout.end_step()
    rollout.buffer.admit(2)
    rollout.finish("u2", version=0, stamp={"digest": ""})
    with pytest.raises(SeamlessError, match="started with version 0, was reserved for 1"):
        rollout.sample(1)


@pytest.mark.parametrize("tagged", [0, 2])
def test_what_an_agent_loop_of_the_users_own_calls_a_version_is_none_where_it_cannot_be_and_is_told_once(queue, tagged):
    """It may tag its rows with the step, as verl's `SkipManager` does, or with 0."""
    rollout, told = Rollout(queue, eta=1, batch_size=1), []
    rollout.buffer.listen([], None, told.append)
    rollout.step, rollout.version = 2, 1
    rollout.buffer.start_at(1)
    rollout.buffer.admit(2)
    for uid in ("u0", "u1"):
        rollout.finish(uid, version=tagged)
    _, batch, metrics = rollout.sample(1)
    assert (batch.keys, metrics["training/staleness/max"]) == (["u0_0_0", "u0_1_0"], 0)
    (line,) = told
    assert "min_global_steps" in line


def test_surplus_groups_are_cleared_when_they_end(queue):
    rollout = Rollout(queue, eta=0, batch_size=2, redundancy=1.5)
    assert rollout.buffer.admit(1) == 3
    rollout.finish("u0")
    rollout.finish("u1")
    assert rollout.sample(2)[0] == ["u0", "u1"]
    rollout.end_step()
    rollout.buffer.admit(2)
    rollout.finish("u2", version=0)
    rollout.buffer.get_sampleable_count(2, "train")
    assert not [key for key in queue.tags["train"] if key.startswith("u2")]


def test_validation_prompts_are_verls_business(queue):
    rollout = Rollout(queue)
    queue.kv_batch_put(["v0"], "val", [{"is_prompt": True, "status": "finished", "global_steps": 1}])
    queue.kv_batch_put(["v0_0_0"], "val", [{"status": "success"}])
    batch, _ = rollout.buffer.sample(global_steps=1, partition_id="val", batch_size=1)
    assert batch.keys == ["v0_0_0"]


def test_the_bound_holds_and_every_prompt_is_trained_once_whatever_the_lengths(queue):
    rng = random.Random(5)
    for eta, in_flight in ((0, None), (1, None), (2, None), (3, None), (3, 2), (2, 1.5)):
        queue.tags.clear()
        rollout = Rollout(queue, eta=eta, batch_size=4, in_flight=in_flight)
        trained = []

        def happen(rollout=rollout):
            uid = rng.choice(sorted(rollout.running))
            rollout.fail(uid) if rng.random() < 0.1 else rollout.finish(uid)

        for _ in range(30):
            rollout.buffer.admit(rollout.step)
            assert len(rollout.running) <= (in_flight or eta + 1) * 4
            for _ in range(2):
                rollout.while_waiting = [happen] * 1000
                uids, batch, metrics = rollout.sample(2)
                trained += uids
                assert metrics["training/staleness/max"] <= eta
                assert all(rollout.version - tag["min_global_steps"] <= eta for tag in batch.tags)
            rollout.end_step()
            queue.kv_clear(batch.keys, "train")
        assert len(trained) == len(set(trained)) == 120


# ---------------------------------------------------------------- checkpoints

DATASET = [{"index": number, "data_source": "math" if number < 6 else "code"} for number in range(8)]
RESAMPLING = CurriculumConfig(history_resampling=True, accuracy_key="acc", pool_floor=1)


def test_after_a_crash_finished_groups_are_kept_and_nothing_is_trained_twice(queue):
    rollout = Rollout(queue, eta=1, batch_size=2, dataset=DATASET, curriculum=RESAMPLING)
    rollout.buffer.admit(1)
    for uid in ("u0", "u1", "u2"):
        rollout.finish(uid)
    _, batch, _ = rollout.sample(2)
    saved, tags = json.loads(json.dumps(rollout.buffer.state())), json.loads(json.dumps(queue.tags))
    assert any(key in tags["train"] for key in batch.keys), "verl clears trained rows only after it has saved"

    queue.tags = tags
    again = Rollout(queue, eta=1, batch_size=2, dataset=DATASET, curriculum=RESAMPLING)
    again.buffer.restore(saved)
    again.step, again.version, again.submitted = 2, 1, list(rollout.submitted)
    assert {key for key in queue.tags["train"] if key in batch.keys} == set()
    assert [uid for uid, tag in queue.tags["train"].items() if tag.get("status") == "pending"] == ["u3"]
    again.running["u3"] = 1  # verl re-issues it; it starts with the weights of the checkpoint
    assert again.buffer.admit(2) == 2
    again.finish("u3")
    assert sorted(again.sample(2)[0]) == ["u2", "u3"]
    assert again.loader.standing().epochs_ended == 0


def test_rows_of_a_surplus_group_end_with_the_life_that_asked_for_them(queue):
    """Some of its rollouts had ended before the checkpoint; nobody waits for the others any more."""
    rollout = Rollout(queue, eta=0, batch_size=2, redundancy=1.5)
    rollout.buffer.admit(1)
    rollout.finish("u0")
    rollout.finish("u1")
    queue.kv_batch_put(["u2_0_0"], "train", [{"status": "success", "seq_len": 3, "min_global_steps": 0}])
    assert rollout.sample(2)[0] == ["u0", "u1"]
    saved = json.loads(json.dumps(rollout.buffer.state()))
    assert {"u0_0_0", "u2", "u2_0_0"} <= queue.tags["train"].keys(), "verl saves its queue as it is"
    Rollout(queue, eta=0, batch_size=2, redundancy=1.5).buffer.restore(saved)
    assert queue.tags["train"] == {}


def test_a_plain_verl_checkpoint_has_its_prompts_generated_again(queue):
    rollout = Rollout(queue, eta=1, batch_size=2)
    tag = {"is_prompt": True, "status": "finished", "global_steps": 6}
    queue.kv_batch_put(["a", "b"], "train", [tag, tag | {"status": "running"}])
    queue.kv_batch_put(["a_0_0"], "train", [{"status": "success", "min_global_steps": 1}])
    rollout.buffer.start_at(7)
    assert {key: tag["status"] for key, tag in queue.tags["train"].items()} == {"a": "pending", "b": "pending"}
    rollout.step, rollout.version = 8, 7
    rollout.buffer.get_sampleable_count(8, "train")
    assert rollout.buffer.admit(8) == 2


def test_a_checkpoint_that_lacks_groups_in_flight_is_refused(queue):
    rollout = Rollout(queue, eta=1, batch_size=2)
    rollout.buffer.admit(1)
    saved = rollout.buffer.state()
    queue.kv_clear(["u1"], "train")
    with pytest.raises(SeamlessError, match="lacks 1 groups in flight, first u1"):
        Rollout(queue, eta=1, batch_size=2).buffer.restore(saved)


def test_a_checkpoint_of_another_version_or_of_a_run_with_another_curriculum_is_refused(queue):
    plain = Rollout(queue, eta=1, batch_size=2)
    with pytest.raises(ConfigError, match=r"resume_mode=auto.*version 0, this is 1.*disable"):
        plain.buffer.restore(plain.buffer.state() | {"version": 0})
    taught = Rollout(queue, eta=1, batch_size=2, dataset=DATASET, curriculum=RESAMPLING)
    with pytest.raises(ConfigError, match=r"seamless\.curriculum=on.*taken without a curriculum"):
        taught.buffer.restore(plain.buffer.state())
    with pytest.raises(ConfigError, match=r"seamless\.curriculum=off.*taken with a curriculum"):
        plain.buffer.restore(taught.buffer.state())
    with pytest.raises(ConfigError, match=r"seamless\.curriculum=on.*belong to none"):
        taught.buffer.start_at(7)


# ---------------------------------------------------------------- curriculum


def test_solved_prompts_leave_the_pool_at_the_epoch_boundary_of_consumption(queue):
    rollout = Rollout(queue, eta=1, batch_size=2, dataset=DATASET, curriculum=RESAMPLING)
    for _ in range(4):
        rollout.buffer.admit(rollout.step)
        for uid in sorted(rollout.running, key=lambda uid: int(uid[1:]))[:2]:
            solved = rollout.prompt_of[uid] in (0, 5)
            rollout.finish(uid, (1.0, 1.0) if solved else (1.0, 0.0))
        rollout.sample(2)
        rollout.end_step()
    assert (rollout.loader.standing().epochs_ended, rollout.loader.standing().pool) == (1, 6)
    assert rollout.said == [
        "curriculum: epoch 0 of stage all ended: 8 groups, 25% without advantage; 2 prompts left the pool, "
        "0 came back, 6 remain"
    ]
    later = [rollout.loader.curriculum.draw().prompt for _ in range(10)]
    assert not {0, 5} & set(later)


def redundant_steps(rollout, steps):
    """Train on the two oldest groups of each step; the third ends when its step is over."""
    for _ in range(steps):
        rollout.buffer.admit(rollout.step)
        oldest = sorted(rollout.running, key=lambda uid: int(uid[1:]))
        for uid in oldest[:2]:
            rollout.finish(uid)
        _, batch, _ = rollout.sample(2)
        rollout.queue.kv_clear(batch.keys, "train")
        rollout.end_step()
        for uid in oldest[2:]:
            rollout.finish(uid)
        rollout.buffer.get_sampleable_count(rollout.step, "train")


def test_surplus_prompts_are_drawn_again_and_their_epochs_end(queue):
    rollout = Rollout(queue, eta=0, batch_size=2, redundancy=1.5, dataset=DATASET, curriculum=RESAMPLING)
    redundant_steps(rollout, 4)
    assert [uid for uid, prompt in rollout.prompt_of.items() if prompt == 2] == ["u2", "u8"]
    redundant_steps(rollout, 36)
    state = rollout.loader.state()
    assert rollout.loader.curriculum.epochs_ended >= 8, "80 groups were trained and the data has 8 prompts"
    assert (len(state["draws"]), len(state["curriculum"]["epochs"])) == (0, 1)
    assert any("given up (failed or surplus, twice)" in line for line in rollout.said)


def test_prompts_that_a_checkpoint_has_in_flight_and_nobody_generates_are_drawn_again(queue):
    """Checkpoints of 0.1.0 before its curriculum heard of surplus groups."""
    rollout = Rollout(queue, eta=0, batch_size=2, dataset=DATASET, curriculum=RESAMPLING)
    rollout.buffer.admit(1)
    for uid in ("u0", "u1"):
        rollout.finish(uid)
    saved = rollout.buffer.state()
    saved["source"]["draws"]["lost"] = [2, 0]
    (epoch,) = saved["source"]["curriculum"]["epochs"]
    epoch["queue"].remove(2)
    epoch["in_flight"].append([2, 0])
    again = Rollout(queue, eta=0, batch_size=2, dataset=DATASET, curriculum=RESAMPLING)
    again.buffer.restore(json.loads(json.dumps(saved)))
    assert sorted(again.loader.state()["draws"]) == ["u0", "u1"]
    assert sorted(again.loader.curriculum.draw().prompt for _ in range(6)) == [2, 3, 4, 5, 6, 7]


def test_a_stage_ends_with_its_step(queue):
    stages = (
        StageConfig(name="math", sources=("math",), until_step=1),
        StageConfig(name="both", sources=("math", "code")),
    )
    config = CurriculumConfig(accuracy_key="acc", stages=stages)
    rollout = Rollout(queue, eta=0, batch_size=2, dataset=DATASET, curriculum=config)
    rollout.buffer.admit(1)
    for uid in ("u0", "u1"):
        rollout.finish(uid)
    rollout.sample(2)
    rollout.end_step()
    assert rollout.said[0] == "curriculum: stage both begins with epoch 1"
    assert rollout.said[1].startswith("curriculum: epoch 0 of stage math ended: 2 groups")


def test_a_reward_without_the_accuracy_key_is_refused_with_what_it_has(queue):
    config = CurriculumConfig(history_resampling=True, accuracy_key="accuracy", pool_floor=1)
    rollout = Rollout(queue, eta=0, batch_size=1, dataset=DATASET, curriculum=config)
    rollout.buffer.admit(1)
    rollout.finish("u0")
    with pytest.raises(ConfigError, match=r"accuracy_key=accuracy: .*\['acc'\]"):
        rollout.sample(1)


@pytest.mark.parametrize(
    ("accuracy", "beside", "words"),
    [
        (None, {"score": 1.0}, "no finite number"),
        ("1", {"score": 1.0}, "no finite number"),
        (float("nan"), {"score": 1.0}, "no finite number"),
        (3.0, {}, "plain number"),
        (1.1, {"overlong": False, "overlong_reward": 0.0}, "plain number"),
    ],
)
def test_a_reward_whose_accuracy_is_none_is_refused(queue, accuracy, beside, words):
    rollout = Rollout(queue, eta=0, batch_size=1, dataset=DATASET, curriculum=RESAMPLING)
    rollout.buffer.admit(1)
    rollout.finish("u0", (1.0, accuracy), **beside)
    with pytest.raises(ConfigError, match=rf"accuracy_key=acc: .*{words}.*return .*'acc': 1 or 0"):
        rollout.sample(1)


def test_a_score_that_is_only_ever_right_or_wrong_is_an_accuracy(queue):
    rollout = Rollout(queue, eta=0, batch_size=3, dataset=DATASET, curriculum=RESAMPLING)
    rollout.buffer.admit(1)
    rollout.finish("u0", (True, 0))
    rollout.finish("u1", (np.bool_(True), np.float32(0.5)), score=0.7)
    rollout.finish("u2", (np.float64(1.0), np.int64(0)))
    assert len(rollout.sample(3)[0]) == 3


def test_of_a_plain_number_below_one_it_is_told_once_that_only_one_counts_as_solved(queue):
    """verl's own scores of programs are shares of their tests."""
    rollout = Rollout(queue, eta=0, batch_size=2, dataset=DATASET, curriculum=RESAMPLING)
    rollout.buffer.admit(1)
    rollout.finish("u0", (1.0, 0.7))
    rollout.finish("u1", (0.7, 0.1), overlong=False, overlong_reward=-0.3)
    rollout.sample(2)
    assert [line for line in rollout.said if "plain number" in line] == [
        "curriculum: the reward is a plain number, of which only 1 counts as solved"
    ]
    (epoch,) = rollout.loader.curriculum.state()["epochs"]
    assert dict(epoch["outcomes"]) == {0: "mixed", 1: "all_wrong"}


def test_other_data_is_refused(queue):
    rollout = Rollout(queue, eta=0, batch_size=1, dataset=DATASET, curriculum=RESAMPLING)
    other = [row | {"data_source": "poetry"} for row in DATASET]
    with pytest.raises(ConfigError, match=r"data\.train_files"):
        Rollout(queue, eta=0, batch_size=1, dataset=other, curriculum=RESAMPLING).buffer.restore(rollout.buffer.state())


# ---------------------------------------------------------------- verl's side


def test_verls_own_drop_and_wait_are_a_policy(queue):
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

    from seamless_verl.verl_adapter.dataloader.woken_buffer import WokenReplayBuffer

    refilled = []
    buffer = WokenReplayBuffer(
        trainer_mode="seamless",
        trainer_config={},
        sampler_kwargs={},
        max_off_policy_threshold=1,
        max_off_policy_strategy="drop",
        refill_fn=refilled.append,
    )
    assert isinstance(buffer, ReplayBufferAsync)
    tag = {"is_prompt": True, "status": "finished"}
    queue.kv_batch_put(["old", "new"], "train", [tag | {"global_steps": 1}, tag | {"global_steps": 2}])
    queue.kv_batch_put(["old_0_0", "new_0_0"], "train", [{"status": "success"}] * 2)
    batch, metrics = buffer.sample(global_steps=2, partition_id="train", batch_size=1)
    assert batch.keys == ["new_0_0"]
    assert refilled == [1]
    assert metrics["training/off_policy/evicted_samples"] == 1


async def test_a_worker_rings_when_a_group_has_ended(monkeypatch):
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    from seamless_verl.verl_adapter.dataloader.rollout_workers import NotifyingWorker

    ended = asyncio.Event()

    async def prompt(self, prompt, *rest):
        await ended.wait()
        if prompt["uid"] == "bad":
            raise RuntimeError("no")

    monkeypatch.setattr(AgentLoopWorkerTQ.__ray_actor_class__, "_run_prompt", prompt)
    worker = object.__new__(NotifyingWorker)
    worker._news, worker._waiting, worker._groups = 0, [], None
    call = asyncio.ensure_future(worker.news(0))
    group = asyncio.ensure_future(worker._run_prompt({"uid": "good"}, {}, {"validate": False}))
    await asyncio.sleep(0)
    assert not call.done()
    ended.set()
    await group
    assert await call == 1
    with pytest.raises(RuntimeError):
        await worker._run_prompt({"uid": "bad"}, {}, {"validate": False})
    assert await worker.news(1) == 2


def test_the_configuration_names_our_rollout_manager_unless_the_user_did(monkeypatch):
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    from seamless_verl.run import compose
    from seamless_verl.verl_adapter.trainer.adoption import adopt_config

    def adopted(*overrides):
        with initialize_config_dir(str(compose.verl_config_dir()), version_base=None):
            config = hydra_compose("ppo_trainer", overrides=list(overrides))
        adopt_config(config)
        return config.actor_rollout_ref.rollout.agent.agent_loop_manager_class

    assert adopted() == "seamless_verl.verl_adapter.dataloader.rollout_workers.NotifyingManager"
    own = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=my.Manager"
    assert adopted(own) == "my.Manager"
