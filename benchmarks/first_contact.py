"""How long does it take from nothing to the first result, with this tool and with others?

    python benchmarks/first_contact.py --tokenizer FOLDER --install DIR [--only guidellm]
    LOADGEN_SERVERS=DIR python benchmarks/first_contact.py --tokenizer FOLDER  # installed tools
    python benchmarks/first_contact.py --uvx uvx --wheel LOADGEN.whl --wheel SDK.whl

With --install, each tool is installed into a fresh environment below DIR by `pip install
--no-cache-dir` of its released version (for this one: the checkout), and timed and weighed. Then
the command of its documentation sends 32 requests, eight at once, to an endpoint whose log is the
truth. It does so twice, because the first time compiles modules and fills caches, and once more as
on a network without the Hub and without a tokenizer of the model. Commands and results are those of
`rivals.py`. The table has steps, seconds and MB.

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
from pathlib import Path
from typing import Any, NamedTuple

import rig
import rivals

CLOSED_PORT_URL = "http://127.0.0.1:9"  # what asks the network is refused at once


class Installation(NamedTuple):
    """How a tool is installed.

    `steps` lists what a user types or brings. `options_without_tokenizer` replaces `--tokenizer
    FOLDER`.
    """

    requirement: str
    steps: str
    options_without_tokenizer: str = ""


INSTALLATIONS = {
    "loadgen": Installation(str(rig.BENCHMARKS_DIR.parent), "install, run"),
    "guidellm": Installation("guidellm==0.8.1", "install, a tokenizer, run"),
    "aiperf": Installation("aiperf==0.13.0", "install, run", " --tokenizer builtin"),
    "vllm": Installation("vllm==0.32.0", "install, a tokenizer, run", " --skip-tokenizer-init"),
}


class InstalledTool(NamedTuple):
    """An installed tool and its program.

    `seconds` and `megabytes` are None if it was installed before or cannot be weighed.
    """

    program: str
    seconds: float | None
    megabytes: float | None
    packages: int | None = None


def install_tool(tool: rivals.Tool, environment_dir: Path) -> InstalledTool:
    """Install a tool into a fresh environment, as its users do."""
    started_s = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", environment_dir], check=True)
    pip: list[str | Path] = [
        environment_dir / "bin" / "pip",
        "install",
        "-q",
        "--no-cache-dir",
        "--disable-pip-version-check",
    ]
    subprocess.run(
        [*pip, INSTALLATIONS[tool.name].requirement], check=True, stderr=subprocess.DEVNULL
    )
    seconds = time.monotonic() - started_s
    name = Path(tool.program).name if tool.environment else "python"

    return InstalledTool(
        str(environment_dir / "bin" / name), seconds, *measure_environment(environment_dir)
    )


def measure_environment(environment: Path) -> tuple[float, int]:
    """Return MB on the disk, with links counted once, and the number of packages."""
    sizes = {
        (stat.st_dev, stat.st_ino): stat.st_blocks * 512
        for stat in map(os.lstat, environment.rglob("*"))
    }
    return sum(sizes.values()) / 1e6, len(
        [*environment.glob("lib/python3*/site-packages/*.dist-info")]
    )


def find_installed(tool: rivals.Tool) -> InstalledTool | None:
    """Return the tool that is installed already, or None."""
    program = rivals.find_program(tool)
    if not program:
        return None
    weight = measure_environment(Path(program).parents[1]) if tool.environment else (None, None)
    return InstalledTool(program, None, *weight)


def find_error_line(text: str) -> str:
    """Return the line of an output that says what went wrong.

    It is the last line with the name of an error, or else the last line.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(?i)error\b|offline", line)]
    return next(iter([*errors[-1:], *lines[-1:]]), "nothing")


class FirstLoad(NamedTuple):
    """One load by a tool: how long it took, and its TTFT p50 next to the true one, as text.

    Without a result, `ttft` is "" and `error` says what went wrong.
    """

    seconds: float
    ttft: str = ""
    error: str = ""


OUTPUT_FILE = "said.txt"


def run_first_load(
    tool: rivals.Tool, program: str, tokenizer: str, output_dir: Path, args: Any
) -> FirstLoad:
    """Run one load by a tool against an endpoint whose log is the truth.

    With an empty `tokenizer`, the tool runs as on a network without the Hub: no package or model
    can be fetched.
    """
    output_dir.mkdir(parents=True)
    with rig.serve_endpoint(**rivals.OPTIONS) as server:
        command = rivals.build_command(
            tool, program, server.url, tokenizer or "none", output_dir, args
        )
        if not tokenizer:
            command = isolate_from_network(command, tool)

        started_s = time.monotonic()
        rivals.run_tool(
            command, output_dir / OUTPUT_FILE, is_starved=False, timeout_s=args.minutes * 60
        )
        seconds = time.monotonic() - started_s
        endpoint_log = rig.read_url(server.url + "/_log")

    if not (output_dir / tool.result).exists():
        output = (output_dir / OUTPUT_FILE).read_text("utf-8", errors="replace")
        return FirstLoad(seconds, error=find_error_line(output))

    reported, own_verdict = rivals.read_tool_result(tool, output_dir)
    truth = rivals.read_truth(endpoint_log)

    ttft = f"{reported.ttft or 0:.1f} / {truth.ttft or 0:.1f}"
    if tool.name == "loadgen":
        ttft = f"{ttft} {own_verdict.partition(':')[0]}".strip()

    return FirstLoad(seconds, ttft)


def measure_uvx(uvx: str, wheels: list[Path], scratch: Path) -> list[list[str]]:
    """Return a row for each state of the caches: its name, seconds, MB and the verdict.

    The megabytes are those of the environment that uvx creates, on the disk.

    Args:
        uvx: The program `uvx`.
        wheels: The wheel of loadgen, and those of its dependencies that are in no registry.
        scratch: An empty directory for caches and results.
    """
    cache = scratch / "cache"
    environment = os.environ | {"UV_CACHE_DIR": str(cache)}

    command: list[str | Path] = [uvx, "--from", wheels[0]]
    for wheel in wheels[1:]:
        command += ["--with", wheel]

    command += ["loadgen", "run", "qa", "--url", "sim:gb300-vm", "-o"]
    rows = []
    for state in ("empty cache", "packages in the cache", "environment in the cache"):
        if state == "packages in the cache":
            shutil.rmtree(cache / "environments-v2", ignore_errors=True)

        started_s = time.monotonic()
        done = subprocess.run(
            [*command, scratch / state.replace(" ", "-")],
            env=environment,
            cwd=scratch,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - started_s
        verdict = re.search(r"Measurement +(\w+)", done.stdout)
        megabytes, packages = measure_uv_archive(cache)
        result = verdict[1] if verdict else find_error_line(done.stderr)
        rows.append([state, f"{seconds:.1f}", f"{megabytes:.0f}", str(packages), result])

    return rows


def measure_uv_archive(cache: Path) -> tuple[float, int]:
    """Return the MB of the unpacked packages in the cache of uv, and how many there are.

    The environments of uvx consist of links to these files.
    """
    sizes = {
        (stat.st_dev, stat.st_ino): stat.st_blocks * 512
        for stat in map(os.lstat, (cache / "archive-v0").rglob("*"))
    }
    packages = {path.name for path in (cache / "archive-v0").glob("*/*.dist-info")}
    return sum(sizes.values()) / 1e6, len(packages)


def isolate_from_network(command: str, tool: rivals.Tool) -> str:
    """Return the command without a tokenizer, and with a proxy that refuses every connection."""
    other_options = INSTALLATIONS[tool.name].options_without_tokenizer
    command = re.sub(r" --tokenizer \S+", other_options, command)
    return f"env NO_PROXY=127.0.0.1 HTTPS_PROXY={CLOSED_PORT_URL} {command}"


def measure_tool(tool: rivals.Tool, tokenizer: str, scratch: Path, args: Any) -> list[str] | None:
    """Return the row of a tool, or None if it is not installed.

    The tool is installed first if `--install` is passed. It runs its first load, the same load
    again, and once without a tokenizer and the Hub.
    """
    if args.install:
        installed: InstalledTool | None = install_tool(tool, args.install / tool.name)
    else:
        installed = find_installed(tool)

    if installed is None:
        return None

    first, second, isolated = (
        run_first_load(tool, installed.program, folder, scratch / f"{tool.name}-{index}", args)
        for index, folder in enumerate([tokenizer, tokenizer, ""])
    )
    if isolated.ttft:
        isolated_cell = f"{isolated.seconds:.1f} s"
    else:
        isolated_cell = f"no: {isolated.error[:110]}"

    return [
        tool.name,
        INSTALLATIONS[tool.name].steps,
        rivals.format_number(installed.seconds, 0),
        rivals.format_number(installed.megabytes, 0),
        str(installed.packages or ""),
        f"{first.seconds:.1f}",
        f"{second.seconds:.1f}",
        first.ttft or first.error,
        isolated_cell,
    ]


def print_uvx(args: Any) -> None:
    """Print what one command of uvx costs, from an empty cache to a full one."""
    wheels = [wheel.absolute() for wheel in args.wheel]
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure_uvx(args.uvx, wheels, Path(scratch))
    print(rig.format_table(["uvx with", "s", "MB", "packages", "result"], rows))


def print_tools(args: Any, parser: argparse.ArgumentParser) -> None:
    """Print install time, size and first load of each tool."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = rivals.find_tokenizer(args, parser, scratch)
        for tool in rivals.TOOLS:
            if tool.name not in INSTALLATIONS or (args.only and tool.name not in args.only):
                continue
            row = measure_tool(tool, tokenizer, Path(scratch), args)
            if row is None:
                print(f"{tool.name}: not installed")
            else:
                rows.append(row)

    columns = [
        "who",
        "steps",
        "install, s",
        "MB",
        "packages",
        "first load, s",
        "again, s",
        "TTFT p50 / true, ms",
    ]
    print(rig.format_table([*columns, "without tokenizer and Hub"], rows))


def main() -> None:
    """Print install time, size and first load of each tool, or of the wheel with uvx."""
    parser = rig.create_parser(__doc__)
    parser.add_argument(
        "--tokenizer", help="a folder with tokenizer.json, as benchmarks/gpu/weights.py makes it"
    )
    parser.add_argument("--install", type=Path, help="make fresh environments below this folder")
    parser.add_argument("--only", action="append", choices=INSTALLATIONS, help="a tool; repeatable")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=5.0, help="that a load may take")
    parser.add_argument(
        "--wheel", action="append", type=Path, help="a wheel: that of loadgen first; repeatable"
    )
    parser.add_argument("--uvx", default="uvx", help="the program uvx")

    args = rig.parse_arguments(parser, requests=4, lanes=2, only=["loadgen"])
    if args.wheel:
        print_uvx(args)
    else:
        print_tools(args, parser)


if __name__ == "__main__":
    main()
