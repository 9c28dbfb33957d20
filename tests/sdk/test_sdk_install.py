"""Tests of the installed packages: the SDK alone, with its compiled part, and loadgen."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import loadgen_sdk
import pytest
import repository_paths

ROOT = repository_paths.ROOT
SDK_PROJECT = tomllib.loads((repository_paths.ROOT / "sdk" / "pyproject.toml").read_text())[
    "project"
]
NEEDS = [
    need for need in SDK_PROJECT["dependencies"] if "python_version" not in need
]  # of this Python
ROOT_PROJECT = tomllib.loads((repository_paths.ROOT / "pyproject.toml").read_text())["project"]

USE_OF_EVERYTHING = """
import asyncio, importlib.util, sys
import loadgen_sdk
HAS_WIRE = importlib.util.find_spec("loadgen_sdk.transport") is not None
for name in loadgen_sdk.__all__:
    try:
        getattr(loadgen_sdk, name)
    except ImportError as error:
        assert not HAS_WIRE and name in {"Client", "BlockingClient", "Event", "Target", "Tls"}, name
        assert "pip install 'loadgen-sdk[client]'" in str(error)

async def main():
    for pacer in (None, "asyncio-throttle"):
        throttle = loadgen_sdk.Throttle(requests="10/s", pacer=pacer)
        (await throttle.acquire(model="m")).done()
    HAS_WIRE and loadgen_sdk.Client("http://127.0.0.1:9", model="m", server="vllm").close()
    for make, missing in (
        (loadgen_sdk.OpenTelemetry, "opentelemetry-api"),
        (loadgen_sdk.Prometheus, "prometheus-client"),
        (lambda: loadgen_sdk.instrument(object()), "is not a client"),
        (lambda: loadgen_sdk.Throttle(requests=1, shared="redis://x"), "redis"),
    ):
        try:
            make()
        except loadgen_sdk.WrongUse as error:
            assert missing in str(error), error
        else:
            raise AssertionError(missing)

asyncio.run(main())
assert not {"numpy", "pyarrow", "typer", "tiktoken", "openai", "loadgen"} & set(sys.modules)
print(loadgen_sdk.__version__)
"""


def test_both_distributions_have_the_same_version() -> None:
    assert loadgen_sdk.__version__ == ROOT_PROJECT["version"]
    assert {*NEEDS} <= {*ROOT_PROJECT["dependencies"]}
    assert SDK_PROJECT["requires-python"] == ROOT_PROJECT["requires-python"] == ">=3.11"
    wire = tomllib.loads((ROOT / "sdk" / "wire" / "pyproject.toml").read_text())["project"]

    assert {*wire["dependencies"]} <= {"loadgen-sdk", *NEEDS} and SDK_PROJECT[
        "optional-dependencies"
    ]["client"] == [wire["name"]]

    extras = {need for needs in SDK_PROJECT["optional-dependencies"].values() for need in needs}
    optional = {need for needs in ROOT_PROJECT["optional-dependencies"].values() for need in needs}
    assert extras - {wire["name"]} <= {*ROOT_PROJECT["dependencies"], *optional}


def only_what_it_needs(folder: Path) -> None:
    """Links to the packages that the SDK's own pyproject names, and to nothing else."""
    for need in NEEDS:
        name = need.partition(">")[0].replace("-", "_")
        module_spec = importlib.util.find_spec(name)
        assert module_spec is not None and module_spec.origin is not None
        (folder / name).symlink_to(Path(module_spec.origin).parent)


def use(*folders: Path) -> str:
    """Return what `USE_OF_EVERYTHING` prints in an interpreter without site-packages."""
    script = (
        f"import sys; sys.path[:0] = {[str(folder) for folder in folders]!r}\n{USE_OF_EVERYTHING}"
    )
    process = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@pytest.mark.processes
def test_the_sdk_works_with_only_its_declared_dependencies(tmp_path: Path) -> None:
    only_what_it_needs(tmp_path)
    assert use(tmp_path, ROOT / "sdk") == loadgen_sdk.__version__


def quick_compiler(folder: Path) -> Path:
    """Return the compiler of this machine without optimisation, which saves most of its time."""
    compiler = os.environ.get("CC") or (sysconfig.get_config_var("CC") or "cc").split()[0]
    program = folder / "quick-cc"
    program.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0 -U_FORTIFY_SOURCE\n')
    program.chmod(0o755)
    return program


@pytest.mark.processes
def test_the_wheels_contain_the_same_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = pytest.importorskip("hatchling.build", reason="builds wheels: pip install hatchling")
    contents = []
    monkeypatch.setenv("CC", shlex.quote(str(quick_compiler(tmp_path))))
    for name, folder in (("sdk", ROOT / "sdk"), ("wire", ROOT / "sdk" / "wire"), ("root", ROOT)):
        monkeypatch.chdir(folder)
        (tmp_path / name).mkdir()
        wheel = zipfile.ZipFile(tmp_path / name / build.build_wheel(str(tmp_path / name)))
        wheel.extractall(tmp_path / name / "installed")
        contents.append(
            {file: wheel.read(file) for file in wheel.namelist() if file.startswith("loadgen_sdk/")}
        )
    sdk, wire, root = contents

    assert not {*sdk} & {*wire} and {**sdk, **wire} == root and "loadgen_sdk/py.typed" in sdk
    assert {file.split("/")[1] for file in wire} <= {
        "transport",
        "probe",
        "_compiled.c",
        "_c",
        "_compiled.abi3.so",
    }

    only_what_it_needs(tmp_path)
    alone, root_dir = tmp_path / "sdk" / "installed", tmp_path / "root" / "installed"
    shutil.copytree(tmp_path / "wire" / "installed", tmp_path / "both")
    shutil.copytree(alone, tmp_path / "both", dirs_exist_ok=True)

    for folders in ((alone,), (tmp_path / "both",), (root_dir,), (alone, root_dir)[::-1]):
        assert use(tmp_path, *folders) == loadgen_sdk.__version__


@pytest.mark.processes
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_the_sdk_runs_on_every_installed_python(version: str) -> None:
    """Where the interpreter has what the SDK needs; the others are named."""
    program = shutil.which(f"python{version}")
    if (
        program is None
        or subprocess.run(
            [program, "-c", "import msgspec"], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip(f"there is no python{version} with msgspec")
    sdk = str(repository_paths.ROOT / "sdk")
    code = f"import sys; sys.path.insert(0, {sdk!r})\n{IMPORT_EVERYTHING}"
    process = subprocess.run([program, "-c", code], capture_output=True, text=True, check=False)

    assert process.returncode == 0, process.stderr


IMPORT_EVERYTHING = """
import importlib, pkgutil, loadgen_sdk
for module in pkgutil.walk_packages(loadgen_sdk.__path__, "loadgen_sdk."):
    importlib.import_module(module.name)
"""


@pytest.mark.processes
def test_the_build_hook_calls_a_compiler_command_with_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(
        "hatchling.builders.hooks.plugin.interface", reason="the build hook: pip install hatchling"
    )
    hook = runpy.run_path(str(ROOT / "sdk" / "hatch_build.py"))
    source, library = ROOT / "sdk" / "loadgen_sdk" / "_compiled.c", tmp_path / "_compiled.abi3.so"
    (tmp_path / "cc").write_text(f'#!/bin/sh\nprintf "%s " "$@" > {tmp_path / "log"}\nexit 1\n')
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", f"{tmp_path / 'cc'} real-compiler -m32")

    assert "the C compiler failed" in hook["compile_into"](source, library)
    assert (
        (tmp_path / "log").read_text().startswith("real-compiler -m32 -O2 -fstack-protector-strong")
    )
    (tmp_path / "cc").write_text(f'#!/bin/sh\nprintf "\\177ELF\\001" > {library}\n')
    assert "32-bit" in hook["compile_into"](source, library)
    assert not library.exists(), "nothing is installed that cannot be loaded"
