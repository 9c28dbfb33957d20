"""Published figures as data, and the same figures recomputed. The tables are in `data/reference/`.

Reads the packaged tables and nothing else. Every table has its source, date, quality and notes. Whoever shows a figure
must show its notes: `notes_of` collects them. None of the figures is our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib.resources import files
from statistics import fmean, median
from typing import Generic, TypeVar

import msgspec


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of a table. `notes`: keys of `notes.yaml` that apply to this row only."""

    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name of the row in a note about it; "" where it needs none."""
        return ""


class PublishedNode(PublishedRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the 18 Offline runs: four GPUs, timed on its own clock. `tokens_per_s` counts output tokens."""

    node: int
    tokens_per_s: float
    samples_per_s: float
    samples: int
    run_s: float
    latency_p50_s: float


class System(PublishedRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A submitted system. Rates: output tokens per second of the whole system; None where not submitted."""

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
    """Latencies of a whole system at a target rate."""

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
    """The p99 limits of a benchmark's scenario, and its data set."""

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
    """A row of the published capacity table: tokens per interaction, and interactions per second of a rack."""

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
    """A published figure as printed; what a check of it showed is in its notes."""

    name: str
    value: str
    unit: str


R = TypeVar("R", bound=PublishedRow)


class PublishedTable(
    msgspec.Struct, Generic[R], frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A table and its source; `quality` says how far to trust it."""

    title: str
    source: str
    date: str
    quality: str
    notes: tuple[str, ...]
    rows: tuple[R, ...]


def _table(name: str, row: type[R]) -> Callable[[], PublishedTable[R]]:
    """A function that returns the packaged table, read once."""
    return cache(lambda: msgspec.yaml.decode(_table_bytes(name), type=PublishedTable[row]))  # type: ignore[valid-type]


nodes = _table("nodes", PublishedNode)
mlperf = _table("mlperf", System)
latency = _table("latency", Latency)
limits = _table("limits", PublishedLimit)
profiles = _table("profiles", Profile)
figures = _table("figures", Figure)


@cache
def notes() -> dict[str, str]:
    """All notes by their keys."""
    return msgspec.yaml.decode(_table_bytes("notes"), type=dict[str, str])


def notes_of(table: PublishedTable[R], rows: Iterable[R] | None = None) -> list[str]:
    """The texts of a table's notes, then of its rows' notes (only of `rows` where given), each text once."""
    texts = dict.fromkeys(notes()[key] for key in table.notes)
    for row in table.rows if rows is None else rows:
        for key in row.notes:
            text = notes()[key]
            if text not in texts:
                texts[f"{row.label}: {text}" if row.label else text] = None
    return list(texts)


def _table_bytes(name: str) -> bytes:
    return (files("loadgen") / "data" / "reference" / f"{name}.yaml").read_bytes()


class PublishedRack(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a rack of 18 nodes, in tokens per second."""

    least: float
    most: float
    mean: float
    median: float
    sum_of_rates: float  # each node's rate over its own run
    single_clock: float  # all tokens / length of the slowest run


def rack(rows: Iterable[PublishedNode]) -> PublishedRack:
    """The figures of a rack from the runs of its nodes.

    The length of a node's run is its samples / their rate, which is finer than the whole seconds of `run_s`; its tokens
    are its token rate times that length. (The logs give 1,030,088 tokens/s on a single clock, these rounded figures 3
    less.)
    """
    rows = list(rows)
    rates = [row.tokens_per_s for row in rows]
    run_times_s = [row.samples / row.samples_per_s for row in rows]
    tokens = sum(rate * run_s for rate, run_s in zip(rates, run_times_s, strict=True))
    return PublishedRack(
        least=min(rates),
        most=max(rates),
        mean=fmean(rates),
        median=median(rates),
        sum_of_rates=sum(rates),
        single_clock=tokens / max(run_times_s),
    )


class Arithmetic(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the capacity table recomputed from an output-token rate, in interactions per second."""

    profile: Profile
    as_published: float  # rate / (input + output): the table's own way
    by_output: float  # rate / output
    single_clock: float  # single-clock rate / output


def arithmetic(profile: Profile, rates: PublishedRack) -> Arithmetic:
    return Arithmetic(
        profile=profile,
        as_published=rates.sum_of_rates / profile.tokens,
        by_output=rates.sum_of_rates / profile.output,
        single_clock=rates.single_clock / profile.output,
    )
