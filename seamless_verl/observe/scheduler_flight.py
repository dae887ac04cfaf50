"""A scheduler that is recorded: what goes in, what comes out, why, and what became of every slice.

Four names stand in both vocabularies, `SliceAdded`, `RequestStarted`, `StepEnded` and `WeightsPublished`, each for the
same fact: in `scheduling.events` with what a scheduler decides by, in `flight` with what a reader of the run wants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from seamless_verl.observe import flight
from seamless_verl.scheduling import commands as cmd
from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.scheduler import Scheduler
from seamless_verl.scheduling.slices import ACTIVE_TAG, Slice, SliceId, SliceState


class RecordedScheduler:
    """Stands in for its scheduler.

    Requests are recorded as what the scheduler was told of them (`flight.SchedulerInput`); the ledger takes them from
    those who make them.

    Args:
        record: takes the events; `FlightRecorder.record` in a live run.
        policy: name that decisions are recorded under.
        addresses: rollout server on each slice, where requests name servers; looked up anew when a slice returns.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        record: Callable[[flight.FlightEvent], None],
        *,
        policy: str,
        addresses: Mapping[SliceId, str] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._record = record
        self._policy = policy
        self._addresses = addresses or {}
        self._states: dict[SliceId, SliceState] = {}

    def handle(self, event: ev.Event) -> tuple[cmd.Command, ...]:
        """As `Scheduler.handle`."""
        given = self._scheduler.handle(event)
        self._record(flight.SchedulerInput(at=event.at, name=type(event).__name__, fields=plain_fields(event)))
        if isinstance(event, ev.SliceAdded):
            self._announce(event.at, event.slice, event.state)
        elif isinstance(event, ev.SliceReturned):  # its server may have another address now
            status = self._scheduler.cluster[event.slice]
            self._announce(event.at, status.slice, status.state)
        elif isinstance(event, ev.WeightsPublished):
            self._record(flight.WeightsPublished(at=event.at, version=event.version))
        for command in given:
            self._record(self._of_command(event.at, command))
        if not isinstance(event, ev.REQUEST_EVENTS):
            self._moves(event)
        return given

    def _announce(self, at: float, slice_: Slice, state: SliceState) -> None:
        self._states[slice_.id] = state
        self._record(
            flight.SliceAdded(
                at=at,
                slice=slice_.id,
                pool=slice_.pool,
                devices=len(slice_.gpus),
                capabilities=tuple(sorted(tag.value for tag in slice_.capabilities)),
                state=state,
                address=self._addresses.get(slice_.id, ""),
            )
        )

    def _of_command(self, at: float, command: cmd.Command) -> flight.FlightEvent:
        if isinstance(command, cmd.RecordDecision):
            decision = command.decision
            return flight.DecisionMade(
                at=at,
                decision=str(command.number),
                policy=self._policy,
                action=decision.verb.value,
                reason=decision.reason,
                slices=decision.slices,
                predicted_s=_plain(decision.predicted_benefit_s),
            )
        if isinstance(command, cmd.RecordOutcome):
            outcome = command.outcome
            return flight.DecisionRealised(
                at=at,
                decision=str(outcome.decision),
                realised_s=outcome.realised_benefit_s,
                lent_tokens=outcome.lent_tokens,
                late_s=outcome.late_s,
            )
        return flight.SchedulerCommand(at=at, name=type(command).__name__, fields=plain_fields(command))

    def _moves(self, event: ev.Event) -> None:
        for status in self._scheduler.cluster:
            if self._states.get(status.slice.id) is status.state:
                continue
            self._states[status.slice.id] = status.state
            tag = ACTIVE_TAG[status.state]
            self._record(
                flight.SliceMoved(
                    at=event.at,
                    slice=status.slice.id,
                    state=status.state,
                    tag=tag.value if tag is not None else "",
                    reason=type(event).__name__,
                )
            )


def plain_fields(record: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON-compatible data, its time left out."""
    return {spec.name: _plain(getattr(record, spec.name)) for spec in fields(record) if spec.name != "at"}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return plain_fields(value)
    if isinstance(value, Set):
        return sorted(_plain(item) for item in value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None  # a batch that would never get ready; JSON has no word for it
    return value
