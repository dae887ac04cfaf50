"""Which files of ours one loan passes under ``predictive``: from its decision to the grant that ends it.

The scheduler, its policy, the driver, the slices and the recorder are those of a live run, built by the same functions;
only verl's replicas, router and checkpoint engine are fakes (`tests.replicas`), and agents are a list of requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from benchmarks.house_trace import Trace
from seamless_verl.config import SchedulerConfig
from seamless_verl.observe.flight import DecisionMade, FlightEvent
from seamless_verl.observe.recording import FlightRecorder
from seamless_verl.observe.scheduler_flight import RecordedScheduler
from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.declaration import policy_of
from seamless_verl.scheduling.scheduler import Scheduler
from seamless_verl.scheduling.slices import Gpu, Slice, SliceId, SliceState, Tag
from seamless_verl.verl_adapter.slices import slice_driver
from tests.replicas import fake_slices, given

_GROUPS, _SESSIONS = 8, 4
_SHORT, _LONG = 200, 1500  # tokens; the first session of every fourth group is long
_TRAIN_S, _SWITCH_S, _TICK_S = 4.0, 0.2, 0.05
_STEPS = 3  # what is lent at the end of the last one is traced until it is back


@dataclasses.dataclass(slots=True)
class _Session:
    name: str
    group: str
    left: float
    request: str = ""
    made: float = 0.0


class Loan:
    """A run of a few steps on virtual time: one slice that trains and rolls out, one that only rolls out.

    A slice with n requests gives each of them a token every ``0.01 + 0.002 * n`` seconds.
    """

    def __init__(self, recorder: FlightRecorder) -> None:
        self.now = 0.0
        self.lent: list[DecisionMade] = []
        self._recorder = recorder
        self._running: dict[str, list[_Session]] = {"t/0": [], "r/0": []}
        self._reports: list[ev.Event] = []
        self._open: dict[str, int] = {}
        self._ready = self._step = self._requests = 0
        policy = policy_of(SchedulerConfig(policy="predictive"), batch=_GROUPS, mini_batch=_GROUPS)
        self._scheduler = Scheduler(policy)
        self._slices, self._router = fake_slices(["t/0"], ["r/0"], self._switch)
        self._driver = slice_driver.SliceDriver(
            RecordedScheduler(self._scheduler, self._record, policy="predictive"),
            self._scheduler.cluster,
            self._slices,
            clock=lambda: self.now,
            fetch=self._fetch,
            warn=print,
        )
        self._driver.tell(ev.WeightsPublished(at=0.0, version=0))
        for name, tags in (("t/0", frozenset(Tag)), ("r/0", frozenset({Tag.ROLLOUT}))):
            slice_ = Slice(id=SliceId(name), pool=name[0], gpus=(Gpu(node=name, index=0),), capabilities=tags)
            self._driver.tell(ev.SliceAdded(at=0.0, slice=slice_, state=SliceState.ROLLOUT, version=0))

    def submit(self) -> None:
        """Another batch of prompts."""
        self._step += 1
        groups = [f"{self._step}.{number}" for number in range(_GROUPS)]
        self._driver.tell(ev.GroupsSubmitted(at=self.now, groups=tuple(groups), sessions=_SESSIONS))
        for number, group in enumerate(groups):
            self._open[group] = _SESSIONS
            for member in range(_SESSIONS):
                tokens = _LONG if number % 4 == 0 and member == 0 else _SHORT + 40 * number
                self._start(_Session(f"{group}.{member}", group, tokens))

    def train(self) -> None:
        """Ask for the gang, wait for it while agents go on, train, publish, release."""
        request = f"step-{self._step}"
        asked = ev.AcquireRequested(
            at=self.now, request=request, tag=Tag.TRAIN, count=1, minimum=_GROUPS, batch=_GROUPS
        )
        self._driver.tell(asked)
        while request not in self._driver.granted:
            self._pass(_TICK_S)
        self._ready -= _GROUPS
        self._pass(_TRAIN_S)
        self._driver.tell(
            ev.StepEnded(at=self.now, step=self._step),
            ev.WeightsPublished(at=self.now, version=self._step),
            ev.Released(at=self.now, request=request),
        )

    def _pass(self, seconds: float) -> None:
        for _ in range(round(seconds / _TICK_S)):
            self._generate(_TICK_S)
        self._driver.tell_requests()
        self._driver.tell(ev.GroupsReady(at=self.now, ready=self._ready, in_flight=len(self._open)))
        self._driver.tick()

    def _generate(self, seconds: float) -> None:
        self.now += seconds
        for sessions in self._running.values():
            tokens = seconds / (0.01 + 0.002 * len(sessions))
            for session in list(sessions):
                session.made += tokens
                if session.made >= session.left:
                    sessions.remove(session)
                    self._finish(session)

    def _start(self, session: _Session) -> None:
        place = min(sorted(self._router.on_it), key=lambda name: len(self._running[name]))
        self._running[place].append(session)
        self._requests += 1
        session.request, session.made = f"q{self._requests}", 0.0
        self._reports.append(
            ev.RequestStarted(
                at=self.now,
                request=session.request,
                session=session.name,
                group=session.group,
                slice=SliceId(place),
                context_tokens=50,
            )
        )

    def _finish(self, session: _Session) -> None:
        self._reports += [
            ev.RequestFinished(at=self.now, request=session.request, tokens=round(session.left)),
            ev.SessionFinished(at=self.now, session=session.name, group=session.group),
        ]
        self._open[session.group] -= 1
        if not self._open[session.group]:
            del self._open[session.group]
            self._ready += 1

    def _switch(self, address: str, what: str) -> None:
        """verl's part of the slice is told something: weights take time, interrupted requests go on elsewhere."""
        if what == "weights":
            self._generate(_SWITCH_S)
        if what == "abort":
            moved, self._running[address] = self._running[address], []
            for session in moved:
                made = round(session.made)
                ended = ev.Ending.INTERRUPTED
                self._reports.append(
                    ev.RequestFinished(at=self.now, request=session.request, tokens=made, ending=ended)
                )
                session.left -= made
                self._start(session)

    def _record(self, event: FlightEvent) -> None:
        self._recorder.record(event)
        if isinstance(event, DecisionMade) and event.action == "lend":
            self.lent.append(event)

    def _fetch(self) -> list[ev.Event]:
        found, self._reports = self._reports, []
        return found


def loan_files() -> list[str]:
    """Files whose functions run for the loan, and those that define what it is told in.

    Raises:
        RuntimeError: nothing was lent, or not by prediction.
    """
    trace = Trace()
    trace.begin()  # the recorder's thread is traced from its start or not at all
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(FlightRecorder(Path(folder), "loan")) as recorder:
        run = Loan(recorder)
        clock = mock.patch.object(slice_driver, "time", SimpleNamespace(time=lambda: run.now))
        with clock, given():
            run.submit()
            for _ in range(_STEPS):
                run.submit()  # a batch ahead: somebody generates while the trainer trains
                trace.begin()
                run.lent.clear()
                run.train()
            run.submit()
            run.train()
        time.sleep(0.5)  # the recorder's thread writes
        trace.stop()
    if not run.lent or run.lent[0].predicted_s is None:
        raise RuntimeError(f"nothing was lent by prediction: {run.lent}")
    modules = {name.rpartition(".")[0] for name in trace.types}
    defining = {Path(str(sys.modules[name].__file__)) for name in modules if name in sys.modules}
    package = Path(str(sys.modules["seamless_verl"].__file__)).parent
    return sorted({*trace.files, *(str(path.relative_to(package)) for path in defining)})


if __name__ == "__main__":
    print("\n".join(loan_files()))
