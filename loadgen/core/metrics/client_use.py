"""What the load generator itself used, from the samples that each worker takes of itself. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.windows import Window
    from loadgen.core.results.manifest import WorkerSample

FULL_SECOND_S = 0.9
"""A sample over a time this long counts as a full second."""

ShareField = Literal["cpu_share", "waited_share", "write_share"]


class ClientUse(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that the load generator itself used, all workers together.

    Attributes:
        cpu_s: CPU time.
        peak_rss_bytes: The sum of the largest resident memory of each worker.
        workers: The number of workers.
        cpu_share_max: The largest share of one core that a worker used in a full second.
        waited_share_max: The largest share of a full second that a worker waited for a core.
        kernel_stamp_share: The share of first tokens whose timestamp is from the kernel.
    """

    cpu_s: float | None
    peak_rss_bytes: int | None
    workers: int
    cpu_share_max: float | None
    waited_share_max: float | None = None
    kernel_stamp_share: float | None


def summarize_client_use(
    accumulator: MetricAccumulator,
    samples: Sequence[WorkerSample],
    window: Window,
    workers: int,
) -> ClientUse:
    """Return the CPU time and the peak memory of all workers, and the largest use of one core.

    Values that follow from samples are None without any.

    Args:
        accumulator: The measured requests.
        samples: The samples that each worker took of itself.
        window: The measurement window.
        workers: The number of workers.
    """
    cpu_s_by_worker: dict[int, float] = {}
    peak_rss_by_worker: dict[int, int] = {}
    for sample in samples:
        worker = sample.worker
        cpu_s_by_worker[worker] = max(cpu_s_by_worker.get(worker, 0.0), sample.cpu_s)
        peak_rss = max(peak_rss_by_worker.get(worker, 0), sample.peak_rss_bytes)
        peak_rss_by_worker[worker] = peak_rss
    busiest = worst_second(samples, window, "cpu_share")
    most_delayed = worst_second(samples, window, "waited_share")
    first_tokens = accumulator.sum("with_first_token")
    kernel_timestamps = accumulator.sum("kernel_timestamps")
    return ClientUse(
        cpu_s=sum(cpu_s_by_worker.values()) if samples else None,
        peak_rss_bytes=sum(peak_rss_by_worker.values()) if samples else None,
        workers=workers,
        cpu_share_max=None if busiest is None else busiest.cpu_share,
        waited_share_max=None if most_delayed is None else most_delayed.waited_share,
        kernel_stamp_share=kernel_timestamps / first_tokens if first_tokens else None,
    )


def worst_second(
    samples: Sequence[WorkerSample], window: Window, share: ShareField
) -> WorkerSample | None:
    """Return the full second in the measurement window with the largest share, None without one."""
    full_seconds = full_seconds_within(samples, window)
    return max(full_seconds, key=lambda sample: getattr(sample, share) or 0.0, default=None)


def full_seconds_within(samples: Sequence[WorkerSample], window: Window) -> list[WorkerSample]:
    """Return the samples over a full second that lie in the measurement window."""
    if window.start_s is None or window.end_s is None:
        return []
    return [
        sample
        for sample in samples
        if sample.span_s >= FULL_SECOND_S
        and sample.t_s - sample.span_s >= window.start_s
        and sample.t_s <= window.end_s
    ]
