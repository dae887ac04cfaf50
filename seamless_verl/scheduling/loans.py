"""What lending was worth, in seconds; the same account for every policy.

A loan is all the slices that one decision lent. Of everything generated while it ran, the lent slices made a share;
without them the others would have had to make it, so the loan saved ``duration * share``. The seconds that the trainer
then waited for its gang although it wanted it (its data was there and the slices were called back) are taken off.
Tokens count when their request ends, so a short loan is valued roughly.
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
    before: dict[SliceId, int]
    all_before: int
    tokens: int = 0


@dataclass(slots=True)
class LoanBook:
    _open: dict[int, _Loan] = field(default_factory=dict)
    _closed: list[tuple[int, float | None, int]] = field(default_factory=list)

    def open(self, decision: int, slices: tuple[SliceId, ...], cluster: Cluster) -> None:
        self._open[decision] = _Loan(
            began=cluster.now,
            out=set(slices),
            before={s: cluster.generated[s] for s in slices},
            all_before=sum(cluster.generated.values()),
        )

    def slice_is_back(self, decision: int, slice_id: SliceId, cluster: Cluster) -> None:
        """The slice drained or failed. When it was the last one the loan is over and waits for its grant."""
        loan = self._open.get(decision)
        if loan is None or slice_id not in loan.out:
            return
        loan.out.discard(slice_id)
        loan.tokens += cluster.generated[slice_id] - loan.before[slice_id]
        if loan.out:
            return
        del self._open[decision]
        generated = sum(cluster.generated.values()) - loan.all_before
        saved = (cluster.now - loan.began) * loan.tokens / generated if generated else None
        self._closed.append((decision, saved, loan.tokens))

    def granted(self, late_s: float) -> list[Outcome]:
        """The gang is granted: every loan that is back is settled and pays for the delay."""
        settled = [
            Outcome(
                decision=decision,
                realised_benefit_s=None if saved is None else saved - late_s,
                lent_tokens=tokens,
                late_s=late_s,
            )
            for decision, saved, tokens in self._closed
        ]
        self._closed.clear()
        return settled
