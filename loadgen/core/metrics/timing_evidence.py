"""Finds why the client was late or its timestamps are uncertain, and what to do about it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from loadgen.core.metrics.client_use import worst_second
from loadgen.core.metrics.reasons import format_reason
from loadgen.core.metrics.uncertainty import WithheldStatistics
from loadgen.core.results.manifest import ReasonCode
from loadgen.core.stats.quantiles import deciding_quantile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loadgen.core.metrics.uncertainty import RangesMs
    from loadgen.core.metrics.windows import Window
    from loadgen.core.results.manifest import RunManifest, WorkerSample
    from loadgen.core.stats.quantiles import Distribution

MAX_IDLE_CPU_SHARE = 0.5
"""A worker that never used more of a core was late because of something else on the host."""

MIN_HELD_BACK_SHARE = 0.5
"""If more events came with others in one read, something holds them back..."""

MAX_READ_LAG_SHARE = 0.5
"""... provided that the client read them within this share of the timestamp error."""

MIN_WAITED_SHARE = 0.1
"""A second in which a worker spent this share waiting for a core, or writing records, explains
that it was late."""


class TimingEvidence(NamedTuple):
    """What is known of the cause of late sends and uncertain timestamps.

    Attributes:
        unsure_share: The share of the output events that came with later ones in one read.
        is_read_at_once: Whether the client read them soon after they had arrived.
        is_local: Whether client and server share a host.
        samples: The samples that each worker takes of itself.
        window: The measurement window.
    """

    unsure_share: float | None
    is_read_at_once: bool
    is_local: bool
    samples: Sequence[WorkerSample]
    window: Window


def find_remedy(
    samples: Sequence[WorkerSample], window: Window, *, is_local: bool
) -> dict[str, Any]:
    """Return the cause of a late client and what to do about it, as values of a reason.

    On the host of the server, the other process that keeps the client waiting is the server.
    """
    most_delayed = worst_second(samples, window, "waited_share")
    most_writing = worst_second(samples, window, "write_share")
    busiest = worst_second(samples, window, "cpu_share")
    waited_share = 0.0 if most_delayed is None else most_delayed.waited_share or 0.0
    if most_writing is not None and most_writing.write_share > max(MIN_WAITED_SHARE, waited_share):
        return {
            "remedy": "disk",
            "write_share": most_writing.write_share,
            "at_s": most_writing.t_s,
        }
    if is_local:
        return {"remedy": "shared_host"}
    if most_delayed is not None and waited_share > MIN_WAITED_SHARE:
        return {
            "remedy": "other_processes",
            "worker": most_delayed.worker,
            "waited_share": waited_share,
            "at_s": most_delayed.t_s,
        }
    if busiest is not None and busiest.cpu_share < MAX_IDLE_CPU_SHARE:
        return {"remedy": "host", "cpu_share": busiest.cpu_share}
    return {"remedy": "lower_load"}


def explain_withheld(
    ranges: Mapping[str, RangesMs], evidence: TimingEvidence, *, by_first_event: bool
) -> dict[str, WithheldStatistics]:
    """Return the withheld statistics of each metric with the reason.

    Args:
        ranges: The range of each withheld statistic, by metric.
        evidence: What is known of the cause of uncertain timestamps.
        by_first_event: Whether TPOT would be shown if the size of first events were known.
    """
    timing_text = timing_reason(evidence)
    withheld = {
        metric: WithheldStatistics(ranges=metric_ranges, why=timing_text)
        for metric, metric_ranges in ranges.items()
    }
    if by_first_event and "tpot" in ranges:
        text = format_reason(ReasonCode(code="first_event_uncertain"))
        withheld["tpot"] = WithheldStatistics(ranges=ranges["tpot"], why=text)
    return withheld


def timing_reason(evidence: TimingEvidence) -> str:
    """Return why timestamps are uncertain and what to do about it, as a sentence."""
    share = evidence.unsure_share
    if share is not None and share > MIN_HELD_BACK_SHARE and evidence.is_read_at_once:
        remedy: dict[str, Any] = {"remedy": "held_back"}
    else:
        remedy = find_remedy(evidence.samples, evidence.window, is_local=evidence.is_local)
    values = {"unsure_share": share, **remedy}
    return format_reason(ReasonCode(code="times_uncertain", values=values))


def is_read_at_once(client_lag: Distribution, event_error: Distribution) -> bool:
    """Return True if the client read events much sooner than their timestamps are uncertain.

    Events that it did not keep waiting, and that came with others in one read, came together.
    """
    lag = deciding_quantile(client_lag)
    error = deciding_quantile(event_error)
    if lag is None or error is None:
        return False
    return lag.value_ms <= MAX_READ_LAG_SHARE * error.value_ms


def is_local(manifest: RunManifest) -> bool:
    """Return True if a target runs on the host of the client."""
    hosts = {urlsplit(target.url).hostname or "" for target in manifest.targets}
    local_names = {"localhost", "::1", manifest.host.name} - {""}
    return any(host in local_names or host.startswith("127.") for host in hosts)
