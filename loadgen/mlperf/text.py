"""What an MLPerf-style result says, alone and in the report of its run: the test, LoadGen's figures, VALID or INVALID.

Pure: takes an `MlperfResult`, returns a report or its sections. Tokens/s come from one place (`rates`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from loadgen.core import format
from loadgen.core.metrics import token_usage
from loadgen.core.slo import promise
from loadgen.mlperf.loadgen_spread import PERCENTILES
from loadgen.mlperf.log_files import checker_text
from loadgen.mlperf.result import DISCLOSURE, MlperfResult
from loadgen.render.additions import ExtraSections
from loadgen.render.page import Bar, Tile
from loadgen.render.section import (
    Bars,
    Bullets,
    Notice,
    Paragraph,
    Report,
    Section,
    Table,
    named_facts,
    section,
    simulated_notice,
)


def report(
    result: MlperfResult, *, gpus: int | None = None, parts: Iterable[Section] = ()
) -> Report:
    """The whole answer. `parts`: of each of several stages, classes and targets (`runs.text.parts`)."""
    return Report(
        title=f"{result.scenario.capitalize()} · {result.benchmark} · round {result.round}",
        page_title=f"mlperf-{result.benchmark}-{result.scenario}",
        generated_by="loadgen report of an MLPerf-style result",
        notices=[*([simulated_notice()] if result.simulated else []), warned(result.disclosure)],
        headline=[Paragraph(sentence(result), "good" if result.valid else "bad", large=True)],
        sections=[
            *parts,
            *sections(result, gpus),
        ],
    )


def sections(result: MlperfResult, gpus: int | None) -> tuple[Section, ...]:
    """The verdict of the rules with what it rests on: in a report of its own, and in that of its run or search."""
    tokens, samples = rates(result, gpus)
    length = f"{result.scheduled_s:,.3f} s scheduled, {result.min_duration_s:g} s needed"
    if result.scenario == "offline":
        length = f"one query of {format.counted(result.queries, 'sample')}"
    scheduled = (
        f"{format.quantity(result.scheduled_samples_per_s, 4)} scheduled"
        if result.scenario != "offline"
        else ""
    )
    said = named_facts(
        Test=f"{result.benchmark} {result.scenario}, round {result.round}",
        Target_rate=f"{result.target_qps:,.6g}/s" if result.target_qps else "",
        Data=result.dataset,
        Queries=(f"{result.queries:,} ({result.resolved:,} completed)", length),
        Tokens=f"{result.tokens:,}, {result.one_token_replies:,} one-token replies (counted, left out of TPOT)",
        **{"Tokens/s": (f"{tokens.value} {tokens.window}", tokens.per_gpu)},
        Whole_run=f"{format.quantity(result.whole_tokens_per_s, 4)} tokens/s until the last completion",
        **{"Samples/s": (f"{samples.value} completed", scheduled)},
    )
    close = (
        "VALID for LoadGen at exactly a limit; the submission checker asks for less than the limit"
    )
    reasons = [*_sustained(result), *(reason.text for reason in result.reasons)]
    reasons += [close] if result.valid and not result.checker_valid else []
    return (
        section("MLPerf-style result, unofficial", said, _latencies(result), id="mlperf"),
        section(
            "Limits and early stopping",
            Bars(
                rows=list(_used(result)), unit=" %", line=100.0, low=0.0, title="Used of each limit"
            ),
            limits(result)
            if result.checks
            else "Offline has no limit on latency, and so no early stopping.",
            Paragraph(f"{checker_text(result)}.", "soft"),
        ),
        section(
            "Result",
            Paragraph(_standing(result), "good" if result.valid else "bad", large=True),
            Bullets(reasons),
        ),
        section("Notes", Bullets(result.notes), id="mlperf-notes"),
    )


def _standing(result: MlperfResult) -> str:
    if not result.valid:
        return "INVALID"
    if not result.rules_only:
        return "VALID" if result.scenario == "offline" else "VALID, and sustained"
    return f"VALID by the rules only: {'NOT sustained' if result.sustained is False else 'not held for twice as long'}"


def _sustained(result: MlperfResult) -> Iterator[str]:
    """Whether the rate can go on for ever, and what would show it."""
    if result.sustained_why:
        yield (
            f"in this run: {result.sustained_why}"
            if result.sustained is None
            else result.sustained_why
        )
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
    window = (
        "until the last completion" if offline else "until the last-issued query ended (LoadGen's)"
    )
    tokens, samples = result.completed_tokens_per_s, result.completed_samples_per_s
    one_gpu = token_usage.per_gpu(tokens, gpus)
    per_gpu = f"{format.quantity(one_gpu)} per GPU ({gpus})" if one_gpu is not None else ""
    return Rate(format.quantity(tokens, 4), window, per_gpu), Rate(
        format.quantity(samples, 4), window, ""
    )


def sentence(result: MlperfResult) -> str:
    """The verdict of the rules in one sentence."""
    test = f"MLPerf-style {result.scenario.capitalize()}, {result.benchmark}, round {result.round}, unofficial"
    if result.valid:
        return f"{test}: VALID."
    return f"{test}: INVALID. {'; '.join(reason.text for reason in result.reasons)}."


def limits(result: MlperfResult) -> Table:
    """The limits, with early stopping. No rows in Offline, which has no limit."""
    head = (
        "limit",
        "came out",
        "LoadGen",
        "submission checker",
        "over the limit",
        "early stopping",
    )
    rows: list[tuple[str, ...]] = []
    for check in result.checks:
        value = (
            "a query that never completed"
            if check.value_ns is None
            else f"{check.value_ns / 1e6:,.3f} ms"
        )
        rows.append(
            (
                promise(check.metric, 0.99, check.limit_ns / 1e6),
                value,
                "passes" if check.met else "fails",
                "passes" if check.checker_met else "fails",
                f"{check.over:,} of {check.count:,}",
                "passes"
                if check.early_stopping_met
                else f"fails, {check.more:,} more queries needed",
            )
        )
    return Table(head, rows)


def _used(result: MlperfResult) -> Iterator[Bar]:
    """The share of each limit that the run used."""
    for check in result.checks:
        if check.value_ns is not None:
            used = 100 * check.value_ns / check.limit_ns
            text = f"{used:,.1f} % of the limit"
            color = "good" if check.met else "bad"
            yield Bar(
                promise(check.metric, 0.99, check.limit_ns / 1e6), text, [(0.0, used, color, text)]
            )


def _latencies(result: MlperfResult) -> Table:
    head = ("ms", *(f"p{p * 100:g}" for p in PERCENTILES), "mean", "max")
    rows = []
    for name, spread in (("TTFT", result.ttft), ("TPOT", result.tpot), ("Latency", result.latency)):
        if spread is not None:
            values = (*spread.percentiles, spread.mean, spread.max)
            rows.append(
                (
                    name,
                    *(format.NONE if value is None else f"{value / 1e6:,.3f}" for value in values),
                )
            )
    return Table(head, rows)


# -- on the page of a run, and on that of a search for a peak ----------------------------------------------------------


def warned(disclosure: str = DISCLOSURE) -> Notice:
    """The disclosure, for the top."""
    word, _, meaning = disclosure.partition(": ")
    return Notice(word, meaning)


def addition(result: MlperfResult, gpus: int | None) -> ExtraSections:
    """What the result adds to the run, or to the search, whose folder it is in."""
    tokens, _ = rates(result, gpus)
    said = ", ".join(
        filter(None, (f"{tokens.value} output tokens/s {tokens.window}", tokens.per_gpu))
    )
    return ExtraSections(
        notices=(warned(result.disclosure),),
        verdict_text=sentence(result),
        is_good=result.valid,
        replace_tiles=lambda numbers: tuple(_with_rates(numbers, result, gpus)),
        metrics=f"{said}.",
        sections=sections(result, gpus),
    )


def _with_rates(numbers: Sequence[Tile], mlperf: MlperfResult, gpus: int | None) -> Iterator[Tile]:
    """The headline numbers with the rates that the MLPerf-style report prints: of LoadGen's windows."""
    tokens, samples = rates(mlperf, gpus)
    for number in numbers:
        rate = {"Output tokens": tokens, "Completed": samples}.get(number.name)
        if rate is None:
            yield number
        else:
            beside = ", ".join(filter(None, (rate.per_gpu, rate.window)))
            yield number._replace(value=rate.value, note=beside)
