"""Terminal reports: line widths, and no claim that the sample does not support."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from golden import check_golden
from make_examples import DATA
from rich.cells import cell_len

import loadgen
from loadgen.core import format
from loadgen.core.metrics.summary import Summary, load_summary
from loadgen.core.metrics.task_summary import Sessions
from loadgen.core.metrics.verdict import make_verdict
from loadgen.core.results.manifest import ReasonCode
from loadgen.core.stats.quantiles import Distribution
from loadgen.render import text as text_renderer
from loadgen.render.table import WIDTH
from loadgen.runs import cells, text
from loadgen.runs.client_text import is_host_busy
from loadgen.runs.run_table import run_table
from loadgen.runs.slo_text import describe_result

RAG, API = (
    load_summary((DATA / f"summary_example_{name}.json").read_bytes())
    for name in ("rag_gpus", "qa_api")
)
replace = msgspec.structs.replace


def render_run_table(summaries: list[Summary]) -> str:
    return text_renderer.render_sections([run_table(summaries)])


@pytest.mark.parametrize("summary", [RAG, API], ids=["rag", "api"])
def test_lines_of_a_report_fit_the_width_and_color_changes_no_text(summary: Summary) -> None:
    plain = text.render(summary)
    assert (
        max(map(cell_len, plain.splitlines()[1:])) <= WIDTH
    )  # the first line has names that must not be cut
    assert plain.endswith("\n")
    assert not re.search(r"None|nan|\x1b|\u00a0|[ \t]$", plain, flags=re.M)
    assert re.sub(r"\x1b\[\d+m", "", text.render(summary, color=True)) == plain


@pytest.mark.parametrize(
    ("number", "expected_text"),
    [
        (0, "0 GPUs"),
        (1, "1 GPU"),
        (2, "2 GPUs"),
        (1234, "1,234 GPUs"),
        (None, "- GPUs"),
        (1.0, "1 GPU"),
        (2.5, "2.5 GPUs"),
    ],
)
def test_a_count_has_the_singular_or_plural_of_its_noun(
    number: float | None, expected_text: str
) -> None:
    assert format.counted(number, "GPU") == expected_text
    assert format.counted(number, "GPU is", "GPUs are") == expected_text + (
        " is" if number == 1 else " are"
    )


def test_a_run_on_one_gpu_uses_the_singular() -> None:
    per_gpu = replace(RAG.tokens, output_per_s_per_gpu=RAG.tokens.output_per_s)
    summary = replace(RAG, target=replace(RAG.target, gpus=1), tokens=per_gpu)
    rendered_text = text.render(summary)
    assert (
        "1 GPU," in rendered_text and "1 GPUs" not in rendered_text and "GPUs" not in rendered_text
    )
    for source in Path(text.__file__).parent.parent.rglob("*.py"):
        assert "'s' if" not in source.read_text("utf-8"), f"{source}: format.counted"


def test_the_full_report_of_a_valid_run_equals_the_stored_text() -> None:
    check_golden("run_full_rag", text.render(RAG))


def test_the_full_report_of_an_invalid_run_equals_the_stored_text() -> None:
    check_golden("run_full_api", text.render(API))


def test_columns_of_the_latency_table_are_right_aligned() -> None:
    lines = text.render(RAG).splitlines()
    head = lines[lines.index("Latency") + 1]
    ttft = next(line for line in lines if line.startswith("TTFT  "))

    assert head.split() == ["ms", "mean", "p50", "p90", "p95", "p99", "p99.9", "max", "samples"]
    assert ttft.split() == ["TTFT", "190", "178", "281", "317", "425", "~476", "535", "1,500"]
    assert ttft.index("425") == head.index("p99")


def test_the_report_distinguishes_the_rate_of_tasks_from_that_of_their_requests() -> None:
    tasks = Sessions(count=7, ok=7, ok_per_s=1.0, steady_ok_per_s=1.0, duration_ms=Distribution())
    load = replace(RAG.load, arrival="poisson 5/s", offered_rps=19.0)

    open_loop = text.render(replace(RAG, load=load, sessions=tasks))
    closed_loop = text.render(replace(RAG, load=replace(load, offered_rps=None), sessions=tasks))

    assert "poisson 5/s (conversations), requests offered 19.0/s" in " ".join(open_loop.split())
    assert "poisson 5/s, sent" in " ".join(closed_loop.split())


LATE: dict[str, Any] = {
    "quantile": "p99",
    "value_ms": 9.0,
    "share": 0.09,
    "basis": "TTFT p50",
    "basis_ms": 100.0,
    "limit": 0.05,
}
BUSY = {"remedy": "other_processes", "worker": 0, "waited_share": 0.4, "at_s": 7.0}


@pytest.mark.parametrize(("remedy", "busy"), [(BUSY, True), ({"remedy": "lower_load"}, False)])
def test_the_report_of_a_run_on_a_busy_host_has_its_counts_and_no_red_text(
    remedy: dict[str, Any], busy: bool
) -> None:
    late_reason_code = ReasonCode(code="sent_late", values=LATE | remedy)
    verdict = make_verdict(RAG.verdict.limits, [late_reason_code])

    rendered_text = text.render(replace(RAG, verdict=verdict), color=True)

    assert is_host_busy(verdict) == busy
    assert ("succeeded; counts and errors" in " ".join(rendered_text.split())) == busy
    assert ("\x1b[31mINVALID" in rendered_text) == (not busy)


def test_a_busy_host_is_not_blamed_if_the_client_failed_too() -> None:
    late_reason_code = ReasonCode(code="sent_late", values=LATE | BUSY)
    failed = ReasonCode(
        code="client_failures", values={"failed": 5, "requests": 10, "share": 0.5, "limit": 0.01}
    )

    assert not is_host_busy(make_verdict(RAG.verdict.limits, [late_reason_code, failed]))
    assert not is_host_busy(RAG.verdict)


def test_the_report_of_a_simulation_begins_with_the_word_simulated() -> None:
    simulated = replace(RAG, target=replace(RAG.target, simulated=True, name="simulated: gb300"))

    for full in (False, True):
        first, *_ = text.render(simulated, full=full).splitlines()
        assert first.startswith("SIMULATED")


@pytest.mark.parametrize(
    ("state", "word"), [("interrupted", "INTERRUPTED"), ("cut_off", "CUT OFF")]
)
def test_the_report_of_an_unfinished_run_states_its_state(state: str, word: str) -> None:
    assert word in text.render(replace(RAG, run=replace(RAG.run, state=state)))


def test_an_error_text_of_a_server_cannot_move_the_cursor_or_the_margin() -> None:
    kind = replace(API.requests.by_error["http_429"], first_text="\x1b[2J\r\nline\n" + "x" * 500)
    rendered_text = text.render(
        replace(API, requests=replace(API.requests, by_error={"http_429": kind}))
    )
    assert "\x1b" not in rendered_text
    assert "\r" not in rendered_text
    assert max(map(len, rendered_text.splitlines())) <= 100


def test_the_table_of_runs_has_a_line_for_each_run() -> None:
    _, head, *rows, units, note = render_run_table([RAG, API]).splitlines()

    assert [row.split("  ")[0] for row in rows] == ["poisson 20/s", "16 in flight"]
    assert rows[1].endswith("INVALID")
    assert head.index("p99") + len("p99") == rows[1].index("~1,652") + len("~1,652")
    assert "steady-state window" in units and "measurement window" not in units
    assert note.startswith("~")


def test_the_table_of_runs_names_the_window_of_a_run_without_steady_state() -> None:
    summary = replace(RAG, load=replace(RAG.load, steady_completed_rps=None))

    table = " ".join(render_run_table([RAG, summary]).split())

    assert "for runs without one" in table


def test_the_table_of_runs_is_marked_as_simulated_if_one_of_them_was() -> None:
    simulated = replace(RAG, target=replace(RAG.target, simulated=True))

    assert render_run_table([API, simulated]).startswith("SIMULATED")


def test_a_time_just_below_a_second_is_rounded_to_one_second() -> None:
    assert [format.duration(seconds) for seconds in (0.9994, 0.9996, 59.94, 59.96)] == [
        "999 ms",
        "1.0 s",
        "59.9 s",
        "1 min 00 s",
    ]


@pytest.mark.parametrize(
    ("value", "expected_text"),
    [
        (None, "-"),
        (0, "0"),
        (0.00001, "<0.0001"),
        (-0.00001, ">-0.0001"),
        (0.0123, "0.0123"),
        (0.9994, "0.999"),
        (0.9996, "1.00"),
        (9.996, "10.0"),
        (99.96, "100"),
        (-3.2, "-3.20"),
        (999.6, "1,000"),
        (24069.8, "24,070"),
    ],
)
def test_quantities_are_formatted_with_significant_digits_or_a_bound(
    value: float | None, expected_text: str
) -> None:
    assert format.quantity(value) == expected_text


@pytest.mark.parametrize(
    ("share", "expected_text"),
    [
        (None, "-"),
        (0, "0 %"),
        (1, "100 %"),
        (0.0123, "1.2 %"),
        (0.99996, "99.996 %"),
        (1 - 1e-12, "> 99.9999 %"),
        (1e-9, "< 0.0001 %"),
        (2.5, "250.0 %"),
    ],
)
def test_percentages_are_rounded_neither_to_0_nor_to_100(
    share: float | None, expected_text: str
) -> None:
    assert format.percent(share) == expected_text


@pytest.mark.parametrize(
    ("function", "arguments", "expected_text"),
    [
        (format.duration, (0.35,), "350 ms"),
        (format.duration, (59.96,), "1 min 00 s"),
        (format.duration, (3599.7,), "1 h 00 min"),
        (format.duration, (None,), "-"),
        (format.size, (512,), "512 B"),
        (format.size, (999_600,), "1.00 MB"),
        (format.size, (9_630_000,), "9.63 MB"),
        (format.difference, (100, 112.3), "+12.3 %"),
        (format.difference, (100, 99.6), "-0.4 %"),
        (format.difference, (10, 25), "2.50x"),
        (format.difference, (0, 3), "from 0 to 3.00"),
        (format.difference, (4, 4), "="),
        (format.difference, (None, 4), "-"),
    ],
)
def test_durations_sizes_and_differences_are_formatted(
    function: object, arguments: tuple[float | None, ...], expected_text: str
) -> None:
    assert function(*arguments) == expected_text  # type: ignore[operator]


def test_a_range_of_one_value_is_printed_as_one_value() -> None:
    assert format.value_range("3,000", "3,000") == "3,000"
    assert format.value_range("2,000", "3,000") == "2,000 to 3,000"
    assert format.shares((0.05, 0.05)) == "5 %"
    assert cells.format_range_ms(8.331, 8.332) == "8.33"
    assert cells.format_range_ms(8.33, 10) == "8.33-10.0"


def test_too_few_samples_are_reported_for_the_class_that_needs_the_longest_run(
    tmp_path: Path,
) -> None:
    def request_class(weight: int) -> dict[str, object]:
        requests = {"input_tokens": 500, "output_tokens": 20}
        return {"weight": weight, "requests": requests, "slo": {"ttft": "10s"}}

    workload = {
        "name": "classes",
        "requests": {"classes": {"common": request_class(9), "rare": request_class(1)}},
        "stages": [{"arrival": {"poisson": "10/s"}, "duration": "30s"}],
    }
    summary = loadgen.run(workload, url="sim:gb300-vm", seed=1, out=tmp_path / "run").summary
    samples = {part.name: part.goodput.slo[0].count for part in summary.classes}
    assert samples["rare"] < samples["common"]

    result = describe_result(summary)

    assert "rare: TTFT p99 needs" in result
    assert f"this run has {samples['rare']}." in result
