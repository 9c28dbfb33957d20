"""Compile the C modules into the wheel if there is a C compiler. Else it is pure Python."""

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
"""Paths of the C modules from the root of a wheel. sdk/wire has only the second one."""
HARDENED = ("-fstack-protector-strong", "-D_FORTIFY_SOURCE=2", "-Wl,-z,relro,-z,now,-z,noexecstack")
"""Options that limit the damage of a memory error, because the code parses bytes of any server."""
COMPILE_OPTIONS = ("-O2", *HARDENED, "-ffp-contract=off", "-shared", "-fPIC")
"""Without contraction, a result does not depend on whether the CPU has fused multiply-add."""
ELF_CLASS_BYTE = 4
ELF_BITS = {1: 32, 2: 64}
"""The byte of an ELF file that names its word size, and its values."""


class CompiledHook(BuildHookInterface):  # type: ignore[type-arg]
    """The build hook of two wheels: that of loadgen, and that of the SDK's compiled part."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the modules before the wheel is built. `version` is "editable" or "standard".

        In an editable installation the libraries are written beside their sources. Otherwise they
        are written to a scratch directory, from which hatchling takes them into the wheel.
        """
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

    def finalize(
        self,
        version: str,  # noqa: ARG002 - the signature of hatchling
        build_data: dict[str, Any],  # noqa: ARG002
        artifact_path: str,  # noqa: ARG002
    ) -> None:
        """Remove the scratch directory after the wheel was built."""
        shutil.rmtree(getattr(self, "_scratch", ""), ignore_errors=True)


def compile_into(source: Path, library: Path) -> str:
    """Compile a C module into a library. Return "" or, in one line, why it is not possible."""
    is_supported = sys.platform.startswith("linux") and sys.implementation.name == "cpython"
    if not is_supported or sys.version_info < (3, 11):
        return "its C code needs CPython 3.11 or later on Linux"
    compiler = _find_compiler()
    include = f"-I{sysconfig.get_path('include')}"
    command = [*compiler, *COMPILE_OPTIONS, include, source.name, "-o", str(library)]
    try:
        process = subprocess.run(
            command, cwd=source.parent, capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"no C compiler was found: {error}"
    if process.returncode:
        messages = process.stderr.strip().splitlines() or ["?"]
        return f"the C compiler failed: {messages[0]}"
    library_bits = _word_size(library)
    python_bits = 8 * struct.calcsize("P")
    if library_bits != python_bits:
        library.unlink()
        name = shlex.join(compiler)
        return (
            f"the C compiler ({name}) makes {library_bits}-bit code, but this Python "
            f"has {python_bits} bits"
        )
    return ""


def _find_compiler() -> list[str]:
    """Return the command of the compiler: CC with its options, or the compiler of Python itself.

    The options with which Python was built are for Python alone.
    """
    user_compiler = os.environ.get("CC")
    if user_compiler:
        return shlex.split(user_compiler)
    return shlex.split(sysconfig.get_config_var("CC") or "cc")[:1]


def _word_size(library: Path) -> int | None:
    """Return the number of bits of an address in an ELF file, or None if it is another file."""
    with library.open("rb") as file:
        header = file.read(ELF_CLASS_BYTE + 1)
    return ELF_BITS.get(header[ELF_CLASS_BYTE])
