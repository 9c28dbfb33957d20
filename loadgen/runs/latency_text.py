"""The latencies of a run: which metrics a table shows, and what the table does not show by itself.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from loadgen.core import format
from loadgen.core.stats.quantiles import Distribution
from loadgen.figures import METRICS, MetricDefinition

if TYPE_CHECKING:
    from loadgen.core.metrics.request_counts import Stalls
    from loadgen.core.metrics.summary import Summary

MS_PER_S = 1000


class MetricRow(NamedTuple):
    """A metric of a run: its definition and its distribution."""

    definition: MetricDefinition
    distribution: Distribution


def latency_rows(summary: Summary) -> list[MetricRow]:
    """Return the latencies of a run in the order of the table, each with its definition.

    A metric that repeats the numbers of another one in the table is left out. Metrics of plug-ins
    that are not installed come last, with their key as a label.
    """
    by_name = {row.definition.name: row.distribution for row in measured_metrics(summary)}
    rows = [
        MetricRow(definition, by_name[definition.name])
        for definition in METRICS.shown_in("latency")
        if definition.name in by_name and not _is_redundant(definition, by_name)
    ]
    return [*rows, *_rows_of_missing_plugins(summary)]


def _is_redundant(
    definition: MetricDefinition, distribution_by_name: dict[str, Distribution]
) -> bool:
    """Return whether the table of latencies omits a metric, because another row has its values.

    The inter-chunk latency is omitted if there is an ITL, since the ITL is computed from it. For
    other metrics, `hidden_if_same_as` names a metric that often has the same values: TTFT from the
    time of sending equals TTFT unless requests were sent late. The two are regarded as the same if
    their medians are equal, because a difference in only a few requests needs no row.
    """
    if definition.name == "inter_chunk":
        return "itl" in distribution_by_name
    similar_distribution = distribution_by_name.get(definition.hidden_if_same_as)
    if similar_distribution is None:
        return False
    distribution = distribution_by_name[definition.name]
    return distribution.p50 == similar_distribution.p50


def _rows_of_missing_plugins(summary: Summary) -> Iterator[MetricRow]:
    known_fields = {definition.field for definition in METRICS.available()}
    for field, distribution in summary.other_metrics.items():
        if field not in known_fields:
            meaning = "metric of a plug-in that is not installed"
            definition = MetricDefinition(name=field, label=field, meaning=meaning)
            yield MetricRow(definition, distribution)


def client_rows(summary: Summary) -> list[MetricRow]:
    """Return the delays and timestamp uncertainties of the load generator itself."""
    return [
        row
        for row in measured_metrics(summary)
        if "client" in row.definition.places
        and (row.distribution.count or not row.definition.block)
    ]


def measured_metrics(summary: Summary) -> Iterator[MetricRow]:
    """Yield every metric that a summary has, with its definition."""
    for definition in METRICS.available():
        if definition.block:
            distribution = summary.other_metrics.get(definition.field)
        else:
            distribution = getattr(summary, definition.field)
        if distribution is not None:
            yield MetricRow(definition, distribution)


def label_with_unit(definition: MetricDefinition) -> str:
    """Return the label of a metric in a table of ms; another unit is part of the label."""
    if definition.unit == "ms":
        return definition.label
    return f"{definition.label}, {definition.unit}"


def latency_notes(summary: Summary) -> Iterator[str]:
    """Yield sentences that explain the table of latencies.

    They say why a metric is not in the table, which metrics mean something else if responses are
    not streamed, and how many responses stalled, which is a pause between two chunks.
    """
    if _lacks_itl(summary):
        reason = summary.itl_undefined_reason
        yield f"No ITL: {reason}."

    if summary.run.api in ("embeddings", "rerank"):
        yield f"Responses of {summary.run.api} have no tokens, so there is only E2E latency."
    elif not summary.run.stream:
        yield "Responses were not streamed, so TTFT is the time of the whole response."
    else:
        yield from _responses_without_tpot(summary)

    if summary.stalls.requests:
        yield _describe_stalls(summary.stalls)


def _describe_stalls(stalls: Stalls) -> str:
    """Return how many responses stalled: `3 responses (0.5 %) stalled for more than 1 s.`."""
    responses = format.counted(stalls.requests, "response")
    limit_s = stalls.over_ms / MS_PER_S
    return (
        f"{responses} ({format.percent(stalls.share)}) stalled for more than "
        f"{format.duration(limit_s)}."
    )


def _lacks_itl(summary: Summary) -> bool:
    has_gaps = summary.inter_chunk_ms.count > 0
    return summary.itl_ms is None and has_gaps and "itl" not in summary.withheld_metrics


def _responses_without_tpot(summary: Summary) -> Iterator[str]:
    """Yield how many streamed responses have no TPOT, in a sentence for each reason.

    TPOT is the mean time per output token after the first one. There are three reasons why a
    response has none: it has fewer than two tokens, all of it arrived in one chunk, or it has
    tokens but no text.
    """
    single_chunk_count = summary.tpot_no_span
    without_text_count = summary.tpot_no_output

    # `tpot_undefined` counts the responses of all three reasons.
    too_short_count = summary.tpot_undefined - single_chunk_count - without_text_count
    if too_short_count:
        yield f"{format.counted(too_short_count, 'response')} had too few tokens for a TPOT."

    if single_chunk_count:
        yield (
            f"{format.counted(single_chunk_count, 'response')} arrived in one piece: there is no "
            "TPOT, and TTFT is the time of the whole response."
        )

    if without_text_count:
        yield (
            f"{format.counted(without_text_count, 'response')} had tokens but no text: there is no "
            "TTFT and no TPOT."
        )


def describe_connect_time(summary: Summary) -> str:
    """Return the time of a connection without load, and of the name lookup before it."""
    if summary.rtt_ms is None:
        return ""
    text = f"{format.milliseconds(summary.rtt_ms)} ms without load"
    if summary.dns_ms is None:
        return text
    return f"{text}, name lookup {format.milliseconds(summary.dns_ms)} ms"
