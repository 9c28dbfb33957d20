"""What the observers for OpenTelemetry and Prometheus have in common: bucket bounds and labels."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import WrongUse
from .measurement import Measurement

DURATION_BOUNDS_S = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
)
"""The bucket bounds of durations in the semantic conventions of OpenTelemetry."""

TPOT_BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
)
"""The bucket bounds of the time per output token. They begin lower, where fast servers are."""


def validate_label_names(names: Sequence[str], option: str) -> tuple[str, ...]:
    """Return the names of labels that an observer turns into labels of its metrics.

    Args:
        names: The names. A single string is not valid, since it would be read letter by letter.
        option: The option that they come from, for the error.

    Raises:
        WrongUse: They are not a sequence of identifiers.
    """
    is_valid = not isinstance(names, str) and all(
        isinstance(name, str) and name.isidentifier() for name in names
    )
    if not is_valid:
        raise WrongUse(
            "wrong_type", f"{option}={names!r}", f'give the names of labels: {option}=("feature",)'
        )

    return tuple(names)


def error_type_of(measurement: Measurement) -> str:
    """Return the HTTP status of a failed call, or else the kind of failure.

    It is "" for a call that is ok. There are few values, and none of them is a text of the server.
    """
    failure = measurement.failure
    if failure is None:
        return ""
    return str(failure.http_status) if failure.http_status >= 400 else failure.kind
