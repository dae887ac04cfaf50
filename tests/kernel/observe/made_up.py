"""A made-up recording of a multiplexed run, of any size: the report and the trace are tested on it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from seamless_verl.observe import flight
from seamless_verl.observe.flight import Phase, SliceState
from seamless_verl.observe.recording import FLIGHT, FlightHeader, write_recording

HEADER = FlightHeader(writer="made-up", clock_s=0.0, wall_s=1.7e9, virtual=True)


def made_up_run(*, trainers: int = 4, rollouts: int = 2, steps: int = 4, requests: int = 30, seed: int = 1) -> list[flight.FlightEvent]:  # fmt: skip  # noqa: E501
    """Trainer slices of 8 devices are lent while the trainer waits. ``requests`` per slice and step."""
    events = sorted(_events(trainers, rollouts, steps, requests, random.Random(seed)), key=lambda event: event.at)
    return [*events, flight.RunEnded(at=events[-1].at + 1.0, outcome="finished")]


def write_made_up_run(run: Path, **size: int) -> Path:
    write_recording(run / FLIGHT / "made-up.jsonl", HEADER, made_up_run(**size))
    return run


def _events(
    trainers: int, rollouts: int, steps: int, requests: int, rng: random.Random
) -> Iterator[flight.FlightEvent]:
    lendable = [f"trainers/{index}" for index in range(trainers)]
    standing = [f"rollouts/{index}" for index in range(rollouts)]
    yield flight.RunStarted(at=0.0, name="made up", policy="predictive", eta=1, bound=1, total_steps=steps)
    for name in (*lendable, *standing):
        tags = ("rollout", "train") if name in lendable else ("rollout",)
        state = SliceState.ROLLOUT if name in standing else SliceState.TRAINING
        yield flight.SliceAdded(
            at=0.0, slice=name, pool=name.split("/")[0], devices=8, capabilities=tags, state=state
        )  # fmt: skip
    now = 1.0
    for step in range(1, steps + 1):
        wait_s, train_s = rng.uniform(20, 40), rng.uniform(25, 35)
        yield flight.StepBegan(at=now, step=step)
        yield from _wait(now, wait_s, lendable, standing, requests, step, rng)
        for phase, share in ((Phase.OLD_LOG_PROB, 0.3), (Phase.UPDATE_ACTOR, 0.7)):
            start = now + wait_s + (0.0 if phase is Phase.OLD_LOG_PROB else 0.3 * train_s)
            yield flight.PhaseBegan(at=start, phase=phase, step=step)
            yield flight.PhaseEnded(at=start + share * train_s, phase=phase, step=step)
        end = now + wait_s + train_s
        yield flight.PhaseBegan(at=end, phase=Phase.SYNC_WEIGHTS, step=step)
        yield flight.PhaseEnded(at=end + 1.5, phase=Phase.SYNC_WEIGHTS, step=step)
        for name in standing:
            yield flight.SliceMoved(at=end, slice=name, state=SliceState.SYNCING, tag="rollout")
            yield flight.SliceMoved(at=end + 1.5, slice=name, state=SliceState.ROLLOUT, tag="rollout")
            yield from _requests(name, now + wait_s, train_s * rng.uniform(0.5, 1.0), requests, f"t{step}", rng)
        yield flight.WeightsPublished(at=end + 1.5, version=step)
        yield flight.RowsTrained(
            at=end + 1.5,
            step=step,
            rollouts=64,
            staleness=tuple(rng.choice((0, 1, 1)) for _ in range(70)),
            prompt_tokens=tuple(rng.randint(80, 400) for _ in range(70)),
            response_tokens=tuple(int(rng.lognormvariate(6, 0.8)) for _ in range(70)),
        )
        yield flight.StepEnded(at=end + 1.6, step=step)
        now = end + 2.0


def _wait(
    now: float, wait_s: float, lendable: list[str], standing: list[str], requests: int, step: int, rng: random.Random
) -> Iterator[flight.FlightEvent]:
    """The trainer waits; its slices are woken, generate, drain and come back."""
    yield flight.PhaseBegan(at=now, phase=Phase.WAIT_FOR_BATCH, step=step)
    yield flight.PhaseEnded(at=now + wait_s, phase=Phase.WAIT_FOR_BATCH, step=step)
    for ready in range(17):
        yield flight.BatchProgress(at=now + wait_s * (ready / 16) ** 0.5, ready=ready, needed=16)
    predicted = rng.uniform(2, 12)
    yield flight.DecisionMade(
        at=now, decision=str(step), policy="predictive", action="lend", slices=tuple(lendable),
        reason=f"benefit {predicted:.1f} s > cost 4.0 s", predicted_s=predicted,
    )  # fmt: skip
    yield flight.DecisionMade(
        at=now + wait_s - 3, decision=f"r{step}", policy="predictive", action="reclaim", slices=tuple(lendable),
        reason="batch complete in 2.1 s",
    )  # fmt: skip
    yield flight.DecisionRealised(
        at=now + wait_s, decision=str(step), realised_s=predicted * rng.uniform(0.4, 1.3), lent_tokens=90_000
    )
    for name in lendable:
        ready, drain = now + rng.uniform(1.5, 2.5), now + wait_s - 3
        yield flight.SliceMoved(at=now, slice=name, state=SliceState.WAKING, tag="rollout")
        yield flight.SliceMoved(at=ready, slice=name, state=SliceState.ROLLOUT, tag="rollout")
        yield from _requests(name, ready, drain - ready, requests, f"w{step}", rng)
        yield flight.SliceMoved(at=drain, slice=name, state=SliceState.DRAINING, tag="rollout")
        yield flight.SliceMoved(at=now + wait_s, slice=name, state=SliceState.TRAINING, tag="train")
    for name in standing:
        yield from _requests(name, now, wait_s * rng.uniform(0.7, 1.0), requests, f"s{step}", rng)
    reasons = ("arguments_respelled", "content_whitespace", "history_rewritten")
    for index in range(12):
        yield flight.SessionEnded(
            at=now + wait_s * index / 12, session=f"{step}-{index}", group=str(index), seconds=rng.expovariate(0.05),
            turns=rng.randint(1, 6), rows=1, reward=rng.random(), status=rng.choice(("finished", "timed_out")),
            drift={rng.choice(reasons): 1} if rng.random() < 0.3 else {},
        )  # fmt: skip


def _requests(
    name: str, start: float, length: float, count: int, mark: str, rng: random.Random
) -> Iterator[flight.FlightEvent]:
    for index in range(count):
        begin = start + rng.random() * length * 0.3
        end = min(start + length, begin + rng.expovariate(3 / length))
        resumed = rng.random() < 0.1
        request = f"{name}-{mark}-{index}"
        yield flight.RequestStarted(
            at=begin, request=request, slice=name, prompt_tokens=500, resumed=resumed, first_token_follows=resumed
        )
        if resumed:
            yield flight.FirstToken(at=min(end, begin + 0.3), request=request, slice=name)
        finish = "aborted" if end == start + length else "completed"
        yield flight.RequestEnded(
            at=end, request=request, slice=name, tokens=int((end - begin) * 40), finish=finish, cached_tokens=100
        )
