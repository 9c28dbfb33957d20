"""Attack commands while they work, through the shell, the network, the host and files.

CI runs the cheap rows; `pytest -m attacks` runs all of them, `pytest -m attacks -k NAME` one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import make_attacks
import pytest
from rows import ROWS
from scene import Row, Scene, check

from loadgen.sim.server.embedded import EmbeddedServer, start
from loadgen.sim.server.options import Options

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EmbeddedServer]:
    with start(Options(ttft="5ms", itl="2ms")) as server:
        yield server


@pytest.fixture(scope="module")
def slow() -> Iterator[EmbeddedServer]:
    with start(Options(ttft="400ms", itl="4ms")) as server:
        yield server


@pytest.mark.processes
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS if row.always])
def test_sampled_attacks_have_the_expected_outcome(
    row: Row, tmp_path: Path, endpoint: EmbeddedServer, slow: EmbeddedServer
) -> None:
    check(row, Scene(tmp_path, endpoint.url, slow.url))


@pytest.mark.optional
@pytest.mark.processes
@pytest.mark.attacks
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_all_attacks_have_the_expected_outcome(
    row: Row, tmp_path: Path, endpoint: EmbeddedServer, slow: EmbeddedServer
) -> None:
    check(row, Scene(tmp_path, endpoint.url, slow.url))


def test_every_attack_has_a_unique_name_and_is_documented() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert make_attacks.PAGE.read_text("utf-8") == make_attacks.page(), (
        "python tests/make_attacks.py"
    )
