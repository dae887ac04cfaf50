"""Runs that do not come far: bad input, and a reward function that always fails."""

import time

import pytest

from tests.e2e.test_runs import FAST, machine  # noqa: F401  (machine is a fixture)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_a_run_whose_rollouts_always_fail_ends_and_says_so(machine):  # noqa: F811
    reward = machine.folder / "reward.py"
    reward.write_text("def compute_score(*args, **kwargs):\n    raise RuntimeError('the reward function is broken')\n")
    code, output = machine.run(*FAST, f"reward.custom_reward_function.path={reward}")
    assert code == 1, output
    assert "failed in a row" in output
    (folder,) = machine.runs()
    logs = "".join(path.read_text(errors="replace") for path in (folder / "logs").iterdir())
    assert "the reward function is broken" in logs
    machine.assert_nothing_left()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["+recipe=sve"], "write +recipe=swe"),
        (["+recipe=swe", "actor_rollout_ref.actr.optim.lr=1"], "did you mean actor_rollout_ref.actor.optim.lr?"),
        (["+recipe=swe", "data.train_batch_size=10"], "does not divide"),
        (["+recipe=swe", "actor_rollout_ref.model.path=/no/such"], "does not exist"),
        (["+recipe=swe_qwen3_8b"], "this machine has none"),
        (["+recipe=swe", "seamless.staleness.eta=-1"], "seamless.staleness.eta=-1"),
        (["+recipe=arithmetic", "reward.custom_reward_function.name=compute_scores"], "did you mean compute_score?"),
    ],
)
def test_bad_input_is_refused_in_seconds_with_one_clear_line(machine, arguments, said):  # noqa: F811
    started = time.monotonic()
    code, output = machine.run(*arguments)
    assert code == 2, output
    assert said in output
    assert "Traceback" not in output
    assert time.monotonic() - started < 60
    machine.assert_nothing_left()
