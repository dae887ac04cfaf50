"""The kernels of staleness, floors, routing and synchronisation around replicas of unlike versions, without an engine.

    admit ─► reserve ─► route ─► a replica of the floor or newer ─► first token (V_traj) ─► turns ─► occupy ─► consume
                          ▲                 │ dies, breaks, is taken back: what was generated is kept      │
                          └─────────────────┘                    publish ◄── a step was trained ◄──────────┘

Whoever drives a `World` chooses what happens; the world plays the edges and keeps books of its own, apart from those of
the kernels, in which it counts what must never happen (`World.broken`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from seamless_verl.config import WeightsConfig
from seamless_verl.staleness.cache_aware import CacheAware, Residents
from seamless_verl.staleness.floors import ServingVersions, reserve_between
from seamless_verl.staleness.protocol import ProtocolError, StalenessProtocol
from seamless_verl.staleness.routing import LeastRequests, MarginalGain, PendingRequest, ReplicaLoad, Route
from seamless_verl.staleness.synchronisation import ReplicaWeights, synchronisation_of

_SEATS = 8
_TOKENS = 100  # of any session's context
_ENDLESS = 1 << 30


@dataclass(slots=True)
class Session:
    """One rollout of a group. ``first``: version of its first token; ``on``: the replica that runs its turn."""

    group: str
    turns: int
    first: int | None = None
    on: str | None = None


@dataclass(slots=True)
class Standing:
    """A replica. ``away``: dead, or with the trainer."""

    version: int | None = None
    pulling: bool = False
    failed: int = 0
    away: bool = False
    running: set[int] = field(default_factory=set)


class World:
    """See the module.

    Args:
        rollouts: sessions of a group.
        turns: of a session.
        cache_tokens: that a replica's cache holds.
    """

    def __init__(
        self,
        *,
        eta: int,
        batch: int,
        weights: WeightsConfig,
        router: LeastRequests | MarginalGain | CacheAware,
        replicas: int = 3,
        rollouts: int = 2,
        turns: int = 2,
        in_flight: float | None = None,
        cache_tokens: int = _ENDLESS,
    ) -> None:
        self.protocol = StalenessProtocol(eta=eta, batch_size=batch, in_flight=in_flight)
        self.published = 0
        self.replicas = {f"r{number}": Standing() for number in range(replicas)}
        self.sessions: dict[int, Session] = {}  # of groups that are generated
        self.members: dict[str, list[int]] = {}
        self.floors: dict[str, int] = {}  # of groups, as they were reserved
        self.began: dict[str, int] = {}  # finished groups -> oldest first token
        self.trained: set[str] = set()
        self.given_up = 0
        self.broken = Counter({"capacity was promised and refused": 0, "occupy refused a version": 0})
        self._batch, self._taken, self._eta = batch, 0, eta
        self._weights, self._sync = weights, synchronisation_of(weights)
        self._router, self._versions = router, ServingVersions()
        self._residents, self._cache_tokens = Residents(), cache_tokens
        self._rollouts, self._turns = rollouts, turns
        self._numbers = 0

    # ---------------------------------------------------------------- what the trainer does

    def admit(self) -> None:
        """As `StreamingReplayBuffer`: as many groups as the bound has room for, each as old as it has room for."""
        oldest = self._versions.oldest(self.serving())
        for _ in range(self.protocol.capacity(self.published)):
            self._numbers += 1
            group = f"g{self._numbers}"
            first = self.published if oldest is None else max(oldest, self.published + 1 - self._weights.max_lag)
            if reserve_between(self.protocol, group, first, self.published) is None:
                self.broken["capacity was promised and refused"] += 1
                continue
            self.floors[group] = self.protocol.reserved_for(group) or 0
            self.members[group] = []
            for _ in range(self._rollouts):
                self._numbers += 1
                self.members[group].append(self._numbers)
                self.sessions[self._numbers] = Session(group, self._turns)

    def consume(self, count: int) -> None:
        """A mini-batch; the last one of a step makes new weights, which are to be published next."""
        version = self.protocol.version
        for entry in self.protocol.consume(count).groups:
            self.broken["bound"] += version - self.began.pop(entry.group) > self._eta
            self.broken["trained twice"] += entry.group in self.trained
            self.trained.add(entry.group)
        self._taken = (self._taken + count) % self._batch

    @property
    def may_consume(self) -> int:
        return self.protocol.num_available if self.published == self.protocol.version else 0

    @property
    def may_publish(self) -> bool:
        return self.published < self.protocol.version

    def publish(self) -> None:
        self.published = self.protocol.version

    def give_up(self, group: str) -> None:
        """It failed, or was filtered."""
        self.given_up += 1
        self.protocol.abort(group)
        self._residents.over(self.members[group])
        for number in self.members.pop(group):
            self._stop(number)
            del self.sessions[number]
        del self.floors[group]

    # ---------------------------------------------------------------- what replicas do

    def begin_pulls(self) -> list[str]:
        """Who pulls from now on, by the strategy's word."""
        floors = [self.floor(number) for number in self._waiting()]
        wanted = self._versions.wanted(self.serving(), floors)
        pulls = self._sync.pulls(
            self.published, [self._weights_of(name) for name in self.replicas if self._here(name)], wanted
        )
        for pull in pulls:
            self.replicas[pull.replica].pulling = True
        if self._weights.sync == "rolling":
            self.broken["too many pull"] += sum(each.pulling for each in self.replicas.values()) > self._weights.at_once
        return [pull.replica for pull in pulls]

    def pulled(self, name: str) -> None:
        replica = self.replicas[name]
        self.broken["a version fell"] += (replica.version or 0) > self.published
        replica.version, replica.pulling, replica.failed = self.published, False, 0
        self._versions.tell([name], self.published)

    def pull_failed(self, name: str, *, breaks: bool) -> None:
        """``breaks``: half of the weights are new, so it serves nobody until a whole load."""
        replica = self.replicas[name]
        replica.pulling, replica.failed = False, replica.failed + 1
        if breaks:
            self._off(name)

    def leave(self, name: str) -> None:
        """It dies, or goes back to the trainer."""
        self._off(name)
        self.replicas[name].away, self.replicas[name].pulling = True, False

    def join(self, name: str) -> None:
        """It is started anew, or lent: without weights."""
        self.replicas[name] = Standing()

    # ---------------------------------------------------------------- what requests do

    def floor(self, number: int) -> int:
        session = self.sessions[number]
        return self.floors[session.group] if session.first is None else session.first

    def route(self) -> int:
        """Place what waits; returns how many found a place. A session keeps its room between turns."""
        pending = [
            PendingRequest(
                request=str(number),
                version=self.floor(number),
                tokens=_TOKENS,
                arrival=(number,),
                near=self._residents.near(number, self.sessions[number].group),
            )
            for number in self._waiting()
        ]
        placed = 0
        for decision in self._router.route(pending, [self._load(name) for name in self.serving()]):
            if isinstance(decision, Route):
                number = int(decision.request)
                version = self.replicas[decision.replica].version
                self.broken["placed below its floor"] += version is None or version < self.floor(number)
                self.sessions[number].on = decision.replica
                self.replicas[decision.replica].running.add(number)
                self._residents.placed(number, self.sessions[number].group, decision.replica, _TOKENS)
                placed += 1
        return placed

    def token(self, number: int) -> None:
        """The replica that runs this session makes a token of it, by the weights that it has now."""
        session = self.sessions[number]
        version = self.replicas[session.on or ""].version
        self.broken["token below its floor"] += version is None or version < self.floor(number)
        if session.first is None:
            session.first = version

    def end_turn(self, number: int) -> None:
        """With a token at least; the last turn of the last session ends the group."""
        self.token(number)
        self._stop(number)
        session = self.sessions[number]
        session.turns -= 1
        if not session.turns:
            self._residents.over([number])
        members = self.members[session.group]
        if any(self.sessions[member].turns for member in members):
            return
        oldest = min(self.sessions[member].first or 0 for member in members)
        try:
            self.protocol.occupy(session.group, oldest, tokens=_TOKENS)
        except ProtocolError:
            self.broken["occupy refused a version"] += 1
        self.began[session.group] = oldest
        for member in self.members.pop(session.group):
            del self.sessions[member]
        del self.floors[session.group]

    # ---------------------------------------------------------------- reading

    def serving(self) -> list[str]:
        return [name for name, each in self.replicas.items() if not each.away and each.version is not None]

    def running(self) -> list[int]:
        """Sessions that make tokens now: those of replicas that pull are paused."""
        return [number for each in self.replicas.values() if not each.pulling for number in sorted(each.running)]

    def check(self) -> None:
        """Compare the books."""
        in_flight = len(self.members) + len(self.began)
        self.broken["group lost or doubled"] += in_flight != self.protocol.num_in_flight
        where = Counter(number for each in self.replicas.values() for number in each.running)
        wrong = [n for n, session in self.sessions.items() if where[n] != (session.on is not None)]
        self.broken["request lost or doubled"] += len(wrong) + len(where.keys() - self.sessions.keys())
        kept = {name: self._residents.kept(name) for name in self.replicas}
        self.broken["room kept on who is gone"] += sum(kept.values()) != sum(kept[name] for name in self.serving())
        unfinished = sum(session.turns > 0 for session in self.sessions.values())
        self.broken["room kept for who ended"] += sum(kept.values()) > _TOKENS * unfinished
        limit = (self._eta + 1) * self._batch
        self.broken["too many in flight"] += self.protocol.num_in_flight + self._taken > limit

    def settle(self, steps: int, frozen: str | None = None) -> bool:
        """Let everything go on until ``steps`` more are trained and published, all pulls of ``frozen`` failing.

        Returns:
            False: it does not.
        """
        goal = self.published + steps
        for _ in range(200 * steps):
            self.admit()
            self.route()
            for name, each in self.replicas.items():
                if each.pulling:
                    self.pull_failed(name, breaks=False) if name == frozen else self.pulled(name)
            for number in self.running():
                self.end_turn(number)
            self.begin_pulls()
            if self.may_consume:
                self.consume(self.may_consume)
            if self.may_publish:
                self.publish()
            if self.published >= goal:
                return True
        return False

    # ---------------------------------------------------------------- small things

    def _waiting(self) -> list[int]:
        return [number for number, session in self.sessions.items() if session.on is None and session.turns]

    def _here(self, name: str) -> bool:
        return not self.replicas[name].away

    def _off(self, name: str) -> None:
        replica = self.replicas[name]
        for number in replica.running:
            self.sessions[number].on = None
        replica.running.clear()
        replica.version = None
        self._residents.left([name])
        self._versions.forget([name])

    def _stop(self, number: int) -> None:
        session = self.sessions[number]
        if session.on is not None:
            self.replicas[session.on].running.remove(number)
            session.on = None

    def _weights_of(self, name: str) -> ReplicaWeights:
        each = self.replicas[name]
        return ReplicaWeights(
            replica=name,
            version=each.version,
            pulling=each.pulling,
            running=len(each.running),
            waiting=0,
            failed=each.failed,
        )

    def _load(self, name: str) -> ReplicaLoad:
        each = self.replicas[name]
        held = _TOKENS * len(each.running)
        return ReplicaLoad(
            replica=name,
            version=each.version or 0,
            running=len(each.running),
            waiting=0,
            kv_tokens=held,
            kv_room=max(0, self._cache_tokens - held),
            max_running=_SEATS,
            kept=self._residents.kept(name),
        )
