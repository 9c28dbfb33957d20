"""Computes power, clocks and memory of the hardware during a run, and the energy that it used.

Pure. Three sources report what the accelerators use: `/energy_metrics` of TensorRT-LLM (joules of
its own GPUs), the DCGM exporter (watts and a counter of millijoules), and nvidia-smi on the same
machine (watts). The node exporter reports the processors of the host. `scraper.py` reads them.
Nothing is estimated from a data sheet.
"""

from __future__ import annotations

import math
from functools import reduce
from itertools import pairwise
from operator import or_
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
_RENAMED_SERIES = {
    # Newer versions of DCGM have this name.
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS",
    # The parser appends `_total` to the name of a counter.
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION_total": "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
}
_SOURCE_NAMES = {
    metric.name for metric_by_quantity in SOURCES.values() for metric in metric_by_quantity.values()
}
_HARDWARE_NAMES = _SOURCE_NAMES | {*HOST, *_RENAMED_SERIES}
"""The names of all series about hardware."""

THROTTLE_REASONS = {
    "power cap": 0x4 | 0x80,  # of the software, and the brake of the hardware
    "thermal": 0x20 | 0x40,
    "hardware slowdown": 0x8,
}
"""Why clocks are lower than they could be, as bits of the mask of NVML.

Clocks that are low because the GPU is idle or because a user set them do not count.
"""

_MIB_PER_GIB = 1024

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
    # Why there is no energy although a source was read.
    missing_reason: str = msgspec.field(default="", name="why")


class _Energy(NamedTuple):
    """An energy and its uncertainty, in J."""

    joules: float
    error_j: float


class _InterpolatedValue(NamedTuple):
    """A value of a curve between two of its points, and by how much it may be wrong."""

    value: float
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

    def has_source(self, source: str) -> bool:
        """Return True if a page has a metric of a source."""
        return any(metric.name in self.by_name for metric in SOURCES[source].values())

    def of_quantity(self, source: str, quantity: str) -> Sequence[Readings]:
        """Return the series of a quantity that a source reports; none if it does not report it."""
        metric = SOURCES[source].get(quantity)
        return () if metric is None else self.by_name.get(metric.name, ())

    @property
    def host_counters(self) -> Sequence[Readings]:
        """Return the counters of the energy of the host."""
        return [counter for name in HOST for counter in self.by_name.get(name, ())]


# -- pages -----------------------------------------------------------------------------------------


def select_hardware_values(values: PageValues) -> PageValues:
    """Return the values about power, energy and clocks on a page of Prometheus text.

    Other series are dropped, because the page of a node exporter has two thousand of them. A series
    that has another name in other versions of an exporter is renamed to its name in SOURCES.

    Raises:
        ValueError: There are no such values.
    """
    hardware_values = {}
    for key, value in values.items():
        if key.name in _HARDWARE_NAMES:
            name = _RENAMED_SERIES.get(key.name, key.name)
            hardware_values[SeriesKey(name, key.labels)] = value

    if not hardware_values:
        raise ValueError("the page reports no energy")

    return hardware_values


def parse_energy_metrics(data: bytes) -> PageValues:
    """Return the energy counter on the page `/energy_metrics` of TensorRT-LLM, in joules.

    The page is a JSON object such as `{"total_energy_j": 1.5}`.

    Raises:
        ValueError: The page is not such an object.
    """
    try:
        total_j = msgspec.json.decode(data).get("total_energy_j")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"no energy: {error}") from None

    is_number = isinstance(total_j, int | float) and not isinstance(total_j, bool)
    if not is_number or not math.isfinite(total_j):
        raise ValueError("the page reports no energy")

    counter_name = SOURCES["energy_metrics"][JOULES].name
    return {SeriesKey(counter_name, labels=""): float(total_j)}


def parse_nvidia_smi(text: str) -> PageValues:
    """Return the values in the output of SMI_COMMAND, by series and GPU.

    Each line has the fields of _SMI_FIELDS of one GPU, for example `0, 301.5, 700.00, 1980, 512,
    0x4`. If a GPU has several lines, the last one counts. Other lines, such as warnings, are
    skipped, and so is a value `[N/A]` that a GPU does not report.
    """
    # Runs without nvidia-smi do not need this module.
    import csv

    values: PageValues = {}
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        is_line_of_gpu = len(row) == len(_SMI_FIELDS) and row[0].strip().isdigit()
        if not is_line_of_gpu:
            continue

        labels = format_labels({"gpu": row[0].strip()})
        for series_name, field in zip(_SMI_FIELDS.values(), row, strict=True):
            number = _parse_smi_number(field.strip())
            if series_name and number is not None:
                values[SeriesKey(series_name, labels)] = number

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
    """Return the energy that a run used in its steady state.

    Energy is measured separately for the host (its processors and memory) and for the accelerators.
    The caller adds the values per token and per request, which depend on the load.

    Args:
        samples: The samples of all metrics pages of a run.
        start_s: The start of the steady state, from the start of the run. None if there is none.
        end_s: Its end.

    Returns:
        The energy, or None if no page reports anything about power or energy. If it could not be
        measured, `missing_reason` says why.
    """
    readings = _group_readings(samples)
    accelerator_sources = [source for source in SOURCES if readings.has_source(source)]
    has_host_counters = len(readings.host_counters) > 0
    if not accelerator_sources and not has_host_counters:
        return None
    if start_s is None or end_s is None:
        return EnergyUse(pages=readings.pages, missing_reason="the load never was steady")

    window = _Window(start_s, end_s)
    host_use = _measure_host(readings, window)
    if not accelerator_sources:
        return host_use

    return _measure_accelerators(accelerator_sources, readings, window, host_use)


def _measure_accelerators(
    sources: Sequence[str], readings: _HardwareReadings, window: _Window, host_use: EnergyUse
) -> EnergyUse:
    """Return the energy use of a host completed by that of its accelerators.

    Several sources, such as a metrics exporter and nvidia-smi, may report the same accelerators.
    The first one with enough readings in the window is used. If none has, the result says so.
    """
    for source in sources:
        accelerator_energy = _measure_source(source, readings, window)
        if accelerator_energy is not None:
            return _add_accelerators(host_use, source, accelerator_energy, readings, window)

    missing_reason = (
        f"its {window.length_s:.0f} s have too few readings. One per second is "
        f"needed, with no gap of more than {LONGEST_GAP_S:.0f} s"
    )
    return msgspec.structs.replace(host_use, missing_reason=missing_reason)


def _measure_host(readings: _HardwareReadings, window: _Window) -> EnergyUse:
    """Return the energy that the processors and the memory of the host used in a window.

    It is left out if their counters were not read around the window. The result has no values of
    the accelerators yet.
    """
    energy = _add_energies(
        _energy_of_counter(counter, window) for counter in readings.host_counters
    )
    if energy is None:
        return EnergyUse(pages=readings.pages)
    return EnergyUse(pages=readings.pages, host_joules=energy.joules, window_s=window.length_s)


def _add_accelerators(
    host_use: EnergyUse,
    source: str,
    energy: _Energy,
    readings: _HardwareReadings,
    window: _Window,
) -> EnergyUse:
    """Return the energy use of the host completed by what a source reports of the accelerators.

    Args:
        host_use: The energy use of the processors and the memory.
        source: The source, one of SOURCES. What it does not report is None in the result.
        energy: The energy of all accelerators in the window.
        readings: The readings of all sources.
        window: The time of the run that is measured.
    """
    # Each of these has the readings of every device, or nothing if the source does not report it.
    power_w = readings.of_quantity(source, WATTS)
    power_limit_w = readings.of_quantity(source, LIMIT)
    clock_mhz = readings.of_quantity(source, CLOCK)
    memory_mib = readings.of_quantity(source, MEMORY)
    throttle_masks = readings.of_quantity(source, THROTTLE)

    all_clocks_mhz = _values_in_window(clock_mhz, window)
    mean_clock_mhz = sum(all_clocks_mhz) / len(all_clocks_mhz) if all_clocks_mhz else None
    total_memory_mib = _sums_over_devices(memory_mib, window)
    highest_memory_gib = max(total_memory_mib) / _MIB_PER_GIB if total_memory_mib else None
    throttled_fractions = {
        reason: fraction
        for reason, fraction in _fraction_of_reads_by_reason(throttle_masks, window).items()
        if fraction > 0
    }

    return msgspec.structs.replace(
        host_use,
        source=source,
        devices=len(power_w) if power_w else None,
        window_s=window.length_s,
        joules=energy.joules,
        error_j=energy.error_j,
        watts=energy.joules / window.length_s,
        watts_max=max(_sums_over_devices(power_w, window), default=None),
        limit_watts=_sum_of_last_values(power_limit_w),
        clock_mhz=mean_clock_mhz,
        clock_min_mhz=min(all_clocks_mhz, default=None),
        memory_used_gib=highest_memory_gib,
        throttled=throttled_fractions,
    )


def _measure_source(source: str, readings: _HardwareReadings, window: _Window) -> _Energy | None:
    """Return the energy of all accelerators in a window according to one source.

    Each accelerator may have a counter of the energy that it has used, in a unit that depends on
    the source, such as mJ. The readings of its power are less exact. They are used if there are no
    counters, or if these were not read around the window. Return None if neither cover the window.
    """
    counter_metric = SOURCES[source].get(JOULES)
    if counter_metric is not None:
        energy_of_counters = _add_energies(
            _energy_of_counter(counter, window, joules_per_unit=counter_metric.factor)
            for counter in readings.of_quantity(source, JOULES)
        )
        if energy_of_counters is not None:
            return energy_of_counters

    return _add_energies(
        _energy_of_power(device_power, window)
        for device_power in readings.of_quantity(source, WATTS)
    )


def _values_in_window(readings_by_device: Sequence[Readings], window: _Window) -> list[float]:
    """Return the values of all devices at all reads in a window."""
    return [
        reading.value
        for readings in readings_by_device
        for reading in _select_window(readings, window)
    ]


def _sum_of_last_values(readings_by_device: Sequence[Readings]) -> float | None:
    """Return the sum of the last values of all devices, or None if nothing was reported.

    A sum of 0 also counts as not reported.
    """
    total = sum(readings[-1].value for readings in readings_by_device)
    return total if total else None


def _group_readings(samples: Sequence[MetricSample]) -> _HardwareReadings:
    """Return the values of every series about hardware at each read of its page.

    A series has a name, such as `DCGM_FI_DEV_POWER_USAGE`, and labels that say which device its
    values are from. The result has a list for each name, with the readings of every device. Pages
    without any series about hardware are left out.
    """
    hardware_pages = {sample.page for sample in samples if sample.name in _HARDWARE_NAMES}
    hardware_samples = [sample for sample in samples if sample.page in hardware_pages]
    readings_by_name: dict[str, list[Readings]] = {}
    for page_series, readings in _restore_readings(hardware_samples).items():
        series_name = page_series.key.name
        readings_by_name.setdefault(series_name, []).append(readings)
    return _HardwareReadings(pages=summarize_reads(hardware_samples), by_name=readings_by_name)


class _PageSeries(NamedTuple):
    """A series of one page. Other pages may have a series with the same name and labels."""

    page: str
    key: SeriesKey


def _restore_readings(samples: Sequence[MetricSample]) -> dict[_PageSeries, Readings]:
    """Return the value of each hardware series at every successful read of its page.

    During a run, a value is stored only when it differs from that of the read before. This restores
    the values that were left out. The samples of a read are followed by a sample named `up`, whose
    value is 1 if the read succeeded.

    Args:
        samples: The samples of the pages, in the order in which they were stored.
    """
    current_values_by_page: dict[str, PageValues] = {}
    readings_by_series: dict[_PageSeries, Readings] = {}
    for sample in samples:
        current_values = current_values_by_page.setdefault(sample.page, {})
        if sample.name in _HARDWARE_NAMES:
            current_values[SeriesKey(sample.name, sample.labels)] = sample.value
            continue

        ends_successful_read = sample.name == UP and sample.value > 0
        if not ends_successful_read:
            continue

        for key, value in current_values.items():
            readings = readings_by_series.setdefault(_PageSeries(sample.page, key), [])
            readings.append(Point(sample.t_s, value))

    return readings_by_series


def _energy_of_counter(
    counter: Readings, window: _Window, joules_per_unit: float = 1.0
) -> _Energy | None:
    """Return the growth of an energy counter in a window, or None if it was not read around it.

    The counter is read at other times than the ends of the window, so its value there is
    interpolated. The uncertainties at both ends add up to that of the result.

    Args:
        counter: The values of the counter at the times of the reads. A restart resets it to 0.
        window: The time of the run that is measured.
        joules_per_unit: How many joules one unit of the counter is, such as 0.001 for mJ.
    """
    growth_since_first_reading = _growth_since_first_reading(counter)
    growth_at_start = _interpolate(growth_since_first_reading, window.start_s)
    growth_at_end = _interpolate(growth_since_first_reading, window.end_s)
    if growth_at_start is None or growth_at_end is None:
        return None

    return _Energy(
        joules=(growth_at_end.value - growth_at_start.value) * joules_per_unit,
        error_j=(growth_at_end.error + growth_at_start.error) * joules_per_unit,
    )


def _growth_since_first_reading(counter: Readings) -> list[Point]:
    """Return by how much a counter has grown since its first reading, where its value changes.

    A reading that repeats the value before it is left out: the exporter updates its value more
    rarely than it is read, so the reading does not show how much was used until then. A value that
    is lower than the one before it shows a restart, after which the counter began again at 0.
    """
    curve = [Point(counter[0].t_s, 0.0)]
    for before, after in pairwise(counter):
        has_restarted = after.value < before.value
        growth = after.value if has_restarted else after.value - before.value
        if growth:
            curve.append(Point(after.t_s, curve[-1].value + growth))
    return curve


def _interpolate(curve: Sequence[Point], t_s: float) -> _InterpolatedValue | None:
    """Return the value of a growing curve at a time, by linear interpolation between its points.

    The true value may be anywhere between those of the two points, so the error is the distance to
    the further one. Return None for a time outside of the curve.
    """
    for before, after in pairwise(curve):
        if before.t_s <= t_s <= after.t_s:
            interval_s = after.t_s - before.t_s
            fraction = (t_s - before.t_s) / interval_s if interval_s else 0.0
            growth = after.value - before.value
            error = max(fraction, 1 - fraction) * growth
            return _InterpolatedValue(before.value + fraction * growth, error)
    return None


def _energy_of_power(power: Readings, window: _Window) -> _Energy | None:
    """Return the integral of the power of a device over a window, by the trapezoidal rule.

    Between two readings, the power is assumed to change linearly. The uncertainty of the result is
    two standard deviations; see `_energy_variance`.

    Args:
        power: The readings of the power in W.
        window: The time of the run that is measured.

    Returns:
        The energy. None if the readings do not cover the window, or if two successive ones that are
        needed are more than LONGEST_GAP_S apart.
    """
    if not power:
        return None

    covers_window = power[0].t_s <= window.start_s and power[-1].t_s >= window.end_s
    if not covers_window:
        return None

    joules = 0.0
    variance = 0.0
    for before, after in pairwise(power):
        # The part of the time between the two readings that is in the window.
        part_start_s = max(before.t_s, window.start_s)
        part_end_s = min(after.t_s, window.end_s)
        part_s = part_end_s - part_start_s
        if part_s <= 0:
            continue

        time_between_readings_s = after.t_s - before.t_s
        if time_between_readings_s > LONGEST_GAP_S:
            return None

        start_w = _power_at(part_start_s, before, after)
        end_w = _power_at(part_end_s, before, after)
        joules += (start_w + end_w) / 2 * part_s
        variance += _energy_variance(after.value - before.value, part_s)

    return _Energy(joules, error_j=2 * math.sqrt(variance))


def _energy_variance(step_w: float, length_s: float) -> float:
    """Return the variance in J² of the energy that was used between two readings of the power.

    The power between the readings is not known. It is assumed to jump from one reading to the other
    at a uniformly distributed time. Then the energy is uniformly distributed, too, over a range of
    `step_w * length_s`. The variance of a uniform distribution is range² / 12.

    Args:
        step_w: The difference of the two readings.
        length_s: The time between the readings. If only a part of it is measured, the length of
            this part: the jump is then assumed to be in the part.
    """
    energy_range_j: float = step_w * length_s
    return energy_range_j**2 / 12


def _power_at(t_s: float, before: Point, after: Point) -> float:
    """Return the power at a time on the straight line between two readings."""
    fraction = (t_s - before.t_s) / (after.t_s - before.t_s)
    return before.value + fraction * (after.value - before.value)


def _add_energies(energies: Iterable[_Energy | None]) -> _Energy | None:
    """Return the sum of energies, or None if there are none or one of them is not known."""
    known_energies: list[_Energy] = []
    for energy in energies:
        if energy is None:
            return None
        known_energies.append(energy)

    if not known_energies:
        return None

    return _Energy(
        joules=sum(energy.joules for energy in known_energies),
        error_j=sum(energy.error_j for energy in known_energies),
    )


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


def _fraction_of_reads_by_reason(
    masks_by_device: Sequence[Readings], window: _Window
) -> dict[str, float]:
    """Return how often devices were throttled (slowed down) in a window, for each reason.

    A reading is a bit mask of NVML, in which each bit stands for a reason, such as the temperature.
    The masks of all devices at one read are combined by a bitwise OR.

    Returns:
        For each reason, the fraction of reads at which it applied to at least one device. Empty
        without readings.
    """
    combined_masks = [
        reduce(or_, (int(mask) for mask in masks))
        for masks in _values_by_read(masks_by_device, window)
    ]
    if not combined_masks:
        return {}

    fractions = {}
    for reason, reason_bits in THROTTLE_REASONS.items():
        throttled_reads = sum(1 for mask in combined_masks if mask & reason_bits)
        fractions[reason] = throttled_reads / len(combined_masks)

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
    """Return how often GPUs were throttled (slowed down) in a part of a run, for each reason.

    Several programs, the keys of SOURCES, may report this, such as the DCGM exporter and
    nvidia-smi. The first of them that was read in this time is used.

    Args:
        samples: The samples of all metrics pages of a run.
        start_s: When the part begins, from the start of the run.
        end_s: When it ends.

    Returns:
        For each reason of THROTTLE_REASONS, such as "thermal", the fraction of reads at which it
        applied to at least one GPU. Empty if no program was read in this time.
    """
    readings = _group_readings(samples)
    window = _Window(start_s, end_s)
    for source in SOURCES:
        masks_by_device = readings.of_quantity(source, THROTTLE)
        fractions = _fraction_of_reads_by_reason(masks_by_device, window)
        if fractions:
            return fractions

    return {}
