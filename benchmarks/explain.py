"""How much of the difference between loadgen and other tools does `loadgen explain` explain?

    LOADGEN_SERVERS=DIR python benchmarks/explain.py --tokenizer FOLDER [--only NAME] [--out FOLDER]

loadgen and each installed tool of `rivals.py` send the same closed loop to one endpoint, one after
the other. The table has each metric that differs: both values, and the share of the difference that
the parts of `loadgen explain` add up to. The first share uses the two results only. The second one
also uses the log of what the endpoint sent to the other tool, which tells its client from the
server. For a tool that is not installed, a stored file of it is used: those of results/rivals, or
with `--files FOLDER` all files of a folder. Their log was not stored, so that of our own run is
used. It is the same, because the pace of this endpoint does not depend on the client.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import rig
import rivals

from loadgen.core.errors import UserError
from loadgen.explain.explanation import ExplainedDifference, explain_difference
from loadgen.explain.parts import PART_LABELS, REQUIRED_SHARE, ExplainedMetric

STORED_RESULTS = rig.BENCHMARKS_DIR.parent / "results/rivals"
STORED_NAMES = {
    "vllm": "vllm-quiet.json",
    "sglang": "sglang-quiet.jsonl",
    "aiperf": "aiperf-quiet.json",
}
"""The stored results of the situation "quiet" by the names of `rivals.TOOLS`."""

COLUMNS = (
    "tool",
    "metric",
    "loadgen",
    "tool",
    "difference",
    "explained",
    "with the log",
    "largest parts",
)


SERVER_TOKENS_OPTION = " --use-server-token-count"
"""The option of `rivals.TOOLS` with which AIPerf uses the token counts of the server.

By default, it counts tokens with its own tokenizer."""

SERVER_FIELDS = ("server:", "model:")
"""Differences that do not matter here: the same endpoint has another port in each run."""


class ExplainedPair(NamedTuple):
    """A result of another tool, explained without and with the log of the endpoint."""

    source: str
    without_log: ExplainedDifference
    with_log: ExplainedDifference


def list_tools(names: list[str] | None) -> Iterator[rivals.Tool]:
    """Yield the other tools, and AIPerf once more with the token counts of its tokenizer."""
    for tool in rivals.TOOLS:
        if tool.name == "loadgen" or (names and tool.name not in names):
            continue
        yield tool
        if SERVER_TOKENS_OPTION in tool.command:
            yield tool._replace(
                name=f"{tool.name}-tokenizer",
                command=tool.command.replace(SERVER_TOKENS_OPTION, ""),
            )


def run_our_load(url: str, output_dir: Path, args: argparse.Namespace, tokenizer: str) -> Path:
    """Send the load of `rivals.py` with loadgen and return the folder of the run."""
    tool = next(tool for tool in rivals.TOOLS if tool.name == "loadgen")
    output_dir.mkdir(parents=True)
    command = rivals.build_command(
        tool,
        tool.program,
        url,
        tokenizer,
        output_dir,
        args,
        input_tokens=args.input,
        output_tokens=args.output,
    )
    rivals.run_tool(
        command, output_dir / rivals.OUTPUT_FILE, is_starved=False, timeout_s=args.minutes * 60
    )
    return output_dir / "run"


def explain_installed_tool(
    tool: rivals.Tool, program: str, tokenizer: str, out: Path, args: argparse.Namespace
) -> ExplainedPair | None:
    """Measure one endpoint with loadgen and with a tool; return None if the tool has no result."""
    with rig.serve_endpoint(**rivals.OPTIONS) as server:
        our_run = run_our_load(server.url, out / "loadgen", args, tokenizer)
        rig.read_url(server.url + "/_log")  # empties the log

        tool_dir = out / tool.name
        tool_dir.mkdir()
        command = rivals.build_command(
            tool,
            program,
            server.url,
            tokenizer,
            tool_dir,
            args,
            input_tokens=args.input,
            output_tokens=args.output,
        )
        rivals.run_tool(
            command, tool_dir / rivals.OUTPUT_FILE, is_starved=False, timeout_s=args.minutes * 60
        )
        log_path = out / "endpoint.log"
        log_path.write_bytes(rig.read_url(server.url + "/_log"))

    result_path = tool_dir / tool.result
    if not result_path.exists():
        print(f"{tool.name}: no result; see {tool_dir / rivals.OUTPUT_FILE}")
        return None

    return ExplainedPair(
        source=f"{tool.name}, installed: {rivals.read_version(tool, program)}",
        without_log=explain_difference(our_run, result_path, allow_differences=True),
        with_log=explain_difference(
            our_run, result_path, allow_differences=True, server_log=log_path
        ),
    )


def explain_stored_files(
    files: list[Path], tokenizer: str, out: Path, args: argparse.Namespace
) -> Iterator[ExplainedPair]:
    """Yield stored results of other tools, explained by a run of loadgen on the same endpoint."""
    with rig.serve_endpoint(**build_endpoint_options(args)) as server:
        our_run = run_our_load(server.url, out / "loadgen", args, tokenizer)
        log_path = out / "endpoint.log"
        log_path.write_bytes(rig.read_url(server.url + "/_log"))

    for path in files:
        try:
            explanation = explain_difference(our_run, path, allow_differences=True)
            differences = [
                text for text in explanation.differences if not text.startswith(SERVER_FIELDS)
            ]
            if differences:
                print(f"{path.name}: another load, {'; '.join(differences)}")
                continue
            with_log = explain_difference(
                our_run, path, allow_differences=True, server_log=log_path
            )
        except UserError as error:
            print(f"{path.name}: {error.message}")
            continue
        yield ExplainedPair(f"{path.name}, a stored file", explanation, with_log)


def build_endpoint_options(args: argparse.Namespace) -> dict[str, str]:
    """Return the options of the endpoint. `--ttft` and `--itl` replace the times of `rivals.py`."""
    options = dict(rivals.OPTIONS)
    if args.ttft:
        options["ttft"] = args.ttft
    if args.itl:
        options["itl"] = args.itl
    return options


def create_rows(pair: ExplainedPair) -> Iterator[list[str]]:
    """Yield a row for each metric of a result that differs from ours."""
    with_log = {metric.metric: metric for metric in pair.with_log.metrics}
    for metric in pair.without_log.metrics:
        if metric.outcome == "equal":
            continue
        logged = with_log[metric.metric]
        yield [
            pair.without_log.tool,
            metric.label,
            f"{metric.ours:,.2f}",
            f"{metric.theirs:,.2f}",
            f"{metric.difference:+,.2f}",
            format_share(metric),
            format_share(logged),
            describe_largest_parts(logged),
        ]


def format_share(metric: ExplainedMetric) -> str:
    """Return the explained share, marked if chance explains the rest."""
    share = max(metric.explained_share or 0.0, 0.0)
    mark = " (rest by chance)" if metric.outcome == "within_variation" else ""
    return f"{share * 100:.0f} %{mark}"


def describe_largest_parts(metric: ExplainedMetric) -> str:
    """Return the two largest parts with their changes."""
    largest = sorted(metric.parts, key=lambda part: -abs(part.change))[:2]
    return ", ".join(f"{PART_LABELS[part.name]} {part.change:+,.2f}" for part in largest)


def summarize(pair: ExplainedPair) -> str:
    """Return for how many metrics of a result at least REQUIRED_SHARE is explained."""
    texts = []
    for name, explanation in (("without", pair.without_log), ("with", pair.with_log)):
        differing = [metric for metric in explanation.metrics if metric.outcome != "equal"]
        explained = [metric for metric in differing if metric.outcome == "explained"]
        by_chance = [metric for metric in differing if metric.outcome == "within_variation"]
        texts.append(
            f"{name} the log, {len(explained)} of {len(differing)} differences to at least "
            f"{REQUIRED_SHARE * 100:.0f} %, {len(by_chance)} more by chance"
        )
    return f"- {pair.source}: {'; '.join(texts)}"


def collect_pairs(tokenizer: str, out: Path, args: argparse.Namespace) -> Iterator[ExplainedPair]:
    """Yield a result of each tool that is installed or of which a file is stored."""
    if args.files:
        files = sorted(path for path in args.files.iterdir() if path.suffix.startswith(".json"))
        yield from explain_stored_files(files, tokenizer, out / "stored", args)
        return

    missing = []
    for tool in list_tools(args.only):
        program = rivals.find_program(tool)
        if not program:
            missing.append(tool.name)
            continue
        pair = explain_installed_tool(tool, program, tokenizer, out / f"with-{tool.name}", args)
        if pair is not None:
            yield pair

    stored = [STORED_RESULTS / STORED_NAMES[name] for name in missing if name in STORED_NAMES]
    unavailable = [name for name in missing if name.removesuffix("-tokenizer") not in STORED_NAMES]
    if unavailable:
        print(f"neither installed nor stored: {', '.join(unavailable)}")
    if stored:
        yield from explain_stored_files(stored, tokenizer, out / "stored", args)


def main() -> None:
    """Explain the results of all tools and print the shares."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--tokenizer", help="a folder with tokenizer.json")
    parser.add_argument("--only", action="append", help="a tool; repeatable")
    parser.add_argument("--files", type=Path, help="a folder with result files of other tools")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--lanes", type=int, default=8, help="virtual users")
    parser.add_argument("--input", type=int, default=rivals.INPUT, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=rivals.OUTPUT, help="tokens of a response")
    parser.add_argument("--ttft", default="", help="of the endpoint, with --files")
    parser.add_argument("--itl", default="", help="of the endpoint, with --files")
    parser.add_argument("--minutes", type=float, default=5.0, help="that a tool may take")
    parser.add_argument("--out", type=Path, help="folder of the raw files")
    args = rig.parse_arguments(parser, requests=32, lanes=8, only=["vllm"])

    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = rivals.find_tokenizer(args, parser, scratch)
        out = (args.out or Path(scratch)).absolute()
        pairs = list(collect_pairs(tokenizer, out, args))

    rows = [row for pair in pairs for row in create_rows(pair)]
    print(rig.format_table(COLUMNS, rows))
    print()
    for pair in pairs:
        print(summarize(pair))


if __name__ == "__main__":
    main()
