"""Compiles the modules in C into the wheel where a C compiler is. Without one, or not on Linux, it is pure Python."""

from __future__ import annotations

import os
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = (
    "sdk/loadgen_sdk/_compiled.c",
    "../loadgen_sdk/_compiled.c",
    "loadgen/sim/engine/_replica.c",
)
"""From the root of a wheel: the generator's holds the first and the last, that of sdk/wire the second."""
HARDENED = ("-fstack-protector-strong", "-D_FORTIFY_SOURCE=2", "-Wl,-z,relro,-z,now,-z,noexecstack")
"""What is read comes from servers that nobody vouches for."""


class CompiledHook(BuildHookInterface):  # type: ignore[type-arg]
    """The build hook of two wheels: of the generator and of the SDK's wire."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        editable = version == "editable"
        self._scratch = tempfile.mkdtemp()
        for source in (Path(self.root, source) for source in SOURCES):
            if not source.exists():
                continue
            name = source.with_suffix(".abi3.so").name
            library = source.with_name(name) if editable else Path(self._scratch, name)
            problem = compile_into(source, library)
            if problem:
                self.app.display_warning(f"loadgen: {source.stem} in pure Python, {problem}")
            elif not editable:
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["pure_python"] = False
                build_data["tag"] = f"cp311-abi3-{platform}"
                inside = os.path.relpath(source, self.root).removeprefix("sdk/").removeprefix("../")
                build_data["force_include"][str(library)] = f"{inside.rpartition('/')[0]}/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(getattr(self, "_scratch", ""), ignore_errors=True)


def compile_into(source: Path, library: Path) -> str:
    """Compile a module into this file; "" or, in a line, why it could not be."""
    is_known = sys.platform.startswith("linux") and sys.implementation.name == "cpython"
    if not is_known or sys.version_info < (3, 11):
        return "its C is for CPython from 3.11 on, on Linux"
    asked = os.environ.get(
        "CC"
    )  # with all its words: "ccache gcc"; those of Python's own build are not for us
    compiler = (
        shlex.split(asked) if asked else shlex.split(sysconfig.get_config_var("CC") or "cc")[:1]
    )
    include = sysconfig.get_path("include")
    command = [
        *compiler,
        "-O2",
        *HARDENED,
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
        f"-I{include}",
        source.name,
        "-o",
        str(library),
    ]
    try:
        done = subprocess.run(
            command, cwd=source.parent, capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"no C compiler: {error}"
    if done.returncode:
        return f"the C compiler failed: {(done.stderr.strip().splitlines() or ['?'])[0]}"
    with library.open("rb") as file:
        bits = {1: 32, 2: 64}.get(file.read(5)[4])
    if bits != (own := 8 * struct.calcsize("P")):
        library.unlink()
        return f"the C compiler ({shlex.join(compiler)}) makes code of {bits} bits, and this Python has {own}"
    return ""
