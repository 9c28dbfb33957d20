"""Texts about the accepted length of a run, compared with the stated one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.render.section import Kind, Paragraph

if TYPE_CHECKING:
    from loadgen.core.metrics.accepted_length import AcceptedLengthCheck, LengthSource

VERDICTS: dict[bool | None, str] = {
    True: "comparable",
    False: "NOT COMPARABLE",
    None: "UNKNOWN",
}
_KINDS: dict[bool | None, Kind] = {True: "good", False: "bad", None: "warn"}

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
    `2.490 tokens/step, target 2.49: comparable (-0.1 %)`.
    """
    target = f"target {check.target:g}"
    if check.target_name:
        target += f" ({check.target_name})"
    if check.realised is None or check.difference is None:
        return f"{VERDICTS[None]}, {target}: {check.reason}"

    length = f"{format_length(check.realised)} tokens/step, {target}"
    if check.comparable is None:
        return f"{length}: {VERDICTS[None]}, {check.reason}"
    return f"{length}: {VERDICTS[check.comparable]} ({check.difference * 100:+z.1f} %)"


def explain_verdict(check: AcceptedLengthCheck) -> Paragraph:
    """Return whether the accepted length is the stated one, and how it was measured.

    The accepted length is the mean number of tokens per step under speculative decoding.
    """
    sentences = [f"Accepted length: {describe_verdict(check)}."]
    if check.source:
        steps = "" if check.steps is None else f", {format.counted(check.steps, 'step')}"
        sentences.append(f"Measured {_SOURCES[check.source]}{steps}.")
    if check.comparable is False:
        sentences.append(
            "Do not compare the speed of this run with results that have the stated length: "
            "a longer accepted length gives more tokens for the same work."
        )
    return Paragraph(" ".join(sentences), _KINDS[check.comparable])
