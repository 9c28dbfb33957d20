"""The verdict on a run: whether it is valid, with its reasons, caveats and warnings. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.core.limits import ValidityLimits
from loadgen.core.metrics.reasons import format_reason
from loadgen.core.results.manifest import ReasonCode

if TYPE_CHECKING:
    from collections.abc import Iterable

CLIENT_CODES = frozenset(("sent_late", "arrivals_unsure", "generator_busy"))
"""Reasons which say that the load generator, not the server, may have determined the metrics."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the measurement can be trusted.

    This does not judge the SLO: a run that missed a limit can be valid. The sentences are for
    people, and the codes say the same for programs, one for each sentence.

    Attributes:
        valid: Whether there is no reason against it.
        reasons: Why the run is not valid.
        warnings: What to know about the run.
        limits: The limits that the run was judged by.
        caveats: What belongs beside VALID: withheld metrics, or a load that is not the requested
            one.
        codes: The codes of `reasons`.
        warning_codes: The codes of `warnings`.
        caveat_codes: The codes of `caveats`.
    """

    valid: bool
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    limits: ValidityLimits
    caveats: tuple[str, ...] = ()
    codes: tuple[ReasonCode, ...] = ()
    warning_codes: tuple[ReasonCode, ...] = ()
    caveat_codes: tuple[ReasonCode, ...] = ()


def make_verdict(
    limits: ValidityLimits,
    reasons: Iterable[ReasonCode] = (),
    warnings: Iterable[ReasonCode] = (),
    caveats: Iterable[ReasonCode] = (),
) -> Verdict:
    """Return the verdict on a run, with the sentence of each code.

    Args:
        limits: The limits that the run was judged by.
        reasons: Why the run is not valid. Empty for a valid run.
        warnings: Hints for readers of the results.
        caveats: Why the metrics of a valid run are incomplete, or are not about the requested load.
    """
    reason_codes = tuple(reasons)
    warning_codes = tuple(warnings)
    caveat_codes = tuple(caveats)

    return Verdict(
        valid=not reason_codes,
        limits=limits,
        # The codes.
        codes=reason_codes,
        warning_codes=warning_codes,
        caveat_codes=caveat_codes,
        # The sentence of each code.
        reasons=_format_codes(reason_codes),
        warnings=_format_codes(warning_codes),
        caveats=_format_codes(caveat_codes),
    )


def _format_codes(codes: Iterable[ReasonCode]) -> tuple[str, ...]:
    """Return the sentence of each code."""
    return tuple(format_reason(code) for code in codes)


def delivered_output_share(verdict: Verdict) -> float:
    """Return the share of the requested output tokens that the responses of a run have.

    A run whose responses are too short has a caveat with the code "shortened" and this share. A run
    without such a caveat delivered nearly all tokens, so the result is 1.
    """
    for caveat in verdict.caveat_codes:
        if caveat.code != "shortened":
            continue

        share = caveat.values.get("share")
        if share is not None:
            return float(share)

    return 1.0


def add_warning(verdict: Verdict, code: str, values: dict[str, Any]) -> Verdict:
    """Return the verdict with one more warning."""
    warning = ReasonCode(code=code, values=values)
    return msgspec.structs.replace(
        verdict,
        warnings=(*verdict.warnings, format_reason(warning)),
        warning_codes=(*verdict.warning_codes, warning),
    )


def remove_warning(verdict: Verdict, code: str) -> Verdict:
    """Return the verdict without the warnings of a code, and without their sentences."""
    removed_texts = {
        format_reason(warning) for warning in verdict.warning_codes if warning.code == code
    }
    texts = [text for text in verdict.warnings if text not in removed_texts]
    codes = [warning for warning in verdict.warning_codes if warning.code != code]
    return msgspec.structs.replace(verdict, warnings=tuple(texts), warning_codes=tuple(codes))
