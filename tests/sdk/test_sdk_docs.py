"""Every Python example of the pages about the SDK runs, against the embedded endpoint."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import repository_paths
from servers import start

from loadgen import Result
from loadgen.pytest_plugin import NotValid
from loadgen.sim.server.options import Options

PAGES = [
    repository_paths.ROOT / "docs" / page
    for page in (
        "reference/sdk.md",
        "reference/sdk-limits.md",
        "reference/sdk-telemetry.md",
        "reference/python-api.md",
        "guides/sdk-in-an-application.md",
    )
]
EXAMPLES = [
    example
    for page in PAGES
    for example in re.findall(r"(?m)^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL)
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with start(Options(ttft="40ms", itl="1ms")) as endpoint:
        yield endpoint.url.removesuffix("/v1")


@pytest.mark.processes
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: text.split("\n")[2][:40])
def test_the_documented_examples_run(
    example: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loadgen_run: Any
) -> None:
    """On a busy machine a figure that an example asserts on may be withheld."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    results: list[Result] = []

    def recorded_run(*args: Any, **options: Any) -> Result:
        results.append(loadgen_run(*args, **options))
        return results[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotValid)
        with unclosed_clients_collected(names):
            exec(compile(example.replace("http://localhost:8000", url), "example", "exec"), names)
            for name, example_test in list(names.items()):
                if name.startswith("test_"):
                    try:
                        example_test(recorded_run)
                    except (AssertionError, TypeError):
                        if all(
                            result.valid and result.ttft_ms.p50 is not None for result in results
                        ):
                            raise


@contextlib.contextmanager
def unclosed_clients_collected(names: dict[str, Any]) -> Iterator[None]:
    """Collect the clients that an example leaves open before the next test begins.

    Short examples leave their client to the end of the process. Its socket would otherwise be
    collected during any later test, which would fail with a ResourceWarning.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            yield
        finally:
            names.clear()
            gc.collect()


def checked(tmp_path: Path, *command: str) -> None:
    """Check the examples of the page with a type checker, as in an application's code."""
    for number, example in enumerate(EXAMPLES):
        (tmp_path / f"example_{number}.py").write_text(example, "utf-8")
    files = sorted(file.name for file in tmp_path.glob("*.py"))
    process = subprocess.run(
        [*command, *files], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.early
@pytest.mark.commands
@pytest.mark.processes
def test_the_documented_examples_pass_mypy(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(repository_paths.ROOT / "pyproject.toml"),
    ]
    if os.access(
        repository_paths.ROOT, os.W_OK
    ):  # what mypy knows from the tree itself, a minute's work: only with its options
        command += ["--cache-dir", str(repository_paths.ROOT / ".mypy_cache")]
    checked(tmp_path, *command)


@pytest.mark.commands
@pytest.mark.processes
def test_the_documented_examples_pass_pyright(tmp_path: Path) -> None:
    """Run basedpyright, which brings its own Node.js; `.ci/run` installs it elsewhere."""
    program = shutil.which(os.environ.get("PYRIGHT", "basedpyright"))
    if program is None:
        pytest.skip("there is no basedpyright")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    checked(tmp_path, program, "--pythonpath", sys.executable, "--level", "error")


def test_the_documentation_has_18_examples() -> None:
    assert len(EXAMPLES) == 18
