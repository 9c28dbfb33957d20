"""The default output of `loadgen run`: at most 25 lines, with the result first."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from golden import check_golden

import loadgen
from loadgen.core.metrics.request_counts import ErrorKind
from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.sustainable import Sustainable
from loadgen.core.metrics.uncertainty import WithheldStatistics
from loadgen.core.results.manifest import ReasonCode
from loadgen.render import text as text_renderer
from loadgen.runs import text
from loadgen.runs.brief import MAX_LINES, UNRELIABLE_LATENCY_TITLE
from loadgen.runs.rates import select_headline_rates
from loadgen.runs.tiles import headline_tiles

CASES: dict[str, dict[str, Any]] = {
    "met": {
        "workload": "rag",
        "request_rate": 30,
        "duration": "60s",
        "slo": ("ttft:2s:p95", "tpot:60ms:p95"),
    },
    "missed": {
        "workload": "rag",
        "request_rate": 60,
        "duration": "60s",
        "slo": ("ttft:2s:p95", "tpot:60ms:p95"),
    },
    "invalid": {"workload": "qa", "request_rate": 5, "num_requests": 6},
    "no_slo": {
        "workload": {"name": "short", "requests": {"input_tokens": 100, "output_tokens": 20}},
        "concurrency": 4,
        "num_requests": 200,
    },
    "closed_loop": {"workload": "qa", "concurrency": 16, "duration": "30s"},
    "sessions": {"workload": "agentic", "url": "sim:gb300-vm-128k"},
    "classes": {"workload": "mixed"},
    "embeddings": {
        "workload": {
            "name": "search",
            "requests": {"input_tokens": 200, "output_tokens": 1},
        },
        "api": "embeddings",
        "concurrency": 8,
        "num_requests": 400,
    },
}
"""Options of runs against a simulated server, by the name of the golden file."""


def run_in_virtual_time(run_dir: Path, case: str) -> Summary:
    options = {"url": "sim:gb300-vm", "seed": 1, **CASES[case]}
    return loadgen.run(out=run_dir, **options).summary


def render_brief(summary: Summary, run_dir: Path | None = None) -> str:
    return text_renderer.render(text.report(summary, run_dir=run_dir))


@pytest.mark.parametrize("case", CASES)
def test_the_default_output_is_short_and_starts_with_the_result(tmp_path: Path, case: str) -> None:
    summary = run_in_virtual_time(tmp_path / "run", case)

    output = render_brief(summary, Path("results/run"))

    assert len(output.splitlines()) <= MAX_LINES
    check_golden(f"run_{case}", output)


def test_the_output_of_an_interrupted_run_states_the_interruption_before_its_numbers(
    tmp_path: Path,
) -> None:
    summary = run_in_virtual_time(tmp_path / "run", "met")
    interrupted = msgspec.structs.replace(
        summary, run=msgspec.structs.replace(summary.run, state="interrupted")
    )

    output = render_brief(interrupted, Path("results/run"))

    lines = output.splitlines()
    assert any(line.startswith("INTERRUPTED") for line in lines[:3])
    assert len(lines) <= MAX_LINES
    check_golden("run_interrupted", output)


def test_latencies_of_an_invalid_run_are_marked_in_the_output(tmp_path: Path) -> None:
    invalid = run_in_virtual_time(tmp_path / "invalid", "invalid")
    valid = run_in_virtual_time(tmp_path / "valid", "no_slo")

    assert UNRELIABLE_LATENCY_TITLE in render_brief(invalid)
    assert UNRELIABLE_LATENCY_TITLE not in render_brief(valid)


def test_the_output_names_the_reason_of_an_unsustained_load(tmp_path: Path) -> None:
    summary = run_in_virtual_time(tmp_path / "run", "met")
    grows = Sustainable(sustained=False, code="grows", reason="TTFT grows")

    output = render_brief(msgspec.structs.replace(summary, sustainable=grows))

    assert "Not sustainable: TTFT grows." in output and "not stable" in output


def test_the_output_of_embeddings_has_only_end_to_end_latency(tmp_path: Path) -> None:
    summary = run_in_virtual_time(tmp_path / "run", "met")
    run = msgspec.structs.replace(summary.run, stream=False, api="embeddings")

    output = render_brief(msgspec.structs.replace(summary, run=run))

    assert "E2E latency" in output and "TTFT    " not in output


@pytest.mark.parametrize(
    ("duration", "expected_rate", "expected_reason"),
    [
        ("1s", None, r"none of \d+ ended in the .* of load"),
        ("4500ms", 1.1, r"only \d+ of \d+ ended in the .* of load"),
        ("60s", 19.0, ""),
    ],
)
def test_the_output_explains_the_rate_of_a_run_that_is_short_compared_to_its_requests(
    tmp_path: Path, duration: str, expected_rate: float | None, expected_reason: str
) -> None:
    # A request takes about four seconds.
    workload = {"name": "short", "requests": {"input_tokens": 500, "output_tokens": 200}}
    summary = loadgen.run(
        workload,
        url="sim:gb300-vm",
        request_rate=20,
        duration=duration,
        slo=("ttft:2s:p95",),
        seed=1,
        out=tmp_path / "run",
    ).summary

    rates = select_headline_rates(summary)
    assert rates.requests == (expected_rate and pytest.approx(expected_rate, rel=0.2))
    assert rates.goodput == rates.requests

    output = " ".join(render_brief(summary).split())
    assert re.search(expected_reason, output)
    assert ("of load)" in output) == bool(expected_reason)
    assert ("Throughput - req/s" in output) == (expected_rate is None)
    assert ("Goodput - req/s" in output) == (expected_rate is None)


def test_requests_that_fill_the_cache_are_not_called_a_warm_up(tmp_path: Path) -> None:
    conversation = [
        {"role": role, "content": f"{role} says something"}
        for _ in range(4)
        for role in ("user", "assistant")
    ]
    rows = [json.dumps({"messages": conversation}) for _ in range(12)]
    (tmp_path / "sessions.jsonl").write_text("\n".join(rows))
    workload = {
        "name": "sessions",
        "requests": {"trajectories": str(tmp_path / "sessions.jsonl"), "start": "middle"},
        "stages": [{"arrival": {"closed": 3}, "count": 12}],
    }

    summary = loadgen.run(workload, url="sim:gb300-vm", seed=1, out=tmp_path / "run").summary

    assert summary.warmup.scheduled == 3
    for text_of_run in (render_brief(summary), text.render(summary)):
        assert "(3 cache fill excluded)" in " ".join(text_of_run.split())
        assert "warm-up" not in text_of_run


MISSED_LIMITS = {"ttft": "1ms", "tpot": "1ms", "e2e": "100s"}


@pytest.mark.parametrize("class_count", [2, 12])
def test_every_missed_objective_is_listed_or_counted_among_the_hidden_ones(
    tmp_path: Path, class_count: int
) -> None:
    request_class = {
        "weight": 1,
        "requests": {"input_tokens": 500, "output_tokens": 100},
        "slo": MISSED_LIMITS,
    }
    workload = {
        "name": "classes",
        "requests": {"classes": {f"class-{i}": request_class for i in range(class_count)}},
        "stages": [{"arrival": {"poisson": "20/s"}, "duration": "30s"}],
    }
    summary = loadgen.run(workload, url="sim:gb300-vm", seed=1, out=tmp_path / "run").summary

    output = render_brief(summary, Path("results/run"))

    missed_count = 2 * class_count
    listed_count = len(re.findall(r"^  x ", output, re.MULTILINE))
    hidden = re.search(r"(\d+) more objectives(?:, (\d+) of them missed)?: --full", output)
    assert hidden is not None
    assert listed_count + int(hidden[2] or 0) == missed_count
    assert (
        len(re.findall(r"^  (?:x|ok) ", output, re.MULTILINE)) + int(hidden[1]) == 3 * class_count
    )
    assert len(output.splitlines()) <= MAX_LINES


def test_a_stopped_run_has_the_length_of_its_load_and_one_word_for_unsent_requests(
    tmp_path: Path,
) -> None:
    summary = run_in_virtual_time(tmp_path / "run", "met")
    counts = summary.requests
    last_due_s = (summary.window.start_s or 0.0) + 10.0
    stopped = msgspec.structs.replace(
        summary,
        run=msgspec.structs.replace(summary.run, state="interrupted"),
        window=msgspec.structs.replace(
            summary.window,
            steady=msgspec.structs.replace(summary.window.steady, end_s=last_due_s),
        ),
        requests=msgspec.structs.replace(
            counts,
            ok=counts.ok - 7,
            cancelled=7,
            by_error={"interrupted": ErrorKind(count=7, first_text="")},
        ),
    )

    brief = render_brief(stopped)
    full = text_renderer.render(text.report(stopped), full=True)

    assert "for 10 s" in brief.splitlines()[3]
    assert "7 cancelled" in brief
    assert "7 interrupted" not in brief
    assert not re.search(r"^interrupted +7", full, re.MULTILINE)


def test_a_run_without_steady_state_says_what_its_throughput_includes(tmp_path: Path) -> None:
    summary = loadgen.run(
        "rag",
        url="sim:gb300-vm",
        request_rate=40,
        num_requests=2000,
        slo=("ttft:400ms:p95", "tpot:30ms:p95"),
        seed=1,
        out=tmp_path / "run",
    ).summary
    codes = [code.code for code in summary.verdict.warning_codes]
    assert codes == ["virtual_time", "never_steady"]

    output = render_brief(summary, Path("results/run"))

    text_of_run = " ".join(output.split())
    warning = text_of_run.partition("Measurement ")[2]
    assert re.search(r"(49|50|51)[.\d]* s of load", warning)
    assert re.search(r"5\d[.\d]* s per request", warning)
    assert "ramp-up and drain" in warning
    assert "--duration" in warning
    assert "1 warning" not in text_of_run
    assert len(output.splitlines()) <= MAX_LINES


def with_warnings(summary: Summary, *warnings: tuple[str, str]) -> Summary:
    """Return a summary whose warnings are these pairs of a code and a text."""
    verdict = msgspec.structs.replace(
        summary.verdict,
        warnings=tuple(warning_text for _, warning_text in warnings),
        warning_codes=tuple(ReasonCode(code=code, values={}) for code, _ in warnings),
    )
    return msgspec.structs.replace(summary, verdict=verdict)


def test_the_only_warning_is_shown_and_several_are_counted(tmp_path: Path) -> None:
    summary = run_in_virtual_time(tmp_path / "run", "met")
    short = ("unfinished", "Some requests were unfinished. Use a longer --grace")
    long = ("note", f"The cache was off. {'Very ' * 50}long advice")
    endless = ("note", "word " * 60)

    def describe(*warnings: tuple[str, str]) -> str:
        return " ".join(render_brief(with_warnings(summary, *warnings)).split())

    only_short = describe(short)
    assert "Some requests were unfinished. Use a longer --grace" in only_short
    assert "(--full)" not in only_short

    only_long = describe(long)
    assert "The cache was off" in only_long
    assert "Very" not in only_long

    assert "1 warning (--full)" in describe(endless)
    assert "2 warnings (--full)" in describe(short, long)

    with_unsteady = describe(short, ("never_steady", "No steady state"), long)
    assert "ramp-up and drain" in with_unsteady
    assert "2 more warnings (--full)" in with_unsteady


ADVICE = "Client and server share the cores of this host. Send from another host"


def make_invalid(summary: Summary) -> Summary:
    """Return a summary that is INVALID for two reasons with the same advice, with TTFT ranges."""
    verdict = msgspec.structs.replace(
        summary.verdict,
        valid=False,
        reasons=(f"Requests were sent late. {ADVICE}", f"Timestamps are uncertain. {ADVICE}"),
        codes=tuple(ReasonCode(code=code) for code in ("sent_late", "arrivals_unsure")),
        caveats=(f"{'statistic ' * 30}not reported",),
        caveat_codes=(ReasonCode(code="withheld", values={"statistics": {"ttft": ["p95"]}}),),
    )
    ttft_ranges = WithheldStatistics(ranges={"p95": (4.91, 7.58)}, reason="uncertain")
    return msgspec.structs.replace(
        summary,
        verdict=verdict,
        goodput=msgspec.structs.replace(summary.goodput, met=None),
        withheld_statistics={"ttft": ttft_ranges},
    )


def test_the_goodput_of_an_invalid_run_is_not_judged(tmp_path: Path) -> None:
    summary = run_in_virtual_time(tmp_path / "run", "met")
    invalid = make_invalid(summary)

    for full in (False, True):
        output = " ".join(text_renderer.render(text.report(invalid), full=full).split())
        assert "not judged, because the run is INVALID" in output
        assert "requests met the SLO" not in output
        assert "met every limit" not in output

    attainment_tile = headline_tiles(invalid)[-1]
    assert attainment_tile.value == "-"
    assert headline_tiles(summary)[-1].value == "100 %"


def test_the_same_advice_of_several_reasons_is_printed_once(tmp_path: Path) -> None:
    invalid = make_invalid(run_in_virtual_time(tmp_path / "run", "met"))

    for full in (False, True):
        output = " ".join(text_renderer.render(text.report(invalid), full=full).split())
        assert output.count(ADVICE) == 1
        finding_positions = [output.index(word) for word in ("sent late", "are uncertain")]
        assert max(finding_positions) < output.index(ADVICE)


def test_a_range_in_the_table_of_latencies_is_explained(tmp_path: Path) -> None:
    summary = run_in_virtual_time(tmp_path / "run", "met")

    for full in (False, True):
        invalid_output = text_renderer.render(text.report(make_invalid(summary)), full=full)
        assert "4.91-7.58" in invalid_output
        assert "lies between a and b" in invalid_output
        assert "lies between" not in text_renderer.render(text.report(summary), full=full)

    brief = " ".join(render_brief(make_invalid(summary)).split())
    assert "are ranges or omitted" in brief


def test_the_output_says_how_to_repeat_the_run(tmp_path: Path) -> None:
    output = render_brief(run_in_virtual_time(tmp_path / "run", "met"))

    assert "Reproduce  repeat the command with --seed 1" in output
