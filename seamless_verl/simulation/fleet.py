"""All slices as hardware: what each is used for, and which replica gets which request."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable
from dataclasses import replace

from seamless_verl.decode_cost import TURN_TOKENS, EnginePace
from seamless_verl.simulation.books import Account, Use
from seamless_verl.simulation.clock import Clock
from seamless_verl.simulation.replica import EnginePhysics, Replica, Request
from seamless_verl.staleness.affinity import Newcomers, requests_to_move
from seamless_verl.staleness.cache_aware import CacheAware, Residents
from seamless_verl.staleness.router import Router
from seamless_verl.staleness.routing import PendingRequest, ReplicaLoad, Route
from seamless_verl.staleness.synchronisation import ReplicaWeights

_OFFERED = 64  # requests, where the others would wait anyway


class Unit:
    """One slice: its account, its replica, and what it is used for when it does not generate."""

    def __init__(self, clock: Clock, account: Account, replica: Replica) -> None:
        self.account = account
        self.replica = replica
        self.accepting = False
        self.lent = False  # it will be taken back
        self._clock = clock
        self._use: Use | None = Use.WAIT_DATA  # None: generating, the replica keeps the books
        self._since = clock.now

    @property
    def serving(self) -> bool:
        return self._use is None

    def turn_to(self, use: Use) -> None:
        """From now on the time is spent on ``use``."""
        if self._use is None:
            self.replica.close()
            self.accepting = False
        else:
            self.charge()
        self._use, self._since = use, self._clock.now

    def pause(self, *, keep: bool) -> None:
        """The slice stands still to take newer weights, until `serve`; requests that come wait here.

        Args:
            keep: those that run go on with the cache that they have.
        """
        self.replica.close(keep=keep)
        self._use, self._since = Use.SYNC, self._clock.now

    def serve(self, version: int) -> None:
        """From now on the replica generates with weights of ``version``."""
        self.charge()
        self._use = None
        self.replica.version = version
        self.accepting = True
        self.replica.open()

    def charge(self) -> None:
        """Bring the account to the present."""
        if self._use is None:
            self.replica.advance()
        else:
            self.account.charge(self._use, self._clock.now - self._since)
            self._since = self._clock.now


class Fleet:
    """All replicas, and the router in front of them.

    Args:
        router: places and moves requests, by the rules of a live run.
        rebalance: running requests move to replicas that join, as far as that pays.
        is_long: whether a request will probably last longer than slices are lent.
        lowest_version: of the weights that a request may run on (`PendingRequest.version`).
        started, stopped: told of every request that a slice gets, and loses (whether it was finished).
    """

    def __init__(
        self,
        clock: Clock,
        router: Router,
        *,
        rebalance: bool,
        is_long: Callable[[Request], bool],
        lowest_version: Callable[[Request], int],
        started: Callable[[Request, str], None],
        stopped: Callable[[Request, str, bool], None],
        finished: Callable[[Request], None],
    ) -> None:
        self.units: dict[str, Unit] = {}
        self.migrated = 0
        self._clock = clock
        self.router = router
        self._rebalance = rebalance
        self._newcomers = Newcomers(router.price)
        self._is_long = is_long
        self._lowest = lowest_version
        self._started = started
        self._stopped = stopped
        self._finished = finished
        self._held: dict[str, tuple[Request, PendingRequest]] = {}
        self._holds = 0
        self._home: dict[object, str] = {}  # sessions stay where their cache is
        self._residents = Residents() if isinstance(router.policy, CacheAware) else None
        self._running: set[object] = set()  # sessions
        self._turns = self._generated = 0

    def add(self, name: str, *, gpus: int, trainable: bool, physics: EnginePhysics) -> Unit:
        account = Account(name=name, gpus=gpus, trainable=trainable)
        replica = Replica(name, self._clock, physics, account, self._on_finish, oldest_first=self.router.oldest_first)
        unit = self.units[name] = Unit(self._clock, account, replica)
        return unit

    @property
    def num_held(self) -> int:
        return len(self._held)

    def submit(self, requests: Iterable[Request]) -> None:
        """Place requests now, or hold them until a place is worth taking."""
        homeless = []
        for request in requests:
            self._make_room(request)
            home, floor = self._home.get(request.owner), self._lowest(request)
            if home is not None and self._takes(home, floor) and not request.done:
                if self._newcomers:
                    home = self._newcomers.place_of(home, request.context, self._requests(floor))
                self._place(request, self.units[home])
            else:
                homeless.append(request)
        if homeless:
            for request in homeless:
                self._holds += 1
                name, tokens = str(self._holds), round(request.context + request.done)
                version = self._lowest(request)
                near = self._residents.near(request.owner, None) if self._residents else ""
                pending = PendingRequest(request=name, version=version, arrival=request.age, tokens=tokens, near=near)
                self._held[name] = (request, pending)
            self.pump()

    def _make_room(self, request: Request) -> None:
        """Sessions whose caches do not fit beside this one, which has grown, lose their places."""
        home = self._home.get(request.owner)
        if self._residents and home is not None:
            cache = self.units[home].replica.physics.kv_tokens
            for owner in self._residents.grown(request.owner, request.context, cache, self._running.__contains__):
                self._home.pop(owner, None)

    def withdraw(self, request: Request) -> None:
        """Give a request up, wherever it runs or waits; what it generated is lost."""
        replica, request.replica = request.replica, None
        if replica is None:
            self._held = {name: entry for name, entry in self._held.items() if entry[0] is not request}
            return
        replica.remove(request)
        self._running.discard(request.owner)
        self._stopped(request, replica.name, False)
        self.forget(request.owner)

    def pump(self) -> None:
        """Ask the router about everything that is held."""
        if not self._held:
            return
        names = [name for name, unit in self.units.items() if unit.accepting]
        if not names:
            return
        offered = list(self._held)
        if self._residents:  # there nobody overtakes: the others would wait, too
            offered = heapq.nsmallest(
                _OFFERED, offered, key=lambda name: (self._held[name][1].version, self._held[name][1].arrival)
            )
        held = {name: self._held.pop(name) for name in offered}
        pending = [replace(waiting, long=self._is_long(request)) for request, waiting in held.values()]
        routes = 0
        for decision in self.router.policy.route(pending, [self._load(name) for name in names]):
            if isinstance(decision, Route):
                routes += 1
                self._place(held[decision.request][0], self.units[decision.replica])
            else:
                self._held[decision.request] = held[decision.request]
        if routes == _OFFERED:
            self.pump()

    def vacate(self, name: str) -> None:
        """Interrupt everything on a slice (tokens kept) and place it elsewhere."""
        unit = self.units[name]
        unit.accepting = False
        self._home = {owner: home for owner, home in self._home.items() if home != name}
        self._newcomers.left([name])
        if self._residents:
            self._residents.left([name])
        self._release(unit.replica.take_all())

    def joined(self, name: str) -> None:
        """A slice serves from now on, with an empty cache; those of the others are valid."""
        self._newcomers.joined([name])

    def emptied(self, name: str) -> None:
        """A slice took new weights by itself."""
        self._newcomers.emptied([name])

    def caches_lost(self) -> None:
        """New weights empty the cache of every slice."""
        self._newcomers.caches_lost()

    def spread(self, names: Iterable[str], version: int) -> None:
        """Slices that take weights of ``version``, or wake up to join them: what is on them and what is held is placed
        anew among all that will serve, and waits there. No session has a home any more."""
        requests = []
        self._home.clear()
        self._newcomers.caches_lost()
        if self._residents:
            self._residents.caches_lost()
        for name in names:
            unit = self.units[name]
            requests += unit.replica.take_all()
            unit.accepting = True
            unit.replica.version = version
        self._release(requests)
        self.pump()

    def even_out(self) -> None:
        """Replicas have come or taken other weights: place what waits, and move what runs if the system does that."""
        self.pump()
        newest = max((unit.replica.version for unit in self.units.values() if unit.accepting), default=0)
        empty = [name for name, unit in self.units.items() if self._takes(name, newest) and not unit.replica.load]
        if self._rebalance and empty:
            loads = [self._load(name) for name, unit in self.units.items() if unit.accepting]
            requests = []
            for name, count in requests_to_move(loads, empty, self.router.price).items():
                requests += self.units[name].replica.share(count)
            if self._residents:
                for request in requests:
                    self._residents.moved(request.owner)
            self._release(requests)
        for _ in range(len(self.units)):
            if not self._migrate():
                break

    def _migrate(self) -> bool:
        rule = self.router.migration
        if rule is None:
            return False
        loads = [self._load(name) for name, unit in self.units.items() if unit.accepting]
        if len(loads) < 2:
            return False
        taken = []
        for command in rule.migrations(loads, self.router.cost):
            taken += self.units[command.replica].replica.take(command.count)
        self.migrated += len(taken)
        self._release(taken)
        return bool(taken)

    def forget(self, owner: object) -> None:
        """A session has ended."""
        self._home.pop(owner, None)
        if self._residents:
            self._residents.over([owner])
            self.pump()

    def idle(self, name: str) -> bool:
        return self.units[name].replica.load == 0

    def accounts(self) -> list[Account]:
        """The books of all slices, brought to the present."""
        for unit in self.units.values():
            unit.charge()
        return [unit.account for unit in self.units.values()]

    def _release(self, requests: list[Request]) -> None:
        for request in requests:
            assert request.replica is not None
            self._stopped(request, request.replica.name, False)
            request.replica = None
            request.prefix = request.context if request.done else request.prefix
            self._home.pop(request.owner, None)
            self._running.discard(request.owner)
            if self._residents:
                self._residents.displaced(request.owner)
        self.submit(requests)

    def _place(self, request: Request, unit: Unit) -> None:
        self._home[request.owner] = unit.replica.name
        self._newcomers.placed(request.owner, unit.replica.name)
        self._running.add(request.owner)
        if self._residents:
            self._residents.placed(request.owner, None, unit.replica.name, round(request.context + request.done))
        self._started(request, unit.replica.name)
        unit.replica.submit(request)

    def _on_finish(self, request: Request) -> None:
        assert request.replica is not None
        name = request.replica.name
        request.replica = None
        self._running.discard(request.owner)
        self._turns += 1
        self._generated += request.tokens
        self._stopped(request, name, True)
        self._finished(request)
        if self._held:
            self.pump()
        self._migrate()

    def versions(self) -> list[int]:
        """Versions of the slices that serve."""
        return [unit.replica.version for unit in self.units.values() if unit.accepting]

    def wanted(self) -> int | None:
        """The highest version that a held request needs and no slice has."""
        best = max(self.versions(), default=-1)
        floors = (waiting.version for _, waiting in self._held.values())
        return max((floor for floor in floors if floor > best), default=None)

    def weights(self, pulling: Container[str]) -> list[ReplicaWeights]:
        """Slices that serve, for the rule that says who takes newer weights."""
        return [
            ReplicaWeights(
                replica=name,
                version=unit.replica.version,
                pulling=name in pulling,
                running=unit.replica.num_running,
                waiting=len(unit.replica.waiting),
            )
            for name, unit in self.units.items()
            if unit.accepting
        ]

    def _takes(self, name: str, floor: int) -> bool:
        return self.units[name].accepting and self.units[name].replica.version >= floor

    def _requests(self, floor: int) -> dict[str, int]:
        return {name: unit.replica.load for name, unit in self.units.items() if self._takes(name, floor)}

    def _load(self, name: str) -> ReplicaLoad:
        """As a live router sees it: what a replica that wakes or loads weights will begin at once does not queue."""
        replica = self.units[name].replica
        running, kv = replica.num_running, round(replica.kv)
        if not self.units[name].serving:
            running = min(replica.load, replica.physics.max_running)
        return ReplicaLoad(
            replica=name,
            version=replica.version,
            running=running,
            waiting=replica.load - running,
            kv_tokens=kv,
            kv_room=replica.physics.kv_tokens - kv,
            max_running=replica.physics.max_running,
            lent=self.units[name].lent,
            kept=self._residents.kept(name) if self._residents else 0,
            pace=EnginePace(
                decode=replica.physics.decode,
                prefill_s_per_token=replica.physics.prefill_s_per_token,
                turn_tokens=self._generated / self._turns if self._turns else TURN_TOKENS,
            )
            if self._residents
            else None,
        )
