"""How much of the difference between loadgen and other tools does `loadgen explain` explain?

    LOADGEN_SERVERS=DIR python benchmarks/explain.py --tokenizer FOLDER [--only NAME] [--out FOLDER]

loadgen and each installed tool of `rivals.py` send the same closed loop to one endpoint, one after
the other. The table has each metric that differs: both values, and the share of the difference that
the parts of `loadgen explain` add up to. The first share uses the two results only. The second one
also uses the log of what the endpoint sent to the other tool, so that it can tell delays of the
client from those of the server.

For a tool that is not installed, a stored result file is used: those of results/rivals, or with
`--files FOLDER` all files of a folder. Their log was not stored, so the log of a run of loadgen is
used. Both logs have the same pace, because the pace of this endpoint does not depend on the client.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import rig
import rivals

from loadgen.core.errors import UserError
from loadgen.explain.explanation import ExplainedDifference, explain_difference
from loadgen.explain.parts import PART_LABELS, REQUIRED_SHARE, ExplainedMetric

STORED_RESULTS_DIR = rig.BENCHMARKS_DIR.parent / "results/rivals"
STORED_FILES = {
    "vllm": "vllm-quiet.json",
    "sglang": "sglang-quiet.jsonl",
    "aiperf": "aiperf-quiet.json",
}
"""The stored results of the situation "quiet", by the name of the tool."""

SERVER_TOKEN_COUNT_OPTION = "--use-server-token-count"
"""The option of AIPerf that reports the token counts of the server.

Without it, AIPerf counts tokens with its own tokenizer."""

IGNORED_DIFFERENCES = ("server:", "model:")
"""The begin of differences between runs that do not matter: the endpoint has another port."""


# -- run the tools --


class ToolVariant(NamedTuple):
    """A tool with one set of its options. Variants of the same tool have different names."""

    name: str
    tool: rivals.Tool


def list_variants(only: Sequence[str] | None) -> list[ToolVariant]:
    """Return the other tools, and AIPerf once more with the token counts of its own tokenizer.

    `only` has the names of the tools, or is None for all of them.
    """
    variants = []
    for tool in rivals.TOOLS:
        if tool.name == rivals.LOADGEN.name or (only and tool.name not in only):
            continue

        variants.append(ToolVariant(tool.name, tool))
        if SERVER_TOKEN_COUNT_OPTION in tool.command:
            command = tool.command.replace(SERVER_TOKEN_COUNT_OPTION, "")
            with_own_counts = tool._replace(command=command)
            variants.append(ToolVariant(f"{tool.name}-tokenizer", with_own_counts))

    return variants


def send_load(
    tool: rivals.Tool, program: str, url: str, output_dir: Path, load: rivals.Load
) -> Path:
    """Send the load with a tool and return the path of its result file."""
    output_dir.mkdir(parents=True)
    command = rivals.build_command(tool, program, url, output_dir, load)
    rivals.run_tool(command, output_dir, timeout_s=load.timeout_s)
    return output_dir / tool.result_file


def run_loadgen(url: str, output_dir: Path, load: rivals.Load) -> Path:
    """Send the load with loadgen and return the folder of its run."""
    return send_load(rivals.LOADGEN, rivals.LOADGEN.program, url, output_dir, load).parent


def save_endpoint_log(url: str, path: Path) -> None:
    """Save what the endpoint sent since the last call of this function for it."""
    path.write_bytes(rig.read_url(url + "/_log"))


# -- explain their results --


class ExplainedResult(NamedTuple):
    """The result of another tool, explained without and with the log of the endpoint."""

    source: str
    without_log: ExplainedDifference
    with_log: ExplainedDifference


def explain_result(source: str, our_run: Path, result_path: Path, log: Path) -> ExplainedResult:
    """Explain how a result file differs from a run of loadgen.

    Raises UserError if `loadgen explain` cannot read or compare the file.
    """
    return ExplainedResult(
        source=source,
        without_log=explain_difference(our_run, result_path, allow_differences=True),
        with_log=explain_difference(our_run, result_path, allow_differences=True, server_log=log),
    )


def explain_installed_tool(
    variant: ToolVariant, program: str, output_dir: Path, load: rivals.Load
) -> ExplainedResult | None:
    """Measure one endpoint with loadgen and with a tool, and explain the difference.

    Returns None if the tool wrote no result.
    """
    tool = variant.tool
    log_path = output_dir / "endpoint.log"
    with rig.serve_endpoint(**rivals.ENDPOINT_OPTIONS) as server:
        our_run = run_loadgen(server.url, output_dir / "loadgen", load)
        save_endpoint_log(server.url, output_dir / "endpoint-loadgen.log")
        result_path = send_load(tool, program, server.url, output_dir / variant.name, load)
        save_endpoint_log(server.url, log_path)

    if not result_path.exists():
        tool_output = output_dir / variant.name / rivals.OUTPUT_FILE
        print(f"{variant.name}: no result; see {tool_output}")
        return None

    source = f"{variant.name}, installed: {rivals.read_version(tool, program)}"
    return explain_result(source, our_run, result_path, log_path)


def explain_stored_files(
    files: Sequence[Path], output_dir: Path, args: argparse.Namespace, load: rivals.Load
) -> Iterator[ExplainedResult]:
    """Yield stored results of other tools, explained by a new run of loadgen.

    Files that are results of another load, and files that cannot be read, are left out, and the
    reason is printed.
    """
    log_path = output_dir / "endpoint.log"
    with rig.serve_endpoint(**create_endpoint_options(args)) as server:
        our_run = run_loadgen(server.url, output_dir / "loadgen", load)
        save_endpoint_log(server.url, log_path)

    for path in files:
        try:
            explained = explain_result(f"{path.name}, a stored file", our_run, path, log_path)
        except UserError as error:
            print(f"{path.name}: {error.message}")
            continue

        load_differences = [
            difference
            for difference in explained.without_log.differences
            if not difference.startswith(IGNORED_DIFFERENCES)
        ]
        if load_differences:
            print(f"{path.name}: another load, {'; '.join(load_differences)}")
            continue

        yield explained


def create_endpoint_options(args: argparse.Namespace) -> dict[str, str]:
    """Return the options of the endpoint. `--ttft` and `--itl` replace the times of `rivals.py`."""
    options = dict(rivals.ENDPOINT_OPTIONS)
    if args.ttft:
        options["ttft"] = args.ttft
    if args.itl:
        options["itl"] = args.itl
    return options


def explain_all(
    output_dir: Path, args: argparse.Namespace, load: rivals.Load
) -> Iterator[ExplainedResult]:
    """Yield the results of all tools that are installed, or of which a file is stored.

    With `--files`, yield those of the files only.
    """
    stored_dir = output_dir / "stored"
    if args.files:
        files = sorted(path for path in args.files.iterdir() if path.suffix.startswith(".json"))
        yield from explain_stored_files(files, stored_dir, args, load)
        return

    stored_files = []
    for variant in list_variants(args.only):
        program = rivals.find_program(variant.tool)
        if program is not None:
            variant_dir = output_dir / f"with-{variant.name}"
            explained = explain_installed_tool(variant, program, variant_dir, load)
            if explained is not None:
                yield explained
        elif variant.name in STORED_FILES:
            stored_files.append(STORED_RESULTS_DIR / STORED_FILES[variant.name])
        elif variant.tool.name not in STORED_FILES:
            print(f"{variant.name}: neither installed nor stored")

    if stored_files:
        yield from explain_stored_files(stored_files, stored_dir, args, load)


# -- print --


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


def create_rows(result: ExplainedResult) -> Iterator[list[str]]:
    """Yield the cells of each metric that differs from ours, in the order of COLUMNS."""
    metrics_with_log = {metric.metric: metric for metric in result.with_log.metrics}
    for metric in result.without_log.metrics:
        if metric.outcome == "equal":
            continue

        metric_with_log = metrics_with_log[metric.metric]
        yield [
            result.without_log.tool,
            metric.label,
            f"{metric.ours:,.2f}",
            f"{metric.theirs:,.2f}",
            f"{metric.difference:+,.2f}",
            format_explained_share(metric),
            format_explained_share(metric_with_log),
            describe_largest_parts(metric_with_log),
        ]


def format_explained_share(metric: ExplainedMetric) -> str:
    """Return the explained share of a difference in %, marked if chance explains the rest."""
    share = max(metric.explained_share or 0.0, 0.0)
    mark = " (rest by chance)" if metric.outcome == "within_variation" else ""
    return f"{share * 100:.0f} %{mark}"


def describe_largest_parts(metric: ExplainedMetric) -> str:
    """Return the two parts that explain most of a difference, with their signs."""
    largest_parts = sorted(metric.parts, key=lambda part: abs(part.change), reverse=True)[:2]
    return ", ".join(f"{PART_LABELS[part.name]} {part.change:+,.2f}" for part in largest_parts)


def summarize_result(result: ExplainedResult) -> str:
    """Return how many differences of a result are explained, without and with the log."""
    without_log = count_explained(result.without_log)
    with_log = count_explained(result.with_log)
    return f"- {result.source}: without the log, {without_log}; with the log, {with_log}"


def count_explained(explanation: ExplainedDifference) -> str:
    """Return how many of the differences are explained to at least REQUIRED_SHARE, as a text."""
    differing = [metric for metric in explanation.metrics if metric.outcome != "equal"]
    explained = [metric for metric in differing if metric.outcome == "explained"]
    by_chance = [metric for metric in differing if metric.outcome == "within_variation"]
    return (
        f"{len(explained)} of {len(differing)} differences to at least "
        f"{REQUIRED_SHARE * 100:.0f} %, {len(by_chance)} more by chance"
    )


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    rivals.add_load_options(parser, rivals.TOOL_NAMES, default_requests=32)
    parser.add_argument("--files", type=Path, help="a folder with result files of other tools")
    parser.add_argument("--input", type=int, default=rivals.INPUT_TOKENS, help="tokens of a prompt")
    parser.add_argument(
        "--output", type=int, default=rivals.OUTPUT_TOKENS, help="tokens of a response"
    )
    parser.add_argument("--ttft", default="", help="of the endpoint, with --files")
    parser.add_argument("--itl", default="", help="of the endpoint, with --files")
    parser.add_argument("--out", type=Path, help="folder of the raw files")
    return rig.parse_arguments(parser, only=["vllm"])


def main() -> None:
    """Explain the results of all tools and print the shares."""
    args = parse_command_line()
    with tempfile.TemporaryDirectory() as scratch:
        load = rivals.create_load(args, Path(scratch), args.input, args.output)
        output_dir = (args.out or Path(scratch)).absolute()
        results = list(explain_all(output_dir, args, load))

    rows = [row for result in results for row in create_rows(result)]
    print(rig.format_table(COLUMNS, rows))
    print()
    for result in results:
        print(summarize_result(result))


if __name__ == "__main__":
    main()
