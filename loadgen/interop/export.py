"""Writes a run in the result formats of other tools, by their definitions, for their readers.

Latencies are computed as the other tool would compute them (`tool_samples.py`), and so are
durations and rates (`benchmark_windows.py`). docs/reference/exports.md lists every field. What a
run does not have is left out or null. Every file has a field `loadgen`, which other tools ignore:
it names loadgen and the definitions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.windows import per_second
from loadgen.core.results.manifest import StagePlan
from loadgen.core.stats.quantiles import Distribution
from loadgen.core.units import NS_PER_S
from loadgen.interop import benchmark_windows
from loadgen.interop.export_source import (
    INFINITE_RATE_ARRIVAL,
    Document,
    ExportSource,
    LatencyName,
    RunRows,
)

MS_PER_S = 1e3


# -- vllm bench serve ----------------------------------------------------------------------------

_VLLM_STATISTICS = {
    "mean": "mean",
    "p50": "median",
    "std": "std",
}
_VLLM_PERCENTILES = ("p50", "p90", "p95", "p99")
_VLLM_LATENCIES: dict[LatencyName, str] = {
    "ttft": "ttft",
    "tpot": "tpot",
    "itl": "itl",
    "e2e": "e2el",
}
"""vLLM's names of statistics and latencies, by ours. The median is also written as p50."""


def export_vllm(summary: Summary, stored: RunRows) -> Document:
    """Return the file of `vllm bench serve --save-result --save-detailed`, as a JSON object.

    It has no prompts and no texts of responses. It has the field `itls`, the inter-token latencies
    of each request, if the run stored the times between output events.
    """
    source = ExportSource(summary, stored, "vllm bench serve")
    document = _vllm_configuration(source) | _vllm_totals(source)
    for metric, vllm_name in _VLLM_LATENCIES.items():
        document |= _vllm_statistics(vllm_name, source.statistics(metric))
    document |= _vllm_details(source)
    document["loadgen"] = source.provenance
    return document


def _vllm_configuration(source: ExportSource) -> Document:
    """Return what was measured: the server, the model and the load, by vLLM's keys."""
    manifest = source.manifest
    backend = "openai-chat" if manifest.api == "chat" else "openai"
    rate_per_s = source.rate_per_s
    is_rate_finite = rate_per_s is not None and math.isfinite(rate_per_s)

    return {
        "date": _vllm_date(manifest.started),
        "endpoint_type": backend,
        "backend": backend,
        "label": None,
        "model_id": source.summary.target.model,
        "tokenizer_id": manifest.tokenizer,
        "num_prompts": source.summary.requests.scheduled,
        "request_rate": rate_per_s if is_rate_finite else "inf",
        "burstiness": _find_burstiness(source.stage),
        "max_concurrency": source.concurrency or manifest.max_in_flight,
    }


def _vllm_totals(source: ExportSource) -> Document:
    """Return the numbers of requests and tokens and their rates per second, by vLLM's keys."""
    summary = source.summary
    tokens = summary.tokens
    window = source.sent_span

    return {
        "duration": window.duration_s,
        "completed": summary.requests.ok,
        "failed": source.failed_requests,
        "total_input_tokens": tokens.input,
        "total_output_tokens": tokens.output,
        "request_throughput": per_second(summary.requests.ok, window),
        "request_goodput": per_second(summary.goodput.good, window),
        "output_throughput": per_second(tokens.output, window),
        "total_token_throughput": per_second(source.total_tokens, window),
        "max_concurrent_requests": benchmark_windows.max_requests_per_whole_second(
            source.columns, source.is_successful
        ),
    }


def _vllm_date(started: str) -> str:
    """Return a date such as 2025-01-31T12:00:00 as 20250131-120000."""
    to_seconds = started[:19]
    digits = "".join(character for character in to_seconds if character.isalnum())
    return digits.replace("T", "-")


def _vllm_statistics(latency_name: str, statistics_ms: Mapping[str, float]) -> Document:
    """Return the known statistics of a latency by vLLM's keys, such as `mean_ttft_ms`.

    Args:
        latency_name: vLLM's name of the latency, such as "ttft".
        statistics_ms: The statistics in ms by loadgen's names.
    """
    fields = {
        f"{vllm_name}_{latency_name}_ms": statistics_ms[our_name]
        for our_name, vllm_name in _VLLM_STATISTICS.items()
        if our_name in statistics_ms
    }
    percentiles = {
        f"{percentile}_{latency_name}_ms": statistics_ms[percentile]
        for percentile in _VLLM_PERCENTILES
        if percentile in statistics_ms
    }
    return fields | percentiles


def _vllm_details(source: ExportSource) -> Document:
    """Return the columns with one value for each successful request. Times are in seconds."""
    if source.samples is None:
        return {}

    details: Document = {
        "ttfts": source.samples.ttft.values / NS_PER_S,
        "latencies": source.samples.e2e.values / NS_PER_S,
    }
    gaps_by_slot = source.gaps_by_slot
    if gaps_by_slot is not None:
        details["itls"] = [
            (gaps_by_slot[slot] / NS_PER_S).tolist() if slot in gaps_by_slot else []
            for slot in source.successful_column("slot").tolist()
        ]

    details["start_times"] = source.successful_column("sent_ns") / NS_PER_S
    details["input_lens"] = source.successful_column("input_tokens")
    details["output_lens"] = source.successful_column("output_tokens")

    return details


def _find_burstiness(stage: StagePlan | None) -> float | None:
    """Return the burstiness of the arrivals of a stage, as `vllm bench serve` reports it.

    It is the shape of the gamma distribution of the gaps between requests: 1 for Poisson arrivals,
    less for bursts. It is also 1 without a finite rate, as in vLLM. The result is None for
    arrivals whose gaps have another distribution, or without a stage.
    """
    if stage is None:
        return None
    if stage.arrival.startswith("gamma"):
        return _parse_gamma_burstiness(stage.arrival)

    has_no_rate = stage.closed or stage.arrival.startswith(INFINITE_RATE_ARRIVAL)
    if has_no_rate or stage.arrival.startswith("poisson"):
        return 1.0

    return None


def _parse_gamma_burstiness(arrival: str) -> float:
    """Return 0.5 for "gamma 4/s, burstiness 0.5, ...".

    The plan of a stage has its arrival process only as such a text.

    Raises:
        ValueError: The text has no burstiness.
    """
    match = re.search(r"burstiness ([^,]+)", arrival)
    if match is None:
        raise ValueError(f"no burstiness in {arrival!r}")
    return float(match[1])


# -- AIPerf --------------------------------------------------------------------------------------

_AIPERF_LATENCIES: dict[str, LatencyName] = {
    "request_latency": "e2e",
    "time_to_first_token": "ttft",
    "inter_token_latency": "itl",
}
_AIPERF_LENGTHS = {
    "input_sequence_length": "input_tokens",
    "output_sequence_length": "output_tokens",
}


def export_aiperf(summary: Summary, stored: RunRows) -> Document:
    """Return AIPerf's summary of a run, `profile_export_aiperf.json`, as a JSON object.

    It follows version 1.4 of AIPerf's schema. Each metric is an object with its unit and its
    statistics, for example {"time_to_first_token": {"unit": "ms", "avg": 210.5, "p99": 480.0}}.
    """
    source = ExportSource(summary, stored, "AIPerf")
    manifest = stored.manifest
    metrics = _aiperf_latencies(source) | _aiperf_lengths(source) | _aiperf_rates(source)
    endpoint = {
        "urls": [summary.target.url],
        "type": "chat" if manifest.api == "chat" else "completions",
        "streaming": manifest.stream,
    }

    return {
        "schema_version": "1.4",
        "benchmark_id": summary.run.id,
        **metrics,
        "input_config": {
            "models": {"items": [{"name": summary.target.model}]},
            "endpoint": endpoint,
        },
        "was_cancelled": summary.run.state == "interrupted",
        "is_complete": summary.run.state == "finished",
        "error_summary": [
            {"type": kind, "count": failure.count}
            for kind, failure in summary.requests.by_error.items()
        ],
        "start_time": manifest.started,
        "end_time": manifest.ended,
        "loadgen": source.provenance,
    }


def _aiperf_latencies(source: ExportSource) -> Document:
    """Return the statistics of each latency that has any, by AIPerf's names.

    Most latencies are computed from the records by AIPerf's definitions. The inter-chunk latency is
    defined alike in AIPerf and in loadgen, so its statistics are those of the summary. They are
    left out if the run withholds them because their values cannot be trusted.
    """
    document: Document = {}
    for aiperf_name, latency in _AIPERF_LATENCIES.items():
        statistics_ms = source.statistics(latency)
        if statistics_ms:
            document[aiperf_name] = _aiperf_statistics(statistics_ms)

    inter_chunk_ms = source.summary.inter_chunk_ms
    is_withheld = "inter_chunk" in source.summary.withheld_metrics
    if inter_chunk_ms.count and not is_withheld:
        document["inter_chunk_latency"] = _aiperf_statistics(_known_statistics(inter_chunk_ms))

    return document


def _known_statistics(distribution: Distribution) -> dict[str, float]:
    """Return the statistics of a distribution that are not None, by name."""
    statistics = {
        "count": distribution.count,
        "mean": distribution.mean,
        "min": distribution.min,
        "p50": distribution.p50,
        "p90": distribution.p90,
        "p95": distribution.p95,
        "p99": distribution.p99,
        "max": distribution.max,
    }
    return {name: value for name, value in statistics.items() if value is not None}


def _aiperf_statistics(statistics: Mapping[str, float]) -> Document:
    """Return statistics in ms by AIPerf's names, which has no p99.9."""
    document: Document = {"unit": "ms"}
    for name, value in statistics.items():
        if name != "p99_9":
            document["avg" if name == "mean" else name] = value
    return document


def _aiperf_lengths(source: ExportSource) -> Document:
    """Return the statistics of the tokens of prompts and responses."""
    document: Document = {}
    for key, field in _AIPERF_LENGTHS.items():
        tokens = source.successful_column(field)
        if len(tokens):
            document[key] = {
                "unit": "tokens",
                "avg": float(tokens.mean()),
                "min": int(tokens.min()),
                "max": int(tokens.max()),
            }

    return document


def _aiperf_rates(source: ExportSource) -> Document:
    """Return the counts and rates of requests and tokens, by AIPerf's names.

    AIPerf has a single number in the field `avg`, next to its unit. As in AIPerf, rates are per
    second from the first successful request to the end of the last one. Unknown numbers, such as
    the goodput of a run without an SLO, are left out.
    """
    requests = source.summary.requests
    tokens = source.summary.tokens
    good_requests = source.summary.goodput.good
    window = benchmark_windows.span_of_successful_requests(source.columns, source.is_successful)
    numbers = (
        ("request_throughput", "requests/sec", per_second(requests.ok, window)),
        ("request_count", "requests", float(requests.ok)),
        ("error_request_count", "requests", float(source.failed_requests)),
        ("output_token_throughput", "tokens/sec", per_second(tokens.output, window)),
        ("total_token_throughput", "tokens/sec", per_second(source.total_tokens, window)),
        ("total_isl", "tokens", tokens.input),
        ("total_osl", "tokens", tokens.output),
        ("benchmark_duration", "sec", window.duration_s),
        ("good_request_count", "requests", good_requests),
        ("goodput", "requests/sec", per_second(good_requests, window)),
    )

    return {
        aiperf_name: {"unit": unit, "avg": number}
        for aiperf_name, unit, number in numbers
        if number is not None
    }


# -- GuideLLM ------------------------------------------------------------------------------------


def export_guidellm(summary: Summary, stored: RunRows) -> Document:
    """Return GuideLLM's `benchmarks.json` with one benchmark.

    All metrics except `request_totals` are those of successful requests.
    """
    source = ExportSource(summary, stored, "GuideLLM")
    request_totals = {
        "successful": summary.requests.ok,
        "errored": source.failed_requests,
        "incomplete": summary.requests.cancelled + summary.requests.unfinished,
    }
    metrics = _guidellm_metrics(source)
    target = summary.target

    return {
        "metadata": {"version": 2},
        "config": {"spec": {"backend": {"target": target.url, "model": target.model}}},
        "benchmarks": [
            {
                "type_": "generative_benchmark",
                "config": {
                    "strategy": {"type_": summary.load.arrival, "streams": source.concurrency}
                },
                "metrics": {
                    "request_totals": {**request_totals, "total": sum(request_totals.values())},
                    **{name: {"successful": value} for name, value in metrics.items()},
                },
                "duration": source.sent_span.duration_s,
            }
        ],
        "loadgen": source.provenance,
    }


def _guidellm_metrics(source: ExportSource) -> Document:
    """Return the metrics of successful requests, by GuideLLM's names.

    GuideLLM divides requests and tokens by the same time: from the first request sent to the end of
    the last one.
    """
    columns = source.columns
    is_successful = source.is_successful
    window = source.sent_span
    request_count = source.summary.requests.ok
    output_tokens = source.summary.tokens.output

    return {
        "requests_per_second": {"mean": per_second(request_count, window)},
        "request_concurrency": {
            "mean": benchmark_windows.mean_concurrency(columns, is_successful, window),
            "max": benchmark_windows.max_concurrency(columns, is_successful),
        },
        "request_latency": _guidellm_statistics(source.statistics("e2e"), unit_ms=MS_PER_S),
        "time_to_first_token_ms": _guidellm_statistics(source.statistics("ttft")),
        "time_per_output_token_ms": _guidellm_statistics(source.statistics("tpot")),
        "inter_token_latency_ms": _guidellm_statistics(source.statistics("itl")),
        "prompt_token_count": _guidellm_counts(source.successful_column("input_tokens")),
        "output_token_count": _guidellm_counts(source.successful_column("output_tokens")),
        "output_tokens_per_second": {"mean": per_second(output_tokens, window)},
        "tokens_per_second": {"mean": per_second(source.total_tokens, window)},
    }


def _guidellm_statistics(
    statistics_ms: Mapping[str, float], unit_ms: float = 1.0
) -> Document | None:
    """Return the statistics of a latency as an object of GuideLLM, or None if there are none.

    Args:
        statistics_ms: The statistics in ms by loadgen's names, such as "p50". Those that loadgen
            withholds as too uncertain are missing.
        unit_ms: The unit that GuideLLM uses for this latency, in ms: 1,000 for seconds.
    """
    if not statistics_ms:
        return None

    ms_to_unit = 1 / unit_ms
    values = {
        name: value_ms * ms_to_unit for name, value_ms in statistics_ms.items() if name != "count"
    }
    return {
        "mean": values.get("mean"),
        "median": values.get("p50"),
        "std_dev": values.get("std"),
        "min": values.get("min"),
        "max": values.get("max"),
        "count": int(statistics_ms["count"]),
        "percentiles": {
            _guidellm_percentile_name(name): value
            for name, value in values.items()
            if name.startswith("p")
        },
    }


def _guidellm_percentile_name(name: str) -> str:
    """Return GuideLLM's name of a percentile: "p05" for "p5", and "p999" for "p99_9"."""
    digits = name.removeprefix("p").replace("_", "")
    return f"p{digits.zfill(2)}"


def _guidellm_counts(tokens: NDArray[np.int64]) -> Document | None:
    """Return the statistics of numbers of tokens, None without any."""
    if len(tokens) == 0:
        return None
    return {
        "mean": float(tokens.mean()),
        "min": int(tokens.min()),
        "max": int(tokens.max()),
        "total_sum": int(tokens.sum(dtype=np.int64)),
    }


# -- inference-perf ------------------------------------------------------------------------------

_INFERENCE_PERF_PERCENTILES = {
    "p0.1": 0.1,
    "p1": 1,
    "p5": 5,
    "p10": 10,
    "p25": 25,
    "median": 50,
    "p75": 75,
    "p90": 90,
    "p95": 95,
    "p99": 99,
    "p99.9": 99.9,
}
_INFERENCE_PERF_NAMES = {"p50": "median", "p99_9": "p99.9"}
"""inference-perf's names of statistics that have another name here."""


def export_inference_perf(summary: Summary, stored: RunRows) -> Document:
    """Return inference-perf's `summary_lifecycle_metrics.json` as a JSON object.

    Times are in seconds. `requested_rate` is null in a closed loop, which has no rate.
    """
    source = ExportSource(summary, stored, "inference-perf")
    return {
        "benchmark_time_seconds": source.sent_span.duration_s,
        "load_summary": {
            "count": source.sent_requests,
            "schedule_delay": _describe_values(_send_delays_s(source)),
            "requested_rate": None if source.concurrency else source.rate_per_s,
        },
        "successes": _inference_perf_successes(source),
        "failures": {
            "count": source.failed_requests,
            "by_label": {
                kind: failure.count for kind, failure in summary.requests.by_error.items()
            },
        },
        "loadgen": source.provenance,
    }


def _inference_perf_successes(source: ExportSource) -> Document:
    """Return the metrics of successful requests by inference-perf's names."""
    summary = source.summary
    tokens = summary.tokens
    window = source.sent_span
    input_tokens = source.successful_column("input_tokens").astype(np.float64)
    output_tokens = source.successful_column("output_tokens").astype(np.float64)
    prompt_statistics = _describe_values(input_tokens) or {}

    return {
        "count": summary.requests.ok,
        "latency": {
            "request_latency": _inference_perf_latency(source, "e2e"),
            "normalized_time_per_output_token": _normalized_latency(source, output_tokens),
            "time_per_output_token": _inference_perf_latency(source, "tpot"),
            "time_to_first_token": _inference_perf_latency(source, "ttft"),
            "inter_token_latency": _inference_perf_latency(source, "itl"),
        },
        "throughput": {
            "input_tokens_per_sec": per_second(tokens.input, window),
            "output_tokens_per_sec": per_second(tokens.output, window),
            "total_tokens_per_sec": per_second(source.total_tokens, window),
            "requests_per_sec": per_second(summary.requests.ok, window),
        },
        "prompt_tokens": {"total": tokens.input, **prompt_statistics},
        "output_len": _describe_values(output_tokens),
    }


def _send_delays_s(source: ExportSource) -> NDArray[np.float64]:
    """Return how much later than scheduled each request was sent."""
    sent_ns = source.columns["sent_ns"]
    delays_ns = sent_ns - source.columns["due_ns"]
    delays_s: NDArray[np.float64] = delays_ns[sent_ns >= 0] / NS_PER_S
    return delays_s


def _inference_perf_latency(source: ExportSource, latency: LatencyName) -> Document | None:
    """Return the statistics of a latency in seconds, None if there are none."""
    statistics = {
        _INFERENCE_PERF_NAMES.get(name, name): value_ms / MS_PER_S
        for name, value_ms in source.statistics(latency).items()
        if name not in ("count", "std")
    }
    return statistics or None


def _normalized_latency(
    source: ExportSource, output_tokens: NDArray[np.float64]
) -> Document | None:
    """Return the statistics of the end-to-end latency per output token, in seconds."""
    if source.samples is None:
        return None
    latencies_s = source.samples.e2e.values / NS_PER_S / np.maximum(output_tokens, 1)
    return _describe_values(np.where(output_tokens > 0, latencies_s, np.nan))


def _describe_values(values: NDArray[np.float64]) -> Document | None:
    """Return the statistics of the known values with interpolated percentiles, None without any."""
    known_values = values[~np.isnan(values)]
    if len(known_values) == 0:
        return None

    percents = list(_INFERENCE_PERF_PERCENTILES.values())
    percentiles = np.percentile(known_values, percents).tolist()
    return {
        "mean": float(known_values.mean()),
        "min": float(known_values.min()),
        "max": float(known_values.max()),
        **dict(zip(_INFERENCE_PERF_PERCENTILES, percentiles, strict=True)),
    }
