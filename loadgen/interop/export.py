"""Writes a run in the result formats of other tools, under their definitions, for their readers.

Pure. Latencies are computed as the other tool would (`other_definitions.py`), and so are durations
and rates (`benchmark_windows.py`); docs/reference/exports.md lists every field. What a run does not have is
left out or null. Every file has a field `loadgen`, which other tools ignore: it names loadgen and
the definitions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import FAILED, LOST
from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.windows import per_second
from loadgen.core.results.manifest import RunManifest, StagePlan
from loadgen.core.results.record import FINISH_REASONS
from loadgen.core.stats.early_stopping import allowed_over
from loadgen.core.stats.histogram import Histogram
from loadgen.core.stats.quantiles import quantile_index
from loadgen.formats import definitions_of
from loadgen.interop import benchmark_windows
from loadgen.interop.benchmark_windows import NS_PER_S
from loadgen.interop.other_definitions import Theirs, chosen, theirs


class RunRows(Protocol):
    """What is written of a run (`core.results.store.Stored`)."""

    @property
    def manifest(self) -> RunManifest: ...
    @property
    def rows(self) -> NDArray[np.void]: ...
    @property
    def gaps(self) -> Sequence[Histogram]: ...


class ExportSource:
    """A run with its columns, and its samples by the definitions of `tool`."""

    def __init__(self, summary: Summary, stored: RunRows, tool: str) -> None:
        manifest, rows, gaps = stored.manifest, stored.rows, stored.gaps
        self.summary, self.manifest, self.tool = summary, manifest, tool
        self.columns, self.ok = chosen(manifest, rows)
        self.samples: Theirs | None = theirs(manifest, rows, gaps).get(tool)
        self.each_gap: Mapping[int, NDArray[np.int64]] | None = getattr(stored, "each_gap", None)
        self.stage = next((stage for stage in manifest.stages if stage.measured), None)
        self.sent_requests = benchmark_windows.span_of_sent_requests(self.columns)

    def column(self, name: str) -> NDArray[np.int64]:
        """A field of the measured requests that are ok and have output."""
        return self.columns[name][self.ok]

    def stats(self, metric: str) -> dict[str, float]:
        """Return the statistics of a metric by the tool's definition that are not withheld."""
        if metric in self.summary.unsound:
            return {}
        sample = getattr(self.samples, metric, None)
        withheld = self.summary.withheld.get(metric)
        if sample is None:
            return {}
        ranges = withheld.ranges if withheld is not None else {}
        return {name: value for name, value in sample.stats().items() if name not in ranges}

    @property
    def note(self) -> dict[str, Any]:
        """The field `loadgen` of every exported file: the run, its validity and the definitions."""
        run, target = self.summary.run, self.summary.target
        return {
            "written_by": f"loadgen {run.version}",
            "run": run.id,
            "simulated": target.simulated,
            "valid": self.summary.verdict.valid,
            "caveats": list(self.summary.verdict.caveats),
            "recipe": self.summary.fingerprints.recipe,
            "definitions": f"those of {self.tool}: {definitions_of(self.tool)}",
        }

    @property
    def lanes(self) -> int | None:
        """Lanes of the first measured stage; None in an open loop."""
        return self.stage.concurrency if self.stage is not None else None

    @property
    def failed(self) -> int:
        """The number of measured requests that failed or were lost."""
        return int((self.columns.where(FAILED) | self.columns.where(LOST)).sum())

    @property
    def total_tokens(self) -> int | None:
        """The tokens of successful requests, prompts included; None if they are unknown."""
        tokens = self.summary.tokens
        if tokens.input is None or tokens.output is None:
            return None
        return tokens.input + tokens.output


AT_ONCE = "everything at once"  # the arrival of a stage with an infinite rate


def _burstiness(stage: StagePlan | None) -> float | None:
    """Return the shape of the gaps between arrivals as vLLM defines it.

    It is 1 for Poisson arrivals and, as vLLM's default, where no rate is requested. It is None for
    other arrivals whose gaps have no gamma distribution.
    """
    arrival = "" if stage is None else stage.arrival
    if arrival.startswith("gamma"):
        shape = arrival.partition("burstiness ")[2]
        return float(shape.partition(",")[0])
    has_no_rate = stage is not None and (stage.closed or arrival.startswith(AT_ONCE))
    return 1.0 if has_no_rate or arrival.startswith("poisson") else None


def _load_pattern(source: ExportSource) -> str | None:
    """Return the load pattern of mlcommons/endpoints, or None for a load that it does not have."""
    if source.lanes:
        return "concurrency"
    arrival = "" if source.stage is None else source.stage.arrival
    if arrival.startswith(AT_ONCE):
        return "max_throughput"
    return "poisson" if arrival.startswith("poisson") else None


def vllm(summary: Summary, stored: RunRows) -> dict[str, Any]:
    """The file of `vllm bench serve --save-result --save-detailed` without texts, `itls` where gaps were kept."""
    source, manifest = ExportSource(summary, stored, "vllm bench serve"), stored.manifest
    rate = source.stage.rate if source.stage is not None else None
    tokens, benchmark = summary.tokens, source.sent_requests
    document: dict[str, Any] = {
        "date": "".join(c for c in manifest.started[:19] if c.isalnum()).replace("T", "-"),
        "endpoint_type": "openai-chat" if manifest.api == "chat" else "openai",
        "backend": "openai-chat" if manifest.api == "chat" else "openai",
        "label": None,
        "model_id": summary.target.model,
        "tokenizer_id": manifest.tokenizer,
        "num_prompts": summary.requests.scheduled,
        "request_rate": rate if rate is not None and math.isfinite(rate) else "inf",
        "burstiness": _burstiness(source.stage),
        "max_concurrency": source.lanes or manifest.max_in_flight,
        "duration": benchmark.duration_s,
        "completed": summary.requests.ok,
        "failed": source.failed,
        "total_input_tokens": tokens.input,
        "total_output_tokens": tokens.output,
        "request_throughput": per_second(summary.requests.ok, benchmark),
        "request_goodput": per_second(summary.goodput.good, benchmark),
        "output_throughput": per_second(tokens.output, benchmark),
        "total_token_throughput": per_second(source.total_tokens, benchmark),
        "max_concurrent_requests": benchmark_windows.max_requests_per_whole_second(
            source.columns, source.ok
        ),
    }
    for metric, their_name in (("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl"), ("e2e", "e2el")):
        stats = source.stats(metric)
        if stats:
            theirs_of_ours = {"mean": "mean", "p50": "median", "std": "std"}
            document |= {
                f"{theirs}_{their_name}_ms": stats[ours]
                for ours, theirs in theirs_of_ours.items()
                if ours in stats
            }
            document |= {
                f"{percentile}_{their_name}_ms": stats[percentile]
                for percentile in ("p50", "p90", "p95", "p99")
                if percentile in stats
            }
    if source.samples is not None:
        seconds = {"ttfts": source.samples.ttft.values, "latencies": source.samples.e2e.values}
        document |= {their_name: values / 1e9 for their_name, values in seconds.items()}
        if (each_gap := source.each_gap) is not None:
            slots = source.column("slot").tolist()
            document["itls"] = [
                (each_gap[slot] / 1e9).tolist() if slot in each_gap else [] for slot in slots
            ]
        document["start_times"] = source.column("sent_ns") / 1e9
        document["input_lens"] = source.column("input_tokens")
        document["output_lens"] = source.column("output_tokens")
    return {**document, "loadgen": source.note}


def aiperf(summary: Summary, stored: RunRows) -> dict[str, Any]:
    """`profile_export_aiperf.json`, schema 1.4."""
    source, manifest = ExportSource(summary, stored, "AIPerf"), stored.manifest
    tokens = summary.tokens
    benchmark = benchmark_windows.span_of_successful_requests(source.columns, source.ok)
    document: dict[str, Any] = {"schema_version": "1.4", "benchmark_id": summary.run.id}

    def block(unit: str, stats: Mapping[str, float | None]) -> dict[str, Any]:
        named = {
            ("avg" if name == "mean" else name): value
            for name, value in stats.items()
            if name != "p99_9"
        }
        return {"unit": unit, **named}

    for key, metric in (
        ("request_latency", "e2e"),
        ("time_to_first_token", "ttft"),
        ("inter_token_latency", "itl"),
    ):
        if stats := source.stats(metric):
            document[key] = block("ms", stats)
    if summary.inter_chunk_ms.count and "inter_chunk" not in summary.unsound:
        inter_chunk = summary.inter_chunk_ms
        stats = {
            name: value
            for name in ("count", "mean", "min", "p50", "p90", "p95", "p99", "max")
            if (value := getattr(inter_chunk, name)) is not None
        }
        document["inter_chunk_latency"] = block("ms", stats)
    for key, field in (
        ("input_sequence_length", "input_tokens"),
        ("output_sequence_length", "output_tokens"),
    ):
        if len(values := source.column(field)):
            ends = {"min": int(values.min()), "max": int(values.max())}
            document[key] = {"unit": "tokens", "avg": float(values.mean()), **ends}
    for key, unit, value in (
        ("request_throughput", "requests/sec", per_second(summary.requests.ok, benchmark)),
        ("request_count", "requests", float(summary.requests.ok)),
        ("error_request_count", "requests", float(source.failed)),
        ("output_token_throughput", "tokens/sec", per_second(tokens.output, benchmark)),
        ("total_token_throughput", "tokens/sec", per_second(source.total_tokens, benchmark)),
        ("total_isl", "tokens", tokens.input),
        ("total_osl", "tokens", tokens.output),
        ("benchmark_duration", "sec", benchmark.duration_s),
        ("good_request_count", "requests", summary.goodput.good),
        ("goodput", "requests/sec", per_second(summary.goodput.good, benchmark)),
    ):
        if value is not None:
            document[key] = {"unit": unit, "avg": value}
    api = "chat" if manifest.api == "chat" else "completions"
    return {
        **document,
        "input_config": {
            "models": {"items": [{"name": summary.target.model}]},
            "endpoint": {"urls": [summary.target.url], "type": api, "streaming": manifest.stream},
        },
        "was_cancelled": summary.run.state == "interrupted",
        "is_complete": summary.run.state == "finished",
        "error_summary": [
            {"type": kind, "count": e.count} for kind, e in summary.requests.by_error.items()
        ],
        "start_time": manifest.started,
        "end_time": manifest.ended,
        "loadgen": source.note,
    }


def guidellm(summary: Summary, stored: RunRows) -> dict[str, Any]:
    """`benchmarks.json` with one benchmark; figures are of successful requests."""
    source = ExportSource(summary, stored, "GuideLLM")
    tokens, benchmark = summary.tokens, source.sent_requests
    output = benchmark_windows.span_of_output(source.columns, source.ok)

    def block(stats: Mapping[str, float], scale: float = 1.0) -> dict[str, Any] | None:
        if not stats:
            return None
        percentiles = {
            name.replace("_", ""): value * scale
            for name, value in stats.items()
            if name.startswith("p")
        }
        padded = {
            f"p0{name[1:]}" if len(name) == 2 else name: value
            for name, value in percentiles.items()
        }

        def scaled(statistic: str) -> float | None:
            return stats[statistic] * scale if statistic in stats else None

        return {
            "mean": scaled("mean"),
            "median": scaled("p50"),
            "std_dev": scaled("std"),
            "min": scaled("min"),
            "max": scaled("max"),
            "count": int(stats["count"]),
            "percentiles": padded,
        }

    def counts(field: str) -> dict[str, Any] | None:
        values = source.column(field)
        if len(values) == 0:
            return None
        total = int(values.sum(dtype=np.int64))
        return {
            "mean": float(values.mean()),
            "min": int(values.min()),
            "max": int(values.max()),
            "total_sum": total,
        }

    totals = {
        "successful": summary.requests.ok,
        "errored": source.failed,
        "incomplete": summary.requests.cancelled + summary.requests.unfinished,
    }
    successful = {
        "requests_per_second": {"mean": per_second(summary.requests.ok, benchmark)},
        "request_concurrency": {
            "mean": benchmark_windows.mean_concurrency(source.columns, source.ok, benchmark),
            "max": benchmark_windows.max_concurrency(source.columns, source.ok),
        },
        "request_latency": block(source.stats("e2e"), 1e-3),
        "time_to_first_token_ms": block(source.stats("ttft")),
        "time_per_output_token_ms": block(source.stats("tpot")),
        "inter_token_latency_ms": block(source.stats("itl")),
        "prompt_token_count": counts("input_tokens"),
        "output_token_count": counts("output_tokens"),
        "output_tokens_per_second": {"mean": per_second(tokens.output, output)},
        "tokens_per_second": {"mean": per_second(source.total_tokens, output)},
    }
    strategy = {"type_": summary.load.arrival, "streams": source.lanes}
    return {
        "metadata": {"version": 2},
        "config": {
            "spec": {"backend": {"target": summary.target.url, "model": summary.target.model}}
        },
        "benchmarks": [
            {
                "type_": "generative_benchmark",
                "config": {"strategy": strategy},
                "metrics": {
                    "request_totals": {**totals, "total": sum(totals.values())},
                    **{name: {"successful": value} for name, value in successful.items()},
                },
                "duration": benchmark.duration_s,
            }
        ],
        "loadgen": source.note,
    }


def inference_perf(summary: Summary, stored: RunRows) -> dict[str, Any]:
    """`summary_lifecycle_metrics.json`. Latencies in s."""
    source = ExportSource(summary, stored, "inference-perf")

    def block(values: NDArray[np.float64]) -> dict[str, float] | None:
        """As theirs: interpolated percentiles; None without a value."""
        values = values[~np.isnan(values)]
        if len(values) == 0:
            return None
        places = {
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
        percentiles = dict(
            zip(places, np.percentile(values, list(places.values())).tolist(), strict=True)
        )
        return {
            "mean": float(values.mean()),
            "min": float(values.min()),
            "max": float(values.max()),
            **percentiles,
        }

    def seconds(metric: str) -> dict[str, float] | None:
        stats = source.stats(metric)
        named = {"p50": "median", "p99_9": "p99.9"}
        return {
            named.get(k, k): v / 1e3 for k, v in stats.items() if k not in ("count", "std")
        } or None

    delay = (source.columns["sent_ns"] - source.columns["due_ns"])[
        source.columns["sent_ns"] >= 0
    ] / 1e9
    output = source.column("output_tokens").astype(np.float64)
    normalized = None
    if source.samples is not None:
        normalized = block(
            np.where(output > 0, source.samples.e2e.values / 1e9 / np.maximum(output, 1), np.nan)
        )
    tokens, benchmark = summary.tokens, source.sent_requests
    return {
        "benchmark_time_seconds": benchmark.duration_s,
        "load_summary": {
            "count": int((source.columns["sent_ns"] >= 0).sum()),
            "schedule_delay": block(delay),
            "requested_rate": source.stage.rate
            if source.stage is not None and not source.lanes
            else None,
        },
        "successes": {
            "count": summary.requests.ok,
            "latency": {
                "request_latency": seconds("e2e"),
                "normalized_time_per_output_token": normalized,
                "time_per_output_token": seconds("tpot"),
                "time_to_first_token": seconds("ttft"),
                "inter_token_latency": seconds("itl"),
            },
            "throughput": {
                "input_tokens_per_sec": per_second(tokens.input, benchmark),
                "output_tokens_per_sec": per_second(tokens.output, benchmark),
                "total_tokens_per_sec": per_second(source.total_tokens, benchmark),
                "requests_per_sec": per_second(summary.requests.ok, benchmark),
            },
            "prompt_tokens": {
                "total": tokens.input,
                **(block(source.column("input_tokens").astype(float)) or {}),
            },
            "output_len": block(output),
        },
        "failures": {
            "count": source.failed,
            "by_label": {k: e.count for k, e in summary.requests.by_error.items()},
        },
        "loadgen": source.note,
    }


_PERCENTILES = (99.9, 99.0, 97.0, 95.0, 90.0, 80.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0)
_BUCKETS = 30


def mlcommons(summary: Summary, stored: RunRows) -> dict[str, Any]:
    """`result_summary.json` of mlcommons/endpoints 0.1, which MLPerf's submission checker reads. Times in ns.

    Early-stopping percentiles are estimated as in LoadGen: where t samples may be over, the t-th largest sample.
    """
    source = ExportSource(summary, stored, "mlcommons/endpoints")
    lanes, stage = source.lanes, source.stage
    completed = summary.requests.ok + source.failed
    throughput = _endpoints_throughput(source, completed)
    reasons = source.column("finish_reason")
    known_reasons = ("stop", "length", "tool_calls", "content_filter", "function_call")
    finished = {key: int((reasons == FINISH_REASONS.index(key)).sum()) for key in known_reasons}
    finished["other"] = len(reasons) - sum(finished.values())
    document: dict[str, Any] = {
        "version": "0.1.0",
        "git_sha": None,
        "test_started_at": 0,
        "n_samples_issued": int((source.columns["sent_ns"] >= 0).sum()),
        "n_samples_completed": completed,
        "n_samples_failed": source.failed,
        "duration_ns": round((source.sent_requests.duration_s or 0) * 1e9),
        "state": "complete" if summary.run.state == "finished" else summary.run.state,
        "complete": summary.run.state == "finished",
    }
    if source.samples is not None:
        samples = {
            "ttft": source.samples.ttft,
            "tpot": source.samples.tpot,
            "latency": source.samples.e2e,
        }
        for key, sample in samples.items():
            assert sample is not None
            document[key] = _series(sample.values[~np.isnan(sample.values)], early=True)
    document["output_sequence_lengths"] = _series(
        source.column("output_tokens").astype(np.float64), early=False
    )
    document["input_sequence_lengths"] = _series(
        source.column("input_tokens").astype(np.float64), early=False
    )
    return {
        **document,
        "legacy_loadgen_window_duration_ns": throughput.legacy_window_ns,
        "qps": throughput.queries_per_s,
        "tps": throughput.tokens_per_s,
        "finish_reason_counts": finished,
        "run_config": {
            "load_pattern": {
                "type": _load_pattern(source),
                "target_qps": None if lanes or stage is None else stage.rate,
                "target_concurrency": lanes,
            },
            "warmup": {
                "enabled": bool(summary.warmup.scheduled),
                "n_requests": summary.warmup.scheduled or None,
            },
            "scheduler_random_seed": summary.run.schedule_seed,
            "dataloader_random_seed": summary.run.seed,
        },
        "loadgen": source.note,
    }


class _EndpointsThroughput(NamedTuple):
    """The throughput of mlcommons/endpoints.

    `legacy_window_ns` is None if the rates cover the full run.
    """

    queries_per_s: float | None
    tokens_per_s: float | None
    legacy_window_ns: int | None


def _endpoints_throughput(source: ExportSource, completed: int) -> _EndpointsThroughput:
    """Return the throughput as mlcommons/endpoints computes it.

    The rates of an open loop cover LoadGen's legacy window, which ends with the request that was
    issued last; n completions enclose n - 1 gaps. A closed loop, and a run with fewer than two
    completions, have the rates of the full run.
    """
    output_tokens = source.summary.tokens.output
    legacy = source.summary.window.last_issued
    has_legacy_window = not source.lanes and legacy.duration_s is not None and completed >= 2
    if not has_legacy_window:
        full_run = source.sent_requests
        return _EndpointsThroughput(
            per_second(completed, full_run), per_second(output_tokens, full_run), None
        )
    assert legacy.duration_s is not None
    return _EndpointsThroughput(
        per_second(completed - 1, legacy),
        per_second(output_tokens, legacy),
        round(legacy.duration_s * NS_PER_S),
    )


def _series(values: NDArray[np.float64], *, early: bool) -> dict[str, Any] | None:
    n = len(values)
    if n == 0:
        return None
    ordered = np.sort(values)
    series: dict[str, Any] = {
        "total": float(ordered.sum()),
        "min": float(ordered[0]),
        "max": float(ordered[-1]),
        "median": float(ordered[quantile_index(n, 0.5)]),
        "avg": float(ordered.mean()),
        "std_dev": float(ordered.std()),
        "percentiles": {
            f"{p:.1f}": float(ordered[quantile_index(n, p / 100)]) for p in _PERCENTILES
        },
    }
    if early:
        over_by_percentile = {p: allowed_over(n, p / 100) for p in _PERCENTILES if p >= 50}
        series["early_stopping_percentiles"] = {
            f"{p:.1f}": float(ordered[n - t]) if t >= 1 else None
            for p, t in over_by_percentile.items()
        }
    low = max(series["min"], 1.0)
    edges = np.geomspace(low, max(series["max"], 10 * low), _BUCKETS + 1)
    edges[0] = min(edges[0], series["min"])
    counts, _ = np.histogram(np.minimum(ordered, edges[-1]), edges)
    buckets = [[float(a), float(b)] for a, b in pairwise(edges)]
    return {**series, "histogram": {"buckets": buckets, "counts": counts.tolist()}}
