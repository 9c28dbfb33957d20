"""Inspect a machine, and describe how each engine is started with random weights.

These are the tables of `rehearse.py`. Inspecting has no side effects.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

CONTEXT = 8192  # tokens: the longest task of the four profiles with its template


class Engine(NamedTuple):
    """An inference engine and how it is started.

    In `start_command`, {model} is the folder of the model, {port} its port, {gpus} the number of
    GPUs and {bin} its program.
    """

    name: str
    program: str  # looked for beside this Python and on the PATH
    weight_format: str  # of the weights: config (it draws its own), hf, gguf
    start_command: str
    needs_gpu: bool = True
    loadgen_options: tuple[str, ...] = ("--model", "random")  # of loadgen
    model_files: tuple[tuple[str, str], ...] = ()  # name -> text, beside the model
    ready_marker: str = '"id"'  # what its list of models has when it serves


ENGINES = (  # the best first
    Engine(
        "trtllm",
        "trtllm-serve",
        "config",
        "{bin} {model} --host 127.0.0.1 --port {port} --tp_size {gpus} --max_seq_len {context}"
        " --config {model}/trtllm.yaml",
        loadgen_options=(),
        model_files=(
            ("trtllm.yaml", "load_format: dummy\nreturn_perf_metrics: true\nstream_interval: 1\n"),
        ),
    ),
    Engine(
        "vllm",
        "vllm",
        "config",
        "{bin} serve {model} --served-model-name random --host 127.0.0.1 --port {port} "
        "--load-format dummy"
        " --max-model-len {context} --tensor-parallel-size {gpus} --enable-prompt-tokens-details",
    ),
    Engine(
        "sglang",
        "sglang",
        "config",
        "{bin} serve --model-path {model} --served-model-name random --host 127.0.0.1 --port "
        "{port} --load-format dummy"
        " --context-length {context} --tp-size {gpus} --enable-metrics --enable-cache-report",
    ),
    Engine(
        "llamacpp",
        "llama-server",
        "gguf",
        "{bin} -m {model}/model.gguf --alias random -c {cache} -np {slots} -ngl {layers} --host "
        "127.0.0.1 --port {port}"
        # Copies of a slot's cache to the host hold all others up
        " --metrics --no-webui -t {threads} --cache-ram 0",
        needs_gpu=False,
    ),
    Engine(
        "transformers",
        "transformers",
        "hf",
        "{bin} serve {model} --host 127.0.0.1 --port {port} --device {device}",
        needs_gpu=False,
        loadgen_options=("--model", "{model}"),
        ready_marker='"list"',
    ),
    Engine(  # no engine at all: that the script runs
        "simulated",
        "",
        "",
        "{python} -P -m loadgen sim --host 127.0.0.1 --port {port} --model random --ttft 20ms "
        "--itl 2ms",
        needs_gpu=False,
    ),
)
BY_NAME = {engine.name: engine for engine in ENGINES}


def find_program(engine: Engine) -> str:
    """Return the path of an engine's program, or "" if there is none.

    It is looked for next to this Python, then on the PATH. An engine without a program runs in this
    Python.
    """
    if not engine.program:
        return sys.executable
    next_to_python = Path(sys.executable).parent / engine.program
    if next_to_python.exists():
        return str(next_to_python)
    return shutil.which(engine.program) or ""


def _run(*command: str) -> str:
    """Return what a command prints, or "" if it cannot be run."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False
        ).stdout.strip()
    return ""


def find_engines() -> dict[str, str]:
    """Return the programs of the installed engines, by the name of the engine."""
    programs = {engine.name: find_program(engine) for engine in ENGINES if engine.program}
    return {name: program for name, program in programs.items() if program}


def list_gpus() -> list[dict[str, str]]:
    """Return the name, the memory in MiB, the driver and the power limit in W of each GPU."""
    fields = "name,memory.total,driver_version,power.limit"
    rows = _run("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    names = ("name", "memory_mib", "driver", "watts")
    return [dict(zip(names, row.split(", "), strict=False)) for row in rows.splitlines()]


def find_cuda_compiler() -> str:
    """Return the version of nvcc, or "" if it is not installed."""
    lines = _run("nvcc", "--version").splitlines()
    return lines[-1] if lines else ""


def read_memory_mib() -> int:
    """Return the size of the host's memory in MiB."""
    lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("MemTotal"))


def inspect_machine() -> dict[str, Any]:
    """Return the GPUs, the CUDA compiler, the installed engines and facts about the host."""
    return {
        "gpus": list_gpus(),
        "cuda_compiler": find_cuda_compiler(),
        "torch": find_spec("torch") is not None,
        "engines": find_engines(),
        "cmake": shutil.which("cmake") or "",
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": read_memory_mib(),
        "disk_free_mib": shutil.disk_usage(".").free >> 20,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def choose_engine(machine: dict[str, Any], engine_name: str = "") -> Engine:
    """Return the best engine that this machine can start; raise LookupError if there is none."""
    for engine in ENGINES:
        is_wanted = engine.name == engine_name if engine_name else engine.name != "simulated"
        if is_wanted and find_program(engine) and (machine["gpus"] or not engine.needs_gpu):
            return engine
    raise LookupError(
        f"no engine {engine_name} here: install one, or bring an archive of llama.cpp "
        f"(--llama-archive)"
    )


WEIGHTS_MEMORY_FRACTION = 0.8  # of the GPUs' memory: the rest is for the KV cache


# Memory of the weights in MiB: two bytes for each parameter, or half a byte in a GGUF file
WEIGHTS_MIB_70B, WEIGHTS_MIB_70B_GGUF, WEIGHTS_MIB_7B = 140_000, 40_000, 14_000


def choose_shape(machine: dict[str, Any], engine: Engine) -> str:
    """Return the largest shape of Llama 2 whose weights fit into the GPUs: "70b", "7b" or "tiny".

    A fifth of the memory is left to the KV cache. Without a GPU it is "tiny".
    """
    memory_mib = sum(int(gpu["memory_mib"]) for gpu in machine["gpus"])
    available_mib = memory_mib * WEIGHTS_MEMORY_FRACTION
    needed_70b_mib = WEIGHTS_MIB_70B_GGUF if engine.weight_format == "gguf" else WEIGHTS_MIB_70B
    if available_mib > needed_70b_mib:
        return "70b"
    if available_mib > WEIGHTS_MIB_7B:
        return "7b"

    return "tiny"


def build_llama_server(archive: Path, folder: Path, cuda: bool) -> str:
    """Build llama-server from a source archive and return its path."""
    shutil.unpack_archive(archive, folder / "source")
    source = next(
        file.parent
        for file in sorted((folder / "source").rglob("CMakeLists.txt"))
        if (file.parent / "ggml").is_dir()
    )

    disabled_parts = [
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_EXAMPLES=OFF",
        "-DLLAMA_BUILD_UI=OFF",
        "-DLLAMA_OPENSSL=OFF",
    ]
    cuda_options = ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native"] if cuda else []
    subprocess.run(
        ["cmake", "-S", source, "-B", folder / "build", *disabled_parts, *cuda_options], check=True
    )
    core_count = str(len(os.sched_getaffinity(0)))
    subprocess.run(
        ["cmake", "--build", folder / "build", "--target", "llama-server", "-j", core_count],
        check=True,
    )

    return str(folder / "build/bin/llama-server")


class NvmlEnergy:
    """The energy counters of the GPUs, read with the driver's own library."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self._count = 0
            return

        self._library.nvmlInit_v2()
        count = ctypes.c_uint()
        self._library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        self._count = count.value

    def millijoules(self) -> int | None:
        """Return the energy of all GPUs since the driver was loaded, or None if unknown."""
        total_mj = 0
        for number in range(self._count):
            handle, energy = ctypes.c_void_p(), ctypes.c_ulonglong()
            self._library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle))
            if self._library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy)):
                return None
            total_mj += energy.value

        return total_mj if self._count else None
