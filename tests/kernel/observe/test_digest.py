"""Figures of the report, on recordings small enough to check by hand."""

from dataclasses import replace

import pytest

from seamless_verl.observe import flight
from seamless_verl.observe.digest import digest
from seamless_verl.observe.flight import Phase, SliceState
from seamless_verl.observe.page.findings import Severity, findings
from seamless_verl.observe.page.html import _requests, _subtitle
from seamless_verl.observe.page.words import DRIFT, REALIGNED
from seamless_verl.observe.recording import Recording
from seamless_verl.observe.time_ledger import Category
from seamless_verl.trajectory.tokens import DriftReason
from tests.kernel.observe.made_up import made_up_run


def run_of(events, steps=(), validations=()):
    return digest(Recording(events=tuple(events)), steps, validations)


def start(at: float = 0.0, eta: int = 1, bound: int | None = 1) -> flight.RunStarted:
    return flight.RunStarted(at=at, name="x", policy="disaggregated", eta=eta, bound=bound, total_steps=2)


def trainer(at: float, devices: int = 1) -> flight.SliceAdded:
    return flight.SliceAdded(
        at=at, slice="t", pool="trainer", devices=devices, capabilities=("train",), state=SliceState.TRAINING
    )


def rollout(at: float) -> flight.SliceAdded:
    return flight.SliceAdded(
        at=at, slice="r", pool="rollout", devices=1, capabilities=("rollout",), state=SliceState.ROLLOUT, address="a:1"
    )


def request(at: float, name: str, tokens: int = 10, resumed: bool = False) -> flight.RequestStarted:
    return flight.RequestStarted(at=at, request=name, slice="a:1", prompt_tokens=tokens, resumed=resumed)


def done(at: float, name: str, tokens: int = 5, finish: str = "completed", cached: int | None = None):
    return flight.RequestEnded(at=at, request=name, slice="a:1", tokens=tokens, finish=finish, cached_tokens=cached)


def test_stretches_are_cut_at_the_bounds_of_steps():
    events = [
        start(),
        trainer(0.0, devices=2),
        flight.StepBegan(at=1.0, step=1),
        flight.PhaseBegan(at=2.0, phase=Phase.UPDATE_ACTOR, step=1),
        flight.StepEnded(at=4.0, step=1),
        flight.StepBegan(at=5.0, step=2),
        flight.PhaseEnded(at=6.0, phase=Phase.UPDATE_ACTOR, step=1),
        flight.StepEnded(at=8.0, step=2),
        flight.RunEnded(at=9.0, outcome="finished"),
    ]
    run = run_of(events)
    by_step = [
        {category: seconds for category, seconds in span.pools["trainer"].items() if seconds} for span in run.step_spans
    ]
    assert by_step == [{Category.OTHER: 2.0, Category.TRAIN: 4.0}, {Category.TRAIN: 2.0, Category.OTHER: 4.0}]
    assert run.pools()["trainer"][Category.TRAIN] == 8.0  # the second between the steps is in the whole only
    assert run.pools_in_steps()["trainer"][Category.TRAIN] == 6.0


def test_a_slice_of_another_size_after_a_resumption_counts_each_second_once():
    """Two devices for a step of 4 s, then four for one of 3 s; each time with a request."""
    events = []
    for at, devices, lasts_s in ((0.0, 2, 4.0), (10.0, 4, 3.0)):
        events += [
            start(at),
            replace(rollout(at), devices=devices),
            *(flight.StepBegan(at=at, step=1), request(at + 1, "a"), done(at + lasts_s, "a")),
            *(flight.StepEnded(at=at + lasts_s, step=1), flight.RunEnded(at=at + lasts_s, outcome="finished")),
        ]
    run = run_of(events)
    assert [sum(span.pools["rollout"].values()) for span in run.step_spans] == [2 * 4.0, 4 * 3.0]
    assert run.pools_in_steps()["rollout"] == run.pools()["rollout"]
    assert [(lane.devices, [(s.start, s.stop) for s in lane.stretches]) for lane in run.lanes] == [
        (2, [(0.0, 1.0), (1.0, 4.0)]),
        (4, [(10.0, 11.0), (11.0, 13.0)]),
    ]
    assert [{at for at, level in lane.load if level} for lane in run.lanes] == [{1.0}, {11.0}]
    assert "4 devices in 1 slices" in _subtitle(run)


def test_steps_and_whole_agree_on_a_large_recording():
    run = run_of(made_up_run())
    for pool, seconds in run.pools().items():
        inside = run.pools_in_steps()[pool]
        assert all(inside[category] <= seconds[category] + 1e-6 for category in Category)
        spans = sum(span.stop - span.start for span in run.step_spans)
        devices = sum(entry.devices for entry in run.books if entry.pool == pool)
        assert sum(inside.values()) == pytest.approx(spans * devices)


def test_requests_are_counted_by_how_they_ended():
    events = [
        start(),
        rollout(0.0),
        request(0.0, "a"),
        request(0.5, "b"),
        done(1.0, "a", finish="aborted", tokens=3),
        request(1.0, "a2", tokens=13, resumed=True),
        done(2.0, "b", finish="CancelledError", tokens=0),
        done(3.0, "a2", cached=8),
        request(3.0, "c"),
        done(4.0, "c", finish="RayActorError", tokens=0),
    ]
    run = run_of(events)
    r = run.tallies.requests
    assert (r.started, r.interrupted, r.abandoned, r.failed, r.resumed) == (4, 1, 1, 1, 1)
    assert (r.tokens, r.prefilled_again) == (3 + 5, 5)
    assert run.lanes[0].load == ((0.0, 1), (0.5, 2), (1.0, 1), (1.0, 2), (2.0, 1), (3.0, 0), (3.0, 1), (4.0, 0))


def test_a_request_that_goes_on_elsewhere_has_moved():
    def begun(at: float, session: str, where: str, *, resumed: bool = True) -> flight.RequestStarted:
        return flight.RequestStarted(
            at=at, request=f"{session}{at}", slice=where, prompt_tokens=1, session=session, resumed=resumed
        )

    def stopped(at: float, begun: flight.RequestStarted, finish: str = "aborted") -> flight.RequestEnded:
        return flight.RequestEnded(at=at, request=begun.request, slice=begun.slice, tokens=1, finish=finish)

    first, unnamed = begun(1.0, "s", "a:1", resumed=False), begun(1.0, "", "a:1", resumed=False)
    again, ended = begun(3.0, "s", "b:1"), begun(5.0, "s", "b:1")
    events = [start(), rollout(0.0), first, unnamed, stopped(2.0, first), stopped(2.0, unnamed), again]
    events += [begun(3.0, "", "b:1"), stopped(4.0, again), ended, stopped(6.0, ended, "completed")]
    events += [begun(7.0, "s", "a:1")]  # its next turn has the tokens of the last one, and nothing was interrupted
    assert run_of(events).tallies.requests.moved == {("r", "b:1"): 1}


def test_an_engine_that_does_not_tell_what_was_cached_makes_prefill_unknown():
    run = run_of([start(), rollout(0.0), request(0.0, "a", resumed=True), done(1.0, "a")])
    assert run.tallies.requests.prefilled_again is None


def test_what_was_prefilled_again_is_told_of_those_that_the_engine_told_of():
    def resumed(at: float, name: str, finish: str, cached: int | None) -> list:
        return [request(at, name, resumed=True), done(at + 1, name, finish=finish, cached=cached, tokens=0)]

    cut_short = [*resumed(1.0, "b", "CancelledError", None), *resumed(3.0, "c", flight.WORKER_DIED, None)]
    told = [*resumed(0.0, "a", "completed", 8), *cut_short, *resumed(5.0, "d", "aborted", 3)]
    for events, known, said in ((told, 2 + 7, "9 tokens"), (cut_short, None, "not told by the engine")):
        run = run_of([start(), rollout(0.0), *events])
        assert run.tallies.requests.prefilled_again == known
        assert dict(_requests(run))["prefilled again"] == said


def test_decisions_of_a_continued_run_are_not_mixed_up():
    def made(at: float) -> flight.DecisionMade:
        return flight.DecisionMade(at=at, decision="1", policy="p", action="lend", reason="r", predicted_s=at)

    events = [start(), made(1.0), start(2.0), made(3.0), flight.DecisionRealised(at=4.0, decision="1", realised_s=9.0)]
    rows = run_of(events).decisions
    assert [(row.made.at, row.outcome and row.outcome.realised_s) for row in rows] == [(1.0, None), (3.0, 9.0)]


def test_a_step_that_was_cut_off_counts_until_the_end_and_one_of_a_killed_run_does_not():
    events = [
        start(),
        trainer(0.0),
        flight.StepBegan(at=1.0, step=1),
        flight.PhaseBegan(at=2.0, phase=Phase.VALUES, step=1),
    ]
    assert [(span.start, span.stop) for span in run_of(events).step_spans] == [(1.0, 2.0)]
    again = [*events, start(10.0), trainer(10.0), flight.StepBegan(at=11.0, step=1), flight.StepEnded(at=12.0, step=1)]
    assert [(span.start, span.stop) for span in run_of(again).step_spans] == [(11.0, 12.0)]


def test_phases_inside_of_others_are_charged_once_and_those_of_a_killed_run_until_its_last_event():
    def began(at: float, phase: Phase) -> flight.PhaseBegan:
        return flight.PhaseBegan(at=at, phase=phase, step=1)

    def ended(at: float, phase: Phase) -> flight.PhaseEnded:
        return flight.PhaseEnded(at=at, phase=phase, step=1)

    events = [
        start(), began(1.0, Phase.SYNC_WEIGHTS), began(2.0, Phase.SWITCH), ended(4.0, Phase.SWITCH),
        ended(7.0, Phase.SYNC_WEIGHTS), began(8.0, Phase.VALUES), flight.StepEnded(at=10.0, step=1),
        start(20.0), began(21.0, Phase.VALUES), flight.StepBegan(at=24.0, step=1),
    ]  # fmt: skip
    assert dict(run_of(events).tallies.phases) == {Phase.SYNC_WEIGHTS: 4.0, Phase.SWITCH: 2.0, Phase.VALUES: 5.0}


def session(at: float, seconds: float) -> flight.SessionEnded:
    return flight.SessionEnded(
        at=at, session="s", group="g", seconds=seconds, turns=1, rows=1, reward=0.0, status="finished"
    )


def test_idle_time_is_told_apart_by_whether_agents_were_at_work():
    """Idle from 2 to 10, and twice an agent was at work meanwhile: from 3 to 6, and from 9 on."""
    events = [
        start(), rollout(0.0), request(0.0, "a"), done(2.0, "a"), session(5.0, 2.0), session(6.0, 2.0),
        request(10.0, "b"), done(11.0, "b"), session(11.0, 2.0),
    ]  # fmt: skip
    run = run_of(events)
    assert run.idle_with_agents("rollout") == pytest.approx((3.0 + 1.0) / 8.0)
    assert run.idle_with_agents("trainer") == 0.0


@pytest.mark.parametrize(
    ("outcome", "running", "said", "severity"),
    [
        (None, True, "The run goes on", Severity.NOTE),
        (None, False, "the run was killed", Severity.BROKEN),
        ("KeyboardInterrupt", False, "The run was interrupted in step 1", Severity.NOTE),
        ("RunBroken", False, "ended in step 1 with RunBroken: replica 0 died", Severity.BROKEN),
    ],
)
def test_it_is_said_how_a_run_ended(outcome, running, said, severity):
    events = [start(), trainer(0.0), flight.StepBegan(at=0.0, step=1), flight.StepBegan(at=1.0, step=1)]
    if outcome is not None:
        events.append(flight.RunEnded(at=2.0, outcome=outcome, detail="replica 0 died"))
    found = findings(digest(Recording(events=tuple(events)), [], [], running=running))
    assert [finding.severity for finding in found if said in finding.title] == [severity]


def titles(events, steps=()) -> dict[str, Severity]:
    return {finding.title: finding.severity for finding in findings(run_of(events, steps))}


def test_an_idle_pool_is_found_with_its_share():
    events = [
        start(), rollout(0.0), trainer(0.0), flight.StepBegan(at=0.0, step=1), request(0.0, "a"),
        flight.PhaseBegan(at=0.0, phase=Phase.UPDATE_ACTOR, step=1), done(6.0, "a"),
        flight.PhaseEnded(at=10.0, phase=Phase.UPDATE_ACTOR, step=1), flight.StepEnded(at=10.0, step=1),
        flight.RunEnded(at=10.0, outcome="finished"),
    ]  # fmt: skip
    found = titles(events)
    assert found == {"Pool rollout was idle for 40% of its time in steps (4.0 s)": Severity.COSTLY}


def test_what_is_broken_comes_first():
    rows = flight.RowsTrained(
        at=5.0, step=1, rollouts=1, staleness=(2,), prompt_tokens=(1,), response_tokens=(1,)
    )  # fmt: skip
    failed = flight.SliceMoved(at=5.0, slice="t", state=SliceState.FAILED)
    events = [start(), trainer(0.0), rows, failed, flight.RunEnded(at=10.0, outcome="RunBroken")]
    found = list(titles(events, [dict(step=1, audit_violations=3)]).items())
    assert [severity for _, severity in found] == [Severity.BROKEN] * 4
    text = " ".join(title for title, _ in found)
    for part in ("RunBroken", "3 rows are not what", "2 versions old; the bound is 1", "5.0 s of device time"):
        assert part in text


def test_a_replica_that_pulls_stands_still_for_its_pull_and_not_for_the_hand_over():
    stages = {"prefetch": 3.0, "gate": 1.0, "pause": 0.5, "load": 1.0, "resume": 0.5}

    def moved(at: float, state: SliceState) -> flight.SliceMoved:
        return flight.SliceMoved(at=at, slice="r", state=state)

    def pulled(at: float) -> flight.PullEnded:
        return flight.PullEnded(at=at, slice="a:1", before=0, version=1, seconds=stages)

    handed_over = [moved(2.0, SliceState.SYNCING), moved(9.0, SliceState.ROLLOUT)]
    ends = [moved(30.0, SliceState.FAILED), flight.RunEnded(at=40.0, outcome="finished")]
    events = [start(), rollout(0.0), request(0.0, "x"), *handed_over, pulled(20.0), *ends]
    (books,) = run_of(events).books
    spent = {category: seconds for category, seconds in books.seconds.items() if seconds}
    assert spent == {Category.GENERATE: 28.0, Category.SYNC: 2.0, Category.FAILED: 10.0}
    during = [start(), rollout(0.0), request(0.0, "x"), handed_over[0], pulled(10.0), handed_over[1], *ends]
    late = pulled(30.1)  # it failed before it was seen that its pull had ended
    (books,) = run_of(sorted([*during, late], key=lambda event: event.at)).books
    assert books.seconds[Category.SYNC] == pytest.approx(3.9)
    assert books.seconds[Category.FAILED] == 10.0
    (books,) = run_of([event for event in events if not isinstance(event, flight.PullEnded)]).books
    assert books.seconds[Category.SYNC] == 7.0, "without pulls the slice itself loads meanwhile"


def test_violations_of_a_step_that_was_repeated_still_count():
    run = run_of([start(), OVER], [dict(step=1, audit_violations=2), dict(step=1)])
    assert [record["audit_violations"] for record in run.steps] == [2]
    assert any("2 rows are not what the engine returned" in finding.title for finding in findings(run))


def test_a_bound_that_nothing_keeps_is_no_promise():
    rows = flight.RowsTrained(
        at=5.0, step=1, rollouts=1, staleness=(2,), prompt_tokens=(1,), response_tokens=(1,)
    )  # fmt: skip
    for bound, alarms in ((None, 0), (2, 0), (1, 1)):
        assert len(titles([start(bound=bound), rows, flight.RunEnded(at=9.0, outcome="finished")])) == alarms


def test_a_healthy_run_is_called_one():
    events = [
        start(), trainer(0.0), flight.StepBegan(at=0.0, step=1),
        flight.PhaseBegan(at=0.0, phase=Phase.UPDATE_ACTOR, step=1), flight.StepEnded(at=10.0, step=1),
        flight.RunEnded(at=10.0, outcome="finished"),
    ]  # fmt: skip
    assert list(titles(events).values()) == [Severity.GOOD]


def test_drift_by_design_is_no_finding_and_rewritten_history_is():
    def drifted(**drift: int) -> flight.SessionEnded:
        return flight.SessionEnded(
            at=1.0, session="s", group="g", seconds=1.0, turns=10, rows=1, reward=0.0, status="finished", drift=drift
        )

    ended = flight.RunEnded(at=2.0, outcome="finished")
    assert titles([start(), drifted(arguments_respelled=9, branched=5), ended]) == {}
    (found,) = titles([start(), drifted(branched=5, history_rewritten=2), ended])
    assert found == "2 of 10 turns did not continue their session, most often for history rewritten (2)"


def test_every_drift_reason_is_explained_on_the_page():
    assert set(DRIFT) == set(DriftReason)
    assert set(DRIFT) > REALIGNED


def trained(step: int, rows: int, rollouts: int = 4) -> flight.RowsTrained:
    lengths = (1,) * rows
    return flight.RowsTrained(
        at=10.0 * step, step=step, rollouts=rollouts, staleness=(0,) * rows, prompt_tokens=lengths,
        response_tokens=lengths,
    )  # fmt: skip


def told(run) -> dict[str, str]:
    return {finding.title: finding.advice for finding in findings(run)}


OVER = flight.RunEnded(at=1000.0, outcome="finished")


def test_many_rows_per_rollout_are_an_alarm_that_names_why_sessions_fork():
    forked = flight.SessionEnded(
        at=1.0, session="s", group="g", seconds=1.0, turns=100, rows=1, reward=0.0, status="finished",
        drift={"history_rewritten": 3, "content_whitespace": 7},
    )  # fmt: skip
    assert told(run_of([start(), *(trained(step, 12) for step in range(1, 7)), OVER])) == {}  # 3 a rollout
    ((title, advice),) = told(run_of([start(), forked, *(trained(step, 13) for step in range(1, 7)), OVER])).items()
    assert title == "A rollout became 3.2 rows in the latest steps"
    assert "history rewritten (3 turns)" in advice


def test_rows_per_rollout_far_above_what_it_was_are_an_alarm_below_the_bound_too():
    before, after = [trained(step, 4) for step in range(1, 6)], [trained(step, 8) for step in range(6, 11)]
    assert list(told(run_of([start(), *before, *after, OVER]))) == [
        "A rollout became 2.0 rows in the latest steps; before it was 1.0"
    ]
    assert told(run_of([start(), *before, *[trained(step, 6) for step in range(6, 11)], OVER])) == {}
    # A step that a continued run repeats counts once, as it was in the end.
    assert told(run_of([start(), *after, *before, *[trained(step, 4) for step in range(6, 11)], OVER])) == {}


def attempts(at: float, group: str, *rewards: float) -> list[flight.SessionEnded]:
    return [
        flight.SessionEnded(
            at=at, session=f"{group}-{index}", group=group, seconds=0.1, turns=1, rows=1, reward=reward,
            status="finished",
        )
        for index, reward in enumerate(rewards)
    ]  # fmt: skip


def grouped(silent: int, loud: int, at: float = 5.0) -> list[flight.SessionEnded]:
    found = []
    for number in range(silent):
        found += attempts(at, f"silent-{at}-{number}", *[float(number % 2)] * 2)
    for number in range(loud):
        found += attempts(at, f"loud-{at}-{number}", 0.0, 1.0)
    return found


def test_groups_without_signal_are_an_alarm_that_tells_easy_from_hard():
    assert told(run_of([start(), *grouped(4, 4), OVER])) == {}  # a half
    assert told(run_of([start(), *grouped(4, 3), OVER])) == {}  # too few to say
    ((title, advice),) = told(run_of([start(), *grouped(5, 4), OVER])).items()
    assert title == "56% of the latest 9 groups have the same reward for every attempt"
    assert "2 have the best reward that was seen (1)" in advice
    assert "3 have a lower one" in advice


def test_in_a_simulation_nothing_is_solved_and_nothing_told_of_rewards():
    events = (start(), *grouped(9, 0), OVER)
    assert told(digest(Recording(events=events, virtual=True), [], [])) == {}


def test_groups_of_validation_of_one_attempt_and_of_long_ago_are_not_without_signal():
    validated = [
        flight.PhaseBegan(at=4.0, phase=Phase.VALIDATE, step=1), *grouped(9, 0),
        flight.PhaseEnded(at=6.0, phase=Phase.VALIDATE, step=1),
    ]  # fmt: skip
    alone = [event for number in range(9) for event in attempts(5.0, f"alone-{number}", 1.0)]
    steps = [
        event
        for step in range(1, 7)
        for event in (flight.StepBegan(at=100.0 * step, step=step), flight.StepEnded(at=100.0 * step + 1, step=step))
    ]
    for events in (validated, alone, [*grouped(9, 0), *steps, *grouped(0, 9, at=650.0)]):
        events = sorted([start(), *events, OVER], key=lambda event: event.at)
        assert told(run_of(events)) == {}


@pytest.mark.parametrize(
    ("record", "off"),
    [
        ({"actor/shared_prefix/off": 0.04, "actor/shared_prefix/grad_norm_off": 0.1}, None),
        ({"actor/shared_prefix/off": 0.06}, "0.06"),
        ({"critic/shared_prefix/grad_norm_off": 0.11}, "0.11"),
        ({"actor/shared_prefix/off": None}, "what is no number"),  # as NaN is written down
    ],
)
def test_rows_computed_both_ways_that_differ_are_an_alarm(record, off):
    run = digest(Recording(events=(start(), OVER)), [], [], guard=[{"step": 1}, {"step": 3, **record}])
    found = {finding.title: finding for finding in findings(run)}
    if off is None:
        assert found == {}
        return
    ((title, finding),) = found.items()
    assert title.endswith("computes otherwise with seamless.shared_prefix than without, in step 3")
    assert off in finding.advice
    assert "seamless.shared_prefix=off" in finding.advice
    assert finding.severity is Severity.BROKEN


def test_a_page_of_a_run_that_goes_on_says_how_more_of_it_is_seen():
    run = digest(Recording(events=(start(), trainer(0.0))), [], [], running=True)
    (advice,) = [told for title, told in told(run).items() if "goes on" in title]
    assert "seamless-verl watch shows it as it grows" in advice
