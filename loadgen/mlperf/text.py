"""An MLPerf-style result as text and on the page of its run: what was tested, LoadGen's figures, VALID or INVALID.

Pure: takes an `MlperfResult`, returns strings. The first line says SIMULATED where that is so; the disclosure follows.
Text and page take tokens/s from one place (`rates`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from loadgen.core import format
from loadgen.core.metrics import blocks
from loadgen.core.slo import promise
from loadgen.core.stats.loadgen_spread import PERCENTILES
from loadgen.mlperf.log_files import checker_text
from loadgen.mlperf.result import DISCLOSURE, MlperfResult
from loadgen.present import page, table
from loadgen.present.additions import Addition
from loadgen.present.page import Number, Page
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


# -- on the page of a run, and on that of a search for a peak ----------------------------------------------------------


def mark(disclosure: str = DISCLOSURE) -> tuple[str, str]:
    """The disclosure as a mark for the top of a page."""
    word, _, meaning = disclosure.partition(": ")
    return word, meaning


def addition(result: MlperfResult, gpus: int | None) -> Addition:
    """What the result adds to the run, or to the search, whose folder it is in."""
    tokens, _ = rates(result, gpus)
    said = ", ".join(filter(None, (f"{tokens.value} output tokens/s {tokens.window}", tokens.per_gpu)))
    return Addition(
        text="\n" + render(result, gpus=gpus),
        marks=(mark(result.disclosure),),
        sentence=sentence(result),
        good=result.valid,
        numbers=lambda numbers: tuple(_with_rates(numbers, result, gpus)),
        figures=f"{said}.",
        section=partial(section, result=result),
    )


def render_html(result: MlperfResult) -> str:
    """The page of a result without a run of its own: the official LoadGen has issued its queries."""
    sheet = page.Page(f"mlperf-{result.benchmark}-{result.scenario}", "loadgen report of an MLPerf-style result")
    if result.simulated:
        sheet.mark("SIMULATED", "a model of a server answered: nothing here was measured on hardware")
    sheet.mark(*mark(result.disclosure))
    sheet.heading(f"{result.scenario.capitalize()} · {result.benchmark} · round {result.round}")
    sheet.say(sentence(result), f"sentence {'good' if result.valid else 'bad'}")
    section(sheet, result)
    return sheet.render()


def _with_rates(numbers: Sequence[Number], mlperf: MlperfResult, gpus: int | None) -> Iterator[Number]:
    """The headline numbers with the rates that the MLPerf-style report prints: of LoadGen's windows."""
    tokens, samples = rates(mlperf, gpus)
    for number in numbers:
        rate = {"Output tokens": tokens, "Completed": samples}.get(number.name)
        if rate is None:
            yield number
        else:
            beside = ", ".join(filter(None, (rate.per_gpu, rate.window)))
            yield number._replace(value=rate.value, beside=beside)


def section(sheet: Page, result: MlperfResult) -> None:
    """The verdict of the rules with what it rests on: on the page of a run, and on that of a search for a peak."""
    sheet.section("MLPerf-style result, unofficial", id="mlperf")
    sheet.facts(
        Result="VALID" if result.valid else "INVALID",
        Test=f"{result.benchmark} {result.scenario}, round {result.round}",
        Target_rate=f"{result.target_qps:,.6g}/s" if result.target_qps else "",
        Data=result.dataset,
        Queries=f"{format.count(result.queries)}, {format.count(result.resolved)} completed",
        Whole_run=f"{format.quantity(result.whole_tokens_per_s, 4)} tokens/s until the last completion",
    )
    sheet.listed(reason.text for reason in result.reasons)
    if result.checks:
        sheet.add("<h3>Limits and early stopping</h3>")
        sheet.table(*limits(result))
    else:
        sheet.say("Offline has no limit on latency, and so no early stopping.")
    sheet.say(f"{checker_text(result)}.", "soft")
    sheet.listed(result.notes)
