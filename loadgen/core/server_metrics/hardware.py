"""Which accelerators, driver and power limit the hardware's metrics pages name: DCGM's exporter, nvidia-smi's. Pure.

A page names them in the labels of its series; the limit is a value of its own. What no page says stays empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from loadgen.core.server_metrics.series import MetricSample

LIMITS = (
    "DCGM_FI_DEV_POWER_MGMT_LIMIT",
    "DCGM_FI_DEV_ENFORCED_POWER_LIMIT",
    "nvidia_smi_enforced_power_limit_watts",
    "nvidia_smi_power_limit_watts",
)
MODELS = ("modelName", "name")  # labels: of DCGM's exporter, of nvidia_smi_gpu_info
DRIVERS = ("DCGM_FI_DRIVER_VERSION", "driver_version")
DEVICES = ("UUID", "uuid", "gpu")
_LABEL = r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"'


class SeenHardware(msgspec.Struct, frozen=True, kw_only=True):
    """What the pages of the hardware name. "" and null: they do not say. Several drivers or models: all of them."""

    pages: tuple[str, ...]
    accelerators: int
    model: str = ""
    driver: str = ""
    power_limit_w: float | None = None  # of one; the lowest where they differ
    power_limit_most_w: float | None = None  # the highest

    @property
    def words(self) -> list[str]:
        """For people: `8 x NVIDIA H200`, `driver 580.65.06`, `power limit 700 W each`."""
        low, high = self.power_limit_w, self.power_limit_most_w
        limit = (
            ""
            if low is None or high is None
            else f"{low:g} W each"
            if low == high
            else f"{low:g} to {high:g} W"
        )
        return [
            f"{self.accelerators} x {self.model or 'accelerators without a name'}",
            *([f"driver {self.driver}"] if self.driver else []),
            *([f"power limit {limit}"] if limit else []),
        ]

    @property
    def known_keys(self) -> set[str]:
        """The keys of a description of the system (`execution/system_file.py`) that are known by it."""
        known = {
            "accelerator.model": self.model,
            "accelerator.driver": self.driver,
            "accelerator.power_limit_w": self.power_limit_w,
            "accelerator.per_node": self.accelerators,
        }
        return {key for key, value in known.items() if value}


def of_samples(samples: Sequence[MetricSample]) -> SeenHardware | None:
    """What the series of a run name; None where no page of hardware was read."""
    pages: dict[str, None] = {}
    devices: dict[str, dict[str, str]] = {}
    limits: dict[str, float] = {}
    for sample in samples:
        if not sample.name.startswith(("DCGM_FI_", "nvidia_smi_")):
            continue
        named = {name: value for name, value in re.findall(_LABEL, sample.labels) if value}
        device = next((named[key] for key in DEVICES if key in named), "")
        if not device:
            continue
        device = f"{sample.page} {device}"  # GPU 0 of each node, where there is no UUID
        pages[sample.page] = None
        devices.setdefault(device, {}).update(named)
        if sample.name in LIMITS and sample.value > 0:
            limits[device] = sample.value
    if not devices:
        return None
    return SeenHardware(
        pages=tuple(pages),
        accelerators=len(devices),
        model=_all(devices.values(), MODELS),
        driver=_all(devices.values(), DRIVERS),
        power_limit_w=min(limits.values(), default=None),
        power_limit_most_w=max(limits.values(), default=None),
    )


def _all(devices: Iterable[dict[str, str]], keys: Sequence[str]) -> str:
    found = (next((named[key] for key in keys if key in named), "") for named in devices)
    return ", ".join(sorted({value for value in found if value}))
