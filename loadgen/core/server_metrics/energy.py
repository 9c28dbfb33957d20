"""Power, clocks and memory of the hardware under a run, and the energy of a part of it. Pure.

Three sources say how much the accelerators use: TensorRT-LLM's `/energy_metrics` (joules of its own
GPUs), the DCGM exporter (watts and a counter of millijoules), and nvidia-smi on the same machine
(watts). The node exporter says what the host's processors use. `scraper.py` reads them; nothing
here is estimated from a data sheet.
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
    "clocks_throttle_reasons.active": "nvidia_smi_throttle_reasons",  # the name that all driver versions take
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
SOURCES: dict[
    str, dict[str, tuple[str, float]]
] = {  # source -> quantity -> its name there, and what makes its unit
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
HOST = ("node_rapl_package_joules_total", "node_rapl_dram_joules_total")
"""Of the node exporter: what the host's processors and memory have used."""
_OTHER_NAMES = {
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS",  # in newer versions
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION_total": "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",  # the parser's, of a counter
}
_NAMES = {name for of in SOURCES.values() for name, _ in of.values()} | {*HOST, *_OTHER_NAMES}

REASONS = {
    "power cap": 0x4 | 0x80,  # of the software, and the brake of the hardware
    "thermal": 0x20 | 0x40,
    "hardware slowdown": 0x8,
}
"""Why clocks are lower than they could be: bits of NVML's mask. Idle clocks and clocks that a user set are none."""

LONGEST_GAP_S = 5.0  # between two reads inside the window; a longer one leaves its energy unknown


class EnergyUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the accelerators used while the load was steady; null where no source says it.

    `error_j`: how wrong `joules` can be, since what is used between two readings is not seen. A
    counter is bounded by its readings on both sides of the window's ends; for watts it is twice the
    standard error of a step at an unknown instant between two readings.
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
    throttled: dict[str, float] = {}  # reason -> share of the readings at which some device had it
    host_joules: float | None = None  # by the node exporter: processors and memory of the host
    why: str = ""  # why there is no energy though a source was read, in words


class Amount(msgspec.Struct, frozen=True):
    """An energy in J, and how wrong it can be."""

    joules: float
    error: float


class _Line(msgspec.Struct, frozen=True):
    """One series: its values at the readings of its page, or at its changes."""

    t_s: list[float]
    values: list[float]


# -- pages
# -----------------------------------------------------------------------------------------------------------


def known(values: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """What is of use on a page of Prometheus text; a node exporter has two thousand series more. Raises ValueError."""
    found = {
        (_OTHER_NAMES.get(name, name), of): value
        for (name, of), value in values.items()
        if name in _NAMES
    }
    if not found:
        raise ValueError("nothing about energy on it")
    return found


def of_energy_metrics(data: bytes) -> dict[tuple[str, str], float]:
    """`/energy_metrics` of trtllm-serve: `{"total_energy_j": 1.5, ...}`. Raises ValueError for anything else."""
    try:
        total = msgspec.json.decode(data).get("total_energy_j")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"no energy: {error}") from None
    if isinstance(total, bool) or not isinstance(total, int | float) or not math.isfinite(total):
        raise ValueError("no energy in it")
    return {(SOURCES["energy_metrics"][JOULES][0], ""): float(total)}


def of_smi(text: str) -> dict[tuple[str, str], float]:
    """The lines of SMI_COMMAND: the last one of each GPU. What a GPU does not say is written `[N/A]` there."""
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


# -- a run
# -----------------------------------------------------------------------------------------------------------


def measured(
    samples: Sequence[MetricSample], start_s: float | None, end_s: float | None
) -> EnergyUse | None:
    """What was used from `start_s` to `end_s` of a run; None where no page of hardware was read.

    The per-token figures are the caller's: this room knows nothing of the load.
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
    seen = EnergyUse(pages=tuple(pages))
    if start_s is None or end_s is None:
        return msgspec.structs.replace(seen, why="the load was never steady")
    window = (start_s, end_s)
    if host and (of_host := _sum(_of_counter(line, *window) for line in host)) is not None:
        seen = msgspec.structs.replace(seen, host_joules=of_host.joules, window_s=end_s - start_s)
    for source in sources:  # the best one comes first in SOURCES
        found = _of_source(source, lines, window, seen)
        if found is not None:
            return found
    why = f"there are not enough readings in its {end_s - start_s:.0f} s: one a second, none apart more than "
    return msgspec.structs.replace(seen, why=f"{why}{LONGEST_GAP_S:.0f} s" if sources else "")


def _of_source(
    source: str,
    lines: Mapping[str, Mapping[tuple[str, str], _Line]],
    window: tuple[float, float],
    seen: EnergyUse,
) -> EnergyUse | None:
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
        seen,
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
    """The pages with something of SOURCES or HOST, and their series: the value at every read that succeeded."""
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
    """The growth of a counter over a time. One that falls has been restarted: what was before is added."""
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
    """The value of a growing curve at an instant, in a straight line between its points; it may be anywhere between."""
    for (t0, v0), (t1, v1) in pairwise(zip(t_s, values, strict=True)):
        if t0 <= at <= t1:
            share = (at - t0) / (t1 - t0)
            return Amount(v0 + share * (v1 - v0), max(share, 1 - share) * (v1 - v0))
    return None


def _of_watts(line: _Line, start_s: float, end_s: float) -> Amount | None:
    """The integral of a power over a time, in straight lines between its readings."""
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
    """All together; None where one is not known."""
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
    """The sum over all devices at each reading."""
    return [sum(values) for values in zip(*(_inside(line, window) for line in lines), strict=False)]


def _marks(lines: Sequence[_Line], window: tuple[float, float]) -> list[int]:
    """The reasons of all devices together at each reading."""
    together = []
    for values in zip(*(_inside(line, window) for line in lines), strict=False):
        mark = 0
        for value in values:
            mark |= int(value)
        together.append(mark)
    return together


def not_of_hardware(samples: Sequence[MetricSample]) -> list[MetricSample]:
    """The samples of pages that say something else than energy."""
    servers = {sample.page for sample in samples if sample.name not in (*_NAMES, UP, TOOK)}
    hardware = {sample.page for sample in samples if sample.name in _NAMES} - servers
    return [sample for sample in samples if sample.page not in hardware]


def capped(samples: Sequence[MetricSample], start_s: float, end_s: float) -> dict[str, float]:
    """Reason -> share of the readings of this time at which some device was held back by it."""
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
