"""The option `--repeat`: `3`, `3,pause=10m`, or `auto,most=10,within=5%`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from loadgen.cli.option_parsers import parse_option
from loadgen.core import units
from loadgen.core.errors import CombinedError, LoadgenError, UserError, collecting

if TYPE_CHECKING:
    from loadgen.repeated.repeats import Repetition

MAX_RUNS = 100
"""The largest number of runs, against a mistyped number that would occupy a server for days."""

SETTINGS = ("most", "within", "pause")
"""What may follow the number of runs: the most runs and the precision of auto, and a pause."""


def parse_repetition(text: str | None) -> Repetition | None:
    """Return the repetition that `--repeat` specifies; None without it.

    Raises CombinedError with every error that was found.
    """
    from loadgen.repeated import repeats

    if text is None:
        return None
    option = f"--repeat {text}"
    number, *pairs = (part.strip() for part in text.split(","))
    settings: dict[str, str] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        settings[name] = value
    errors: list[LoadgenError] = _unknown_settings(settings, option)
    has_duplicates = len(settings) < len(pairs)
    if has_duplicates:
        errors.append(
            UserError("duplicate", "a setting is specified twice", option, "keep one of them")
        )
    count = None
    most = None
    within = None
    pause_ns = None
    with collecting(errors):
        count = _parse_count(number, settings, option)
    with collecting(errors):
        most = _parse_most(settings.get("most"), option)
    with collecting(errors):
        within = _parse_within(settings.get("within"), option)
    with collecting(errors):
        pause_ns = parse_option(
            "--repeat pause", settings.get("pause"), partial(units.duration_ns, bare="s")
        )
    if errors:
        raise CombinedError(errors)
    return repeats.Repetition(
        count=count,
        most=most or repeats.DEFAULT_MAX_RUNS,
        precision=within or repeats.DEFAULT_PRECISION,
        pause_ns=pause_ns or 0,
    )


def _unknown_settings(settings: Mapping[str, str], option: str) -> list[LoadgenError]:
    """Return an error for each setting of `--repeat` that does not exist."""
    return [
        UserError(
            "unknown_name",
            f'unknown setting "{name}"',
            option,
            "known: pause=10m, most=10, within=5%",
        )
        for name in settings
        if name not in SETTINGS
    ]


def _parse_count(number: str, settings: Mapping[str, str], option: str) -> int | None:
    """Return a fixed number of runs; None for auto. Raises UserError."""
    if number == "auto":
        return None
    count = int(number) if number.isdecimal() else 0
    if not 1 <= count <= MAX_RUNS:
        raise UserError(
            "invalid_value",
            f"must be an integer from 1 to {MAX_RUNS}, or auto",
            option,
            "--repeat 3",
        )
    if "most" in settings or "within" in settings:
        raise UserError(
            "no_effect",
            "most and within need --repeat auto",
            option,
            "use --repeat auto, or leave out most and within",
        )
    return count


def _parse_most(text: str | None, option: str) -> int | None:
    """Return the largest number of runs of `auto`; None without the setting. Raises UserError."""
    from loadgen.repeated import repeats

    if text is None:
        return None
    most = int(text) if text.isdecimal() else 0
    if not repeats.MIN_RUNS <= most <= MAX_RUNS:
        raise UserError(
            "out_of_range",
            f"most must be an integer from {repeats.MIN_RUNS} to {MAX_RUNS}",
            option,
            "most=10",
        )
    return most


def _parse_within(text: str | None, option: str) -> float | None:
    """Return the precision at which `auto` ends; None without the setting. Raises UserError.

    The precision is the half-width of the confidence interval, as a fraction of the mean.
    """
    within = parse_option("--repeat within", text, units.share)
    if within is not None and within <= 0:
        raise UserError("out_of_range", "within must be greater than 0", option, "within=5%")
    return within
