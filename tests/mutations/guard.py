"""Applies a change to a copy of the project and runs the tests that have to notice it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadgen_sdk.compiled import PURE

from mutations.table import ROOT, Mode, Mutation

COPIED_FOLDERS = ("loadgen", "sdk", "tests", "workloads", "contracts", "docs", "benchmarks")
COPIED_FILES = ("pyproject.toml",)
COMPILED_MODULES = {
    "loadgen_sdk._compiled": "sdk/loadgen_sdk",
    "loadgen.sim.engine._replica": "loadgen/sim/engine",
}
"""The folder of each compiled module. The module itself may be installed elsewhere."""
CPU_LIMIT_S = 60  # a change may well make a loop endless
TIMEOUT_S = 300  # or make a test wait forever; generous, because the machine may be busy
FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
NO_END = f"no end within {CPU_LIMIT_S} CPU-seconds or {TIMEOUT_S} s"
TESTS_PASSED = 0
TESTS_FAILED = (1, 2)  # 2: the changed module cannot be imported


@dataclass(frozen=True)
class Outcome:
    """Which test noticed one change in one mode."""

    mutation: Mutation
    mode: Mode
    failed_test: str
    """The test that noticed the change; empty if it survived."""


class ProjectCopy:
    """A copy of the project, made of hard links, in which one file at a time is changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in COPIED_FOLDERS:
            shutil.copytree(ROOT / folder, root / folder, copy_function=_link_or_copy)
        for file in COPIED_FILES:
            _link_or_copy(str(ROOT / file), str(root / file))
        for module, folder in COMPILED_MODULES.items():
            self._add_compiled_module(module, root / folder)
        self._changed_files = 0

    def run(self, mutation: Mutation, mode: Mode) -> Outcome:
        """Run the tests of a mutation against the changed copy."""
        with self._changed(mutation):
            code, output = self._run_tests(mutation.tests, mode)
        if code == TESTS_PASSED:
            return Outcome(mutation, mode, "")
        if code in (None, -signal.SIGXCPU):
            return Outcome(mutation, mode, NO_END)
        failed = FAILED_TEST.search(output)
        if code not in TESTS_FAILED or failed is None:
            raise RuntimeError(f"pytest ended with {code} for {mutation.name}:\n{output}")
        return Outcome(mutation, mode, failed[1])

    def check_unchanged(self, mutations: Iterable[Mutation], mode: Mode) -> None:
        """Raise RuntimeError if a test of these mutations fails without a change."""
        tests = sorted({test for mutation in mutations for test in mutation.tests})
        code, output = self._run_tests(tests, mode)
        if code != TESTS_PASSED:
            raise RuntimeError(f"tests fail in mode {mode} without a change:\n{output}")

    @staticmethod
    def _add_compiled_module(name: str, folder: Path) -> None:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            return
        destination = folder / Path(spec.origin).name
        if not destination.exists():
            _link_or_copy(spec.origin, str(destination))

    @contextmanager
    def _changed(self, mutation: Mutation) -> Iterator[None]:
        path = self.root / mutation.file
        changed_text = mutation.apply(mutation.source())
        path.unlink()  # it is a hard link to the file of the checkout
        path.write_text(changed_text, "utf-8")
        # Python recognises a stale .pyc file by size and time, both of which may be equal.
        self._changed_files += 1
        os.utime(path, (self._changed_files, self._changed_files))
        try:
            yield
        finally:
            path.unlink()
            _link_or_copy(str(ROOT / mutation.file), str(path))

    def _run_tests(self, tests: Sequence[str], mode: Mode) -> tuple[int | None, str]:
        """Return the exit code of pytest, None if it did not end in time, and what it printed."""
        command = ["prlimit", f"--cpu={CPU_LIMIT_S}", sys.executable, "-m", "pytest"]
        command += ["-n", "0", "-x", "-q", "--tb=no", "-rfE"]
        command += ["-p", "no:cacheprovider", *tests]
        if mode.transport:
            command += ["-k", f"[{mode.transport}"]
        environment = {name: value for name, value in os.environ.items() if name != PURE}
        environment["PYTHONPATH"] = os.pathsep.join((str(self.root), str(self.root / "sdk")))
        if mode.is_pure:
            environment[PURE] = "1"
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, ""
        return process.returncode, output


@contextmanager
def project_copy() -> Iterator[ProjectCopy]:
    """Make a temporary copy of the project."""
    with tempfile.TemporaryDirectory(prefix="loadgen-mutations-") as directory:
        yield ProjectCopy(Path(directory) / "project")


def _link_or_copy(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except OSError:  # another file system
        shutil.copy2(source, destination)
