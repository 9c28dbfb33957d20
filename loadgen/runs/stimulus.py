"""The checks of the load that was delivered, in words: for the text of a run, its page, and that of a validation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loadgen.core import format
from loadgen.core.metrics.sections import StimulusCheck

HEAD = ("load as asked", "asked", "seen", "")
_TITLES = {
    "arrivals": "arrivals",
    "spacing": "variation of gaps",
    "rate": "rate",
    "lanes": "lanes at work",
    "classes": "mix of classes",
    "outputs": "lengths of answers",
    "prompts": "lengths of prompts",
    "repeats": "repeated prompts",
    "cache": "prompt tokens from cache",
}


def rows(checks: Iterable[StimulusCheck]) -> list[tuple[str, str, str, str]]:
    """A row for each check: what, asked, seen, and whether they agree."""
    words = {True: "as asked", False: "NOT AS ASKED", None: "cannot be told"}
    return [(_TITLES[check.code], *_asked_and_seen(check), words[check.ok]) for check in checks]


def texts(checks: Sequence[StimulusCheck]) -> list[str]:
    """The same in short: each property that is not as asked, then the names of those that are."""
    wrong = [
        f"NOT AS ASKED: {title} {seen}, asked {asked}"
        for (title, asked, seen, _), check in zip(rows(checks), checks, strict=True)
        if check.ok is False
    ]
    fine = ", ".join(_TITLES[check.code] for check in checks if check.ok)
    return [*wrong, *([f"as asked: {fine}"] if fine else [])]


def _asked_and_seen(check: StimulusCheck) -> tuple[str, str]:
    asked, seen = check.asked, check.seen
    if check.code == "arrivals":
        p = format.NONE if check.p is None else f"{check.p:.2g}"
        return "Poisson", f"{check.n:,} gaps, KS p = {p}"
    if check.code == "rate":
        return format.rate(asked), format.rate(seen)
    if check.code == "classes":
        return format.percent(
            asked
        ), f"{format.percent(seen)} of {format.counted(check.n, 'request')}"
    if check.code == "outputs":
        return f"{_whole(asked)} tokens", f"{_whole(seen)} tokens"
    if check.code == "prompts":
        return "as counted here", f"{seen or 0.0:+.1%} by the server"
    if check.code == "cache":
        declared = (
            "any: prompts are shared"
            if asked is None
            else format.percent(asked)
            if asked
            else "none"
        )
        return declared, "not said" if seen is None else format.percent(seen)
    if check.code == "spacing":
        return format.quantity(asked), format.quantity(seen)
    return _whole(asked), _whole(seen)


def _whole(value: float | None) -> str:
    return format.count(None if value is None else round(value))
