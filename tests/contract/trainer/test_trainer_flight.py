"""What the trainer's process records around verl's phases, read back as the report reads it."""

from pathlib import Path

import pytest

from seamless_verl.observe.flight import Phase, RunStarted, SliceAdded, SliceState
from seamless_verl.observe.run_folder import load_digest
from seamless_verl.observe.time_ledger import Category, SliceSeconds

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


def begun(run: Path):
    import verl.trainer.ppo.v1  # noqa: F401  (first, as in a run: it loads our trainer, which loads what is tested here)

    from seamless_verl.verl_adapter.trainer.trainer_flight import ROLLOUT, TRAINER, TrainerFlight

    flight = TrainerFlight(str(run))
    now = flight.recorder.now()

    def added(pool: str, state: SliceState, address: str) -> SliceAdded:
        return SliceAdded(
            at=now, slice=f"{pool}/0", pool=pool, devices=2, capabilities=("rollout",), state=state, address=address
        )

    flight.begin(
        RunStarted(at=now, name="x", policy="verl_gate", eta=1, bound=1, total_steps=1),
        [added(TRAINER, SliceState.TRAINING, "a:1")],
        [added(ROLLOUT, SliceState.ROLLOUT, "a:2")],
    )
    return flight


def test_a_step_with_a_loan_is_read_back_as_it_was(tmp_path):
    flight = begun(tmp_path)
    flight.step_began(1)
    with flight.phase(Phase.SWITCH):
        pass
    flight.lent()
    flight.reclaimed()
    with flight.phase(Phase.UPDATE_ACTOR):
        pass
    with flight.publishing(1, lent=False):
        pass
    flight.step_ended()
    flight.end("finished")
    run = load_digest(tmp_path)
    assert run.outcome == "finished"
    assert [span.step for span in run.step_spans] == [1]
    assert [version for _, version in run.tallies.versions] == [1]
    trainer, rollout = ({stretch.state for stretch in lane.stretches} for lane in run.lanes)
    assert trainer <= {SliceState.TRAINING, SliceState.ROLLOUT}
    assert rollout <= {SliceState.ROLLOUT, SliceState.SYNCING}
    assert set(run.tallies.phases) == {Phase.SWITCH, Phase.UPDATE_ACTOR, Phase.SYNC_WEIGHTS}
    assert {entry.slice: sum(entry.seconds.values()) for entry in run.books} == pytest.approx(
        {"trainer/0": run.span_s, "rollout/0": run.span_s}, abs=1e-5
    )


def test_while_lent_the_trainers_seconds_are_counted_where_its_requests_pass(tmp_path):
    flight = begun(tmp_path)
    flight.lent()
    (before,) = flight.books(())
    (after,) = flight.books(())
    assert before == after, "its account is closed"
    flight.reclaimed()
    (again,) = flight.books(())
    assert again.wall_s >= after.wall_s
    assert again.seconds[Category.OTHER] == pytest.approx(again.wall_s)
    flight.end("finished")


def test_what_a_slice_did_before_it_was_restarted_stays_in_its_books(tmp_path):
    """Its replica comes back under another address, and the router keeps one book for each."""
    flight = begun(tmp_path)

    def of_server(address: str, wall_s: float) -> SliceSeconds:
        return SliceSeconds(slice=address, pool="", devices=1, wall_s=wall_s, seconds={Category.OTHER: wall_s})

    before = flight.books([of_server("a:2", 10.0)])
    back = SliceAdded(
        at=flight.recorder.now(),
        slice="rollout/0",
        pool="rollout",
        devices=2,
        capabilities=("rollout",),
        state=SliceState.ROLLOUT,
        address="a:3",
    )
    flight.follow(back)
    after = flight.books([of_server("a:2", 11.0), of_server("a:3", 1.0)])
    seconds = [sum(books.wall_s for books in all_ if books.slice == "rollout/0") for all_ in (before, after)]
    assert seconds == [10.0, 12.0]
    flight.end("finished")


@pytest.mark.parametrize(
    ("error", "story", "outcome", "detail"),
    [
        (KeyboardInterrupt(), None, "KeyboardInterrupt", ""),
        (KeyboardInterrupt(), "replica 0 died", "RunBroken", "replica 0 died"),
        (ValueError("far away:\n\nValueError: no rows\n"), None, "ValueError", "ValueError: no rows"),
    ],
    ids=["the user", "the watchdog", "an error from afar"],
)  # fmt: skip
def test_what_ended_the_run_stands_in_the_recording(tmp_path, error, story, outcome, detail):
    flight = begun(tmp_path)
    flight.blame = lambda error: story
    flight.broke(error)
    end = load_digest(tmp_path).tallies.end
    assert (end.outcome, end.detail) == (outcome, detail)


@pytest.mark.parametrize(
    ("policy", "sampler", "bound"),
    [("reserve", None, 3), ("verl", None, None), ("reserve", "mine.py", None)],
)
def test_a_bound_is_recorded_where_one_is_kept(policy, sampler, bound):
    from omegaconf import OmegaConf

    from seamless_verl.config import SeamlessConfig, StalenessConfig
    from seamless_verl.verl_adapter.trainer.trainer_flight import run_started

    own = {"path": sampler, "name": sampler and "Mine"}
    config = OmegaConf.create({"trainer": {"experiment_name": "x", "v1": {"sampler": {"custom_sampler": own}}}})
    seamless = SeamlessConfig(staleness=StalenessConfig(eta=3, policy=policy))
    started = run_started(config, seamless, 0.0, "disaggregated", 1)
    assert (started.eta, started.bound) == (3, bound)
