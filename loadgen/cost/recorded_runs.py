"""Reads the records of the runs behind a cost, for prices that depend on the length of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from loadgen.core.results import store
from loadgen.pricing.evidence import Evidence
from loadgen.pricing.prompt_lengths import RunRecords


def with_record_reader(evidence: Evidence) -> Evidence:
    """Return evidence that can read the records of its runs from their folders when needed."""
    return replace(evidence, read_runs=partial(_read_runs, evidence.run_folders))


def _read_runs(folders: Sequence[str]) -> list[RunRecords]:
    """Return the records of each run, with the manifest that describes them."""
    runs = [store.read_run(Path(folder)) for folder in folders]
    return [RunRecords(run.rows, run.manifest) for run in runs]
