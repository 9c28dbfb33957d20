"""What the client itself adds to the times of an instrumented call is marked."""

from __future__ import annotations

import subprocess
import sys

import openai
import pytest
import repository_paths
from loadgen_sdk import Measurement, instrument
from loadgen_sdk.app.processor_wait import processor_wait_ns
from scripted_server import CHAT, CHAT_EVENTS, answer, chunk, events, serving

MESSAGES = [{"role": "user", "content": "Hi"}]
FIRST_RESPONSE = """
import openai
from scripted_server import RESPONSE_EVENTS, events, serving
from loadgen_sdk import instrument
told = []
with serving(events(*RESPONSE_EVENTS)) as server:
    client = instrument(openai.OpenAI(base_url=server.url, api_key="k"), told.append)
    list(client.responses.create(model="m", input="Hi", stream=True))
print(told[0].wait_ms > told[0].ttft_from_sent_ms)
"""


def measurement(**fields: object) -> Measurement:
    times = {"started": 0, "sent": 0, "first_token": 100_000_000, "end": 900_000_000}
    return Measurement("chat", True, "ok", started_unix_ns=0, **times | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "is_delayed"),
    [
        ({}, False),
        ({"client_delay_ms": 4.9}, False),
        ({"client_delay_ms": 75.0}, True),
        ({"client_delay_ms": 75.0, "kernel_stamps": True}, False),
    ],
)
def test_a_call_is_delayed_if_it_waits_for_a_processor_above_5_percent_of_ttft(
    fields: dict[str, object], is_delayed: bool
) -> None:
    assert measurement(**fields).is_delayed is is_delayed
    assert measurement(**fields).to_dict()["is_delayed"] is is_delayed


@pytest.mark.skipif(sys.platform != "linux", reason="schedstat is Linux's")
def test_an_instrumented_call_reports_how_long_it_waited_for_a_processor() -> None:
    measurements: list[Measurement] = []
    with serving(answer(CHAT)) as server, openai.OpenAI(base_url=server.url, api_key="k") as client:
        instrument(client, measurements.append).chat.completions.create(
            model="m", messages=MESSAGES
        )
    delay_ms = measurements[0].client_delay_ms
    wait_ns = processor_wait_ns()
    assert delay_ms is not None and wait_ns is not None and 0 <= delay_ms <= wait_ns / 1e6


@pytest.mark.processes
def test_instrument_builds_the_types_of_streams_before_the_first_call() -> None:
    command = [sys.executable, "-c", FIRST_RESPONSE]
    process = subprocess.run(
        command, cwd=repository_paths.TESTS, capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "True"


def test_tpot_of_two_choices_is_computed_per_choice() -> None:
    """Eight tokens of two choices over 90 ms are three steps of 30 ms for each choice."""
    times = {"first_token": 100_000_000, "last_token": 190_000_000, "output_tokens": 8}
    measured = measurement(**times)
    second_measurement = measurement(**times, parameters={"n": 2}, instants=tuple(range(8)))
    assert second_measurement.choices == 2 and second_measurement.tpot_ms == pytest.approx(30.0)
    assert measured.choices == 1 and measured.tpot_ms == pytest.approx(90 / 7, rel=1e-6)
    assert second_measurement.itl_ms is None


def test_output_in_an_unknown_field_leaves_ttft_undecided() -> None:
    thoughts = [chunk(thinking="hm") for _ in range(3)]
    measurements: list[Measurement] = []
    for pieces in (thoughts, [chunk(role="assistant", channel="final")]):
        with (
            serving(events(*pieces, *CHAT_EVENTS)) as server,
            openai.OpenAI(base_url=server.url, api_key="k") as plain_client,
        ):
            client = instrument(plain_client, measurements.append)
            list(client.chat.completions.create(model="m", messages=MESSAGES, stream=True))
    hidden, known_measurement = measurements

    assert (hidden.status, hidden.ttft_ms, hidden.tpot_ms) == ("ok", None, None)
    assert hidden.instants and known_measurement.ttft_ms is not None


def test_the_number_of_choices_comes_from_the_request() -> None:
    measurements: list[Measurement] = []
    with (
        serving(events(chunk("a"), *CHAT_EVENTS)) as server,
        openai.OpenAI(base_url=server.url, api_key="k") as plain_client,
    ):
        client = instrument(plain_client, measurements.append)
        list(client.chat.completions.create(model="m", messages=MESSAGES, n=2, stream=True))
    assert measurements[0].choices == 2
