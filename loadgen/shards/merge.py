"""Merges the parts of a run into the folder of one ordinary run. Does IO.

Every part counts time from its own start. The merged run counts from the common start, so all times
of a part that started late are moved by its delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from loadgen.core import run_folder
from loadgen.core.metrics.summary import Summary, dump_summary
from loadgen.core.results import checksums, parquet, shard_schedule, store
from loadgen.core.results.record import BIN_NS
from loadgen.core.results.spool import HEAT
from loadgen.core.server_metrics import series
from loadgen.core.sidecars.hearers import write_header
from loadgen.shards.header import merged_header
from loadgen.shards.parts import PartPosition, RunPart, locate_parts
from loadgen.shards.records import find_lost_slots, record_tables

NS_PER_S = 1e9


def merge_parts(parts: Sequence[RunPart], folder: Path) -> Summary:
    """Write the run that these parts make into a folder, and return its summary.

    The slots of missing parts, and those that a killed part did not record, get records with the
    status `lost`.
    """
    positions = locate_parts(parts)
    lost = list(find_lost_slots(positions, shard_schedule.read(parts[0].folder)))
    (folder / "requests").mkdir()
    (folder / "flows").mkdir()
    parquet.write(folder / "requests" / store.MERGED, record_tables(positions, lost))
    for position in positions:
        if position.part is not None:
            _copy_flows(position, position.part, folder)
    _write_seconds(positions, folder)
    _write_server_metrics(positions, folder)
    header = merged_header(positions, lost, folder.name)
    write_header(folder, header)
    summary = run_folder.summary(folder)
    store.replace(folder / "summary.json", dump_summary(summary))
    checksums.write(folder)
    return summary


def _copy_flows(position: PartPosition, part: RunPart, folder: Path) -> None:
    """Copy the histograms and the timelines of the workers of a part, under their new numbers."""
    for path in sorted((part.folder / "flows").glob("w*.*")):
        worker, _, kind = path.name[1:].partition(".")
        target = folder / "flows" / f"w{int(worker) + position.first_worker}.{kind}"
        store.replace(target, _delayed_flow(path.read_bytes(), kind, position.delay_ns))


def _delayed_flow(data: bytes, kind: str, delay_ns: int) -> bytes:
    """Return the bytes of a file in `flows/` whose times are moved by a delay."""
    if kind.startswith("timeline."):
        empty_bins = round(delay_ns / BIN_NS)
        return np.zeros(empty_bins, "<i8").tobytes() + data
    if kind == "heat":
        whole_bytes = len(data) // HEAT.itemsize * HEAT.itemsize
        records = np.frombuffer(data[:whole_bytes], HEAT).copy()
        records["until_ns"] += delay_ns
        return records.tobytes()
    return data


def _write_seconds(positions: Sequence[PartPosition], folder: Path) -> None:
    """Write the samples that the workers of all parts took of themselves."""
    seconds = [
        replace(
            second,
            t_s=second.t_s + position.delay_ns / NS_PER_S,
            worker=second.worker + position.first_worker,
        )
        for position in positions
        if position.part is not None
        for second in store.read_lightly(position.part.folder).seconds
    ]
    seconds.sort(key=lambda second: (second.t_s, second.worker))
    lines = [msgspec.json.encode(second) + b"\n" for second in seconds]
    store.replace(folder / "seconds.jsonl", b"".join(lines))


def _write_server_metrics(positions: Sequence[PartPosition], folder: Path) -> None:
    """Write the samples of the servers' metrics pages; of a page that several parts read, one copy.

    Every part reads the same counters of the same server, so a second copy would add nothing.
    """
    samples: list[series.MetricSample] = []
    pages: set[str] = set()
    for position in positions:
        if position.part is None:
            continue
        new_samples = [
            replace(sample, t_s=sample.t_s + position.delay_ns / NS_PER_S)
            for sample in store.server(position.part.folder)
            if sample.page not in pages
        ]
        pages |= {sample.page for sample in new_samples}
        samples += new_samples
    if samples:
        samples.sort(key=lambda sample: sample.t_s)
        lines = [msgspec.json.encode(sample) + b"\n" for sample in samples]
        store.replace(folder / series.FILE, b"".join(lines))
