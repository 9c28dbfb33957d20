"""The verdict on a contract for readers: one short HTML page, the same as text for a terminal, and JUnit cases.

Pure: takes a `Validation`, returns a string. Every figure was computed in `contracts/verdict.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import Literal

from loadgen import format
from loadgen.contracts.verdict import FAIL, INCONCLUSIVE, PASS, Judgement, LevelVerdict, Validation
from loadgen.report import page
from loadgen.report.junit import Case
from loadgen.report.table import wrapped

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
}
_UNITS = re.compile(r"([0-9]) (ms|s|min|h|%)(?![\w])")
WIDTH = 110  # columns of the text
KIND = {PASS: "good", FAIL: "bad", INCONCLUSIVE: "warn"}


def render(validation: Validation) -> str:
    """The HTML page."""
    sheet = page.Page(f"{validation.verdict}: {validation.contract}", f"loadgen {validation.version} validation")
    if validation.simulated:
        sheet.add(
            page.mark("SIMULATED", "a model of a server answered, no real one: this verdict is an exercise", "warn")
        )
    if validation.interrupted:
        sheet.add(page.mark("INTERRUPTED", "the user broke it off: what was not run is not known", "warn"))
    sheet.add(f"<h1>{escape(validation.contract)}</h1>")
    sheet.add(
        f'<p class="sentence {KIND[validation.verdict]}">{escape(validation.verdict)}: '
        f"{escape(validation.sentence)}.</p>",
        f"<p>{escape(validation.verdict)} means: {escape(MEANING[validation.verdict])}.</p>",
        page.facts(
            (
                ("Target", validation.target),
                ("Model", validation.model),
                ("Server", validation.server),
                ("Region", validation.region),
                ("Metadata", format.pairs(validation.metadata)),
                ("When", f"{validation.started.replace('T', ' ')} to {validation.ended.replace('T', ' ')}"),
                ("Confidence", f"{validation.confidence * 100:g} %, two-sided, of every interval"),
                ("Contract", f"SHA-256 {validation.contract_sha256}"),
            )
        ),
    )
    shared_notes = _shared(validation)
    for level in validation.levels:
        sheet.section(f"{level.name}: {level.verdict}")
        sheet.add(f'<p class="soft">{escape(_load(level))}</p>')
        if level.trouble:
            sheet.add(page.mark("NOTHING SHOWN", level.trouble, "warn"))
        rows = [_row(term, level.trouble) for term in level.terms]
        sheet.add(_coloured(page.table(("verdict", "", "promise", "measured"), rows, words=True)))
        sheet.add(page.listed([note for note in level.notes if note not in shared_notes], "warn"))
    if shared_notes:
        sheet.section("Said of every level")
        sheet.add(page.listed(shared_notes, "warn"))
    if validation.preflight:
        sheet.section("Seen before the first request")
        sheet.add(page.listed(validation.preflight))
    sheet.section("What the words mean")
    sheet.add(page.listed((f"{word}: {meaning}" for word, meaning in _glossary(validation))))
    return sheet.render()


def _coloured(table: str) -> str:
    """The table with its verdicts coloured, and with no line break between a number and its unit."""
    for word, css_class in KIND.items():
        table = table.replace(f"<td>{word}</td>", f'<td class="{css_class}"><b>{word}</b></td>')
    return _UNITS.sub("\\1\u00a0\\2", table)


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
    term_texts = " ".join(term.term for level in validation.levels for term in level.terms)
    for word, meaning in TERMS.items():
        if re.search(rf"\b{word}\b", term_texts):
            yield word, meaning
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
    if validation.metadata:
        lines.append(f"metadata: {format.pairs(validation.metadata)}")
    if validation.simulated:
        lines.append("SIMULATED, not a real server: this verdict is an exercise")
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


def _wrapped(lead: str, sentence: str) -> list[str]:
    return wrapped(sentence, lead, " " * len(lead), WIDTH)


def cases(validation: Validation) -> list[Case]:
    """One JUnit case per term. An inconclusive term, and a "should" term that fails, is skipped with its reason."""
    test_cases = []
    for level in validation.levels:
        for term in level.terms:
            outcome: Literal["passed", "failed", "skipped"] = "skipped"
            if term.verdict == PASS:
                outcome = "passed"
            elif term.verdict == FAIL and term.kind == "must":
                outcome = "failed"
            message = f"{term.verdict}: {term.reason}"
            test_cases.append(Case(group=level.name, name=f"{term.kind} {term.term}", outcome=outcome, text=message))
    return test_cases
