"""Tests of pictures and sounds: they are measured, throttled and budgeted like other calls."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import openai
import pytest
from loadgen_sdk import (
    Budget,
    Measurement,
    OpenTelemetry,
    TokenPrice,
    instrument,
    record_shape,
)
from scripted_server import answer, events, running

USAGE = {
    "input_tokens": 12,
    "output_tokens": 4160,
    "total_tokens": 4172,
    "input_tokens_details": {"text_tokens": 12, "estimate_image_tokens": 0},
}
PICTURE = {"created": 1, "data": [{"b64_json": "aGVsbG8="}], "usage": USAGE}
COUNTED = {"type": "tokens", "input_tokens": 14, "output_tokens": 5, "total_tokens": 19}
HEARD = {"text": "Hello there.", "usage": COUNTED}
SOUND = b"RIFF....WAVE"
PARTS = (
    {"type": "image_generation.partial_image", "b64_json": "aGU=", "partial_image_index": 0},
    {"type": "image_generation.completed", "b64_json": "aGVsbG8=", "usage": USAGE},
)
SPOKEN = (
    {"type": "transcript.text.delta", "delta": "Hello"},
    {"type": "transcript.text.delta", "delta": " there."},
    {"type": "transcript.text.done", "text": "Hello there.", "usage": COUNTED},
)
ANSWERS = {
    ("images", False): answer(PICTURE),
    ("images", True): events(*PARTS, done=False),
    ("transcriptions", False): answer(HEARD),
    ("transcriptions", True): events(*SPOKEN),
    ("speech", False): b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nContent-Length: 12\r\n\r\n"
    + SOUND,
}


def use(client: Any, api: str, stream: bool) -> Any:
    more = {"stream": True} if stream else {}
    if api == "images":
        return client.images.generate(model="pictures", prompt="A cat", **more)
    if api == "speech":
        return client.audio.speech.create(model="voices", voice="alloy", input="Hello there.")
    return client.audio.transcriptions.create(model="ears", file=("a.wav", SOUND), **more)


def handler(response: bytes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):  # canned.serving reads JSON; transcriptions send a form
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.wfile.write(response.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Quiet."""

    return Handler


@pytest.mark.parametrize(("api", "stream"), ANSWERS)
def test_media_calls_are_measured_and_return_the_same_response(
    api: str, stream: bool, tmp_path: Path
) -> None:
    measurements, budget = list[Measurement](), Budget("1 USD/day")
    with (
        running(handler(ANSWERS[api, stream])) as url,
        record_shape(tmp_path / "shapes.jsonl") as shape,
        openai.OpenAI(base_url=url, api_key="k", max_retries=0) as plain_client,
    ):
        plain = use(plain_client, api, stream)
        observers = (measurements.append, OpenTelemetry())
        client = instrument(
            plain_client, observers, prices=TokenPrice(5.0, 40.0), budget=budget, record=shape
        )
        ours = use(client, api, stream)
        if stream:
            assert [result.model_dump() for result in ours] == [
                result.model_dump() for result in plain
            ]
        elif api == "speech":
            assert ours.content == plain.content == SOUND
        else:
            assert ours == plain
    (measured,) = measurements

    assert (measured.api, measured.status, measured.streamed) == (api, "ok", stream)
    if api == "images":
        assert (measured.input_tokens, measured.output_tokens) == (12, 4160)
        assert measured.cost == budget.spent == pytest.approx((12 * 5 + 4160 * 40) / 1e6)
    if api == "transcriptions":
        assert (measured.input_tokens, measured.output_tokens) == (14, 5)
    assert len(measured.instants) == (len(PARTS if api == "images" else SPOKEN) if stream else 0)
    assert not (tmp_path / "shapes.jsonl").read_text()  # a load of texts cannot repeat it
