"""Labels of calls: user, session, feature, prompt version; whatever an application wants to tell its calls apart by."""

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
"""Names and short values. The names are words that Python could have as names: they become keyword arguments."""

NO_LABELS: dict[str, str] = {}
current_labels: ContextVar[dict[str, str]] = ContextVar("loadgen_sdk_labels", default=NO_LABELS)


@contextmanager
def labelled(**labels: str | int) -> Iterator[None]:
    """`with labelled(feature="search", prompt_version=3):` every call in this block carries these labels.

    Blocks nest; the inner value of a label wins. Tasks and threads started by `asyncio` inside the block inherit it.
    """
    token = current_labels.set({**current_labels.get(), **checked_labels(labels)})
    try:
        yield
    finally:
        current_labels.reset(token)


def checked_labels(labels: Labels | None) -> dict[str, str]:
    """`labels` with texts as values. Raises WrongUse for what is no label."""
    if not labels:
        return NO_LABELS
    hint = 'give names and short values: labels={"feature": "search"}'
    if not isinstance(labels, Mapping):
        raise WrongUse("wrong_type", f"labels is a {type(labels).__name__}", hint)
    for name, value in labels.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise WrongUse("invalid_value", f"{name!r} is no name of a label", hint)
        if not isinstance(value, str | int):
            raise WrongUse("wrong_type", f"the label {name} is a {type(value).__name__}", hint)
    return {name: str(value) for name, value in labels.items()}


def usable_labels(labels: Any) -> dict[str, str]:
    """Those of `labels` that are labels: of one call, which does not fail because of the others. They are logged."""
    try:
        return checked_labels(labels)
    except WrongUse as error:
        _log_once(str(error))
    given = labels.items() if isinstance(labels, Mapping) else ()
    return {
        name: str(value)
        for name, value in given
        if isinstance(name, str) and name.isidentifier() and isinstance(value, str | int)
    }


@functools.lru_cache(maxsize=100)
def _log_once(what: str) -> None:
    log.warning("a call has lost a label: %s", what)
