"""One result of a folder, as the list and the charts of `loadgen ui` show it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadgen.core import format
from loadgen.result_kinds import RateInterval
from loadgen.runs.load_point_results import LoadPointResult
from loadgen.runs.sweep_analysis import best_load_point
from loadgen.runs.sweep_curve import SweepCurve

MAX_LENGTH_RATIO = 1.1
"""Results whose mean prompt and output lengths differ by more are different workloads.

A chart compares systems, so it must not mix requests of different lengths. 10 % leaves room for
lengths that are drawn at random.
"""


class StoredResult(msgspec.Struct, frozen=True, kw_only=True):
    """One result of a folder.

    Attributes:
        name: Its path relative to the folder that is listed.
        kind: The name of its kind, for example "run" or "search".
        reported_outcome: The outcome that the kind of the result reports, or why the result cannot
            be read. It is "" if the outcome follows from the runs.
        selected_run: The name of the run whose metrics are shown. If empty, it is the best one.
        curve: The runs by load. None if nothing was summarized.
        load_points: The load points of the curve, with repeats of a load averaged.
        tpot_limit_ms: The TPOT limit of the SLO. None if it has none.
        interval: The interval of a capacity, or of the mean of repeats.
        cost_per_million_tokens: The cost of a million output tokens by the name of a load point,
            for those whose machine has a price.
        page: The path of the result's own page relative to the folder, or "" if it has none.
        is_running: Whether a run is still writing its files.
        description: The workload and model, if there is no curve.
        target: The target, if there is no curve.
        simulated: Whether the target was simulated, if there is no curve.
        stored_start: The start in ISO 8601, if there is no curve.
        mean_input_tokens: The mean prompt length of successful requests.
        mean_output_tokens: The mean output length of successful requests.
        hardware: The instance type, or else the name or URL of the target.
        software: The server software, as the server reports it.
    """

    name: str
    kind: str
    reported_outcome: str = ""
    selected_run: str = ""
    curve: SweepCurve | None = None
    load_points: tuple[LoadPointResult, ...] = ()
    tpot_limit_ms: float | None = None
    interval: RateInterval | None = None
    cost_per_million_tokens: dict[str, float] = {}
    page: str = ""
    is_running: bool = False
    description: str = ""
    target: str = ""
    simulated: bool = False
    stored_start: str = ""
    mean_input_tokens: float | None = None
    mean_output_tokens: float | None = None
    hardware: str = ""
    software: str = ""

    @property
    def started(self) -> str:
        """The start in ISO 8601. A running result has "~", which sorts after every date."""
        if self.curve is not None:
            return self.curve.started
        return "~" if self.is_running else self.stored_start

    @property
    def runs(self) -> tuple[LoadPointResult, ...]:
        """Every run as a load point of its own, repeats included."""
        return self.curve.load_points if self.curve is not None else ()

    @property
    def selected_load_point(self) -> LoadPointResult | None:
        """The load whose metrics the list shows for the result, or None without metrics.

        A result can have runs at many loads, but the list has one row for it. Some kinds of results
        name the run to show: a search names the run that confirmed the capacity. For other kinds,
        the best load within the SLO is shown. If there is no such load, the one with the highest
        output throughput is shown.
        """
        for run in self.runs:
            if run.name == self.selected_run:
                return run

        has_slo = self.curve is not None and bool(self.curve.slo)
        best_within_slo = best_load_point(self.load_points) if has_slo else None
        if best_within_slo is not None:
            return best_within_slo

        return max(self.load_points, key=_output_throughput, default=None)

    @property
    def outcome(self) -> str:
        """The outcome in a few words, for example "VALID, SLO met" or "2 of 5 INVALID".

        Some kinds of results report an outcome of their own, such as a search that ended without a
        capacity. It is `reported_outcome`, and the number of invalid runs is added to it. For other
        kinds `reported_outcome` is empty, and the outcome is derived from the runs.
        """
        if self.is_running:
            return "running"

        has_runs = self.curve is not None
        if not has_runs:
            return self.reported_outcome

        invalid_runs_text = self._describe_invalid_runs()
        if not invalid_runs_text:
            return self.reported_outcome or self._outcome_of_valid_runs()
        if self.reported_outcome:
            return f"{self.reported_outcome}, {invalid_runs_text}"

        is_single_run = len(self.runs) == 1
        return "INVALID" if is_single_run else invalid_runs_text

    def _describe_invalid_runs(self) -> str:
        """Return how many runs are invalid, for example "2 of 5 INVALID", or "" if none is."""
        invalid_runs = sum(not run.valid for run in self.runs)
        if invalid_runs == 0:
            return ""
        return f"{invalid_runs} of {len(self.runs)} INVALID"

    def _outcome_of_valid_runs(self) -> str:
        """Return the outcome of a result whose runs are all valid, for example "VALID, SLO met".

        A sweep raises the load until the SLO is missed. So its outcome only says whether any load
        met the SLO. A run has a `slo_met` of None if it has no SLO or if the SLO is undecided.
        """
        if self.kind == "sweep":
            has_load_within_slo = self.curve is not None and bool(self.curve.best)
            return "a load within the SLO" if has_load_within_slo else ""

        outcomes = ["VALID"]
        if any(run.slo_met is False for run in self.runs):
            outcomes.append("SLO missed")
        elif any(run.slo_undecided for run in self.runs):
            outcomes.append("SLO undecided")
        elif self.runs and all(run.slo_met is True for run in self.runs):
            outcomes.append("SLO met")

        if any(run.sustained is False for run in self.runs):
            outcomes.append("NOT SUSTAINED")

        return ", ".join(outcomes)

    @property
    def workload_label(self) -> str:
        """The workload with its mean lengths: "rag (about 1,320 input, 1,200 output tokens)"."""
        if self.curve is None:
            return ""
        if self.mean_input_tokens is None or self.mean_output_tokens is None:
            return self.curve.workload
        input_tokens = format.quantity(self.mean_input_tokens)
        output_tokens = format.quantity(self.mean_output_tokens)
        return f"{self.curve.workload} (about {input_tokens} input, {output_tokens} output tokens)"


def have_same_workload(first: StoredResult, second: StoredResult) -> bool:
    """Return True if two results had one workload, with about the same request lengths.

    Loads, seeds and SLOs may differ. `compare` is stricter: it compares fingerprints.
    """
    if first.curve is None or second.curve is None:
        return False
    if first.curve.workload != second.curve.workload:
        return False
    same_input = _are_similar_lengths(first.mean_input_tokens, second.mean_input_tokens)
    same_output = _are_similar_lengths(first.mean_output_tokens, second.mean_output_tokens)
    return same_input and same_output


def distinct_workloads(results: Sequence[StoredResult]) -> list[StoredResult]:
    """Return the first result of each workload, in the order of `results`."""
    examples: list[StoredResult] = []
    for result in results:
        is_known = any(have_same_workload(result, example) for example in examples)
        if result.curve is not None and not is_known:
            examples.append(result)
    return examples


def _are_similar_lengths(first: float | None, second: float | None) -> bool:
    """Return True if two lengths are about the same, or one is not known."""
    if first is None or second is None:
        return True
    return max(first, second) <= MAX_LENGTH_RATIO * min(first, second)


def _output_throughput(load_point: LoadPointResult) -> float:
    return load_point.output_per_s or 0.0
