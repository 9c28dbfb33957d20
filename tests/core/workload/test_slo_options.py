"""The SLO of a run: how options and files specify it, and what is refused."""

from pathlib import Path

import msgspec
import pytest
from command_line import exits

from loadgen.core.errors import CombinedError
from loadgen.core.slo import Slo, TaskTerm, Term
from loadgen.core.workload import Workload, load, read_flags

MS = 1_000_000
FILE = """
name: chat
requests: {input_tokens: 10, output_tokens: 10}
stages: [{arrival: {poisson: 10/s}, duration: 10s}]
slo: {ttft: 2s, tpot: 200ms, at: p95, attainment: 90%, task: {within: 90s}}
"""


def term(metric: str, limit_ms: int, quantile: float) -> Term:
    return Term(metric=metric, limit_ns=limit_ms * MS, quantile=quantile)


def load_text(tmp_path: Path, text: str, *slo: str) -> Workload:
    file = tmp_path / "chat.yaml"
    file.write_text(text, "utf-8")
    return load(str(file), read_flags(slo=slo))


def slo_of(tmp_path: Path, *slo: str) -> Slo:
    objectives = load_text(tmp_path, FILE, *slo).slo
    assert objectives is not None
    return objectives


def refused_codes(tmp_path: Path, text: str, *slo: str) -> list[str]:
    with pytest.raises(CombinedError) as exc_info:
        load_text(tmp_path, text, *slo)
    return [fault.code for fault in exc_info.value.errors]


@pytest.mark.parametrize(
    ("text", "code", "wrong_part"),
    [
        ("+fluidity", "invalid_value", "fluidity"),
        ("+fluidity:0%:p200", "invalid_value", '"p200"'),
        ("+fluidity:0%", "out_of_range", "fluidity:0%"),
        ("fluidity:0.9", "invalid_value", '"0.9"'),
    ],
)
def test_an_invalid_fluidity_term_is_refused_with_its_invalid_part(
    tmp_path: Path, text: str, code: str, wrong_part: str
) -> None:
    with pytest.raises(CombinedError) as refused:
        load_text(tmp_path, FILE, text)
    (error,) = refused.value.errors
    assert error.code == code
    assert wrong_part in str(error).split("-->")[0]
    assert "fluidity:90%:p95" in str(error)


def test_slo_options_replace_all_terms_of_the_workload(tmp_path: Path) -> None:
    assert slo_of(tmp_path, "tpot:50ms") == Slo(terms=(term("tpot", 50, 0.99),))


def test_a_term_with_a_plus_is_added_to_the_slo_of_the_workload(tmp_path: Path) -> None:
    assert slo_of(tmp_path, "+tpot:50ms") == Slo(
        terms=(term("ttft", 2000, 0.95), term("tpot", 200, 0.95), term("tpot", 50, 0.99)),
        goodput_share=0.9,
        task=TaskTerm(within_ns=90_000 * MS),
    )


def test_an_added_term_replaces_the_limit_of_the_same_metric_and_percentile(
    tmp_path: Path,
) -> None:
    assert slo_of(tmp_path, "+tpot:50ms:p95").terms == (
        term("ttft", 2000, 0.95),
        term("tpot", 50, 0.95),
    )
    assert slo_of(tmp_path, "+attainment:80%").goodput_share == 0.8


def test_added_and_replacing_terms_can_be_combined(tmp_path: Path) -> None:
    assert slo_of(tmp_path, "+tpot:50ms", "ttft:1s") == Slo(
        terms=(term("ttft", 1000, 0.99), term("tpot", 50, 0.99))
    )


def test_two_percentiles_of_one_metric_are_two_objectives_in_any_order(tmp_path: Path) -> None:
    both = Slo(terms=(term("ttft", 1, 0.5), term("ttft", 2000, 0.99)))
    assert slo_of(tmp_path, "ttft:1ms:p50", "ttft:2s:p99") == both
    assert slo_of(tmp_path, "ttft:2s:p99", "ttft:1ms:p50") == both
    in_file = FILE.replace("ttft: 2s, tpot: 200ms", "ttft: [{limit: 1ms, at: p50}, 2s]")
    in_file = in_file.replace("at: p95, attainment: 90%, task: {within: 90s}", "at: p99")
    assert load_text(tmp_path, in_file).slo == both


@pytest.mark.parametrize(
    "slo",
    [
        ("ttft:1s", "ttft:2s"),
        ("ttft:1s:p99", "time_to_first_token:2s"),
        ("ttft:1s", "+ttft:2s:p99"),
        ("ttft:1s", "attainment:90%", "attainment:99%"),
    ],
)
def test_an_objective_that_is_specified_twice_is_refused(
    tmp_path: Path, slo: tuple[str, ...]
) -> None:
    assert refused_codes(tmp_path, FILE, *slo) == ["duplicate"]


def test_a_percentile_that_a_file_limits_twice_is_refused(tmp_path: Path) -> None:
    twice = FILE.replace("ttft: 2s", "ttft: [2s, {limit: 1s, at: p95}]")
    assert refused_codes(tmp_path, twice) == ["duplicate"]


def test_an_invalid_limit_in_a_list_is_refused_with_its_location(tmp_path: Path) -> None:
    with pytest.raises(CombinedError) as exc_info:
        load_text(tmp_path, FILE.replace("ttft: 2s", "ttft: [2s, {limit: 1x, at: p50}]"))
    (fault,) = exc_info.value.errors
    assert fault.where.endswith(":5:26 (slo.ttft[1].limit)")


def test_an_attainment_without_a_latency_limit_is_refused(tmp_path: Path) -> None:
    assert refused_codes(tmp_path, FILE, "attainment:99%") == ["no_slo"]


def test_an_unknown_metric_is_refused_with_a_suggested_term(tmp_path: Path) -> None:
    for typed, did_you_mean in (
        ("TTFT:2s", "ttft:2s"),
        ("p95_ttft:2s", "ttft:2s:p95"),
        ("goodput:99%", "attainment:99%"),
    ):
        with pytest.raises(CombinedError) as exc_info:
            load_text(tmp_path, FILE, typed)
        (fault,) = exc_info.value.errors
        assert fault.code == "unknown_name" and f'"{did_you_mean}"' in fault.hint


@pytest.mark.parametrize(
    ("option", "texts"),
    [
        ("limit", ["cpu_share:95%", "cpu_share:90%"]),
        ("stop_when", ["errors:20%", "errors:30%"]),
        ("stop_when", ["ttft:p50:30s", "ttft:p50:20s"]),
        ("goodput", ["ttft:500", "ttft:600"]),
    ],
)
def test_a_repeated_key_of_an_option_is_refused(option: str, texts: list[str]) -> None:
    overrides = read_flags(**{option: texts})
    assert [fault.code for fault in overrides.errors] == ["duplicate"]


def test_a_run_is_judged_by_both_percentiles_of_a_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_options = ["--url", "sim:gb300-vm", "--request-rate", "5", "-d", "60s", "--seed", "1"]
    terms = ["--slo", "ttft:1ms:p50", "--slo", "ttft:2s:p99"]
    code = exits("run", "qa", *load_options, *terms, "--json", "-o", tmp_path / "run")
    captured = capsys.readouterr()
    slo = msgspec.json.decode(captured.out)["goodput"]["slo"]

    assert code == 1
    assert [(slo_term["metric"], slo_term["quantile"], slo_term["met"]) for slo_term in slo] == [
        ("ttft", 0.5, False),
        ("ttft", 0.99, True),
    ]


def test_the_help_of_a_workload_prints_its_slo(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits("run", "qa", "--help") == 0
    assert "TPOT p95 at most 40 ms" in capsys.readouterr().out
