"""Read the parts of a run from their directories, and check that they belong to the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from loadgen.core.errors import CombinedError, LoadgenError, UserError, collecting, missing_result
from loadgen.core.results.files import refuse_links
from loadgen.core.results.manifest import RunManifest, ShardPart, StagePlan, decode_manifest

WORKERS_OF_MISSING_PART = 1
"""The number of workers that a missing part counts as, to which its lost requests are assigned."""
HINT = "give the folders that loadgen run --shard wrote"


@dataclass(frozen=True)
class RunPart:
    """One part of a run: its directory, its manifest, and which part it is."""

    run_dir: Path
    manifest: RunManifest
    shard: ShardPart


@dataclass(frozen=True)
class PartPosition:
    """The place of one part in the merged run.

    Attributes:
        index: The number of the part, from 1.
        count: The number of parts of the run.
        part: The part, or None if it is missing.
        first_worker: The number of its first worker in the merged run.
        workers: The number of its workers.
    """

    index: int
    count: int
    part: RunPart | None
    first_worker: int
    workers: int

    @property
    def name(self) -> str:
        """The name of the part in messages, such as "part 1 of 3"."""
        return f"part {self.index} of {self.count}"

    @property
    def state(self) -> str:
        """How the part ended: the state in its manifest, or "killed" or "missing"."""
        if self.part is None:
            return "missing"
        return "killed" if self.part.manifest.state == "running" else self.part.manifest.state

    @property
    def is_incomplete(self) -> bool:
        """True if requests of the part may have no record."""
        return self.state in ("missing", "killed")

    @property
    def delay_ms(self) -> float:
        """Time from the common start to the start of the part, or 0 if it did not start."""
        if self.part is None or self.part.shard.start_delay_ms is None:
            return 0.0
        return self.part.shard.start_delay_ms

    @property
    def delay_ns(self) -> int:
        """Time from the common start to the start of the part, in nanoseconds."""
        return round(self.delay_ms * 1e6)


def locate_parts(parts: Sequence[RunPart]) -> list[PartPosition]:
    """Return the place of every part of the run, also of missing ones, ordered by their index.

    Each part numbers its workers from 0. In the merged run they are numbered part after part, so
    that no number occurs twice. A missing part counts as one worker, to which the records of its
    lost requests are assigned.
    """
    part_by_index = {part.shard.index: part for part in parts}
    part_count = parts[0].shard.count
    positions = []

    next_worker = 0
    for index in range(1, part_count + 1):
        part = part_by_index.get(index)
        worker_count = WORKERS_OF_MISSING_PART if part is None else part.manifest.workers
        positions.append(
            PartPosition(
                index=index,
                count=part_count,
                part=part,
                first_worker=next_worker,
                workers=worker_count,
            )
        )
        next_worker += worker_count

    return positions


def read_parts(run_dirs: Sequence[Path]) -> list[RunPart]:
    """Return the parts in these directories, ordered by their index.

    Raises:
        CombinedError: A directory has no part, two have the same part, or the parts are of
            different runs.
    """
    errors: list[LoadgenError] = []
    parts: list[RunPart] = []
    for run_dir in run_dirs:
        with collecting(errors):
            parts.append(read_part(run_dir))

    if not errors:
        parts.sort(key=lambda part: part.shard.index)
        errors = [*_find_differences(parts), *_find_duplicates(parts)]

    if errors:
        raise CombinedError(errors)

    return parts


def read_part(run_dir: Path) -> RunPart:
    """Return the part in a directory.

    Raises:
        UserError: There is no part in it.
    """
    if not run_dir.is_dir():
        raise missing_result(run_dir, HINT)

    refuse_links(run_dir)
    path = run_dir / "run.json"
    if not path.is_file():
        raise UserError("no_result", "the folder has no run", str(run_dir), HINT)

    manifest = decode_manifest(path.read_bytes(), str(path))
    if manifest.shard is None:
        raise UserError(
            "wrong_format", "this is a complete run, not a part of one", str(run_dir), HINT
        )

    return RunPart(run_dir, manifest, manifest.shard)


COMMON_FACTS: dict[str, Callable[[RunPart], object]] = {
    "version of loadgen": lambda part: part.manifest.version,
    "number of parts": lambda part: part.shard.count,
    "start": lambda part: part.shard.start_at,
    "seed": lambda part: part.manifest.seed,
    "schedule seed": lambda part: part.manifest.schedule_seed,
    "salt": lambda part: part.manifest.salt,
    "workload": lambda part: part.manifest.fingerprints.recipe,
    "schedule": lambda part: part.manifest.fingerprints.schedule,
    "stages": lambda part: [_without_ramp(stage) for stage in part.shard.stages],
    "API": lambda part: (part.manifest.api, part.manifest.stream, part.manifest.client),
    "models": lambda part: [target.model for target in part.manifest.targets],
    "tokenizer": lambda part: (part.manifest.tokenizer, part.manifest.tokenizer_sha256),
    "tokens of the chat template": lambda part: part.manifest.template_tokens,
    "SLO": lambda part: part.manifest.slos,
    "limits of validity": lambda part: part.manifest.limits,
}
"""What must be the same in all parts of a run: its name in messages, and how it is read."""


def _without_ramp(stage: StagePlan) -> StagePlan:
    """Return a stage without the ramp of its virtual users, which every part measures itself."""
    return replace(stage, ramp_s=None, ramp_from="")


def _find_differences(parts: Sequence[RunPart]) -> Iterator[LoadgenError]:
    """Yield an error for each part that is not of the same run as the first one."""
    first, *other_parts = parts
    for part in other_parts:
        differing = [
            name
            for name, read_value in COMMON_FACTS.items()
            if read_value(first) != read_value(part)
        ]
        if differing:
            yield UserError(
                "mismatch",
                (
                    f"this is a part of another run than {first.run_dir}: it differs in "
                    f"{', '.join(differing)}"
                ),
                str(part.run_dir),
                "start every part with the same options, --seed and --start-at",
            )


def _find_duplicates(parts: Sequence[RunPart]) -> Iterator[LoadgenError]:
    """Yield an error for each part with the index of an earlier one."""
    run_dir_by_index: dict[int, Path] = {}
    for part in parts:
        earlier_run_dir = run_dir_by_index.get(part.shard.index)
        if earlier_run_dir is None:
            run_dir_by_index[part.shard.index] = part.run_dir
        else:
            yield UserError(
                "duplicate",
                f"part {part.shard.index} of {part.shard.count} occurs twice",
                str(part.run_dir),
                f"remove it or {earlier_run_dir}",
            )
