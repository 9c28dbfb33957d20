"""The load points of a sweep as they were requested. Pure.

Every load point has a load. In a sweep over lengths or targets it also has a prompt length, an
output length and a target of its own. Only load points with the same three lie on one curve.
"""

from __future__ import annotations

import re

import msgspec

from loadgen.core import format


class PointGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What the load points of one curve have in common.

    Attributes:
        isl: The prompt length in tokens. Null if it is the one of the workload.
        osl: The output length in tokens. Null if it is the one of the workload.
        target: The name or URL of the target. Empty if the sweep has only one.
    """

    isl: int | None = None
    osl: int | None = None
    target: str = ""

    @property
    def lengths_label(self) -> str:
        """Return the lengths as text, for example "ISL 1,000, OSL 100", or "" if none is given."""
        lengths = (("ISL", self.isl), ("OSL", self.osl))
        return ", ".join(f"{axis} {length:,}" for axis, length in lengths if length is not None)

    @property
    def label(self) -> str:
        """Return the lengths and the target as text."""
        return ", ".join(filter(None, (self.lengths_label, self.target)))

    @property
    def directory_prefix(self) -> str:
        """Return the beginning of the names of its runs, for example "isl500-osl100-"."""
        lengths = (("isl", self.isl), ("osl", self.osl))
        parts = [f"{axis}{length}" for axis, length in lengths if length is not None]
        if self.target:
            parts.append(re.sub(r"[^0-9A-Za-z.-]+", "-", self.target))
        return "".join(f"{part}-" for part in parts)


class LoadPoint(PointGroup, frozen=True, kw_only=True):
    """One load point of a sweep.

    Attributes:
        name: The name of the directory of its run, for example "isl500-osl100-c8".
        load: The number of virtual users, or of requests per second.
    """

    name: str
    load: float

    @property
    def group(self) -> PointGroup:
        """Return what it has in common with the other load points of its curve."""
        return PointGroup(isl=self.isl, osl=self.osl, target=self.target)


def counted_points(number: int) -> str:
    """Return a number of load points as text: "1 load point", "8 load points"."""
    return format.counted(number, "load point")
