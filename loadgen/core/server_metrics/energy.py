"""Computes power, clocks and memory of the hardware during a run, and the energy that it used.

Pure. Three sources report what the accelerators use: `/energy_metrics` of TensorRT-LLM (joules of
its own GPUs), the DCGM exporter (watts and a counter of millijoules), and nvidia-smi on the same
machine (watts). The node exporter reports the processors of the host. `scraper.py` reads them.
Nothing is estimated from a data sheet.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from loadgen.core.server_metrics.series import (
    SCRAPE_DURATION,
    UP,
    MetricSample,
    PageReading,
    PageValues,
    Point,
    SeriesKey,
    format_labels,
    summarize_reads,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

SMI = "nvidia-smi"
_SMI_FIELDS = {
    "index": "",
    "power.draw": "nvidia_smi_power_watts",
    "enforced.power.limit": "nvidia_smi_power_limit_watts",
    "clocks.sm": "nvidia_smi_sm_clock_mhz",
    "memory.used": "nvidia_smi_memory_used_mib",
    # All versions of the driver accept this name.
    "clocks_throttle_reasons.active": "nvidia_smi_throttle_reasons",
}
"""The fields that nvidia-smi prints and the series of each. The index has no series."""
SMI_COMMAND = (
    SMI,
    f"--query-gpu={','.join(_SMI_FIELDS)}",
    "--format=csv,noheader,nounits",
    "-lms",
    "1000",
)

JOULES = "joules"
WATTS = "watts"
LIMIT = "limit_watts"
CLOCK = "clock_mhz"
MEMORY = "memory_mib"
THROTTLE = "throttle"


class _SourceMetric(NamedTuple):
    """The name of a series of a source, and the factor from its unit to ours."""

    name: str
    factor: float = 1.0


SOURCES: dict[str, dict[str, _SourceMetric]] = {
    "energy_metrics": {JOULES: _SourceMetric("trtllm_energy_joules_total")},
    "dcgm": {
        JOULES: _SourceMetric("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 1e-3),
        WATTS: _SourceMetric("DCGM_FI_DEV_POWER_USAGE"),
        LIMIT: _SourceMetric("DCGM_FI_DEV_POWER_MGMT_LIMIT"),
        CLOCK: _SourceMetric("DCGM_FI_DEV_SM_CLOCK"),
        MEMORY: _SourceMetric("DCGM_FI_DEV_FB_USED"),
        THROTTLE: _SourceMetric("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"),
    },
    "nvidia-smi": {
        WATTS: _SourceMetric("nvidia_smi_power_watts"),
        LIMIT: _SourceMetric("nvidia_smi_power_limit_watts"),
        CLOCK: _SourceMetric("nvidia_smi_sm_clock_mhz"),
        MEMORY: _SourceMetric("nvidia_smi_memory_used_mib"),
        THROTTLE: _SourceMetric("nvidia_smi_throttle_reasons"),
    },
}
"""For each source of energy or power, the series of each quantity that it reports.

The sources are ordered by preference.
"""

HOST = ("node_rapl_package_joules_total", "node_rapl_dram_joules_total")
"""Counters of the node exporter for the energy of the processors and the memory of the host."""
_OTHER_NAMES = {
    # Newer versions of DCGM have this name.
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS",
    # The parser appends `_total` to the name of a counter.
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION_total": "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
}
_SOURCE_NAMES = {
    metric.name for metric_by_quantity in SOURCES.values() for metric in metric_by_quantity.values()
}
_HARDWARE_NAMES = _SOURCE_NAMES | {*HOST, *_OTHER_NAMES}
"""The names of all series about hardware."""

THROTTLE_REASONS = {
    "power cap": 0x4 | 0x80,  # of the software, and the brake of the hardware
    "thermal": 0x20 | 0x40,
    "hardware slowdown": 0x8,
}
"""Why clocks are lower than they could be, as bits of the mask of NVML.

Clocks that are low because the GPU is idle or because a user set them do not count.
"""

LONGEST_GAP_S = 5.0
"""Longest time between two reads in the window. After a longer one, the energy is unknown."""


class EnergyUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the accelerators used in the steady-state window; null if no source reports it.

    `error_j` is the uncertainty of `joules`, because the use between two readings is not known. A
    counter is bounded by its readings before and after each end of the window. For watts it is
    twice the standard error of a step at an unknown time between two readings.
    """

    source: str = ""  # energy_metrics, dcgm, nvidia-smi; "": none
    pages: tuple[PageReading, ...] = ()
    devices: int | None = None  # GPUs that the source sees; null: it gives one sum
    window_s: float | None = None
    joules: float | None = None
    error_j: float | None = None
    watts: float | None = None
    watts_max: float | None = None  # of all devices together, at any reading
    declared_watts: float | None = None  # by `accelerator.power_limit_w` of --system, of all GPUs
    limit_watts: float | None = None  # that the devices enforce, of all
    joules_per_output_token: float | None = None
    joules_per_request: float | None = None  # of an ok request
    output_tokens_per_s_per_watt: float | None = None
    clock_mhz: float | None = None  # of the multiprocessors, mean
    clock_min_mhz: float | None = None
    memory_used_gib: float | None = None  # of all devices, at most
    throttled: dict[str, float] = {}  # fraction of readings by reason
    host_joules: float | None = None  # by the node exporter: processors and memory of the host
    why: str = ""  # why there is no energy although a source was read


class _Energy(NamedTuple):
    """An energy and its uncertainty, in J."""

    joules: float
    error: float


class _Window(NamedTuple):
    """The steady-state window, in s from the start of the run."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


Readings = list[Point]
"""The values of one series at the times at which its page was read."""


class _HardwareReadings(NamedTuple):
    """The readings of the pages about hardware.

    Attributes:
        pages: The pages, and how often each was read.
        by_name: By the name of a metric, the readings of each of its series. There is a series for
            each device of each page.
    """

    pages: tuple[PageReading, ...]
    by_name: Mapping[str, Sequence[Readings]]

    def of_quantity(self, source: str, quantity: str) -> Sequence[Readings]:
        """Return the series of a quantity that a source reports; none if it does not report it."""
        metric = SOURCES[source].get(quantity)
        return () if metric is None else self.by_name.get(metric.name, ())


# -- pages -----------------------------------------------------------------------------------------


def select_hardware_values(values: PageValues) -> PageValues:
    """Return the values about hardware on a page of Prometheus text.

    The page of a node exporter has two thousand other series, which are not stored. Names of newer
    versions of DCGM become the names in SOURCES.

    Raises ValueError if there are no such values.
    """
    hardware_values = {}
    for key, value in values.items():
        if key.name in _HARDWARE_NAMES:
            name = _OTHER_NAMES.get(key.name, key.name)
            hardware_values[SeriesKey(name, key.labels)] = value
    if not hardware_values:
        raise ValueError("the page reports no energy")
    return hardware_values


def parse_energy_metrics(data: bytes) -> PageValues:
    """Return the energy in a page `/energy_metrics` of trtllm-serve: `{"total_energy_j": 1.5}`.

    Raises ValueError for anything else.
    """
    try:
        total_j = msgspec.json.decode(data).get("total_energy_j")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"no energy: {error}") from None
    is_number = isinstance(total_j, int | float) and not isinstance(total_j, bool)
    if not is_number or not math.isfinite(total_j):
        raise ValueError("the page reports no energy")
    metric = SOURCES["energy_metrics"][JOULES]
    return {SeriesKey(metric.name, ""): float(total_j)}


def parse_nvidia_smi(text: str) -> PageValues:
    """Return the values in the output of SMI_COMMAND; the last line of each GPU counts.

    A value that a GPU does not report is written `[N/A]` there and is left out.
    """
    import csv

    values: PageValues = {}
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(_SMI_FIELDS) or not row[0].strip().isdigit():
            continue
        device = format_labels({"gpu": row[0].strip()})
        for name, field in zip(_SMI_FIELDS.values(), row, strict=True):
            number = _parse_smi_number(field.strip())
            if name and number is not None:
                values[SeriesKey(name, device)] = number
    return values


def _parse_smi_number(text: str) -> float | None:
    """Return a decimal or hexadecimal number of nvidia-smi, or None for any other text."""
    try:
        number = float(int(text, 16)) if text.startswith("0x") else float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


# -- a run -----------------------------------------------------------------------------------------


def measure_energy(
    samples: Sequence[MetricSample], start_s: float | None, end_s: float | None
) -> EnergyUse | None:
    """Return the use of energy in the steady-state window, or None without hardware pages.

    The source is the first one of SOURCES with enough readings. Without one, `why` in the result
    says what is missing. The caller adds the values per token and per request, which depend on the
    load.

    Args:
        samples: The samples of all metrics pages of a run.
        start_s: The start of the window, from the start of the run. None if there is no window.
        end_s: Its end.
    """
    readings = _group_readings(samples)
    sources = [
        source
        for source, metric_by_quantity in SOURCES.items()
        if any(metric.name in readings.by_name for metric in metric_by_quantity.values())
    ]
    host_counters = [
        series_readings for name in HOST for series_readings in readings.by_name.get(name, ())
    ]
    if not sources and not host_counters:
        return None
    use = EnergyUse(pages=readings.pages)
    if start_s is None or end_s is None:
        return msgspec.structs.replace(use, why="the load never was steady")

    window = _Window(start_s, end_s)
    host_energy = _add_energies(_energy_of_counter(counter, window) for counter in host_counters)
    if host_energy is not None:
        use = msgspec.structs.replace(use, host_joules=host_energy.joules, window_s=window.length_s)
    for source in sources:
        source_use = _add_source(use, source, readings, window)
        if source_use is not None:
            return source_use
    if not sources:
        return use
    reason = (
        f"its {window.length_s:.0f} s have too few readings. One per second is "
        f"needed, with no gap of more than {LONGEST_GAP_S:.0f} s"
    )
    return msgspec.structs.replace(use, why=reason)


def _add_source(
    use: EnergyUse, source: str, readings: _HardwareReadings, window: _Window
) -> EnergyUse | None:
    """Return `use` with the values of a source, or None if the source has too few readings.

    The energy comes from counters of energy, or else from readings of the power.
    """
    power = readings.of_quantity(source, WATTS)
    energy = None
    if JOULES in SOURCES[source]:
        factor = SOURCES[source][JOULES].factor
        counters = readings.of_quantity(source, JOULES)
        energy = _add_energies(_energy_of_counter(counter, window, factor) for counter in counters)
    if energy is None:
        energy = _add_energies(_energy_of_power(device, window) for device in power)
    if energy is None:
        return None

    limits = readings.of_quantity(source, LIMIT)
    clocks_mhz = [
        reading.value
        for device in readings.of_quantity(source, CLOCK)
        for reading in _select_window(device, window)
    ]
    memory_mib = _sums_over_devices(readings.of_quantity(source, MEMORY), window)
    throttled = _throttled_fractions(readings.of_quantity(source, THROTTLE), window)
    return msgspec.structs.replace(
        use,
        source=source,
        devices=len(power) or None,
        window_s=window.length_s,
        joules=energy.joules,
        error_j=energy.error,
        watts=energy.joules / window.length_s,
        watts_max=max(_sums_over_devices(power, window), default=None),
        limit_watts=sum(device[-1].value for device in limits) or None,
        clock_mhz=sum(clocks_mhz) / len(clocks_mhz) if clocks_mhz else None,
        clock_min_mhz=min(clocks_mhz, default=None),
        memory_used_gib=max(memory_mib) / 1024 if memory_mib else None,
        throttled={reason: fraction for reason, fraction in throttled.items() if fraction},
    )


def _group_readings(samples: Sequence[MetricSample]) -> _HardwareReadings:
    """Return the readings of the pages that have values of SOURCES or HOST.

    A sample is stored only when its value has changed, so the current value of each series of a
    page is repeated at every successful read of the page.
    """
    hardware_pages = {sample.page for sample in samples if sample.name in _HARDWARE_NAMES}
    hardware_samples = [sample for sample in samples if sample.page in hardware_pages]
    current_by_page: dict[str, dict[SeriesKey, float]] = {page: {} for page in hardware_pages}
    readings: dict[str, dict[tuple[str, str], Readings]] = {}
    for sample in hardware_samples:
        current_values = current_by_page[sample.page]
        if sample.name in _HARDWARE_NAMES:
            current_values[SeriesKey(sample.name, sample.labels)] = sample.value
        # `up` is the last sample of each read.
        elif sample.name == UP and sample.value:
            for key, value in current_values.items():
                readings_by_device = readings.setdefault(key.name, {})
                device = (sample.page, key.labels)
                readings_by_device.setdefault(device, []).append(Point(sample.t_s, value))
    return _HardwareReadings(
        pages=summarize_reads(hardware_samples),
        by_name={name: list(by_device.values()) for name, by_device in readings.items()},
    )


def _energy_of_counter(
    counter: Readings, window: _Window, joules_per_unit: float = 1.0
) -> _Energy | None:
    """Return the growth of a counter of energy in a window.

    Return None if the readings do not cover the window. A counter that falls was restarted, so its
    growth before the restart is added.
    """
    curve = [Point(counter[0].t_s, 0.0)]
    for before, after in pairwise(counter):
        has_restarted = after.value < before.value
        growth = after.value if has_restarted else after.value - before.value
        # An exporter that updates its value more rarely than it is read repeats it. The repeated
        # reading does not show how much was used until then, so it is no point of the curve.
        if growth:
            curve.append(Point(after.t_s, curve[-1].value + growth))
    start = _interpolate(curve, window.start_s)
    end = _interpolate(curve, window.end_s)
    if start is None or end is None:
        return None
    return _Energy(
        joules=(end.joules - start.joules) * joules_per_unit,
        error=(end.error + start.error) * joules_per_unit,
    )


def _interpolate(curve: Sequence[Point], t_s: float) -> _Energy | None:
    """Return the value of a growing curve at a time, by linear interpolation between its points.

    The true value may be anywhere between those of the two points, so the error is the distance to
    the further one. Return None for a time outside of the curve.
    """
    for before, after in pairwise(curve):
        if before.t_s <= t_s <= after.t_s:
            fraction = (t_s - before.t_s) / (after.t_s - before.t_s)
            growth = after.value - before.value
            error = max(fraction, 1 - fraction) * growth
            return _Energy(before.value + fraction * growth, error)
    return None


def _energy_of_power(power: Readings, window: _Window) -> _Energy | None:
    """Return the integral of the power of a device over a window, by the trapezoidal rule.

    The power may change in a step at any time between two readings. If that time is uniformly
    distributed, the variance of the energy of this interval is a twelfth of the square of step
    times length. The error is two standard deviations of the sum.

    Return None if the readings do not cover the window, or if two are more than LONGEST_GAP_S
    apart.
    """
    if not power or power[0].t_s > window.start_s or power[-1].t_s < window.end_s:
        return None
    joules = 0.0
    variance = 0.0
    for before, after in pairwise(power):
        # The part of the interval inside the window.
        start_s = max(before.t_s, window.start_s)
        end_s = min(after.t_s, window.end_s)
        if end_s <= start_s:
            continue
        interval_s = after.t_s - before.t_s
        if interval_s > LONGEST_GAP_S:
            return None
        step_w = after.value - before.value
        start_w = before.value + step_w * (start_s - before.t_s) / interval_s
        end_w = before.value + step_w * (end_s - before.t_s) / interval_s
        length_s = end_s - start_s
        joules += (start_w + end_w) / 2 * length_s
        variance += (step_w * length_s) ** 2 / 12
    return _Energy(joules, 2 * math.sqrt(variance))


def _add_energies(energies: Iterable[_Energy | None]) -> _Energy | None:
    """Return the sum of energies, or None if there are none or one of them is not known."""
    total: _Energy | None = None
    for energy in energies:
        if energy is None:
            return None
        if total is None:
            total = energy
        else:
            total = _Energy(total.joules + energy.joules, total.error + energy.error)
    return total


def _select_window(readings: Readings, window: _Window) -> Readings:
    """Return the readings of a series inside a window."""
    return [reading for reading in readings if window.start_s <= reading.t_s <= window.end_s]


def _values_by_read(
    readings_by_device: Sequence[Readings], window: _Window
) -> Iterator[tuple[float, ...]]:
    """Yield the values of all devices at each read in a window."""
    values_by_device = [
        [reading.value for reading in _select_window(readings, window)]
        for readings in readings_by_device
    ]
    # A device that appears later, or on another page, may have fewer readings.
    return zip(*values_by_device, strict=False)


def _sums_over_devices(readings_by_device: Sequence[Readings], window: _Window) -> list[float]:
    """Return the sum over all devices at each read in a window."""
    return [sum(values) for values in _values_by_read(readings_by_device, window)]


def _throttled_fractions(
    readings_by_device: Sequence[Readings], window: _Window
) -> dict[str, float]:
    """Return for each reason the fraction of reads at which it throttled at least one device.

    The values of the series are bit masks of NVML. The result is empty without readings.
    """
    masks = []
    for values in _values_by_read(readings_by_device, window):
        mask_of_all_devices = 0
        for value in values:
            mask_of_all_devices |= int(value)
        masks.append(mask_of_all_devices)
    if not masks:
        return {}
    fractions = {}
    for reason, reason_mask in THROTTLE_REASONS.items():
        throttled_reads = sum(1 for mask in masks if mask & reason_mask)
        fractions[reason] = throttled_reads / len(masks)
    return fractions


def without_hardware_pages(samples: Sequence[MetricSample]) -> list[MetricSample]:
    """Return the samples without those of pages that report only hardware."""
    names_on_hardware_pages = {*_HARDWARE_NAMES, UP, SCRAPE_DURATION}
    server_pages = {sample.page for sample in samples if sample.name not in names_on_hardware_pages}
    hardware_pages = {sample.page for sample in samples if sample.name in _HARDWARE_NAMES}
    only_hardware = hardware_pages - server_pages
    return [sample for sample in samples if sample.page not in only_hardware]


def throttled_fractions(
    samples: Sequence[MetricSample], start_s: float, end_s: float
) -> dict[str, float]:
    """Return for each reason the fraction of reads at which it throttled at least one device.

    The first source of SOURCES with throttle reasons in this time counts. Without one the result is
    empty.

    Args:
        samples: The samples of all metrics pages of a run.
        start_s: The start of the time, from the start of the run.
        end_s: Its end.
    """
    readings = _group_readings(samples)
    window = _Window(start_s, end_s)
    for source in SOURCES:
        fractions = _throttled_fractions(readings.of_quantity(source, THROTTLE), window)
        if fractions:
            return fractions
    return {}
