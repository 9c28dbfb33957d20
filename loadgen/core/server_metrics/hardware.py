"""Read the accelerators, driver and power limit from the metrics pages of the hardware.

Pure. DCGM's exporter and nvidia-smi name them in the labels of their series. The power limit is a
value of its own. What no page reports stays empty.
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
MODEL_LABELS = ("modelName", "name")
"""The labels with the model: of DCGM's exporter, and of nvidia_smi_gpu_info."""
DRIVER_LABELS = ("DCGM_FI_DRIVER_VERSION", "driver_version")
DEVICE_LABELS = ("UUID", "uuid", "gpu")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


class SeenHardware(msgspec.Struct, frozen=True, kw_only=True):
    """What the pages of the hardware report. "" and None stand for what they do not report.

    Attributes:
        pages: The URLs of the pages.
        accelerators: The number of accelerators.
        model: Their model. Several models are separated by commas.
        driver: Their driver. Several drivers are separated by commas.
        power_limit_w: The power limit of one accelerator, the lowest if they differ.
        power_limit_most_w: The highest power limit.
    """

    pages: tuple[str, ...]
    accelerators: int
    model: str = ""
    driver: str = ""
    power_limit_w: float | None = None
    power_limit_most_w: float | None = None

    @property
    def descriptions(self) -> list[str]:
        """Return the facts as texts: `8 x NVIDIA H200`, `driver 580.65.06`, `power limit 700 W`."""
        facts = [f"{self.accelerators} x {self.model or 'accelerators without a name'}"]
        if self.driver:
            facts.append(f"driver {self.driver}")
        low_w = self.power_limit_w
        high_w = self.power_limit_most_w
        if low_w is not None and high_w is not None:
            limit = f"{low_w:g} W each" if low_w == high_w else f"{low_w:g} to {high_w:g} W"
            facts.append(f"power limit {limit}")
        return facts

    @property
    def known_keys(self) -> set[str]:
        """Return the keys of a system description (`execution/system_file.py`) that are known."""
        values = {
            "accelerator.model": self.model,
            "accelerator.driver": self.driver,
            "accelerator.power_limit_w": self.power_limit_w,
            "accelerator.per_node": self.accelerators,
        }
        return {key for key, value in values.items() if value}


def find_hardware(samples: Sequence[MetricSample]) -> SeenHardware | None:
    """Return what the samples of a run report, or None if no page of hardware was read."""
    pages: dict[str, None] = {}
    labels_of_device: dict[str, dict[str, str]] = {}
    limit_of_device_w: dict[str, float] = {}
    for sample in samples:
        if not sample.name.startswith(("DCGM_FI_", "nvidia_smi_")):
            continue
        labels = {name: value for name, value in _LABEL.findall(sample.labels) if value}
        device_label = _first_label(labels, DEVICE_LABELS)
        if not device_label:
            continue
        # Without UUIDs each node has a GPU 0, so the page is part of the name.
        device = f"{sample.page} {device_label}"
        pages[sample.page] = None
        labels_of_device.setdefault(device, {}).update(labels)
        if sample.name in LIMITS and sample.value > 0:
            limit_of_device_w[device] = sample.value
    if not labels_of_device:
        return None
    return SeenHardware(
        pages=tuple(pages),
        accelerators=len(labels_of_device),
        model=_distinct_values(labels_of_device.values(), MODEL_LABELS),
        driver=_distinct_values(labels_of_device.values(), DRIVER_LABELS),
        power_limit_w=min(limit_of_device_w.values(), default=None),
        power_limit_most_w=max(limit_of_device_w.values(), default=None),
    )


def _first_label(labels: dict[str, str], names: Sequence[str]) -> str:
    """Return the value of the first of these labels that is set, or ""."""
    return next((labels[name] for name in names if name in labels), "")


def _distinct_values(devices: Iterable[dict[str, str]], names: Sequence[str]) -> str:
    """Return the values of a label of all devices, separated by commas."""
    values = {_first_label(labels, names) for labels in devices}
    return ", ".join(sorted(value for value in values if value))
