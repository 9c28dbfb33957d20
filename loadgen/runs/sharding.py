"""Checks of `loadgen run --shard`: what a run that is divided into independent parts needs."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from loadgen.core import seeds
from loadgen.core.errors import UserError
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.shard import parse_shard
from loadgen.core.workload import Workload


def with_shard(settings: Settings, shard: str | None, start_at: str | None) -> Settings:
    """Return the settings of the part of a run that `--shard` and `--start-at` describe.

    Raises UserError if one of the two is missing or wrong, or if another option cannot be divided.
    """
    if shard is None and start_at is None:
        return settings
    if shard is None or start_at is None:
        specified, missing = ("--start-at", "--shard")
        if start_at is None:
            specified, missing = ("--shard", "--start-at")
        raise UserError(
            "missing_option",
            f"{specified} requires {missing}: all parts of a run start at the same time",
            specified,
            "--shard 1/8 --start-at 2026-12-01T10:00:00Z",
        )
    if settings.ray is not None:
        raise UserError(
            "conflict",
            "Ray divides a run itself",
            f"--shard {shard} --ray {settings.ray}",
            "use one of the two",
        )
    if settings.keep != "raw":
        raise UserError(
            "unsupported",
            "inter-chunk latencies per request cannot be merged from the parts of a run",
            f"--keep {settings.keep}",
            "leave it out",
        )
    return replace(settings, shard=parse_shard(shard, start_at))


def check_divisible(
    settings: Settings, workloads: Collection[Workload], *, is_repeated: bool
) -> None:
    """Raise UserError if a run that is divided into parts is not one load with a fixed seed."""
    if settings.shard is None:
        return
    where = f"--shard {settings.shard.index}/{settings.shard.count}"
    if is_repeated or len(workloads) > 1:
        raise UserError(
            "conflict",
            "a part belongs to one run, and several loads need several starts",
            where,
            "use one value of --concurrency and no --repeat",
        )
    for workload in workloads:
        if workload.seed is None or workload.salt == seeds.FRESH:
            raise UserError(
                "missing_option",
                "all parts need the same seed and salt, or they send different loads",
                where,
                "use --seed 1 and no --salt fresh",
            )
