"""What several tests of the SDK use."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator

import pytest
from loadgen_sdk.prices import warn_once


@pytest.fixture(scope="session")
def redis_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    redis, program = pytest.importorskip("redis"), shutil.which("redis-server")
    if program is None:
        pytest.skip("there is no redis-server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        program,
        "--port",
        str(port),
        "--save",
        "",
        "--dir",
        str(tmp_path_factory.mktemp("redis")),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        retry = redis.retry.Retry(redis.backoff.ConstantBackoff(0.01), 500)
        with redis.Redis.from_url(
            f"redis://127.0.0.1:{port}", retry=retry, retry_on_error=[redis.ConnectionError]
        ) as client:
            client.ping()
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(autouse=True)
def nothing_was_said_before() -> None:
    """Reset the warnings that a process gives only once, so that each test can get them."""
    warn_once.cache_clear()
