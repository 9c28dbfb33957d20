"""The formats of other tools, one row each: their result files, what runs are written as, traces, data sets.

A leaf, like every table: a row names its functions as text. `export`, `compare`, `ui`, `--trace`, `--dataset` and `fit`
go by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from loadgen.plugins import OpenTable, gives


class ToolFile(msgspec.Struct, frozen=True):
    """A file that may be a result of another tool. `where` names it.

    `value`: it as JSON, of several `lines` the last one; {} where that is no object. lines: 0 of one document.
    """

    where: str
    text: str
    value: Mapping[str, Any]
    lines: int = 0


class ForeignResult(msgspec.Struct, frozen=True, kw_only=True):
    """What another tool has reported.

    `figures`: path of our nearest metric (`ttft_ms.p99`) -> value in our units. `called`: our metric -> the tool's own
    name for it. `tool` and `counts`, how the tool counts, are those of the row, whatever its reader says.
    """

    tool: str = ""
    version: str = ""
    file: str
    model: str = ""
    target: str = ""
    load: str = ""
    started: str = ""
    figures: dict[str, float]
    called: dict[str, str] = {}
    counts: str = ""
    notes: tuple[str, ...] = ()


class FormatRow(msgspec.Struct, frozen=True):
    """One format. A function is text, `module:function`; what a format does not have is left out.

    tool: whose it is, as people know it. definitions: how that tool counts TTFT, TPOT and so on.

    A result. files: names of its files; a folder with one is a result of the tool.
    fits: (`ToolFile`) whether it is one; the first row that says so reads it. read: (`ToolFile`) a `ForeignResult`.

    A run of ours, for `export --as`. write: (Summary, `core.results.store.Stored`) bytes, parts of them one after the
    other, or a mapping that becomes JSON, whose fields may be numpy arrays. send: (folder, Summary, --out or None)
    sends it to a service; returns where it is.

    A trace. trace: (the first line of JSONL, an object) its `core.workload.trace_formats.TraceFormat`, or None.
    columns: of a table in CSV or Parquet, in small letters: of time, input and output tokens. time: (text) ns.
    in_seconds: whole numbers in the column of time are seconds, not milliseconds. session, took: columns that such a
    table may have beside these: the name of the conversation, and the seconds until its answer ended.

    A data set. suffixes, begins: of the files, as names and as bytes. dataset: (path) each row with its place in words.
    """

    name: str
    tool: str = ""
    definitions: str = ""
    files: tuple[str, ...] = ()
    fits: str = ""
    read: str = ""
    write: str = ""
    send: str = ""
    trace: str = ""
    columns: tuple[str, ...] = ()
    time: str = ""
    in_seconds: bool = False
    session: str = ""
    took: str = ""
    suffixes: tuple[str, ...] = ()
    begins: tuple[bytes, ...] = ()
    dataset: str = ""


_TOOLS = "loadgen.interop.tools"
_EXPORT = "loadgen.interop.export"
_REPORT = "loadgen.interop.benchmark_report"
_TRACES = "loadgen.interop.traces"
_DATA = "loadgen.interop.data_sets"

FORMATS: OpenTable[FormatRow] = OpenTable(
    "loadgen.formats",
    FormatRow,
    (
        # results; of those that have fields in common the narrower one first
        FormatRow(
            "mlperf-log",
            "MLPerf LoadGen",
            "From the scheduled instant in Server, else from issue. TPOT is (E2E - TTFT) / (n - 1) in whole ns. "
            "Percentiles are elements of the sample, as here",
            files=("mlperf_log_summary.txt",),
            fits="loadgen.mlperf.loadgen_log:fits",
            read="loadgen.mlperf.loadgen_log:as_result",
        ),
        FormatRow(
            "sglang",
            "SGLang bench_serving",
            "From sent. TTFT is the first event with text. TPOT is (E2E - TTFT) / (n - 1). ITL is pooled over events. "
            "Percentiles are interpolated",
            fits=f"{_TOOLS}:is_sglang",
            read=f"{_TOOLS}:sglang",
        ),
        FormatRow(
            "vllm",
            "vllm bench serve",
            "From sent. TTFT is the first event with a choice: in chat the role event, which carries no token. TPOT is "
            "(E2E - TTFT) / (n - 1), E2E up to the last event, usage too. ITL is pooled, with the gap from the role "
            "event to the first token in it. Percentiles are interpolated",
            fits=f"{_TOOLS}:is_vllm",
            read=f"{_TOOLS}:vllm",
            write=f"{_EXPORT}:vllm",
        ),
        FormatRow(
            "aiperf",
            "AIPerf",
            "From sent. TTFT is the first event with content. ITL is one value per request, (E2E - TTFT) / (n - 1), "
            "which is called TPOT here; inter-chunk latency is pooled. Percentiles are interpolated",
            files=("profile_export_aiperf.json",),
            fits=f"{_TOOLS}:is_aiperf",
            read=f"{_TOOLS}:aiperf",
            write=f"{_EXPORT}:aiperf",
        ),
        FormatRow("aiperf-records", "AIPerf", write="loadgen.interop.aiperf_records:write"),
        FormatRow(
            "guidellm",
            "GuideLLM",
            "From sent. TTFT is the first event with text. TPOT is (last token - sent) / n: the first token's wait is "
            "in it. ITL is one value per request, (last - first) / (n - 1), weighted by its tokens: "
            "nearest to TPOT as it is here",
            files=("benchmarks.json",),
            fits=f"{_TOOLS}:is_guidellm",
            read=f"{_TOOLS}:guidellm",
            write=f"{_EXPORT}:guidellm",
        ),
        FormatRow(
            "inference-perf",
            "inference-perf",
            "From sent, the wait to be sent apart (schedule_delay). TPOT is (last - first) / (n - 1). ITL is pooled. "
            "Percentiles are interpolated",
            files=("summary_lifecycle_metrics.json",),
            fits=f"{_TOOLS}:is_inference_perf",
            read=f"{_TOOLS}:inference_perf",
            write=f"{_EXPORT}:inference_perf",
        ),
        FormatRow(
            "genai-bench",
            "genai-bench",
            "From sent. TPOT is (E2E - TTFT) / (n - 1). No gaps between events. Percentiles are interpolated",
            fits=f"{_TOOLS}:is_genai_bench",
            read=f"{_TOOLS}:genai_bench",
        ),
        FormatRow(
            "mlcommons",
            "mlcommons/endpoints",
            "From issue. TPOT is (E2E - TTFT) / (n - 1), with TTFT from the stream and E2E from its end; negative ones "
            "stay in. No gaps between events",
            files=("result_summary.json",),
            fits=f"{_TOOLS}:is_endpoints",
            read=f"{_TOOLS}:endpoints",
            write=f"{_EXPORT}:mlcommons",
        ),
        FormatRow(
            "llm-d",
            "llm-d Benchmark Report",
            "As the tool that made the figures, which the report names; written here: as in docs/metrics.md",
            fits=f"{_REPORT}:fits",
            read=f"{_REPORT}:read",
            write=f"{_REPORT}:write",
        ),
        # trackers
        FormatRow("mlflow", "MLflow", send="loadgen.interop.trackers:mlflow"),
        FormatRow("wandb", "Weights & Biases", send="loadgen.interop.trackers:wandb"),
        # traces, JSONL
        FormatRow("shape-trace", "shape traces of loadgen_sdk", trace=f"{_TRACES}:shape_trace"),
        FormatRow("bailian", "Bailian", trace=f"{_TRACES}:bailian"),
        FormatRow("mooncake", "Mooncake, vLLM timed", trace=f"{_TRACES}:mooncake"),
        FormatRow("weka", "Weka (InferenceX AgentX)", trace=f"{_TRACES}:weka"),
        FormatRow("tracelab", "TraceLab", trace=f"{_TRACES}:tracelab"),
        FormatRow("otel-spans", "OpenTelemetry GenAI spans", trace=f"{_TRACES}:otel_spans"),
        FormatRow("sagemaker", "SageMaker data capture", trace=f"{_TRACES}:sagemaker"),
        # traces, tables
        FormatRow(
            "azure",
            "Azure LLM inference",
            columns=("timestamp", "contexttokens", "generatedtokens"),
            time=f"{_TRACES}:utc_date_ns",
        ),
        FormatRow(
            "burstgpt",
            "BurstGPT",
            columns=("timestamp", "request tokens", "response tokens"),
            time=f"{_TRACES}:seconds_ns",
            in_seconds=True,
            session="session id",
            took="elapsed time",
        ),
        FormatRow(
            "lengths",
            "timestamp,input_length,output_length",
            columns=("timestamp", "input_length", "output_length"),
            time=f"{_TRACES}:seconds_ns",
        ),
        # data sets that are not JSONL; csv is also what records are written as
        FormatRow("parquet", suffixes=(".parquet",), begins=(b"PAR1",), dataset=f"{_DATA}:parquet"),
        FormatRow("arrow", suffixes=(".arrow",), begins=(b"ARROW1",), dataset=f"{_DATA}:arrow"),
        FormatRow(
            "csv",
            suffixes=(".csv", ".tsv"),
            dataset=f"{_DATA}:cells",
            write="loadgen.runs.export:as_csv",
        ),
        FormatRow("json-list", begins=(b"[",), dataset=f"{_DATA}:json_list"),
    ),
)

COUNTS = {row.tool: row.definitions for row in FORMATS.own if row.definitions}
"""How each tool counts that we know ourselves."""


def having(field: str) -> Iterator[FormatRow]:
    """The rows with something in this field: ours, then those of plug-ins, which are looked for when ours are done."""
    for rows in (FORMATS.own, FORMATS.others()):
        yield from (row for row in rows if getattr(row, field))


def call(row: FormatRow, field: str, *given: Any) -> Any:
    """Call the function that a row names in this field."""
    return FORMATS.function(row, getattr(row, field), _CHECKS.get(field))(*given)


_CHECKS = {"read": gives(ForeignResult), "write": gives(bytes, Mapping, Iterable)}
