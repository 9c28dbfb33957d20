"""Writes the lists of keys and of terms in pages of `docs/reference/` from their schemas.

The type and default of a key come from its field, and its meaning from the comment at the field.
`python tests/make_keys.py` writes the lists again. `test_make_keys.py` checks that they are current.
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
from loadgen.core.workload import request_classes, request_kinds, schema, stages, tasks
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
    "classes": (request_classes.RequestClass,),
    "stages": (stages.Stage,),
}
"""The lists of keys, and the parts of a workload file whose keys each list contains."""
KINDS = {  # how the JSON Schema of a value shows what it is
    "FixedTokens": "length",
    "FixedDuration": "delay",
    "min|h": "time",
    "min|m|h": "rate",
    "%$": "share",
    '"integer"': "number",
    '"number"': "number",
    '"boolean"': "`true`, `false`",
}
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
def _comments(part: type[Part]) -> dict[str, str]:
    """What the comments above and behind the fields of a class say."""
    lines = inspect.getsource(part).splitlines()
    (body,) = ast.parse("\n".join(lines)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = last = node.lineno - 1
            while lines[first - 1].lstrip().startswith("# "):
                first -= 1
            last = node.end_lineno or last
            said = [re.search(r"(?:^|\s)# (.*)$", line) for line in lines[first:last]]
            found[node.target.id] = " ".join(match[1] for match in said if match)
    return found


def _written(name: str, value: Any) -> str:
    """A default as a file would say it; "" where there is nothing to say."""
    value = value.value if isinstance(value, Fixed) else value
    if value in (None, PydanticUndefined, "", ()) or isinstance(value, dict | Part):
        return ""
    if name.endswith(("_ns", "_time")):
        return f"`{value // 10**9}s`" if value else "`0`"
    share = name == "abandoned" or name.endswith("_share")
    return f"`{value * 100:g}%`" if share else f"`{str(value).lower()}`"


def _key(name: str, field: FieldInfo) -> str:
    return str(field.validation_alias or name)


def _takes(field: FieldInfo, shape: dict[str, Any]) -> str:
    parts = (
        None if getattr(field.annotation, "__origin__", None) is dict else field.annotation
    )  # parts by name
    for annotation in (parts, *getattr(parts, "__args__", ())):
        if (
            isinstance(annotation, type)
            and issubclass(annotation, Part)
            and not any(one.is_required() for one in annotation.model_fields.values())
        ):
            inner = {
                _key(*one): _written(one[0], one[1].default).strip("`")
                for one in annotation.model_fields.items()
            }
            return f"`{{{', '.join(f'{key}: {value}' for key, value in inner.items() if value)}}}`"
    text = str(shape).replace("'", '"')
    if choices := shape.get("enum") or next(
        (one["enum"] for one in shape.get("anyOf", []) if "enum" in one), None
    ):
        return ", ".join(f"`{choice}`" for choice in choices)
    return next((kind for mark, kind in KINDS.items() if mark in text), "")


def _rows(part: type[Part]) -> list[tuple[str, ...]]:
    whole = workload_json_schema()
    shapes = whole if part is schema.WorkloadFile else whole["$defs"][part.__name__]
    if issubclass(part, Tagged):  # written under its tag
        shapes = shapes["properties"][part.tag]["anyOf"][-1]
    shapes = shapes["properties"]
    rows = []
    for name, field in part.model_fields.items():
        key, told = _key(name, field), _comments(part)[name]
        takes, default = _takes(field, shapes.get(key, {})), _written(name, field.default)
        if default in takes:
            default = ""
        default = "required" if field.is_required() else default
        rows.append((f"`{key}`", ", ".join(filter(None, (takes, default))), told))
    return rows


def keys(name: str) -> str:
    """The keys of a name in TABLES: a list, which a phone shows as well."""
    rows = [row for part in TABLES[name] for row in _rows(part)]
    return "\n".join(
        f"- {key}{f' ({takes})' if takes else ''}: {told}" for key, takes, told in rows
    )


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
    """A page with its tables as they should be."""
    text = (DOCS / name).read_text("utf-8")
    for mark in re.findall(r"<!-- (keys of \w+|terms): made by tests/make_keys.py", text):
        made = terms() if mark == "terms" else keys(mark.removeprefix("keys of "))
        text = re.sub(
            rf"(<!-- {mark}: made .*? -->\n).*?(<!-- end of the (?:keys|terms) -->)",
            lambda match, made=made: f"{match[1]}\n{made}\n\n{match[2]}",
            text,
            count=1,
            flags=re.DOTALL,
        )
    return text


PAGES = (
    "reference/workload-file.md",
    "reference/agent-tasks.md",
    "reference/data-sets.md",
    "reference/contract-file.md",
)

if __name__ == "__main__":
    for one in PAGES:
        (DOCS / one).write_text(page(one), "utf-8")
