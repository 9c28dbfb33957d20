"""The rules of MLPerf Inference's token scenarios as data: limits, rounds, seeds, sizes, and what one test asks for.

Pure after reading the packaged table (`data/mlperf_rules.yaml`), each limit in it with its round and source. What the
rules say of a run is `mlperf.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from loadgen.errors import UserError
from loadgen.schedule import arrivals

Scenario = Literal["server", "interactive", "offline"]
SCENARIOS: tuple[Scenario, ...] = ("server", "interactive", "offline")

_RULES = Path(__file__).parent.parent / "data" / "mlperf_rules.yaml"


class RuleLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """p99 limits of one scenario, the round from which they hold, and where they are written."""

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
    """A model, the shape of its data set in tokens, and its limits. `rounds` in which it is offered."""

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


class Round(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoadGen's three seeds of a round."""

    qsl: int
    sample_index: int
    schedule: int
    source: str


class RulesTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole table."""

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
    """The packaged table. Checked by its types, so that a wrong key in it fails every test."""
    import yaml

    return msgspec.convert(yaml.safe_load(_RULES.read_text("utf-8")), RulesTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """What one run is held against. Limits are None in Offline. `min_queries` before rounding up to whole passes."""

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
        """The name by which LoadGen's configuration and log readers call it."""
        suffix = "-interactive" if self.scenario == "interactive" else ""
        return self.benchmark.replace("llama3.1", "llama3_1") + suffix


def test(benchmark: str, scenario: Scenario, round_name: str | None = None, *, min_duration_s: float = 0) -> Test:
    """The test of that name. Raises UserError naming the known benchmarks, scenarios and rounds.

    `min_duration_s` above 0 stands in for the rules' 600 s: the result then says that it is too short to count.
    """
    table = rules()
    found = table.benchmarks.get(benchmark)
    if found is None:
        raise UserError(f'unknown benchmark "{benchmark}"', "--benchmark", f"known: {', '.join(table.benchmarks)}")
    name = round_name or (table.default_round if table.default_round in found.rounds else found.rounds[-1])
    if name not in table.rounds:
        raise UserError(f'unknown round "{name}"', "--round", f"known: {', '.join(table.rounds)}")
    if name not in found.rounds:
        hint = f"{benchmark} is in rounds {', '.join(found.rounds)}"
        raise UserError(f"round {name} has no {benchmark}", "--round", hint)
    limit = None if scenario == "offline" else getattr(found, scenario)
    if limit is None and scenario != "offline":
        raise UserError(f"{benchmark} has no {scenario} scenario", "--benchmark", "known: server, offline")
    if limit is not None and _number(limit.since) > _number(name):
        raise UserError(
            f"{benchmark} {scenario} begins with round {limit.since}", "--round", f"give --round {limit.since} or later"
        )
    return Test(
        benchmark=benchmark,
        scenario=scenario,
        round=name,
        seeds=table.rounds[name],
        ttft_ns=limit.ttft_ns if limit else None,
        tpot_ns=limit.tpot_ns if limit else None,
        since=limit.since if limit else "",
        note=limit.note if limit else "",
        samples=found.samples,
        percentile=table.percentile,
        confidence=table.confidence,
        min_duration_ns=round(min_duration_s * 1e9) if min_duration_s else table.min_duration_s * 1_000_000_000,
        min_queries=found.samples if scenario == "offline" else table.min_queries,
    )


def _number(round_name: str) -> tuple[int, ...]:
    return tuple(map(int, round_name.lstrip("v").split(".")))


def schedule(asked: Test, qps: float) -> arrivals.Arrivals:
    """LoadGen's Server schedule: Poisson by the round's seed, on until the minimum duration and whole passes."""
    return arrivals.poisson_at_least(
        qps,
        seed=asked.seeds.schedule,
        min_duration_ns=asked.min_duration_ns,
        min_count=asked.min_queries,
        multiple_of=asked.samples,
    )


def offline_samples(asked: Test, expected_qps: float) -> int:
    """Samples of LoadGen's one Offline query: enough for the minimum duration with a slack of 1.1, whole passes."""
    wanted = int(rules().offline_slack * (asked.min_duration_ns / 1e9) * expected_qps)
    wanted = max(wanted, asked.min_queries)
    return wanted + -wanted % asked.samples
