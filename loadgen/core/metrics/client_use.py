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
    """Return the CPU time and the memory that the load generator itself used.

    Args:
        accumulator: The measured requests.
        samples: The CPU time and memory of each worker over time.
        window: The measurement window.
        workers: The number of workers.
    """
    # The second in which a worker used the most CPU time, and the one in which a worker waited the
    # longest for a CPU.
    busiest_second = find_worst_second(samples, window, "cpu_share")
    most_delayed_second = find_worst_second(samples, window, "waited_share")

    # The share of the first tokens whose time is from the kernel, and not from the client itself.
    first_tokens = accumulator.sum("with_first_token")
    first_tokens_timed_by_kernel = accumulator.sum("kernel_timestamps")
    kernel_share = first_tokens_timed_by_kernel / first_tokens if first_tokens else None

    return ClientUse(
        cpu_s=_total_cpu_s(samples),
        peak_rss_bytes=_total_peak_rss_bytes(samples),
        workers=workers,
        cpu_share_max=None if busiest_second is None else busiest_second.cpu_share,
        waited_share_max=None if most_delayed_second is None else most_delayed_second.waited_share,
        kernel_stamp_share=kernel_share,
    )


def _total_cpu_s(samples: Sequence[WorkerSample]) -> float | None:
    """Return the CPU time of all workers, None without samples."""
    # The CPU time of a worker only grows, so its largest value is the total.
    cpu_s_of_worker: dict[int, float] = {}
    for sample in samples:
        previous_cpu_s = cpu_s_of_worker.get(sample.worker, 0.0)
        cpu_s_of_worker[sample.worker] = max(previous_cpu_s, sample.cpu_s)

    return sum(cpu_s_of_worker.values()) if samples else None


def _total_peak_rss_bytes(samples: Sequence[WorkerSample]) -> int | None:
    """Return the sum of the largest resident memory of each worker, None without samples."""
    peak_of_worker: dict[int, int] = {}
    for sample in samples:
        previous_peak = peak_of_worker.get(sample.worker, 0)
        peak_of_worker[sample.worker] = max(previous_peak, sample.peak_rss_bytes)

    return sum(peak_of_worker.values()) if samples else None


def find_worst_second(
    samples: Sequence[WorkerSample], window: Window, share_name: ShareField
) -> WorkerSample | None:
    """Return the sample of a worker with the largest share of some kind, None without samples.

    Only samples over a full second are compared.

    Args:
        samples: The samples of each worker, about one per second.
        window: The measurement window, in which the second has to lie.
        share_name: Which share of a second is compared: the one in which the worker used a core
            ("cpu_share"), waited for a core ("waited_share"), or wrote records ("write_share").
    """

    def share_of(sample: WorkerSample) -> float:
        share: float | None = getattr(sample, share_name)
        return share or 0.0  # None if the system does not report it

    full_seconds = select_full_seconds(samples, window)
    return max(full_seconds, key=share_of, default=None)


def select_full_seconds(samples: Sequence[WorkerSample], window: Window) -> list[WorkerSample]:
    """Return the samples over a full second that lie in the measurement window."""
    if window.start_s is None or window.end_s is None:
        return []

    full_seconds = []
    for sample in samples:
        is_full_second = sample.span_s >= FULL_SECOND_S
        begins_in_window = sample.t_s - sample.span_s >= window.start_s
        ends_in_window = sample.t_s <= window.end_s
        if is_full_second and begins_in_window and ends_in_window:
            full_seconds.append(sample)

    return full_seconds
