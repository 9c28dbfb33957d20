"""The metric of a term of a contract, estimated from a sample.

Values of a load are correlated: requests close in time meet the same state of the server. The
effective size of a sample is the number of independent values that would show as much.
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
        sufficient_load_s: The load of all runs that leaves no caveat at the next interim analysis.
            0 if not known.
        load_part: The part of the load that was used, as text. "" for all of it.
        load_s: The length of the load of all runs.
        effective_size: The independent samples of the server in that load, or None if they are not
            known.
    """

    interval: Interval
    sample_count: int
    caveat: str = ""
    sufficient_load_s: float = 0.0
    load_part: str = ""
    load_s: float = 0.0
    effective_size: float | None = None
