"""An MLPerf-style result as text and on the page of its run: what was tested, LoadGen's figures, VALID or INVALID.

Pure: takes an `MlperfResult`, returns strings. The first line says SIMULATED where that is so; the disclosure follows.
Text and page take tokens/s from one place (`rates`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from loadgen.core import format
from loadgen.core.metrics import blocks
from loadgen.core.slo import promise
from loadgen.core.stats.loadgen_spread import PERCENTILES
from loadgen.mlperf.log_files import checker_text
from loadgen.mlperf.result import MlperfResult
from loadgen.present import table
from loadgen.present.table import wrapped

INDENT = " " * 11


def render(result: MlperfResult, *, gpus: int | None = None, parts: Iterable[str] = ()) -> str:
    """The whole report, ending in a newline. `parts`: lines about each of several targets (`report.text.parts`)."""
    return "\n".join(_lines(result, gpus, tuple(parts))) + "\n"


def _lines(result: MlperfResult, gpus: int | None, parts: tuple[str, ...]) -> Iterator[str]:
    mark = "SIMULATED, not a real system: " if result.simulated else ""
    rate = f", target {result.target_qps:,.6g}/s" if result.target_qps else ""
    test = f"{result.scenario.capitalize()} · {result.benchmark} · round {result.round}"
    yield f"{mark}MLPerf-style (unofficial) {test}{rate}"
    yield from wrapped(result.disclosure)
    yield ""
    yield from wrapped(f"Data       {result.dataset}", rest=INDENT)
    length = f"{result.scheduled_s:,.3f} s scheduled, {result.min_duration_s:g} s needed"
    if result.scenario == "offline":
        length = f"one query of {format.counted(result.queries, 'sample')}"
    yield f"Queries    {result.queries:,} ({result.resolved:,} completed), {length}"
    yield f"Tokens     {result.tokens:,}, {result.one_token_replies:,} one-token replies (counted, left out of TPOT)"
    yield ""
    tokens, samples = rates(result, gpus)
    per_gpu = f" · {tokens.per_gpu}" if tokens.per_gpu else ""
    if result.scenario == "offline":
        yield f"Samples/s  {samples.value}"
        yield f"Tokens/s   {tokens.value}{per_gpu}"
    else:
        yield f"Tokens/s   {tokens.value} {tokens.window}{per_gpu}"
        whole_run = format.quantity(result.whole_tokens_per_s, 4)
        yield f"           {whole_run} over the whole run, until the last completion"
        yield (f"Samples/s  {samples.value} completed, {format.quantity(result.scheduled_samples_per_s, 4)} scheduled")
    yield ""
    yield from _latencies(result)
    yield ""
    if parts:
        yield from (*parts, "")
    if result.checks:
        for check, row in zip(result.checks, limits(result)[1], strict=True):
            _, value, loadgen, checker, over, early_stopping = row
            limit = f"limit {check.limit_ns / 1e6:g} ms"
            yield f"{check.metric.upper()} p99  {value}, {limit}: LoadGen {loadgen}, submission checker {checker}"
            yield f"          {over} over the limit: early stopping {early_stopping}"
        yield ""
    yield from wrapped(checker_text(result), rest=INDENT)
    yield f"Result     {_standing(result)}"
    for sentence in (*_sustained(result), *(reason.text for reason in result.reasons)):
        yield from wrapped(sentence, "  - ", "    ")
    if result.valid and not result.checker_valid:
        yield "  - VALID for LoadGen at exactly a limit; the submission checker asks for less than the limit"
    for note in result.notes:
        yield from wrapped(note, "  note: ", "    ")


def _standing(result: MlperfResult) -> str:
    if not result.valid:
        return "INVALID"
    if not result.rules_only:
        return "VALID" if result.scenario == "offline" else "VALID, and sustained"
    return f"VALID by the rules only: {'NOT sustained' if result.sustained is False else 'not held for twice as long'}"


def _sustained(result: MlperfResult) -> Iterator[str]:
    """Whether the rate can go on for ever, and what would show it."""
    if result.sustained_why:
        yield f"in this run: {result.sustained_why}" if result.sustained is None else result.sustained_why
    if result.sustained is False and result.valid:
        yield (
            "a queue grows: a longer run at this rate would miss the limits. --find-peak finds a rate that is sustained"
        )
    elif result.rules_only and result.longer_minutes is not None:
        yield (
            f"whether it goes on, a run twice as long shows, {result.longer_minutes:,.0f} minutes: "
            "--find-peak --sustain"
        )
    if result.rules_qps is not None and result.target_qps is not None:
        yield f"highest rate by the rules, in runs of the official length: {result.rules_qps:,.4g}/s"


class Rate(NamedTuple):
    """A rate of LoadGen's as it is printed: its value, the window it covers, and its part of one GPU."""

    value: str
    window: str
    per_gpu: str


def rates(result: MlperfResult, gpus: int | None) -> tuple[Rate, Rate]:
    """Output tokens/s and samples/s."""
    offline = result.scenario == "offline"
    window = "until the last completion" if offline else "until the last-issued query ended (LoadGen's)"
    tokens, samples = result.completed_tokens_per_s, result.completed_samples_per_s
    one_gpu = blocks.per_gpu(tokens, gpus)
    per_gpu = f"{format.quantity(one_gpu)} per GPU ({gpus})" if one_gpu is not None else ""
    return Rate(format.quantity(tokens, 4), window, per_gpu), Rate(format.quantity(samples, 4), window, "")


def sentence(result: MlperfResult) -> str:
    """The verdict of the rules in one sentence."""
    test = f"MLPerf-style {result.scenario.capitalize()}, {result.benchmark}, round {result.round}, unofficial"
    if result.valid:
        return f"{test}: VALID."
    return f"{test}: INVALID. {'; '.join(reason.text for reason in result.reasons)}."


def limits(result: MlperfResult) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and rows of a table of the limits, with early stopping. No rows in Offline, which has no limit."""
    head = ("limit", "came out", "LoadGen", "submission checker", "over the limit", "early stopping")
    rows: list[tuple[str, ...]] = []
    for check in result.checks:
        value = "a query that never completed" if check.value_ns is None else f"{check.value_ns / 1e6:,.3f} ms"
        rows.append(
            (
                promise(check.metric, 0.99, check.limit_ns / 1e6),
                value,
                "passes" if check.met else "fails",
                "passes" if check.checker_met else "fails",
                f"{check.over:,} of {check.count:,}",
                "passes" if check.early_stopping_met else f"fails, {check.more:,} more queries needed",
            )
        )
    return head, rows


def _latencies(result: MlperfResult) -> list[str]:
    head = ("ms       ", *(f"p{p * 100:g}" for p in PERCENTILES), "mean", "max")
    rows = []
    for name, spread in (("TTFT", result.ttft), ("TPOT", result.tpot), ("Latency", result.latency)):
        if spread is not None:
            values = (*spread.percentiles, spread.mean, spread.max)
            rows.append((name, *(format.NONE if value is None else f"{value / 1e6:,.3f}" for value in values)))
    return table.text(head, rows)
