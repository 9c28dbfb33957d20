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
        is_read_promptly: Whether the client read them soon after they had arrived.
        is_local: Whether client and server share a host.
        samples: The samples that each worker takes of itself.
        window: The measurement window.
    """

    unsure_share: float | None
    is_read_promptly: bool
    is_local: bool
    samples: Sequence[WorkerSample]
    window: Window


def find_remedy(
    samples: Sequence[WorkerSample], window: Window, *, is_local: bool
) -> dict[str, Any]:
    """Return why the client was late, and the numbers that show it, as values of a `ReasonCode`.

    The value "remedy" selects a sentence that says what to do. The causes, in order of precedence:

    1. "disk": a worker spent more of a second writing records than waiting for a core.
    2. "shared_host": client and server share a host, so that the server keeps the client waiting.
    3. "other_processes": a worker waited for a core, which other processes used.
    4. "host": no worker was busy, so something else on the host delayed them.
    5. "lower_load": the workers were busy with the load itself.

    Args:
        samples: The samples that each worker took of itself.
        window: The measurement window.
        is_local: Whether client and server share a host.
    """
    most_delayed = worst_second(samples, window, "waited_share")
    most_writing = worst_second(samples, window, "write_share")
    busiest = worst_second(samples, window, "cpu_share")
    waited_share = 0.0 if most_delayed is None else most_delayed.waited_share or 0.0
    write_share = 0.0 if most_writing is None else most_writing.write_share
    if most_writing is not None and write_share > max(MIN_WAITED_SHARE, waited_share):
        return {"remedy": "disk", "write_share": write_share, "at_s": most_writing.t_s}
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
    ranges: Mapping[str, RangesMs], evidence: TimingEvidence, *, is_first_event_to_blame: bool
) -> dict[str, WithheldStatistics]:
    """Return the withheld statistics of each metric with the reason, as a sentence.

    The reason is uncertain timestamps, and for TPOT possibly the unknown number of tokens in the
    first event of a response, by which TPOT is divided.

    Args:
        ranges: For each metric, the withheld statistics with their ranges.
        evidence: What is known of the cause of uncertain timestamps.
        is_first_event_to_blame: Whether TPOT would be shown if the tokens of first events were
            known.
    """
    timing_text = explain_uncertain_times(evidence)
    withheld = {
        metric: WithheldStatistics(ranges=metric_ranges, why=timing_text)
        for metric, metric_ranges in ranges.items()
    }
    if is_first_event_to_blame and "tpot" in ranges:
        text = format_reason(ReasonCode(code="first_event_uncertain"))
        withheld["tpot"] = WithheldStatistics(ranges=ranges["tpot"], why=text)
    return withheld


def explain_uncertain_times(evidence: TimingEvidence) -> str:
    """Return why timestamps are uncertain and what to do about it, as a sentence.

    If most events came with others in one read, and the client read them promptly, a proxy or the
    server holds events back. Otherwise the client was late.
    """
    share = evidence.unsure_share
    if share is not None and share > MIN_HELD_BACK_SHARE and evidence.is_read_promptly:
        remedy: dict[str, Any] = {"remedy": "held_back"}
    else:
        remedy = find_remedy(evidence.samples, evidence.window, is_local=evidence.is_local)
    values = {"unsure_share": share, **remedy}
    return format_reason(ReasonCode(code="times_uncertain", values=values))


def is_read_promptly(client_lag: Distribution, event_error: Distribution) -> bool:
    """Return True if the client read events much sooner than their timestamps are uncertain.

    An event that was read together with later ones has an uncertain timestamp. If the client read
    it promptly, the events arrived together, and the client did not cause the uncertainty.

    Args:
        client_lag: The time from the arrival of a packet at the kernel until the client read it.
        event_error: The uncertainty of the timestamps of output events.
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
