"""How long does it take from nothing to the first result, with this tool and with others?

    python benchmarks/first_contact.py --tokenizer FOLDER --install DIR [--only guidellm]
    LOADGEN_SERVERS=DIR python benchmarks/first_contact.py --tokenizer FOLDER  # installed tools
    python benchmarks/first_contact.py --uvx uvx --wheel LOADGEN.whl --wheel SDK.whl

With --install, each tool is installed into a fresh environment below DIR by `pip install
--no-cache-dir` of its released version (for this one: the checkout). The time and the size of the
installation are measured. Then the command of its documentation sends 32 requests, eight at once,
to an endpoint whose log is the truth. It does so twice, because the first time compiles modules and
fills caches, and once more as on a network without the Hub and without a tokenizer of the model.
Commands and results are those of `rivals.py`. The table has steps, seconds and MB.

With --wheel, one command of uvx installs loadgen from its wheel and runs a workload on a simulated
server: once with an empty cache of packages, once with the cache that this has filled, and once
with the environment that uvx has kept.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import rig
import rivals

# A port on which nothing listens. As a proxy, it makes each connection to the network fail at once.
CLOSED_PORT_URL = "http://127.0.0.1:9"
MAX_ERROR_CHARACTERS = 110  # of an error in a cell of the table
DISK_BLOCK_BYTES = 512  # the unit of `st_blocks`


class DiskUsage(NamedTuple):
    """The size of an installation, and the number of its packages."""

    megabytes: float
    packages: int


def measure_disk_usage(root: Path, metadata_dirs: Iterable[Path]) -> DiskUsage:
    """Return the size of all files below a folder, with files of several hard links counted once.

    `metadata_dirs` are the `.dist-info` folders: one per package, or several with the same name.
    """
    bytes_by_file = {}
    for path in root.rglob("*"):
        status = path.lstat()
        bytes_by_file[status.st_dev, status.st_ino] = status.st_blocks * DISK_BLOCK_BYTES

    package_names = {path.name for path in metadata_dirs}
    return DiskUsage(sum(bytes_by_file.values()) / 1e6, len(package_names))


# -- installation --


class Installation(NamedTuple):
    """How a user installs a tool and runs it for the first time."""

    requirement: str  # as `pip install` takes it
    steps: str  # what the user types or provides
    options_without_tokenizer: str = ""  # replace the option `--tokenizer FOLDER`


INSTALLATIONS = {
    "loadgen": Installation(str(rig.BENCHMARKS_DIR.parent), "install, run"),
    "guidellm": Installation("guidellm==0.8.1", "install, a tokenizer, run"),
    "aiperf": Installation("aiperf==0.13.0", "install, run", "--tokenizer builtin"),
    "vllm": Installation("vllm==0.32.0", "install, a tokenizer, run", "--skip-tokenizer-init"),
}
"""The compared tools, by their names in `rivals.TOOLS`."""


class InstalledTool(NamedTuple):
    """A tool that can be run."""

    tool: rivals.Tool
    program: str
    install_s: float | None = None  # None if it was installed before
    disk_usage: DiskUsage | None = None  # None for the running Python, which has other packages


def prepare_tool(tool: rivals.Tool, install_dir: Path | None) -> InstalledTool | None:
    """Install a tool below a folder, or find the installed one if there is no such folder.

    Returns None if the tool is not installed.
    """
    if install_dir is not None:
        return install_tool(tool, install_dir / tool.name)
    return find_installed_tool(tool)


def install_tool(tool: rivals.Tool, environment_dir: Path) -> InstalledTool:
    """Install a tool into a fresh environment, as its users do, and measure the time."""
    bin_dir = environment_dir / "bin"
    requirement = INSTALLATIONS[tool.name].requirement
    pip_options = ["-q", "--no-cache-dir", "--disable-pip-version-check"]

    started_s = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", environment_dir], check=True)
    subprocess.run(
        [bin_dir / "pip", "install", *pip_options, requirement],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    install_s = time.monotonic() - started_s

    # loadgen runs as a module of Python.
    program_name = Path(tool.program).name if tool.environment else "python"
    return InstalledTool(
        tool, str(bin_dir / program_name), install_s, measure_environment(environment_dir)
    )


def find_installed_tool(tool: rivals.Tool) -> InstalledTool | None:
    """Return a tool that was installed before, or None if it is not installed."""
    program = rivals.find_program(tool)
    if program is None:
        return None
    if not tool.environment:  # loadgen in the running Python
        return InstalledTool(tool, program)

    environment_dir = Path(program).parents[1]
    return InstalledTool(tool, program, disk_usage=measure_environment(environment_dir))


def measure_environment(environment_dir: Path) -> DiskUsage:
    """Return the size of a virtual environment."""
    metadata_dirs = environment_dir.glob("lib/python3*/site-packages/*.dist-info")
    return measure_disk_usage(environment_dir, metadata_dirs)


# -- first load --


class FirstLoad(NamedTuple):
    """One load by a tool: how long it took, and its TTFT p50 next to the true one, as text.

    Without a result, `ttft` is "" and `error` says what went wrong.
    """

    duration_s: float
    ttft: str = ""
    error: str = ""


def run_load(
    installed: InstalledTool, output_dir: Path, load: rivals.Load, *, is_isolated: bool = False
) -> FirstLoad:
    """Run one load by a tool against an endpoint whose log is the truth.

    With `is_isolated`, the tool runs without a tokenizer, as on a network without the Hub, from
    which no package or model can be fetched.
    """
    tool = installed.tool
    output_dir.mkdir(parents=True)
    with rig.serve_endpoint(**rivals.ENDPOINT_OPTIONS) as server:
        command = rivals.build_command(tool, installed.program, server.url, output_dir, load)
        if is_isolated:
            command = isolate_from_network(command, tool)

        started_s = time.monotonic()
        rivals.run_tool(command, output_dir, timeout_s=load.timeout_s)
        duration_s = time.monotonic() - started_s
        endpoint_log = rig.read_url(server.url + "/_log")

    if not (output_dir / tool.result_file).exists():
        output = (output_dir / rivals.OUTPUT_FILE).read_text("utf-8", errors="replace")
        return FirstLoad(duration_s, error=find_error_line(output))

    return FirstLoad(duration_s, ttft=format_ttft(tool, output_dir, endpoint_log))


def format_ttft(tool: rivals.Tool, output_dir: Path, endpoint_log: bytes) -> str:
    """Return the reported and the true TTFT p50 in ms, and the verdict of loadgen on its run."""
    report = rivals.read_tool_report(tool, output_dir)
    truth = rivals.read_truth(endpoint_log)
    ttft = f"{report.result.ttft_p50_ms or 0:.1f} / {truth.ttft_p50_ms or 0:.1f}"
    if tool.name != rivals.LOADGEN.name:
        return ttft

    verdict = re.split("[:;]", report.remarks)[0]  # before its reasons
    return f"{ttft} {verdict}"


def isolate_from_network(command: str, tool: rivals.Tool) -> str:
    """Return a command without a tokenizer, and with a proxy that refuses every connection."""
    other_options = INSTALLATIONS[tool.name].options_without_tokenizer
    command_without_tokenizer = re.sub(r"--tokenizer\s+\S+", other_options, command)
    proxy = f"env NO_PROXY=127.0.0.1 HTTPS_PROXY={CLOSED_PORT_URL}"
    return f"{proxy} {command_without_tokenizer}"


def find_error_line(output: str) -> str:
    """Return the line of an output that says what went wrong.

    It is the last line with the name of an error, or else the last line.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        return "nothing was printed"

    error_lines = [line for line in lines if re.search(r"(?i)error\b|offline", line)]
    return error_lines[-1] if error_lines else lines[-1]


TOOL_COLUMNS = (
    "tool",
    "steps",
    "install, s",
    "MB",
    "packages",
    "first load, s",
    "second load, s",
    "TTFT p50 / true, ms",
    "without tokenizer and Hub",
)


def measure_tool(installed: InstalledTool, scratch: Path, load: rivals.Load) -> list[str]:
    """Run the loads of a tool and return its row, in the order of TOOL_COLUMNS.

    The tool runs its first load, the same load again, and once without a tokenizer and the Hub.
    """
    name = installed.tool.name
    first = run_load(installed, scratch / f"{name}-first", load)
    second = run_load(installed, scratch / f"{name}-second", load)
    isolated = run_load(installed, scratch / f"{name}-isolated", load, is_isolated=True)

    megabytes = ""
    packages = ""
    if installed.disk_usage is not None:
        megabytes = f"{installed.disk_usage.megabytes:,.0f}"
        packages = str(installed.disk_usage.packages)

    isolated_result = f"no: {isolated.error[:MAX_ERROR_CHARACTERS]}"
    if isolated.ttft:
        isolated_result = f"{isolated.duration_s:.1f} s"

    return [
        name,
        INSTALLATIONS[name].steps,
        rivals.format_number(installed.install_s, 0),
        megabytes,
        packages,
        f"{first.duration_s:.1f}",
        f"{second.duration_s:.1f}",
        first.ttft or first.error,
        isolated_result,
    ]


def print_tools(args: argparse.Namespace) -> None:
    """Print install time, size and first load of each tool."""
    names = args.only or INSTALLATIONS
    tools = [tool for tool in rivals.TOOLS if tool.name in INSTALLATIONS and tool.name in names]

    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        load = rivals.create_load(args, Path(scratch))
        for tool in tools:
            installed = prepare_tool(tool, args.install)
            if installed is None:
                print(f"{tool.name}: not installed")
            else:
                rows.append(measure_tool(installed, Path(scratch), load))

    print(rig.format_table(TOOL_COLUMNS, rows))


# -- uvx --


UVX_COLUMNS = ("uvx with", "s", "MB", "packages", "result")


def measure_uvx(uvx: str, wheels: Sequence[Path], scratch: Path) -> list[list[str]]:
    """Run loadgen with uvx from an empty cache to a full one; return a row for each state of it.

    Args:
        uvx: The program `uvx`.
        wheels: The wheel of loadgen, and those of its dependencies that are in no registry.
        scratch: An empty directory for the cache and the results.
    """
    cache_dir = scratch / "cache"
    command: list[str | Path] = [uvx, "--from", wheels[0]]
    for wheel in wheels[1:]:
        command += ["--with", wheel]
    command += ["loadgen", "run", "qa", "--url", "sim:gb300-vm", "-o"]

    rows = []
    rows.append(["empty cache", *run_uvx([*command, scratch / "run-1"], cache_dir)])

    # The packages stay, and uvx has to create the environment again.
    shutil.rmtree(cache_dir / "environments-v2", ignore_errors=True)
    rows.append(["packages in the cache", *run_uvx([*command, scratch / "run-2"], cache_dir)])
    rows.append(["environment in the cache", *run_uvx([*command, scratch / "run-3"], cache_dir)])
    return rows


def run_uvx(command: Sequence[str | Path], cache_dir: Path) -> list[str]:
    """Run a command of uvx with this cache; return the cells of UVX_COLUMNS after the first one."""
    started_s = time.monotonic()
    completed = subprocess.run(
        command,
        env=os.environ | {"UV_CACHE_DIR": str(cache_dir)},
        cwd=cache_dir.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    duration_s = time.monotonic() - started_s

    verdict = re.search(r"Measurement +(\w+)", completed.stdout)
    result = verdict[1] if verdict else find_error_line(completed.stderr)

    # The environments of uvx consist of links to the unpacked packages in this folder.
    archive_dir = cache_dir / "archive-v0"
    usage = measure_disk_usage(archive_dir, archive_dir.glob("*/*.dist-info"))
    return [f"{duration_s:.1f}", f"{usage.megabytes:.0f}", str(usage.packages), result]


def print_uvx(args: argparse.Namespace) -> None:
    """Print what one command of uvx costs, from an empty cache to a full one."""
    wheels = [wheel.absolute() for wheel in args.wheel]
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure_uvx(args.uvx, wheels, Path(scratch))
    print(rig.format_table(UVX_COLUMNS, rows))


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    rivals.add_load_options(parser, INSTALLATIONS, default_requests=32)
    parser.add_argument("--install", type=Path, help="make fresh environments below this folder")
    parser.add_argument(
        "--wheel", action="append", type=Path, help="a wheel: that of loadgen first; repeatable"
    )
    parser.add_argument("--uvx", default="uvx", help="the program uvx")
    return rig.parse_arguments(parser, requests=4, concurrency=2, only=["loadgen"])


def main() -> None:
    """Print install time, size and first load of each tool, or of the wheel with uvx."""
    args = parse_command_line()
    if args.wheel:
        print_uvx(args)
    else:
        print_tools(args)


if __name__ == "__main__":
    main()
