"""An option with KEY=VALUE that specifies one key twice is an error, never a silent choice."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import exits
from expected_errors import refused

from loadgen.cli.repetition import parse_repetition
from loadgen.core.errors import CombinedError, UserError
from loadgen.cost import command as cost_command
from loadgen.cost import size_command
from loadgen.sim.server import fault_injection


def test_a_result_with_two_prices_or_numbers_of_gpus_is_refused() -> None:
    for flag in ("--price", "--gpus"):
        with refused(UserError, "duplicate"):
            cost_command._parse_pairs(["a=1", "results/a=2"], flag, [Path("results/a")])


def test_two_price_names_for_one_target_of_size_are_refused() -> None:
    with refused(UserError, "duplicate"):
        size_command.parse_price_names(["sim:a=x", "sim:a=y"], ["sim:a", "sim:b"])


def test_a_setting_of_repeat_that_is_specified_twice_is_refused() -> None:
    with refused(CombinedError, "duplicate"):
        parse_repetition("auto,most=3,most=5")


def test_an_injected_failure_with_two_shares_is_refused() -> None:
    with refused(UserError, "duplicate"):
        fault_injection.parse_failure_plan("truncate:0.1,truncate:0.2")


@pytest.mark.parametrize(
    "options",
    [
        ["--set", "trace_speed=2", "--set", "trace_speed=3"],
        ["--set", "limit=cpu_share:95%", "--set", "limit=cpu_share:90%"],
        ["--metadata", "a=1", "--metadata", "a=2"],
        ["--stop-when", "errors:20%", "--stop-when", "errors:30%"],
        ["--slo", "ttft:1s", "--slo", "ttft:2s"],
    ],
)
def test_a_key_that_an_option_of_run_specifies_twice_is_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits("run", "qa", "--url", "sim:gb300-vm", "-c", "1", *options, "--dry-run") == 2
    assert "error" in capsys.readouterr().err
