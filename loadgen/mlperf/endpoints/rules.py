"""The constants of the rules of MLPerf Endpoints v1.0, each with its section, and its benchmarks.

Pure after reading the packaged table `data/mlperf_endpoints.yaml`, which names the documents and
their versions. Sections are those of `endpoints_rules.md` in mlcommons/endpoints_policies.
"""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

from loadgen.core.errors import UserError
from loadgen.mlperf.rules import Benchmark
from loadgen.mlperf.rules import load_rules as load_inference_rules

DISCLOSURE = (
    "MLPerf Endpoints rehearsal, unofficial: not run with the reference client and not verified by "
    "MLCommons Association. The MLPerf name and logo are trademarks of MLCommons."
)
"""The text that every output has. Official runs use the reference client (section 2.1.1)."""

RULES_VERSION = "1.0"

MIN_POINTS = 8
"""Measurement points of a curve, with a run for the Offline point (section 5.3)."""

MIN_POINTS_WITH_ELECTED_OFFLINE = 7
"""Measurement points if the point at C_max is also the Offline result (sections 5.3 and 5.7.2)."""

MAX_POINTS = 32
"""The largest number of measurement points, the Offline point included (section 5.6)."""

CHOICE_POINTS = 3
"""Points at any concurrency of the Low, Medium or High Concurrency region (section 5.3)."""

MAX_LOWEST_CONCURRENCY = 32
"""The Ultra Low Concurrency region is 1 to 32, so C_min is at most this (section 5.4)."""

MAX_C_MAX_WITH_APPROVAL = 33
"""Up to this C_max, a curve needs the approval of the working group (section 5.4)."""

HIGH_REGION_MARGIN = 1.10
"""Points may exceed C_max by this factor, outside the High Concurrency region (section 5.4)."""

MIN_WINDOW_ULTRA_LOW_S = 600
MIN_WINDOW_S = 1200
"""The shortest steady window at concurrencies of 1 to 32 and at higher ones (section 6.2)."""

MIN_SUPER_PASSES = 4
"""Super-passes that a steady window spans at least: MIN_TREND_N in section 4.4.

A super-pass is a block of queries, in the order of issue, as long as the data set.
"""

MIN_OFFLINE_THROUGHPUT = 0.98
"""The least throughput of the Offline run, as a share of that of the point at C_max (5.7.2)."""

MAX_WARMUP_S = 24 * 3600
"""The longest warm-up of a point (section 6.3)."""

REPORTED_QUANTILE = 0.90
"""The percentile of TTFT and TPOT that is reported (section 4.1)."""

SALT_BYTES = 8
"""Random bytes in the salt of each query: at least 64 bits (section 2.9.5.1)."""

ACCURACY_SHARE = 0.99
"""The share of the accuracy of the reference that every accuracy run must reach (benchmarks)."""

_TABLE_PATH = Path(__file__).parent.parent.parent / "data" / "mlperf_endpoints.yaml"


def minimum_window_s(concurrency: int) -> int:
    """Return the shortest steady window that is allowed at a concurrency, in seconds.

    Source: section 6.2 of the rules, and `min_duration_ms` in endpoints-submission-cli 1.5.3.0. The
    longer windows of agentic benchmarks are left out, because loadgen does not rehearse these.
    """
    if concurrency <= MAX_LOWEST_CONCURRENCY:
        return MIN_WINDOW_ULTRA_LOW_S
    return MIN_WINDOW_S


class SeedSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The random seeds that MLCommons published for a cohort (Submission Rules, section 4.6).

    Attributes:
        cohort: The cohort in which it was published.
        scheduler_rng_seed: The seed of the times of issue. A fixed concurrency has none to draw.
        sample_index_rng_seed: The seed of the order of the samples.
        model_seed: The seed of the model's sampling.
        source: The name of its source in the table.
    """

    cohort: str
    scheduler_rng_seed: int
    sample_index_rng_seed: int
    model_seed: int
    source: str


class ReferenceClientLoad(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the reference client is configured for a benchmark, in the words of its `config.yaml`.

    Attributes:
        model_params: The sampling parameters and the longest response.
        performance: The performance data set.
        accuracy: The accuracy data sets, each with its scorer.
        source: The name of its source in the table.
        api_type: The API of the server that it uses.
    """

    model_params: dict[str, object]
    performance: dict[str, object]
    accuracy: tuple[dict[str, object], ...]
    source: str
    api_type: str = "openai"


class EndpointsBenchmark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A benchmark of MLPerf Endpoints.

    Attributes:
        submission_name: The name of the model in the reference checker.
        model: The model's repository on Hugging Face.
        dataset: The name of the performance data set in the reference checker.
        accuracy_samples: The queries of an accuracy run.
        accuracy: The scores of the reference, by metric.
        reference_client: How the reference client is configured. None without a published example.
    """

    submission_name: str
    model: str
    dataset: str
    accuracy_samples: int
    accuracy: dict[str, float]
    reference_client: ReferenceClientLoad | None = None

    @property
    def required_accuracy(self) -> dict[str, float]:
        """The scores that an accuracy run must reach, by metric."""
        return {name: ACCURACY_SHARE * score for name, score in self.accuracy.items()}


class EndpointsTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The packaged table: sources, seed sets and benchmarks, each by name."""

    sources: dict[str, str]
    seed_sets: dict[str, SeedSet]
    benchmarks: dict[str, EndpointsBenchmark]


@functools.cache
def load_rules() -> EndpointsTable:
    """Return the packaged table. Its types are checked, so that a wrong key fails at once."""
    from loadgen.core.workload.yaml_marks import plain_yaml

    document = plain_yaml(_TABLE_PATH.read_text("utf-8"), str(_TABLE_PATH))
    return msgspec.convert(document, EndpointsTable)


def find_benchmark(name: str) -> EndpointsBenchmark:
    """Return the benchmark of MLPerf Endpoints with a name.

    Raises:
        UserError: The name is unknown. The hint of the error lists the known names.
    """
    benchmarks = load_rules().benchmarks
    if name in benchmarks:
        return benchmarks[name]

    problem = f'MLPerf Endpoints has no benchmark "{name}"'
    hint = f"known: {', '.join(benchmarks)}"
    if name in load_inference_rules().benchmarks:
        hint += f"; for the scenarios of MLPerf Inference use loadgen mlperf server -b {name}"
    raise UserError("unknown_name", problem, "--benchmark", hint)


def dataset_lengths(benchmark_name: str) -> Benchmark:
    """Return the size of a benchmark's data set and the lengths of its prompts and responses.

    The data sets are those of MLPerf Inference, whose table has the same names.
    """
    return load_inference_rules().benchmarks[benchmark_name]


def find_seed_set(name: str) -> SeedSet:
    """Return the published set of random seeds with a name, such as "A".

    Raises:
        UserError: The name is unknown. The hint of the error lists the known names.
    """
    seed_sets = load_rules().seed_sets
    if name not in seed_sets:
        raise UserError(
            "unknown_name",
            f'no seed set "{name}" is published',
            "--seed-set",
            f"known: {', '.join(seed_sets)}",
        )
    return seed_sets[name]
