"""`loadgen compare A B [C...]`: what differs between results, and how certain that is.

With `--live` it measures the two targets itself, see `loadgen.compare.live_command`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli import completion
from loadgen.cli.invocation import Invocation
from loadgen.cli.option_parsers import parse_share_option
from loadgen.cli.options import DryRunOption, FullOption, add_options
from loadgen.cli.output import (
    print_result,
    refuse_two_formats,
    warn_if_changed,
    write_file,
)
from loadgen.core.errors import OK, UserError
from loadgen.result_kinds import reporting_damage

DEFAULT_CONFIDENCE = "95%"
DEFAULT_LIVE_CONFIDENCE = "99%"
"""A live comparison has more power, of which a part buys fewer false alarms."""


@add_options(
    without=("url", "keep"),
    help_texts={
        "repeat": "With --live: number of groups of four blocks, or until the metrics are known to "
        "a precision: auto,most=40,within=1%.",
        "duration": "With --live: time of all blocks together, for example 20m.",
        "num_requests": "With --live: number of requests of each block.",
        "warmup": "With --live: load before each block that is not measured: 10s, 20req, or 0.",
        "concurrency": "With --live: closed loop, number of concurrent requests.",
        "request_rate": "With --live: open loop, requests per second.",
        "seed": "Random seed of the order of the blocks, and of the load of each pair of blocks.",
        "out": "With --live: results folder. The same command with the same folder resumes it.",
        "force": "With --save: replace a baseline of the same name. With --live: rename a folder "
        "that holds results.",
        "targets": "YAML list of servers, each with name, url, api_key_env and more. --live then "
        "takes two of the names.",
    },
    default_texts={"repeat": "blocks of 15 s", "duration": "blocks as long as the workload"},
)
def compare(
    invocation: Invocation,
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            help=(
                "Folders of runs, repeats or searches, or result files of other tools. All are "
                "compared with the first. With --live: the workload."
            ),
            autocompletion=completion.complete_result,
        ),
    ] = None,
    live: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--live",
            metavar="URL_A URL_B",
            help="Send the workload to two servers in alternating blocks, and compare them.",
        ),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            metavar="CONDITION",
            help=(
                "Exit 1 if the condition is true, like 'ttft_ms.p99 > +5%' (a change, needs "
                "repeats) or 'goodput.share < 99%' (a value). Repeatable."
            ),
        ),
    ] = None,
    beyond_noise: Annotated[
        bool,
        typer.Option(
            "--beyond-noise", help="Fail only if the whole confidence interval exceeds the limit."
        ),
    ] = False,
    save: Annotated[
        str | None,
        typer.Option(
            "--save", metavar="NAME", help="Save one result as a baseline and compare nothing."
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="NAME",
            help="Compare with the baseline that was saved with this name.",
            autocompletion=completion.complete_baseline,
        ),
    ] = None,
    baselines_dir: Annotated[
        Path,
        typer.Option("--in", metavar="FOLDER", help="Folder of the baselines, to commit to git."),
    ] = Path("baselines"),
    confidence: Annotated[
        str | None,
        typer.Option(
            "--confidence",
            metavar="SHARE",
            help="Confidence level of all metrics together.",
            show_default=f"{DEFAULT_CONFIDENCE}, with --live {DEFAULT_LIVE_CONFIDENCE}",
        ),
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Judge the metrics even if the workloads differ.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print JSON.")
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", rich_help_panel="Output", help="Print Markdown.")
    ] = False,
    full: FullOption = False,
    dry_run: DryRunOption = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write an HTML report.")
    ] = None,
    junit: Annotated[
        Path | None,
        typer.Option("--junit", metavar="FILE", help="Also write JUnit XML."),
    ] = None,
) -> int:
    """Compare results with the first one, metric by metric, with confidence intervals.

    Only repeated runs on both sides (loadgen run --repeat 3) can be better or worse. Single runs
    can only differ. With --live, the command measures two servers itself, in turn.

    Exit: 0 done, 1 a condition of --fail-on is true, 2 wrong usage, 3 a result is INVALID, 4 a
    condition is inconclusive, 130 interrupted.

    Example: loadgen compare before after --fail-on 'ttft_ms.p99 > +5%'
    """
    from loadgen.compare import baselines, compare_text, comparison, live_command, thresholds
    from loadgen.compare.exit_code import comparison_exit_code
    from loadgen.compare.side_reader import read_sides
    from loadgen.render import html as html_renderer
    from loadgen.render import junit as junit_renderer

    refuse_two_formats(as_json=as_json, as_markdown=as_markdown)
    results = results or []
    if live is not None:
        _refuse_baselines(save, against)
        options = live_command.LiveOptions(
            targets=live,
            confidence=_parse_confidence(confidence or DEFAULT_LIVE_CONFIDENCE),
            conditions=tuple(fail_on or ()),
            is_beyond_noise=beyond_noise,
            allows_different_work=anyway,
            is_dry_run=dry_run,
            as_json=as_json,
            as_markdown=as_markdown,
            full=full,
            html=html,
            junit=junit,
        )
        return live_command.compare_live(invocation, results, options)

    live_command.refuse_load_options(invocation)
    if save is not None:
        if against is not None or len(results) != 1:
            text = "--save takes one result and compares nothing"
            raise UserError("conflict", text, f"--save {save}", "give one folder")
        print(
            baselines.save_baseline(
                save, results[0], baselines_dir, force=bool(invocation["force"])
            )
        )
        return OK

    if against is not None:
        results = [baselines.find_baseline(against, baselines_dir), *results]

    if len(results) < 2:
        raise _too_few_results_error(results)

    for folder in results:
        warn_if_changed(folder)

    confidence_level = _parse_confidence(confidence or DEFAULT_CONFIDENCE)
    conditions = thresholds.parse_thresholds(fail_on or ())

    sides = read_sides(results)
    with reporting_damage(*results):
        result = comparison.compare(
            sides,
            extra_metrics=[condition.metric for condition in conditions],
            confidence=confidence_level,
            allow_different_work=anyway,
        )

    outcomes = list(thresholds.check_thresholds(conditions, result, beyond_noise=beyond_noise))
    report = compare_text.build_report(result, outcomes)
    document = {"comparison": result, "conditions": outcomes}
    print_result(document, report, as_json=as_json, as_markdown=as_markdown, full=full)

    if html is not None:
        write_file(html, html_renderer.render(report), "--html")

    if junit is not None:
        cases = list(compare_text.list_junit_cases(result, outcomes))
        write_file(junit, junit_renderer.render("loadgen compare", cases), "--junit")

    return comparison_exit_code(result, outcomes)


def _too_few_results_error(results: Sequence[Path]) -> UserError:
    """Return the error for fewer than two results, one of which may be a live comparison."""
    from loadgen.compare.live_plan import PLAN_FILE

    if results and (results[0] / PLAN_FILE).is_file():
        return UserError(
            "unsupported",
            "this is a live comparison, which has compared its two sides already",
            str(results[0]),
            f"read it with: loadgen report {results[0]}",
        )
    return UserError(
        "too_few",
        "a comparison needs at least two results",
        " ".join(map(str, results)),
        "give two or more, or --against NAME",
    )


def _refuse_baselines(save: str | None, against: str | None) -> None:
    """Raise UserError for a baseline in a live comparison, which stores its own result."""
    for option, name in (("--save", save), ("--against", against)):
        if name is not None:
            raise UserError(
                "conflict",
                f"--live measures both sides, so {option} has no meaning",
                f"{option} {name}",
                "leave it out",
            )


def _parse_confidence(text: str) -> float:
    """Return the value of `--confidence` as a fraction. Raises UserError if it is out of range."""
    confidence = parse_share_option("--confidence", text)
    if not 0.5 <= confidence < 1:
        raise UserError(
            "invalid_value", "must be from 50% to 99.9%", f"--confidence {text}", "like 95%"
        )
    return confidence
