"""Texts and rows of the load check: whether the delivered load matches the workload. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from loadgen.core import format
from loadgen.core.metrics.sections import StimulusCheck

HEAD = ("property", "workload", "measured", "check")

_LABELS = {
    "arrivals": "arrival process",
    "spacing": "inter-arrival CV",
    "rate": "rate",
    "lanes": "concurrency",
    "classes": "mix of classes",
    "outputs": "output lengths",
    "prompts": "prompt lengths",
    "repeats": "repeated prompts",
    "cache": "cache hit rate",
}
"""The label of each check, by its code."""

_OUTCOMES = {True: "matches", False: "DIFFERS", None: "not checked"}


class _TargetAndMeasured(NamedTuple):
    """A property of the load as the workload requests it, and as it was measured."""

    target: str
    measured: str


def rows(checks: Iterable[StimulusCheck]) -> list[tuple[str, str, str, str]]:
    """Return a row per check: the property, its target, the measured value, and the outcome."""
    return [
        (check_label(check.code), *_target_and_measured(check), _OUTCOMES[check.ok])
        for check in checks
    ]


def check_label(code: str) -> str:
    """Return the label of a check."""
    return _LABELS.get(code, code)


def describe_checks(checks: Sequence[StimulusCheck]) -> list[str]:
    """Return each property that differs from the workload, then the names of those that match."""
    texts = []
    for check in checks:
        if check.ok is False:
            target, measured = _target_and_measured(check)
            texts.append(f"DIFFERS: {check_label(check.code)} {measured}, target {target}")

    matching = [check_label(check.code) for check in checks if check.ok]
    if matching:
        texts.append(f"{', '.join(matching)} match the workload")

    return texts


def _target_and_measured(check: StimulusCheck) -> _TargetAndMeasured:
    """Return both sides of a check with the units of its property."""
    describe = _DESCRIBE.get(check.code, _describe_counts)
    return describe(check)


def _describe_arrivals(check: StimulusCheck) -> _TargetAndMeasured:
    """Return the result of a Kolmogorov-Smirnov test of the inter-arrival times."""
    p_value = format.NONE if check.p is None else f"{check.p:.2g}"
    return _TargetAndMeasured("Poisson", f"{check.n:,} inter-arrival times, KS p = {p_value}")


def _describe_rate(check: StimulusCheck) -> _TargetAndMeasured:
    return _TargetAndMeasured(format.rate(check.requested), format.rate(check.delivered))


def _describe_classes(check: StimulusCheck) -> _TargetAndMeasured:
    measured = f"{format.percent(check.delivered)} of {format.counted(check.n, 'request')}"
    return _TargetAndMeasured(format.percent(check.requested), measured)


def _describe_outputs(check: StimulusCheck) -> _TargetAndMeasured:
    target = f"{_format_rounded(check.requested)} tokens"
    return _TargetAndMeasured(target, f"{_format_rounded(check.delivered)} tokens")


def _describe_prompts(check: StimulusCheck) -> _TargetAndMeasured:
    """Return by how much the server's count of prompt tokens differs from the client's count."""
    return _TargetAndMeasured(
        "counted by the client", f"{check.delivered or 0.0:+.1%} by the server"
    )


def _describe_cache(check: StimulusCheck) -> _TargetAndMeasured:
    """Return the cache hit rate. It is None in a workload whose prompts are shared by chance."""
    measured = "not reported" if check.delivered is None else format.percent(check.delivered)
    if check.requested is None:
        return _TargetAndMeasured("any, prompts are shared", measured)
    return _TargetAndMeasured(format.percent(check.requested), measured)


def _describe_spacing(check: StimulusCheck) -> _TargetAndMeasured:
    return _TargetAndMeasured(format.quantity(check.requested), format.quantity(check.delivered))


def _describe_counts(check: StimulusCheck) -> _TargetAndMeasured:
    return _TargetAndMeasured(_format_rounded(check.requested), _format_rounded(check.delivered))


_DESCRIBE: dict[str, Callable[[StimulusCheck], _TargetAndMeasured]] = {
    "arrivals": _describe_arrivals,
    "rate": _describe_rate,
    "classes": _describe_classes,
    "outputs": _describe_outputs,
    "prompts": _describe_prompts,
    "cache": _describe_cache,
    "spacing": _describe_spacing,
}
"""How each check is shown, by its code. Other checks compare two numbers of things."""


def _format_rounded(value: float | None) -> str:
    return format.count(None if value is None else round(value))
