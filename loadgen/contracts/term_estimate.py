"""The metric of a term of a contract, estimated from a sample.

The values of a load are correlated, because requests close in time meet the same state of the
server. The effective sample size is the number of independent values that would give an equally
precise estimate.
"""

from __future__ import annotations

from typing import NamedTuple

from loadgen.core.stats.intervals import Interval


class TermEstimate(NamedTuple):
    """The metric of a term, estimated from a sample.

    Attributes:
        interval: The metric with its confidence interval. An evaluator returns it in the unit of
            the term's limit.
        sample_count: The number of requests (or prompts, tasks, events) behind it.
        caveat: Why the interval is bounded on one side only, or "" if it is not.
        sufficient_load_s: The load of all runs that leaves no caveat at the next interim analysis,
            in seconds. 0 if it is not known.
        load_description: The part of the load that was used, as text. "" for all of it.
        load_s: The length of the load of all runs in seconds. 0 without a load.
        effective_size: The effective sample size of that load, counted in independent
            observations of the server. None if it is not known.
    """

    interval: Interval
    sample_count: int
    caveat: str = ""
    sufficient_load_s: float = 0.0
    load_description: str = ""
    load_s: float = 0.0
    effective_size: float | None = None
