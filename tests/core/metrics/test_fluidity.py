"""The fluidity index agrees with Etalon's rule, applied token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from expected_errors import refused
from hypothesis import given
from hypothesis import strategies as st

import loadgen
from loadgen.core.errors import INCONCLUSIVE, OK, SLO_MISSED, CombinedError
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.metrics.columns import Columns, is_of_class
from loadgen.core.metrics.fluidity import (
    NO_STREAM,
    RUN_SCOPE,
    FluidityInputs,
    FluidityScope,
    measure_fluidity,
)
from loadgen.core.metrics.request_counts import RequestCounts
from loadgen.core.metrics.summary import exit_code
from loadgen.core.metrics.token_deadlines import count_deadlines_of_run, count_token_deadlines
from loadgen.core.results import store
from loadgen.core.results.gaps import RequestGaps
from loadgen.core.results.record import FINISH, ROW, STATUS
from loadgen.core.results.stored_gaps import iterate_stored_gaps
from loadgen.core.slo import FluidityTerm, Slo, Term, TokenDeadlines
from loadgen.core.workload import load, read_flags
from loadgen.runs import text
from loadgen.runs.request_gaps import read_request_gaps
from loadgen.runs.slo_text import describe_result, list_objectives, missed_objectives

MS = 1_000_000


def naive_deadlines(
    waits_ns: Sequence[int], ttft_deadline_ns: int, token_deadline_ns: int
) -> tuple[int, int]:
    """Return all deadlines and the missed ones of a response, one token after the other.

    `waits_ns` has the time to the first token, and then the time between any two tokens. The rule
    is that of arXiv 2507.09019v1, algorithm "fluidity-index Computation", in whole ns.
    """
    total = missed = slack = 0
    for number, wait in enumerate(waits_ns):
        deadline = ttft_deadline_ns if number == 0 else token_deadline_ns
        if wait <= deadline + slack:
            slack += deadline - wait
            total += 1
        else:
            misses = (wait - slack - deadline) // token_deadline_ns + 1
            missed += misses
            total += misses
            slack = 0
    return total, missed


def records_of(events: Sequence[Sequence[int]], tokens: Sequence[int]) -> np.ndarray:
    """Return one ok record per response, which has its first token after the first of its waits."""
    rows = np.zeros(len(events), ROW)
    for slot, waits_ns in enumerate(events):
        rows[slot]["slot"] = slot
        rows[slot]["status"] = STATUS["ok"]
        rows[slot]["finish_reason"] = FINISH["length"]
        rows[slot]["due_ns"] = 1000
        rows[slot]["first_token_ns"] = 1000 + waits_ns[0]
        rows[slot]["last_token_ns"] = rows[slot]["end_ns"] = 1000 + sum(waits_ns)
        rows[slot]["first_answer_ns"] = rows[slot]["first_token_ns"]
        rows[slot]["output_events"] = len(waits_ns)
        rows[slot]["output_tokens"] = tokens[slot]
        rows[slot]["reasoning_tokens"] = -1
    return rows


def gaps_of(events: Sequence[Sequence[int]]) -> list[RequestGaps]:
    """Return the gaps of all responses in two blocks, the last responses first."""
    slots = [slot for slot, waits in enumerate(events) if len(waits) > 1]
    half = len(slots) // 2
    return [
        RequestGaps(
            slots=np.array(part, np.int64),
            counts=np.array([len(events[slot]) - 1 for slot in part], np.int64),
            values=np.array([gap for slot in part for gap in events[slot][1:]], np.int64),
        )
        for part in (slots[half:], slots[:half])
    ]


WAITS = st.lists(st.integers(0, 400), min_size=1, max_size=30)
DEADLINES = st.builds(TokenDeadlines, st.integers(1, 900), st.integers(1, 90))


@given(st.lists(WAITS, min_size=1, max_size=12), DEADLINES)
def test_deadlines_of_single_tokens_equal_those_of_the_naive_rule(
    events: list[list[int]], deadlines: TokenDeadlines
) -> None:
    rows = records_of(events, [len(waits) for waits in events])
    counts = count_token_deadlines([Columns(rows)], gaps_of(events), deadlines)
    naive = [naive_deadlines(waits, *deadlines) for waits in events]
    assert counts.slots.tolist() == list(range(len(events)))
    assert list(zip(counts.deadlines.tolist(), counts.missed.tolist(), strict=True)) == naive


@given(st.lists(WAITS, min_size=1, max_size=6), st.integers(2, 5), DEADLINES)
def test_tokens_of_one_event_arrive_at_the_same_time(
    events: list[list[int]], tokens_per_event: int, deadlines: TokenDeadlines
) -> None:
    events = [waits for waits in events if len(waits) > 1] or [[1, 1]]
    token_counts = [1 + tokens_per_event * (len(waits) - 1) for waits in events]
    rows = records_of(events, token_counts)
    counts = count_token_deadlines([Columns(rows)], gaps_of(events), deadlines)

    same_time = [0] * (tokens_per_event - 1)
    for position, waits in enumerate(events):
        waits_of_tokens = [waits[0]]
        for gap in waits[1:]:
            waits_of_tokens += [gap, *same_time]
        total, missed = naive_deadlines(waits_of_tokens, *deadlines)
        assert (counts.deadlines[position], counts.missed[position]) == (total, missed)


@pytest.mark.parametrize(
    ("waits_ms", "expected"),
    [
        ([100, 50, 50], (3, 0)),  # every token on time
        ([40, 110, 50], (3, 0)),  # the slack of the first token absorbs a pause
        ([100, 110, 10], (4, 2)),  # a late token misses two deadlines, and the next one is on time
        ([160, 50], (3, 2)),  # the first token misses its deadline and that of the next token
    ],
)
def test_early_tokens_give_slack_and_late_tokens_miss_their_deadlines(
    waits_ms: list[int], expected: tuple[int, int]
) -> None:
    events = [[wait * MS for wait in waits_ms]]
    rows = records_of(events, [len(waits_ms)])
    deadlines = TokenDeadlines(100 * MS, 50 * MS)
    counts = count_token_deadlines([Columns(rows)], gaps_of(events), deadlines)
    assert (counts.deadlines[0], counts.missed[0]) == expected


def test_responses_without_token_times_have_no_fluidity_index() -> None:
    events = [[100], [100, 20], [100, 20], [100]]
    rows = records_of(events, [8, 2, 2, 1])
    rows[2]["status"] = STATUS["failed"]
    gaps = gaps_of(events)
    counts = count_token_deadlines([Columns(rows)], gaps, TokenDeadlines(100, 50))
    assert counts.slots.tolist() == [1, 3]
    without_gaps = count_token_deadlines([Columns(rows)], [], TokenDeadlines(100, 50))
    assert without_gaps.slots.tolist() == [3]
    assert np.isnan(counts.look_up_indices(np.array([0, 2]))).all()
    assert counts.look_up_indices(np.array([3, 1])).tolist() == [1.0, 1.0]


WORKLOAD = """name: w
requests: {input_tokens: 60, output_tokens: 120}
"""


def run_in_virtual_time(tmp_path: Path, slo: Slo | None, keep: str = "raw", **flags: str) -> Path:
    """Return the folder of a simulated run of 200 requests with this SLO."""
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    options = {"request_rate": "20", "num_requests": "200", "seed": "7", "warmup": "0"} | flags
    workload = load(str(tmp_path / "w.yaml"), read_flags(**options))
    workload = workload.model_copy(update={"slo": slo})
    out = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
    settings = Settings(url="sim:gb300-vm", keep=keep, out=out)  # type: ignore[arg-type]
    return execute(workload, settings)[1]


def slo_of(tpot_ms: int, objective: FluidityTerm | None) -> Slo:
    """Return an SLO with a TTFT limit of 300 ms, a TPOT limit and an objective of deadlines."""
    terms = (
        Term(metric="ttft", limit_ns=300 * MS, quantile=0.5),
        Term(metric="tpot", limit_ns=tpot_ms * MS, quantile=0.5),
    )
    return Slo(terms=terms, fluidity=objective)


NINETY_AT_P95 = FluidityTerm(least_index=0.9, quantile=0.95)


def test_a_fluidity_objective_stores_the_token_times_and_decides_the_slo(tmp_path: Path) -> None:
    easy = loadgen.load(run_in_virtual_time(tmp_path, slo_of(1000, NINETY_AT_P95))).summary
    assert easy.fluidity is not None and easy.fluidity.objective is not None
    assert easy.fluidity.objective.met is True and easy.fluidity.objective.supported
    assert easy.fluidity.requests == 200 and easy.fluidity.deadlines == 200 * 120

    hard = loadgen.load(run_in_virtual_time(tmp_path, slo_of(2, NINETY_AT_P95))).summary
    assert hard.fluidity is not None and hard.fluidity.objective is not None
    assert hard.fluidity.objective.met is False and hard.fluidity.objective.below == 200
    assert hard.goodput.met is False
    assert hard.fluidity.p99 <= hard.fluidity.p50 <= hard.fluidity.mean + 0.1


def test_the_fluidity_index_of_a_run_equals_that_of_its_stored_token_times(tmp_path: Path) -> None:
    folder = run_in_virtual_time(tmp_path, slo_of(20, None), keep="gaps")
    gaps = read_request_gaps(folder)
    assert gaps is not None
    deadlines = missed = 0
    for row in store.read_run(folder).rows:
        waits = [int(row["first_token_ns"] - row["due_ns"]), *gaps[int(row["slot"])].tolist()]
        counted = naive_deadlines(waits, 300 * MS, 20 * MS)
        deadlines += counted[0]
        missed += counted[1]
    fluidity = loadgen.load(folder).summary.fluidity
    assert fluidity is not None and fluidity.objective is None
    assert (fluidity.deadlines, fluidity.missed) == (deadlines, missed)
    assert fluidity.index == (deadlines - missed) / deadlines


def test_a_run_without_token_times_or_deadlines_has_no_fluidity_index(tmp_path: Path) -> None:
    raw = loadgen.load(run_in_virtual_time(tmp_path, slo_of(20, None))).summary
    assert raw.fluidity is None
    without_slo = loadgen.load(run_in_virtual_time(tmp_path, None, keep="gaps")).summary
    assert without_slo.fluidity is None

    folder = run_in_virtual_time(tmp_path, slo_of(1000, NINETY_AT_P95))
    (folder / "gaps" / "requests.parquet").unlink()
    damaged = loadgen.load(folder).summary
    assert damaged.fluidity is not None and damaged.fluidity.objective is not None
    assert damaged.fluidity.objective.met is None and damaged.fluidity.absent
    assert damaged.goodput.met is None


def test_an_slo_with_a_fluidity_objective_is_undecided_without_streaming(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    flags = read_flags(request_rate="20", num_requests="200", seed="7", warmup="0")
    workload = load(str(tmp_path / "w.yaml"), flags)
    # The TPOT limit cannot be judged, but the objective needs it as a deadline. Without streaming,
    # the TTFT is the time of the whole response.
    slo = slo_of(1000, NINETY_AT_P95)
    slow_ttft = msgspec.structs.replace(slo.terms[0], limit_ns=60_000 * MS)
    slo = msgspec.structs.replace(slo, terms=(slow_ttft, slo.terms[1]))
    workload = workload.model_copy(update={"slo": slo})
    settings = Settings(url="sim:gb300-vm", stream=False, out=tmp_path / "run")
    summary = loadgen.load(execute(workload, settings)[1]).summary

    assert summary.fluidity is not None and summary.fluidity.objective is not None
    assert summary.fluidity.objective.undecided == NO_STREAM
    assert summary.fluidity.per_token_ms == 1000
    assert summary.goodput.met is None


@pytest.mark.parametrize(("failed", "is_met"), [(9, True), (10, False)])
def test_failed_requests_count_as_below_the_limit_of_fluidity(failed: int, is_met: bool) -> None:
    events = [[100, 20]] * 190
    counts = RequestCounts(
        scheduled=190 + failed,
        ok=190,
        failed=failed,
        dropped=0,
        cancelled=0,
        lost=0,
        resent=0,
        by_error={},
    )
    objective = FluidityTerm(least_index=0.9, quantile=0.95, first_token_ns=100, per_token_ns=20)
    scope = FluidityScope(
        slo=Slo(fluidity=objective),
        stages=[Columns(records_of(events, [2] * 190))],
        requests=counts,
    )
    inputs = FluidityInputs(
        scopes={RUN_SCOPE: scope}, gaps=gaps_of(events), is_streamed=True, withheld_metrics={}
    )
    fluidity = measure_fluidity(inputs)[RUN_SCOPE]
    assert fluidity.objective is not None and fluidity.index == 1.0
    assert (fluidity.objective.below, fluidity.objective.count) == (failed, 190 + failed)
    assert fluidity.objective.met is is_met
    assert fluidity.objective.value == (1.0 if is_met else 0.0)


def test_a_fluidity_objective_without_deadlines_is_refused() -> None:
    assert Slo(fluidity=NINETY_AT_P95).lacks_token_deadlines
    with_own_deadlines = FluidityTerm(least_index=0.9, first_token_ns=MS, per_token_ns=MS)
    assert Slo(fluidity=with_own_deadlines).find_token_deadlines() == (MS, MS)
    assert not slo_of(20, NINETY_AT_P95).lacks_token_deadlines
    with refused(CombinedError, "no_slo"):
        load("qa", read_flags(slo=("fluidity:90%:p95",), request_rate="1"))
    workload = load(
        "qa",
        read_flags(slo=("ttft:1s", "tpot:50ms", "fluidity:90%:p95"), request_rate="1"),
    )
    assert workload.slo is not None and workload.slo.fluidity == NINETY_AT_P95


MIX = """name: mix
requests:
  classes:
    chat: {weight: 1, requests: {input_tokens: 60, output_tokens: 30}CHAT}
    batch: {weight: 1, requests: {input_tokens: 60, output_tokens: 40}BATCH}
slo: {at: p50, ttft: 1s, tpot: 2s, fluidity: 90%}
"""


def run_classes(tmp_path: Path, *, chat: str = "", batch: str = "", **settings: Any) -> Path:
    """Return the folder of a simulated run of two classes, each with this SLO or the common one."""
    file = tmp_path / "mix.yaml"
    file.write_text(MIX.replace("CHAT", chat).replace("BATCH", batch))
    flags = read_flags(request_rate="20", num_requests="200", warmup="0", seed="1")
    settings_of_run = Settings(url="sim:gb300-vm", out=tmp_path / "run", **settings)
    return execute(load(str(file), flags), settings_of_run)[1]


def test_classes_without_separate_slos_share_that_of_the_workload(tmp_path: Path) -> None:
    summary = loadgen.load(run_classes(tmp_path)).summary
    assert summary.fluidity is not None and summary.fluidity.requests == 200
    parts = [request_class.fluidity for request_class in summary.classes]
    assert sum(part.requests for part in parts if part is not None) == 200
    assert sum(part.missed for part in parts if part is not None) == summary.fluidity.missed
    assert len(list_objectives(summary)) == 3


HARD = ", slo: {fluidity: {index: 90%, at: p50, ttft: 300ms, tpot: 2ms}}"


@pytest.mark.parametrize(("batch", "is_met"), [(HARD, False), (", slo: {ttft: 9s, at: p50}", True)])
def test_each_class_is_judged_by_its_token_deadlines(
    tmp_path: Path, batch: str, is_met: bool
) -> None:
    folder = run_classes(tmp_path, batch=batch)
    summary = loadgen.load(folder).summary
    chat, other = summary.classes
    assert summary.fluidity is None
    assert chat.fluidity is not None and chat.fluidity.objective is not None
    assert (chat.fluidity.per_token_ms, chat.fluidity.missed) == (2000, 0)
    assert chat.fluidity.deadlines == chat.requests.ok * 30
    assert chat.goodput.met is True
    assert (other.goodput.met, summary.goodput.met) == (is_met, is_met)
    assert exit_code(summary, strict=True) == (0 if is_met else 1)

    names = [objective for objective in list_objectives(summary) if "Fluidity" in objective]
    report = text.render(summary, color=False, full=True)
    assert names[0].startswith("chat: ") and len(names) == (1 if is_met else 2)
    assert "Token deadlines" in report
    if not is_met:
        assert other.fluidity is not None and other.fluidity.index is not None
        assert other.fluidity.index < 0.9
        (missed,) = missed_objectives(summary)
        assert missed.startswith("batch: ")


def test_counts_of_a_run_judge_each_response_by_the_deadlines_of_its_class(tmp_path: Path) -> None:
    folder = run_classes(tmp_path, batch=HARD)
    stored = store.read_run(folder)
    gaps = iterate_stored_gaps(folder)
    counts = count_deadlines_of_run(stored.manifest, stored.rows, gaps)
    assert counts is not None and counts.slots.tolist() == list(range(200))
    classes = loadgen.load(folder).summary.classes
    for request_class in classes:
        is_in_class = is_of_class(stored.manifest, request_class.name, stored.rows)
        of_class = counts.select_slots(stored.rows["slot"][is_in_class])
        fluidity = request_class.fluidity
        assert fluidity is not None
        assert len(of_class.slots) == fluidity.requests
        assert int(of_class.deadlines.sum()) == fluidity.deadlines
        assert int(of_class.missed.sum()) == fluidity.missed


@pytest.mark.parametrize("chat", [", slo: {at: p50, e2e: 9s}", HARD])
def test_an_undecided_objective_of_a_class_leaves_the_slo_undecided(
    tmp_path: Path, chat: str
) -> None:
    summary = loadgen.load(run_classes(tmp_path, chat=chat, batch=HARD, stream=False)).summary
    batch = summary.classes[1]
    assert batch.fluidity is not None and batch.fluidity.objective is not None
    assert batch.fluidity.objective.undecided == NO_STREAM
    assert (batch.goodput.met, summary.goodput.met) == (None, None)
    assert exit_code(summary, strict=True) == INCONCLUSIVE
    assert NO_STREAM in describe_result(summary)


@pytest.mark.parametrize(("least_index", "is_met"), [(0.01, True), (0.9, False)])
def test_classes_may_have_no_other_objective(
    tmp_path: Path, least_index: float, is_met: bool
) -> None:
    chat = HARD.replace("90%", f"{least_index:.0%}")
    summary = loadgen.load(run_classes(tmp_path, chat=chat, batch=chat)).summary
    expected = OK if is_met else SLO_MISSED
    assert (summary.goodput.met, exit_code(summary, strict=True)) == (is_met, expected)
    assert "chat: " in describe_result(summary) and "batch: " in describe_result(summary)


def test_reports_name_the_fluidity_objective_with_its_deadlines(tmp_path: Path) -> None:
    run = loadgen.load(run_in_virtual_time(tmp_path, slo_of(2, NINETY_AT_P95)))
    objectives = list_objectives(run.summary)
    assert len(objectives) == 3 and "300 ms" in objectives[2] and "2 ms" in objectives[2]
    assert len(list(missed_objectives(run.summary))) == 2
    report = text.render(run.summary, color=False, full=True)
    assert "Token deadlines" in report and "Fluidity" in report
    assert len(text.render(run.summary, color=False, full=False).splitlines()) <= 25
