"""A scripted edge: it answers commands when a test says so."""

from __future__ import annotations

from typing import TypeVar

from seamless_verl.scheduling import commands as cm
from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.policies import Policy
from seamless_verl.scheduling.scheduler import Scheduler
from seamless_verl.scheduling.slices import Gpu, Slice, SliceId, SliceState, Tag

C = TypeVar("C", bound=cm.Command)

BOTH = frozenset(Tag)
ROLLOUT = frozenset({Tag.ROLLOUT})
TRAIN = frozenset({Tag.TRAIN})


def make_slice(name: str, capabilities: frozenset[Tag] = BOTH) -> Slice:
    return Slice(id=SliceId(name), pool="p", gpus=(Gpu(node=name, index=0),), capabilities=capabilities)


class World:
    """Holds a scheduler and the commands it gave; `do` hands in an event, `answer` completes what is outstanding."""

    def __init__(self, policy: Policy, **slices: frozenset[Tag]) -> None:
        self.scheduler = Scheduler(policy)
        self.at = 0.0
        self.log: list[cm.Command] = []
        self.open: dict[str, cm.LendSlice | cm.DrainSlice | cm.SyncWeights] = {}
        self.do(ev.WeightsPublished(at=0.0, version=0))
        for name, capabilities in slices.items():
            self.do(ev.SliceAdded(at=0.0, slice=make_slice(name, capabilities)))

    def do(self, event: ev.Event) -> list[cm.Command]:
        self.at = event.at
        commands = list(self.scheduler.handle(event))
        self.log += commands
        for command in commands:
            if isinstance(command, (cm.LendSlice, cm.DrainSlice, cm.SyncWeights)):
                self.open[command.slice] = command
        return commands

    def answer(self, after_s: float = 1.0) -> list[cm.Command]:
        """Complete every outstanding command; what came of it."""
        given: list[cm.Command] = []
        self.at += after_s
        outstanding, self.open = self.open, {}
        for command in outstanding.values():
            if isinstance(command, cm.DrainSlice):
                given += self.do(ev.SliceDrained(at=self.at, slice=command.slice, command=command.command))
            else:
                version = command.version or 0
                ready = ev.SliceReady(at=self.at, slice=command.slice, command=command.command, version=version)
                given += self.do(ready)
        return given

    def state(self, name: str) -> SliceState:
        return self.scheduler.cluster[SliceId(name)].state

    def given(self, kind: type[C]) -> list[C]:
        return [command for command in self.log if isinstance(command, kind)]
