"""Conditions of `--fail-on`: `ttft_ms.p99 > +5%`, `goodput.share < 99%`; read from text, held against a comparison.

Pure. With a sign the limit is a change against the first side, relative (%) or in the metric's unit; without one it is
the value of the other side itself.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING

import msgspec

from loadgen import format
from loadgen.errors import Faults, UserError
from loadgen.metrics.registry import SHARES, metric, paths

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadgen.compare.comparison import Comparison, Difference

_FORM = re.compile(r"\s*([A-Za-z0-9_.]+)\s*(>=|<=|>|<)\s*([+-]?)\s*(\d+(?:\.\d+)?|\.\d+)\s*(%|us|ms|s|)\s*")
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_TESTS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """What fails a comparison. `limit`: a change as a part of one, a difference or a value in the metric's unit."""

    text: str
    metric: str
    test: str
    limit: float
    kind: str  # change, difference, value


class ThresholdOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A condition held against one side. `failed` is null where the metric has no figure on both sides."""

    condition: str
    side: str
    failed: bool | None
    said: str


def parse_thresholds(texts: Sequence[str]) -> tuple[Condition, ...]:
    """Raises Faults with everything that is wrong with them."""
    faults: list[UserError] = []
    found = []
    for text in texts:
        try:
            found.append(_one(text))
        except UserError as fault:
            faults.append(fault)
    if faults:
        raise Faults(faults)
    return tuple(found)


def _one(text: str) -> Condition:
    where = f"--fail-on '{text}'"
    form = _FORM.fullmatch(text)
    if form is None:
        raise UserError("not a condition", where, "write METRIC > +5% (a change) or METRIC > 500ms (a value)")
    name, test, sign, digits, unit = form.groups()
    spellings = (name, name.replace(".", "_ms.", 1), re.sub(r"(?:_ms)?_(p\d[\d_]*|mean|max|min)$", r"_ms.\1", name))
    path = next((spelled for spelled in spellings if metric(spelled) is not None), None)
    if path is None:
        close = get_close_matches(name, paths(), 3, 0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "as in summary.json: ttft_ms.p99, goodput.share"
        raise UserError(f'no metric is called "{name}"', where, hint)
    found = metric(path)
    assert found is not None
    number = float(digits) * (-1 if sign == "-" else 1)
    if unit in _MS:
        if found.unit != "ms":
            raise UserError(f"{path} is no time", where, f"write the limit in {found.unit or 'its own unit'}")
        number *= _MS[unit]
    if unit == "%":
        if not sign and path not in SHARES:
            raise UserError(f"{path} is no share", where, f"for a change write {name} {test} +{digits}%")
        number /= 100
    kind = "value" if not sign else "change" if unit == "%" and path not in SHARES else "difference"
    return Condition(text=text, metric=path, test=test, limit=number, kind=kind)


def hold(
    conditions: Sequence[Condition], found: Comparison, *, beyond_noise: bool = False
) -> Iterator[ThresholdOutcome]:
    """Each condition against each other side. `beyond_noise`: a change fails only where the whole interval is beyond
    the limit."""
    for condition in conditions:
        for one in found.differences:
            if one.metric == condition.metric:
                yield _held(condition, one, beyond_noise)


def _held(condition: Condition, one: Difference, beyond_noise: bool) -> ThresholdOutcome:
    def told(failed: bool | None, said: str) -> ThresholdOutcome:
        return ThresholdOutcome(condition=condition.text, side=one.side, failed=failed, said=said)

    if one.after is None or (one.before is None and condition.kind != "value"):
        return told(None, f"{one.name} has no figure on both sides")
    test = _TESTS[condition.test]
    if condition.kind == "value":
        return told(test(one.after, condition.limit), f"{one.name} is {format.quantity(one.after)} {one.unit}".rstrip())
    assert one.before is not None
    said = f"{one.name}: {format.quantity(one.before)} to {format.quantity(one.after)} {one.unit}".rstrip()
    if condition.kind == "difference":
        return told(test(one.after - one.before, condition.limit), said)
    if one.change is None:
        return told(None, f"{said}: no relative change from zero")
    said += f" ({one.change * 100:+.1f} %)"
    if not beyond_noise:
        return told(test(round(one.change, 9), condition.limit), said)  # 105 against 100 is 5 %, not a little more
    end = one.low if condition.test in (">", ">=") else one.high
    if end is None:
        return told(False, f"{said}; without an interval: {one.why}")
    return told(test(end, condition.limit), f"{said}, interval {interval(one)}")


def interval(one: Difference) -> str:
    """`+8.1 to +14.2 %`; of a share, in points."""
    if one.low is None or one.high is None:
        return format.NONE
    unit = "points" if one.absolute else "%"
    high = f"{one.high * 100:+.1f}" if one.high < 99 else "any"
    return f"{one.low * 100:+.1f} to {high} {unit}"
