"""Counters of one proxy, for its trainer and for Prometheus.

Plain numbers on one event loop; the Prometheus text is made when somebody asks for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from types import SimpleNamespace

from seamless_verl.trajectory.rows import AuditReport
from seamless_verl.trajectory.tokens import Segment


@dataclass(slots=True, kw_only=True)
class Counters:
    """Totals since the process started; ``in_flight``, ``num_sessions`` and ``resident_bytes`` are levels.

    ``busy_s`` is wall time during which at least one generation was in flight.
    """

    in_flight: int = 0
    num_sessions: int = 0
    resident_bytes: int = 0
    busy_s: float = 0.0
    sessions_opened: int = 0
    sessions_closed: int = 0
    sessions_spilled: int = 0
    sessions_loaded: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    retries_joined: int = 0
    retries_replayed: int = 0
    discarded: int = 0
    rows_audited: int = 0
    rows_alarms: int = 0
    violations: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    drift: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    busy_since: float | None = None

    def generations_started(self, num: int, now: float) -> None:
        if self.in_flight == 0:
            self.busy_since = now
        self.in_flight += num

    def generations_ended(self, num: int, now: float) -> None:
        self.in_flight -= num
        if self.in_flight == 0 and self.busy_since is not None:
            self.busy_s += now - self.busy_since
            self.busy_since = None

    def turn_committed(self, answer: Segment, *, prompt_tokens: int, generated_tokens: int) -> None:
        self.turns += 1
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += generated_tokens
        self.kinds[answer.kind.value] += 1
        self.drift.update(reason.value for reason in answer.reasons)

    def audited(self, report: AuditReport) -> None:
        self.rows_audited += report.num_rows
        self.violations += len(report.violations)

    def snapshot(self, now: float) -> dict[str, object]:
        """All numbers as JSON-compatible data; a busy stretch that is still running counts up to ``now``."""
        running = now - self.busy_since if self.busy_since is not None else 0.0
        values = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "busy_since"}
        plain = {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}
        return {**plain, "busy_s": self.busy_s + running}

    def prometheus_text(self, now: float) -> bytes:
        """The same numbers in Prometheus' text format."""
        from prometheus_client import generate_latest
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        from prometheus_client.metrics_core import Metric

        def _family(name: str, value: object) -> Metric:
            title = f"seamless_proxy_{name}"
            if name in _LEVELS:
                return GaugeMetricFamily(title, _HELP[name], value=float(str(value)))
            if not isinstance(value, dict):
                return CounterMetricFamily(title, _HELP[name], value=float(str(value)))
            family = CounterMetricFamily(title, _HELP[name], labels=["reason"])
            for label, count in value.items():
                family.add_metric([label], count)
            return family

        families = [_family(name, value) for name, value in self.snapshot(now).items()]
        return generate_latest(SimpleNamespace(collect=lambda: families))


_LEVELS = frozenset({"in_flight", "num_sessions", "resident_bytes"})
_HELP = {
    "in_flight": "Generations in flight.",
    "num_sessions": "Sessions that are open, or whose rows nobody has taken yet.",
    "resident_bytes": "Estimated memory of the sessions that are not spilled.",
    "busy_s": "Seconds with at least one generation in flight.",
    "sessions_opened": "Sessions opened.",
    "sessions_closed": "Sessions closed.",
    "sessions_spilled": "Times that an idle session left memory for the journal.",
    "sessions_loaded": "Times that a session came back from the journal.",
    "turns": "Answers committed.",
    "prompt_tokens": "Prompt tokens of committed answers.",
    "generated_tokens": "Generated tokens of committed answers.",
    "retries_joined": "Repeated requests that joined a running generation.",
    "retries_replayed": "Repeated requests that got the recorded answer.",
    "discarded": "Generations whose answer reached nobody.",
    "rows_audited": "Rows compared with the engine's ledger.",
    "rows_alarms": "Sessions that left more rows than the alarm threshold.",
    "violations": "Differences found by the audit; anything but 0 is a bug.",
    "kinds": "Answers by how their request matched the tree.",
    "drift": "Reasons why a request did not match cleanly.",
    "refusals": "Requests refused, by error code.",
    "ignored": "Preferences of requests that could not be honoured, by field.",
}
