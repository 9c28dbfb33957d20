"""The rates of a run that stand alone in texts, pages, lists, tables and JUnit files. Pure.

The headline rates are those of the steady-state window. A run without such a window has the rates
of its measurement window instead. The rates of the full run are shown in addition, with that name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from loadgen.core import format
from loadgen.core.metrics.token_usage import per_gpu
from loadgen.core.metrics.windows import per_second
from loadgen.core.stats.quantiles import NEEDED_SAMPLES

if TYPE_CHECKING:
    from loadgen.core.metrics.goodput import Goodput
    from loadgen.core.metrics.load import Load
    from loadgen.core.metrics.request_counts import RequestCounts
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.token_usage import Tokens

STEADY_STATE_WINDOW = "steady-state window"
MEASUREMENT_WINDOW = "measurement window"

MIN_REQUESTS_OF_RATE = NEEDED_SAMPLES["p50"]
"""A rate that rests on fewer requests is explained, if more requests than these succeeded."""


class SummaryWithRates(Protocol):
    """The summary of a run, or of a part of it: a stage, target, request class or model."""

    @property
    def requests(self) -> RequestCounts:
        """The numbers of requests by their outcome."""

    @property
    def load(self) -> Load:
        """The rates and numbers of requests."""

    @property
    def tokens(self) -> Tokens:
        """The numbers and rates of tokens."""

    @property
    def goodput(self) -> Goodput:
        """The requests that met the SLO, and their rates."""


class SummaryWithLoad(Protocol):
    """The summary of a run or of a part of it that need not have a goodput, such as a step."""

    @property
    def load(self) -> Load:
        """The rates and numbers of requests."""


class HeadlineRates(Struct, frozen=True):
    """The headline rates per second; a rate is None if it is unknown.

    `steady` is False if the run has no steady-state window, so that the rates are those of the
    measurement window.

    The rates of requests are None if requests succeeded, but none of them ended in the window. Such
    a run is too short to have a rate: 0 would look as if the server had completed nothing.
    """

    requests: float | None
    input: float | None
    output: float | None
    total: float | None
    output_per_gpu: float | None
    goodput: float | None
    steady: bool

    @property
    def window(self) -> str:
        """The name of the window that the rates cover."""
        return STEADY_STATE_WINDOW if self.steady else MEASUREMENT_WINDOW


class FullRunRates(Struct, frozen=True):
    """The rates per second from the start of the run to the end of its last response."""

    requests: float | None
    output: float | None
    output_per_gpu: float | None


def select_headline_rates(summary: SummaryWithRates) -> HeadlineRates:
    """Return the throughput of a run where a report has room for one value of each rate.

    A run has rates for several windows of time. These are the rates in the steady-state window, or
    those in the measurement window if the run is too short to have a steady state.
    """
    load = summary.load
    tokens = summary.tokens

    goodput = summary.goodput
    if has_steady_rates(summary):
        is_too_short = _ends_after_window(summary)
        return HeadlineRates(
            requests=None if is_too_short else load.steady_completed_rps,
            input=tokens.steady_input_per_s,
            output=tokens.steady_output_per_s,
            total=tokens.steady_total_per_s,
            output_per_gpu=tokens.steady_output_per_s_per_gpu,
            goodput=None if is_too_short else goodput.steady_rps,
            steady=True,
        )

    return HeadlineRates(
        requests=load.completed_rps,
        input=tokens.input_per_s,
        output=tokens.output_per_s,
        total=tokens.total_per_s,
        output_per_gpu=tokens.output_per_s_per_gpu,
        goodput=goodput.rps,
        steady=False,
    )


def _ends_after_window(summary: SummaryWithRates) -> bool:
    """Return whether requests succeeded, but all of them ended after the steady-state window."""
    return summary.load.steady_completed_rps == 0 and summary.requests.ok > 0


def describe_late_ends(summary: Summary) -> str:
    """Return that too few of the successful requests ended in the window of the headline rates.

    For example: "only 3 of 20 ended in the 975 ms of load". Return "" if enough of them did,
    as in every run that is long compared with its requests.
    """
    steady_rps = summary.load.steady_completed_rps
    window_s = summary.window.steady.duration_s
    if steady_rps is None or window_s is None:
        return ""

    ended_in_window = round(steady_rps * window_s)
    is_enough = ended_in_window >= min(MIN_REQUESTS_OF_RATE, summary.requests.ok)
    if is_enough:
        return ""

    number = f"only {ended_in_window:,}" if ended_in_window else "none"
    return f"{number} of {summary.requests.ok:,} ended in the {format.duration(window_s)} of load"


def has_steady_rates(summary: SummaryWithLoad) -> bool:
    """Return whether there was a steady-state window, so that its rates are known."""
    return summary.load.steady_completed_rps is not None


def select_requests_per_s(summary: SummaryWithLoad) -> float | None:
    """Return the headline rate of completed requests. The summary need not have a goodput."""
    load = summary.load
    return load.steady_completed_rps if has_steady_rates(summary) else load.completed_rps


def compute_full_run_rates(summary: Summary) -> FullRunRates:
    """Return the rates of the whole run, its warm-up and its last responses included."""
    completed = summary.requests.ok + summary.warmup.ok
    output_per_s = summary.tokens.whole_output_per_s
    return FullRunRates(
        requests=per_second(completed, summary.window.full_run),
        output=output_per_s,
        output_per_gpu=per_gpu(output_per_s, summary.target.gpus),
    )
