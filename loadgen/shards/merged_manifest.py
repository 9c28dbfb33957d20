"""Build the manifest of a merged run from those of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from loadgen.core.execution.run_manifest import add_notes
from loadgen.core.metrics import reasons
from loadgen.core.requests.digest import DIGEST_MODULUS, Digest
from loadgen.core.results.manifest import (
    Cluster,
    Fingerprints,
    MergedPart,
    PlacedWorker,
    RunManifest,
)
from loadgen.shards.parts import PartPosition, RunPart
from loadgen.shards.records import LostSlots

MAX_DELAY_MS = 100.0
"""A part that starts later than this after the common start is named in a warning."""


def merge_manifests(
    positions: Sequence[PartPosition], lost: Sequence[LostSlots], run_id: str
) -> RunManifest:
    """Return the manifest of the merged run.

    What must be the same in all parts is taken from the first one. The start is that of the part
    that started first, and the end that of the part that ended last.

    Args:
        positions: All parts of the run, missing ones as well.
        lost: The planned requests without a record.
        run_id: The name of the merged run.
    """
    parts = [position.part for position in positions if position.part is not None]
    manifests = [part.manifest for part in parts]
    first = manifests[0]
    earliest = min(parts, key=lambda part: part.shard.start_delay_ms or 0.0)
    warning_codes = {}
    for manifest in manifests:
        warning_codes.update(manifest.warning_codes)
    merged = replace(
        first,
        run=run_id,
        started=earliest.manifest.started,
        ended=max(manifest.ended for manifest in manifests),
        state=_merge_states(manifests),
        command=_remove_shard_options(first.command),
        stages=parts[0].shard.stages,
        workers=sum(position.workers for position in positions),
        host=replace(first.host, hot_path=max(manifest.host.hot_path for manifest in manifests)),
        warnings=_merge_warnings(manifests),
        warning_codes=warning_codes,
        cluster=_describe_cluster(positions),
        shard=None,
        merged_parts=tuple(map(_describe_part, positions)),
        fingerprints=_merge_fingerprints(parts, is_complete=not lost),
    )
    for code, values in _warnings_about_parts(positions, lost):
        merged = add_notes(merged, reasons.make_note(code, values))
    return merged


def _merge_warnings(manifests: Sequence[RunManifest]) -> tuple[str, ...]:
    """Return the warnings of all parts in their order, each only once."""
    warnings = [warning for manifest in manifests for warning in manifest.warnings]
    return tuple(dict.fromkeys(warnings))


def _merge_states(manifests: Sequence[RunManifest]) -> str:
    """Return `finished`, unless a part ended in another way, such as by a signal.

    The state of a killed part is still `running`. It is not returned, because the merged run shows
    a killed part by a warning and by its lost requests.
    """
    for manifest in manifests:
        if manifest.state not in ("running", "finished"):
            return manifest.state
    return "finished"


def _remove_shard_options(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of a part without the options that make it a part.

    An option and its value can be two arguments or one (`--shard=1/3`).
    """
    remaining_arguments = []
    arguments = iter(command)
    for argument in arguments:
        if argument in ("--shard", "--start-at"):
            next(arguments, None)  # Skip the value.
        elif not argument.startswith(("--shard=", "--start-at=")):
            remaining_arguments.append(argument)
    return tuple(remaining_arguments)


def _merge_fingerprints(parts: Sequence[RunPart], *, is_complete: bool) -> Fingerprints:
    """Return the fingerprints of the run: hashes that show whether two runs sent the same.

    Those of the prompts and the bodies are sums over all requests, so that the sums of the parts
    are added. They stay empty if records are lost (`is_complete` is False). In a large run only the
    first prompts are hashed, and every part has that fingerprint already.
    """
    fingerprints = parts[0].manifest.fingerprints
    if not is_complete:
        return replace(fingerprints, prompts="", bodies="")
    has_hash_of_first_prompts = fingerprints.prompts.startswith("first")
    if has_hash_of_first_prompts:
        return fingerprints
    shards = [part.shard for part in parts]
    prompt_count = sum(shard.prompts_count for shard in shards)
    prompts = Digest(_sum_of_digests([shard.prompts_total for shard in shards]), prompt_count)
    bodies = Digest(_sum_of_digests([shard.bodies_total for shard in shards]), prompt_count)
    return replace(
        fingerprints,
        prompts=prompts.hexdigest(),
        bodies=bodies.hexdigest() if fingerprints.bodies else "",
    )


def _sum_of_digests(totals: Sequence[str]) -> int:
    """Return the digest of all requests from the hexadecimal digests of the parts.

    A digest is a sum of hashes, one of each request, so it does not depend on which part sent it.
    """
    return sum(int(total, 16) for total in totals) % DIGEST_MODULUS


def _describe_cluster(positions: Sequence[PartPosition]) -> Cluster:
    """Return where the workers of all parts ran, in the form used for the nodes of a Ray cluster.

    Each part counts as a node. All parts should have started at the same time. `start_bound_ms`, by
    how much their starts differ at most, is the largest delay of a part.
    """
    workers = [
        _describe_worker(position, worker_in_part)
        for position in positions
        for worker_in_part in range(position.workers)
    ]
    return Cluster(
        nodes=len(positions),
        start_bound_ms=max(position.delay_ms for position in positions),
        workers=tuple(workers),
    )


def _describe_worker(position: PartPosition, worker_in_part: int) -> PlacedWorker:
    """Return on which host a worker ran. The host of a missing part is not known."""
    host = None if position.part is None else position.part.manifest.host
    return PlacedWorker(
        worker=position.first_worker + worker_in_part,
        node=position.name,
        address="missing" if host is None else host.name,
        lost=position.is_incomplete,
        hot_path="" if host is None else host.hot_path,
    )


def _describe_part(position: PartPosition) -> MergedPart:
    """Return the facts about a part that the manifest of the merged run stores."""
    if position.part is None:
        return MergedPart(index=position.index, state=position.state)
    return MergedPart(
        index=position.index,
        state=position.state,
        host=position.part.manifest.host.name,
        workers=position.workers,
        start_delay_ms=position.part.shard.start_delay_ms,
    )


def _warnings_about_parts(
    positions: Sequence[PartPosition], lost: Sequence[LostSlots]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the code and the values of a warning for each part with lost requests or a late start.

    The values fill the placeholders in the text of the warning, which `reasons` keeps by its code.
    """
    for lost_slots in lost:
        position = lost_slots.position
        lost_values = {
            "part": position.index,
            "parts": position.count,
            "state": position.state,
            "lost": len(lost_slots.slots),
        }
        yield "part_lost", lost_values
    for position in positions:
        if position.delay_ms > MAX_DELAY_MS:
            late_values = {
                "part": position.index,
                "parts": position.count,
                "delay_ms": position.delay_ms,
                "limit_ms": MAX_DELAY_MS,
            }
            yield "part_late", late_values
