"""Tests of throttles and retries: the arithmetic, the waiting, and invalid options."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from expected_errors import refused
from hypothesis import given
from hypothesis import strategies as st
from loadgen_sdk import Permit, Retry, Throttle, ThrottleTimeout, WrongUse, priority
from loadgen_sdk.app.background import flush
from loadgen_sdk.app.rate_limit_headers import parse_reset_ns, retry_after_s
from loadgen_sdk.app.rate_limiter import FOREVER, Limits, Rate, RateLimiter, parse_rate
from loadgen_sdk.app.retry import is_curable
from loadgen_sdk.app.throttle import _Waiter
from loadgen_sdk.request import Failure

S = 1_000_000_000


@pytest.mark.parametrize(
    ("text", "limit", "period_s"),
    [
        ("10/s", 10, 1),
        ("600/min", 600, 60),
        (600, 600, 60),
        ("90,000/minute", 90_000, 60),
        ("1/h", 1, 3600),
        ("0.5/s", 1, 2),
    ],
)
def test_rates_are_parsed_with_their_units(text: Any, limit: float, period_s: float) -> None:
    assert parse_rate(text, "requests") == Rate(limit, int(period_s * S))


def test_a_request_above_the_limit_waits_until_the_first_leaves_the_period() -> None:
    limiter = RateLimiter(Limits(requests=Rate(3, S)))
    for now in (0, 100, 200):
        assert limiter.retry_at(now, 1) == 0
        limiter.book(now, 1)
    assert limiter.retry_at(300, 1) == S
    assert limiter.retry_at(S, 1) == 0  # the first has left the window
    limiter.book(S, 1)
    assert limiter.retry_at(S, 1) == S + 100


@pytest.mark.processes
@given(st.lists(st.integers(0, S // 2), min_size=1, max_size=60), st.integers(1, 5))
def test_no_period_exceeds_the_limit_whenever_calls_start(steps: list[int], limit: int) -> None:
    limiter = RateLimiter(Limits(requests=Rate(limit, S)))
    now, granted = 0, []
    for step in steps:
        now += step
        retry_ns = limiter.retry_at(now, 1)
        if retry_ns:
            assert now < retry_ns <= now + S
            now = retry_ns
            assert limiter.retry_at(now, 1) == 0
        limiter.book(now, 1)
        granted.append(now)

    for start in granted:
        assert sum(start <= at < start + S for at in granted) <= limit


def test_estimated_tokens_are_corrected_at_the_end_of_a_call() -> None:
    limiter = RateLimiter(Limits(tokens=Rate(100, S)))
    booked = limiter.book(0, 60)
    assert limiter.retry_at(1, 60) == S  # 60 + 60 would be too many
    limiter.end_call(booked, 20)
    assert limiter.retry_at(1, 60) == 0  # it really took 20
    limiter.book(1, 60)
    assert limiter.retry_at(2, 500) == S + 1  # more than the limit itself: alone, when all is empty
    assert limiter.retry_at(S + 1, 500) == 0


def test_concurrency_limits_simultaneous_calls() -> None:
    limiter = RateLimiter(Limits(concurrency=1))
    booked = limiter.book(0, 1)
    assert limiter.retry_at(5, 1) == FOREVER and limiter.in_flight == 1
    limiter.end_call(booked, None)
    assert limiter.retry_at(5, 1) == 0


@pytest.mark.parametrize(
    ("headers", "refused", "retry_ns"),
    [
        ({"retry-after": "2"}, True, 2 * S),
        ({"retry-after-ms": "1500"}, True, 3 * S // 2),
        ({"retry-after": "2"}, False, 0),  # of an answer that was none refused
        (
            {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "50s"},
            False,
            50 * S,
        ),
        ({"x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": "6m0s"}, False, 0),
        ({"x-ratelimit-remaining-tokens": "9", "x-ratelimit-reset-tokens": "20ms"}, False, S // 50),
        ({"x-ratelimit-remaining-tokens": "10", "x-ratelimit-reset-tokens": "20ms"}, False, 0),
        ({"x-ratelimit-remaining-tokens": "9", "x-ratelimit-reset-tokens": "garbage"}, False, 0),
        # Too long a wait is cut: one answer must not stop every later call of a process.
        ({"retry-after": "86400"}, True, 60 * S),
        ({"retry-after": "1e300"}, True, 60 * S),
        ({"retry-after": "inf"}, True, 0),
        ({"retry-after-ms": "nan"}, True, 0),
        (
            {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"},
            False,
            60 * S,
        ),
        (
            {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "4000000000000"},
            False,
            60 * S,
        ),
        (
            {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1000000000"},
            False,
            0,
        ),  # in 2001
        (
            {
                "x-ratelimit-remaining-requests": "0",
                "x-ratelimit-reset-requests": "2001-09-09T01:46:40Z",
            },
            False,
            0,
        ),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "inf"}, False, 0),
        ({"x-ratelimit-remaining-requests": "nan", "x-ratelimit-reset-requests": "9"}, False, 0),
        ({"x-ratelimit-remaining-tokens": "9", "x-ratelimit-reset-tokens": "86400"}, False, 60 * S),
    ],
)
def test_rate_limit_headers_of_the_server_are_obeyed(
    headers: dict[str, str], refused: bool, retry_ns: int
) -> None:
    limiter = RateLimiter(Limits())
    limiter.apply_headers(0, headers, refused)
    assert limiter.retry_at(0, 10) == retry_ns
    assert limiter.retry_at(max(retry_ns, 0), 10) == 0


def bucket(of: str, limit: int, remaining: int, reset: str) -> dict[str, str]:
    values = {"limit": str(limit), "remaining": str(remaining), "reset": reset}
    return {f"x-ratelimit-{name}-{of}": value for name, value in values.items()}


@pytest.mark.parametrize(
    ("headers", "tokens", "retry_ns"),
    [
        # At the reset the bucket is full: of 140 requests in 59.9 s, one is back after 0.428 s.
        (bucket("requests", 140, 0, "59.9s"), 10, int(59.9 * S / 140) + 1),
        (bucket("requests", 140, 1, "59.9s"), 10, 0),
        (
            bucket("tokens", 1000, 200, "80s"),
            300,
            10 * S,
        ),  # 100 more of the 800 that are back after 80 s
        (bucket("tokens", 1000, 200, "80s"), 200, 0),
        (
            bucket("tokens", 1000, 900, "80s"),
            5000,
            60 * S,
        ),  # more than the limit: when it is full, if that is obeyed
        (bucket("tokens", 1000, 900, "8s"), 5000, 8 * S),
        (bucket("requests", 0, 0, "50s"), 10, 50 * S),  # no limit that could be one
    ],
)
def test_a_call_waits_until_the_reported_bucket_has_enough_tokens(
    headers: dict[str, str], tokens: int, retry_ns: int
) -> None:
    limiter = RateLimiter(Limits())
    limiter.apply_headers(0, headers, is_refused=False)
    assert limiter.retry_at(0, tokens) == retry_ns
    assert limiter.retry_at(retry_ns, tokens) == 0


def test_each_call_after_an_exhausted_bucket_waits_for_its_own_refill() -> None:
    limiter, granted, now = RateLimiter(Limits()), [], 0
    limiter.apply_headers(0, bucket("requests", 100, 0, "10s"), is_refused=False)
    for _ in range(3):
        now = limiter.retry_at(now, 1)
        assert limiter.retry_at(now, 1) == 0
        limiter.book(now, 1)
        granted.append(now)
    assert granted == pytest.approx([S // 10, 2 * S // 10, 3 * S // 10], abs=10)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1s", S),
        ("nan", 0),
        ("inf", 0),
        ("6m0s", 360 * S),
        ("1h2m3s", 3723 * S),
        ("20ms", S // 50),
        ("1.5", 3 * S // 2),
        ("", 0),
    ],
)
def test_durations_of_rate_limit_headers_are_parsed(text: str, ns: int) -> None:
    assert parse_reset_ns(text) == ns


@pytest.mark.processes
def test_calls_of_tasks_and_threads_are_served_in_order() -> None:
    throttle = Throttle(concurrency=1)
    order: list[int] = []

    async def acquire_once(number: int) -> None:
        with await throttle.acquire() as permit:
            order.append(number)
            assert throttle.in_flight() == 1
            await asyncio.sleep(0)
            permit.done()
            permit.done()  # harmless

    async def go() -> None:
        permit = await throttle.acquire()
        tasks = [asyncio.create_task(acquire_once(number)) for number in range(5)]
        await asyncio.sleep(0)
        in_line = threading.Event()

        def thread() -> None:
            in_line.set()
            with throttle.acquire_blocking():
                order.append(99)

        waiting = threading.Thread(target=thread)
        waiting.start()
        in_line.wait()
        tasks[2].cancel()  # gives up its place
        permit.done()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(waiting.join)

    asyncio.run(go())
    assert [number for number in order if number != 99] == [0, 1, 3, 4] and 99 in order
    assert throttle.in_flight() == 0


@pytest.mark.processes
def test_limits_apply_per_key_and_model_by_default() -> None:
    async def granted(throttle: Throttle) -> int:
        kinds = [("a", "m"), ("a", "n"), ("b", "m"), ("a", "m")]
        tasks = [
            asyncio.create_task(throttle.acquire(key=key, model=model)) for key, model in kinds
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        done = sum(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return done

    assert asyncio.run(granted(Throttle(concurrency=1))) == 3
    assert asyncio.run(granted(Throttle(concurrency=1, each=("model",)))) == 2
    assert asyncio.run(granted(Throttle(concurrency=1, each=()))) == 1


@pytest.mark.processes
def test_a_throttler_object_of_the_application_limits_the_calls() -> None:
    from asyncio_throttle import Throttler

    their_throttler = Throttler(rate_limit=2, period=3600)

    async def go() -> None:
        throttle = Throttle(requests=their_throttler)
        for _ in range(2):
            permit = await throttle.acquire()
            assert isinstance(permit, Permit)
            permit.done()
        waiting = asyncio.create_task(throttle.acquire())
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(go())
    with refused(WrongUse, "event_loop"):
        Throttle(requests=their_throttler).acquire_blocking()


def test_a_pause_requested_by_the_server_is_logged_with_its_maximum(
    caplog: pytest.LogCaptureFixture,
) -> None:
    permit = Throttle(max_pause_s=0.01).acquire_blocking(key="sk-secret", model="m")
    permit.heed({"retry-after": "86400"}, refused=True)
    assert "for 86400 s; calls continue after 0.01 s" in caplog.text
    assert "sk-secret" not in caplog.text


@pytest.mark.processes
def test_a_call_that_waits_longer_than_allowed_raises_a_throttle_timeout() -> None:
    throttle = Throttle(concurrency=1, max_wait_s=0.01)
    permit = throttle.acquire_blocking()

    with pytest.raises(ThrottleTimeout, match=r" 0\.01 s: 1 ") as exc_info:
        throttle.acquire_blocking()
    assert isinstance(exc_info.value, TimeoutError) and exc_info.value.hint
    with pytest.raises(ThrottleTimeout, match=r" 0\.001 s"):
        asyncio.run(throttle.acquire(max_wait_s=0.001))
    assert throttle.waiting() == 0

    permit.done()
    throttle.acquire_blocking().done()  # nobody is left in the queue


@pytest.mark.processes
def test_calls_are_spaced_evenly_on_request() -> None:
    limiter, granted, now = (
        RateLimiter(Limits(requests=Rate(600, 60 * S), burst_ns=20_000_000)),
        [],
        0,
    )
    for _ in range(600):
        if retry_ns := limiter.retry_at(now, 1):
            now = retry_ns + 1_000_000  # each wake-up is 1 ms late
        assert limiter.retry_at(now, 1) == 0
        limiter.book(now, 1)
        granted.append(now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(granted)]

    assert min(gaps) >= S // 10 - 20_000_000 and max(gaps) <= S // 10 + 2_000_000
    assert granted[-1] == pytest.approx(
        599 * S // 10, rel=0.001
    )  # and the late wake-ups are made up for


def test_input_and_output_tokens_have_separate_limits() -> None:
    limiter = RateLimiter(Limits(input_tokens=Rate(1000, S), output_tokens=Rate(100, S)))
    first_booking = limiter.book(0, 560, 60)
    assert limiter.retry_at(1, 100, 50) == S  # 60 + 50 output tokens
    assert limiter.retry_at(1, 500, 0) == 0  # input has room
    limiter.end_call(first_booking, 510, 10)
    assert limiter.retry_at(1, 100, 50) == 0  # it really wrote 10


@pytest.mark.processes
def test_a_higher_priority_call_precedes_others_unless_they_have_waited_long() -> None:
    throttle, order = Throttle(concurrency=1), []

    async def acquire_once(name: str, level: int) -> None:
        with priority(level):
            permit = await throttle.acquire()
        order.append(name)
        permit.done()

    async def go() -> None:
        permit = await throttle.acquire()
        tasks = [
            asyncio.create_task(acquire_once(*ask))
            for ask in (("batch", -1), ("a", 0), ("urgent", 2), ("b", 0))
        ]
        while throttle.waiting() < 4:
            await asyncio.sleep(0)
        permit.done()
        await asyncio.gather(*tasks)

    asyncio.run(go())
    assert order == ["urgent", "a", "b", "batch"]
    long_ago, now = _Waiter(int, 0), _Waiter(int, 1)
    assert now < long_ago
    long_ago.sort_key = (
        long_ago.sort_key[0] - 11 * S,
        0,
    )  # it came 11 s earlier: one level is worth 10 s
    assert long_ago < now
    with refused(WrongUse, "wrong_type"), priority(0.5):  # type: ignore[arg-type]
        pass


@pytest.mark.processes
def test_the_asyncio_throttle_pacer_enforces_a_plain_limit() -> None:
    async def go() -> None:
        throttle = Throttle(requests="2/h", pacer="asyncio-throttle", max_wait_s=0.02)
        for _ in range(2):
            (await throttle.acquire(model="a")).done()
        with pytest.raises(ThrottleTimeout):
            await throttle.acquire(model="a")
        (await throttle.acquire(model="b")).done()  # per key and model, as ever
        with refused(WrongUse, "event_loop"):
            throttle.acquire_blocking()

    asyncio.run(go())


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_share_a_limit(tmp_path: Path) -> None:
    """Four processes with one limit of 20 per hour get 20 permits together."""

    def permits(_: int) -> int:
        throttle, got = (
            Throttle(requests="20/h", tokens="1200/h", shared=tmp_path / "limits", max_wait_s=0.05),
            0,
        )
        try:
            while True:
                throttle.acquire_blocking(key="sk-secret", model="m", tokens=500).done(10)
                got += 1
        except ThrottleTimeout:
            return got

    read, write = os.pipe()
    children = []
    for number in range(4):
        if (child := os.fork()) == 0:
            try:
                os.write(write, bytes([permits(number)]))
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as counts:
        got = counts.read()
    assert len(got) == 4 and sum(got) == 20
    assert all(
        "secret" not in file.name and b"secret" not in file.read_bytes()
        for file in tmp_path.iterdir()
    )


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """Yield a Redis server of this machine."""
    redis, program = pytest.importorskip("redis"), shutil.which("redis-server")
    if program is None:
        pytest.skip("there is no redis-server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"redis://127.0.0.1:{port}/0"
    command = [program, "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        retry = redis.retry.Retry(redis.backoff.ConstantBackoff(0.01), 500)
        with redis.Redis.from_url(
            url, retry=retry, retry_on_error=[redis.ConnectionError]
        ) as client:
            client.ping()
        yield f"{url}#test"
        with redis.Redis.from_url(url) as client:  # no key is written, and nothing stays for ever
            keys = client.keys()
            assert keys and all(b"secret" not in key and client.pttl(key) > 0 for key in keys)
    finally:
        server.terminate()
        server.wait()


@pytest.mark.processes
def test_hosts_share_a_limit_through_redis(redis_url: str) -> None:
    """Two clients of one Redis get 6 permits per hour together, with each other's corrections."""

    async def permits(throttle: Throttle) -> int:
        got = 0
        with contextlib.suppress(ThrottleTimeout):
            while True:
                (await throttle.acquire(key="sk-secret", model="m", tokens=500, max_wait_s=1)).done(
                    10
                )
                assert flush()
                got += 1
        return got

    def throttle() -> Throttle:
        return Throttle(requests="6/h", tokens="1200/h", shared=redis_url)

    async def both() -> list[int]:
        first_throttle, other = throttle(), throttle()
        first_permit = await first_throttle.acquire(key="sk-secret", model="m", tokens=500)
        before = time.monotonic()
        first_permit.heed({"retry-after": "0.4"}, refused=True)
        first_permit.done(10)
        assert flush()
        other.acquire_blocking(key="sk-secret", model="m").done(10)
        assert time.monotonic() - before > 0.3  # it heeds what the other was told
        return [2, *await asyncio.gather(permits(first_throttle), permits(other))]

    assert sum(asyncio.run(both())) == 6


@pytest.mark.processes
def test_a_wait_for_redis_that_is_cancelled_leaves_no_permit(redis_url: str) -> None:
    async def go() -> None:
        throttle = Throttle(concurrency=1, requests="100/h", shared=redis_url, each=())
        for _ in range(20):
            call = asyncio.create_task(throttle.acquire())
            await asyncio.sleep(0)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await call).done()
        (await throttle.acquire(max_wait_s=5)).done()

    asyncio.run(go())


@pytest.mark.processes
def test_a_process_enforces_its_limits_alone_if_redis_is_unreachable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("redis")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    throttle = Throttle(
        requests="2/h", shared=f"redis://user:pw-secret@127.0.0.1:{port}/0", max_wait_s=0.1
    )
    for _ in range(2):
        throttle.acquire_blocking().done()

    with pytest.raises(ThrottleTimeout):
        throttle.acquire_blocking()
    assert caplog.text.count("limits are not shared") == 1 and "secret" not in caplog.text


@pytest.mark.processes
def test_a_damaged_file_of_shared_limits_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    throttle = Throttle(requests="2/h", shared=tmp_path / "limits", each=(), max_wait_s=0)
    throttle.acquire_blocking().done()
    (state,) = [file for file in tmp_path.iterdir() if file.suffix != ".lock"]
    state.write_bytes(b"\xff\xff")
    throttle.acquire_blocking().done()
    assert "limits are not shared" in caplog.text
    with refused(WrongUse, "unwritable_file"):
        Throttle(requests=1, shared=tmp_path / "none" / "limits")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"max_wait_s": -1}, "out_of_range"),
        ({"burst_s": float("nan")}, "out_of_range"),
        ({"pacer": "redis"}, "unknown_name"),
        ({"pacer": "asyncio-throttle", "concurrency": 1}, "missing_option"),
        ({"pacer": "asyncio-throttle", "requests": 1, "burst_s": 0}, "conflict"),
        ({"requests": 0}, "out_of_range"),
        ({"requests": "-1/s"}, "out_of_range"),
        ({"requests": "inf"}, "out_of_range"),
        ({"requests": "fast"}, "invalid_value"),
        ({"requests": "3/week"}, "invalid_value"),
        ({"tokens": "0/min"}, "out_of_range"),
        ({"concurrency": 0}, "out_of_range"),
        ({"concurrency": 1.5}, "out_of_range"),
        ({"each": ("user",)}, "unknown_name"),
    ],
)
def test_invalid_throttle_options_are_refused(options: dict[str, Any], code: str) -> None:
    with refused(WrongUse, code) as exc_info:
        Throttle(**options)
    assert exc_info.value.hint


BUSY = Failure("http_429", "slow down", 429)


@pytest.mark.parametrize(
    ("failure", "is_retried"),
    [
        (BUSY, True),
        (Failure("http_429", "You exceeded your quota: insufficient_quota", 429), False),
        (Failure("http_5xx", "", 503), True),
        (Failure("http_5xx", "", 501), False),
        (Failure("http_4xx", "", 400), False),
        (Failure("http_4xx", "", 408), True),
        (Failure("connect", ""), True),
        (Failure("reset", ""), True),
        (Failure("tls", ""), False),
        (Failure("timeout_total", ""), True),
        (Failure("timeout_stall", ""), True),
        (Failure("interrupted", ""), False),
        (Failure("error_event", ""), False),
    ],
)
def test_only_transient_failures_are_retried(failure: Failure, is_retried: bool) -> None:
    assert is_curable(failure) is is_retried


def test_nothing_is_retried_after_output_or_beyond_the_attempts() -> None:
    retry = Retry(3, seed=1)
    assert retry.wait_s(1, BUSY, delivered=True) is None
    assert retry.wait_s(1, BUSY, delivered=False) is not None
    assert retry.wait_s(3, BUSY, delivered=False) is None


def test_server_headers_and_the_application_override_the_retry_policy() -> None:
    bad = Failure("http_4xx", "", 400)
    retry = Retry(3)

    assert retry.wait_s(1, BUSY, delivered=False, server_says_retry=False) is None
    assert retry.wait_s(1, bad, delivered=False, server_says_retry=True) is not None

    custom_retry = Retry(
        3, retry_if=lambda failure: {400: True, 429: False}.get(failure.http_status or 0)
    )

    assert custom_retry.wait_s(1, bad, delivered=False, server_says_retry=False) is not None
    assert custom_retry.wait_s(1, BUSY, delivered=False, server_says_retry=True) is None
    assert (
        custom_retry.wait_s(1, Failure("reset", ""), delivered=False) is not None
    )  # None: the rule of the house
    assert (
        custom_retry.wait_s(3, bad, delivered=False) is None
        and custom_retry.wait_s(1, bad, delivered=True) is None
    )


def test_a_retry_predicate_that_raises_is_ignored_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(_failure: Failure) -> bool:
        raise RuntimeError("broken")

    retry = Retry(3, retry_if=broken)
    assert retry.wait_s(1, BUSY, delivered=False) is not None
    assert (
        retry.wait_s(1, Failure("tls", ""), delivered=False) is None and "retry_if" in caplog.text
    )


def test_as_many_calls_succeed_as_with_the_retries_of_the_openai_package() -> None:
    """Of 150 calls, three of four attempts fail. The openai package would retry each twice."""
    retry, draw = Retry(), random.Random(1)
    ok, ok_with_theirs = 0, 0
    for _ in range(150):
        retry.call_started()
        failed = [draw.random() < 0.757 for _ in range(3)]
        attempts = 1
        while failed[attempts - 1] and retry.wait_s(attempts, BUSY, delivered=False) is not None:
            attempts += 1
        ok += not failed[attempts - 1]
        ok_with_theirs += not all(failed)

    assert ok == ok_with_theirs > 56  # so many got through with a reserve of ten


@given(attempts=st.integers(1, 8), requested_wait_s=st.none() | st.floats(0, 100))
def test_retry_waits_are_bounded_and_at_least_that_of_the_server(
    attempts: int, requested_wait_s: float | None
) -> None:
    retry = Retry(10, first_wait_s=0.5, max_wait_s=8.0)
    wait = retry.wait_s(attempts, BUSY, server_wait_s=requested_wait_s, delivered=False)
    if requested_wait_s is not None and requested_wait_s > 60:
        assert wait is None
    else:
        assert wait is not None and (requested_wait_s or 0) <= wait <= max(
            requested_wait_s or 0, min(8.0, 0.5 * 2 ** (attempts - 1))
        )


def test_retry_waits_depend_on_the_seed() -> None:
    def waits(seed: int) -> list[float | None]:
        retry = Retry(9, seed=seed)
        return [retry.wait_s(attempt, BUSY, delivered=False) for attempt in range(1, 9)]

    assert waits(1) == waits(1) != waits(2)


def test_the_retry_budget_bounds_the_cost_of_an_outage() -> None:
    retry = Retry(10, budget=0.1, reserve=5)
    retried = 0
    for _ in range(1000):
        retry.call_started()
        retried += retry.wait_s(1, BUSY, delivered=False) is not None
    assert 100 <= retried <= 106


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after-ms": "250", "retry-after": "3"}, 0.25),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, 0.0),
    ],
)
def test_retry_after_headers_are_parsed(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers) == seconds


@pytest.mark.parametrize(
    "options",
    [
        {"attempts": 0},
        {"attempts": 1.5},
        {"first_wait_s": 0},
        {"first_wait_s": 9, "max_wait_s": 8},
        {"budget": -1},
    ],
)
def test_invalid_retry_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(WrongUse):
        Retry(**options)
