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
    """Return the path of an engine's program, or "" if there is none."""
    if not engine.program:
        return sys.executable
    installed = Path(sys.executable).parent / engine.program
    return str(installed) if installed.exists() else shutil.which(engine.program) or ""


def _run(*command: str) -> str:
    """Return what a command prints, or "" if it cannot be run."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False
        ).stdout.strip()
    return ""


def inspect_machine() -> dict[str, Any]:
    """Return GPUs with memory and driver, compiler, engines, torch and the host."""
    fields = "name,memory.total,driver_version,power.limit"
    rows = _run("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    gpus = [
        dict(zip(("name", "memory_mib", "driver", "watts"), row.split(", "), strict=False))
        for row in rows.splitlines()
    ]
    compiler = _run("nvcc", "--version").splitlines()
    with open("/proc/meminfo", encoding="utf-8") as file:
        memory = next(int(line.split()[1]) // 1024 for line in file if line.startswith("MemTotal"))
    return {
        "gpus": gpus,
        "cuda_compiler": compiler[-1] if compiler else "",
        "torch": find_spec("torch") is not None,
        "engines": {
            engine.name: find_program(engine)
            for engine in ENGINES
            if engine.program and find_program(engine)
        },
        "cmake": shutil.which("cmake") or "",
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": memory,
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


def choose_shape(machine: dict[str, Any], engine: Engine) -> str:
    """Return the largest Llama 2 shape that fits; "tiny" without a GPU.

    Its weights leave a fifth of the GPUs' memory to the cache.
    """
    memory = sum(int(gpu["memory_mib"]) for gpu in machine["gpus"])
    for name, mib in (
        ("70b", 40_000 if engine.weight_format == "gguf" else 140_000),
        ("7b", 14_000),
    ):
        if memory * 0.8 > mib:
            return name
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
