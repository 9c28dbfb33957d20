"""Texts about the load generator itself: the resources it used, and whether its host was too busy.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.core.metrics.timing_evidence import MIN_WAITED_SHARE
from loadgen.core.metrics.verdict import CLIENT_CODES

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.verdict import Verdict

HOST_REMEDIES = frozenset(("other_processes", "host"))
"""Remedies of a reason that concern other programs on the host, not the load or the server."""


def is_client_limited(summary: Summary) -> bool:
    """Return True if the verdict says that the load generator may have been the bottleneck."""
    return any(reason.code in CLIENT_CODES for reason in summary.verdict.codes)


def is_host_busy(verdict: Verdict) -> bool:
    """Return True if the run is not valid only because other programs kept the host busy."""
    codes = {reason.code for reason in verdict.codes}
    remedies = {reason.values.get("remedy") for reason in verdict.codes}
    return codes <= CLIENT_CODES and not remedies.isdisjoint(HOST_REMEDIES)


def describe_client_use(summary: Summary) -> list[str]:
    """Return what the load generator used: workers, CPU time, memory, and bytes sent and received.

    Values that the platform does not report are left out. Other processes on the host may keep a
    worker from running. That is stated if it took more than MIN_WAITED_SHARE of any second.
    """
    client = summary.client
    phrases = [format.counted(client.workers, "worker")]
    if client.cpu_s is not None:
        phrases.append(f"{format.quantity(client.cpu_s)} s of CPU time")

    if client.cpu_share_max is not None:
        phrases.append(f"busiest second {format.percent(client.cpu_share_max)} of a core")

    longest_wait_share = client.waited_share_max
    if longest_wait_share is not None and longest_wait_share > MIN_WAITED_SHARE:
        longest_wait = format.percent(longest_wait_share)
        phrases.append(f"delayed by other processes for up to {longest_wait} of a second")

    if client.peak_rss_bytes is not None:
        phrases.append(f"memory up to {format.size(client.peak_rss_bytes)}")

    phrases.append(f"{format.size(summary.bytes.sent)} sent")
    phrases.append(f"{format.size(summary.bytes.received)} received")
    return phrases
