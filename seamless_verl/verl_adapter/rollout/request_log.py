"""The requests of a rollout worker's process: what each did, and how those of one prompt are cut short.

    _run_agent_loop ─ session ─► request routed ─► request ended ─►  …  ─► session ended      (in the worker)
                                        └──────────── take() ─► scheduler.handle              (in the trainer)

No call leaves the worker per request. Nothing is kept before the first `take`. Times are wall
clock: workers may be on other machines, and the kernel needs durations of requests, not an exact order.
"""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput

from seamless_verl.observe import flight
from seamless_verl.observe.recording import FlightRecorder
from seamless_verl.scheduling.events import Ending, Event, RequestFinished, RequestStarted, SessionFinished, SliceFailed
from seamless_verl.scheduling.slices import SliceId, Tag

FIRST_TOKEN = "seamless_first_token_s"
"""Among the extra fields of a replica's output: seconds from when it had the request."""
VERSION_SPANS = "version_spans"
"""There, too: ``[(weight version, tokens), …]`` in the order of generation."""
PART = "part"
"""Why an output has no more tokens: they are not made yet."""
_MAX_EVENTS = 100_000  # a trainer that does not come back costs forecasts, not memory

_session: ContextVar[tuple[str, str] | None] = ContextVar("scheduled_session", default=None)


class RequestLog:
    """What requests did, as events of the scheduling kernel, kept until the trainer's process fetches them.

    One per process. ``slice`` of an event is the server's address, which the trainer translates.

    Attributes:
        ring: called when the trainer should come and fetch.
        over: told the conversations of a session that has ended.
    """

    def __init__(self) -> None:
        self.ring: Callable[[], None] = lambda: None
        self.over: Callable[[list[str]], None] = lambda conversations: None
        self._wanted = False
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._names: dict[str, tuple[str, str]] = {}
        self._began: dict[str, int] = {}  # session -> when, in ms
        self._floors: dict[str, int] = {}  # group -> oldest version that may make the first tokens of its sessions
        self._made_by: dict[str, tuple[int, int]] = {}  # session -> oldest and newest version of its tokens

    @contextmanager
    def session(self, group: str, index: int, *, trained: bool = True) -> Iterator[None]:
        """Requests made within (and in tasks started within) belong to this attempt at a prompt.

        Args:
            trained: whether its rows are for the trainer; what validation generates may be of another length.
        """
        key = (group, f"{group}_{index}")
        token = _session.set(key)
        began_ms = self._began[key[1]] = _now_ms()
        self._made_by.pop(key[1], None)
        cut = not trained
        try:
            yield
        except asyncio.CancelledError:
            cut = True
            raise
        finally:
            _session.reset(token)
            if self._began.get(key[1]) == began_ms:  # else it was started anew meanwhile
                del self._began[key[1]]
                self._made_by.pop(key[1], None)
            over = [name for name, known in self._names.items() if known == key]
            for name in over:
                del self._names[name]
            self.over(over)
            self._keep(SessionFinished(at=time.time(), session=key[1], group=group, cut=cut))

    def name(self, request_id: str) -> None:
        """Generations asked for under ``request_id`` belong to the session at hand, from any task (the proxy's)."""
        key = _session.get()
        if key is not None:
            self._names.setdefault(request_id, key)

    def session_of(self, request_id: str) -> str:
        """What the session is called that ``request_id`` is asked for in the events that are taken here."""
        return (self._names.get(request_id) or _session.get() or ("", request_id))[1]

    def group_of(self, request_id: str) -> str:
        """The prompt that ``request_id`` is asked for, ``""`` where nobody said."""
        group, _ = self._names.get(request_id) or _session.get() or ("", "")
        return group

    def began_ms(self, request_id: str) -> int:
        """Unix time at which the session began that ``request_id`` is asked for; now, where nobody said."""
        _, session = self._names.get(request_id) or _session.get() or ("", "")
        return self._began.get(session) or _now_ms()

    def reserve(self, floors: Mapping[str, int]) -> None:
        """Prompts are rolled out from now on, each with weights of its version or newer ones only."""
        self._floors |= floors

    def release(self, group: str) -> None:
        """Forget the floor of ``group``, which has ended."""
        self._floors.pop(group, None)

    def floor(self, request_id: str) -> int:
        """The oldest version that may make the next token: that of the session's first one (V_traj), before there is
        one that of the prompt's reservation."""
        group, session = self._names.get(request_id) or _session.get() or ("", "")
        made_by = self._made_by.get(session)
        return made_by[0] if made_by else self._floors.get(group, 0)

    def newest(self, request_id: str) -> int:
        """The newest version that has made tokens of the session; 0 before there are any."""
        _, session = self._names.get(request_id) or _session.get() or ("", "")
        return self._made_by.get(session, (0, 0))[1]

    def generated(self, request_id: str, versions: Sequence[int]) -> None:
        """Weights of these versions have made tokens; of turns asked for at the same time the oldest one counts."""
        _, session = self._names.get(request_id) or _session.get() or ("", "")
        if versions and session in self._began:
            all_of_them = [*versions, *self._made_by.get(session, ())]
            self._made_by[session] = (min(all_of_them), max(all_of_them))

    def started(self, request: str, request_id: str, server: str, context_tokens: int) -> None:
        self.name(request_id)
        group, _ = self._names.get(request_id, ("", ""))
        self._keep(
            RequestStarted(
                at=time.time(),
                request=request,
                session=self.session_of(request_id),
                group=group,
                slice=SliceId(server),
                context_tokens=context_tokens,
            )
        )

    def finished(self, request: str, tokens: int, ending: Ending) -> None:
        self._keep(RequestFinished(at=time.time(), request=request, tokens=tokens, ending=ending))

    def died(self, server: str, reason: str) -> None:
        """A request found its replica dead."""
        self._keep(SliceFailed(at=time.time(), slice=SliceId(server), reason=reason, lost=frozenset({Tag.ROLLOUT})))
        self.ring()

    def take(self) -> list[Event]:
        """What happened since the last call."""
        self._wanted = True
        events = list(self._events)
        self._events.clear()
        return events

    def _keep(self, event: Event) -> None:
        if self._wanted:
            self._events.append(event)


class CutGroups:
    """Ends the generations of a prompt where they are (StaleFlow's treatment of stragglers).

        trainer ─ cut_groups ─► cut ─► abort the requests under way ─► the client keeps their tokens, asks for no more

    What a multi-turn agent asks for after that gets a single token each time, so that it comes to its end soon. Groups
    are prompts, by uid.
    """

    def __init__(self) -> None:
        self._cut: set[str] = set()
        self._under_way: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)

    @contextmanager
    def running(self, group: str, abort: Callable[[], None]) -> Iterator[None]:
        """A request of ``group`` runs; ``abort`` ends it with the tokens it has."""
        self._under_way[group].append(abort)
        try:
            yield
        finally:
            self._under_way[group].remove(abort)
            if not self._under_way[group]:
                del self._under_way[group]

    def cut(self, groups: Sequence[str]) -> None:
        """End the requests of these groups; one that its replica has not begun yet is missed, so call this again."""
        for group in groups:
            self._cut.add(group)
            for abort in self._under_way.get(group, ()):
                abort()

    def is_cut(self, group: str) -> bool:
        return group in self._cut

    def forget(self, group: str) -> None:
        """``group`` has ended."""
        self._cut.discard(group)


request_log = RequestLog()
cut_groups = CutGroups()
at_worker_end = AsyncExitStack()
"""Closed by the rollout worker at its end; each part that lives as long as this process registers its clean-up."""


@functools.cache
def this_worker() -> str:
    """The rollout worker that this process is, by the id of its actor; empty: it is none."""
    return (ray.get_runtime_context().get_actor_id() or "") if ray.is_initialized() else ""


def role_of_worker(worker: str) -> str:
    """What the name of its recording begins with."""
    return f"rollout-{worker[:12]}" if worker else "rollout"


@functools.cache
def recorder_of_process(run_dir: str | None, role: str) -> FlightRecorder:
    """One recorder per process and role, made on first use: verl pickles clients before they reach their process."""
    return FlightRecorder(Path(run_dir) if run_dir else None, role)


def recorder_of_worker(run_dir: str | None) -> FlightRecorder:
    """The recorder of this rollout worker."""
    return recorder_of_process(run_dir, role_of_worker(this_worker()))


class ReplicaCall:
    """One ``LLMServerClient.generate``: where it runs, and under which name.

    Args:
        request_id: what the caller calls the conversation.
        prompt_tokens: tokens sent, those of earlier calls included.
        resumed: an earlier call was interrupted.

    Attributes:
        num_told: tokens that it told of before its end; what there is of a replica that died.
        engine_name: what the replica calls the request; ``""``: it has not been named yet.
        in_parts: wraps the replica's handle, so that it tells of tokens before its end; None: it does not.
        address, server: of the replica that was chosen; None before.
    """

    _current: ContextVar[ReplicaCall | None] = ContextVar("replica_call", default=None)

    def __init__(self, recorder: FlightRecorder, request_id: str, *, prompt_tokens: int, resumed: bool) -> None:
        self._recorder = recorder
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        self._resumed = resumed
        self._request = uuid.uuid4().hex
        self._asked = recorder.now()
        self.engine_name = ""
        self.address: str | None = None
        self.server: Any = None
        self.num_told = 0
        self.in_parts: Callable[[Any], Any] | None = None
        self._output: TokenOutput | None = None

    @classmethod
    def current(cls) -> ReplicaCall | None:
        """The one of this task."""
        return cls._current.get()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Stands around the call; `routed` and `answered` are called within. What became of it is written down."""
        token = self._current.set(self)
        failure: str | None = None
        try:
            yield
        except BaseException as error:
            failure = type(error).__name__
            raise
        finally:
            self._current.reset(token)
            if self.address is not None:
                self._ended(self.address, failure)

    def routed(self, address: str, server: Any = None) -> None:
        """The replica that it runs on from now on."""
        self.address, self.server = address, server
        request_log.started(self._request, self._request_id, address, self._prompt_tokens)
        now = self._recorder.now()
        self._recorder.record(
            flight.RequestStarted(
                at=now,
                request=self._request,
                slice=address,
                prompt_tokens=self._prompt_tokens,
                resumed=self._resumed,
                session=self._request_id,
                waited_s=now - self._asked,
            )
        )

    def answered(self, output: TokenOutput) -> None:
        self._output = output

    def _ended(self, address: str, failure: str | None) -> None:
        output = self._output
        tokens = len(output.token_ids) if output is not None else self.num_told
        extra = output.extra_fields if output is not None else {}
        request_log.finished(self._request, tokens, _ending(output))
        self._recorder.record(
            flight.RequestEnded(
                at=self._recorder.now(),
                request=self._request,
                slice=address,
                tokens=tokens,
                finish=failure or (str(output.stop_reason) if output is not None else "replica_died"),
                cached_tokens=extra.get("num_cached_tokens"),
                version=extra.get("global_steps"),
                first_token_s=extra.pop(FIRST_TOKEN, None),
            )
        )


def _ending(output: TokenOutput | None) -> Ending:
    if output is None:
        return Ending.FAILED
    return Ending.INTERRUPTED if output.stop_reason in ("abort", "aborted") else Ending.COMPLETED


def _now_ms() -> int:
    return int(time.time() * 1000)
