"""docs/evidence/features.md between its marks: rows and what their checks said."""

from __future__ import annotations

from pathlib import Path

from answer_rows import EVIDENCE, FLEETS, FOREIGN_FORMATS, JUDGEMENT, METRICS, MONEY, SDK, TRUTH
from feature_bench import ROOT, Bench, verdict
from load_rows import CONTENT, DOORS, LOAD
from other_rows import SEEN, TOOLS, verdicts

PAGE = ROOT / "docs/evidence/features.md"
BEGIN = "<!-- features: made by tests/make_features.py, which runs each check -->"
END = "<!-- end of the features -->"
OTHERS_HEAD = """
## Result files of other tools

We ran three other load generators ([other load generators](rivals.md)), and looked into the
result files that they wrote. The table says which information these files contained on the day in
the heading:
"""
MISSING_HEAD = """
These features are missing on purpose, or are only partly there:
"""
GROUPS = {
    "Arrival of requests": LOAD,
    "Content of requests": CONTENT,
    "APIs and servers": DOORS,
    "Metrics": METRICS,
    "Validity": TRUTH,
    "Verdicts": JUDGEMENT,
    "Evidence": EVIDENCE,
    "Costs": MONEY,
    "Formats of other tools": FOREIGN_FORMATS,
    "Operations": FLEETS,
    "SDK": SDK,
}
INTRODUCTIONS = {
    "Arrival of requests": "loadgen can start requests in these ways:",
    "Content of requests": "loadgen can send these kinds of requests:",
    "APIs and servers": "loadgen can measure servers with these APIs and properties:",
    "Metrics": "A result can contain these metrics:",
    "Validity": "loadgen checks in these ways whether a measurement is correct:",
    "Verdicts": "A measurement can end with these kinds of results:",
    "Evidence": "Other people can read and check results in these ways:",
    "Costs": "loadgen can compute these costs, and use these prices:",
    "Formats of other tools": "loadgen can read or write these formats of other tools:",
    "Operations": "loadgen can run in these environments, and use these sources of data:",
    "SDK": "The SDK measures the requests of an application, and can do this:",
}
"""A sentence before the list of each group."""


def tables(folder: Path) -> str:
    """Return all tables; the checks run in this empty folder."""
    bench = Bench(folder)
    lines, lacking, count = [], [], {"yes": 0, "partly": 0, "no": 0}
    for group, features in GROUPS.items():
        lines += ["", f"## {group}", "", INTRODUCTIONS[group], ""]
        for feature in features:
            outcome, absent = verdict(feature, bench)
            count[outcome] += 1
            if outcome == "yes":
                lines.append(f"- {feature.name}")
            else:
                lacking.append(
                    f"- **{feature.name}** ({outcome}): {feature.exclusion_reason or absent}"
                )
    totals = (
        f"{sum(count.values())} features: "
        + ", ".join(f"{number} {outcome}" for outcome, number in count.items())
        + "."
    )
    heads = [f"{tool.name} {tool.version}, {tool.seen}" for tool in TOOLS]
    lines += [
        OTHERS_HEAD,
        f"| information in the result file | {' | '.join(heads)} |",
        "|---|" + "---|" * len(heads),
    ]
    lines += [f"| {row.name} | {' | '.join(verdicts(row))} |" for row in SEEN]
    return "\n".join([totals, MISSING_HEAD, *lacking, *lines])


def page(folder: Path) -> str:
    """Return the page with the results of today's checks."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(folder)}\n\n{END}{rest.partition(END)[2]}"
