"""Labels of calls: user, session, feature, prompt version, or whatever tells calls apart."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..errors import WrongUse

log = logging.getLogger("loadgen_sdk")

Labels = Mapping[str, str | int]
"""Names and short values. The names are identifiers, because they may be keyword arguments."""

_MAX_LOGGED_MESSAGES = 100

NO_LABELS: dict[str, str] = {}
current_labels: ContextVar[dict[str, str]] = ContextVar("loadgen_sdk_labels", default=NO_LABELS)


@contextmanager
def labelled(**labels: str | int) -> Iterator[None]:
    """Add labels to every call inside the context.

    For example, `with labelled(feature="search"):`. Contexts nest, and the inner value of a label
    replaces the outer one. Tasks and threads that `asyncio` starts inside the context inherit the
    labels.

    Raises:
        WrongUse: A name or a value is not valid.
    """
    token = current_labels.set({**current_labels.get(), **validate_labels(labels)})
    try:
        yield
    finally:
        current_labels.reset(token)


def validate_labels(labels: Labels | None) -> dict[str, str]:
    """Return labels with all values as text, if their names and values are valid.

    Raises:
        WrongUse: A name or a value is not valid.
    """
    if not labels:
        return NO_LABELS

    hint = 'give names and short values: labels={"feature": "search"}'
    if not isinstance(labels, Mapping):
        raise WrongUse(
            "wrong_type", f"labels must be a mapping, not a {type(labels).__name__}", hint
        )

    for name, value in labels.items():
        if not _is_label_name(name):
            raise WrongUse("invalid_value", f"{name!r} is not a valid name of a label", hint)
        if not isinstance(value, str | int):
            raise WrongUse(
                "wrong_type",
                f"the label {name} must be a short text or number, not a {type(value).__name__}",
                hint,
            )

    return {name: str(value) for name, value in labels.items()}


def keep_valid_labels(labels: Any) -> dict[str, str]:
    """Return the valid ones of the labels that the application has passed to a call.

    An invalid label is logged and left out, because a label must not fail the call.
    """
    try:
        return validate_labels(labels)
    except WrongUse as error:
        _log_once(str(error))

    # At least one label is invalid. The others are kept.
    if not isinstance(labels, Mapping):
        return {}

    return {
        name: str(value)
        for name, value in labels.items()
        if _is_label_name(name) and isinstance(value, str | int)
    }


def _is_label_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier()


@functools.lru_cache(maxsize=_MAX_LOGGED_MESSAGES)
def _log_once(message: str) -> None:
    log.warning("a label of a call was lost: %s", message)
