"""What it costs that slices which are taken back had contexts in their caches, and that the policy knows it."""

from __future__ import annotations

import random
import re

import pytest

from seamless_verl.scheduling import commands as cm
from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.cluster import Roofline
from seamless_verl.scheduling.commands import Decision, Verb
from seamless_verl.scheduling.prediction.forecast import PrefillAgain
from seamless_verl.scheduling.prediction.learned import DecodeModel
from seamless_verl.scheduling.prediction.predictive import Predictive
from seamless_verl.scheduling.prediction.projection import Work, project, uniform
from seamless_verl.scheduling.prediction.session_forecast import SessionBook
from seamless_verl.scheduling.slices import SliceId, SliceState, Tag
from tests.kernel.scheduling.world import BOTH, ROLLOUT, World, make_slice

PREFILL_S = 30e-6  # an H100 for a model of 8 billion parameters
CONTEXT = 16_384


def work(sessions: int, prefill_s: float = PREFILL_S) -> Work:
    """As many sessions of 16k tokens with a thousand to come, each a group of its own, 10 ms per step."""
    return Work(
        remaining=[1000.0] * sessions,
        contexts=[float(CONTEXT)] * sessions,
        groups=range(sessions),
        homes=[1.0] * sessions,
        awaited=frozenset(),
        others=sessions,
        weight=1.0,
        busy_share=1.0,
        step_s=lambda n, kv: 0.01,
        prefill_s=prefill_s,
        cached=float(sessions * CONTEXT),
    )


def price(out: Work, left_behind: float, *, caches_lost: bool = False) -> PrefillAgain:
    """Of a loan of one slice beside one that always generates; both switches take ten seconds."""
    return PrefillAgain.of_loan(out, uniform(1), uniform(1), left_behind, caches_lost=caches_lost, usual_s=10.0)


def test_taking_back_a_slice_with_four_million_cached_tokens_costs_two_minutes() -> None:
    """512 sessions on two slices: one of them is taken back at once and the other prefills its 256 x 16k tokens."""
    out = work(512)
    projection = project(out, [(0.0, uniform(2)), (0.0, uniform(1))])
    assert projection.left_behind == pytest.approx(256 * CONTEXT)
    found = price(out, projection.left_behind)
    assert found.seconds == pytest.approx(126, abs=1)
    assert str(found) == " and 125.83 s for 4194304 tokens that are prefilled again"
    assert price(work(512, 0.0), projection.left_behind).seconds == 0.0


def test_what_is_generated_until_then_counts_and_what_ended_does_not() -> None:
    projection = project(work(512), [(0.0, uniform(4)), (5.0, uniform(3))])  # 500 tokens later, a quarter of them
    assert projection.left_behind == pytest.approx(128 * (CONTEXT + 500))
    assert project(work(512), [(0.0, uniform(4)), (10.5, uniform(3))]).left_behind == 0.0
    assert project(work(512), [(0.0, uniform(1)), (5.0, uniform(2))]).left_behind == 0.0, (
        "slices that join take nothing away"
    )


def test_while_new_weights_go_out_lent_slices_prefill_their_share_of_what_all_must() -> None:
    """512 x 16k tokens: 252 s for one slice, 126 s for two, and then those of one once more."""
    assert price(work(512), 256 * CONTEXT, caches_lost=True) == PrefillAgain()
    longer = price(work(512), 512 * CONTEXT, caches_lost=True)
    assert longer.seconds == pytest.approx(126, abs=1)


def test_less_than_the_switches_is_no_more_than_a_forecast_errs_by() -> None:
    assert price(work(512), 300_000) == PrefillAgain()
    assert price(work(512), 400_000).seconds == pytest.approx(12.0)


def test_tokens_in_caches_are_those_of_running_requests_and_of_sessions_between_turns() -> None:
    book, roofline = SessionBook(), Roofline()
    piece = make_slice("r")
    roofline.add(piece)
    book.observe(ev.SliceAdded(at=0.0, slice=piece, state=SliceState.ROLLOUT, version=0), roofline)

    def start(at: float, session: str, context: int) -> None:
        event = ev.RequestStarted(
            at=at, request=f"{session}@{at}", session=session, group="g", slice=piece.id, context_tokens=context
        )
        book.observe(event, roofline)

    start(0.0, "tool", 4000)
    book.observe(ev.RequestFinished(at=1.0, request="tool@0.0", tokens=100), roofline)
    start(1.0, "runs", 9000)
    assert book.cached(1.0) == 4100 + 9000
    assert book.cached(2.0) == pytest.approx(4100 + 9100, abs=5), "at the pace of the other, 10 ms per token"
    book.observe(ev.SessionFinished(at=2.0, session="tool", group="g"), roofline)
    assert book.cached_on(piece.id, 2.0) == pytest.approx(9100, abs=5)
    assert book.cached_on(SliceId("other"), 2.0) == 0.0
    book.observe(ev.RequestFinished(at=2.0, request="runs@1.0", tokens=100), roofline)
    assert book.cached(2.0) == 9100
    book.observe(ev.SliceDrained(at=3.0, slice=piece.id, command=1), roofline)
    assert book.cached(3.0) == 0.0


class Run:
    """One slice that only rolls out and one of the trainer."""

    def __init__(self) -> None:
        self.world = World(Predictive(), r=ROLLOUT, t=BOTH)
        self.world.answer()
        self.rng = random.Random(3)
        self.number = 0

    def request(self, session: str, context: int, tokens: int) -> None:
        """To its end, alone on its slice: 20 ms per token, and as long as prefilling a new context takes."""
        self.start(session, session, context)
        at = self.world.at + tokens * 0.02 + context * PREFILL_S
        self.world.do(ev.RequestFinished(at=at, request=f"r{self.number}", tokens=tokens))
        self.world.do(ev.SessionFinished(at=at, session=session, group=session))

    def start(self, session: str, group: str, context: int) -> None:
        self.number += 1
        self.world.do(
            ev.RequestStarted(
                at=self.world.at,
                request=f"r{self.number}",
                session=session,
                group=group,
                slice=SliceId("r"),
                context_tokens=context,
            )
        )

    def starve(self) -> list[cm.Command]:
        """The gang trains on the first groups and is given back in the midst of the step: the others are missing."""
        world = self.world

        def ask(number: int) -> list[cm.Command]:
            name = f"step-1/{number}"
            return world.do(ev.AcquireRequested(at=world.at, request=name, tag=Tag.TRAIN, count=1, minimum=4, batch=32))

        world.do(ev.GroupsReady(at=world.at, ready=32, in_flight=64))
        ask(0)
        world.answer()
        assert world.state("t") is SliceState.TRAINING
        world.do(ev.GroupsReady(at=world.at + 5.0, ready=0, in_flight=64))
        return [*world.do(ev.Released(at=world.at, request="step-1/0")), *ask(1)]


def decided(monkeypatch: pytest.MonkeyPatch, prefill_s: float) -> Decision:
    """What becomes of the trainer's slice in the midst of a step, while 64 sessions of 64,000 tokens are out."""
    monkeypatch.setattr(DecodeModel, "prefill_s", lambda model: prefill_s)
    run = Run()
    for n in range(60):
        run.request(f"old{n}", run.rng.choice((100, 8_000, 40_000)), run.rng.randrange(1000, 3000))
    groups = tuple(f"g{n}" for n in range(64))
    run.world.do(ev.GroupsSubmitted(at=run.world.at, groups=groups, sessions=1))
    for n in range(64):
        run.start(f"s{n}", groups[n], 64_000)
    given = run.starve()
    found = [c.decision for c in given if isinstance(c, cm.RecordDecision)]
    return next(decision for decision in found if decision.verb in (Verb.LEND, Verb.HOLD))


def test_a_loan_that_would_only_pay_without_prefilling_again_is_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the price of a prefilled token differs; both decode alike. 64 x 64,000 tokens are 4 million."""
    cheap, dear = decided(monkeypatch, 1e-6), decided(monkeypatch, 100e-6)
    assert cheap.verb is Verb.LEND
    assert "again" not in cheap.reason
    assert dear.verb is Verb.HOLD
    found = re.search(r" and ([0-9.]+) s for ([0-9]+) tokens that are prefilled again", dear.reason)
    assert found is not None, dear.reason
    seconds, tokens = float(found[1]), float(found[2])
    assert 0.5e6 < tokens < 32 * 68_000, "half of those that are left when the loan ends"
    assert seconds == pytest.approx(tokens * 100e-6, rel=0.01)
