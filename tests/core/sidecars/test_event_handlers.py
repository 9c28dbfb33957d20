"""Event handlers of a run: their order, their manifest entries and their last event."""

from __future__ import annotations

from pathlib import Path
from time import monotonic_ns
from typing import Any

import msgspec
import pytest
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.transport.target import Target
from loadgen_sdk.wire_formats.server_profiles import SERVER_PROFILES
from run_fixtures import manifest

from loadgen.core.errors import UserError
from loadgen.core.execution import run
from loadgen.core.execution.events import (
    Counters,
    LoadEnded,
    LoadStarted,
    ManifestCreated,
    RunEnded,
    RunEvent,
    RunningLoad,
    RunPlanned,
    TargetsProbed,
    broadcast,
    complete_manifest,
    conclude_manifest,
)
from loadgen.core.execution.plan import Settings
from loadgen.core.results.manifest import RunManifest
from loadgen.core.results.store import read_run
from loadgen.core.sidecars.event_handlers import HostNameCheck, resolve_names
from loadgen.core.workload import load, read_flags


class Recorder:
    """Keeps what it hears, and says its name in the manifest before and after the load."""

    def __init__(self, name: str, heard: list[tuple[str, str]]) -> None:
        self.name, self.heard = name, heard

    def __call__(self, event: RunEvent) -> RunManifest | None:
        self.heard.append((self.name, type(event).__name__))
        if isinstance(event, ManifestCreated | LoadEnded) and event.manifest is not None:
            return msgspec.structs.replace(
                event.manifest, warnings=(*event.manifest.warnings, self.name)
            )
        return None


def test_the_first_event_handler_is_the_last_to_receive_the_end_of_a_run() -> None:
    received: list[tuple[str, str]] = []
    tell = broadcast([Recorder("a", received), Recorder("b", received)])
    tell(LoadEnded(None))
    tell(RunEnded())
    assert received == [
        ("a", "LoadEnded"),
        ("b", "LoadEnded"),
        ("b", "RunEnded"),
        ("a", "RunEnded"),
    ]


def test_event_handlers_extend_the_manifest_in_order() -> None:
    hearers = [Recorder("a", []), lambda _event: None, Recorder("b", [])]
    assert complete_manifest(hearers, manifest("x", 1)).warnings == ("a", "b")
    assert conclude_manifest(hearers, complete_manifest(hearers, manifest("x", 1))).warnings == (
        "a",
        "b",
        "a",
        "b",
    )


EMBEDDED = {"ttft": "2ms", "itl": "1ms"}
FLAGS: dict[str, Any] = {
    "num_requests": "3",
    "concurrency": "1",
    "warmup": "0",
    "input_tokens": "8",
    "output_tokens": "2",
}
OVER_HTTP = [
    "TargetsProbed",
    "ManifestCreated",
    "RunPlanned",
    "LoadStarted",
    "LoadEnded",
    "RunEnded",
]


@pytest.mark.processes
def test_a_run_over_http_emits_its_events(tmp_path: Path) -> None:
    received: list[tuple[str, str]] = []
    settings = Settings(embedded=EMBEDDED, out=tmp_path / "run")
    _, folder = run.execute(load("qa", read_flags(**FLAGS)), settings, [Recorder("me", received)])
    assert [event for _, event in received] == OVER_HTTP
    assert read_run(folder).manifest.warnings.count("me") == 2


def test_a_run_in_virtual_time_emits_its_events(tmp_path: Path) -> None:
    received: list[tuple[str, str]] = []
    settings = Settings(url="sim:gb300-vm", out=tmp_path / "run")
    run.execute(load("qa", read_flags(**FLAGS)), settings, [Recorder("me", received)])

    assert [event for _, event in received] == [
        "RunPlanned",
        "SimulationStarted",
        "Simulated",
        "RunEnded",
    ]


@pytest.mark.processes
@pytest.mark.parametrize(("at", "before"), [(ManifestCreated, 2), (RunPlanned, 3)])
def test_an_event_handler_that_refuses_a_run_ends_it(tmp_path: Path, at: type, before: int) -> None:
    received: list[tuple[str, str]] = []

    def refuse(event: RunEvent) -> None:
        assert not isinstance(event, LoadStarted)
        if isinstance(event, at):
            raise UserError("out_of_range", "too dear", "--max-cost")

    settings = Settings(embedded=EMBEDDED, out=tmp_path / "run")
    with pytest.raises(UserError, match="too dear"):
        run.execute(load("qa", read_flags(**FLAGS)), settings, [Recorder("me", received), refuse])
    assert [event for _, event in received] == [*OVER_HTTP[:before], "LoadEnded", "RunEnded"]
    assert not (tmp_path / "run").exists(), "nothing was measured"


@pytest.mark.parametrize(
    ("before", "after", "codes"),
    [
        (["10.0.0.1"], ["10.0.0.2"], ["name_moved"]),
        (["10.0.0.1"], [], ["name_moved"]),
        # A resolver may return some of many addresses in turns.
        (["10.0.0.1", "10.0.0.2"], ["10.0.0.3", "10.0.0.2"], []),
        ([], ["10.0.0.1"], []),
    ],
)
def test_a_name_that_resolves_to_another_address_after_the_load_causes_a_warning(
    before: list[str], after: list[str], codes: list[str]
) -> None:
    unknown: dict[str, Any] = dict.fromkeys(
        ("template_tokens", "token_ratio", "reports_usage", "has_exact_length", "tokens_per_event")
    )
    probe_result = ProbeResult(
        target=Target.parse("http://h.test:8000"),
        server="vllm",
        server_profile=SERVER_PROFILES["vllm"],
        model="m",
        models=(),
        version="",
        evidence=(),
        rtt_ms=0.1,
        dns_ms=1.0,
        warnings=(),
        **unknown,
    )
    addresses = iter((before, after))
    names = HostNameCheck(lambda host_names: dict.fromkeys(host_names, next(addresses)))
    names.handle_event(TargetsProbed(Path(), Settings(), (probe_result,)))
    names.handle_event(LoadStarted(monotonic_ns(), RunningLoad(Counters, lambda: None)))
    ended_run_manifest = names.handle_event(LoadEnded(manifest("x", 1)))

    assert ended_run_manifest is not None
    assert [reason.code for reason in ended_run_manifest.warning_codes.values()] == codes


def test_an_ip_address_resolves_to_itself() -> None:
    assert resolve_names(["127.0.0.1"]) == {"127.0.0.1": ["127.0.0.1"]}
