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


class RatedPart(Protocol):
    """A summary, or the summary of a stage, target, class or model in it."""

    @property
    def load(self) -> Load:
        """The rates and numbers of requests."""

    @property
    def tokens(self) -> Tokens:
        """The numbers and rates of tokens."""

    @property
    def goodput(self) -> Goodput:
        """The requests that met the SLO, and their rates."""


class MeasuredPart(Protocol):
    """A part of a summary that need not have a goodput, such as a step of a task."""

    @property
    def load(self) -> Load:
        """The rates and numbers of requests."""


class Headline(Struct, frozen=True):
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


class WholeRunRates(Struct, frozen=True):
    """The rates per second from the start of the run to the end of its last response."""

    requests: float | None
    output: float | None
    output_per_gpu: float | None


def headline(part: RatedPart) -> Headline:
    """Return the headline rates of a run, or of a part of it."""
    load, tokens, goodput = part.load, part.tokens, part.goodput
    is_steady = has_steady_rates(part)
    if not is_steady:
        return Headline(
            requests=load.completed_rps,
            input=tokens.input_per_s,
            output=tokens.output_per_s,
            total=tokens.total_per_s,
            output_per_gpu=tokens.output_per_s_per_gpu,
            goodput=goodput.rps,
            steady=False,
        )
    return Headline(
        requests=load.steady_completed_rps,
        input=tokens.steady_input_per_s,
        output=tokens.steady_output_per_s,
        total=tokens.steady_total_per_s,
        output_per_gpu=tokens.steady_output_per_s_per_gpu,
        goodput=goodput.steady_rps,
        steady=True,
    )


def has_steady_rates(part: MeasuredPart) -> bool:
    """Return whether there was a steady-state window, so that its rates are known."""
    return part.load.steady_completed_rps is not None


def headline_requests_per_s(part: MeasuredPart) -> float | None:
    """Return the headline rate of completed requests of a part that need not have a goodput."""
    load = part.load
    return load.steady_completed_rps if has_steady_rates(part) else load.completed_rps


def whole_run_rates(summary: Summary) -> WholeRunRates:
    """Return the rates of the whole run, its warm-up and its last responses included."""
    completed = summary.requests.ok + summary.warmup.ok
    output_per_s = summary.tokens.whole_output_per_s
    return WholeRunRates(
        requests=per_second(completed, summary.window.whole),
        output=output_per_s,
        output_per_gpu=per_gpu(output_per_s, summary.target.gpus),
    )
