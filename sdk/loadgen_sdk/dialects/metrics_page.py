"""A page of metrics in Prometheus' text format, as servers write it. Pure.

Only what is plain is read here: lines of one form, no escapes, no times. For all else there is the package
prometheus-client, whose import costs more than a short run's reads, and which looks at every character.
"""

from __future__ import annotations

import re
from functools import lru_cache

_NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*"
_SAMPLE = re.compile(
    rf"({_NAME})(?:\{{(.*)\}})? "
    r"([-+]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?(?:[eE][-+]?[0-9]{1,4})?|Inf|NaN))"
)
_TOLD = re.compile(
    rf"# (?:HELP ({_NAME})(?: .*)?|TYPE ({_NAME}) (counter|gauge|summary|histogram|untyped))"
)
_LABEL = '([a-zA-Z_][a-zA-Z0-9_]*)="[^"\\\\]*"'
_LABELS = re.compile(rf"{_LABEL}(?:,{_LABEL})*")
_ONE_LABEL = re.compile(_LABEL)


def plain_samples(text: str) -> list[tuple[str, str, float]] | None:
    """The samples of a page as (name, labels as they stand between braces, value); None where anything is not plain.

    As prometheus-client has it, a counter without `_total` at the end of its name gets it.
    """
    found: list[tuple[str, str, float]] = []
    bare_counter, seen = "", set[str]()
    for line in map(str.strip, text.split("\n")):
        if sample := _SAMPLE.fullmatch(line):
            name, labels, value = sample.groups()
            if labels and not _are_plain(labels):
                return None
            seen.add(name)
            bare_counter = bare_counter if name == bare_counter else ""
            found.append((f"{name}_total" if bare_counter else name, labels or "", float(value)))
        elif told := _TOLD.fullmatch(line):
            described, typed, kind = told.groups()
            if typed in seen or typed == "_total":
                return None
            if typed:
                seen.add(typed)
                bare_counter = typed if kind == "counter" and not typed.endswith("_total") else ""
            elif described != bare_counter:
                bare_counter = ""
        elif line:
            return None
    return found


@lru_cache(4096)  # a page repeats them, line by line and read by read
def _are_plain(labels: str) -> bool:
    names = _ONE_LABEL.findall(labels)
    is_whole = _LABELS.fullmatch(labels) is not None
    return (
        is_whole
        and len({*names}) == len(names)
        and not any(name.startswith("__") for name in names)
    )
