"""verl 0.9.1's rule for lending trainer GPUs, as the baseline: `trainer_separate_async.py`, ``enable_switch=True``.

All lendable slices move together. At the end of a step they are lent when

    remaining * per_sample_time * (1 - 1/scaling) > mean(to_rollout costs) + mean(to_trainer costs)

(or when a term is not known yet), where ``remaining`` is what is missing to the threshold; they are taken back when
the threshold is reached. The threshold is a share of the batch, moved up after steps with waiting and down after calm
ones. `GateRule` is the arithmetic, `VerlGate` its use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from seamless_verl.scheduling.cluster import Cluster, ids
from seamless_verl.scheduling.commands import Decision, Verb
from seamless_verl.scheduling.events import AcquireRequested, Event, StepEnded
from seamless_verl.scheduling.slices import SliceState, Switch, Tag


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """verl's ``HybridRolloutSwitchConfig`` with its defaults.

    Attributes:
        poll_interval_s: waiting longer than this in a step counts as idle; verl takes its replay buffer's interval.
    """

    switch_threshold_ratio: float = 0.4
    adaptive_switch_threshold: bool = True
    switch_threshold_step_up: float = 0.05
    switch_threshold_step_down: float = 0.03
    switch_threshold_release_steps: int = 2
    switch_cost_window_size: int = 3
    poll_interval_s: float = 2.0


@dataclass(slots=True)
class GateRule:
    """State and arithmetic of the rule.

    Args:
        batch: groups per step (``data.train_batch_size``).
        mini_batch: groups per local update.
        scaling: (trainer GPUs + rollout GPUs) / rollout GPUs.
    """

    config: GateConfig
    batch: int
    mini_batch: int
    scaling: float
    ratio: float = field(init=False)
    to_rollout: deque[float] = field(init=False)
    to_train: deque[float] = field(init=False)
    waited_s: float = 0.0
    waited_groups: int = 0
    _idle_steps: int = 0
    _calm_steps: int = 0

    def __post_init__(self) -> None:
        self.ratio = self.config.switch_threshold_ratio
        self.to_rollout = deque(maxlen=self.config.switch_cost_window_size)
        self.to_train = deque(maxlen=self.config.switch_cost_window_size)

    def threshold(self) -> int:
        """Groups that must be ready before the trainer takes its GPUs back; at least one mini-batch."""
        return min(max(round(self.ratio * self.batch), self.mini_batch), self.batch)

    def cost_s(self) -> float | None:
        if not self.to_rollout or not self.to_train:
            return None
        return sum(self.to_rollout) / len(self.to_rollout) + sum(self.to_train) / len(self.to_train)

    def step_ended(self, waited_s: float, waited_groups: int) -> None:
        """Learn from the step before the decision is taken."""
        if waited_groups > 0 and waited_s > 0:
            self.waited_s += waited_s
            self.waited_groups += waited_groups
        if self.config.adaptive_switch_threshold:
            self._adapt(waited_s > self.config.poll_interval_s)

    def _adapt(self, had_idle: bool) -> None:
        patience = self.config.switch_threshold_release_steps
        if had_idle:
            self._calm_steps = 0
            self._idle_steps = min(self._idle_steps + 1, patience)
            if self._idle_steps >= patience:
                self.ratio = min(1.0, self.ratio + self.config.switch_threshold_step_up)
            return
        self._idle_steps = 0
        self._calm_steps = min(self._calm_steps + 1, patience)
        if self._calm_steps >= patience:
            # verl writes the floor as 1 / parameter_sync_step, which is 1 / (batch // mini_batch).
            floor = 1.0 / (self.batch // self.mini_batch)
            self.ratio = max(floor, self.ratio - self.config.switch_threshold_step_down)

    def benefit_s(self, ready: int) -> float | None:
        """Seconds that lending saves; None before the trainer ever waited."""
        if self.waited_groups == 0:
            return None
        remaining = max(0, self.threshold() - ready)
        return remaining * (self.waited_s / self.waited_groups) * (1.0 - 1.0 / self.scaling)

    def should_lend(self, ready: int, *, last_step: bool) -> bool:
        if last_step or self.threshold() - ready <= 0:
            return False
        benefit, cost = self.benefit_s(ready), self.cost_s()
        return benefit is None or cost is None or benefit > cost


class VerlGate:
    """`GateRule` on the events of the scheduler: one decision at the end of each step.

    Args:
        batch: groups per step.
        mini_batch: groups per local update.
    """

    def __init__(self, *, batch: int, mini_batch: int, config: GateConfig | None = None) -> None:
        self._rule = GateRule(config or GateConfig(), batch, mini_batch, scaling=1.0)
        self._counted = dict.fromkeys(Switch, 0)
        self._lend: Decision | None = None
        self._threshold = mini_batch

    @property
    def lends_next(self) -> bool:
        """Whether the slices are lent when the step that ended has given them back. verl tells its router so before it
        loads the others."""
        return self._lend is not None and self._lend.verb is Verb.LEND

    def observe(self, event: Event, cluster: Cluster) -> None:
        self._learn_costs(cluster)
        if isinstance(event, StepEnded):
            self._rule.scaling = _scaling(cluster)
            # verl's trainer keeps its gang while it waits, so for its rule both are the same.
            self._rule.step_ended(event.waited_s + event.starved_s, event.waited_groups + event.starved_groups)
            self._lend = self._decision(cluster, last_step=event.last)
        if isinstance(event, AcquireRequested):
            self._threshold = self._rule.threshold()

    def _learn_costs(self, cluster: Cluster) -> None:
        for switch, window in ((Switch.TO_ROLLOUT, self._rule.to_rollout), (Switch.TO_TRAIN, self._rule.to_train)):
            if cluster.costs.counts[switch] > self._counted[switch]:
                self._counted[switch] = cluster.costs.counts[switch]
                window.append(cluster.costs.measured[switch][-1])

    def _decision(self, cluster: Cluster, *, last_step: bool) -> Decision:
        benefit, cost = self._rule.benefit_s(cluster.ready), self._rule.cost_s()
        lend = self._rule.should_lend(cluster.ready, last_step=last_step)
        figures = f"{_seconds(benefit)} {'>' if lend else '<='} cost {_seconds(cost)}"
        return Decision(
            verb=Verb.LEND if lend else Verb.HOLD,
            slices=(),
            reason=f"{cluster.ready} of {self._rule.threshold()} groups ready; benefit {figures}",
            predicted_benefit_s=None if benefit is None or cost is None else benefit - cost,
        )

    def decide(self, cluster: Cluster) -> Iterator[Decision]:
        waiting = cluster.training_request()
        if waiting is not None and cluster.is_due(waiting):
            lent = cluster.shortfall(waiting)
            if lent:
                enough = cluster.ready >= self._threshold
                reason = f"{cluster.ready} of {self._threshold} groups ready"
                yield Decision(verb=Verb.RECLAIM if enough else Verb.WAIT, slices=ids(lent), reason=reason)
            return
        idle = [s for s in cluster.idle(Tag.ROLLOUT) if s.slice.lendable]
        if not idle or self._lend is None:
            return
        verdict = self._lend
        if verdict.verb is Verb.LEND:
            self._lend = None  # once per step
        yield Decision(
            verb=verdict.verb, slices=ids(idle), reason=verdict.reason, predicted_benefit_s=verdict.predicted_benefit_s
        )


def _scaling(cluster: Cluster) -> float:
    """(trainer GPUs + rollout GPUs) / rollout GPUs, of the slices that live."""
    alive = [s.slice for s in cluster if s.state is not SliceState.FAILED]
    standing = sum(len(s.gpus) for s in alive if not s.lendable and Tag.ROLLOUT in s.capabilities)
    lendable = sum(len(s.gpus) for s in alive if s.lendable)
    return (lendable + standing) / standing if standing else float("inf")


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f} s"
