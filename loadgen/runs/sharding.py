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
    """Return the settings of one part of a run that is divided between independent machines.

    `shard` and `start_at` are the values of the options `--shard` and `--start-at`. Without both,
    the settings are returned as they are.

    Raises UserError if one of the two is missing or wrong, or if another option cannot be combined
    with them.
    """
    if shard is None and start_at is None:
        return settings
    if start_at is None:
        raise _missing_option_error("--shard", "--start-at")
    if shard is None:
        raise _missing_option_error("--start-at", "--shard")

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


def _missing_option_error(specified: str, missing: str) -> UserError:
    """Return the error of a command with only one of `--shard` and `--start-at`."""
    return UserError(
        "missing_option",
        f"{specified} requires {missing}: all parts of a run start at the same time",
        specified,
        "--shard 1/8 --start-at 2026-12-01T10:00:00Z",
    )


def check_divisible(
    settings: Settings, workloads: Collection[Workload], *, is_repeated: bool
) -> None:
    """Raise UserError if a load cannot be divided between machines with `--shard`.

    Each machine computes the whole schedule and sends its part, starting at the time `--start-at`.
    So all machines must use the same seed, and the command must have a single run.

    Args:
        settings: The settings, with the part of this machine. Nothing is checked without one.
        workloads: The workload of each load point of the command.
        is_repeated: Whether the command repeats the load.
    """
    if settings.shard is None:
        return

    shard_option = f"--shard {settings.shard.index}/{settings.shard.count}"
    if is_repeated or len(workloads) > 1:
        raise UserError(
            "conflict",
            "several load points would need several start times, but the parts of a run have one",
            shard_option,
            "use one value of --concurrency and no --repeat",
        )

    for workload in workloads:
        if workload.seed is None or workload.salt == seeds.FRESH:
            raise UserError(
                "missing_option",
                "all parts need the same seed and salt; otherwise they send different loads",
                shard_option,
                "use --seed 1 and no --salt fresh",
            )
