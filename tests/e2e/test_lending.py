"""A trainer's core is lent to a second replica and taken back, step after step, with real verl, Ray and vLLM."""

import re
import time
from collections import Counter

import psutil
import pytest

from benchmarks.forced_lengths import write_workload
from seamless_verl.observe import flight
from seamless_verl.observe.recording import read_recording
from seamless_verl.observe.run_folder import load_digest
from tests.as_on_gpus import GPU_RUNNER, SCHEDULED_AHEAD
from tests.e2e.recorded import assert_books_balance, assert_loans_are_whole, decisions, gone_on, moves
from tests.e2e.test_runs import (  # noqa: F401  (machine is a fixture)
    AT_HOME,
    FAST,
    NCCL,
    Machine,
    finish,
    machine,
    read_until,
    requests_out,
    summary,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RESOURCES = (
    "seamless.resources=[{name: trainers, nodes: 1, gpus_per_node: 1, capabilities: [train, rollout]},"
    "{name: rollouts, nodes: 1, gpus_per_node: 1, capabilities: [rollout]}]"
)


def arguments(machine: Machine, *overrides: str) -> list[str]:  # noqa: F811
    data = write_workload(machine.folder, lengths="skewed", prompts=64, sessions=4, longest=240)
    return [
        *FAST,
        RESOURCES,
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"+actor_rollout_ref.rollout.agent.agent_loop_config_path={machine.folder}/agent_loops.yaml",
        "data.max_response_length=240",
        "actor_rollout_ref.rollout.max_model_len=272",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.max_num_seqs=4",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        *overrides,
    ]


@pytest.mark.parametrize("engine", [{}, SCHEDULED_AHEAD | GPU_RUNNER], ids=["as on CPUs", "as on GPUs, V2"])
def test_a_slice_of_the_trainer_is_lent_between_steps_and_taken_back_for_each(machine, engine):  # noqa: F811
    """Greedy lends it until it knows what switches take, and then where idling takes longer: on a busy machine less
    often. Weights are published, to be taken by the replica that stands when its turn comes, and by each loan."""
    rolling = ("seamless.weights.sync=rolling", "trainer.total_training_steps=4")
    environment = AT_HOME | engine
    code, output = machine.run(*arguments(machine, "seamless.scheduler.policy=greedy", *rolling), **environment)
    assert code == 0, output
    (folder,) = machine.runs()
    logs = "".join(file.read_text(errors="replace") for file in (folder / "logs").glob("worker-*.out"))
    assert ("[model_runner.py:" in logs) is bool(engine), "the engines say which runner warms up"
    figures = summary(folder)
    assert figures["steps"] == 4
    assert figures["rows_audited"] == figures["rows"] == 4 * 4 * 4  # every answer came whole and untouched
    assert figures["audit_violations"] == 0
    assert figures["staleness_max"] <= 1
    assert figures["max_logprob_diff"] <= 1e-4
    recording = read_recording(folder / "flight")
    story = " ".join(moves(recording, "trainers/0"))
    between = r"(waking rollout \| draining training|idle \| training)"
    assert re.fullmatch(rf"\| draining training( {between}){{3}} idle", story), story
    lent = story.count("waking")
    assert lent >= 1, "the first loan is made in any case"
    finishes = Counter(event.finish for event in recording.events if isinstance(event, flight.RequestEnded))
    assert finishes["aborted"] > 0  # so that whole answers say something
    assert any(event.resumed for event in recording.events if isinstance(event, flight.RequestStarted))
    moved = load_digest(folder).tallies.requests.moved
    reclaimed, joined_midway = ("trainers/0", "rollouts/0"), ("rollouts/0", "trainers/0")
    assert reclaimed in moved
    assert moved.keys() <= {reclaimed, joined_midway}
    shares = gone_on(recording, "trainers/0", "rollouts/0")  # a loan of a busy machine may find nothing to share
    assert len(shares) == lent
    assert all(share["trainers/0"] >= (share.total() + 1) // 3 for share in shares), "each loan gets its share"
    taken = decisions(recording)
    assert (taken["lend"], taken["reclaim"]) == (lent, lent + 1)
    made = [event for event in recording.events if isinstance(event, flight.DecisionMade)]
    realised = [event for event in recording.events if isinstance(event, flight.DecisionRealised)]
    assert [event.decision for event in realised] == [event.decision for event in made if event.action == "lend"]
    assert sum(event.lent_tokens for event in realised) > 0
    assert_books_balance(recording)
    loans = assert_loans_are_whole(recording, "trainers/0")
    assert (loans.wakes, loans.reclaims) == (lent, lent + 1)
    assert loans.versions[0] == 0
    assert loans.distinct == len(loans.versions) == lent + 1  # each step makes other weights
    pulls = [(event.before, event.version) for event in recording.events if isinstance(event, flight.PullEnded)]
    assert pulls[:4] == [(None, 0), (0, 1), (1, 2), (2, 3)]  # the run may end before the last one does
    trainer = {event.what for event in recording.events if isinstance(event, flight.MemoryHeld) and event.nbytes}
    assert trainer == {"parameters", "gradients", "optimizer", "weights", "kv_cache"}
    machine.assert_nothing_left()


def server_on(machine: Machine, core: int) -> psutil.Process:  # noqa: F811
    """Declared devices are cores, so a replica is known by where it runs."""
    (server,) = [p for p in machine.servers() if p.cpu_affinity() == [core]]
    return server


def test_replicas_and_rollout_workers_that_are_killed_are_started_again_and_lose_no_answer(machine):  # noqa: F811
    process = machine.start(
        *arguments(machine, *NCCL, "seamless.scheduler.policy=predictive", "trainer.total_training_steps=40"),
        **AT_HOME,
    )
    read_until(process, "step  2/40")
    server_on(machine, 0).kill()  # the trainer's own
    read_until(process, "slice trainers/0 is out")
    read_until(process, "slice trainers/0 is back")
    standing = server_on(machine, 1)  # the one that only rolls out
    (folder,) = machine.runs()
    while True:  # it shall die with requests: killed at once it may have none
        standing.suspend()
        time.sleep(5)  # longer than the other needs for what it has
        if requests_out(folder):
            break
        standing.resume()
        read_until(process, "step ")
    standing.kill()
    read_until(process, "slice rollouts/0 is out")
    read_until(process, "slice rollouts/0 is back")
    (worker,) = machine.actors("NotifyingWorker")
    worker.kill()
    read_until(process, "prompt groups begin again")
    code, output = finish(process)
    assert code == 0, output
    figures = summary(folder)
    assert figures["steps"] == 40
    assert figures["rows_audited"] == figures["rows"] == 40 * 4 * 4
    assert figures["staleness_max"] <= 1
    recording = read_recording(folder / "flight")
    finishes = Counter(event.finish for event in recording.events if isinstance(event, flight.RequestEnded))
    assert finishes["replica_died"] > 0
    assert_books_balance(recording)
    machine.assert_nothing_left()
