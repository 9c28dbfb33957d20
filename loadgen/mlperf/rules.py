"""The rules of MLPerf Inference's token scenarios as data: limits, rounds, seeds, sizes, and the test of one scenario.

Pure after reading the packaged table `data/mlperf_rules.yaml`, where each limit has its round and source. `result.py`
applies the rules to a run.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

import msgspec

from loadgen.core.errors import UserError
from loadgen.core.schedule import arrivals

Scenario = Literal["server", "interactive", "offline"]

_RULES = Path(__file__).parent.parent / "data" / "mlperf_rules.yaml"


class RuleLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """p99 limits of one scenario, the round from which they apply, and their source."""

    ttft_ms: int
    tpot_ms: int
    since: str
    source: str
    note: str = ""

    @property
    def ttft_ns(self) -> int:
        return self.ttft_ms * 1_000_000

    @property
    def tpot_ns(self) -> int:
        return self.tpot_ms * 1_000_000


class Benchmark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model, the shape of its data set in tokens, and its limits. `rounds`: those that include the benchmark."""

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
    accuracy: dict[
        str, float
    ] = {}  # of the reference, in the units of the rules; {}: not scored here
    compliance: tuple[str, ...] = ()  # the compliance tests that the rules ask for


class Round(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The three LoadGen seeds of a round."""

    qsl: int
    sample_index: int
    schedule: int
    source: str


class RulesTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The packaged table of rules."""

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
def rules() -> RulesTable:
    """The packaged table, decoded and checked by type: a wrong key fails at once."""
    from loadgen.core.workload.yaml_marks import plain_yaml

    return msgspec.convert(plain_yaml(_RULES.read_text("utf-8"), str(_RULES)), RulesTable)


class Test(msgspec.Struct, frozen=True, kw_only=True):
    """The requirements for one run. Limits are None in Offline. `min_queries` is not yet rounded up to whole passes."""

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


def test(
    benchmark: str, scenario: Scenario, round_name: str | None = None, *, min_duration_s: float = 0
) -> Test:
    """The test of a benchmark and scenario. Raises UserError that lists the known benchmarks, scenarios and rounds.

    `min_duration_s` above 0 replaces the rules' 600 s; a result then says that it is too short to count.
    """
    table = rules()
    spec = table.benchmarks.get(benchmark)
    if spec is None:
        raise UserError(
            "unknown_name",
            f'unknown benchmark "{benchmark}"',
            "--benchmark",
            f"known: {', '.join(table.benchmarks)}",
        )
    round_used = round_name or (
        table.default_round if table.default_round in spec.rounds else spec.rounds[-1]
    )
    if round_used not in table.rounds:
        raise UserError(
            "unknown_name",
            f'unknown round "{round_used}"',
            "--round",
            f"known: {', '.join(table.rounds)}",
        )
    if round_used not in spec.rounds:
        hint = f"{benchmark} is in rounds {', '.join(spec.rounds)}"
        raise UserError("unsupported", f"round {round_used} has no {benchmark}", "--round", hint)
    limit = None if scenario == "offline" else getattr(spec, scenario)
    if limit is None and scenario != "offline":
        raise UserError(
            "unsupported",
            f"{benchmark} has no {scenario} scenario",
            "--benchmark",
            "known: server, offline",
        )
    if limit is not None and _round_number(limit.since) > _round_number(round_used):
        problem = f"{benchmark} {scenario} begins with round {limit.since}"
        raise UserError("unsupported", problem, "--round", f"give --round {limit.since} or later")
    return Test(
        benchmark=benchmark,
        scenario=scenario,
        round=round_used,
        seeds=table.rounds[round_used],
        ttft_ns=limit.ttft_ns if limit else None,
        tpot_ns=limit.tpot_ns if limit else None,
        since=limit.since if limit else "",
        note=limit.note if limit else "",
        samples=spec.samples,
        percentile=table.percentile,
        confidence=table.confidence,
        min_duration_ns=round(min_duration_s * 1e9)
        if min_duration_s
        else table.min_duration_s * 1_000_000_000,
        min_queries=spec.samples if scenario == "offline" else table.min_queries,
    )


def _round_number(round_name: str) -> tuple[int, ...]:
    return tuple(map(int, round_name.lstrip("v").split(".")))


def schedule(test: Test, qps: float) -> arrivals.Arrivals:
    """LoadGen's Server schedule: Poisson arrivals by the round's seed, until minimum duration and whole passes."""
    return arrivals.poisson_arrivals_at_least(
        qps,
        seed=test.seeds.schedule,
        min_duration_ns=test.min_duration_ns,
        min_count=test.min_queries,
        multiple_of=test.samples,
    )


def offline_samples(test: Test, expected_qps: float) -> int:
    """Samples of LoadGen's single Offline query: those that it expects to need, in whole passes."""
    expected = offline_expected(test, expected_qps)
    return expected + -expected % test.samples


def offline_expected(test: Test, expected_qps: float) -> int:
    """Samples that LoadGen expects to need in Offline: minimum duration times the slack (1.1), at least the minimum."""
    samples = int(rules().offline_slack * (test.min_duration_ns / 1e9) * expected_qps)
    return max(samples, test.min_queries)
