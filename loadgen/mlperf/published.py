"""Published figures as data, and what they say when they are worked out again. The tables are in `data/reference/`.

Reads the packaged tables and nothing else. Every table carries its source, date, quality and notes, and whoever shows
a figure shows its notes: `notes_of` gathers them. No figure of our own is in here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import fmean, median
from typing import Generic, TypeVar

import msgspec


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of a table; `notes` are keys of `notes.yaml`, for this line alone."""

    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What a note about this line alone calls it."""
        return ""


class PublishedNode(PublishedRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the 18 Offline runs: four GPUs, their own clock. `tokens_per_s` counts output tokens."""

    node: int
    tokens_per_s: float
    samples_per_s: float
    samples: int
    run_s: float
    latency_p50_s: float


class System(PublishedRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A submitted system; output tokens per second of the whole of it, None where nothing was submitted."""

    round: str
    variant: str  # accuracy target, in % of the reference's
    submitter: str
    system: str
    gpus: int
    offline: float | None
    server: float | None
    interactive: float | None
    quality: str

    @property
    def label(self) -> str:
        return f"{self.submitter}, {self.system}"


class Latency(PublishedRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latencies at a target rate, of the whole system."""

    run: str
    scenario: str
    gpus: int
    target_qps: float
    tokens_per_request: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    latency_p50_s: float
    latency_p99_s: float


class PublishedLimit(PublishedRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a benchmark's scenario allows at p99, and its data set."""

    benchmark: str
    scenario: str
    ttft_p99_ms: float
    tpot_p99_ms: float
    samples: int
    max_input_tokens: int
    max_output_tokens: int
    mean_output_tokens: float | None
    dataset: str = ""

    @property
    def label(self) -> str:
        return f"{self.benchmark} {self.scenario}"


class Profile(PublishedRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of the published capacity table: tokens of an interaction, and interactions per second of a rack."""

    profile: str  # the name of our workload
    title: str
    tokens: int  # as published
    input: int
    output: int
    published_per_s: float

    @property
    def label(self) -> str:
        return self.profile


class Figure(PublishedRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published figure as it was printed, and what was found of it."""

    name: str
    value: str
    unit: str
    found: str


R = TypeVar("R", bound=PublishedRow)


class Table(msgspec.Struct, Generic[R], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table with where it is from; `quality` says how far to trust it."""

    title: str
    source: str
    date: str
    quality: str
    notes: tuple[str, ...]
    rows: tuple[R, ...]


@cache
def nodes() -> Table[PublishedNode]:
    return msgspec.yaml.decode(_data("nodes"), type=Table[PublishedNode])


@cache
def mlperf() -> Table[System]:
    return msgspec.yaml.decode(_data("mlperf"), type=Table[System])


@cache
def latency() -> Table[Latency]:
    return msgspec.yaml.decode(_data("latency"), type=Table[Latency])


@cache
def limits() -> Table[PublishedLimit]:
    return msgspec.yaml.decode(_data("limits"), type=Table[PublishedLimit])


@cache
def profiles() -> Table[Profile]:
    return msgspec.yaml.decode(_data("profiles"), type=Table[Profile])


@cache
def figures() -> Table[Figure]:
    return msgspec.yaml.decode(_data("figures"), type=Table[Figure])


@cache
def notes() -> dict[str, str]:
    """All notes by their keys."""
    return msgspec.yaml.decode(_data("notes"), type=dict[str, str])


def notes_of(table: Table[R], rows: Iterable[R] | None = None) -> list[str]:
    """The texts of a table's notes, then those of its rows (of `rows`, where only some are shown), each once."""
    found = dict.fromkeys(notes()[key] for key in table.notes)
    for row in table.rows if rows is None else rows:
        for key in row.notes:
            text = notes()[key]
            if text not in found:
                found[f"{row.label}: {text}" if row.label else text] = None
    return list(found)


def _data(name: str) -> bytes:
    return (files("loadgen") / "data" / "reference" / f"{name}.yaml").read_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRack:
    """18 nodes as one. Tokens per second."""

    least: float
    most: float
    mean: float
    median: float
    sum_of_rates: float  # each over its own run
    single_clock: float  # all tokens over the slowest run


def rack(rows: Iterable[PublishedNode]) -> PublishedRack:
    """What the runs of a rack say together. A node's run is its samples over their rate, which is finer than the whole
    seconds of `run_s`; its tokens are its rate times that. (The logs themselves give 1,030,088 on a single clock, these
    rounded figures 3 less.)
    """
    rows = list(rows)
    rates = [row.tokens_per_s for row in rows]
    runs_s = [row.samples / row.samples_per_s for row in rows]
    tokens = sum(rate * run_s for rate, run_s in zip(rates, runs_s, strict=True))
    return PublishedRack(
        least=min(rates),
        most=max(rates),
        mean=fmean(rates),
        median=median(rates),
        sum_of_rates=sum(rates),
        single_clock=tokens / max(runs_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """A line of the capacity table worked out again from an output-token rate; interactions per second."""

    profile: Profile
    as_published: float  # rate / (input + output): the table's own way
    by_output: float  # rate / output
    single_clock: float  # by output, with the single-clock rate


def arithmetic(profile: Profile, rates: PublishedRack) -> Arithmetic:
    return Arithmetic(
        profile=profile,
        as_published=rates.sum_of_rates / profile.tokens,
        by_output=rates.sum_of_rates / profile.output,
        single_clock=rates.single_clock / profile.output,
    )


IGNORED = (
    "it divides an output-token rate by input + output tokens; output alone would give more, and reading the prompts, "
    "which Offline hides in its mean of 272.7 output tokens per sample, would take some of that back",
    "it has no latency limit: Offline answers when it likes (the median sample waited 37 to 40 minutes)",
    'it is a rate, and calls it "concurrent": how many users that is depends on how long they wait and think',
    "it takes every replica busy all the time: no peaks, no routing, no lost machine",
)
