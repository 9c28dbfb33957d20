"""Published measurements as data, and the same numbers recomputed.

The tables are packaged in `data/reference/`. Each has its source, date, quality and notes. Whoever
shows a number must show its notes, which `list_notes` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib.resources import files
from statistics import fmean, median
from typing import Generic, TypeVar

import msgspec


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of a table. `notes` are keys of `notes.yaml` that apply to this row only."""

    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name of the row in a note about it, or "" if it needs none."""
        return ""


class PublishedNode(PublishedRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the 18 Offline runs of the rack: four GPUs, timed on their own clock.

    `tokens_per_s` counts output tokens.
    """

    node: int
    tokens_per_s: float
    samples_per_s: float
    samples: int
    run_s: float
    latency_p50_s: float


class System(PublishedRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A system that was submitted to MLPerf Inference.

    Attributes:
        round: The round, such as v5.1.
        variant: The accuracy target, in percent of the reference's accuracy.
        submitter: Who submitted the system.
        system: Its name.
        gpus: Its number of GPUs.
        offline: Output tokens per second of the whole system, or None if not submitted.
        server: The same in the Server scenario.
        interactive: The same in the Interactive scenario.
        quality: How far the numbers can be relied on.
    """

    round: str
    variant: str
    submitter: str
    system: str
    gpus: int
    offline: float | None
    server: float | None
    interactive: float | None
    quality: str

    @property
    def label(self) -> str:
        """The submitter and the name of the system."""
        return f"{self.submitter}, {self.system}"


class Latency(PublishedRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The latencies of a whole system at a target rate."""

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
        """The benchmark and its scenario."""
        return f"{self.benchmark} {self.scenario}"


class Profile(PublishedRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the published capacity table.

    Attributes:
        profile: The name of the packaged workload.
        title: The title of the row.
        tokens: Tokens per interaction, as published.
        input: Input tokens per interaction.
        output: Output tokens per interaction.
        published_per_s: Interactions per second of a rack, as published.
    """

    profile: str
    title: str
    tokens: int
    input: int
    output: int
    published_per_s: float

    @property
    def label(self) -> str:
        """The name of the packaged workload."""
        return self.profile


class PublishedNumber(PublishedRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published number as printed. Its notes say what a check of it showed."""

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


def _create_table_loader(name: str, row_type: type[R]) -> Callable[[], PublishedTable[R]]:
    """Return a function that reads a packaged table on its first call and then returns it again."""

    @cache
    def load_table() -> PublishedTable[R]:
        table_type = PublishedTable[row_type]  # type: ignore[valid-type]
        return msgspec.yaml.decode(_read_table(name), type=table_type)

    return load_table


load_nodes = _create_table_loader("nodes", PublishedNode)
load_systems = _create_table_loader("mlperf", System)
load_latencies = _create_table_loader("latency", Latency)
load_limits = _create_table_loader("limits", PublishedLimit)
load_profiles = _create_table_loader("profiles", Profile)
load_numbers = _create_table_loader("figures", PublishedNumber)


@cache
def load_notes() -> dict[str, str]:
    """Return the texts of all notes by their keys."""
    return msgspec.yaml.decode(_read_table("notes"), type=dict[str, str])


def list_notes(table: PublishedTable[R], rows: Iterable[R] | None = None) -> list[str]:
    """Return the notes that must be shown below a table, each text once.

    The notes of the table come first. The note of a row starts with the label of the row, unless it
    is also a note of the table.

    Args:
        table: The table.
        rows: The rows that are shown, by default all rows of the table.
    """
    note_texts = load_notes()
    shown_texts = [note_texts[key] for key in table.notes]

    shown_rows = table.rows if rows is None else rows
    for row in shown_rows:
        for key in row.notes:
            text = note_texts[key]
            if text not in shown_texts:
                labelled_text = f"{row.label}: {text}" if row.label else text
                shown_texts.append(labelled_text)

    unique_texts = dict.fromkeys(shown_texts)
    return list(unique_texts)


def _read_table(name: str) -> bytes:
    """Return the YAML of a packaged table."""
    return (files("loadgen") / "data" / "reference" / f"{name}.yaml").read_bytes()


class PublishedRack(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of a rack of 18 nodes, in tokens per second.

    Attributes:
        slowest_node: The rate of the slowest node.
        fastest_node: The rate of the fastest node.
        mean: The mean rate of a node.
        median: The median rate of a node.
        sum_of_rates: The sum of the rates of all nodes, each over its own run.
        single_clock: All tokens divided by the length of the longest run.
    """

    slowest_node: float
    fastest_node: float
    mean: float
    median: float
    sum_of_rates: float
    single_clock: float


def compute_rack_rates(nodes: Iterable[PublishedNode]) -> PublishedRack:
    """Compute the token rates of a rack from the separate runs of its nodes.

    Each node was timed on its own clock, so there are two rates of the rack. The sum of the nodes'
    rates assumes that all were busy at the same time. The rate on a single clock divides all tokens
    by the time until the last node had finished.

    The length of a run is its samples divided by its samples per second. That is finer than
    `run_s`, which has whole seconds. (The logs give 1,030,088 tokens/s on a single clock, these
    rounded numbers 3 less.)
    """
    nodes_of_rack = list(nodes)
    node_rates = [node.tokens_per_s for node in nodes_of_rack]
    run_times_s = [node.samples / node.samples_per_s for node in nodes_of_rack]
    total_tokens = sum(
        tokens_per_s * run_time_s
        for tokens_per_s, run_time_s in zip(node_rates, run_times_s, strict=True)
    )
    longest_run_s = max(run_times_s)

    return PublishedRack(
        slowest_node=min(node_rates),
        fastest_node=max(node_rates),
        mean=fmean(node_rates),
        median=median(node_rates),
        sum_of_rates=sum(node_rates),
        single_clock=total_tokens / longest_run_s,
    )


class RecomputedProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity of a rack for one profile, recomputed in interactions per second.

    Attributes:
        profile: The row of the published capacity table.
        per_token: The sum of the nodes' rates, divided by the input and output tokens of an
            interaction. This is how the published table was computed.
        per_output_token: The same rate, divided by the output tokens alone.
        per_output_token_on_single_clock: The rate on a single clock, divided by the output tokens.
    """

    profile: Profile
    per_token: float
    per_output_token: float
    per_output_token_on_single_clock: float


def recompute_profile(profile: Profile, rates: PublishedRack) -> RecomputedProfile:
    """Recompute a row of the published capacity table from the rates of a rack, in three ways.

    The rates of a rack count output tokens only. The table divided them by input and output tokens
    together, so the capacities by output tokens alone are higher than the published ones.
    """
    return RecomputedProfile(
        profile=profile,
        per_token=rates.sum_of_rates / profile.tokens,
        per_output_token=rates.sum_of_rates / profile.output,
        per_output_token_on_single_clock=rates.single_clock / profile.output,
    )
