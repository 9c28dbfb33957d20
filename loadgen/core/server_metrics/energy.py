"""Computes power, clocks and memory of the hardware during a run, and the energy that it used.

Pure. Three sources report what the accelerators use: `/energy_metrics` of TensorRT-LLM (joules of
its own GPUs), the DCGM exporter (watts and a counter of millijoules), and nvidia-smi on the same
machine (watts). The node exporter reports the processors of the host. `scraper.py` reads them.
Nothing is estimated from a data sheet.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from loadgen.core.server_metrics.series import TOOK, UP, MetricSample, PageReading, labels

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
SMI_COMMAND = (
    SMI,
    f"--query-gpu={','.join(_SMI_FIELDS)}",
    "--format=csv,noheader,nounits",
    "-lms",
    "1000",
)

JOULES, WATTS, LIMIT, CLOCK, MEMORY, THROTTLE = (
    "joules",
    "watts",
    "limit_watts",
    "clock_mhz",
    "memory_mib",
    "throttle",
)
SOURCES: dict[str, dict[str, tuple[str, float]]] = {
    "energy_metrics": {JOULES: ("trtllm_energy_joules_total", 1.0)},
    "dcgm": {
        JOULES: ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 1e-3),
        WATTS: ("DCGM_FI_DEV_POWER_USAGE", 1.0),
        LIMIT: ("DCGM_FI_DEV_POWER_MGMT_LIMIT", 1.0),
        CLOCK: ("DCGM_FI_DEV_SM_CLOCK", 1.0),
        MEMORY: ("DCGM_FI_DEV_FB_USED", 1.0),
        THROTTLE: ("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", 1.0),
    },
    "nvidia-smi": {
        WATTS: ("nvidia_smi_power_watts", 1.0),
        LIMIT: ("nvidia_smi_power_limit_watts", 1.0),
        CLOCK: ("nvidia_smi_sm_clock_mhz", 1.0),
        MEMORY: ("nvidia_smi_memory_used_mib", 1.0),
        THROTTLE: ("nvidia_smi_throttle_reasons", 1.0),
    },
}
"""For each source, the name of a quantity there, and the factor from its unit to ours.

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
_NAMES = {name for of in SOURCES.values() for name, _ in of.values()} | {*HOST, *_OTHER_NAMES}

REASONS = {
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


class Amount(msgspec.Struct, frozen=True):
    """An energy and its uncertainty, in J."""

    joules: float
    error: float


class _Line(msgspec.Struct, frozen=True):
    """One series: its values at the times at which its page was read."""

    t_s: list[float]
    values: list[float]


# -- pages -----------------------------------------------------------------------------------------


def select_hardware_values(values: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Return the values about hardware on a page of Prometheus text.

    A node exporter has two thousand other series. Raises ValueError if there are no such values.
    """
    hardware_values = {
        (_OTHER_NAMES.get(name, name), of): value
        for (name, of), value in values.items()
        if name in _NAMES
    }
    if not hardware_values:
        raise ValueError("it reports no energy")
    return hardware_values


def parse_energy_metrics(data: bytes) -> dict[tuple[str, str], float]:
    """Return the energy in a page `/energy_metrics` of trtllm-serve: `{"total_energy_j": 1.5}`.

    Raises ValueError for anything else.
    """
    try:
        total = msgspec.json.decode(data).get("total_energy_j")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"no energy: {error}") from None
    if isinstance(total, bool) or not isinstance(total, int | float) or not math.isfinite(total):
        raise ValueError("no energy in it")
    return {(SOURCES["energy_metrics"][JOULES][0], ""): float(total)}


def parse_nvidia_smi(text: str) -> dict[tuple[str, str], float]:
    """Return the values in the output of SMI_COMMAND; the last line of each GPU counts.

    A value that a GPU does not report is written `[N/A]` there and is left out.
    """
    import csv

    values: dict[tuple[str, str], float] = {}
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(_SMI_FIELDS) or not row[0].strip().isdigit():
            continue
        device = labels({"gpu": row[0].strip()})
        for name, field in zip(_SMI_FIELDS.values(), row, strict=True):
            number = _number(field.strip())
            if name and number is not None:
                values[name, device] = number
    return values


def _number(text: str) -> float | None:
    try:
        number = float(int(text, 16)) if text.startswith("0x") else float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


# -- a run -----------------------------------------------------------------------------------------


def measure_energy(
    samples: Sequence[MetricSample], start_s: float | None, end_s: float | None
) -> EnergyUse | None:
    """Return what was used from `start_s` to `end_s` of a run, or None without hardware pages.

    The caller adds the values per token and per request, which depend on the load.
    """
    pages, lines = _lines(samples)
    sources = [
        source
        for source, names in SOURCES.items()
        if any(name in lines for name, _ in names.values())
    ]
    host = [line for name in HOST for line in lines.get(name, {}).values()]
    if not sources and not host:
        return None
    use = EnergyUse(pages=tuple(pages))
    if start_s is None or end_s is None:
        return msgspec.structs.replace(use, why="the load was never steady")
    window = (start_s, end_s)
    host_energy = _sum(_of_counter(line, *window) for line in host) if host else None
    if host_energy is not None:
        use = msgspec.structs.replace(use, host_joules=host_energy.joules, window_s=end_s - start_s)
    for source in sources:
        source_use = _of_source(source, lines, window, use)
        if source_use is not None:
            return source_use
    if not sources:
        return use
    reason = (
        f"there are not enough readings in its {end_s - start_s:.0f} s: one a second, none apart "
        f"more than {LONGEST_GAP_S:.0f} s"
    )
    return msgspec.structs.replace(use, why=reason)


def _of_source(
    source: str,
    lines: Mapping[str, Mapping[tuple[str, str], _Line]],
    window: tuple[float, float],
    use: EnergyUse,
) -> EnergyUse | None:
    """Return `use` with the values of a source, or None if the source has no energy or power."""
    names = SOURCES[source]

    def of(quantity: str) -> list[_Line]:
        name, _ = names.get(quantity, ("", 1.0))
        return list(lines.get(name, {}).values())

    amount = (
        _sum(_of_counter(line, *window, names[JOULES][1]) for line in of(JOULES))
        if of(JOULES)
        else None
    )
    if amount is None and of(WATTS):
        amount = _sum(_of_watts(line, *window) for line in of(WATTS))
    if amount is None:
        return None
    length_s = window[1] - window[0]
    clocks = [value for line in of(CLOCK) for value in _inside(line, window)]
    marks = _marks(of(THROTTLE), window)
    shares = {
        name: sum(bool(mark & mask) for mark in marks) / len(marks)
        for name, mask in REASONS.items()
        if marks
    }
    return msgspec.structs.replace(
        use,
        source=source,
        devices=len(of(WATTS)) or None,
        window_s=length_s,
        joules=amount.joules,
        error_j=amount.error,
        watts=amount.joules / length_s,
        watts_max=max(_added(of(WATTS), window), default=None),
        limit_watts=sum(line.values[-1] for line in of(LIMIT)) or None,
        clock_mhz=sum(clocks) / len(clocks) if clocks else None,
        clock_min_mhz=min(clocks, default=None),
        memory_used_gib=max((value / 1024 for value in _added(of(MEMORY), window)), default=None),
        throttled={name: share for name, share in shares.items() if share},
    )


def _lines(
    samples: Sequence[MetricSample],
) -> tuple[list[PageReading], dict[str, dict[tuple[str, str], _Line]]]:
    """Return the pages with values of SOURCES or HOST, and the series of these values.

    A series has the value at every read that succeeded.
    """
    ours = {sample.page for sample in samples if sample.name in _NAMES}
    current: dict[tuple[str, str, str], float] = {}
    ups: dict[str, list[float]] = {}
    lines: dict[str, dict[tuple[str, str], _Line]] = {}
    for sample in samples:
        if sample.page not in ours:
            continue
        if sample.name in _NAMES:
            current[sample.page, sample.name, sample.labels] = sample.value
        elif sample.name == UP:  # the last line of each read
            ups.setdefault(sample.page, []).append(sample.value)
            for (page, name, of), value in current.items():
                if sample.value and page == sample.page:
                    line = lines.setdefault(name, {}).setdefault((page, of), _Line([], []))
                    line.t_s.append(sample.t_s)
                    line.values.append(value)
    return [
        PageReading(url=page, reads=len(of), failed=of.count(0.0)) for page, of in ups.items()
    ], lines


def _of_counter(line: _Line, start_s: float, end_s: float, unit: float = 1.0) -> Amount | None:
    """Return the growth of a counter over a time, or None if the readings do not cover it.

    A counter that falls was restarted, so its growth before the restart is added.
    """
    t_s, values = [line.t_s[0]], [0.0]
    total = 0.0
    for (_, before), (at, after) in pairwise(zip(line.t_s, line.values, strict=True)):
        growth = after - before if after >= before else after
        if growth:  # an exporter that reads more seldom than we do repeats its value
            total += growth
            t_s.append(at)
            values.append(total)
    begin, end = (_between(t_s, values, at) for at in (start_s, end_s))
    if begin is None or end is None:
        return None
    return Amount((end.joules - begin.joules) * unit, (end.error + begin.error) * unit)


def _between(t_s: Sequence[float], values: Sequence[float], at: float) -> Amount | None:
    """Return the value of a growing curve at a time, by linear interpolation.

    Its error is the distance to the further one of the two points, as it may be anywhere between.
    """
    for (t0, v0), (t1, v1) in pairwise(zip(t_s, values, strict=True)):
        if t0 <= at <= t1:
            share = (at - t0) / (t1 - t0)
            return Amount(v0 + share * (v1 - v0), max(share, 1 - share) * (v1 - v0))
    return None


def _of_watts(line: _Line, start_s: float, end_s: float) -> Amount | None:
    """Return the integral of a power over a time, interpolated linearly between its readings.

    Returns None if the readings do not cover the time or are too far apart. The variance of a step
    at a uniformly distributed time between two readings is a twelfth of its squared area.
    """
    if not line.t_s or line.t_s[0] > start_s or line.t_s[-1] < end_s:
        return None
    joules = variance = 0.0
    for (t0, w0), (t1, w1) in pairwise(zip(line.t_s, line.values, strict=True)):
        low, high = max(t0, start_s), min(t1, end_s)
        if high <= low:
            continue
        if t1 - t0 > LONGEST_GAP_S:
            return None
        ends = [w0 + (w1 - w0) * (at - t0) / (t1 - t0) for at in (low, high)]
        joules += sum(ends) / 2 * (high - low)
        variance += ((w1 - w0) * (high - low)) ** 2 / 12
    return Amount(joules, 2 * math.sqrt(variance))


def _sum(amounts: Iterable[Amount | None]) -> Amount | None:
    """Return the sum of energies, or None if one of them is not known."""
    total = Amount(0.0, 0.0)
    for amount in amounts:
        if amount is None:
            return None
        total = Amount(total.joules + amount.joules, total.error + amount.error)
    return total


def _inside(line: _Line, window: tuple[float, float]) -> list[float]:
    return [
        value for t, value in zip(line.t_s, line.values, strict=True) if window[0] <= t <= window[1]
    ]


def _added(lines: Sequence[_Line], window: tuple[float, float]) -> list[float]:
    """Return the sum over all devices at each reading."""
    return [sum(values) for values in zip(*(_inside(line, window) for line in lines), strict=False)]


def _marks(lines: Sequence[_Line], window: tuple[float, float]) -> list[int]:
    """Return the throttle reasons of all devices together at each reading."""
    together = []
    for values in zip(*(_inside(line, window) for line in lines), strict=False):
        mark = 0
        for value in values:
            mark |= int(value)
        together.append(mark)
    return together


def without_hardware_pages(samples: Sequence[MetricSample]) -> list[MetricSample]:
    """Return the samples without those of pages that report only hardware."""
    servers = {sample.page for sample in samples if sample.name not in (*_NAMES, UP, TOOK)}
    hardware = {sample.page for sample in samples if sample.name in _NAMES} - servers
    return [sample for sample in samples if sample.page not in hardware]


def throttled_fractions(
    samples: Sequence[MetricSample], start_s: float, end_s: float
) -> dict[str, float]:
    """Return for each reason the fraction of readings at which it throttled some device."""
    _, lines = _lines(samples)
    for names in SOURCES.values():
        if THROTTLE in names and (
            marks := _marks([*lines.get(names[THROTTLE][0], {}).values()], (start_s, end_s))
        ):
            return {
                name: sum(bool(mark & mask) for mark in marks) / len(marks)
                for name, mask in REASONS.items()
            }
    return {}
