"""Read the accelerators, driver and power limit from the metrics pages of the hardware.

Pure. DCGM's exporter and nvidia-smi name them in the labels of their series. The power limit is a
value of its own. What no page reports stays empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

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
_HARDWARE_PREFIXES = ("DCGM_FI_", "nvidia_smi_")
"""How the names of series about hardware begin: of DCGM's exporter, and of nvidia-smi."""
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


class SeenHardware(msgspec.Struct, frozen=True, kw_only=True):
    """What the pages of the hardware report. "" and None stand for what they do not report.

    Attributes:
        pages: The URLs of the pages.
        accelerators: The number of accelerators.
        model: Their model. Several models are separated by commas.
        driver: Their driver. Several drivers are separated by commas.
        power_limit_w: The power limit of one accelerator, the lowest if they differ.
        highest_power_limit_w: The highest power limit.
    """

    pages: tuple[str, ...]
    accelerators: int
    model: str = ""
    driver: str = ""
    power_limit_w: float | None = None
    highest_power_limit_w: float | None = msgspec.field(default=None, name="power_limit_most_w")

    @property
    def descriptions(self) -> list[str]:
        """Return the facts as texts: `8 x NVIDIA H200`, `driver 580.65.06`, `power limit 700 W`."""
        facts = [f"{self.accelerators} x {self.model or 'accelerators without a name'}"]
        if self.driver:
            facts.append(f"driver {self.driver}")

        lowest_w = self.power_limit_w
        highest_w = self.highest_power_limit_w
        if lowest_w is not None and highest_w is not None:
            has_one_limit = lowest_w == highest_w
            limit = f"{lowest_w:g} W each" if has_one_limit else f"{lowest_w:g} to {highest_w:g} W"
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
    """Return the accelerators that the metrics pages of a run report, or None if there are none.

    Args:
        samples: The samples of all metrics pages of the run.
    """
    devices = _group_by_device(samples)
    if not devices:
        return None

    pages = dict.fromkeys(key.page for key in devices)  # without duplicates, in order
    limits_w = [
        device.power_limit_w for device in devices.values() if device.power_limit_w is not None
    ]
    return SeenHardware(
        pages=tuple(pages),
        accelerators=len(devices),
        model=_join_distinct_labels(devices.values(), MODEL_LABELS),
        driver=_join_distinct_labels(devices.values(), DRIVER_LABELS),
        power_limit_w=min(limits_w, default=None),
        highest_power_limit_w=max(limits_w, default=None),
    )


def _group_by_device(samples: Sequence[MetricSample]) -> dict[_DeviceKey, _Device]:
    """Return the labels and the power limit of each accelerator, in order of appearance.

    The labels of a sample say which accelerator it is about. The value of a sample is used only if
    it is a power limit, which its name shows (see LIMITS).
    """
    devices: dict[_DeviceKey, _Device] = {}
    for sample in samples:
        is_about_hardware = sample.name.startswith(_HARDWARE_PREFIXES)
        labels = _parse_labels(sample.labels)
        device_name = _first_label(labels, DEVICE_LABELS)
        if not is_about_hardware or not device_name:
            continue

        device = devices.setdefault(_DeviceKey(sample.page, device_name), _Device())
        device.labels.update(labels)

        if sample.name in LIMITS and sample.value > 0:
            device.power_limit_w = sample.value

    return devices


class _DeviceKey(NamedTuple):
    """An accelerator. The page is needed because without UUIDs every node has a GPU 0."""

    page: str
    name: str


class _Device(msgspec.Struct):
    """What the samples of one accelerator say: its labels, and the limit of its power."""

    labels: dict[str, str] = {}
    power_limit_w: float | None = None


def _parse_labels(text: str) -> dict[str, str]:
    """Return the labels in a text such as `gpu="0",modelName="NVIDIA H200"`, without empty ones."""
    return {name: value for name, value in _LABEL.findall(text) if value}


def _first_label(labels: dict[str, str], names: Sequence[str]) -> str:
    """Return the value of the first of these labels that is set, or ""."""
    return next((labels[name] for name in names if name in labels), "")


def _join_distinct_labels(devices: Iterable[_Device], names: Sequence[str]) -> str:
    """Return the distinct values of a label over all devices, separated by commas.

    `names` are the names that the label has on different pages.
    """
    values = {_first_label(device.labels, names) for device in devices}
    return ", ".join(sorted(value for value in values if value))
