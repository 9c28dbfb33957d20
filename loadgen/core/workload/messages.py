"""Error messages for a workload file: what was written, its position, and what is allowed.

Pure: takes an error of pydantic and the positions of the file, returns a `Fault`.
"""

from __future__ import annotations

from typing import Any, TypeVar

from loadgen.core import units
from loadgen.core.errors import Code, Fault, Place, UserError, meant
from loadgen.core.slo import METRIC_ALIASES
from loadgen.core.workload.fields import NOTHING_FITS, Part, Source
from loadgen.core.workload.yaml_marks import Map, Seq, Spot, child, where
from loadgen.plain_reading import checked

M = TypeVar("M", bound=Part)


def in_order(faults: list[Fault]) -> list[Fault]:
    """Sort faults by line and column, and keep one fault per mistake.

    Two mistakes cause a second fault that says nothing new: an unset variable also makes its value wrong, and a
    mistyped key is also reported as missing.
    """
    nowhere = Place("", 0, 0)
    places = [(fault, fault.place or nowhere) for fault in faults]
    mistyped = {fault.values.get("meant") for fault in faults}
    by_place: dict[tuple[str, str], tuple[Fault, Place]] = {}
    for fault, at in places:
        missing = (
            fault.key if fault.code == "missing_key" else ""
        )  # several keys can be missing at one position
        if not missing or missing not in mistyped:
            by_place.setdefault((fault.where, missing), (fault, at))
    return [
        fault
        for fault, _ in sorted(by_place.values(), key=lambda told: (told[1].line, told[1].column))
    ]


def validated(model: type[M], document: Any, source: Source) -> M | None:
    """What a file says, checked; None where it is wrong: the faults are in `source` then."""
    made: M | None
    made, wrong = checked(model, document, source)
    source.faults.extend(fault(detail, document, source.file) for detail in wrong)
    return made


LONGEST_SHOWN = 60  # characters shown of a wrong value

_PREDICATES: dict[str, tuple[Code, str, str]] = {
    "model_type": ("wrong_type", "must be a mapping (key: value)", ""),
    "model_attributes_type": ("wrong_type", "must be a mapping (key: value)", ""),
    "tuple_type": ("wrong_type", "must be a list", "start each item with a dash"),
    "string_pattern_mismatch": (
        "invalid_value",
        "has characters that do not go here",
        "letters, digits, and . _ - after the first",
    ),
    "int_type": ("wrong_type", "must be a whole number", "without quotes and unit"),
    "float_type": ("wrong_type", "must be a number", "without quotes and unit"),
    "finite_number": ("out_of_range", "must be finite", ""),
    "bool_type": ("wrong_type", "must be true or false", ""),
    "string_type": ("wrong_type", "must be text", "put it in quotes"),
    "string_too_short": ("missing_value", "must not be empty", ""),
    "too_short": ("missing_value", "must not be empty", ""),
}


def fault(error: Any, top: Map, file: str) -> Fault:
    """Return the fault for one error of pydantic: what was written, its position, and what is allowed."""
    kind, loc, context = error["type"], error["loc"], error.get("ctx", {})
    spot, path, holder = locate(top, loc)
    at = where(file, spot, path)
    text = spot.text if len(spot.text) <= LONGEST_SHOWN else spot.text[:LONGEST_SHOWN] + "..."
    if path.endswith("url"):  # it may hold a password
        text = ""
    shown = f'"{text}" ' if text else f"{path} " if path else ""
    # A value in a column file has no position in the workload.
    if loc and isinstance(loc[-1], int) and isinstance(holder, str) and kind != NOTHING_FITS:
        shown = f'value {loc[-1] + 1} in "{text}" '
    if error["input"] is None and not spot.text and kind != "missing":
        return UserError(
            "missing_value", f"{path} has no value", at, _example(path.rpartition(".")[2])
        )
    if kind == "missing":
        key = str(loc[-1])
        return UserError("missing_key", f'missing "{key}"', at, _example(key), key=child(path, key))
    if kind == NOTHING_FITS:
        noun, _, choices = error["msg"].partition(": ")
        known = choices.split(", ")
        a_noun = f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
        if isinstance(holder, Map) and len(holder) > 1:
            hint = f"its parameters go inside, {_example(noun + ' inside', known)}"
            return UserError("conflict", f"{a_noun} has one key, not {len(holder)}", at, hint)
        if isinstance(holder, Map) and holder:
            word = next(iter(holder))
            return UserError(
                "unknown_name",
                f'unknown {noun} "{word}"',
                where(file, holder.keys_at[word], path),
                meant(word, known),
            )
        return UserError("wrong_type", f"{shown}is not {a_noun}", at, _example(noun, known))
    if kind == "value_error" and isinstance(context.get("error"), units.Wrong):
        wrong = context["error"]
        return UserError(wrong.code, f"{shown}{wrong}", at, wrong.hint)
    if kind == "literal_error":
        known = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
        return UserError("unknown_name", f"{shown}is not known here", at, meant(spot.text, known))
    message = error["msg"].replace("Input should", "should").replace("String should", "should")
    code, predicate, hint = _PREDICATES.get(kind, ("out_of_range", message, ""))
    return UserError(code, f"{shown}{predicate}", at, hint)


def _example(key: str, known: list[str] | None = None) -> str:
    examples = {
        "name": "name: anything",
        "requests": "requests: {input_tokens: 150, output_tokens: 200}, or {from: prompts.jsonl}",
        "input_tokens": "input_tokens: 150",
        "output_tokens": "output_tokens: 200",
        "arrival": "arrival: {poisson: 10/s} or {closed: 8}",
        "length": "150, or {uniform: {min: 100, max: 200}}",
        "delay": "2s, or {uniform: {min: 1s, max: 3s}}",
        "arrival inside": "arrival: {gamma: {rate: 10/s, burstiness: 0.5}}",
        "length inside": "{normal: {mean: 300, stddev: 50}}",
        "term": "{ttft: 2s}, or {ttft: {limit: 2s, at: p95}}",
        "term inside": "{ttft: {limit: 2s, at: p95}}",
        "delay inside": "{normal: {mean: 2s, stddev: 500ms}}",
        "stages": "stages: [{arrival: {poisson: 10/s}, duration: 30s}]",
        "url": "url: http://host:8000",
        "tool_result_tokens": "tool_result_tokens: 500",
        "result_tokens": "result_tokens: 500",
        "from": "{ramp: {from: 1/s, to: 10/s}}",
        "to": "{ramp: {from: 1/s, to: 10/s}}",
        "burstiness": "{gamma: {rate: 10/s, burstiness: 0.5}}",
        "stddev": "{normal: {mean: 300, stddev: 50}}",
        "sigma": "{lognormal: {median: 300, sigma: 0.8}}",
    }
    example = f"like {examples[key]}" if key in examples else ""
    return f"{example}; known: {', '.join(known)}" if known else example


_OTHER_SPELLINGS = {"warmup": "measured"}  # another spelling of a field


def locate(top: Map, loc: tuple[str | int, ...]) -> tuple[Spot, str, Any]:
    """Find pydantic's `loc` in the file. Returns position, path and value of the deepest value on the way.

    Skips steps that are not keys in the file: tags of unions, and fields that the short form omits.
    """
    spot, path = top.at, ""
    holder: Any = top
    for step in loc:
        if isinstance(holder, Map) and isinstance(step, str):
            spellings = (
                key
                for key in holder
                if step in (key, METRIC_ALIASES.get(key), _OTHER_SPELLINGS.get(key))
            )
            if (key := next(spellings, None)) is not None:
                spot, path, holder = holder.values_at[key], child(path, key), holder[key]
        elif isinstance(holder, Seq) and isinstance(step, int) and step < len(holder):
            spot, path, holder = holder.values_at[step], child(path, step), holder[step]
    return spot, path, holder
