"""The trainer: waits for groups, holds the gang, trains mini-batches, publishes weights. One loop for every system.

    begin step ─► acquire gang ─► [wait for a mini-batch ─► train it]* ─► publish ─► release

What differs between systems is data (`Regime`): who is admitted when (the feed), whether the gang is given back while
it starves, how weights are published, how often the trainer looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seamless_verl.observe import flight
from seamless_verl.observe.flight import Phase
from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.slices import Tag
from seamless_verl.simulation.agents import Agents, Group
from seamless_verl.simulation.books import Use
from seamless_verl.simulation.clock import Clock, Process, Signal
from seamless_verl.simulation.driver import Driver
from seamless_verl.simulation.fleet import Fleet
from seamless_verl.simulation.regimes import Feed, Regime
from seamless_verl.simulation.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step. ``staleness``: trained version minus version of the first token, per group."""

    step: int
    began: float
    ended: float
    tokens: int
    generated: int
    waited_s: float
    staleness: tuple[int, ...]
    answers: tuple[int, ...]


class TrainLoop:
    """The trainer's steps, for every system.

    Args:
        lends_next: whether the gang is lent as soon as it is given back, known since the end of the step: the router is
            told before weights are published, and the next step begins when the gang is awake (verl's ``on_step_end``).
    """

    def __init__(
        self,
        scenario: Scenario,
        rules: Regime,
        clock: Clock,
        driver: Driver,
        fleet: Fleet,
        agents: Agents,
        feed: Feed,
        *,
        on_step: Callable[[StepRecord], None],
        lends_next: Callable[[], bool],
        record: Callable[[flight.FlightEvent], None] | None,
    ) -> None:
        self.version = 0
        self.done = False
        self._ready = Signal(clock)
        self._scenario = scenario
        self._rules = rules
        self._update = rules.update(scenario.batch, scenario.mini_batch)
        self._push_s = scenario.push_s(rules)
        self._awaits_load = (rules.awaits_load or scenario.train.awaits_load) and not scenario.rolling
        self._clock = clock
        self._driver = driver
        self._fleet = fleet
        self._agents = agents
        self._feed = feed
        self._on_step = on_step
        self._lends_next = lends_next
        self._record_event = record
        self._step = 0
        self._requests = 0
        self._holding = ""
        self._waited_s = self._starved_s = 0.0
        self._waited_groups = self._starved_groups = 0
        self._missing = 0

    # ---------------------------------------------------------------- what the agents report

    def group_finished(self, group: Group) -> None:
        self._feed.finish(group)
        self._tell_ready()
        self._ready.fire()

    def _tell_ready(self) -> None:
        ready = min(self._feed.available, self._missing)
        self._driver.tell(ev.GroupsReady(at=self._clock.now, ready=ready, in_flight=self._feed.in_flight))
        if self._record_event is not None:
            self._say(flight.BatchProgress(at=self._clock.now, ready=ready, needed=self._missing))

    # ---------------------------------------------------------------- the process

    def run(self) -> Process:
        self._admit(self._feed.published(0))
        for step in range(1, self._scenario.steps + 1):
            began, self._step = self._clock.now, step
            self._say(flight.StepBegan(at=began, step=step))
            self._waited_s = self._starved_s = 0.0
            self._waited_groups = self._starved_groups = 0
            self._missing = self._scenario.batch
            if not self._rules.barrier or step == 1:
                self._admit(self._feed.step_begins(self.version))
            self._tell_ready()
            groups: list[Group] = []
            while self._missing:
                yield from self._hold_gang()
                batch = yield from self._next_batch(self._scenario.batch if self._rules.barrier else None)
                if self._rules.barrier:
                    yield from self._synchronize(step)
                yield from self._train(batch)
                groups += batch
            yield from self._end_step(step)
            self._record(step, began, groups)
        self.done = True

    def _hold_gang(self) -> Process:
        if self._holding:
            return
        self._requests += 1
        name = f"train/{self._requests}"
        mini = min(self._update, self._missing)
        asked, lending = self._clock.now, self._driver.lending()
        missing = max(0, mini - self._feed.finished)
        gang = sum(pool.slices for pool in self._scenario.gang)
        self._driver.tell(
            ev.AcquireRequested(at=asked, request=name, tag=Tag.TRAIN, count=gang, minimum=mini, batch=self._missing)
        )
        while self._driver.granted(name) is None:
            yield self._driver.changed
        if not lending and self._step > 1:  # nobody else used the gang; verl's is lent from the start
            self._starved_s += self._clock.now - asked
            self._starved_groups += missing
        self._holding = name

    def _next_batch(self, wanted: int | None) -> Process:
        mini = wanted or min(self._update, self._missing)
        waits_from = self._clock.now
        self._phase(Phase.WAIT_FOR_BATCH)
        if self._feed.available < mini:
            self._waited_groups += max(0, mini - self._feed.finished)
            while self._feed.available < mini:
                yield self._ready
        if self._rules.poll_s:
            waited = self._clock.now - waits_from
            yield math.ceil(waited / self._rules.poll_s) * self._rules.poll_s - waited
        self._waited_s += self._clock.now - waits_from
        self._phase(Phase.WAIT_FOR_BATCH, ends=True)
        taken, surplus = self._feed.take(mini)
        for group in surplus:
            self._agents.stop(group)
        self._missing -= len(taken)
        self._tell_ready()
        return taken

    def _train(self, batch: list[Group]) -> Process:
        gpus = sum(pool.slices * pool.gpus for pool in self._scenario.gang)
        seconds = self._scenario.train.seconds(sum(group.tokens for group in batch), gpus)
        self._use_gang(Use.TRAIN)
        self._phase(Phase.UPDATE_ACTOR)
        yield seconds
        self._phase(Phase.UPDATE_ACTOR, ends=True)
        self._use_gang(Use.WAIT_DATA)
        mini = min(self._update, self._missing)
        if self._missing and self._rules.releases and self._feed.available < mini:
            self._release()

    def _end_step(self, step: int) -> Process:
        last = step == self._scenario.steps
        self._missing = 0 if last else self._scenario.batch
        self._tell_ready()  # before the end of the step: what then decides must know what the next one finds
        self._driver.tell(ev.BatchOpened(at=self._clock.now, awaited=self._feed.awaited()))
        self._driver.tell(
            ev.StepEnded(
                at=self._clock.now,
                step=step,
                waited_s=self._waited_s,
                waited_groups=self._waited_groups,
                starved_s=self._starved_s,
                starved_groups=self._starved_groups,
                last=last,
            )
        )
        gang = (self._driver.granted(self._holding) or ()) if self._lends_next() else ()
        if not self._rules.barrier:
            yield from self._publish(gang)
        self._release()
        while self._driver.waking(gang):
            yield self._driver.changed
        if self._awaits_load:
            while self._driver.loading():
                yield self._driver.changed
            self._admit(self._feed.published(self.version))

    def _synchronize(self, step: int) -> Process:
        """One-step-off: the batch is complete, so nothing generates; weights go over, then the next batch starts."""
        if step > 1:
            yield from self._publish(())
        if step < self._scenario.steps:
            self._admit(self._feed.step_begins(self.version))

    def _publish(self, joining: Sequence[str]) -> Process:
        """``joining``: slices that the router is told of first."""
        self._use_gang(Use.SYNC)
        self._phase(Phase.SYNC_WEIGHTS)
        self.version += 1
        if self._rules.stop_the_world:
            self._driver.tell(ev.WeightsPublished(at=self._clock.now, version=self.version))
            if joining:
                self._driver.register(joining)
            while self._driver.loading():
                yield self._driver.changed
        if self._push_s:
            yield self._push_s
        if not self._rules.stop_the_world:
            self._driver.tell(ev.WeightsPublished(at=self._clock.now, version=self.version))
        for group in self._feed.to_discard(self.version):
            self._agents.stop(group)
        if not self._awaits_load:
            self._admit(self._feed.published(self.version))
        self._phase(Phase.SYNC_WEIGHTS, ends=True)
        self._use_gang(Use.WAIT_DATA)

    # ---------------------------------------------------------------- small things

    def _admit(self, groups: list[Group]) -> None:
        if not groups:
            return
        sessions = len(groups[0].attempts)
        names = tuple(group.name for group in groups)
        self._driver.tell(ev.GroupsSubmitted(at=self._clock.now, groups=names, sessions=sessions))
        self._tell_ready()
        self._agents.start(groups)

    def _use_gang(self, use: Use) -> None:
        for name in self._driver.granted(self._holding) or ():
            self._fleet.units[name].turn_to(use)

    def _release(self) -> None:
        name, self._holding = self._holding, ""
        self._driver.release(name)

    def _say(self, event: flight.FlightEvent) -> None:
        if self._record_event is not None:
            self._record_event(event)

    def _phase(self, phase: Phase, *, ends: bool = False) -> None:
        kind = flight.PhaseEnded if ends else flight.PhaseBegan
        self._say(kind(at=self._clock.now, phase=phase, step=self._step))

    def _record(self, step: int, began: float, groups: list[Group]) -> None:
        self._say(flight.StepEnded(at=self._clock.now, step=step))
        if self._record_event is not None:
            self._say(_rows(self._clock.now, step, groups))
        self._on_step(
            StepRecord(
                step=step,
                began=began,
                ended=self._clock.now,
                tokens=sum(group.tokens for group in groups),
                generated=sum(group.generated for group in groups),
                waited_s=self._waited_s,
                staleness=tuple(step - 1 - group.version for group in groups),
                answers=tuple(attempt.generated for group in groups for attempt in group.attempts),
            )
        )


def _rows(at: float, step: int, groups: list[Group]) -> flight.RowsTrained:
    attempts = [attempt for group in groups for attempt in group.attempts]
    return flight.RowsTrained(
        at=at,
        step=step,
        rollouts=len(attempts),
        staleness=tuple(step - 1 - (a.version or 0) for a in attempts),
        prompt_tokens=tuple(a.context - a.generated for a in attempts),
        response_tokens=tuple(a.generated for a in attempts),
    )
