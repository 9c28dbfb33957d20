"""Reads result files of other tools: their figures under their own definitions, never as records.

A file is recognised by its content, not by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from loadgen.core import format
from loadgen.core.errors import UserError, of_reading
from loadgen.interop import tools
from loadgen.interop.result import COUNTS, WITH_FIRST, ForeignResult
from loadgen.mlperf.loadgen_log import as_result

__all__ = ["COUNTS", "WITH_FIRST", "ForeignResult", "parse_result", "read_result"]


LEFT_BY_TOOLS = (
    "profile_export_aiperf.json",
    "benchmarks.json",
    "summary_lifecycle_metrics.json",
    "result_summary.json",
    "mlperf_log_summary.txt",
)
"""Names of result files of other tools; a folder with one of them is a result of that tool."""


def read_result(path: Path) -> ForeignResult:
    """The result in a file. Raises UserError for a file that cannot be read or that no known tool has written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(of_reading(error), f"cannot be read: {error.strerror}", str(path), "") from None
    return parse_result(data, str(path))


def parse_result(data: bytes, where: str = "") -> ForeignResult:
    """The result in the bytes of a file; `where` names it. Raises UserError for the file of an unknown tool."""
    text = data.decode("utf-8", "replace")
    if "MLPerf Results Summary" in text[:4000]:
        return as_result(where)
    if text.startswith('{"metadata"') and '"metrics"' in text.splitlines()[0] and '"benchmarks"' not in text:
        return tools.aiperf_records(text, where)
    try:
        value, line_count = _json(text)
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else f"no JSON ({error})"
        raise UserError("wrong_format", f"not the result of a known tool: {problem}", where, _KNOWN) from None
    read_tool = next((read for matches, read in _TOOLS if isinstance(value, dict) and matches(value)), None)
    if read_tool is None:
        raise UserError("wrong_format", "not the result of a known tool", where, _KNOWN)
    try:
        parsed = read_tool(value, where)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = f"looks like a result of another tool, but not one that can be read: {type(error).__name__} {error}"
        raise UserError("wrong_format", what, where, _KNOWN) from None
    if not parsed.figures:
        raise UserError("no_figure", f"a result of {parsed.tool} without one figure", where, "did its run finish?")
    if line_count:
        note = f"the last of {format.counted(line_count, 'result')} in the file"
        parsed = msgspec.structs.replace(parsed, notes=(*parsed.notes, note))
    return parsed


_KNOWN = (
    "known: vllm bench serve, SGLang, AIPerf, GuideLLM, inference-perf, genai-bench, mlcommons/endpoints, MLPerf logs"
)


def _json(text: str) -> tuple[Any, int]:
    """A JSON document and 0, or the last of several JSON lines and the number of lines."""
    try:
        return json.loads(text), 0
    except json.JSONDecodeError:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 1:
            raise
        return json.loads(lines[-1]), len(lines)


_TOOLS: tuple[tuple[Callable[[dict[str, Any]], bool], Callable[[dict[str, Any], str], ForeignResult]], ...] = (
    (lambda value: "mean_e2e_latency_ms" in value and "mean_ttft_ms" in value, tools.sglang),
    (lambda value: "mean_ttft_ms" in value and "request_throughput" in value, tools.vllm),
    (lambda value: "aiperf_version" in value or isinstance(value.get("request_latency"), dict), tools.aiperf),
    (lambda value: isinstance(value.get("benchmarks"), list) and len(value["benchmarks"]) > 0, tools.guidellm),
    (lambda value: "successes" in value and "load_summary" in value, tools.inference_perf),
    (lambda value: isinstance(value.get("aggregated_metrics"), dict), tools.genai_bench),
    (lambda value: "n_samples_issued" in value and "latency" in value, tools.endpoints),
)
"""(test of the content, reader) for each tool; the first test that matches decides."""
