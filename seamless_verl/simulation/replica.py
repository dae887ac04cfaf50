"""One inference engine with continuous batching, as processor sharing in virtual time.

All running requests advance by one token per decode step, so one counter of steps serves for all of them: a request
with L tokens to go, admitted at count c, ends at c + L. Between two events the number n of running requests is
constant and the cache grows by n tokens per step, hence a step's time is linear in the count and the time of d steps
is ``a*d + k*(kv*d + n*d*d/2)``: solved in closed form. Cost per event: O(log n), whatever the lengths.

Prefill delays everybody on the engine by its own duration, as chunked prefill does when compute is the limit.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from math import sqrt

from seamless_verl.decode_cost import DecodeCost
from seamless_verl.simulation.books import Account, Use
from seamless_verl.simulation.clock import Clock
from seamless_verl.staleness.affinity import queued_to_move

_EPSILON = 1e-6  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePhysics:
    """One replica as hardware.

    Attributes:
        decode: cost of a decode step.
        prefill_s_per_token: seconds of the whole replica per prefilled token.
        kv_tokens: tokens that its cache holds.
        max_running: requests decoded at once.
    """

    decode: DecodeCost
    prefill_s_per_token: float
    kv_tokens: int
    max_running: int = 1024


def slower(cost: DecodeCost, factor: float) -> DecodeCost:
    """Every decode step takes ``factor`` times as long."""
    return DecodeCost(**{spec.name: factor * getattr(cost, spec.name) for spec in fields(DecodeCost)})


@dataclass(slots=True, eq=False)
class Request:
    """One generation: ``context`` tokens are there before it, ``tokens`` are to be generated.

    Attributes:
        owner: whose turn it is; the key of its prefix in the cache.
        prefix: tokens of the context that some engine has computed before (prefilling them is waste).
        age: in the order of age; those of the oldest session first.
        place: in the queue of an engine, the lowest first.
        version: weights that generated its first token; None before.
        done: tokens generated in earlier admissions; ``base`` of them on earlier replicas.
        number: of the present admission; an older entry in a heap is void.
        start, end: decode steps of its replica at which this admission began and will have all tokens.
        alive: it is decoded.
    """

    owner: Hashable
    context: int
    tokens: int
    prefix: int = 0
    age: tuple[int, int] = (0, 0)
    place: tuple[int, int] = (0, 0)
    version: int | None = None
    done: float = 0.0
    base: float = 0.0
    replica: Replica | None = None
    number: int = 0
    start: float = 0.0
    end: float = 0.0
    alive: bool = False


class Replica:
    """One inference engine with continuous batching.

    Args:
        on_finish: called with a request that has all its tokens.
        account: charged for every second in which `advance` is called, i.e. while the slice has the rollout tag.
        oldest_first: waiting requests are served in the order of their age, and a full cache preempts the youngest
            (vLLM's ``priority``); else they are served as they came, and it preempts the one admitted last (``fcfs``).
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        physics: EnginePhysics,
        account: Account,
        on_finish: Callable[[Request], None],
        *,
        oldest_first: bool = False,
    ) -> None:
        self.name = name
        self.physics = physics
        self.version = 0
        self.slowdown = 1.0
        self.num_running = 0
        self.kv = 0.0
        self.preemptions = 0
        self.generated = 0.0
        self.waiting: list[Request] = []  # in the order of their places
        self._oldest_first = oldest_first
        self._submitted = 0
        self._clock = clock
        self._account = account
        self._on_finish = on_finish
        self._running: list[tuple[float, int, Request]] = []
        self._admitted: list[tuple[tuple[int, int], int, Request]] = []  # who is preempted last comes first
        self._parked: dict[Hashable, int] = {}
        self._parked_tokens = 0
        self._count = 0.0
        self._prefill = self._prefill_again = 0.0
        self._since = 0.0
        self._timer = 0
        self._numbers = 0
        self._serving = False

    # ---------------------------------------------------------------- what the fleet asks

    @property
    def load(self) -> int:
        return self.num_running + len(self.waiting)

    def open(self) -> None:
        """Begin (or go on) to serve; time is charged from now on."""
        self._since = self._clock.now
        self._serving = True
        self._admit()
        self._set_timer()

    def close(self, *, keep: bool = False) -> None:
        """Stop serving. Running requests stay where they are; all is prefilled again later, unless their cache is kept.

        Caches of sessions without a running request are lost in either case: a new request cannot use them.
        """
        self.advance()
        self._serving = False
        self._timer += 1
        self._parked.clear()
        self._parked_tokens = 0
        if not keep:
            self._prefill, self._prefill_again = 0.0, self.kv * self.physics.prefill_s_per_token

    def set_slowdown(self, factor: float) -> None:
        """From now on decode steps take ``factor`` times as long; the past must have been charged."""
        self.slowdown = factor
        self._set_timer()

    def submit(self, request: Request) -> None:
        request.replica = self
        self.advance()
        self._submitted += 1
        request.place = request.age if self._oldest_first else (self._submitted, 0)
        self._queue(request)
        if self._serving:
            self._admit()
            self._set_timer()

    def take_all(self) -> list[Request]:
        """Interrupt everything; requests keep their tokens. The order is that of admission, the queue last."""
        self.advance()
        taken = [request for _, number, request in self._admitted if request.alive and request.number == number]
        taken.sort(key=lambda request: request.number)
        for request in taken:
            self._stop(request)
        taken += self.waiting
        self.waiting.clear()
        self._running.clear()
        self._admitted.clear()
        self.kv, self._prefill, self._prefill_again = 0.0, 0.0, 0.0
        self._set_timer()
        return taken

    def take(self, count: int) -> list[Request]:
        """Interrupt ``count`` requests, the waiting ones first, then those that a full cache would preempt."""
        self.advance()
        taken = [self.waiting.pop() for _ in range(min(count, len(self.waiting)))]
        while len(taken) < count and self.num_running:
            taken.append(self._preempt())
        self._admit()
        self._set_timer()
        return taken

    def share(self, count: int) -> list[Request]:
        """Give ``count`` requests to a replica with free seats: waiting ones first, old and young alike."""
        places = set(queued_to_move(count, len(self.waiting)))
        if not places:
            return self.take(count)
        self.advance()
        taken = [request for index, request in enumerate(self.waiting) if index in places]
        self.waiting = [request for index, request in enumerate(self.waiting) if index not in places]
        self._admit()
        self._set_timer()
        return taken

    def remove(self, request: Request) -> None:
        """Give up one request that runs or waits here."""
        self.advance()
        if request.alive:
            self._stop(request)
        else:
            self.waiting.remove(request)
        self._admit()
        self._set_timer()

    def advance(self) -> None:
        """Bring the engine to the present and charge the time."""
        elapsed = self._clock.now - self._since
        if elapsed <= 0 or not self._serving:
            return
        self._since = self._clock.now
        if self._prefill_again or self._prefill:
            elapsed = self._pay_prefill(elapsed)
            if elapsed <= 0:
                return
        if not self.num_running:
            self._account.charge(Use.WAIT_WORK, elapsed)
            return
        self._account.charge(Use.GENERATE, elapsed)
        steps = self._steps_in(elapsed)
        self._count += steps
        self.kv += steps * self.num_running
        self.generated += steps * self.num_running

    # ---------------------------------------------------------------- time and tokens

    def _pay_prefill(self, elapsed: float) -> float:
        again = min(elapsed, self._prefill_again)
        fresh = min(elapsed - again, self._prefill)
        self._prefill_again -= again
        self._prefill -= fresh
        self._account.charge(Use.PREFILL_AGAIN, again)
        self._account.charge(Use.PREFILL, fresh)
        return elapsed - again - fresh

    def _rate(self) -> tuple[float, float]:
        """(a, k): a decode step over kv tokens takes a + k * kv seconds."""
        cost = self.physics.decode
        fixed = cost.attention_base_s + max(cost.floor_s, cost.base_s + cost.per_request_s * self.num_running)
        return fixed * self.slowdown, cost.attention_per_token_s * self.slowdown

    def _steps_in(self, seconds: float) -> float:
        fixed, per_token = self._rate()
        linear = fixed + per_token * self.kv
        quadratic = per_token * self.num_running / 2
        if quadratic * seconds < 1e-12 * linear * linear:
            return seconds / linear
        return (sqrt(linear * linear + 4 * quadratic * seconds) - linear) / (2 * quadratic)

    def _seconds_for(self, steps: float) -> float:
        fixed, per_token = self._rate()
        return steps * (fixed + per_token * (self.kv + self.num_running * steps / 2))

    def _set_timer(self) -> None:
        """Wake up when the next request ends or the cache is full."""
        self._timer += 1
        if not self._serving or not self.num_running:
            return
        running = self._running
        while not self._runs(running[0][2], running[0][1]):
            heapq.heappop(running)
        steps = min(running[0][0] - self._count, (self.physics.kv_tokens - self.kv) / self.num_running)
        wait = self._prefill + self._prefill_again + self._seconds_for(max(steps, 0.0))
        self._clock.after(wait, self._wake, self._timer)

    def _wake(self, timer: int) -> None:
        if timer != self._timer:
            return
        self.advance()
        finished = []
        running = self._running
        while running and running[0][0] <= self._count + _EPSILON:
            _, number, request = heapq.heappop(running)
            if self._runs(request, number):
                finished.append(request)
                self._stop(request)
                request.done = request.tokens
                self._park(request)
        while self.num_running > 1 and self.kv >= self.physics.kv_tokens - _EPSILON * self.num_running:
            self.preemptions += 1
            self._queue(self._preempt())
        self._admit()
        self._set_timer()
        for request in finished:
            self._on_finish(request)

    # ---------------------------------------------------------------- in and out

    def _queue(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda waiting: waiting.place)

    def _admit(self) -> None:
        while self.waiting and self.num_running < self.physics.max_running:
            request = self.waiting[0]
            cached = self._parked.get(request.owner, 0)
            size = request.context + request.done
            if self.num_running and self.kv + size > 0.97 * self.physics.kv_tokens:
                return
            self.waiting.pop(0)
            if cached:
                del self._parked[request.owner]
                self._parked_tokens -= cached
            self._start(request, size, cached)

    def _start(self, request: Request, size: float, cached: int) -> None:
        per_token = self.physics.prefill_s_per_token
        again = max(0.0, request.prefix + request.done - cached)
        self._prefill_again += again * per_token
        self._prefill += max(0.0, size - cached - again) * per_token
        self._numbers += 1
        request.number, request.alive = self._numbers, True
        request.start, request.end = self._count, self._count + request.tokens - request.done
        if request.version is None:
            request.version = self.version
        self.num_running += 1
        self.kv += size
        self._make_room()
        heapq.heappush(self._running, (request.end, request.number, request))
        insort(self._admitted, (request.age if self._oldest_first else (request.number, 0), request.number, request))
        if len(self._admitted) > 64 + 4 * self.num_running:
            self._admitted = [entry for entry in self._admitted if self._runs(entry[2], entry[1])]

    def _stop(self, request: Request) -> None:
        request.alive = False
        self.num_running -= 1
        self.kv -= request.context + request.done + self._count - request.start
        request.done = min(float(request.tokens), request.done + self._count - request.start)
        if not self.num_running:
            self.kv = 0.0

    def _preempt(self) -> Request:
        while True:
            _, number, request = self._admitted.pop()
            if self._runs(request, number):
                self._stop(request)
                return request

    def _runs(self, request: Request, number: int) -> bool:
        """Whether the request still runs under its admission of this ``number``."""
        return request.alive and request.number == number and request.replica is self

    def _park(self, request: Request) -> None:
        """Keep the request's cache for its session's next turn, until another request needs the room."""
        tokens = request.context + request.tokens
        self._parked_tokens += tokens - self._parked.pop(request.owner, 0)
        self._parked[request.owner] = tokens
        self._make_room()

    def _make_room(self) -> None:
        while self._parked and self.kv + self._parked_tokens > self.physics.kv_tokens:
            owner = next(iter(self._parked))
            self._parked_tokens -= self._parked.pop(owner)
