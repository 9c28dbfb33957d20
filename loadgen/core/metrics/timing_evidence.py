"""Finds why the client was late or its timestamps are uncertain, and what to do about it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import urlsplit

from loadgen.core.metrics.client_use import find_worst_second
from loadgen.core.metrics.reasons import format_reason
from loadgen.core.metrics.run_evidence import make_code
from loadgen.core.stats.quantiles import deciding_quantile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loadgen.core.metrics.windows import Window
    from loadgen.core.results.manifest import RunManifest, WorkerSample
    from loadgen.core.stats.quantiles import Distribution

MAX_IDLE_CPU_SHARE = 0.5
"""A worker that never used more of a core was late because of something else on the host."""

MIN_HELD_BACK_SHARE = 0.5
"""If a larger share of the events came with others in one read, although the client read them at
once, the server or a proxy holds them back."""

MAX_READ_LAG_SHARE = 0.5
"""The client read events at once if it did so within this share of the timestamp error."""

MIN_WAITED_SHARE = 0.1
"""A second in which a worker spent this share waiting for a core, or writing records, explains
that it was late."""

EVENTS_HELD_BACK = "held_back"
"""The code of the remedy for a server or a proxy that holds events back and sends them at once."""


class TimingEvidence(NamedTuple):
    """What is known of the cause of late sends and uncertain timestamps.

    Attributes:
        uncertain_event_share: The share of the output events that came with later ones in one read.
        is_read_promptly: Whether the client read them soon after they had arrived.
        is_local: Whether client and server share a host.
        samples: The samples that each worker takes of itself.
        window: The measurement window.
    """

    uncertain_event_share: float | None
    is_read_promptly: bool
    is_local: bool
    samples: Sequence[WorkerSample]
    window: Window

    @property
    def are_events_sent_together(self) -> bool:
        """Whether the server or a proxy sends several events at once, so the client is not late."""
        if self.uncertain_event_share is None:
            return False

        are_most_read_together = self.uncertain_event_share > MIN_HELD_BACK_SHARE
        return self.is_read_promptly and are_most_read_together


LatenessCause = Literal["disk", "shared_host", "other_processes", "host", "lower_load"]


class Lateness(NamedTuple):
    """Why the client was late.

    Attributes:
        cause: The probable cause. Each cause needs another remedy.

            - "disk": a worker spent more of a second writing records than waiting for a core.
            - "shared_host": client and server share a host, so the server keeps the client waiting.
            - "other_processes": a worker waited for a core, which other processes used.
            - "host": no worker was busy, so something else on the host delayed the workers.
            - "lower_load": the workers were busy with the load itself.

        evidence: The numbers that show the cause, by the names that sentences use.
    """

    cause: LatenessCause
    evidence: Mapping[str, float] = {}

    @property
    def sentence_values(self) -> dict[str, str | float | None]:
        """The values of a sentence about the lateness, which ends with the remedy of the cause."""
        return {"remedy": self.cause, **self.evidence}


def explain_lateness(
    samples: Sequence[WorkerSample], window: Window, *, is_local: bool
) -> Lateness:
    """Return why the client was late. If several causes apply, the first one tested is returned.

    Args:
        samples: The use of a core by each worker, one sample per second.
        window: The measurement window.
        is_local: Whether client and server share a host.
    """
    longest_wait = find_worst_second(samples, window, "waited_share")
    longest_write = find_worst_second(samples, window, "write_share")
    busiest = find_worst_second(samples, window, "cpu_share")
    if longest_wait is None or longest_write is None or busiest is None:
        # No worker was sampled over a full second, so nothing is known of the workers.
        return Lateness("shared_host" if is_local else "lower_load")

    waited_share = longest_wait.waited_share or 0.0  # None if the system does not report it
    write_share = longest_write.write_share
    is_disk_slow = write_share > max(MIN_WAITED_SHARE, waited_share)
    if is_disk_slow:
        return Lateness("disk", {"write_share": write_share, "at_s": longest_write.t_s})

    if is_local:
        return Lateness("shared_host")

    is_core_shared = waited_share > MIN_WAITED_SHARE
    if is_core_shared:
        evidence = {
            "worker": longest_wait.worker,
            "waited_share": waited_share,
            "at_s": longest_wait.t_s,
        }
        return Lateness("other_processes", evidence)

    are_workers_idle = busiest.cpu_share < MAX_IDLE_CPU_SHARE
    if are_workers_idle:
        return Lateness("host", {"cpu_share": busiest.cpu_share})

    return Lateness("lower_load")


def explain_uncertain_times(evidence: TimingEvidence) -> str:
    """Return why timestamps are uncertain and what to do about it, as a sentence.

    Either the server or a proxy held back several events and sent them at once, or the client was
    late.
    """
    if evidence.are_events_sent_together:
        cause_values: dict[str, str | float | None] = {"remedy": EVENTS_HELD_BACK}
    else:
        lateness = explain_lateness(evidence.samples, evidence.window, is_local=evidence.is_local)
        cause_values = lateness.sentence_values

    return format_reason(
        make_code("times_uncertain", unsure_share=evidence.uncertain_event_share, **cause_values)
    )


def are_events_read_promptly(receive_delays: Distribution, event_errors: Distribution) -> bool:
    """Return True if the client did not cause the uncertainty of the timestamps of events.

    That is so if the client read packets much faster than timestamps are uncertain.

    Args:
        receive_delays: The time from the arrival of a packet at the kernel until the client read
            it.
        event_errors: The uncertainty of the timestamps of output events.
    """
    receive_delay = deciding_quantile(receive_delays)
    timestamp_error = deciding_quantile(event_errors)
    if receive_delay is None or timestamp_error is None:
        return False

    longest_prompt_delay_ms = MAX_READ_LAG_SHARE * timestamp_error.value_ms
    return receive_delay.value_ms <= longest_prompt_delay_ms


def is_local(manifest: RunManifest) -> bool:
    """Return True if a target runs on the host of the client."""
    hosts = {urlsplit(target.url).hostname or "" for target in manifest.targets}
    local_names = {"localhost", "::1", manifest.host.name} - {""}
    return any(host in local_names or host.startswith("127.") for host in hosts)
