"""The verdict on a contract for readers: one short HTML page, the same as text for a terminal, and JUnit cases.

Pure: takes a `Validation`, returns a string. Every figure was computed in `contracts/verdict.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from types import MappingProxyType
from urllib.parse import quote

from loadgen.contracts.schema import AnswersAsked, Contract, ContractLevel, words
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
    looks_words,
)
from loadgen.core import format
from loadgen.core.metrics.repeats import RepeatSummary
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import Host, TargetFacts
from loadgen.present import html, page, table
from loadgen.present.junit import Case, Outcome
from loadgen.present.section import Said, section
from loadgen.present.table import wrapped
from loadgen.runs import stimulus
from loadgen.runs.repeats_text import OF_LEVELS, levels_table

MEANING = {
    PASS: "every promise was kept, as surely as the contract asks",
    FAIL: "at least one promise was broken, as surely as the contract asks",
    INCONCLUSIVE: "at least one promise could be neither shown nor refuted: neither a pass nor a failure",
}
TERMS = {
    "ttft": "time from the instant a request was due to its first token",
    "ttft_from_sent": "time from the first byte sent to the first token",
    "first_answer": "time from the instant a request was due to the first token that is no reasoning",
    "tpot": "time per output token after the first",
    "itl": "time between one token and the next, all of a run pooled",
    "e2e": "time from the instant a request was due to the end of its answer",
    "max_gap": "the longest silence within an answer",
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
WIDTH = 110  # columns of the text
DECIDED = {PASS: "kept", FAIL: "broken", INCONCLUSIVE: "undecided"}
KIND = {PASS: "good", FAIL: "bad", INCONCLUSIVE: "warn"}


def render(
    validation: Validation,
    contract: Contract,
    text: str,
    runs: Mapping[str, Summary],
    findings: Sequence[tuple[str, str, str, str]] = (),
    spread: Mapping[str, RepeatSummary] = MappingProxyType({}),
) -> str:
    """The HTML page: what a buyer and a vendor can sign.

    `text`: the contract as written. `runs`: the summaries by folder. `findings`: of the preflight, each its state,
    check, what was found and what it means. `spread`: between the runs of a level, by its name.
    """
    sheet = page.Page(f"{validation.verdict}: {validation.contract}", f"loadgen {validation.version} validation")
    if validation.simulated:
        sheet.mark("SIMULATED", "a model of a server answered, no real one: this verdict is an exercise")
    if validation.interrupted:
        sheet.mark("INTERRUPTED", "the user broke it off: what was not run is not known")
    sheet.heading(validation.contract)
    sheet.say(f"{validation.verdict}: {validation.sentence}.", f"sentence {KIND[validation.verdict]}")
    sheet.say(f"{validation.verdict} means: {MEANING[validation.verdict]}.")
    sheet.say(contract.description)
    if extended := looks_words(validation):
        sheet.say(extended)
    sheet.section("Every promise against its limit")
    _margins(sheet, validation, contract)
    shared_notes = _shared(validation)
    for level in validation.levels:
        sheet.section(f"{level.name}: {level.verdict}")
        sheet.say(_load(level), "soft")
        if level.trouble:
            sheet.mark("NOTHING SHOWN", level.trouble)
        rows = [_row(term, level.trouble) for term in level.terms]
        sheet.table(("verdict", "", "promise", "measured"), rows, "words")
        sheet.listed((note for note in level.notes if note not in shared_notes), "warn")
    if shared_notes:
        sheet.section("Said of every level")
        sheet.listed(shared_notes, "warn")
    if delivered := [(run, *row) for run, summary in runs.items() for row in stimulus.rows(summary.stimulus)]:
        sheet.section("The load that was delivered")
        sheet.table(("run", *stimulus.HEAD), delivered, "words")
    if spread:
        sheet.section("How the runs of a level differ")
        html.add(sheet, [section("", levels_table(list(spread.items())), Said(f"{OF_LEVELS}.", "soft"))])
    _conditions(sheet, validation, runs)
    if findings:
        sheet.section("What the doctor found before the first request")
        sheet.table(("", "check", "found", "means"), findings, "words")
    _timeline(sheet, runs)
    sheet.section("What the words mean")
    sheet.listed(f"{word}: {meaning}" for word, meaning in _glossary(validation))
    with sheet.details("The contract as written"):
        sheet.add(f"<pre>{escape(text)}</pre>")
    _signatures(sheet, validation)
    return sheet.render()


def _margins(sheet: page.Page, validation: Validation, contract: Contract) -> None:
    """A bar per term: how far its figure, with its interval, lies on the kept or on the broken side of its limit."""
    asked: list[ContractLevel | AnswersAsked] = [*contract.levels]
    asked += [contract.answers] if contract.answers is not None else []
    at_most = {words(term): term.is_at_most for part in asked for term in (*part.must, *part.should)}
    bars = []
    for level in validation.levels:
        for term in level.terms:
            if term.value is None or not term.limit:
                continue
            sign = 100 if at_most[term.term] else -100
            value, *ends = (
                min(max(sign * (1 - (term.value if figure is None else figure) / term.limit), -100.0), 100.0)
                for figure in (term.value, term.low, term.high)
            )
            unit = term.unit if term.unit.startswith("/") else f" {term.unit}".rstrip()
            came_out = f"{format.quantity(term.value)} of {format.quantity(term.limit)}{unit}"
            segment = (min(0.0, value), max(0.0, value), KIND[term.verdict], term.reason)
            name = f"{level.name}: {term.term}" + (" (should)" if term.kind == "should" else "")
            bars.append(page.Bar(name, f"{came_out}: {term.verdict}", [segment], (min(ends), max(ends))))
    sheet.bars(bars, unit=" % of the limit", line=0.0)
    sheet.say(
        "Right of the line the promise is kept, left of it broken. The whisker is the interval of the figure; an end "
        "that the sample does not give is at the figure. What is beyond 100 % is drawn there."
        if bars
        else "No term has a figure.",
        "soft",
    )


def _conditions(sheet: page.Page, validation: Validation, runs: Mapping[str, Summary]) -> None:
    """What was measured, from where, and with what, as the runs say it."""
    sheet.section("What was measured, and from where")
    first = next(iter(runs.values()), None)
    target, host = (first.target, first.run.host) if first is not None else (TargetFacts(), Host())
    sheet.facts(
        Target=(validation.target, target.url),
        Model=validation.model,
        Server=validation.server,
        Software=target.software,
        Hardware=[] if first is None or first.hardware is None else first.hardware.words,
        Machine=("" if target.gpus is None else format.counted(target.gpus, "GPU"), target.shape),
        Region=validation.region,
        **format.said(validation.metadata),
        When=f"{validation.started} to {validation.ended}".replace("T", " "),
        Confidence=confidence_words(validation),
        Client=(host.name, host.cpu, f"{host.cpus} CPUs" if host.cpus else "", host.kernel),
        Clock=host.clock,
        Made_by=(f"loadgen {validation.version}", f"Python {host.python}" if host.python else ""),
        Contract=f"SHA-256 {validation.contract_sha256}",
    )


def _timeline(sheet: page.Page, runs: Mapping[str, Summary]) -> None:
    """When each run went, with a link to its summary. Runs in virtual time stand one after the other, by its clock."""
    if not runs:
        return
    sheet.section("Runs")
    times: dict[str, tuple[float, float]] = {}
    labels: dict[str, str] = {}
    end = 0.0
    for name, summary in runs.items():
        if summary.run.client == "virtual":
            times[name] = (end, end + (summary.window.whole.duration_s or 0.0))
            labels[name] = f"{format.duration(times[name][1] - end)} of virtual time"
            end = times[name][1]
        else:
            start, ended = (datetime.fromisoformat(at).timestamp() for at in (summary.run.started, summary.run.ended))
            times[name] = (start, ended)
            labels[name] = f"{summary.run.started[11:19]}, {format.duration(ended - start)}"
    zero = min(start for start, _ in times.values())
    sheet.bars(
        [
            page.Bar(
                name,
                labels[name],
                [(start - zero, end - zero, "c1" if runs[name].verdict.valid else "warn", runs[name].run.id)],
            )
            for name, (start, end) in times.items()
        ],
        low=0.0,
        number=format.duration,
    )
    links = ", ".join(f'<a href="{escape(quote(name))}/summary.json">{escape(name)}</a>' for name in runs)
    sheet.add(f"<p>Summary of each run, beside its records: {links}.</p>")


def _signatures(sheet: page.Page, validation: Validation) -> None:
    """A line for each party; its name is in the metadata under `buyer` and `vendor`, where given."""
    sheet.section("Signed")
    names = {party: validation.metadata.get(party.lower(), "") for party in ("Buyer", "Vendor")}
    lines = (f"<div><b>{party}</b> {escape(name)}<p>name, date, signature</p></div>" for party, name in names.items())
    sheet.add(f'<div class="signed">{"".join(lines)}</div>')
    sheet.say(f"Of the contract with SHA-256 {validation.contract_sha256}; SHA256SUMS has that of every file.", "soft")


def _glossary(validation: Validation) -> Iterator[tuple[str, str]]:
    yield "PASS", "the whole interval of the measured figure keeps the promise"
    yield "FAIL", "the whole interval breaks it"
    yield (
        "INCONCLUSIVE",
        "the interval holds the promise, the sample is too small for the percentile, the load was too short to "
        "have left its start-up or to have seen what its queue can do, data is missing, "
        "the load generator was the limit, or the run was not valid",
    )
    yield "must, should", "the verdict is that of the must terms; should terms are told and decide nothing"
    for glossary, of_answers in ((TERMS, False), (OF_ANSWERS, True)):
        levels = [level for level in validation.levels if (level.name == "answers") is of_answers]
        term_texts = " ".join(term.term for level in levels for term in level.terms)
        yield from ((word, meaning) for word, meaning in glossary.items() if re.search(rf"\b{word}\b", term_texts))
    term_texts = " ".join(term.term for level in validation.levels for term in level.terms)
    if re.search(r"\bp[0-9]", term_texts):
        yield "p50, p99", "so many of 100 requests are at or below it; one that failed is above every limit"


def _shared(validation: Validation) -> list[str]:
    """Notes that all of several levels have in common; they are printed once."""
    notes = [level.notes for level in validation.levels]
    return [note for note in notes[0] if all(note in other for other in notes)] if len(notes) > 1 else []


def _load(level: LevelVerdict) -> str:
    parts = [level.workload, level.load, f"{level.ok:,} of {level.requests:,} requests ok", ", ".join(level.runs)]
    return " · ".join(part for part in parts if part)


def _row(term: Judgement, level_trouble: str) -> tuple[str, ...]:
    return (term.verdict, term.kind, term.term, format.NONE if term.reason == level_trouble else term.reason)


def text(validation: Validation) -> str:
    """The validation as text for a terminal, ending in a newline. The last line is the verdict."""
    lines = [f"contract: {validation.contract}   target: {validation.target} {validation.model}".rstrip()]
    if validation.region:
        lines.append(f"region: {validation.region}")
    for head, texts in format.said(validation.metadata).items():
        lines += wrapped(f"{head.lower()}: {', '.join(texts)}", rest="  ")
    if validation.simulated:
        lines.append("SIMULATED, not a real server: this verdict is an exercise")
    lines += wrapped(looks_words(validation), width=WIDTH)
    shared_notes = _shared(validation)
    for level in validation.levels:
        lines += ["", f"{level.name}: {level.verdict}   ({_load(level)})"]
        lines += _wrapped("  ", level.trouble) if level.trouble else []
        for term in level.terms:
            lines += _wrapped(f"  {term.verdict:<12}  {term.kind:<6}  ", f"{term.term}")
            lines += _wrapped(" " * 24, term.reason) if term.reason != level.trouble else []
        for note in level.notes:
            lines += _wrapped("  note: ", note) if note not in shared_notes else []
    lines += [""] if shared_notes else []
    for note in shared_notes:
        lines += _wrapped("note, of every level: ", note)
    return "\n".join([*lines, "", f"{validation.verdict}: {validation.sentence}"]) + "\n"


def forecast_text(levels: Sequence[LevelForecast], simulated: str, *, asked: str | None) -> str:
    """What each term needs for a decision, as text. `asked`: the real target that it was not simulated on."""
    preset = simulated.removeprefix("simulated: ")
    lines = ["", *wrapped(f"What each term needs for a decision, on a simulated {preset}:", width=WIDTH)]
    for level in levels:
        length = f": {format.duration(level.length_s)} of load" if level.terms else ""
        lines += ["", f"level {level.name}{length}"]
        lines += _wrapped("  ", level.trouble) if level.trouble else []
        rows = [(term.kind, term.term, _needs(term, level), DECIDED[term.outcome]) for term in level.terms]
        lines += table.text(("", "term", "needs", "in this time"), rows, left=2, remarks=True) if rows else []
        for term in level.terms:
            lines += wrapped(f"{term.term}: {term.reason}", "  ", "    ", WIDTH) if term.reason else []
    where = f"{asked} is not {preset}. " if asked else ""
    note = f"{where}A real server varies more than its model, and may need longer. Another model: --url sim:PRESET"
    return "\n".join([*lines, "", *wrapped(note, width=WIDTH)]) + "\n"


def _needs(term: NeededLoad, level: LevelForecast) -> str:
    if term.needed_s is None:
        return f"> {format.duration(level.simulated_s)}"
    return format.duration(term.needed_s)


def _wrapped(lead: str, sentence: str) -> list[str]:
    return wrapped(sentence, lead, " " * len(lead), WIDTH)


def cases(validation: Validation) -> list[Case]:
    """One JUnit case per term. An inconclusive term, and a "should" term that fails, is skipped with its reason."""
    test_cases = []
    for level in validation.levels:
        for term in level.terms:
            failed = term.verdict == FAIL and term.kind == "must"
            outcome: Outcome = "passed" if term.verdict == PASS else "failed" if failed else "skipped"
            message = f"{term.verdict}: {term.reason}"
            test_cases.append(Case(group=level.name, name=f"{term.kind} {term.term}", outcome=outcome, text=message))
    return test_cases
