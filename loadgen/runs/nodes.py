"""The variance table of a rack and the node that stands out, as rows and sentences for text and pages. Pure."""

from __future__ import annotations

from loadgen.core import format
from loadgen.core.metrics.sections import BetweenNodes
from loadgen.figures import words


def rows(found: BetweenNodes) -> list[tuple[str, ...]]:
    """The variance table: per latency its mean, and the share and standard deviation of each component."""
    return [
        (
            words(one.metric),
            format.milliseconds(one.mean_ms),
            *(
                f"{format.percent(getattr(one, f'{name}_share'))} ({format.milliseconds(getattr(one, f'{name}_ms'))})"
                for name in ("between", "time", "own_time", "within")
            ),
        )
        for one in found.variances
    ]


def head(found: BetweenNodes) -> tuple[str, ...]:
    return (
        "share of variance (sd, ms)",
        "steady mean, ms",
        f"between {found.compared}s",
        "over time",
        "own course",
        "within",
    )


def sentences(found: BetweenNodes) -> list[str]:
    """Which nodes stand out, and by how much; that none does; or why nothing can be said."""
    if not found.compared:
        return [f"Nothing is said of the spread between nodes: {found.why}."] if found.nodes else []
    said = [
        f"{one.name} stands out: {words(one.metric)} {format.milliseconds(one.mean_ms)} ms, "
        f"{format.percent(abs(one.change))} {'above' if one.change > 0 else 'below'} the mean of the others "
        f"({format.milliseconds(one.others_ms)} ms)."
        for one in found.outliers
    ]
    if not said and found.nodes < 3:
        said = [f"Two {found.compared}s: which of them stands out cannot be told."]
    elif not said:
        said = [
            f"No {found.compared} stands out: each of {found.nodes} belongs to the spread of the others "
            f"({found.level * 100:g} %, all {found.compared}s and latencies together)."
        ]
    if found.silent:
        said.append(f"Too few answers to compare: {', '.join(found.silent)}.")
    return said
