"""Public names are true, sorted, documented and light."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import loadgen_sdk
import pytest
import repository_paths


def test_every_public_name_exists_and_they_are_sorted() -> None:
    assert loadgen_sdk.__all__ == sorted(loadgen_sdk.__all__)
    for name in loadgen_sdk.__all__:
        public_object = getattr(loadgen_sdk, name)
        assert public_object.__name__ == name and public_object.__doc__, name
        assert name in dir(loadgen_sdk)
    typed = re.findall(r"import \w+ as (\w+)", Path(loadgen_sdk.__file__).read_text())
    assert sorted(typed) == loadgen_sdk.__all__


def test_every_public_name_is_in_the_docs() -> None:
    pages = (repository_paths.ROOT / "docs/reference").glob("sdk*.md")
    text = "".join(page.read_text("utf-8") for page in pages)
    missing = [name for name in loadgen_sdk.__all__ if f"`{name}" not in text]
    assert not missing


@pytest.mark.processes
@pytest.mark.parametrize("name", ["Client", "instrument", "Throttle", "record_shape"])
def test_importing_a_public_name_imports_no_heavy_module(name: str) -> None:
    script = f"import sys; from loadgen_sdk import {name}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"openai", "httpx", "numpy", "pydantic", "loadgen", "opentelemetry"} & set(loaded)
