"""An MLPerf-style result as text: what was tested, every figure that LoadGen prints, VALID or INVALID with reasons.

Pure: takes an `MlperfResult`, returns a string. The first line says SIMULATED where that is so; the disclosure follows.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from loadgen import format
from loadgen.stats.loadgen_spread import PERCENTILES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from loadgen.mlperf.result import MlperfResult
    from loadgen.stats.loadgen_spread import LoadGenSpread

WIDTH = 100
NAMES = {"server": "Server", "interactive": "Interactive", "offline": "Offline"}


def render(result: MlperfResult, *, gpus: int | None = None, parts: Iterable[str] = (), width: int = WIDTH) -> str:
    """The whole report, ending in a newline. `parts`: lines about each of several targets (`report.text.parts`)."""
    return "\n".join(_lines(result, gpus, tuple(parts), width)) + "\n"


def _lines(result: MlperfResult, gpus: int | None, parts: tuple[str, ...], width: int) -> Iterator[str]:
    mark = "SIMULATED, not a real system: " if result.simulated else ""
    rate = f", target {result.target_qps:,.6g}/s" if result.target_qps else ""
    yield f"{mark}MLPerf-style (unofficial) {NAMES[result.scenario]} · {result.benchmark} · round {result.round}{rate}"
    yield from textwrap.wrap(result.disclosure, width)
    yield ""
    yield from textwrap.wrap(f"Data       {result.dataset}", width, subsequent_indent=" " * 11)
    length = f"{result.scheduled_s:,.3f} s scheduled, {result.min_duration_s:g} s needed"
    if result.scenario == "offline":
        length = f"one query of {result.queries:,} samples"
    yield f"Queries    {result.queries:,} ({result.resolved:,} completed), {length}"
    yield f"Tokens     {result.tokens:,}, {result.one_token_replies:,} one-token replies (counted, left out of TPOT)"
    yield ""
    tokens = result.completed_tokens_per_s
    per_gpu = f" · {format.quantity(tokens / gpus)} per GPU ({gpus})" if gpus and tokens is not None else ""
    if result.scenario == "offline":
        yield f"Samples/s  {format.quantity(result.completed_samples_per_s, 4)}"
        yield f"Tokens/s   {format.quantity(tokens, 4)}{per_gpu}"
    else:
        yield f"Tokens/s   {format.quantity(tokens, 4)} until the last-issued query ended (LoadGen's){per_gpu}"
        whole_run = format.quantity(result.whole_tokens_per_s, 4)
        yield f"           {whole_run} over the whole run, until the last completion"
        yield (
            f"Samples/s  {format.quantity(result.completed_samples_per_s, 4)} completed, "
            f"{format.quantity(result.scheduled_samples_per_s, 4)} scheduled"
        )
    yield ""
    yield from _table(result)
    yield ""
    if parts:
        yield from parts
        yield ""
    if result.checks:
        for check in result.checks:
            value = "a query that never completed" if check.value_ns is None else f"{check.value_ns / 1e6:,.3f} ms"
            loadgen = "passes" if check.met else "fails"
            checker = "passes" if check.checker_met else "fails"
            early_stopping = "passes" if check.early_stopping_met else f"fails, {check.more:,} more queries needed"
            limit = f"limit {check.limit_ns / 1e6:g} ms"
            yield f"{check.metric.upper()} p99  {value}, {limit}: LoadGen {loadgen}, submission checker {checker}"
            yield f"          {check.over:,} of {check.count:,} over the limit: early stopping {early_stopping}"
        yield ""
    yield f"Result     {_standing(result)}"
    yield from _sustained(result, width)
    for reason in result.reasons:
        yield from textwrap.wrap(reason.text, width, initial_indent="  - ", subsequent_indent="    ")
    if result.valid and not result.checker_valid:
        yield "  - VALID for LoadGen at exactly a limit; the submission checker asks for less than the limit"
    for note in result.notes:
        yield from textwrap.wrap(note, width, initial_indent="  note: ", subsequent_indent="    ")


def _standing(result: MlperfResult) -> str:
    if not result.valid:
        return "INVALID"
    if not result.rules_only:
        return "VALID" if result.scenario == "offline" else "VALID, and sustained"
    return "VALID by the rules only: " + ("NOT sustained" if result.sustained is False else "not shown to be sustained")


def _sustained(result: MlperfResult, width: int) -> Iterator[str]:
    """Whether the rate can go on for ever, and what would show it."""
    if result.sustained_why:
        yield from textwrap.wrap(result.sustained_why, width, initial_indent="  - ", subsequent_indent="    ")
    if result.sustained is False and result.valid:
        text = (
            "a queue grows: a longer run at this rate would miss the limits. --find-peak finds a rate that is sustained"
        )
        yield from textwrap.wrap(text, width, initial_indent="  - ", subsequent_indent="    ")
    elif result.rules_only and result.longer_minutes is not None:
        text = (
            f"to show that it is sustained takes a run twice as long, {result.longer_minutes:,.0f} minutes: "
            "--find-peak --sustain"
        )
        yield from textwrap.wrap(text, width, initial_indent="  - ", subsequent_indent="    ")
    if result.rules_qps is not None and result.target_qps is not None:
        yield f"  - highest rate by the rules, in runs of the official length: {result.rules_qps:,.4g}/s"


def _table(result: MlperfResult) -> Iterator[str]:
    head = ("ms", *(f"p{p * 100:g}" for p in PERCENTILES), "mean", "max")
    rows = [
        (name, *_cells(spread))
        for name, spread in (("TTFT", result.ttft), ("TPOT", result.tpot), ("Latency", result.latency))
        if spread is not None
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = [f"{cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True)]
        yield f"{row[0]:<{max(widths[0], 9)}}  " + "  ".join(cells)


def _cells(spread: LoadGenSpread) -> list[str]:
    values = (*spread.percentiles, spread.mean, spread.max)
    return ["-" if value is None else f"{value / 1e6:,.3f}" for value in values]
