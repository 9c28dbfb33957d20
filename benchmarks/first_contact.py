"""From nothing to the first figure of a local endpoint: steps, seconds, MB, for this tool and others.

    python benchmarks/first_contact.py --tokenizer FOLDER --install DIR [--only guidellm]
    LOADGEN_SERVERS=DIR python benchmarks/first_contact.py --tokenizer FOLDER      # with what is installed already

With --install each tool goes into a fresh environment below DIR, by `pip install --no-cache-dir` of its released
version (of this one: the checkout), timed and weighed. Then the command that its documentation shows sends 32
requests, eight at once, to an endpoint whose log is the truth, twice: the first time its modules are compiled and
its caches filled. Then once more as on a network without the Hub, and without a tokenizer of the model. Commands
and results are those of `rivals.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import rig
import rivals

URL_OF_NOBODY = "http://127.0.0.1:9"  # what asks the network is refused at once


class Way(NamedTuple):
    """How a tool is come by. Steps: what is typed or brought, each one thing. `bare`: what it takes in the place of
    `--tokenizer FOLDER` where there is none.
    """

    requirement: str
    steps: str
    bare: str = ""


WAYS = {
    "loadgen": Way(str(rig.BENCHMARKS_DIR.parent), "install, run"),
    "guidellm": Way("guidellm==0.8.1", "install, a tokenizer, run"),
    "aiperf": Way("aiperf==0.13.0", "install, run", " --tokenizer builtin"),
    "vllm": Way("vllm==0.32.0", "install, a tokenizer, run", " --skip-tokenizer-init"),
}


class Installed(NamedTuple):
    """`program`: what is started. seconds, megabytes: None where it was there already, or cannot be weighed."""

    program: str
    seconds: float | None
    megabytes: float | None
    packages: int | None = None


def install(tool: rivals.Tool, at: Path) -> Installed:
    """A fresh environment with a tool, as its users make one."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", at], check=True)
    pip: list[str | Path] = [
        at / "bin" / "pip",
        "install",
        "-q",
        "--no-cache-dir",
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, WAYS[tool.name].requirement], check=True, stderr=subprocess.DEVNULL)
    seconds = time.monotonic() - began
    name = Path(tool.program).name if tool.environment else "python"
    return Installed(str(at / "bin" / name), seconds, *weigh(at))


def weigh(environment: Path) -> tuple[float, int]:
    """MB on the disk, links counted once, and the number of packages."""
    sizes = {
        (stat.st_dev, stat.st_ino): stat.st_blocks * 512
        for stat in map(os.lstat, environment.rglob("*"))
    }
    return sum(sizes.values()) / 1e6, len(
        [*environment.glob("lib/python3*/site-packages/*.dist-info")]
    )


def found(tool: rivals.Tool) -> Installed | None:
    """The one that is installed, with its weight where it has an environment of its own."""
    program = rivals.program(tool)
    if not program:
        return None
    weight = weigh(Path(program).parents[1]) if tool.environment else (None, None)
    return Installed(program, None, *weight)


def complaint(text: str) -> str:
    """What a tool says that went wrong: its last line with the name of an error, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(?i)error\b|offline", line)]
    return next(iter([*errors[-1:], *lines[-1:]]), "nothing")


def drive(
    tool: rivals.Tool, program: str, tokenizer: str, out: Path, given: Any
) -> tuple[float, str, str]:
    """One load: its seconds, from the command to its end, TTFT p50 beside the truth, and what went wrong.

    tokenizer: "" leaves it out, and no package or model can be asked for.
    """
    out.mkdir(parents=True)
    with rig.serve_endpoint(**rivals.OPTIONS) as server:
        command = rivals.command(tool, program, server.url, tokenizer or "none", out, given)
        if not tokenizer:
            command = re.sub(r" --tokenizer \S+", WAYS[tool.name].bare, command)
            command = f"env NO_PROXY=127.0.0.1 HTTPS_PROXY={URL_OF_NOBODY} {command}"
        began = time.monotonic()
        rivals.drive(command, out / "said.txt", starved=False, at_most_s=given.minutes * 60)
        seconds = time.monotonic() - began
        log = rig.read_url(server.url + "/_log")
    if not (out / tool.result).exists():
        return seconds, "", complaint((out / "said.txt").read_text("utf-8", errors="replace"))
    (said, itself), truth = rivals.told(tool, out), rivals.true(log)
    verdict = itself.partition(":")[0] if tool.name == "loadgen" else ""
    return seconds, f"{said.ttft or 0:.1f} / {truth.ttft or 0:.1f} {verdict}".strip(), ""


def main() -> None:
    parser = rig.create_parser(__doc__)
    parser.add_argument(
        "--tokenizer", help="a folder with tokenizer.json, as benchmarks/gpu/weights.py makes it"
    )
    parser.add_argument("--install", type=Path, help="make fresh environments below this folder")
    parser.add_argument("--only", action="append", choices=WAYS, help="a tool; repeatable")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=5.0, help="that a load may take")
    args = rig.parse_arguments(parser, requests=4, lanes=2, only=["loadgen"])
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = rivals.tokenizer_of(args, parser, scratch)
        for tool in rivals.TOOLS:
            if tool.name not in WAYS or (args.only and tool.name not in args.only):
                continue
            installed = install(tool, args.install / tool.name) if args.install else found(tool)
            if installed is None:
                print(f"{tool.name}: not installed")
                continue
            runs = [
                drive(tool, installed.program, tokenizer, Path(scratch) / f"{tool.name}-{n}", args)
                for n, tokenizer in enumerate([folder, folder, ""])
            ]
            (first, ttft, wrong), (second, *_), (alone, alone_ttft, alone_wrong) = runs
            rows.append(
                [
                    tool.name,
                    WAYS[tool.name].steps,
                    rivals.shown(installed.seconds, 0),
                    rivals.shown(installed.megabytes, 0),
                    str(installed.packages or ""),
                    f"{first:.1f}",
                    f"{second:.1f}",
                    ttft or wrong,
                    f"{alone:.1f} s" if alone_ttft else f"no: {alone_wrong[:110]}",
                ]
            )
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


if __name__ == "__main__":
    main()
