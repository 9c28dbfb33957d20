"""The verdict on a contract for readers: the report of text, Markdown and page, and JUnit cases.

Pure: takes a `Validation`, returns values of `present`. Every figure was computed in `contracts/verdict.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import quote

from loadgen.contracts.schema import AnswerCheck, Contract, ContractLevel, words
from loadgen.contracts.verdict import (
    FAIL,
    INCONCLUSIVE,
    PASS,
    Judgement,
    LevelForecast,
    LevelVerdict,
    NeededLoad,
    Validation,
    confidence_words,
    holds_words,
    horizon_words,
    looks_words,
)
from loadgen.core import format
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import Host, TargetFacts
from loadgen.figures import FIGURES
from loadgen.render.junit import Case, Outcome, simulated_case
from loadgen.render.page import Bar
from loadgen.render.section import (
    Bars,
    Bullets,
    Facts,
    Kind,
    Links,
    Paragraph,
    Quoted,
    Report,
    Section,
    Signatures,
    Table,
    Warned,
    facts,
    section,
    simulated,
)
from loadgen.repeated.repeats import RepeatSummary
from loadgen.runs import stimulus
from loadgen.runs.rates import headline
from loadgen.runs.repeats_text import OF_LEVELS, levels_table


class Measured(NamedTuple):
    """What a validation rests on.

    text: the contract as written. runs: the summaries by folder. findings: of the preflight, each its state, check,
    what was found and what it means. spread: between the runs of a level, by its name.
    """

    contract: Contract
    text: str
    runs: Mapping[str, Summary]
    findings: Sequence[tuple[str, str, str, str]] = ()
    spread: Mapping[str, RepeatSummary] = MappingProxyType({})


MEANING = {
    PASS: "every promise was kept, as surely as the contract asks",
    FAIL: "at least one promise was broken, as surely as the contract asks",
    INCONCLUSIVE: "at least one promise could be neither shown nor refuted: neither a pass nor a failure",
}
TERMS = {
    "goodput": "share of requests that meet every limit of the contract's slo",
    "good_requests": "requests per second that meet every limit of the contract's slo",
    "task time": "time from the instant a task or conversation was due to the end of its last answer",
    "waits of a task": "time that a task waited for first tokens, all its requests together",
    "longest wait of a task": "longest time that a task waited for a first token",
    "tasks within the SLO": "tasks that keep every limit of the slo's task",
}
OF_ANSWERS = {
    "rouge1": "words that answer and reference share: F-measure, with stemming",
    "rouge2": "pairs of words that answer and reference share: F-measure, with stemming",
    "rougeL": "longest sequence of words that answer and reference share: F-measure, with stemming",
    "exact": "share of answers equal to the reference but for case, spaces and a full stop",
    "choice": "share of answers that choose the right letter",
    "json": "share of answers that are JSON where JSON was asked for",
    "equal": "share of answers equal, letter by letter, to those of the other endpoint",
    "agreement": "words and marks from the start until the answers of the two endpoints differ",
    "agreement_share": "the same as a share of the longer answer",
    "similarity": "1 - edits / length between the answers of the two endpoints",
}
DECIDED = {PASS: "kept", FAIL: "broken", INCONCLUSIVE: "undecided"}
KIND: dict[str, Kind] = {PASS: "good", FAIL: "bad", INCONCLUSIVE: "warn"}


def report(validation: Validation, measured: Measured | None = None) -> Report:
    """The verdict with its terms; with what was `measured`, also what a page shows besides, for two parties to sign."""
    warned = [simulated("a model of a server answered, no real one: this verdict is an exercise")]
    warned = warned if validation.simulated else []
    if validation.interrupted:
        warned.append(Warned("INTERRUPTED", "the user broke it off: what was not run is not known"))
    shared_notes = _shared(validation)
    description = "" if measured is None else measured.contract.description
    return Report(
        title=" · ".join(filter(None, (validation.contract, validation.target, validation.model))),
        tab=f"{validation.verdict}: {validation.contract}",
        made_by=f"loadgen {validation.version} validation",
        warned=warned,
        answer=[
            Paragraph(
                f"{validation.verdict}: {validation.sentence}.",
                KIND[validation.verdict],
                large=True,
            )
        ],
        answer_last=True,
        sections=[
            section(
                "",
                f"{validation.verdict} means: {MEANING[validation.verdict]}.",
                description,
                looks_words(validation),
                horizon_words(validation),
            ),
            *([] if measured is None else [_used(validation, measured.contract)]),
            *(_level(level, shared_notes, measured) for level in validation.levels),
            section("Said of every level", Bullets(shared_notes, "warn")),
            section("What was measured, and from where", _conditions(validation, measured)),
            *([] if measured is None else [_signed(validation), *_annex(validation, measured)]),
        ],
    )


def _level(level: LevelVerdict, shared_notes: Sequence[str], measured: Measured | None) -> Section:
    holds, exceptions = _holds(level.terms)
    rows = [_row(term, level.trouble, holds) for term in level.terms]
    return section(
        f"{level.name}: {level.verdict}",
        Paragraph(_load(level), "soft"),
        Paragraph("" if measured is None else throughput_text(level.runs, measured.runs)),
        Paragraph(f"NOTHING SHOWN: {level.trouble}" if level.trouble else "", "warn"),
        Table(("verdict", "", "promise", "measured"), rows, "words"),
        Paragraph(
            f"Kept {holds}{', unless a row says otherwise' if exceptions else ''}."
            if holds
            else "",
            "soft",
        ),
        Bullets([note for note in level.notes if note not in shared_notes], "warn"),
    )


def throughput_text(names: Sequence[str], runs: Mapping[str, Summary]) -> str:
    """Return the headline rates of a level: the means over its valid runs, or "" without one."""
    rates = [headline(runs[name]) for name in names if name in runs and runs[name].verdict.valid]
    if not rates:
        return ""
    requests = _mean([rate.requests for rate in rates])
    total = _mean([rate.total for rate in rates])
    output = _mean([rate.output for rate in rates])
    output_per_gpu = _mean([rate.output_per_gpu for rate in rates])
    goodput = _mean([rate.goodput for rate in rates])
    parts = [
        f"{format.rate(requests, ' requests/s')}",
        f"{format.rate(output, ' output tokens/s')}",
    ]
    if output_per_gpu is not None:
        parts[-1] += f" ({format.rate(output_per_gpu)} per GPU)"
    if total is not None:
        parts.append(format.rate(total, " tokens/s with the prompts"))
    if goodput is not None:
        parts.append(f"goodput {format.rate(goodput, ' requests/s')}")
    window = rates[0].window if len(rates) == 1 else f"{rates[0].window}, mean of {len(rates)} runs"
    return f"Throughput: {', '.join(parts)}, in the {window}"


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if a value is unknown."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _signed(validation: Validation) -> Section:
    names = {party: validation.metadata.get(party.lower(), "") for party in ("Buyer", "Vendor")}
    sums = "Of the contract with the SHA-256 above; SHA256SUMS has that of every file."
    return section("Signed", Signatures(names), Paragraph(sums, "soft"), page_only=True)


def _annex(validation: Validation, measured: Measured) -> Iterator[Section]:
    """What stands behind the signed page; printed, it begins on a page of its own."""
    yield section("Annex", "What the page above rests on.", id="annex", page_only=True)
    words = Bullets([f"{word}: {meaning}" for word, meaning in _glossary(validation)])
    yield section("What the words mean", words, page_only=True)
    yield _timeline(measured.runs)
    spread = levels_table(list(measured.spread.items()))
    legend = Paragraph(f"{OF_LEVELS}." if spread.rows else "", "soft")
    yield section("How the runs of a level differ", spread, legend, page_only=True)
    found = Table(("", "check", "found", "means"), measured.findings, "words")
    yield section("What the doctor found before the first request", found, page_only=True)
    rows = [
        (run, *row)
        for run, summary in measured.runs.items()
        for row in stimulus.rows(summary.stimulus)
    ]
    delivered = Table(("run", *stimulus.HEAD), rows, "words")
    yield section("The load that was delivered", delivered, folded=True, page_only=True)
    yield section("The contract as written", Quoted(measured.text), folded=True, page_only=True)


MOST_USED = 150.0  # per cent of what a promise allows; what uses more is drawn there


def used_share(figure: float, limit: float, unit: str, *, at_most: bool) -> float | None:
    """What a figure uses of what its promise allows, in per cent: 100 is the limit, above it the promise is broken.

    Of a promise "at most" the figure over its limit; of a share "at least" what is missing to 100 % over what may be
    missing; of another figure "at least" the limit over the figure. None where the promise allows nothing.
    """
    if at_most:
        return 100 * figure / limit if limit else None
    if unit == "%":
        return 100 * (100 - figure) / (100 - limit) if limit < 100 else None
    return 100 * limit / figure if figure else None


def _used(validation: Validation, contract: Contract) -> Section:
    """A bar per term: how much of what it allows is used, with the interval of the figure."""
    asked: list[ContractLevel | AnswerCheck] = [*contract.levels]
    asked += [contract.answers] if contract.answers is not None else []
    at_most = {
        words(term): term.is_at_most for part in asked for term in (*part.must, *part.should)
    }
    bars = []
    for level in validation.levels:
        for term in level.terms:
            if term.value is None or term.limit is None:
                continue
            figures = [
                term.value if figure is None else figure
                for figure in (term.value, term.low, term.high)
            ]
            used = [
                min(share, MOST_USED)
                for figure in figures
                if (share := used_share(figure, term.limit, term.unit, at_most=at_most[term.term]))
                is not None
            ]
            if len(used) < len(figures):
                continue
            unit = term.unit if term.unit.startswith("/") else f" {term.unit}".rstrip()
            came_out = f"{format.quantity(term.value)} of {format.quantity(term.limit)}{unit}"
            segment = (0.0, used[0], KIND[term.verdict], term.reason)
            name = term.term if len(validation.levels) == 1 else f"{level.name}: {term.term}"
            name += " (should)" if term.kind == "should" else ""
            bars.append(Bar(name, f"{came_out}: {term.verdict}", [segment], (min(used), max(used))))
    legend = (
        "A bar is the used share of what the promise allows; at the dashed line all of it is used, beyond it the "
        f"promise is broken. The whisker is the interval of the figure. More than {MOST_USED:g} % is drawn there."
        if bars
        else "No term has a figure."
    )
    drawn = Bars(rows=bars, unit=" % of what is allowed", line=100.0, low=MOST_USED)
    return section(
        "What each promise uses of its limit",
        drawn,
        Paragraph(legend, "soft"),
        page_only=True,
        id="used",
    )


def _conditions(validation: Validation, measured: Measured | None) -> Facts:
    """What was measured, from where, and with what, as the runs say it."""
    first = None if measured is None else next(iter(measured.runs.values()), None)
    target, host = (first.target, first.run.host) if first is not None else (TargetFacts(), Host())
    return facts(
        Target=(validation.target, target.url),
        Model=validation.model,
        Server=validation.server,
        Software=target.software,
        Hardware=_hardware_text(first, None if measured is None else measured.contract.gpus),
        Region=validation.region,
        **format.said(validation.metadata),
        When=f"{validation.started} to {validation.ended}".replace("T", " "),
        Confidence=(confidence_words(validation), _horizon(validation)),
        Client=(host.name, host.cpu, f"{host.cpus} CPUs" if host.cpus else "", host.kernel),
        Clock=host.clock,
        Made_by=(f"loadgen {validation.version}", f"Python {host.python}" if host.python else ""),
        Contract=f"SHA-256 {validation.contract_sha256}",
    )


def _hardware_text(summary: Summary | None, contract_gpus: int | None) -> list[str]:
    """Return the hardware behind the endpoint, named once, and how it differs from the contract."""
    if summary is None:
        return []
    target = summary.target
    if summary.hardware is not None and summary.hardware.words:
        parts = [*summary.hardware.words, target.shape]
    else:
        parts = ["" if target.gpus is None else format.counted(target.gpus, "GPU"), target.shape]
    if contract_gpus is not None and target.gpus is not None and contract_gpus != target.gpus:
        contract = format.counted(contract_gpus, "GPU")
        parts.append(
            f"the contract is for {contract}, and figures per GPU are of the {target.gpus} that are here"
        )
    return [part for part in parts if part]


def _horizon(validation: Validation) -> str:
    return f"asked for what comes back within {format.duration(validation.horizon_s)}"


def _timeline(runs: Mapping[str, Summary]) -> Section:
    """When each run went, with a link to its summary. Runs in virtual time stand one after the other, by its clock."""
    times: dict[str, tuple[float, float]] = {}
    labels: dict[str, str] = {}
    end = 0.0
    for name, summary in runs.items():
        if summary.run.client == "virtual":
            times[name] = (end, end + (summary.window.whole.duration_s or 0.0))
            labels[name] = f"{format.duration(times[name][1] - end)} of virtual time"
            end = times[name][1]
        else:
            start, ended = (
                datetime.fromisoformat(at).timestamp()
                for at in (summary.run.started, summary.run.ended)
            )
            times[name] = (start, ended)
            labels[name] = f"{summary.run.started[11:19]}, {format.duration(ended - start)}"
    zero = min((start for start, _ in times.values()), default=0.0)
    bars = []
    for name, (start, end) in times.items():
        color = "c1" if runs[name].verdict.valid else "warn"
        bars.append(Bar(name, labels[name], [(start - zero, end - zero, color, runs[name].run.id)]))
    links = [(name, f"{quote(name)}/summary.json") for name in runs]
    return section(
        "Runs",
        Bars(rows=bars, low=0.0, number=format.duration),
        Links("Summary of each run, beside its records", links),
        page_only=True,
    )


def _glossary(validation: Validation) -> Iterator[tuple[str, str]]:
    yield "PASS", "the whole interval of the measured figure keeps the promise"
    yield "FAIL", "the whole interval breaks it"
    yield (
        "INCONCLUSIVE",
        "the interval holds the promise, the sample is too small for the percentile, the load was too short to "
        "have left its start-up or to have seen what its queue can do, data is missing, "
        "the load generator was the limit, or the run was not valid",
    )
    yield (
        "must, should",
        "the verdict is that of the must terms; should terms are told and decide nothing",
    )
    figures = {row.name: row.meaning for row in FIGURES.at("contract")}
    for glossary, of_answers in ((figures | TERMS, False), (OF_ANSWERS, True)):
        levels = [level for level in validation.levels if (level.name == "answers") is of_answers]
        term_texts = " ".join(term.term for level in levels for term in level.terms)
        yield from (
            (word, meaning)
            for word, meaning in glossary.items()
            if re.search(rf"\b{word}\b", term_texts)
        )
    term_texts = " ".join(term.term for level in validation.levels for term in level.terms)
    if re.search(r"\bp[0-9]", term_texts):
        yield (
            "p50, p99",
            "so many of 100 requests are at or below it; one that failed is above every limit",
        )


def _shared(validation: Validation) -> list[str]:
    """Notes that all of several levels have in common; they are printed once."""
    notes = [level.notes for level in validation.levels]
    return (
        [note for note in notes[0] if all(note in other for other in notes)]
        if len(notes) > 1
        else []
    )


def _load(level: LevelVerdict) -> str:
    parts = [
        level.workload,
        level.load,
        f"{level.ok:,} of {level.requests:,} requests ok",
        ", ".join(level.runs),
    ]
    return " · ".join(part for part in parts if part)


def _holds(terms: Sequence[Judgement]) -> tuple[str, bool]:
    """What most kept promises of a level hold for, which is said once below them, and whether others differ."""
    said = Counter(words for term in terms if (words := holds_words(term)))
    return next((words for words, _ in said.most_common(1)), ""), len(said) > 1


def _row(term: Judgement, level_trouble: str, holds: str) -> tuple[str, ...]:
    reason = format.NONE if term.reason == level_trouble else term.reason
    own = "" if (words := holds_words(term)) == holds else words
    return term.verdict, term.kind, term.term, ", ".join(filter(None, (reason, own)))


def forecast_report(
    levels: Sequence[LevelForecast], simulated: str, *, asked: str | None
) -> Report:
    """What each term needs for a decision. `asked`: the real target that it was not simulated on."""
    preset = simulated.removeprefix("simulated: ")
    where = f"{asked} is not {preset}. " if asked else ""
    note = f"{where}A real server varies more than its model, and may need longer. Another model: --url sim:PRESET"
    return Report(
        title=f"What each term needs for a decision, on a simulated {preset}",
        made_by="loadgen validate --dry-run",
        sections=[*map(_forecast, levels), section("", note)],
    )


def _forecast(level: LevelForecast) -> Section:
    rows = [
        (term.kind, term.term, _needs(term, level), DECIDED[term.outcome]) for term in level.terms
    ]
    return section(
        f"level {level.name}"
        + (f": {format.duration(level.length_s)} of load" if level.terms else ""),
        level.trouble,
        Table(("", "term", "needs", "in this time"), rows, left=2),
        Bullets([f"{term.term}: {term.reason}" for term in level.terms if term.reason]),
    )


def _needs(term: NeededLoad, level: LevelForecast) -> str:
    if term.needed_s is None:
        return f"> {format.duration(level.simulated_s)}"
    return format.duration(term.needed_s)


def cases(validation: Validation) -> list[Case]:
    """One JUnit case per term. An inconclusive term, and a "should" term that fails, is skipped with its reason."""
    test_cases = [simulated_case(validation.contract)] if validation.simulated else []
    for level in validation.levels:
        for term in level.terms:
            failed = term.verdict == FAIL and term.kind == "must"
            outcome: Outcome = (
                "passed" if term.verdict == PASS else "failed" if failed else "skipped"
            )
            message = ", ".join(filter(None, (f"{term.verdict}: {term.reason}", holds_words(term))))
            test_cases.append(
                Case(
                    group=level.name, name=f"{term.kind} {term.term}", outcome=outcome, text=message
                )
            )
    return test_cases
