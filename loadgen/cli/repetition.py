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


def parse_repetition(
    text: str | None, *, default_most: int | None = None, default_precision: float | None = None
) -> Repetition | None:
    """Return the repetition that `--repeat` specifies, or None if the option was not typed.

    The text is the number of runs or `auto`, followed by settings: `auto,most=10,within=5%`.

    Args:
        text: The value of the option, or None.
        default_most: The largest number of runs of `auto` without `most`. None for
            DEFAULT_MAX_RUNS.
        default_precision: The precision of `auto` without `within`. None for DEFAULT_PRECISION.

    Raises:
        CombinedError: With every error in the text.
    """
    from loadgen.repeated import repeats

    if text is None:
        return None

    option = f"--repeat {text}"
    run_count_text, *pairs = (item.strip() for item in text.split(","))

    settings: dict[str, str] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        settings[name] = value

    errors: list[LoadgenError] = _find_unknown_settings(settings, option)
    has_duplicates = len(settings) < len(pairs)
    if has_duplicates:
        errors.append(
            UserError("duplicate", "a setting is specified twice", option, "keep one of them")
        )

    # Each value is parsed by itself, so that all errors are reported together.
    run_count = None
    max_runs = None
    precision = None
    pause_ns = None

    with collecting(errors):
        run_count = _parse_run_count(run_count_text, settings, option)

    with collecting(errors):
        max_runs = _parse_max_runs(settings.get("most"), option)

    with collecting(errors):
        precision = _parse_precision(settings.get("within"), option)

    with collecting(errors):
        pause_ns = parse_option(
            "--repeat pause", settings.get("pause"), partial(units.duration_ns, default_unit="s")
        )

    if errors:
        raise CombinedError(errors)

    return repeats.Repetition(
        count=run_count,
        most=max_runs or default_most or repeats.DEFAULT_MAX_RUNS,
        precision=precision or default_precision or repeats.DEFAULT_PRECISION,
        pause_ns=pause_ns or 0,
    )


def _find_unknown_settings(settings: Mapping[str, str], option: str) -> list[LoadgenError]:
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


def _parse_run_count(text: str, settings: Mapping[str, str], option: str) -> int | None:
    """Return the fixed number of runs, or None for `auto`, which repeats until a precision.

    Raises UserError for a number out of range, and for a fixed number with settings of `auto`.
    """
    if text == "auto":
        return None

    run_count = int(text) if text.isdecimal() else 0
    if not 1 <= run_count <= MAX_RUNS:
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

    return run_count


def _parse_max_runs(text: str | None, option: str) -> int | None:
    """Return the largest number of runs of `auto`, from the setting `most`.

    Returns None without the setting. Raises UserError for a number out of range.
    """
    from loadgen.repeated import repeats

    if text is None:
        return None

    max_runs = int(text) if text.isdecimal() else 0
    if not repeats.MIN_RUNS <= max_runs <= MAX_RUNS:
        raise UserError(
            "out_of_range",
            f"most must be an integer from {repeats.MIN_RUNS} to {MAX_RUNS}",
            option,
            "most=10",
        )

    return max_runs


def _parse_precision(text: str | None, option: str) -> float | None:
    """Return the precision at which `auto` ends, from the setting `within`.

    The precision is the half-width of the confidence interval, as a fraction of the mean. Returns
    None without the setting. Raises UserError for another text than a positive fraction.
    """
    precision = parse_option("--repeat within", text, units.share)
    if precision is not None and precision <= 0:
        raise UserError("out_of_range", "within must be greater than 0", option, "within=5%")
    return precision
