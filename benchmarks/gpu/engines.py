"""What a machine has, and how each engine is started with random weights: the tables of `rehearse.py`. No side effects
but looking.
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
    """An engine. In `start` {model} is the model's folder, {port} where it listens, {gpus} how many GPUs, {bin} its
    program.
    """

    name: str
    program: str  # looked for beside this Python and on the PATH
    form: str  # of the weights: config (it draws its own), hf, gguf
    start: str
    needs_gpu: bool = True
    flags: tuple[str, ...] = ("--model", "random")  # of loadgen
    files: tuple[tuple[str, str], ...] = ()  # name -> text, beside the model
    ready: str = '"id"'  # what its list of models has when it serves


ENGINES = (  # the best first
    Engine(
        "trtllm",
        "trtllm-serve",
        "config",
        "{bin} {model} --host 127.0.0.1 --port {port} --tp_size {gpus} --max_seq_len {context}"
        " --config {model}/trtllm.yaml",
        flags=(),
        files=(
            ("trtllm.yaml", "load_format: dummy\nreturn_perf_metrics: true\nstream_interval: 1\n"),
        ),
    ),
    Engine(
        "vllm",
        "vllm",
        "config",
        "{bin} serve {model} --served-model-name random --host 127.0.0.1 --port {port} --load-format dummy"
        " --max-model-len {context} --tensor-parallel-size {gpus} --enable-prompt-tokens-details",
    ),
    Engine(
        "sglang",
        "sglang",
        "config",
        "{bin} serve --model-path {model} --served-model-name random --host 127.0.0.1 --port {port} --load-format dummy"
        " --context-length {context} --tp-size {gpus} --enable-metrics --enable-cache-report",
    ),
    Engine(
        "llamacpp",
        "llama-server",
        "gguf",
        "{bin} -m {model}/model.gguf --alias random -c {cache} -np {slots} -ngl {layers} --host 127.0.0.1 --port {port}"
        " --metrics --no-webui -t {threads} --cache-ram 0",  # copies of a slot's cache to the host hold all others up
        needs_gpu=False,
    ),
    Engine(
        "transformers",
        "transformers",
        "hf",
        "{bin} serve {model} --host 127.0.0.1 --port {port} --device {device}",
        needs_gpu=False,
        flags=("--model", "{model}"),
        ready='"list"',
    ),
    Engine(  # no engine at all: that the script runs
        "simulated",
        "",
        "",
        "{python} -P -m loadgen sim --host 127.0.0.1 --port {port} --model random --ttft 20ms --itl 2ms",
        needs_gpu=False,
    ),
)
BY_NAME = {engine.name: engine for engine in ENGINES}


def program(engine: Engine) -> str:
    """Where its program is, "" where there is none."""
    if not engine.program:
        return sys.executable
    beside = Path(sys.executable).parent / engine.program
    return str(beside) if beside.exists() else shutil.which(engine.program) or ""


def _said(*command: str) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False
        ).stdout.strip()
    return ""


def look() -> dict[str, Any]:
    """What there is: GPUs with their memory and driver, compiler, engines, torch, host."""
    fields = "name,memory.total,driver_version,power.limit"
    rows = _said("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    gpus = [
        dict(zip(("name", "memory_mib", "driver", "watts"), row.split(", "), strict=False))
        for row in rows.splitlines()
    ]
    compiler = _said("nvcc", "--version").splitlines()
    with open("/proc/meminfo", encoding="utf-8") as file:
        memory = next(int(line.split()[1]) // 1024 for line in file if line.startswith("MemTotal"))
    return {
        "gpus": gpus,
        "cuda_compiler": compiler[-1] if compiler else "",
        "torch": find_spec("torch") is not None,
        "engines": {
            engine.name: program(engine) for engine in ENGINES if engine.program and program(engine)
        },
        "cmake": shutil.which("cmake") or "",
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": memory,
        "disk_free_mib": shutil.disk_usage(".").free >> 20,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def chosen(found: dict[str, Any], asked: str = "") -> Engine:
    """The best engine that this machine can start. Raises LookupError where there is none."""
    for engine in ENGINES:
        wanted = engine.name == asked if asked else engine.name != "simulated"
        if wanted and program(engine) and (found["gpus"] or not engine.needs_gpu):
            return engine
    raise LookupError(
        f"no engine {asked} here: install one, or bring an archive of llama.cpp (--llama-archive)"
    )


def shape(found: dict[str, Any], engine: Engine) -> str:
    """The largest shape of Llama 2 whose weights leave a fifth of the GPUs' memory to the cache; tiny without a GPU."""
    memory = sum(int(gpu["memory_mib"]) for gpu in found["gpus"])
    for name, mib in (("70b", 40_000 if engine.form == "gguf" else 140_000), ("7b", 14_000)):
        if memory * 0.8 > mib:
            return name
    return "tiny"


def built(archive: Path, folder: Path, cuda: bool) -> str:
    """llama-server built from a source archive that was brought along; returns its path."""
    shutil.unpack_archive(archive, folder / "source")
    source = next(
        file.parent
        for file in sorted((folder / "source").rglob("CMakeLists.txt"))
        if (file.parent / "ggml").is_dir()
    )
    off = [
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_EXAMPLES=OFF",
        "-DLLAMA_BUILD_UI=OFF",
        "-DLLAMA_OPENSSL=OFF",
    ]
    gpu = ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native"] if cuda else []
    subprocess.run(["cmake", "-S", source, "-B", folder / "build", *off, *gpu], check=True)
    many = str(len(os.sched_getaffinity(0)))
    subprocess.run(
        ["cmake", "--build", folder / "build", "--target", "llama-server", "-j", many], check=True
    )
    return str(folder / "build/bin/llama-server")


class Nvml:
    """The energy counters of the GPUs by the driver's own library, in mJ; `None` where there is none."""

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
        """Of all GPUs together, since the driver was loaded."""
        total = 0
        for number in range(self._count):
            handle, energy = ctypes.c_void_p(), ctypes.c_ulonglong()
            self._library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle))
            if self._library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy)):
                return None
            total += energy.value
        return total if self._count else None
