"""The page on Kubernetes itself, where its programs are: real_cluster.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from real_cluster import command, missing

pytestmark = [pytest.mark.processes, pytest.mark.optional]


def test_the_page_is_typed_at_a_real_api_server() -> None:
    """With controllers, scheduler and rights; nodes and network are stood in for."""
    if absent := missing():
        pytest.skip(f"not there: {', '.join(absent)}")
    words = command(sys.executable, str(Path(__file__).parent / "real_walk.py"))
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("\n") >= 5
