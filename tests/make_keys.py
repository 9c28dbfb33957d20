"""Writes the lists of keys and of terms in pages of `docs/reference/` from their schemas.

The type and default of a key come from its field, and its meaning from the comment at the field.
`python tests/make_keys.py` writes the lists again. `test_make_keys.py` checks that they are
current.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from loadgen.contracts.terms import TERM_KINDS, get_term_kind
from loadgen.core.workload import (
    request_classes,
    request_kinds,
    schema,
    stages,
    tasks,
    trajectories,
)
from loadgen.core.workload.distributions import Fixed
from loadgen.core.workload.file_models import Part, Tagged
from loadgen.core.workload.file_schema import workload_json_schema

DOCS = Path(__file__).parent.parent / "docs"
TABLES: dict[str, tuple[type[Part], ...]] = {
    "workload": (schema.WorkloadFile,),
    "requests": (request_kinds.Synthetic,),
    "turns": (request_kinds.Turns,),
    "steps": (tasks.TaskStep,),
    "tasks": (tasks.Task, tasks.Tool),
    "trace": (stages.Replay,),
    "trajectories": (trajectories.Trajectories,),
    "classes": (request_classes.RequestClass,),
    "stages": (stages.Stage,),
}
"""The lists of keys, and the parts of a workload file whose keys each list contains."""
TYPE_NAMES = {
    "FixedTokens": "length",
    "FixedDuration": "delay",
    "min|h": "time",
    "min|m|h": "rate",
    "%$": "percentage",
    '"integer"': "number",
    '"number"': "number",
    '"boolean"': "`true`, `false`",
}
"""Maps a text that occurs in the JSON Schema of a value to the name of its type."""
EXAMPLES = {
    "ms": "2s",
    "%": "1%",
    "/s": "10/s",
    "tokens": "20",
    "": "0.45 USD",
    "x": "1.5x",
    "J": "0.5 J/token",
}
"""How the limit of a term may be written, by its unit."""


@cache
def _field_comments(part: type[Part]) -> dict[str, str]:
    """Return the comments above and behind the fields of a class, by field."""
    lines = inspect.getsource(part).splitlines()
    (body,) = ast.parse("\n".join(lines)).body
    assert isinstance(body, ast.ClassDef)
    comments = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno - 1
            while lines[first - 1].lstrip().startswith("# "):
                first -= 1
            matches = [
                re.search(r"(?:^|\s)# (.*)$", line) for line in lines[first : node.end_lineno]
            ]
            comments[node.target.id] = " ".join(match[1] for match in matches if match)
    return comments


def _format_default(name: str, value: Any) -> str:
    """Return a default as it is written in a file, or "" if the field has none worth showing."""
    if isinstance(value, Fixed):
        value = value.value
    if value in (None, PydanticUndefined, "", ()) or isinstance(value, dict | Part):
        return ""
    if name.endswith(("_ns", "_time")):
        return f"`{value // 10**9}s`" if value else "`0`"
    if name == "abandoned" or name.endswith("_share"):
        return f"`{value * 100:g}%`"
    return f"`{str(value).lower()}`"


def _key_of(name: str, field: FieldInfo) -> str:
    """Return the key of a field in a file."""
    return str(field.validation_alias or name)


def _describe_value(field: FieldInfo, shape: dict[str, Any]) -> str:
    """Return what a key takes: a block with its defaults, a list of choices, or a type."""
    block = _find_optional_part(field)
    if block is not None:
        defaults = {
            _key_of(name, inner): _format_default(name, inner.default).strip("`")
            for name, inner in block.model_fields.items()
        }
        text = ", ".join(f"{key}: {default}" for key, default in defaults.items() if default)
        return f"`{{{text}}}`"
    choices = _find_choices(shape)
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    schema_text = str(shape).replace("'", '"')
    matches = (name for text, name in TYPE_NAMES.items() if text in schema_text)
    return next(matches, "")


def _find_optional_part(field: FieldInfo) -> type[Part] | None:
    """Return the part that a field contains if all keys of that part have defaults, else None."""
    annotation: Any = field.annotation
    if getattr(annotation, "__origin__", None) is dict:  # parts by name
        return None
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Part):
            fields = candidate.model_fields.values()
            if not any(inner.is_required() for inner in fields):
                return candidate
    return None


def _find_choices(shape: dict[str, Any]) -> list[str]:
    """Return the values of an enumeration in a JSON Schema, or an empty list."""
    for option in (shape, *shape.get("anyOf", [])):
        if "enum" in option:
            return list(option["enum"])
    return []


def _describe_part(part: type[Part]) -> list[str]:
    """Return one line for each key of a part."""
    whole_schema = workload_json_schema()
    shape = whole_schema if part is schema.WorkloadFile else whole_schema["$defs"][part.__name__]
    if issubclass(part, Tagged):  # written under its tag
        shape = shape["properties"][part.tag]["anyOf"][-1]
    comments = _field_comments(part)
    lines = []
    for name, field in part.model_fields.items():
        key = _key_of(name, field)
        value = _describe_value(field, shape["properties"].get(key, {}))
        default = _format_default(name, field.default)
        details = [value] if value else []
        if field.is_required():
            details.append("required")
        elif default and default not in value:
            details.append(f"default {default}")
        suffix = f" ({', '.join(details)})" if details else ""
        lines.append(f"- `{key}`{suffix}: {comments[name]}")
    return lines


def keys(name: str) -> str:
    """Return the list of the keys of one entry of TABLES."""
    return "\n".join(line for part in TABLES[name] for line in _describe_part(part))


TERM_MEANINGS = {
    "ttft": "The TTFT at this percentile must not exceed the limit. `ttft_from_sent`, "
    "`first_answer`, `tpot`, `e2e`, `max_gap`, `itl` and `inter_chunk` are written likewise.",
    "errors": "At most this fraction of the requests may fail or be dropped.",
    "goodput": "At least this fraction of the requests must meet the SLO.",
    "requests": "The throughput must be at least this many successful requests per second.",
    "good_requests": "The goodput must be at least this many requests per second.",
    "output_per_gpu": "Each GPU must produce at least this many output tokens per second.",
    "tokens_per_gpu": "Each GPU must process at least this many prompt and output tokens per "
    "second.",
    "cost": "1,000 requests that meet the SLO may cost at most this much. If several prices fit, "
    "the highest one counts.",
    "task_time": "The duration of a task at this percentile must not exceed the limit.",
    "task_wait": "The sum of the waits for first tokens of a task, at this percentile, must not "
    "exceed the limit.",
    "task_longest_wait": "The longest wait for a first token in a task, at this percentile, must "
    "not exceed the limit.",
    "task_goodput": "At least this fraction of the tasks must meet the objective `task` of the "
    "SLO.",
    "tasks": "At least this many tasks per second must succeed.",
    "good_tasks": "At least this many tasks per second must meet the objective `task` of the SLO.",
    "task_cost": "1,000 tasks that meet the objective `task` may cost at most this much.",
    "energy": "The GPUs may use at most this much energy for each output token (`J/token`) or "
    "each request (`J/request`).",
    "drift": "The latency in the last window of the load may exceed that in the first window by at "
    "most this much.",
    "sustained": "The throughput in the last window of the load must be at least this fraction of "
    "that in the first window.",
    "between_nodes": "The latencies of the nodes may differ by at most this much.",
    "recovery": "After each spike, loss of a replica or new replica, the SLO must be met again "
    "within this time.",
    "fairness": "Jain's index of the fractions of good requests of all tenants must be at least "
    "this.",
    "fluidity": "This fraction of the token deadlines must be met by the percentage of requests "
    "that `at` names. The deadlines are the limits on TTFT and TPOT of the SLO.",
    "answers": "At least this fraction of the checked answers must be right. The workload needs "
    "questions with known answers (`check_answers: true`).",
    "accepted_length": "The accepted length of speculative decoding may differ from the stated one "
    "by at most this fraction.",
    "slowdown": "The latency may be at most this many times that of another level.",
    "against": "The latency may be at most this fraction of that of another level.",
}
"""What each term of a contract requires."""


def terms() -> str:
    """Return the terms of a contract: how each is written, and what it requires.

    Raises KeyError for a term without a text in TERM_MEANINGS.
    """
    examples = {"of": "ttft", "level": "alone", "window": "1h"}
    lines = []
    for name, kind in ({"ttft": get_term_kind("ttft")} | TERM_KINDS).items():
        limit = "97%" if kind.limit.key == "share" else EXAMPLES[kind.limit.unit]
        parameters = [parameter.removesuffix("_ns") for parameter in reversed(kind.parameters)]
        values = [f"{parameter}: {examples[parameter]}" for parameter in parameters]
        if kind.default_quantile:
            values.append(f"at: p{kind.default_quantile * 100:g}")
        if values:
            values.append(f"{kind.limit.key}: {limit}")
            limit = f"{{{', '.join(values)}}}"
        lines.append(f"- `{name}: {limit}`: {TERM_MEANINGS[name]}")
    return "\n".join(lines)


def page(name: str) -> str:
    """Return a page with its lists as they should be."""
    text = (DOCS / name).read_text("utf-8")
    for mark in re.findall(r"<!-- (keys of \w+|terms): made by tests/make_keys.py", text):
        content = terms() if mark == "terms" else keys(mark.removeprefix("keys of "))
        head, begin, rest = text.partition(f"<!-- {mark}: made")
        mark_end, _, rest = rest.partition("\n")
        _, end, tail = rest.partition("<!-- end of the ")
        text = f"{head}{begin}{mark_end}\n\n{content}\n\n{end}{tail}"
    return text


PAGES = (
    "reference/workload-file.md",
    "reference/agent-tasks.md",
    "reference/data-sets.md",
    "reference/contract-file.md",
)

if __name__ == "__main__":
    for page_name in PAGES:
        (DOCS / page_name).write_text(page(page_name), "utf-8")
