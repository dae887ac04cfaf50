"""A toy cluster on virtual time that obeys the scheduler: enough physics to tell a good policy from a bad one.

Lock-step decoding, one turn per session, a trainer with local updates and a lag of one step, fixed switch costs. The
real simulator is `seamless_verl.simulation`; this one exists so that the kernel's tests need nothing but the kernel.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from seamless_verl.scheduling import commands as cm
from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.policies import Policy
from seamless_verl.scheduling.scheduler import Scheduler
from seamless_verl.scheduling.slices import SliceId, SliceState, Tag
from tests.kernel.scheduling.world import BOTH, ROLLOUT, make_slice


@dataclass(frozen=True, kw_only=True)
class Setting:
    lengths: Callable[[random.Random], float]
    trainers: int = 2
    standing: int = 2
    batch: int = 16
    updates: int = 4
    members: int = 4
    train_s: float = 20.0  # per batch
    wake_s: float = 2.0
    back_s: float = 1.0
    sync_s: float = 0.5
    floor_s: float = 0.01
    per_request_s: float = 0.002
    steps: int = 20
    eta: int = 1


@dataclass
class _Session:
    name: str
    group: str
    left: float
    done: float = 0.0
    started: float = 0.0
    mark: float = 0.0
    request: str = ""


@dataclass
class _Server:
    progress: float = 0.0
    at: float = 0.0
    running: dict[str, _Session] = field(default_factory=dict)
    serves: bool = False  # awake
    registered: bool = False  # gets requests; they wait while it is not awake
    epoch: int = 0


@dataclass
class Result:
    step_s: float
    idle_share: float  # of the trainable slices: neither training nor generating
    loans: int
    switches_per_step: float
    decisions: list[cm.RecordDecision]
    outcomes: list[cm.RecordOutcome]


class Toy:
    def __init__(self, policy: Policy, setting: Setting, seed: int = 0) -> None:
        self.s, self.rng, self.now = setting, random.Random(seed), 0.0
        self.scheduler = Scheduler(policy)
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.servers: dict[SliceId, _Server] = {}
        self.queue: list[_Session] = []
        self.groups: dict[str, int] = {}
        self.log: list[cm.Command] = []
        self.ready = self.counter = self.version = self.step = self.updates_done = 0
        self.request = ""
        self.step_ends: list[float] = []
        self.busy_s = 0.0
        self.moves = 0

    # ------------------------------------------------------------ plumbing

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.counter += 1
        heapq.heappush(self.heap, (self.now + delay, self.counter, action))

    def tell(self, *events: ev.Event) -> None:
        """As the edge does: what joins is registered before anything is interrupted, so that work spreads over it."""
        commands = [command for event in events for command in self.scheduler.handle(event)]
        self.log += commands
        for command in sorted(commands, key=lambda c: not isinstance(c, cm.LendSlice)):
            self.carry_out(command)

    def carry_out(self, command: cm.Command) -> None:
        s = self.s
        if isinstance(command, cm.LendSlice):
            self.moves += 1
            version = self.version
            self.servers[command.slice].registered = True
            self.after(s.wake_s, lambda: self.answer_ready(command, version))
        elif isinstance(command, cm.SyncWeights):
            self.stop(command.slice)
            self.servers[command.slice].registered = True
            self.after(s.sync_s, lambda: self.answer_ready(command, command.version))
        elif isinstance(command, cm.DrainSlice):
            self.servers[command.slice].registered = False
            self.moves += 1
            self.stop(command.slice)
            self.after(s.back_s, lambda: self.answer_drained(command))
        elif isinstance(command, cm.GrantAcquire):
            self.after(0.0, self.train)
        elif isinstance(command, cm.SetTimer):
            self.after(max(command.at - self.now, 0.0), lambda: self.tell(ev.Tick(at=self.now)))

    def answer_ready(self, command: cm.LendSlice | cm.SyncWeights, version: int) -> None:
        if self.scheduler.cluster[command.slice].command == command.command:
            self.advance(self.servers[command.slice])
            self.servers[command.slice].serves = True
            self.reschedule(command.slice)
            self.tell(ev.SliceReady(at=self.now, slice=command.slice, command=command.command, version=version))
            self.route()

    def answer_drained(self, command: cm.DrainSlice) -> None:
        if self.scheduler.cluster[command.slice].command == command.command:
            self.tell(ev.SliceDrained(at=self.now, slice=command.slice, command=command.command))

    # ------------------------------------------------------------ generation

    def pace(self, server: _Server) -> float:
        return self.s.floor_s + self.s.per_request_s * len(server.running)

    def advance(self, server: _Server) -> None:
        if server.running and server.serves:
            server.progress += (self.now - server.at) / self.pace(server)
        server.at = self.now

    def reschedule(self, slice_id: SliceId) -> None:
        server = self.servers[slice_id]
        server.epoch += 1
        if server.running and server.serves:
            epoch = server.epoch
            first = min(session.mark for session in server.running.values())
            delay = max(first - server.progress, 0.0) * self.pace(server)
            self.after(delay, lambda: self.finished(slice_id, epoch))

    def finished(self, slice_id: SliceId, epoch: int) -> None:
        server = self.servers[slice_id]
        if server.epoch != epoch:
            return
        self.advance(server)
        ended = [x for x in server.running.values() if x.mark <= server.progress + 1e-6]
        for session in ended:
            del server.running[session.name]
        for session in ended:
            tokens = round(session.left)
            self.tell(ev.RequestFinished(at=self.now, request=session.request, tokens=tokens))
            self.tell(ev.SessionFinished(at=self.now, session=session.name, group=session.group))
            self.groups[session.group] -= 1
            if self.groups[session.group] == 0:
                del self.groups[session.group]
                self.ready += 1
                self.tell_ready()
        self.reschedule(slice_id)

    def tell_ready(self) -> None:
        self.tell(ev.GroupsReady(at=self.now, ready=self.ready, in_flight=len(self.groups)))

    def stop(self, slice_id: SliceId) -> None:
        server = self.servers[slice_id]
        self.advance(server)
        server.serves = server.registered = False
        for session in list(server.running.values()):
            made = max(session.left - (session.mark - server.progress), 0.0)
            session.left = max(session.left - made, 1.0)
            interrupted = ev.RequestFinished(
                at=self.now, request=session.request, tokens=int(made), ending=ev.Ending.INTERRUPTED
            )
            self.tell(interrupted)
            self.queue.append(session)
        server.running.clear()
        server.epoch += 1
        self.route()

    def route(self) -> None:
        serving = {i: server for i, server in self.servers.items() if server.registered}
        if not serving:
            return
        touched = set()
        for session in self.queue:
            slice_id = min(serving, key=lambda i: (len(serving[i].running), i))
            server = serving[slice_id]
            self.advance(server)
            self.counter += 1
            session.request = f"q{self.counter}"
            session.mark = server.progress + session.left
            server.running[session.name] = session
            touched.add(slice_id)
            self.tell(
                ev.RequestStarted(
                    at=self.now,
                    request=session.request,
                    session=session.name,
                    group=session.group,
                    slice=slice_id,
                    context_tokens=0,
                )
            )
        self.queue = []
        for slice_id in touched:
            self.reschedule(slice_id)

    def submit(self, count: int) -> None:
        names = []
        for _ in range(count):
            self.counter += 1
            group = f"g{self.counter}"
            names.append(group)
            self.groups[group] = self.s.members
        self.tell(ev.GroupsSubmitted(at=self.now, groups=tuple(names), sessions=self.s.members))
        for group in names:
            for member in range(self.s.members):
                session = _Session(name=f"{group}.{member}", group=group, left=max(self.s.lengths(self.rng), 1.0))
                self.queue.append(session)
        self.route()

    # ------------------------------------------------------------ trainer

    @property
    def update(self) -> int:
        return self.s.batch // self.s.updates

    def ask(self) -> None:
        self.request = f"step-{self.step}/{self.updates_done}"
        rest = self.s.batch - self.updates_done * self.update
        event = ev.AcquireRequested(
            at=self.now, request=self.request, tag=Tag.TRAIN, count=self.s.trainers, minimum=self.update, batch=rest
        )
        self.tell(event)

    def train(self) -> None:
        assert self.ready >= self.update
        self.ready -= self.update
        self.tell_ready()
        self.after(self.s.train_s / self.s.updates, self.updated)

    def updated(self) -> None:
        self.updates_done += 1
        if self.updates_done == self.s.updates:
            self.end_step()
        elif self.ready >= self.update:
            self.train()
        else:
            self.tell(ev.Released(at=self.now, request=self.request))
            self.ask()

    def end_step(self) -> None:
        self.step += 1
        self.updates_done = 0
        self.step_ends.append(self.now)
        self.tell(ev.StepEnded(at=self.now, step=self.step, last=self.step == self.s.steps))
        self.version += 1
        published = ev.WeightsPublished(at=self.now, version=self.version)
        self.tell(published, ev.Released(at=self.now, request=self.request))
        if self.step < self.s.steps:
            self.submit(self.s.batch)
            self.ask()

    def run(self) -> Result:
        self.tell(ev.WeightsPublished(at=0.0, version=0))
        for i in range(self.s.standing + self.s.trainers):
            name, tags = (f"s{i}", ROLLOUT) if i < self.s.standing else (f"t{i}", BOTH)
            self.servers[SliceId(name)] = _Server(serves=True, registered=True)
            added = ev.SliceAdded(at=0.0, slice=make_slice(name, tags), state=SliceState.ROLLOUT, version=0)
            self.tell(added)
        self.submit(self.s.batch * (1 + self.s.eta))
        self.ask()
        trainers = [SliceId(f"t{i}") for i in range(self.s.standing, self.s.standing + self.s.trainers)]
        while self.heap and self.step < self.s.steps:
            at, _, action = heapq.heappop(self.heap)
            for slice_id in trainers:
                state = self.scheduler.cluster[slice_id].state
                works = state is SliceState.TRAINING or self.servers[slice_id].running
                self.busy_s += (at - self.now) * bool(works)
            self.now = at
            action()
        assert self.step == self.s.steps, "the trainer waits for ever"
        decisions = [c for c in self.log if isinstance(c, cm.RecordDecision)]
        skip = 3
        return Result(
            step_s=(self.step_ends[-1] - self.step_ends[skip]) / (self.s.steps - 1 - skip),
            idle_share=1 - self.busy_s / (self.now * self.s.trainers),
            loans=sum(d.decision.verb.value == "lend" for d in decisions),
            switches_per_step=self.moves / self.s.trainers / self.s.steps,
            decisions=decisions,
            outcomes=[c for c in self.log if isinstance(c, cm.RecordOutcome)],
        )
