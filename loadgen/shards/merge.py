"""Merge the parts of a run into the directory of one ordinary run.

Every part counts time from its own start. The merged run counts from the common start, so all times
of a part that started late are moved by its delay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from loadgen.core import run_folder
from loadgen.core.metrics.summary import Summary, dump_summary
from loadgen.core.results import checksums, parquet, shard_schedule, store
from loadgen.core.results.gaps import RequestGaps, write_request_gaps
from loadgen.core.results.json_files import encode_json_lines
from loadgen.core.results.manifest import WorkerSample
from loadgen.core.results.record import BIN_NS
from loadgen.core.results.record_log import HEAT
from loadgen.core.results.stored_gaps import iterate_stored_gaps
from loadgen.core.server_metrics import series
from loadgen.core.sidecars.event_handlers import write_manifest
from loadgen.shards.merged_manifest import merge_manifests
from loadgen.shards.parts import PartPosition, RunPart, locate_parts
from loadgen.shards.records import LostSlots, find_lost_slots, record_tables

NS_PER_S = 1e9


def merge_parts(parts: Sequence[RunPart], run_dir: Path) -> Summary:
    """Write the merged run of several parts into a directory, and return its summary.

    A slot is one planned request. The slots of missing parts, and those that a killed part did not
    record, get records with the status `lost`, so that the summary counts them as failures. The
    result has the same files as an ordinary run.

    Args:
        parts: The parts that exist, ordered by their index.
        run_dir: The directory of the merged run, which exists and is empty.
    """
    positions = locate_parts(parts)

    # Every part stores the schedule of the whole run.
    schedule = shard_schedule.read(parts[0].run_dir)
    lost = list(find_lost_slots(positions, schedule))
    _write_merged_data(positions, lost, run_dir)
    write_manifest(run_dir, merge_manifests(positions, lost, run_dir.name))

    summary = run_folder.summary(run_dir)
    store.replace(run_dir / "summary.json", dump_summary(summary))
    checksums.write(run_dir)

    return summary


def _write_merged_data(
    positions: Sequence[PartPosition], lost: Sequence[LostSlots], run_dir: Path
) -> None:
    """Write the request records, the event timelines and the samples of all parts."""
    (run_dir / "requests").mkdir()
    (run_dir / "flows").mkdir()
    parquet.write_tables(run_dir / "requests" / store.MERGED, record_tables(positions, lost))

    for position in positions:
        if position.part is not None:
            _copy_event_timelines(position, position.part, run_dir)

    _write_worker_samples(positions, run_dir)
    _write_server_metrics(positions, run_dir)
    _write_request_gaps(positions, run_dir)


def _copy_event_timelines(position: PartPosition, part: RunPart, run_dir: Path) -> None:
    """Copy the histograms and event timelines of a part's workers into the merged run.

    The file of a worker is named after its number, such as `w0.heat`. Each part numbers
    its workers from 0, so the numbers are moved behind those of the earlier parts.
    """
    for path in sorted((part.run_dir / "flows").glob("w*.*")):
        worker_text, _, file_type = path.name.removeprefix("w").partition(".")
        worker = int(worker_text) + position.first_worker
        shifted = _shift_event_times(path.read_bytes(), file_type, position.delay_ns)
        store.replace(run_dir / "flows" / f"w{worker}.{file_type}", shifted)


def _shift_event_times(data: bytes, file_type: str, delay_ns: int) -> bytes:
    """Return the content of a file in `flows/`, counted from the common start of the run.

    Args:
        data: The content, with times from the start of the part.
        file_type: The name of the file without its worker, such as "heat".
        delay_ns: The time from the common start to the start of the part.
    """
    if file_type.startswith("timeline."):
        return _prepend_empty_bins(data, delay_ns)
    if file_type == "heat":
        return _shift_heat_records(data, delay_ns)
    # A histogram of gaps contains durations, which a delay does not change.
    return data


def _prepend_empty_bins(timeline: bytes, delay_ns: int) -> bytes:
    """Return a timeline, which is one count per time bin, with the bins of the delay before it."""
    empty_bins = np.zeros(round(delay_ns / BIN_NS), "<i8")
    return empty_bins.tobytes() + timeline


def _shift_heat_records(data: bytes, delay_ns: int) -> bytes:
    """Return the records of a heat map with later times.

    A killed worker can leave an incomplete record at the end, which is dropped.
    """
    complete_bytes = len(data) // HEAT.itemsize * HEAT.itemsize
    records = np.frombuffer(data[:complete_bytes], HEAT).copy()
    records["until_ns"] += delay_ns
    return records.tobytes()


def _write_worker_samples(positions: Sequence[PartPosition], run_dir: Path) -> None:
    """Write the samples that every worker took of its own load, once a second."""
    samples: list[WorkerSample] = []
    for position in positions:
        if position.part is None:
            continue
        delay_s = position.delay_ns / NS_PER_S
        for sample in store.read_run_lazily(position.part.run_dir).seconds:
            worker = sample.worker + position.first_worker
            samples.append(replace(sample, t_s=sample.t_s + delay_s, worker=worker))

    samples.sort(key=lambda sample: (sample.t_s, sample.worker))
    store.replace(run_dir / "seconds.jsonl", encode_json_lines(samples))


def _write_server_metrics(positions: Sequence[PartPosition], run_dir: Path) -> None:
    """Write the samples of the servers' metrics pages, if there are any.

    All parts read the same counters of the same server. The samples of a page are therefore taken
    from the first part that has read it.
    """
    samples: list[series.MetricSample] = []
    copied_pages: set[str] = set()
    for position in positions:
        if position.part is None:
            continue

        delay_s = position.delay_ns / NS_PER_S
        new_samples = [
            replace(sample, t_s=sample.t_s + delay_s)
            for sample in store.read_server_samples(position.part.run_dir)
            if sample.page not in copied_pages
        ]
        copied_pages.update(sample.page for sample in new_samples)
        samples += new_samples

    if samples:
        samples.sort(key=lambda sample: sample.t_s)
        store.replace(run_dir / series.FILE, encode_json_lines(samples))


def _write_request_gaps(positions: Sequence[PartPosition], run_dir: Path) -> None:
    """Write the times between the output events of each response, if any part stored them.

    The token deadlines of the merged run are counted from these times. They are durations, which
    the delay of a part does not change, and each request has the same slot in its part and in the
    merged run. A part that was killed has them of the responses that had ended.
    """
    gaps_of_parts = list(_iterate_gaps_of_parts(positions))
    if gaps_of_parts:
        write_request_gaps(run_dir, chain.from_iterable(gaps_of_parts))


def _iterate_gaps_of_parts(positions: Sequence[PartPosition]) -> Iterator[Iterator[RequestGaps]]:
    """Yield, for each part that stored them, the times between events in blocks of requests."""
    for position in positions:
        if position.part is None:
            continue
        gaps_of_part = iterate_stored_gaps(position.part.run_dir)
        if gaps_of_part is not None:
            yield gaps_of_part
