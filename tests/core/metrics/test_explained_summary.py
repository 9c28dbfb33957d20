"""A summary that is only judged lacks the sections for readers, and nothing else."""

from __future__ import annotations

from typing import Any

import make_examples
import msgspec
import numpy as np
import pytest
from make_examples import blank, stream
from test_summary import MANIFEST, handmade_records

from loadgen.core.results.manifest import RunManifest, StagePlan, TargetFacts
from loadgen.core.results.record import KINDS, SOURCES, STATUSES
from loadgen.core.run_summary import summarize
from loadgen.core.slo import Slo, Term
from loadgen.core.stats.histogram import Histogram

MS, S = 1_000_000, 1_000_000_000


def conversations() -> tuple[Any, ...]:
    """Return 60 conversations of three turns on two targets, some failed, cut off or cancelled."""
    draw = np.random.default_rng(5)
    rows = blank(180)
    rows["session"], rows["turn"] = rows["slot"] // 3, rows["slot"] % 3
    rows["target"] = rows["session"] % 2
    rows["due_ns"] = (rows["slot"] // 3) * 100 * MS + (rows["slot"] % 3) * 700 * MS
    rows["output_events"] = rows["output_tokens"] = 20
    rows["input_tokens"], rows["built_tokens"] = 50, 45
    rows["input_source"] = rows["output_source"] = SOURCES.index("server")
    stream(
        rows,
        draw.integers(50, 400, 180) * MS,
        draw.integers(5, 15, 180) * MS,
        draw.integers(10, 90, 180) * 1000,
    )
    failed = np.isin(rows["session"], [7, 20]) & (rows["turn"] == 1)
    after = np.isin(rows["session"], [7, 20]) & (rows["turn"] == 2)
    rows["status"][failed], rows["kind"][failed] = STATUSES.index("failed"), KINDS.index("http_5xx")
    rows["status"][after], rows["kind"][after] = (
        STATUSES.index("dropped"),
        KINDS.index("previous_turn_failed"),
    )
    unsent = [name for name in rows.dtype.names if name.endswith("_ns") and name != "due_ns"]
    for name in unsent:
        rows[name][after] = -1
    rows["status"][(rows["session"] == 30) & (rows["turn"] == 2)] = STATUSES.index("cancelled")
    cut = (rows["session"] >= 55) & (rows["turn"] >= 1)
    rows["status"][cut], rows["kind"][cut] = STATUSES.index("unfinished"), KINDS.index("unfinished")
    for name in ("first_token_ns", "first_answer_ns", "last_token_ns", "end_ns"):
        rows[name][cut] = -1
    rows["finish_reason"][cut] = 0
    rows["done_ns"][cut] = (
        rows["due_ns"][cut] + rows["session"][cut] % 2 * S
    )  # every second one is over 300 ms
    for name in unsent:
        rows[name][cut & (rows["turn"] == 2)] = -1
    rows = rows[~((rows["session"] >= 58) & (rows["turn"] == 2))]
    manifest = RunManifest(
        state="finished",
        turns_per_session=3,
        stages=(StagePlan(name="all", arrival="constant 10/s"),),
        targets=(TargetFacts(name="a"), TargetFacts(name="b")),
        slo=Slo(terms=(Term(metric="ttft", limit_ns=300 * MS, quantile=0.9),)),
    )
    return manifest, rows, [Histogram()], [], [], []


def examples() -> list[tuple[Any, ...]]:
    priced = make_examples.token_priced()
    manifest, rows, gaps, _, _, texts = priced
    return [
        make_examples.rented_gpus(),
        priced,
        (manifest, rows, gaps, [], [], texts),  # without a timeline
        (MANIFEST, handmade_records(), [Histogram()] * 2, [], [], ["", "says no"]),
        conversations(),
    ]


@pytest.mark.parametrize("which", range(5))
def test_a_summary_without_explanations_omits_the_explained_sections_only(
    which: int,
) -> None:
    manifest, rows, *rest = examples()[which]
    full_summary, judged_summary = (
        summarize(manifest, rows, *rest, explained=explained) for explained in (True, False)
    )
    of_readers = (
        "sustainable",
        "splits",
        "slowest",
        "node_differences",
        "causes",
        "within",
        "stimulus",
    )
    defaults = {name: getattr(judged_summary, name) for name in of_readers}

    assert msgspec.structs.replace(full_summary, **defaults) == judged_summary
    assert not any(
        (
            judged_summary.slowest,
            judged_summary.causes.text,
            judged_summary.within,
            judged_summary.stimulus,
            judged_summary.splits.groups,
        )
    )
    assert any(getattr(full_summary, name) != value for name, value in defaults.items())
