"""Agents are as many as the fleet can use; whoever caps them is told."""

import pytest

from seamless_verl.agents.contract import max_jobs
from seamless_verl.config import SeamlessConfig
from seamless_verl.run.capacity import attempts_per_worker, told_of_cap


def config(*, nodes, batch, n=8, workers=8, train=8, tensor=1, seats=256):
    return {
        "data": {"train_batch_size": batch},
        "trainer": {"nnodes": 1, "n_gpus_per_node": train},
        "actor_rollout_ref": {
            "hybrid_engine": True,
            "rollout": {
                "nnodes": nodes,
                "n_gpus_per_node": 8,
                "tensor_model_parallel_size": tensor,
                "max_num_seqs": seats,
                "n": n,
                "agent": {"num_workers": workers},
            },
        },
    }


def settings(policy=None, eta=1, **agent):
    section = {"agent": {"runner": "a.Runner", **agent}, "staleness": {"eta": eta}, "scheduler": {"policy": policy}}
    return SeamlessConfig.from_mapping(section)


def test_thirty_two_replicas_have_agents_for_all_of_their_seats():
    """256 in each of 8 workers were 2,048, whatever the fleet; 32 replicas of 256 seats need 8,192."""
    assert 8 * attempts_per_worker(config(nodes=4, batch=256), settings()) == 32 * 256


def test_gpus_of_the_trainer_count_where_they_are_lent():
    shape = config(nodes=1, batch=8, train=8, tensor=2)
    assert 8 * attempts_per_worker(shape, settings()) == 4 * 256
    assert 8 * attempts_per_worker(shape, settings(policy="greedy")) == 8 * 256


def test_all_that_staleness_admits_may_start_also_where_the_fleet_has_fewer_seats():
    assert attempts_per_worker(config(nodes=1, batch=512, seats=8), settings(eta=2)) == 3 * 512 * 8 / 8


def test_a_number_that_is_given_is_kept_and_told_where_it_caps():
    shape = config(nodes=4, batch=1024)
    assert attempts_per_worker(shape, settings(max_concurrent=100)) == 100
    told = told_of_cap(shape, settings(max_concurrent=100))
    assert told.startswith("agents: seamless.agent.max_concurrent=100 lets 800 attempts run at a time (8 rollout")
    assert "decode 8192, and seamless.staleness admits 16384" in told


def test_the_runners_own_number_is_told_as_well():
    """As in the recipe for 8B: 8 x 32, where two batches of 256 attempts are admitted."""
    shape = config(nodes=1, batch=32)
    told = told_of_cap(shape, settings(kwargs={"max_concurrent": 32}))
    assert "seamless.agent.kwargs.max_concurrent=32 lets 256 attempts" in told
    assert told_of_cap(shape, settings(kwargs={"max_concurrent": 64})) == ""


@pytest.mark.parametrize(("limit", "own", "places"), [(None, 3, 3), (2, 3, 2), (5, 3, 3)])
def test_a_runner_takes_no_more_than_it_says(limit, own, places):
    class Runner:
        max_concurrent = own

    assert max_jobs(Runner(), limit) == places


def test_without_any_number_nothing_is_told_and_nothing_is_capped():
    assert told_of_cap(config(nodes=4, batch=1024), settings()) == ""
    assert max_jobs(object(), None) > 1_000_000
