"""Write the files of a run in virtual time, which are those of any run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loadgen.core.results import answer_files, gaps, parquet, store
from loadgen.core.results.answer_files import AnswerOutcomes
from loadgen.core.results.json_files import encode_json_lines
from loadgen.core.results.manifest import RunManifest, WorkerSample, encode_manifest
from loadgen.core.results.record_log import UNCERTAINTY_PREFIX
from loadgen.core.server_metrics import series
from loadgen.core.server_metrics.series import MetricSample
from loadgen.core.stats.histogram import Histogram
from loadgen.core.workload.known_answers import KnownAnswer
from loadgen.sim.event_gaps import iterate_gaps
from loadgen.sim.presets.preset import Preset
from loadgen.sim.record_columns import RecordColumns, as_record_array
from loadgen.sim.virtual_records import ERROR_TEXTS, VirtualRecords

if TYPE_CHECKING:
    import pyarrow as pa

# Records per row group of the Parquet file. So the conversion needs no second copy of all records.
RECORDS_PER_GROUP = 250_000


class RunContents(NamedTuple):
    """What the files of a run contain.

    Attributes:
        run_manifest: The description of the run.
        results: The records and events.
        worker_samples: What the simulation itself used.
        replica_counts: How many replicas served, if their number changed.
        known_answers: What is known about the right responses. Empty without questions.
        answer_outcomes: The outcomes of the checks of responses.
    """

    run_manifest: RunManifest
    results: VirtualRecords
    worker_samples: Sequence[WorkerSample]
    replica_counts: Sequence[MetricSample]
    known_answers: Sequence[KnownAnswer] = ()
    answer_outcomes: AnswerOutcomes = AnswerOutcomes([], [])


def build_replica_count_samples(preset: Preset) -> list[MetricSample]:
    """Return how many replicas served over time, as samples of server metrics.

    There is one sample at the start and one at each change. Without changes the list is empty. In a
    run over HTTP, such samples are read from the metrics page of a gateway. Here their page is
    SIMULATED, and their metric has the prefix for names that are not those of a known server.
    """
    if not preset.changes:
        return []

    start_s = 0.0
    counts_by_time = [(start_s, preset.replicas)]
    counts_by_time += [(change.at_ns / 1e9, change.serving_count) for change in preset.changes]
    return [
        MetricSample(
            t_s=t_s,
            target=0,  # the index of the only target
            page=series.SIMULATED,
            name=series.PLUGIN_PREFIX + series.REPLICAS,
            labels="",
            value=replica_count,
        )
        for t_s, replica_count in counts_by_time
    ]


def build_timestamp_uncertainties(results: VirtualRecords) -> list[Histogram]:
    """Return the uncertainty of the timestamps of each stage: in virtual time, 0 for all events."""
    histograms = []
    for timeline in results.timeline:
        histogram = Histogram()
        histogram.add_zeros(int(timeline.sum()))
        histograms.append(histogram)
    return histograms


def write_run(run_dir: Path, contents: RunContents) -> None:
    """Write the files of a run in its directory, as they are after a clean end.

    These are the manifest, the resource use of the simulation (`seconds.jsonl`), the gaps and the
    timeline of output events (`flows/`), and the records of the requests (`requests/`). The gaps of
    each request are written only with `--keep gaps`, and the server metrics only if the number of
    replicas changes. `results/store.py` describes all files.
    """
    results = contents.results
    store.replace(run_dir / "run.json", encode_manifest(contents.run_manifest))
    store.replace(run_dir / "seconds.jsonl", encode_json_lines(contents.worker_samples))
    _write_event_timelines(run_dir / "flows", results)
    _write_records(run_dir / "requests", results)

    if results.events is not None:
        gaps.write_request_gaps(run_dir, iterate_gaps(results.events))

    if contents.known_answers:
        answer_files.write_known_answers(run_dir, contents.known_answers)
        answer_files.write_outcomes(run_dir, contents.answer_outcomes)

    if contents.replica_counts:
        store.replace(run_dir / series.FILE, encode_json_lines(contents.replica_counts))


def _write_event_timelines(directory: Path, results: VirtualRecords) -> None:
    """Write the gaps, the timeline and the timestamp uncertainties of each stage."""
    directory.mkdir(exist_ok=True)
    for stage, uncertainties in enumerate(build_timestamp_uncertainties(results)):
        timeline = results.timeline[stage].astype("<i8")
        store.replace(directory / f"w0.{UNCERTAINTY_PREFIX}{stage}", uncertainties.to_bytes())
        store.replace(directory / f"w0.gaps.{stage}", results.gaps[stage].to_bytes())
        store.replace(directory / f"w0.timeline.{stage}", timeline.tobytes())


def _write_records(directory: Path, results: VirtualRecords) -> None:
    """Write the records to a Parquet file, one row group after the other, to limit the memory."""
    directory.mkdir(exist_ok=True)
    parquet.write_tables(directory / store.MERGED, _build_record_tables(results.records))


def _build_record_tables(records: RecordColumns) -> Iterator[pa.Table]:
    """Yield tables with RECORDS_PER_GROUP records each. Without records, yield one empty table."""
    if not len(records):
        yield _build_record_table(records)
    for start in range(0, len(records), RECORDS_PER_GROUP):
        stop = start + RECORDS_PER_GROUP
        yield _build_record_table(records.slice_records(slice(start, stop)))


def _build_record_table(records: RecordColumns) -> pa.Table:
    """Return records as a table of the Parquet file."""
    return parquet.to_table(as_record_array(records), list(ERROR_TEXTS))
