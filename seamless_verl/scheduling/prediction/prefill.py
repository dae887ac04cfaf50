"""What it costs that slices have contexts in their caches when they come and go.

    a loan begins with new weights: everything is prefilled in any case, and the lent slices do their share of it
    a loan begins within a step:    only what gains by it moves to the lent slices (`staleness.affinity`)
    slices are taken back:          what they have cached is prefilled by those that stay, who decode nothing meanwhile

256 sessions of 16,000 tokens are 4 million tokens: at 30 us each (an H100, 8 billion parameters) two minutes.

The pace of decoding that plans are made with has the usual prefill in it, also what usual loans cause. So a loan is
charged only where that takes longer than its switches: what is less is no more than a forecast errs by.
"""

from __future__ import annotations

from dataclasses import dataclass

from seamless_verl.scheduling.prediction.course import Crew, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAgain:
    """Tokens that had been in a cache and are prefilled once more, and the seconds that this takes from a loan."""

    tokens: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of_loan(
        cls,
        work: Work,
        standing: Crew,
        joining: Crew,
        left_behind: float,
        *,
        caches_lost: bool,
        usual_s: float,
    ) -> PrefillAgain:
        """What a loan is charged.

        Args:
            left_behind: tokens that the slices which join will have cached when they are taken back.
            caches_lost: the loan begins as new weights go out.
            usual_s: less is not charged.
        """
        seconds = prefill_s(work, left_behind, standing)
        if caches_lost:
            seconds -= prefill_s(work, work.cached, standing) - prefill_s(work, work.cached, standing + joining)
        return cls(tokens=left_behind, seconds=seconds) if seconds > usual_s else cls()

    def __str__(self) -> str:
        """Nothing where it is nothing."""
        if not self.seconds:
            return ""
        return f" and {self.seconds:.2f} s for {self.tokens:.0f} tokens that are prefilled again"


def prefill_s(work: Work, tokens: float, crew: Crew) -> float:
    """Seconds in which a crew that does nothing else prefills so many tokens; 0 without a crew."""
    return tokens * work.prefill_s / crew.power if crew.power else 0.0
