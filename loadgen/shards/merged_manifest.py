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

PREFIX_OF_FIRST_PROMPTS = "first"
"""How a fingerprint begins that covers only the first prompts of a run (see `requests.digest`)."""
MAX_DELAY_MS = 100.0
"""A part that starts later than this after the common start is named in a warning."""


def merge_manifests(
    positions: Sequence[PartPosition], lost: Sequence[LostSlots], run_id: str
) -> RunManifest:
    """Return the manifest of the merged run.

    What must be the same in all parts, such as the workload and the seed, is that of the first
    part.

    Args:
        positions: All parts of the run, missing ones as well.
        lost: The planned requests without a record.
        run_id: The name of the merged run.
    """
    parts = [position.part for position in positions if position.part is not None]
    manifests = [part.manifest for part in parts]
    first_part = parts[0]
    merged = replace(
        first_part.manifest,
        run=run_id,
        command=_remove_shard_options(first_part.manifest.command),
        stages=first_part.shard.stages,
        shard=None,
        merged_parts=tuple(map(_describe_part, positions)),
        fingerprints=_merge_fingerprints(parts, is_complete=not lost),
    )
    merged = _with_times_and_state(merged, parts)
    merged = _with_workers(merged, positions, manifests)

    merged = _with_warnings(merged, manifests)
    for code, values in _warnings_about_parts(positions, lost):
        merged = add_notes(merged, reasons.make_note(code, values))

    return merged


def _with_times_and_state(manifest: RunManifest, parts: Sequence[RunPart]) -> RunManifest:
    """Return the manifest from the start of the earliest part to the end of the latest one."""
    manifests = [part.manifest for part in parts]
    earliest_part = min(parts, key=lambda part: part.shard.start_delay_ms or 0.0)
    return replace(
        manifest,
        started=earliest_part.manifest.started,
        ended=max(part_manifest.ended for part_manifest in manifests),
        state=_merge_states(manifests),
    )


def _with_workers(
    manifest: RunManifest, positions: Sequence[PartPosition], manifests: Sequence[RunManifest]
) -> RunManifest:
    """Return the manifest with the workers of all parts, each part as a node of a cluster.

    What read the sockets (`hot_path`) is "python" if this is so in any part, else "compiled".
    """
    # "python" comes after "compiled" in the alphabet.
    hot_path = max(part_manifest.host.hot_path for part_manifest in manifests)
    return replace(
        manifest,
        workers=sum(position.workers for position in positions),
        host=replace(manifest.host, hot_path=hot_path),
        cluster=_describe_cluster(positions),
    )


def _with_warnings(manifest: RunManifest, manifests: Sequence[RunManifest]) -> RunManifest:
    """Return the manifest with the warnings of all parts, each only once.

    `warning_codes` has the code of each warning by its text, so that the same warning of several
    parts is one entry.
    """
    warning_codes = {}
    for part_manifest in manifests:
        warning_codes.update(part_manifest.warning_codes)
    return replace(manifest, warnings=_merge_warnings(manifests), warning_codes=warning_codes)


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

    Those of the prompts and the request bodies are sums over all requests, so that the sums of the
    parts are added. Of a large run only the first prompts are hashed. Every part has hashed the
    same ones, so that its fingerprint is that of the run.

    If records are lost (`is_complete` is False), it is not known what was sent, and the two stay
    empty.
    """
    fingerprints = parts[0].manifest.fingerprints
    if not is_complete:
        return replace(fingerprints, prompts="", bodies="")

    covers_only_first_prompts = fingerprints.prompts.startswith(PREFIX_OF_FIRST_PROMPTS)
    if covers_only_first_prompts:
        return fingerprints

    shards = [part.shard for part in parts]

    # Each request has one prompt and one body.
    request_count = sum(shard.prompts_count for shard in shards)
    prompts = _merge_digests([shard.prompts_total for shard in shards], request_count)

    bodies = ""
    if fingerprints.bodies:  # It is empty if the bodies were not built before the start.
        bodies = _merge_digests([shard.bodies_total for shard in shards], request_count)

    return replace(fingerprints, prompts=prompts, bodies=bodies)


def _merge_digests(part_totals: Sequence[str], request_count: int) -> str:
    """Return the fingerprint of all requests, as text, from the hexadecimal sums of the parts.

    A sum adds one hash for each request, so it does not depend on which part sent it.
    """
    total = sum(int(part_total, 16) for part_total in part_totals) % DIGEST_MODULUS
    return Digest(total, request_count).hexdigest()


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
