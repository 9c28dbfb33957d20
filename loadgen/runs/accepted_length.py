"""Texts about the accepted length of a run, compared with the stated one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.render.section import Kind, Paragraph

if TYPE_CHECKING:
    from loadgen.core.metrics.accepted_length import AcceptedLengthCheck, LengthSource

COMPARABLE = "comparable"
NOT_COMPARABLE = "NOT COMPARABLE"
UNKNOWN = "UNKNOWN"

_SOURCES: dict[LengthSource, str] = {
    "": "",
    "counters": "by the counters of the servers in the measurement window",
    "responses": "by the drafts that responses report",
    "gauges": "by gauges of the latest steps of the servers",
}


def format_length(length: float | None) -> str:
    """Return an accepted length with as many digits as published ones have, and one more."""
    return format.NONE if length is None else f"{length:.3f}"


def describe_verdict(check: AcceptedLengthCheck) -> str:
    """Return whether the measured accepted length is the stated one, as one short line.

    The accepted length is the mean number of tokens per step of the model. For example:

    - `2.490 tokens/step, target 2.49: comparable (-0.1 %)`
    - `UNKNOWN, target 2.49: the server reports no accepted length`
    """
    target = f"target {check.target:g}"
    if check.target_name:
        target = f"{target} ({check.target_name})"
    if check.realised is None or check.difference is None:
        return f"{UNKNOWN}, {target}: {check.reason}"

    measured = f"{format_length(check.realised)} tokens/step, {target}"
    if check.comparable is None:
        return f"{measured}: {UNKNOWN}, {check.reason}"

    verdict = COMPARABLE if check.comparable else NOT_COMPARABLE
    difference_percent = check.difference * 100
    return f"{measured}: {verdict} ({difference_percent:+z.1f} %)"


def explain_verdict(check: AcceptedLengthCheck) -> Paragraph:
    """Return whether the accepted length is the stated one, and how it was measured.

    The accepted length is the mean number of tokens per step under speculative decoding. A run
    with another accepted length is not comparable to results with the stated one. If the length was
    not measured, or over too few steps, this is unknown, which is a warning.
    """
    sentences = [f"Accepted length: {describe_verdict(check)}."]
    if check.source:
        steps = "" if check.steps is None else f", {format.counted(check.steps, 'step')}"
        sentences.append(f"Measured {_SOURCES[check.source]}{steps}.")

    kind: Kind = "warn"
    if check.comparable is True:
        kind = "good"
    elif check.comparable is False:
        kind = "bad"
        sentences.append(
            "Do not compare the speed of this run with results that have the stated length: "
            "a longer accepted length gives more tokens for the same work."
        )
    return Paragraph(" ".join(sentences), kind)
