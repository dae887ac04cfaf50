"""What lending was worth, in seconds of the trainer's waiting time; the same account for every policy.

A loan is all the slices that one decision lent. While it runs, the standing slices (never lent) generate at a rate
that is measured; the tokens of the loan divided by that rate are the seconds they would have needed in its place.
The seconds by which the gang was granted after the trainer's data was there are taken off. An upper estimate: standing
slices that were not full could have taken part of the work at less than proportional cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from seamless_verl.scheduling.cluster import Cluster
from seamless_verl.scheduling.decisions import Outcome
from seamless_verl.scheduling.slices import SliceId


@dataclass(slots=True, kw_only=True)
class _Loan:
    began: float
    out: set[SliceId]
    tokens_before: dict[SliceId, int]
    standing_before: int
    tokens: int = 0


@dataclass(slots=True)
class LoanBook:
    _open: dict[int, _Loan] = field(default_factory=dict)
    _closed: dict[int, Outcome] = field(default_factory=dict)

    def open(self, decision: int, slices: tuple[SliceId, ...], cluster: Cluster) -> None:
        self._open[decision] = _Loan(
            began=cluster.now,
            out=set(slices),
            tokens_before={s: cluster.generated[s] for s in slices},
            standing_before=_standing(cluster),
        )

    def slice_is_back(self, decision: int, slice_id: SliceId, cluster: Cluster) -> None:
        """The slice drained or failed. When it was the last one the loan is closed and waits for its grant."""
        loan = self._open.get(decision)
        if loan is None or slice_id not in loan.out:
            return
        loan.out.discard(slice_id)
        loan.tokens += cluster.generated[slice_id] - loan.tokens_before[slice_id]
        if loan.out:
            return
        del self._open[decision]
        rate = (_standing(cluster) - loan.standing_before) / max(cluster.now - loan.began, 1e-9)
        saved = loan.tokens / rate if rate > 0 else None
        self._closed[decision] = Outcome(
            decision=decision, realised_benefit_s=saved, lent_tokens=loan.tokens, late_s=0.0
        )

    def granted(self, late_s: float) -> list[Outcome]:
        """Close the books at a grant (or at the end): every loan that is back pays for the delay once."""
        outcomes = []
        for outcome in self._closed.values():
            saved = outcome.realised_benefit_s
            outcomes.append(
                Outcome(
                    decision=outcome.decision,
                    realised_benefit_s=None if saved is None else saved - late_s,
                    lent_tokens=outcome.lent_tokens,
                    late_s=late_s,
                )
            )
        self._closed.clear()
        return outcomes


def _standing(cluster: Cluster) -> int:
    return sum(tokens for slice_id, tokens in cluster.generated.items() if not cluster[slice_id].slice.lendable)
