"""The header of a merged run, made of the headers of its parts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from loadgen.core.execution.run_manifest import add_notes
from loadgen.core.metrics import reasons
from loadgen.core.requests.digest import Digest
from loadgen.core.results import manifest
from loadgen.core.results.manifest import RunManifest
from loadgen.shards.parts import PlacedPart, RunPart
from loadgen.shards.records import LostSlots

MAX_DELAY_MS = 100.0
"""A part that starts later than this after the common start is named in a warning."""
DIGEST_BITS = 128


def merged_header(
    placed: Sequence[PlacedPart], lost: Sequence[LostSlots], run_id: str
) -> RunManifest:
    """Return the header of the run that these parts make."""
    parts = [one.part for one in placed if one.part is not None]
    headers = [part.header for part in parts]
    earliest = min(parts, key=lambda part: part.shard.start_delay_ms or 0.0)
    first = headers[0]
    header = replace(
        first,
        run=run_id,
        started=earliest.header.started,
        ended=max(header.ended for header in headers),
        state=_merged_state(headers),
        command=_command_of_whole_run(first.command),
        stages=parts[0].shard.stages,
        workers=sum(one.workers for one in placed),
        host=replace(first.host, hot_path=max(header.host.hot_path for header in headers)),
        notes=tuple(dict.fromkeys(note for header in headers for note in header.notes)),
        note_codes={note: code for header in headers for note, code in header.note_codes.items()},
        cluster=_cluster(placed),
        shard=None,
        parts=tuple(map(_merged_part, placed)),
        fingerprints=_merged_fingerprints(parts, is_complete=not lost),
    )
    for code, values in _warnings(placed, lost):
        header = add_notes(header, reasons.make_note(code, values))
    return header


def _merged_state(headers: Sequence[RunManifest]) -> str:
    """Return `finished`, unless a part that was not killed ended in another way."""
    ended = [header.state for header in headers if header.state not in ("running", "finished")]
    return ended[0] if ended else "finished"


def _command_of_whole_run(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of a part without the options that make it a part."""
    kept = []
    words = iter(command)
    for word in words:
        if word in ("--shard", "--start-at"):
            next(words, None)
        elif not word.startswith(("--shard=", "--start-at=")):
            kept.append(word)
    return tuple(kept)


def _merged_fingerprints(parts: Sequence[RunPart], *, is_complete: bool) -> manifest.Fingerprints:
    """Return the fingerprints of the run; those of prompts and bodies only if nothing is lost."""
    fingerprints = parts[0].header.fingerprints
    if not is_complete:
        return replace(fingerprints, prompts="", bodies="")
    if fingerprints.prompts.startswith("first"):  # a large run: only its first prompts are hashed
        return fingerprints
    shards = [part.shard for part in parts]
    count = sum(shard.prompts_count for shard in shards)
    prompts = Digest(_sum_of_digests([shard.prompts_total for shard in shards]), count)
    bodies = Digest(_sum_of_digests([shard.bodies_total for shard in shards]), count)
    return replace(
        fingerprints,
        prompts=prompts.hexdigest(),
        bodies=bodies.hexdigest() if fingerprints.bodies else "",
    )


def _sum_of_digests(totals: Sequence[str]) -> int:
    return sum(int(total, 16) for total in totals) % (1 << DIGEST_BITS)


def _cluster(placed: Sequence[PlacedPart]) -> manifest.Cluster:
    """Return where the workers of all parts ran, as for the nodes of a Ray cluster."""
    return manifest.Cluster(
        nodes=len(placed),
        start_bound_ms=max(one.delay_ms for one in placed),
        workers=tuple(
            manifest.Placed(
                worker=one.first_worker + worker,
                node=one.name,
                address="missing" if one.part is None else one.part.header.host.name,
                lost=one.is_incomplete,
                hot_path="" if one.part is None else one.part.header.host.hot_path,
            )
            for one in placed
            for worker in range(one.workers)
        ),
    )


def _merged_part(placed: PlacedPart) -> manifest.MergedPart:
    if placed.part is None:
        return manifest.MergedPart(index=placed.index, state=placed.state)
    return manifest.MergedPart(
        index=placed.index,
        state=placed.state,
        host=placed.part.header.host.name,
        workers=placed.workers,
        start_delay_ms=placed.part.shard.start_delay_ms,
    )


def _warnings(
    placed: Sequence[PlacedPart], lost: Sequence[LostSlots]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the code and the values of each warning about the parts."""
    for lost_slots in lost:
        of = lost_slots.of
        yield (
            "part_lost",
            {
                "part": of.index,
                "parts": of.count,
                "state": of.state,
                "lost": len(lost_slots.slots),
            },
        )
    for one in placed:
        if one.delay_ms > MAX_DELAY_MS:
            yield (
                "part_late",
                {
                    "part": one.index,
                    "parts": one.count,
                    "delay_ms": one.delay_ms,
                    "limit_ms": MAX_DELAY_MS,
                },
            )
