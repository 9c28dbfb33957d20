"""The rates that stand alone: in text, pages, lists, tables, JUnit and Prometheus. Pure.

While load was offered (steady), or over the whole window where there was no such time; of an MLPerf result the whole
run is the headline, by its rules. The rates of the whole window stand beside these, and are called "whole run".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from loadgen.core.metrics.blocks import Tokens
    from loadgen.core.metrics.goodput import Goodput
    from loadgen.core.metrics.load import Load


class RatedPart(Protocol):
    """A summary, or that of a stage, target, class or model in it."""

    @property
    def load(self) -> Load: ...
    @property
    def tokens(self) -> Tokens: ...
    @property
    def goodput(self) -> Goodput: ...


class Headline(Struct, frozen=True):
    """Rates per second; None where there is none. `steady`: whether they are those while load was offered."""

    requests: float | None
    output: float | None
    total: float | None
    output_per_gpu: float | None
    goodput: float | None
    steady: bool

    @property
    def window(self) -> str:
        return "while load was offered" if self.steady else "whole run"


def headline(part: RatedPart) -> Headline:
    """The headline rates of a run, or of a part of it."""
    load, tokens, goodput = part.load, part.tokens, part.goodput
    if load.steady_completed_rps is None:
        output, each = tokens.output_per_s, tokens.output_per_s_per_gpu
        return Headline(load.completed_rps, output, tokens.total_per_s, each, goodput.rps, False)
    return Headline(
        load.steady_completed_rps,
        tokens.steady_output_per_s,
        tokens.steady_total_per_s,
        tokens.steady_output_per_s_per_gpu,
        goodput.steady_rps,
        True,
    )
