"""A scenario played on virtual time: kernels of the live system, modelled hardware, one clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace

from seamless_verl.errors import SeamlessError
from seamless_verl.observe import flight
from seamless_verl.observe.scheduler_flight import RecordedScheduler
from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.issuing import Patience
from seamless_verl.scheduling.scheduler import Scheduler
from seamless_verl.scheduling.slices import Gpu, Slice, SliceId, Tag
from seamless_verl.scheduling.verl_gate import VerlGate
from seamless_verl.simulation.agents import Agents, Attempt
from seamless_verl.simulation.books import Account, Ledger, ledger, snapshot
from seamless_verl.simulation.clock import Clock, Process
from seamless_verl.simulation.driver import Driver
from seamless_verl.simulation.fleet import Fleet
from seamless_verl.simulation.loop import StepRecord, TrainLoop
from seamless_verl.simulation.regimes import Bounded, Regime, regime
from seamless_verl.simulation.replica import Request
from seamless_verl.simulation.scenario import Scenario
from seamless_verl.staleness.router import router_of

_FOR_EVER = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Figures of the steps after the warm ones. ``events``: callbacks of the whole run."""

    scenario: Scenario
    steps: tuple[StepRecord, ...]
    books: Ledger
    events: int
    lends: int
    preemptions: int
    migrated: int
    stalls: int

    @property
    def step_s(self) -> float:
        return self.books.wall_s / len(self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens, prompts included, per second (as verl counts them)."""
        return sum(step.tokens for step in self.steps) / self.books.wall_s

    @property
    def max_staleness(self) -> int:
        return max(max(step.staleness) for step in self.steps)

    @property
    def mean_staleness(self) -> float:
        values = [value for step in self.steps for value in step.staleness]
        return sum(values) / len(values)


class Simulation:
    """One run.

    Args:
        rules: replace those of the scenario's system (ablations).
        record: gets what a flight recorder would write.
        progress: gets every step.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        rules: Regime | None = None,
        record: Callable[[flight.FlightEvent], None] | None = None,
        progress: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self._scenario = scenario
        self._regime = rules = rules or regime(scenario.system)
        self._progress = progress
        self._record = record
        self._records: list[StepRecord] = []
        self._before: list[Account] = []
        self._began = 0.0
        self._request_names: dict[int, str] = {}
        self._requests = 0
        rng = random.Random(scenario.seed)
        self._noise_rng = random.Random(rng.random())
        self.clock = Clock()
        self.fleet = self._make_fleet()
        update = rules.update(scenario.batch, scenario.mini_batch)
        self._policy = rules.policy(scenario.scheduler, scenario.batch, update)
        self.scheduler = Scheduler(self._policy, _patience(scenario))
        recorded = RecordedScheduler(self.scheduler, record, policy=scenario.system) if record else self.scheduler
        self.driver = Driver(
            self.clock,
            recorded.handle,
            self.scheduler.cluster,
            self.fleet,
            scenario.costs,
            random.Random(rng.random()),
            scenario.weights,
        )
        self.agents = Agents(
            self.clock,
            copy(scenario.workload),  # a replay keeps its place in the recording; each run begins at the start
            random.Random(rng.random()),
            attempts=scenario.attempts,
            submit=self._submit,
            withdraw=self.fleet.withdraw,
            on_session=self._session_ended,
            on_group=lambda group: self.loop.group_finished(group),
        )
        self.feed = rules.feed(self.agents.draw, scenario.batch, scenario.eta)
        if isinstance(self.feed, Bounded):
            self.feed.protocol.in_flight = scenario.in_flight
            if scenario.rolling:
                self.feed.oldest = self._oldest_start
        self.loop = self._make_loop()

    def _make_fleet(self) -> Fleet:
        engine = self._scenario.pools[-1].engine
        router = self._regime.routed(self._scenario.router)
        return Fleet(
            self.clock,
            router_of(router, cost=engine.decode, prefill_s_per_token=engine.prefill_s_per_token),
            rebalance=self._regime.rebalances,
            is_long=self._is_long,
            lowest_version=_lowest_version,
            started=self._request_started,
            stopped=self._request_stopped,
            finished=self._request_finished,
        )

    def _make_loop(self) -> TrainLoop:
        scenario, rules = self._scenario, self._regime
        gate, announces = self._policy, rules.stop_the_world  # verl's trainer
        return TrainLoop(
            scenario,
            rules,
            self.clock,
            self.driver,
            self.fleet,
            self.agents,
            self.feed,
            on_step=self._step_ended,
            lends_next=lambda: announces and isinstance(gate, VerlGate) and gate.lends_next,
            record=self._record,
        )

    def run(self) -> Result:
        """Simulate until the last step has ended.

        Raises:
            SeamlessError: nothing is left to happen before the last step ended; names what the scheduler waits for.
        """
        scenario = self._scenario
        if self._record:
            self._record(
                flight.RunStarted(
                    at=0.0, name="simulation", policy=scenario.system, eta=scenario.eta, total_steps=scenario.steps,
                    bound=self._regime.bound(scenario.eta),
                )
            )  # fmt: skip
        self._build()
        self.clock.start(self.loop.run())
        for name in self.fleet.units:
            if self._scenario.noise.failures_per_hour:
                self.clock.start(self._failures(name))
        if not self.clock.run(lambda: self.loop.done):
            states = ", ".join(f"{s.slice.id} {s.state.value}" for s in self.scheduler.cluster)
            raise SeamlessError(f"step {len(self._records) + 1} never ends: {states}; held {self.fleet.num_held}")
        if self._record:
            self._record(flight.RunEnded(at=self.clock.now, outcome="finished"))
        records = tuple(self._records[self._scenario.warm :])
        return Result(
            scenario=self._scenario,
            steps=records,
            books=ledger(self._before, snapshot(self.fleet.accounts()), self.clock.now - self._began),
            events=self.clock.events,
            lends=self.driver.lends,
            preemptions=sum(unit.replica.preemptions for unit in self.fleet.units.values()),
            migrated=self.fleet.migrated,
            stalls=self.driver.stalls,
        )

    # ---------------------------------------------------------------- construction

    def _build(self) -> None:
        for pool in self._scenario.pools:
            if pool.trains and pool.rolls_out and (self._regime.lends or self._regime.colocated):
                capabilities = frozenset(Tag)
            else:
                capabilities = frozenset({Tag.TRAIN if pool.trains else Tag.ROLLOUT})
            for number in range(pool.slices):
                name = f"{pool.name}/{number}"
                self.fleet.add(name, gpus=pool.gpus, trainable=pool.trains, physics=pool.engine)
                gpus = tuple(Gpu(node=name, index=index) for index in range(pool.gpus))
                piece = Slice(
                    id=SliceId(name),
                    pool=pool.name,
                    gpus=gpus,
                    capabilities=capabilities,
                    seats=pool.engine.max_running,
                )
                self.driver.add(piece, serving=not pool.trains)
        self._draw_speeds()
        if self._scenario.warm == 0:
            self._before = snapshot(self.fleet.accounts())
        self.driver.tell(ev.WeightsPublished(at=self.clock.now, version=0))

    def _draw_speeds(self) -> None:
        spread = self._scenario.noise.slowdown
        for unit in self.fleet.units.values() if spread else ():
            unit.charge()
            unit.replica.set_slowdown(self._noise_rng.lognormvariate(0.0, spread))

    def _failures(self, name: str) -> Process:
        while True:
            yield self._noise_rng.expovariate(self._scenario.noise.failures_per_hour) * 3600.0
            self.driver.fail(name)

    # ---------------------------------------------------------------- what the scheduler is told of requests

    def _oldest_start(self) -> int | None:
        """The oldest weights that a prompt may begin with: a slice serves them, and may go on to."""
        lagging = min(self.fleet.versions(), default=None)
        return None if lagging is None else max(lagging, self.loop.version + 1 - self._scenario.weights.max_lag)

    def _submit(self, requests: list[Request]) -> None:
        self.fleet.submit(requests)
        self.driver.pull()  # a request may need newer weights than any slice has

    def _is_long(self, request: Request) -> bool:
        attempt = request.owner
        assert isinstance(attempt, Attempt)
        return attempt.session in self.driver.outlasting

    def _request_started(self, request: Request, name: str) -> None:
        attempt = request.owner
        assert isinstance(attempt, Attempt)
        self._requests += 1
        label = self._request_names[id(request)] = f"r{self._requests}"
        request.base = request.done
        if self._record:
            self._record(
                flight.RequestStarted(
                    at=self.clock.now,
                    request=label,
                    slice=name,
                    prompt_tokens=round(request.context + request.done),
                    resumed=request.prefix > 0 or request.done > 0,
                    session=attempt.session,
                )
            )
        self.driver.tell(
            ev.RequestStarted(
                at=self.clock.now,
                request=label,
                session=attempt.session,
                group=attempt.group.name,
                slice=SliceId(name),
                context_tokens=round(request.context + request.done),
            )
        )

    def _request_stopped(self, request: Request, name: str, finished: bool) -> None:
        ending = ev.Ending.COMPLETED if finished else ev.Ending.INTERRUPTED
        tokens = round(request.done - request.base)
        label = self._request_names.pop(id(request))
        if self._record:
            self._record(
                flight.RequestEnded(
                    at=self.clock.now,
                    request=label,
                    slice=name,
                    tokens=tokens,
                    finish="completed" if finished else "aborted",
                    version=self.fleet.units[name].replica.version,
                )
            )
        self.driver.tell(ev.RequestFinished(at=self.clock.now, request=label, tokens=tokens, ending=ending))
        if self.fleet.idle(name):
            self.driver.pull()

    def _request_finished(self, request: Request) -> None:
        self.agents.finished(request)

    def _session_ended(self, attempt: Attempt) -> None:
        self.fleet.forget(attempt)
        if self._record:
            self._record(
                flight.SessionEnded(
                    at=self.clock.now,
                    session=attempt.session,
                    group=attempt.group.name,
                    seconds=self.clock.now - attempt.group.submitted,
                    turns=len(attempt.trajectory),
                    rows=1,
                    reward=0.0,  # nothing is solved here
                    status="simulated",
                )
            )
        group = attempt.group
        over = ev.SessionFinished(at=self.clock.now, session=attempt.session, group=group.name, cut=group.stopped)
        self.driver.tell(over)

    def _step_ended(self, record: StepRecord) -> None:
        self._records.append(record)
        self._draw_speeds()
        if record.step == self._scenario.warm:
            self._before, self._began = snapshot(self.fleet.accounts()), self.clock.now
        if self._progress is not None:
            self._progress(record)


def _lowest_version(request: Request) -> int:
    """V_traj of its session once it has a token, else the version that its group was admitted with."""
    attempt = request.owner
    assert isinstance(attempt, Attempt)
    first = attempt.version if attempt.version is not None else request.version
    return attempt.group.reserved if first is None else first


def _patience(scenario: Scenario) -> Patience:
    """The patience of a live run, but never so short that a transition of the scenario's would count as a failure."""
    usual, costs, longest = Patience(), scenario.costs, 1.0 + 10.0 * scenario.costs.spread
    turns = _FOR_EVER if scenario.rolling else 1.0  # a slice that lags may serve for as long as its rule lets it
    return replace(
        usual,
        wake_s=turns * max(usual.wake_s, 2.0 * longest * max(costs.wake, costs.load)),
        drain_s=max(usual.drain_s, 2.0 * longest * costs.drain),
        restart_s=max(usual.restart_s, 2.0 * costs.repair),
    )


def simulate(scenario: Scenario, rules: Regime | None = None) -> Result:
    """Run a scenario to its end. The same scenario always gives the same result."""
    return Simulation(scenario, rules=rules).run()
