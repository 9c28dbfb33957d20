"""The rates of a run that stand alone in texts, pages, lists, tables and JUnit files. Pure.

The headline rates are those of the steady-state window. A run without such a window has the rates
of its measurement window instead. The rates of the full run are shown in addition, with that name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from loadgen.core.metrics.token_usage import per_gpu
from loadgen.core.metrics.windows import per_second

if TYPE_CHECKING:
    from loadgen.core.metrics.goodput import Goodput
    from loadgen.core.metrics.load import Load
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.token_usage import Tokens

STEADY_STATE_WINDOW = "steady-state window"
MEASUREMENT_WINDOW = "measurement window"


class SummaryWithRates(Protocol):
    """The summary of a run, or of a part of it: a stage, target, request class or model."""

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
        return HeadlineRates(
            requests=load.steady_completed_rps,
            input=tokens.steady_input_per_s,
            output=tokens.steady_output_per_s,
            total=tokens.steady_total_per_s,
            output_per_gpu=tokens.steady_output_per_s_per_gpu,
            goodput=goodput.steady_rps,
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
