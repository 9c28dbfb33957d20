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

What the result files of other tools contained on the day in the heading
([other load generators](rivals.md)).
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


def tables(folder: Path) -> str:
    """Return all tables; the checks run in this empty folder."""
    bench = Bench(folder)
    lines, lacking, count = [], [], {"yes": 0, "partly": 0, "no": 0}
    for group, features in GROUPS.items():
        lines += ["", f"## {group}", ""]
        for feature in features:
            outcome, absent = verdict(feature, bench)
            count[outcome] += 1
            if outcome == "yes":
                lines.append(f"- {feature.name}")
            else:
                lacking.append(
                    f"| {feature.name} | {outcome} | {feature.exclusion_reason or absent} |"
                )
    totals = (
        f"{sum(count.values())} features: "
        + ", ".join(f"{number} {outcome}" for outcome, number in count.items())
        + "."
    )
    heads = [f"{tool.name} {tool.version}, {tool.seen}" for tool in TOOLS]
    lines += [
        OTHERS_HEAD,
        f"| in the result file | {' | '.join(heads)} |",
        "|---|" + "---|" * len(heads),
    ]
    lines += [f"| {row.name} | {' | '.join(verdicts(row))} |" for row in SEEN]
    return "\n".join([totals, "", "| missing | | why |", "|---|---|---|", *lacking, *lines])


def page(folder: Path) -> str:
    """Return the page with the results of today's checks."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(folder)}\n\n{END}{rest.partition(END)[2]}"
