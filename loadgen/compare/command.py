"""`loadgen compare A B [C...]`: what differs between results, and how certain that is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli import completion
from loadgen.cli.option_parsers import parse_share_option
from loadgen.cli.options import FullOption
from loadgen.cli.output import print_result, warn_if_changed, write_file
from loadgen.core.errors import INCONCLUSIVE, OK, SLO_MISSED, UNSOUND, UserError
from loadgen.result_kinds import reporting_damage

if TYPE_CHECKING:
    from loadgen.compare.comparison import Comparison
    from loadgen.compare.thresholds import ThresholdOutcome


def compare(
    results: Annotated[
        list[Path],
        typer.Argument(
            help=(
                "Folders of runs, repeats or searches, or result files of other tools. All are "
                "compared with the first."
            ),
            autocompletion=completion.complete_result,
        ),
    ],
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
    force: Annotated[
        bool, typer.Option("--force", help="With --save: replace a baseline of the same name.")
    ] = False,
    confidence: Annotated[
        str,
        typer.Option(
            "--confidence", metavar="SHARE", help="Confidence level of all metrics together."
        ),
    ] = "95%",
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
    can only differ.

    Exit: 0 done, 1 a condition of --fail-on is true, 2 wrong usage, 3 a result is INVALID, 4 a
    condition is inconclusive.

    Example: loadgen compare before after --fail-on 'ttft_ms.p99 > +5%'
    """
    from loadgen.compare import baselines, compare_text, comparison, thresholds
    from loadgen.compare.side_reader import read_sides
    from loadgen.render import html as html_renderer
    from loadgen.render import junit as junit_renderer

    if save is not None:
        if against is not None or len(results) != 1:
            text = "--save takes one result and compares nothing"
            raise UserError("conflict", text, f"--save {save}", "give one folder")
        print(baselines.save_baseline(save, results[0], baselines_dir, force=force))
        return OK

    if against is not None:
        results = [baselines.find_baseline(against, baselines_dir), *results]

    if len(results) < 2:
        text = "a comparison needs at least two results"
        where = " ".join(map(str, results))
        raise UserError("too_few", text, where, "give two or more, or --against NAME")

    for folder in results:
        warn_if_changed(folder)

    confidence_level = _parse_confidence(confidence)
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

    return _exit_code(result, outcomes)


def _exit_code(comparison: Comparison, outcomes: Sequence[ThresholdOutcome]) -> int:
    """Return the exit code of the command.

    An INVALID run decides before the conditions of `--fail-on`, and a condition that holds before
    one that is undecided.
    """
    if not comparison.valid:
        return UNSOUND
    if any(outcome.failed for outcome in outcomes):
        return SLO_MISSED
    if any(outcome.failed is None for outcome in outcomes):
        return INCONCLUSIVE
    return OK


def _parse_confidence(text: str) -> float:
    """Return the value of `--confidence` as a fraction. Raises UserError if it is out of range."""
    confidence = parse_share_option("--confidence", text)
    if not 0.5 <= confidence < 1:
        raise UserError(
            "invalid_value", "must be from 50% to 99.9%", f"--confidence {text}", "like 95%"
        )
    return confidence
