"""A validation for people: one page of HTML for those who will not read more, and the same as text for a terminal.

Pure: a `Validation` in, a string out. Every figure was made in `judge.py`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from html import escape
from typing import Literal

from loadgen import format
from loadgen.contracts.verdict import FAIL, INCONCLUSIVE, PASS, Judgement, LevelVerdict, Validation
from loadgen.report import page
from loadgen.report.junit import Case

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
KIND = {PASS: "good", FAIL: "bad", INCONCLUSIVE: "warn"}
WIDTH = 110


def render(found: Validation) -> str:
    """The page."""
    sheet = page.Page(f"{found.verdict}: {found.contract}", f"loadgen {found.version} validation")
    if found.simulated:
        sheet.add(
            page.mark("SIMULATED", "a model of a server answered, no real one: this verdict is an exercise", "warn")
        )
    if found.interrupted:
        sheet.add(page.mark("INTERRUPTED", "the user broke it off: what was not run is not known", "warn"))
    sheet.add(f"<h1>{escape(found.contract)}</h1>")
    sheet.add(
        f'<p class="sentence {KIND[found.verdict]}">{escape(found.verdict)}: {escape(found.sentence)}.</p>',
        f"<p>{escape(found.verdict)} means: {escape(MEANING[found.verdict])}.</p>",
        page.facts(
            (
                ("Target", found.target),
                ("Model", found.model),
                ("Server", found.server),
                ("When", f"{found.started.replace('T', ' ')} to {found.ended.replace('T', ' ')}"),
                ("Confidence", f"{found.confidence * 100:g} %, two-sided, of every interval"),
                ("Contract", f"SHA-256 {found.contract_sha256}"),
            )
        ),
    )
    shared = _shared(found)
    for level in found.levels:
        sheet.section(f"{level.name}: {level.verdict}")
        sheet.add(f'<p class="soft">{escape(_load(level))}</p>')
        if level.trouble:
            sheet.add(page.mark("NOTHING SHOWN", level.trouble, "warn"))
        rows = [_row(term, level.trouble) for term in level.terms]
        sheet.add(_coloured(page.table(("verdict", "", "promise", "measured"), rows, words=True)))
        sheet.add(page.listed([note for note in level.notes if note not in shared], "warn"))
    if shared:
        sheet.section("Said of every level")
        sheet.add(page.listed(shared, "warn"))
    if found.preflight:
        sheet.section("Seen before the first request")
        sheet.add(page.listed(found.preflight))
    sheet.section("What the words mean")
    sheet.add(page.listed((f"{word}: {meaning}" for word, meaning in _words(found))))
    return sheet.render()


def _coloured(table: str) -> str:
    """The verdicts of a table as they are above it, and no unit on another line than its number."""
    for word, kind in KIND.items():
        table = table.replace(f"<td>{word}</td>", f'<td class="{kind}"><b>{word}</b></td>')
    return _UNITS.sub("\\1\u00a0\\2", table)


def _words(found: Validation) -> Iterator[tuple[str, str]]:
    yield "PASS", "the whole interval of the measured figure keeps the promise"
    yield "FAIL", "the whole interval breaks it"
    yield (
        "INCONCLUSIVE",
        "the interval holds the promise, the sample is too small for the percentile, the load was too short to "
        "have left its start-up or to have seen what its queue can do, data is missing, "
        "the load generator was the limit, or the run was not valid",
    )
    yield "must, should", "the verdict is that of the must terms; should terms are told and decide nothing"
    told = " ".join(term.term for level in found.levels for term in level.terms)
    for word, meaning in TERMS.items():
        if re.search(rf"\b{word}\b", told):
            yield word, meaning
    if re.search(r"\bp[0-9]", told):
        yield "p50, p99", "so many of 100 requests are at or below it; one that failed is above every limit"


def _shared(found: Validation) -> list[str]:
    """Notes that all levels have, if there are several: told once."""
    notes = [level.notes for level in found.levels]
    return [note for note in notes[0] if all(note in other for other in notes)] if len(notes) > 1 else []


def _load(level: LevelVerdict) -> str:
    parts = [level.workload, level.load, f"{level.ok:,} of {level.requests:,} requests ok", ", ".join(level.runs)]
    return " · ".join(part for part in parts if part)


def _row(term: Judgement, told: str) -> tuple[str, ...]:
    return (term.verdict, term.kind, term.term, format.NONE if term.reason == told else term.reason)


def text(found: Validation) -> str:
    """The verdict for a terminal, ending in a newline; the last line is the verdict itself."""
    lines = [f"contract: {found.contract}   target: {found.target} {found.model}".rstrip()]
    if found.simulated:
        lines.append("SIMULATED, not a real server: this verdict is an exercise")
    shared = _shared(found)
    for level in found.levels:
        lines += ["", f"{level.name}: {level.verdict}   ({_load(level)})"]
        lines += _wrapped("  ", level.trouble) if level.trouble else []
        for term in level.terms:
            lines += _wrapped(f"  {term.verdict:<12}  {term.kind:<6}  ", f"{term.term}")
            lines += _wrapped(" " * 24, term.reason) if term.reason != level.trouble else []
        for note in level.notes:
            lines += _wrapped("  note: ", note) if note not in shared else []
    lines += [""] if shared else []
    for note in shared:
        lines += _wrapped("note, of every level: ", note)
    return "\n".join([*lines, "", f"{found.verdict}: {found.sentence}"]) + "\n"


def _wrapped(lead: str, sentence: str) -> list[str]:
    return textwrap.wrap(sentence, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead))


def cases(validation: Validation) -> list[Case]:
    """The terms as test cases: an undecided one, and a should that does not hold, is skipped with its reason."""
    found = []
    for level in validation.levels:
        for term in level.terms:
            outcome: Literal["passed", "failed", "skipped"] = "skipped"
            if term.verdict == PASS:
                outcome = "passed"
            elif term.verdict == FAIL and term.kind == "must":
                outcome = "failed"
            message = f"{term.verdict}: {term.reason}"
            found.append(Case(group=level.name, name=f"{term.kind} {term.term}", outcome=outcome, text=message))
    return found
