"""What `Call.report` puts into a Measurement, which it makes by place."""

from __future__ import annotations

from typing import Any

import pytest
from loadgen_sdk import Measurement, TokenPrice
from loadgen_sdk.app.call import Call, CallObservation, CallSettings
from loadgen_sdk.app.policy import Policy
from loadgen_sdk.request import Failure, Usage


def test_every_field_of_a_measurement_has_its_value() -> None:
    policy = Policy(prices=TokenPrice(1, 2), labels={"a": "b"})
    settings = CallSettings(policy, "h:1", "k")
    call = Call(settings, "chat", "asked", {"temperature": 0.5}, is_streamed=True, labels=None)
    call.instants, call.attempt_started, call.started, call.started_unix_ns = [12, 13], 11, 10, 9
    call.record_headers({"x-request-id": "r-1", "server-timing": "s;dur=1"})
    seen: dict[str, Any] = {
        "sent": 11,
        "first_token": 12,
        "first_answer": 14,
        "last_token": 13,
        "end": 15,
        "first_event_tokens": 2,
    }
    fields: dict[str, Any] = {
        "finish_reason": "stop",
        "hidden_retries": 3,
        "response_model": "answered",
        "response_id": "id-1",
    }
    usage = Usage(input=30, output=20, cached=5, reasoning=4, cache_written=6)
    observed = CallObservation(
        **seen, **fields, server_timing={"own": 1}, kernel_stamps=True, usage=usage
    )
    measurement = call.report("failed", Failure("http", "bad", 400), observed, done=16)
    expected = {
        **{
            "api": "chat",
            "streamed": True,
            "status": "failed",
            "started": 10,
            "started_unix_ns": 9,
            **seen,
            **fields,
        },
        **{
            "done": 16,
            "instants": (12, 13),
            "input_tokens": 30,
            "output_tokens": 20,
            "cached_tokens": 5,
        },
        **{
            "cache_written_tokens": 6,
            "reasoning_tokens": 4,
            "token_source": "server",
            "cost": pytest.approx(7e-5),
        },
        **{
            "attempts": call.attempts,
            "failure": Failure("http", "HTTP 400", 400),
            "model": "asked",
        },
        **{
            "request_id": "r-1",
            "server": "h:1",
            "server_timing": {"server-timing": "s;dur=1", "own": 1},
        },
        **{
            "kernel_stamps": True,
            "content": None,
            "labels": {"a": "b"},
            "parameters": {"temperature": 0.5},
            "client_delay_ms": measurement.client_delay_ms,
        },
    }

    assert {name: getattr(measurement, name) for name in Measurement.__struct_fields__} == expected
    assert (
        call.attempts == measurement.attempts
        and measurement.attempts[0].failure == measurement.failure
    )
