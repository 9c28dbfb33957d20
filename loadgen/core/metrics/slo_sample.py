"""The requests that an SLO is judged by, and how many of them count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.core.limits import NO_SPAN_SHARE
from loadgen.core.metrics.outcomes import is_undecided

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loadgen.core.limits import ValidityLimits
    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.slo import Slo, Term
    from loadgen.core.stats.histogram import Histogram


@dataclass(frozen=True)
class SloSample:
    """The requests that an SLO is judged by.

    Attributes:
        accumulator: The requests, with their SLO.
        gaps: The gaps between output events of these requests.
        unrecorded: The number of requests that have no record, for example because their worker
            died. They count as misses.
        withheld_metrics: Metrics whose terms cannot be decided, because their values are withheld
            or not known, with the reason.
        limits: The limits of a valid run.
        counts_dropped: Whether requests that the client did not send, because too many were in
            flight, count as misses. They do not count if the question is whether the server alone
            misses the SLO.
    """

    accumulator: MetricAccumulator
    gaps: Histogram
    unrecorded: int
    withheld_metrics: Mapping[str, str]
    limits: ValidityLimits
    counts_dropped: bool = True

    @property
    def slo(self) -> Slo | None:
        """The SLO of these requests, or None if it has no terms on requests."""
        slo = self.accumulator.slo
        if slo is None or (not slo.terms and slo.goodput_share is None):
            return None
        return slo

    @property
    def not_cancelled(self) -> int:
        """The number of requests without cancelled ones, and without dropped ones if ignored."""
        recorded = self.accumulator.sum("recorded")
        ignored = self.accumulator.sum("cancelled")
        if not self.counts_dropped:
            ignored += self.accumulator.sum("dropped")
        return recorded + self.unrecorded - ignored

    @property
    def unfinished(self) -> int:
        """Unfinished requests that are not known to be over the limit of a term."""
        return self.accumulator.sum("unfinished") - self.accumulator.sum("unfinished_misses")

    @property
    def counted(self) -> int:
        """The requests that the SLO counts, as good or as a miss."""
        return self.not_cancelled - self.unfinished

    @property
    def has_too_many_unfinished(self) -> bool:
        """Whether more requests are unfinished than leave a term decided."""
        return is_undecided(self.accumulator.sum("unfinished"), self.not_cancelled)

    def count_without_tpot(self, term: Term) -> int:
        """Return the number of responses without a time per output token (TPOT).

        A response has no TPOT if all of its tokens came at one instant, or without text. Return 0
        if the term limits another metric, or if only a negligible share of the ok responses has no
        TPOT.
        """
        if term.metric != "tpot":
            return 0

        responses_at_one_instant = self.accumulator.sum("tpot_no_span")
        responses_without_text = self.accumulator.sum("tpot_no_output")
        without_tpot = responses_at_one_instant + responses_without_text

        negligible_count = NO_SPAN_SHARE * self.accumulator.sum("ok")
        is_negligible = without_tpot <= negligible_count
        return 0 if is_negligible else without_tpot
