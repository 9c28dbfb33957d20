"""The rules of MLPerf Inference's token scenarios as data, and the test of one scenario.

Pure after reading the packaged table `data/mlperf_rules.yaml`, where each limit has its round and
source. `result.py` applies the rules to a run.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal, get_args

import msgspec
from msgspec.structs import replace

from loadgen.core.errors import UserError
from loadgen.core.schedule import arrivals

Scenario = Literal["server", "interactive", "offline"]

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000

_RULES_PATH = Path(__file__).parent.parent / "data" / "mlperf_rules.yaml"


# -- the packaged table ----------------------------------------------------------------------------


class RuleLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The p99 limits of one scenario, the round from which they apply, and their source."""

    ttft_ms: int
    tpot_ms: int
    since: str
    source: str
    note: str = ""

    @property
    def ttft_ns(self) -> int:
        """The limit of TTFT in nanoseconds."""
        return self.ttft_ms * NS_PER_MS

    @property
    def tpot_ns(self) -> int:
        """The limit of TPOT in nanoseconds."""
        return self.tpot_ms * NS_PER_MS


class Benchmark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model, the lengths of its data set in tokens, and its limits.

    Attributes:
        dataset: The name of the official data set.
        samples: Its number of samples.
        max_input: The maximum length of a prompt.
        max_output: The maximum length of a response.
        mean_input: The mean length of prompts.
        mean_output: The mean length of responses.
        mean_output_source: The source of that mean.
        rounds: The rounds that include the benchmark.
        server: The limits of the Server scenario.
        interactive: Those of the Interactive scenario, if the benchmark has it.
        note: A note on the limits.
        accuracy: The accuracy of the reference in the units of the rules. Empty if it is not scored
            here.
        compliance: The compliance tests that the rules require.
    """

    dataset: str
    samples: int
    max_input: int
    max_output: int
    mean_input: float
    mean_output: float
    mean_output_source: str
    rounds: tuple[str, ...]
    server: RuleLimit
    interactive: RuleLimit | None = None
    note: str = ""
    accuracy: dict[str, float] = {}
    compliance: tuple[str, ...] = ()

    def latency_limit(self, scenario: Scenario) -> RuleLimit | None:
        """Return the limits of a scenario, or None if it has none or the benchmark lacks it."""
        if scenario == "server":
            return self.server
        if scenario == "interactive":
            return self.interactive
        return None


class Round(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The three LoadGen seeds of a round: samples in memory, order of samples, and arrivals."""

    qsl: int
    sample_index: int
    schedule: int
    source: str


class RulesTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The packaged table of rules.

    Attributes:
        sources: The sources, by the names that limits refer to.
        percentile: The percentile that is limited, as a fraction.
        confidence: The confidence of early stopping.
        min_duration_s: The minimum duration of a run.
        min_queries: The minimum number of queries.
        offline_slack: How much longer than the minimum the Offline query is expected to take.
        default_round: The round that is used unless another one is specified.
        rounds: The rounds, by name.
        benchmarks: The benchmarks, by name.
    """

    sources: dict[str, str]
    percentile: float
    confidence: float
    min_duration_s: int
    min_queries: int
    offline_slack: float
    default_round: str
    rounds: dict[str, Round]
    benchmarks: dict[str, Benchmark]


@functools.cache
def load_rules() -> RulesTable:
    """Return the packaged table. Its types are checked, so that a wrong key fails at once."""
    from loadgen.core.workload.yaml_marks import plain_yaml

    document = plain_yaml(_RULES_PATH.read_text("utf-8"), str(_RULES_PATH))
    return msgspec.convert(document, RulesTable)


# -- the test of one scenario ----------------------------------------------------------------------


class Test(msgspec.Struct, frozen=True, kw_only=True):
    """The requirements of the rules for one run of a benchmark.

    A sample is a prompt of the data set. A query asks for one sample in Server and Interactive, and
    for all samples of the run in Offline. A pass issues every sample once.

    Attributes:
        benchmark: The benchmark.
        scenario: The scenario.
        round: The name of the round.
        seeds: The seeds of the round.
        ttft_ns: The limit of TTFT p99; None in Offline.
        tpot_ns: The limit of TPOT p99; None in Offline.
        since: The round from which the limits apply.
        note: A note on the limits.
        samples: The number of samples of the data set.
        percentile: The percentile that is limited, as a fraction.
        confidence: The confidence of early stopping.
        min_duration_ns: The minimum duration.
        min_queries: The minimum number of queries, before it is rounded up to whole passes.
    """

    __test__ = False  # for pytest: not a test case

    benchmark: str
    scenario: Scenario
    round: str
    seeds: Round
    ttft_ns: int | None
    tpot_ns: int | None
    since: str = ""
    note: str = ""
    samples: int
    percentile: float
    confidence: float
    min_duration_ns: int
    min_queries: int

    @property
    def model(self) -> str:
        """The model's name in LoadGen's configuration and in tools that read its logs."""
        suffix = "-interactive" if self.scenario == "interactive" else ""
        return self.benchmark.replace("llama3.1", "llama3_1") + suffix


def create_test(
    benchmark: str, scenario: Scenario, round_name: str | None = None, *, min_duration_s: float = 0
) -> Test:
    """Return the test of a benchmark and scenario.

    Args:
        benchmark: The name of the benchmark, for example "llama2-70b".
        scenario: The scenario.
        round_name: The round whose limits and seeds apply, or None for the default round.
        min_duration_s: A value above 0 replaces the 600 s of the rules. The result then has a
            warning that it counts as a trial only.

    Raises:
        UserError: The benchmark, scenario or round is unknown. The error names the known ones.
    """
    table = load_rules()
    benchmark_rules = _find_benchmark(table, benchmark)
    chosen_round = _choose_round(table, benchmark, round_name)
    limit = _find_limit(benchmark_rules, benchmark, scenario, chosen_round)
    test_without_limits = Test(
        benchmark=benchmark,
        scenario=scenario,
        round=chosen_round,
        seeds=table.rounds[chosen_round],
        ttft_ns=None,
        tpot_ns=None,
        samples=benchmark_rules.samples,
        percentile=table.percentile,
        confidence=table.confidence,
        min_duration_ns=round((min_duration_s or table.min_duration_s) * NS_PER_S),
        min_queries=benchmark_rules.samples if scenario == "offline" else table.min_queries,
    )
    if limit is None:
        return test_without_limits

    return replace(
        test_without_limits,
        ttft_ns=limit.ttft_ns,
        tpot_ns=limit.tpot_ns,
        since=limit.since,
        note=limit.note,
    )


def _find_benchmark(table: RulesTable, benchmark: str) -> Benchmark:
    """Return what the rules say about a benchmark. Raises UserError if it is unknown."""
    benchmark_rules = table.benchmarks.get(benchmark)
    if benchmark_rules is None:
        raise UserError(
            "unknown_name",
            f'unknown benchmark "{benchmark}"',
            "--benchmark",
            f"known: {', '.join(table.benchmarks)}",
        )

    return benchmark_rules


def _choose_round(table: RulesTable, benchmark: str, round_name: str | None) -> str:
    """Return the round to use: the specified one, else the default, else the benchmark's latest.

    Raises UserError for an unknown round, or one without the benchmark.
    """
    benchmark_rounds = table.benchmarks[benchmark].rounds
    if not round_name:
        if table.default_round in benchmark_rounds:
            return table.default_round
        return benchmark_rounds[-1]

    if round_name not in table.rounds:
        raise UserError(
            "unknown_name",
            f'unknown round "{round_name}"',
            "--round",
            f"known: {', '.join(table.rounds)}",
        )

    if round_name not in benchmark_rounds:
        raise UserError(
            "unsupported",
            f"round {round_name} does not include {benchmark}",
            "--round",
            f"{benchmark} is in rounds {', '.join(benchmark_rounds)}",
        )

    return round_name


def _find_limit(
    benchmark_rules: Benchmark, benchmark_name: str, scenario: Scenario, test_round: str
) -> RuleLimit | None:
    """Return the limits of a scenario on latency, or None in Offline, which has none.

    Args:
        benchmark_rules: What the rules say about the benchmark.
        benchmark_name: The name of the benchmark, which errors mention.
        scenario: The scenario.
        test_round: The round of MLPerf whose rules apply, for example "v5.1".

    Raises:
        UserError: The benchmark does not have the scenario, or not yet in this round.
    """
    if scenario == "offline":
        return None

    limit = benchmark_rules.latency_limit(scenario)
    if limit is None:
        raise UserError(
            "unsupported",
            f"{benchmark_name} has no {scenario} scenario",
            "--benchmark",
            "known: server, offline",
        )

    if _round_number(limit.since) > _round_number(test_round):
        raise UserError(
            "unsupported",
            f"{benchmark_name} {scenario} begins with round {limit.since}",
            "--round",
            f"give --round {limit.since} or later",
        )

    return limit


def _round_number(round_name: str) -> tuple[int, ...]:
    """Return a round as numbers that can be compared: (5, 1) for "v5.1"."""
    return tuple(map(int, round_name.lstrip("v").split(".")))


def parse_scenario(name: str) -> Scenario:
    """Return the scenario of a stored result. Raises UserError if it is unknown."""
    scenarios: tuple[Scenario, ...] = get_args(Scenario)
    for scenario in scenarios:
        if scenario == name:
            return scenario
    raise UserError(
        "unknown_name", f'unknown scenario "{name}"', "scenario", f"known: {', '.join(scenarios)}"
    )


# -- what the rules say about the load -------------------------------------------------------------


def create_schedule(test: Test, qps: float) -> arrivals.Arrivals:
    """Return the scheduled time of each query of a Server or Interactive test.

    These are the Poisson arrivals that LoadGen draws with the seed of the round. The schedule
    reaches the minimum duration and the minimum number of queries, and then goes on until every
    sample of the data set is issued equally often.

    Args:
        test: The requirements of the rules.
        qps: The mean rate in queries/s.
    """
    return arrivals.poisson_arrivals_at_least(
        qps,
        seed=test.seeds.schedule,
        min_duration_ns=test.min_duration_ns,
        min_count=test.min_queries,
        multiple_of=test.samples,
    )


def offline_samples(test: Test, expected_qps: float) -> int:
    """Return the number of samples of LoadGen's single Offline query.

    It is the number that LoadGen expects to need, rounded up to whole passes of the data set.
    """
    expected_samples = offline_expected(test, expected_qps)
    missing_in_last_pass = -expected_samples % test.samples
    return expected_samples + missing_in_last_pass


def offline_expected(test: Test, expected_qps: float) -> int:
    """Return the samples that LoadGen expects to need in Offline, before whole passes.

    They are the expected rate times the minimum duration times the slack of 1.1, and at least the
    minimum number of queries.
    """
    min_duration_s = test.min_duration_ns / NS_PER_S
    samples = int(load_rules().offline_slack * min_duration_s * expected_qps)
    return max(samples, test.min_queries)
