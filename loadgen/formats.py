"""The table of formats of other tools: their result files, exports of runs, traces and data sets.

`export`, `report`, `compare`, `ui`, `--trace`, `--dataset` and `fit` use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.plugins import OpenTable, check_type

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.results.store import Stored
    from loadgen.core.workload.data_files import LocatedRow
    from loadgen.core.workload.trace_formats import TraceFormat


class ToolFile(msgspec.Struct, frozen=True):
    """A file that may be a result of another tool.

    Attributes:
        where: The name of the file.
        text: Its text.
        value: The object in a JSON file, or in the last line of a JSONL file. Empty if there is
            none.
        lines: The number of lines of a JSONL file, 0 for one JSON document.
    """

    where: str
    text: str
    value: Mapping[str, Any]
    lines: int = 0


class ForeignResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result that another tool has reported.

    Attributes:
        metrics: By path of our nearest metric, for example `ttft_ms.p99`, the value in our unit.
        called: By our metric, the tool's own name for it.
        tool: The name of the tool. Taken from the row of the format, whatever its reader returns.
        counts: How the tool defines its metrics. Taken from the row too.
    """

    tool: str = ""
    version: str = ""
    file: str
    model: str = ""
    target: str = ""
    load: str = ""
    started: str = ""
    metrics: dict[str, float] = msgspec.field(name="figures")
    called: dict[str, str] = {}
    counts: str = ""
    notes: tuple[str, ...] = ()


Written = bytes | Mapping[str, Any] | Iterable[bytes]
"""The content of a file to write: bytes, chunks of bytes, or a mapping that becomes JSON.

The mapping may contain numpy arrays.
"""


class FormatRow(msgspec.Struct, frozen=True):
    """One format. A format has only some of the functions.

    Attributes:
        name: Its name on the command line.
        tool: The tool that the format belongs to, as people call it.
        definitions: How this tool defines TTFT, TPOT and other metrics.
        files: Names of result files. A directory that contains one is a result of the tool.
        fits: Returns whether a file is a result of the tool. The first row that fits reads it.
        read: Reads a result.
        write: Writes a run of ours, for `export --as`.
        simulated_mark: What in a written file says that the server was simulated, as
            `loadgen export` names it, for example "column `simulated`". If empty, the file does not
            say it, and `loadgen export` warns of that.
        has_unmeasured_requests: Whether a written file also has the requests that are no part of
            the metrics, such as those of a warm-up. `loadgen export` then names their stages.
        send: Sends a run (its directory, its summary, and --out if specified) to a service and
            returns its URL.
        trace: Returns the format of a trace by the object in its first line, or None for another
            format.
        columns: Lower-case names of the columns of a trace that is a table: time, input tokens and
            output tokens.
        time: Parses a cell of the column of time to ns.
        in_seconds: Whether whole numbers in the column of time are seconds, not milliseconds.
        any_unit: Whether the format does not define the unit of the column of time, so that it is
            decided from all rows or by the user. `time` then is for seconds.
        session: An optional column of such a table: the name of the conversation.
        duration: An optional column of such a table: the seconds until the response ended.
        suffixes: Suffixes of data sets in this format.
        begins: First bytes of data sets in this format.
        dataset: Yields the rows of a data set, each with its place in words.
    """

    name: str
    tool: str = ""
    definitions: str = ""
    files: tuple[str, ...] = ()
    fits: Callable[[ToolFile], bool] | None = None
    read: Callable[[ToolFile], ForeignResult] | None = None
    write: Callable[[Summary, Stored], Written] | None = None
    simulated_mark: str = ""
    has_unmeasured_requests: bool = False
    send: Callable[[Path, Summary, Path | None], str] | None = None
    trace: Callable[[Mapping[str, Any]], TraceFormat | None] | None = None
    columns: tuple[str, ...] = ()
    time: Callable[[str], int] | None = None
    in_seconds: bool = False
    any_unit: bool = False
    session: str = ""
    duration: str = ""
    suffixes: tuple[str, ...] = ()
    begins: tuple[bytes, ...] = ()
    dataset: Callable[[Path], Iterator[LocatedRow]] | None = None


_LOADGEN_FIELD = "field `loadgen`"
"""The `simulated_mark` of the formats whose documents have this field."""


def _load_rows() -> tuple[FormatRow, ...]:
    """Return the built-in formats. Of formats with common fields, the narrower one comes first."""
    from loadgen.interop import (
        aiperf_records,
        benchmark_report,
        columnar_data_sets,
        export,
        export_mlcommons,
        text_data_sets,
        tool_results,
        trace_values,
        traces,
        trackers,
    )
    from loadgen.mlperf import loadgen_log
    from loadgen.runs import records_csv

    return (
        # results; of those that have fields in common the narrower one first
        FormatRow(
            "mlperf-log",
            "MLPerf LoadGen",
            "Latencies count from the scheduled time in Server, otherwise from issue. TPOT is "
            "(E2E - TTFT) / (n - 1) in whole ns. Percentiles are elements of the sample, as in "
            "loadgen",
            files=("mlperf_log_summary.txt",),
            fits=loadgen_log.fits,
            read=loadgen_log.as_result,
        ),
        FormatRow(
            "sglang",
            "SGLang bench_serving",
            "Latencies count from the send time. TTFT ends at the first event with text. TPOT "
            "is (E2E - TTFT) / (n - 1). ITL is pooled over events. Percentiles are interpolated",
            fits=tool_results.is_sglang,
            read=tool_results.read_sglang,
        ),
        FormatRow(
            "vllm",
            "vllm bench serve",
            "Latencies count from the send time. TTFT ends at the first event with a choice; in"
            " chat that is the role event, which carries no token. TPOT is (E2E - TTFT) / (n - "
            "1), with E2E up to the last event, including usage. ITL is pooled and includes the"
            " time from the role event to the first token. Percentiles are interpolated",
            fits=tool_results.is_vllm,
            read=tool_results.read_vllm,
            write=export.export_vllm,
            simulated_mark=_LOADGEN_FIELD,
        ),
        FormatRow(
            "aiperf",
            "AIPerf",
            "Latencies count from the send time. TTFT ends at the first event with content. ITL"
            " is one value per request, (E2E - TTFT) / (n - 1), which is TPOT here. Inter-chunk"
            " latency is pooled. Percentiles are interpolated",
            files=("profile_export_aiperf.json",),
            fits=tool_results.is_aiperf,
            read=tool_results.read_aiperf,
            write=export.export_aiperf,
            simulated_mark=_LOADGEN_FIELD,
        ),
        FormatRow(
            "aiperf-records",
            "AIPerf",
            write=aiperf_records.write,
            simulated_mark="field `loadgen` in its first line",
        ),
        FormatRow(
            "guidellm",
            "GuideLLM",
            "Latencies count from the send time. TTFT ends at the first event with text. TPOT "
            "is (last token - sent) / n, which includes the wait for the first token. ITL is "
            "one value per request, (last - first) / (n - 1), weighted by its tokens, which is "
            "nearest to TPOT here",
            files=("benchmarks.json",),
            fits=tool_results.is_guidellm,
            read=tool_results.read_guidellm,
            write=export.export_guidellm,
            simulated_mark=_LOADGEN_FIELD,
        ),
        FormatRow(
            "inference-perf",
            "inference-perf",
            "Latencies count from the send time, with the send delay (schedule_delay) separate."
            " TPOT is (last - first) / (n - 1). ITL is pooled, and is 0 between tokens that its "
            "tokenizer finds in the same event. Percentiles are interpolated",
            files=("summary_lifecycle_metrics.json",),
            fits=tool_results.is_inference_perf,
            read=tool_results.read_inference_perf,
            write=export.export_inference_perf,
            simulated_mark=_LOADGEN_FIELD,
        ),
        FormatRow(
            "genai-bench",
            "genai-bench",
            "Latencies count from the send time. TPOT is (E2E - TTFT) / (n - 1). There is no "
            "ITL. Percentiles are interpolated",
            fits=tool_results.is_genai_bench,
            read=tool_results.read_genai_bench,
        ),
        FormatRow(
            "mlcommons",
            "mlcommons/endpoints",
            "Latencies count from issue. TPOT is (E2E - TTFT) / (n - 1), with TTFT from the "
            "stream and E2E from its end; negative values are kept. There is no ITL",
            files=("result_summary.json",),
            fits=tool_results.is_endpoints,
            read=tool_results.read_endpoints,
            write=export_mlcommons.export_mlcommons,
            simulated_mark=_LOADGEN_FIELD,
        ),
        FormatRow(
            "llm-d",
            "llm-d Benchmark Report",
            "Metrics are defined by the tool that the report names; reports that loadgen writes"
            " follow docs/reference/metrics.md",
            fits=benchmark_report.fits,
            read=benchmark_report.read,
            write=benchmark_report.write,
            simulated_mark="field `run.keywords`",
        ),
        # trackers
        FormatRow("mlflow", "MLflow", send=trackers.send_to_mlflow),
        FormatRow("wandb", "Weights & Biases", send=trackers.send_to_wandb),
        # traces, JSONL
        FormatRow("shape-trace", "request traces of loadgen_sdk", trace=traces.detect_shape_trace),
        FormatRow("bailian", "Bailian", trace=traces.detect_bailian),
        FormatRow("mooncake", "Mooncake, vLLM timed", trace=traces.detect_mooncake),
        FormatRow("weka", "Weka (InferenceX AgentX)", trace=traces.detect_weka),
        FormatRow("tracelab", "TraceLab", trace=traces.detect_tracelab),
        FormatRow("otel-spans", "OpenTelemetry GenAI spans", trace=traces.detect_otel_spans),
        FormatRow("sagemaker", "SageMaker data capture", trace=traces.detect_sagemaker),
        # traces, tables
        FormatRow(
            "azure",
            "Azure LLM inference",
            columns=("timestamp", "contexttokens", "generatedtokens"),
            time=trace_values.parse_utc_date,
        ),
        FormatRow(
            "burstgpt",
            "BurstGPT",
            columns=("timestamp", "request tokens", "response tokens"),
            time=trace_values.parse_seconds,
            in_seconds=True,
            session="session id",
            duration="elapsed time",
        ),
        FormatRow(
            "lengths",
            "timestamp,input_length,output_length",
            columns=("timestamp", "input_length", "output_length"),
            time=trace_values.parse_seconds,
            any_unit=True,
        ),
        # data sets that are not JSONL; csv is also what records are written as
        FormatRow(
            "parquet",
            suffixes=(".parquet",),
            begins=(b"PAR1",),
            dataset=columnar_data_sets.read_parquet,
        ),
        FormatRow(
            "arrow",
            suffixes=(".arrow",),
            begins=(b"ARROW1",),
            dataset=columnar_data_sets.read_arrow,
        ),
        FormatRow(
            "csv",
            suffixes=(".csv", ".tsv"),
            dataset=text_data_sets.read_csv,
            write=records_csv.write_csv,
            simulated_mark="column `simulated`",
            has_unmeasured_requests=True,
        ),
        FormatRow("json-list", begins=(b"[",), dataset=text_data_sets.read_json_list),
    )


FORMATS: OpenTable[FormatRow] = OpenTable("loadgen.formats", FormatRow, _load_rows)


def definitions_of(tool: str) -> str:
    """Return how a tool with a built-in format defines its metrics, as text.

    A tool may have several formats, of which only one has the definitions.
    """
    rows = [row for row in FORMATS.builtin_rows if row.tool == tool and row.definitions]
    return rows[0].definitions


def is_result(row: FormatRow, file: ToolFile) -> bool:
    """Return True if a file is a result in this format."""
    return row.fits is not None and bool(FORMATS.guard(row, row.fits)(file))


def read_result(row: FormatRow, file: ToolFile) -> ForeignResult:
    """Read a result in a format that has a reader."""
    assert row.read is not None
    return FORMATS.guard(row, row.read, check_type(ForeignResult))(file)
