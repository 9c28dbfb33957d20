"""Inspect a machine, and describe how each inference engine is started with random weights.

`rehearse.py` uses it. Inspecting has no side effects.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

CONTEXT_TOKENS = 8192  # enough for the longest task of the four workloads with its chat template
COMMAND_TIMEOUT_S = 60
ALL_LAYERS = 999  # llama.cpp puts so many layers on the GPU: more than any model has

# The KV cache needs the rest of the GPUs' memory.
WEIGHTS_MEMORY_FRACTION = 0.8
# Memory of the weights: two bytes per parameter, or about half a byte in a GGUF file of four bits
WEIGHTS_MIB_70B = 140_000
WEIGHTS_MIB_70B_GGUF = 40_000
WEIGHTS_MIB_7B = 14_000

GPU_FIELDS = ("name", "memory.total", "driver_version", "power.limit")  # columns of nvidia-smi


class Gpu(TypedDict):
    """A GPU as `nvidia-smi` describes it; all values are text."""

    name: str
    memory_mib: str
    driver: str
    watts: str  # the power limit


class Machine(TypedDict):
    """The facts about a machine that decide which engine is started, stored as JSON.

    `engines` has the path of the program of each installed engine, by the name of the engine.
    `cuda_compiler` and `cmake` are empty if they are not installed.
    """

    gpus: list[Gpu]
    cuda_compiler: str
    engines: dict[str, str]
    cmake: str
    cores: int
    memory_mib: int
    disk_free_mib: int
    kernel: str
    python: str


class Engine(NamedTuple):
    """An inference engine and how it is started.

    Attributes:
        name: The name of the engine in options and results.
        program: The name of its executable.
        weight_format: The format of the weights that it reads: "hf", "gguf", or "config" if it
            draws random weights itself. Empty for the simulated engine, which has no weights.
        start_command: The command line. Its placeholders are those of `build_start_command`.
        needs_gpu: Whether it runs on GPUs only.
        loadgen_options: The options with which loadgen names the model.
        model_files: Files that it needs next to the model, as pairs of name and text.
        ready_marker: A text that its list of models contains as soon as it serves requests.
    """

    name: str
    program: str
    weight_format: str
    start_command: str
    needs_gpu: bool = True
    loadgen_options: tuple[str, ...] = ("--model", "random")
    model_files: tuple[tuple[str, str], ...] = ()
    ready_marker: str = '"id"'


TENSORRT_LLM_CONFIG = "load_format: dummy\nreturn_perf_metrics: true\nstream_interval: 1\n"
ENGINES = (  # the best first
    Engine(
        name="trtllm",
        program="trtllm-serve",
        weight_format="config",
        start_command="{program} {model_dir} --host 127.0.0.1 --port {port} --tp_size {gpu_count}"
        " --max_seq_len {context_tokens} --config {model_dir}/trtllm.yaml",
        loadgen_options=(),
        model_files=(("trtllm.yaml", TENSORRT_LLM_CONFIG),),
    ),
    Engine(
        name="vllm",
        program="vllm",
        weight_format="config",
        start_command="{program} serve {model_dir} --served-model-name random --host 127.0.0.1"
        " --port {port} --load-format dummy --max-model-len {context_tokens}"
        " --tensor-parallel-size {gpu_count} --enable-prompt-tokens-details",
    ),
    Engine(
        name="sglang",
        program="sglang",
        weight_format="config",
        start_command="{program} serve --model-path {model_dir} --served-model-name random"
        " --host 127.0.0.1 --port {port} --load-format dummy --context-length {context_tokens}"
        " --tp-size {gpu_count} --enable-metrics --enable-cache-report",
    ),
    Engine(
        name="llamacpp",
        program="llama-server",
        weight_format="gguf",
        # `--cache-ram 0`: copying the cache of one slot to the host would delay all other slots.
        start_command="{program} -m {model_dir}/model.gguf --alias random -c {cache_tokens}"
        " -np {slots} -ngl {gpu_layers} --host 127.0.0.1 --port {port} --metrics --no-webui"
        " -t {threads} --cache-ram 0",
        needs_gpu=False,
    ),
    Engine(
        name="transformers",
        program="transformers",
        weight_format="hf",
        start_command="{program} serve {model_dir} --host 127.0.0.1 --port {port}"
        " --device {device}",
        needs_gpu=False,
        loadgen_options=("--model", "{model_dir}"),
        ready_marker='"list"',
    ),
    Engine(  # a simulated server, with which the script can be tested without any engine
        name="simulated",
        program="python",
        weight_format="",
        start_command="{program} -P -m loadgen sim --host 127.0.0.1 --port {port} --model random"
        " --ttft 20ms --itl 2ms",
        needs_gpu=False,
    ),
)
ENGINES_BY_NAME = {engine.name: engine for engine in ENGINES}


def build_start_command(
    engine: Engine, program: str, model_dir: Path, port: int, gpu_count: int, slots: int
) -> list[str]:
    """Return the command that starts an engine.

    Args:
        engine: The engine, whose `start_command` is filled in.
        program: The path of its executable.
        model_dir: The directory of the model.
        port: The port on which the engine listens.
        gpu_count: The number of GPUs over which the model is split; 0 for a CPU.
        slots: The requests that llama.cpp serves at the same time. It divides its KV cache evenly
            between them, so the cache has the longest context for each.
    """
    command_line = engine.start_command.format(
        program=program,
        model_dir=model_dir,
        port=port,
        gpu_count=max(gpu_count, 1),
        context_tokens=CONTEXT_TOKENS,
        cache_tokens=CONTEXT_TOKENS * slots,
        slots=slots,
        gpu_layers=ALL_LAYERS if gpu_count else 0,
        # The client needs the other half of the cores.
        threads=max(count_cores() // 2, 1),
        device="cuda" if gpu_count else "cpu",
    )
    return shlex.split(command_line)


# -- inspecting the machine ------------------------------------------------------------------------


def inspect_machine() -> Machine:
    """Return the GPUs, the CUDA compiler, the installed engines and facts about the host."""
    return {
        "gpus": list_gpus(),
        "cuda_compiler": read_cuda_compiler_version(),
        "engines": find_installed_engines(),
        "cmake": shutil.which("cmake") or "",
        "cores": count_cores(),
        "memory_mib": read_memory_mib(),
        "disk_free_mib": shutil.disk_usage(".").free >> 20,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def list_gpus() -> list[Gpu]:
    """Return the GPUs that `nvidia-smi` lists, or an empty list if it is not installed."""
    query = f"--query-gpu={','.join(GPU_FIELDS)}"
    output = read_command_output(["nvidia-smi", query, "--format=csv,noheader,nounits"])
    gpus: list[Gpu] = []
    for line in output.splitlines():
        name, memory_mib, driver, watts = line.split(", ")
        gpus.append({"name": name, "memory_mib": memory_mib, "driver": driver, "watts": watts})
    return gpus


def read_cuda_compiler_version() -> str:
    """Return the version of the CUDA compiler `nvcc`, or "" if it is not installed."""
    lines = read_command_output(["nvcc", "--version"]).splitlines()
    return lines[-1] if lines else ""


def read_command_output(command: Sequence[str]) -> str:
    """Return what a command prints, or "" if it is not installed, fails or takes too long."""
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return completed.stdout.strip()


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def read_memory_mib() -> int:
    """Return the size of the host's memory in MiB, from the line `MemTotal: 1234 kB`."""
    for line in Path("/proc/meminfo").read_text("utf-8").splitlines():
        if line.startswith("MemTotal"):
            return int(line.split()[1]) // 1024
    raise LookupError("/proc/meminfo has no MemTotal")


# -- choosing engine and model ---------------------------------------------------------------------


def find_installed_engines() -> dict[str, str]:
    """Return the path of the program of each installed engine, by the name of the engine."""
    programs = {engine.name: find_program(engine) for engine in ENGINES}
    return {name: program for name, program in programs.items() if program and name != "simulated"}


def find_program(engine: Engine) -> str:
    """Return the path of an engine's executable, or "" if it is not installed.

    It may be in the environment of this Python, which need not be on the PATH, or on the PATH.
    """
    if engine.name == "simulated":
        return sys.executable
    program_in_environment = Path(sys.executable).parent / engine.program
    if program_in_environment.exists():
        return str(program_in_environment)
    return shutil.which(engine.program) or ""


def choose_engine(machine: Machine, engine_name: str = "") -> Engine:
    """Return the engine with this name, or by default the best one that this machine can run.

    Raises LookupError if the engine is not installed or needs a GPU that the machine lacks. The
    simulated engine is only chosen by its name.
    """
    if engine_name:
        candidates = [ENGINES_BY_NAME[engine_name]]
    else:
        candidates = [engine for engine in ENGINES if engine.name != "simulated"]

    for engine in candidates:
        has_hardware = bool(machine["gpus"]) or not engine.needs_gpu
        if has_hardware and find_program(engine):
            return engine

    raise LookupError(
        f"no engine {engine_name} here: install one, or bring an archive of llama.cpp "
        "(--llama-archive)"
    )


def choose_shape(machine: Machine, engine: Engine) -> str:
    """Return the largest Llama 2 whose weights fit into the GPUs: "70b", "7b" or "tiny".

    A part of the GPUs' memory is left to the KV cache. Without a GPU the shape is "tiny".
    """
    memory_mib = sum(int(gpu["memory_mib"]) for gpu in machine["gpus"])
    available_mib = memory_mib * WEIGHTS_MEMORY_FRACTION
    needed_70b_mib = WEIGHTS_MIB_70B_GGUF if engine.weight_format == "gguf" else WEIGHTS_MIB_70B
    if available_mib > needed_70b_mib:
        return "70b"
    if available_mib > WEIGHTS_MIB_7B:
        return "7b"
    return "tiny"


# -- building llama.cpp ----------------------------------------------------------------------------


def build_llama_server(archive: Path, build_dir: Path, *, with_cuda: bool) -> str:
    """Build llama.cpp's server from a source archive and return the path of its executable."""
    source_dir = build_dir / "source"
    cmake_dir = build_dir / "build"
    shutil.unpack_archive(archive, source_dir)

    cmake_options = [
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_EXAMPLES=OFF",
        "-DLLAMA_BUILD_UI=OFF",
        "-DLLAMA_OPENSSL=OFF",
    ]
    if with_cuda:
        cmake_options += ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native"]

    llama_dir = find_llama_source(source_dir)
    subprocess.run(["cmake", "-S", llama_dir, "-B", cmake_dir, *cmake_options], check=True)
    build_options = ["--target", "llama-server", "-j", str(count_cores())]
    subprocess.run(["cmake", "--build", cmake_dir, *build_options], check=True)
    return str(cmake_dir / "bin/llama-server")


def find_llama_source(source_dir: Path) -> Path:
    """Return the root of llama.cpp's sources in an unpacked archive.

    It is the directory whose CMakeLists.txt has the library `ggml` next to it. The name of that
    directory differs from release to release.
    """
    for cmake_file in sorted(source_dir.rglob("CMakeLists.txt")):
        if (cmake_file.parent / "ggml").is_dir():
            return cmake_file.parent
    raise LookupError(f"{source_dir} has no sources of llama.cpp")


# -- energy ----------------------------------------------------------------------------------------


class NvmlEnergy:
    """The energy counters of all GPUs, read with NVIDIA's management library (NVML).

    Without that library there are no counters.
    """

    def __init__(self) -> None:
        self._gpu_count = 0
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return  # the library belongs to NVIDIA's driver, so there is no usable GPU

        self._nvml.nvmlInit_v2()
        gpu_count = ctypes.c_uint()
        self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(gpu_count))
        self._gpu_count = gpu_count.value

    def read_total_mj(self) -> int | None:
        """Return the energy in mJ that all GPUs have used since their driver was loaded.

        Return None if there is no GPU, or if one has no energy counter.
        """
        if self._gpu_count == 0:
            return None

        total_mj = 0
        for gpu_index in range(self._gpu_count):
            handle = ctypes.c_void_p()
            energy_mj = ctypes.c_ulonglong()
            self._nvml.nvmlDeviceGetHandleByIndex_v2(gpu_index, ctypes.byref(handle))
            error_code = self._nvml.nvmlDeviceGetTotalEnergyConsumption(
                handle, ctypes.byref(energy_mj)
            )
            if error_code:
                return None
            total_mj += energy_mj.value

        return total_mj
