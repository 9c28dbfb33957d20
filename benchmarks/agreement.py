"""Do all commands and pages report the same number for the same machine?

    python benchmarks/agreement.py [--cases qa,rag,summarization,agentic,rag-pipeline,mixed]
    python benchmarks/agreement.py --cases qa --url http://127.0.0.1:8000 --length 60s --slo ttft:1s

The script measures each workload on a simulated GB300 VM (SIMULATED, virtual time). The second
command measures a real endpoint, in real time. Objectives are for p99; a mix of workloads has the
objectives of its classes. Three groups of values are compared:

- **One result, reported in several places.** A search runs, and then a run at the load that it
  found. The JSON of each is the reference. The text, the page, `ui`, JUnit, `cost`, `size` and
  `compare` have to print the same value, to the digits that they print. A run in virtual time
  exports nothing to Prometheus. One on a real endpoint is scraped until it ends, and its counters
  and histogram buckets have to contain the metrics of its JSON.
- **Stopped searches.** The same search is stopped by a time limit, by SIGTERM and by SIGKILL. While
  it is stopped it must not report a capacity, and `cost` and `size` have to exit with 3. When it is
  resumed, it has to end with the capacity of the search that was not stopped.
- **Several ways to the same load.** Runs with different seeds give the interval in which one more
  run would lie. The run of the search, a closed loop with the concurrency of Little's law and a
  contract are compared with it. A sweep around the capacity is compared with the interval of the
  search.

Two values are `equal`, `within` their intervals, `marked` if the output says why they differ, or
DISAGREES, which makes the exit code 1. A workload takes some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import json
import math
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import rig

from loadgen.core.stats.students_t import t_quantile
from loadgen.core.units import seconds

PRICE_PER_HOUR = 56  # USD, an invented price
PRICE_FILE = f"""currency: USD
rented:
  - {{provider: made up, shape: gb300-vm, gpu: GB300, gpus: 4, per_hour: {PRICE_PER_HOUR}.00,
     commitment: none, as_of: 2026-11, source: made up}}
"""
PRICE_OPTIONS = ("--prices", "prices.yaml")
GPU_OPTIONS = ("--gpus", "4", "--shape", "gb300-vm")
QUIET_OPTIONS = ("--progress", "off")
HOURS_PER_MONTH = 730  # as in `loadgen size`
USERS = 20_000  # for whom `loadgen size` computes the number of machines

OBJECTIVES = {
    "qa": ("ttft:450ms", "tpot:40ms"),
    "rag": ("ttft:2s", "tpot:200ms"),
    "summarization": ("ttft:2s", "tpot:200ms"),
    "agentic": ("ttft:2s", "tpot:200ms"),
    "rag-pipeline": ("ttft:2s", "tpot:200ms"),
    "mixed": (),  # each class has its own
}
"""The objectives of each workload, for p99."""


class ClassObjectives(NamedTuple):
    """The limits of TTFT and TPOT at p95 of a class of a mix, as the workload file has them."""

    ttft: str
    tpot: str


MIX = "mixed"  # the workload with several classes
MIX_OBJECTIVES = {
    "qa": ClassObjectives("450ms", "40ms"),
    "rag": ClassObjectives("2s", "200ms"),
    "summarization": ClassObjectives("2s", "200ms"),
    "agentic": ClassObjectives("2s", "200ms"),
}

# Long requests need longer trials: a trial must last longer than its requests.
TRIAL_LENGTH_FACTORS = {
    "rag": 5,
    "summarization": 2,
    "agentic": 5,
    "rag-pipeline": 5,
    "mixed": 5,
}
TASK_WORKLOADS = ("agentic", "rag-pipeline")  # their rates count tasks of several requests

DEFAULT_RUN_COUNT = 8  # runs at the load that the search found
RUN_CONFIDENCE = 0.99  # of the interval in which one more run would lie

# Load points of the sweep around a capacity: each step is 6 %. On a real endpoint, most of them are
# below it, because a load point lasts twice as long as a trial and the endpoint may have become
# slower since the search.
SWEEP_STEP_FACTOR = 1.06
SIMULATED_SWEEP_STEPS = (-3, -2, -1, 0, 1, 2, 3, 4)
REAL_SWEEP_STEPS = (-12, -9, -7, -5, -3, -1, 0, 1)

# Exit codes of a command that did its work: success, objectives missed, not certain, not valid
USABLE_EXIT_CODES = (0, 1, 3, 4)
UNKNOWN_CAPACITY_EXIT_CODE = 3  # of `cost` and `size`

# Why two values may differ; the output of loadgen says the same.
EMPTY_SERVER_CAVEAT = "it began with an empty server"
CLOSED_LOOP_CAVEAT = "closed loop"
WITHHELD_CAVEAT = "withheld: the client was too busy"


# -- reported values and their comparison --


class ReportedValue(NamedTuple):
    """A value that a command, file or page reports.

    `low` and `high` are its interval if it is not exact. `caveat` says why it may differ from other
    values with the same name.
    """

    name: str
    source: str
    value: float | None  # None if the source does not report it
    low: float | None = None
    high: float | None = None
    caveat: str = ""


Outcome = Literal["equal", "within", "marked", "DISAGREES"]
OUTCOMES: tuple[Outcome, ...] = ("equal", "within", "marked", "DISAGREES")


class ComparedPair(NamedTuple):
    """A value compared with the reference, which is the first value of the same name."""

    reference: ReportedValue
    other: ReportedValue
    outcome: Outcome


def compare_values(values: Iterable[ReportedValue]) -> Iterator[ComparedPair]:
    """Compare each value with the first one of its name."""
    references: dict[str, ReportedValue] = {}
    for value in values:
        if value.name not in references:
            references[value.name] = value
            continue

        reference = references[value.name]
        yield ComparedPair(reference, value, compare_pair(reference, value))


def compare_pair(reference: ReportedValue, other: ReportedValue) -> Outcome:
    """Return how a value agrees with its reference."""
    if reference.value is None and other.value is None:
        return "equal"

    if reference.value is not None and other.value is not None:
        if math.isclose(reference.value, other.value, rel_tol=1e-9):
            return "equal"
        if do_intervals_overlap(reference, other):
            return "equal" if reference.low is None else "within"

    return "marked" if other.caveat else "DISAGREES"


def do_intervals_overlap(first: ReportedValue, second: ReportedValue) -> bool:
    """Return whether two values have a common value in their intervals.

    The interval of an exact value is that value alone.
    """

    def interval(reported: ReportedValue) -> tuple[float, float]:
        """Return the lowest and the highest value that a reported value may stand for."""
        assert reported.value is not None
        low = reported.value if reported.low is None else reported.low
        high = reported.value if reported.high is None else reported.high
        return low, high

    first_low, first_high = interval(first)
    second_low, second_high = interval(second)
    return first_low <= second_high and second_low <= first_high


def value_from_json(name: str, source: str, value: float | None, caveat: str = "") -> ReportedValue:
    """Return a value of a JSON file. A metric that is null was withheld, which is its caveat."""
    if value is None and not caveat:
        caveat = WITHHELD_CAVEAT
    return ReportedValue(name, source, value, caveat=caveat)


NUMBER = r"~?([\d,.]+)"  # in a regular expression; "~" marks a value of too few samples
RATE_UNIT = r"(?: req| requests| conversations| tasks| starts)?/s"


def find_in_text(name: str, source: str, pattern: str, text: str) -> ReportedValue:
    """Return the number that a text has where the first group of a pattern matches.

    The interval of the result is what rounds to the printed number: "31.0" may stand for 30.95 to
    31.05. The value is None if the pattern does not match.
    """
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        return ReportedValue(name, source, None)

    printed = match[1].rstrip(".,")
    value = float(printed.replace(",", ""))
    half_step = 0.5001 * rounding_step(printed)  # a little more, because binary fractions differ
    return ReportedValue(name, source, value, value - half_step, value + half_step)


def rounding_step(printed: str) -> float:
    """Return the value of the last digit to which a printed number is rounded: 0.1 for "31.0".

    A whole number of more than three digits that ends with zeros is rounded to the digit before
    these zeros: 100 for "12,300".
    """
    decimals = len(printed.partition(".")[2])
    if decimals:
        return 10.0**-decimals

    digits = printed.replace(",", "")
    if len(digits.lstrip("0")) <= 3:
        return 1.0

    trailing_zeros = len(digits) - len(digits.rstrip("0"))
    return 10.0**trailing_zeros


def extract_page_text(page: str) -> str:
    """Return the text of an HTML page without its tags, one piece of text per line."""
    without_code = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page, flags=re.DOTALL)
    without_tags = re.sub(r"<[^>]+>", "\n", without_code)
    return re.sub(r"\s*\n\s*", "\n", html.unescape(without_tags))


# -- commands of loadgen --


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload: how it is measured, and the commands that measure it.

    All commands run in `results_dir`, so the name of a result is its path.
    """

    workload: str
    target_options: tuple[str, ...]
    slo_options: tuple[str, ...]
    search_options: tuple[str, ...]
    trial_s: float  # duration of a trial of the search
    results_dir: Path
    is_simulated: bool
    run_count: int  # runs at the load that the search found
    is_smoke: bool  # the smallest form, which leaves out some commands

    @property
    def run_names(self) -> list[str]:
        """Return the names of the runs at the load that the search found."""
        return [f"run{number}" for number in range(1, self.run_count + 1)]

    def start_loadgen(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command of loadgen."""
        return subprocess.Popen(
            [sys.executable, "-m", "loadgen", *arguments],
            cwd=self.results_dir,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run_loadgen(self, *arguments: str) -> str:
        """Run a command of loadgen and return its output. The script ends if the command fails."""
        return read_output(self.start_loadgen(*arguments))

    def search_command(self, name: str, *options: str) -> list[str]:
        """Return the arguments of a search. All searches of a case have the same seed."""
        trial_options = ["-d", f"{self.trial_s:g}s", "--max-probes", "120", "--seed", "21"]
        return [
            "search",
            self.workload,
            *self.target_options,
            *self.slo_options,
            *trial_options,
            *self.search_options,
            "-o",
            name,
            *options,
            *QUIET_OPTIONS,
        ]

    def load_command(self, command: str, name: str, *options: str) -> list[str]:
        """Return the arguments of `run` or `sweep`. Each load lasts for twice a trial."""
        return [
            command,
            self.workload,
            *self.target_options,
            *self.slo_options,
            "-d",
            f"{2 * self.trial_s:g}s",
            "-o",
            name,
            *options,
            *QUIET_OPTIONS,
        ]

    def warm_up_options(self) -> tuple[str, str]:
        """Return the option for a warm-up of half a trial, or of a minimum that fills a server."""
        min_warm_up_s = 20 if self.is_simulated else 8
        return "--warmup", f"{max(self.trial_s / 2, min_warm_up_s):g}s"

    def read_text(self, path: str) -> str:
        """Return the text of a file of the results."""
        return (self.results_dir / path).read_text("utf-8")

    def read_json(self, path: str) -> dict[str, Any]:
        """Return the object in a JSON file of the results."""
        value: dict[str, Any] = json.loads(self.read_text(path))
        return value

    def read_summary(self, name: str) -> dict[str, Any]:
        """Return the summary of a run: the object in its summary.json."""
        return self.read_json(f"{name}/summary.json")


def read_output(process: subprocess.Popen[str]) -> str:
    """Wait for a command and return its output. The script ends if the command failed."""
    output, errors = process.communicate()
    if process.returncode not in USABLE_EXIT_CODES:
        sys.exit(f"{process.args!r}: exit {process.returncode}\n{errors[-2000:]}")
    return output


def search_capacity(case: Case) -> float:
    """Run the search of a case and return its capacity per second. The script ends without one."""
    case.run_loadgen(*case.search_command("search"))
    rate_per_s: float = case.read_json("search/capacity.json")["rate_per_s"]
    if not rate_per_s:
        sys.exit(
            "The search found no load that meets the objectives. Use longer trials (--length), "
            "--search-flags or a wider --slo."
        )

    return rate_per_s


def run_at_capacity(case: Case, rate_per_s: float) -> None:
    """Run the load that the search found several times, each with a seed of its own."""
    for seed, name in enumerate(case.run_names, start=11):
        options = ["--request-rate", f"{rate_per_s:.6g}", *case.warm_up_options()]
        options += ["--seed", str(seed), "--junit", f"{name}.xml"]
        case.run_loadgen(*case.load_command("run", name, *options))


# -- metrics of a run --


def steady_or_full(steady: float | None, full_run: float | None) -> float | None:
    """Return the rate in the steady state, or that of the full run if it has no steady state."""
    return full_run if steady is None else steady


METRICS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "tokens/s": lambda summary: steady_or_full(
        summary["tokens"]["steady_output_per_s"], summary["tokens"]["output_per_s"]
    ),
    "goodput": lambda summary: steady_or_full(
        summary["goodput"]["steady_rps"], summary["goodput"]["rps"]
    ),
    "completed": lambda summary: steady_or_full(
        summary["load"]["steady_completed_rps"], summary["load"]["completed_rps"]
    ),
    "ttft p99": lambda summary: summary["ttft_ms"]["p99"],
    "tpot p99": lambda summary: summary["tpot_ms"]["p99"],
}
"""The compared metrics of a run: a function of its summary that returns the value, by its name."""

RATE_METRICS = ("tokens/s", "goodput", "completed")
LATENCY_METRICS = ("ttft", "tpot")


def read_metrics(summary: dict[str, Any], source: str, caveat: str = "") -> Iterator[ReportedValue]:
    """Yield all metrics of the summary of a run."""
    for name, read_metric in METRICS.items():
        yield value_from_json(name, source, read_metric(summary), caveat)


# -- one run, reported in several places --


class RunReport(NamedTuple):
    """What loadgen reports of one run: its summary, texts and files."""

    name: str
    summary: dict[str, Any]
    text: str  # of `loadgen report --full`
    page: str  # the text of the HTML page
    junit: str


def read_values_of_run(case: Case, name: str) -> Iterator[ReportedValue]:
    """Yield each value of a run from all places, first from its JSON, which is the reference."""
    report = collect_run_report(case, name)
    yield from read_rates_of_run(report)
    yield from read_latencies_of_run(report, has_own_objectives=case.workload != MIX)

    for class_summary in report.summary["classes"] or ():
        yield from read_latencies_of_class(report, class_summary)

    yield from read_cost_of_run(case, name)


def collect_run_report(case: Case, name: str) -> RunReport:
    """Report a run as text, JSON and page, and read its JUnit file."""
    text = case.run_loadgen("report", name, "--full", "--html", f"{name}.html")
    return RunReport(
        name=name,
        summary=json.loads(case.run_loadgen("report", name, "--json")),
        text=text,
        page=extract_page_text(case.read_text(f"{name}.html")),
        junit=case.read_text(f"{name}.xml"),
    )


def read_rates_of_run(report: RunReport) -> Iterator[ReportedValue]:
    """Yield tokens/s, goodput and completed requests/s of a run from its JSON, text and page."""
    for metric in RATE_METRICS:
        value = METRICS[metric](report.summary)
        yield value_from_json(metric, f"{report.name}: JSON", value)

    text_patterns = {
        "tokens/s": rf"^Throughput\s+{NUMBER}\s+output\s+tok/s",
        "goodput": rf"goodput\s+{NUMBER}\s+req/s",
        "completed": rf"completed\s+{NUMBER}/s",
    }
    for metric, pattern in text_patterns.items():
        yield find_in_text(metric, f"{report.name}: text", pattern, report.text)

    page_patterns = {
        "tokens/s": rf"^Output throughput\n{NUMBER}\ntok/s",
        "goodput": rf"goodput {NUMBER} req/s",
        "completed": rf"^Request throughput\n{NUMBER}\nreq/s",
    }
    for metric, pattern in page_patterns.items():
        yield find_in_text(metric, f"{report.name}: page", pattern, report.page)


def read_latencies_of_run(
    report: RunReport, *, has_own_objectives: bool
) -> Iterator[ReportedValue]:
    """Yield the p99 of TTFT and TPOT of a run from its JSON, text, page and JUnit file.

    A JUnit file has a test for each objective. Without objectives of its own, as for a mix whose
    classes have them, a run has no such test.
    """
    for metric in LATENCY_METRICS:
        name = f"{metric} p99"
        title = metric.upper()
        text_row = rf"^{title}" + r" +[\d,.~]+" * 4 + rf" +{NUMBER}"  # p99 is the fifth column
        page_row = rf"^{title} p99\n{NUMBER}"
        yield value_from_json(name, f"{report.name}: JSON", report.summary[f"{metric}_ms"]["p99"])
        yield find_in_text(name, f"{report.name}: text", text_row, report.text)
        yield find_in_text(name, f"{report.name}: page", page_row, report.page)

        if has_own_objectives:
            junit_test = rf'{title} p99 .*\n.*?[>"]{NUMBER} ms'
            yield find_in_text(name, f"{report.name}: JUnit", junit_test, report.junit)


def read_latencies_of_class(
    report: RunReport, class_summary: dict[str, Any]
) -> Iterator[ReportedValue]:
    """Yield the p95 of TTFT and TPOT of one class of a mix from JSON, text and JUnit file."""
    class_name = class_summary["name"]
    for metric in LATENCY_METRICS:
        name = f"{metric} p95 of {class_name}"
        objective = rf"{class_name}:? {metric.upper()} p95"
        text_row = rf"^{objective} at most \S+ m?s +{NUMBER} ms"
        junit_test = rf'{objective} .*\n.*?[>"]{NUMBER} ms'
        yield value_from_json(name, f"{report.name}: JSON", class_summary[f"{metric}_ms"]["p95"])
        yield find_in_text(name, f"{report.name}: text", text_row, report.text)
        yield find_in_text(name, f"{report.name}: JUnit", junit_test, report.junit)


def read_cost_of_run(case: Case, name: str) -> Iterator[ReportedValue]:
    """Yield the rates for which `cost` computes the prices of a run."""
    rates = read_price_offer(case, name)["rates_per_s"]
    source = f"{name}: cost"
    yield ReportedValue("tokens/s", source, float(rates["million_output_tokens"]) * 1e6)
    yield ReportedValue("goodput", source, float(rates["good_request"]))
    yield ReportedValue("completed", source, float(rates["request"]))


def read_price_offer(case: Case, name: str) -> dict[str, Any]:
    """Return what `cost` computes for a result with the only price of the price file."""
    output = case.run_loadgen("cost", name, *PRICE_OPTIONS, "--json")
    (offer,) = json.loads(output)["offers"]
    price_offer: dict[str, Any] = offer
    return price_offer


# -- one search, reported in several places --


def read_values_of_search(case: Case) -> Iterator[ReportedValue]:
    """Yield each value of the search from all places, first from its files."""
    capacity = case.read_json("search/capacity.json")

    # `evidence` is the folder of the run that showed the capacity.
    evidence = case.read_summary(f"search/{capacity['evidence']}")
    yield from read_search_files(case, capacity, evidence)
    yield from read_search_text_and_page(case)
    yield from read_search_in_ui(case)
    yield from read_search_in_comparison(case)

    # The rate of a mix counts starts, some of which are tasks of several requests.
    requests_per_start = 1.0
    if case.workload == MIX:
        requests_per_start = mean_requests_per_start(evidence)
    yield from read_prices_of_search(case, capacity["rate_per_s"], requests_per_start)


def read_search_files(
    case: Case, capacity: dict[str, Any], evidence: dict[str, Any]
) -> Iterator[ReportedValue]:
    """Yield the capacity from the files of the search, and the metrics of the run that showed it.

    `capacity` is the object in capacity.json, `evidence` the summary of that run.
    """
    trials = case.read_json("search/search.json")["told"]
    (trial_metrics,) = [
        trial["figures"] for trial in trials if trial["folder"] == capacity["evidence"]
    ]
    capacity_file = "search: capacity.json"
    search_file = "search: search.json"
    summary_file = "search: summary of its run"
    yield ReportedValue("capacity", capacity_file, capacity["rate_per_s"])
    yield ReportedValue("tokens/s", capacity_file, capacity["output_tokens_per_s"])
    yield value_from_json("goodput", summary_file, evidence["goodput"]["steady_rps"])

    for metric in LATENCY_METRICS:
        name = f"{metric} p99"
        yield value_from_json(name, summary_file, evidence[f"{metric}_ms"]["p99"])
        yield value_from_json(name, search_file, trial_metrics[f"{metric}_p99_ms"])

    yield value_from_json("tokens/s", search_file, trial_metrics["output_tokens_per_s"])
    yield value_from_json("goodput", search_file, trial_metrics["goodput_rps"])


def read_search_text_and_page(case: Case) -> Iterator[ReportedValue]:
    """Yield what the text and the HTML page of `report` print of the search."""
    text = case.run_loadgen("report", "search", "--html", "search.html")
    page = extract_page_text(case.read_text("search.html"))
    text_row = rf"^ *Capacity +{NUMBER}{RATE_UNIT}"
    page_sentence = rf"^Maximum load meeting the SLO[^:]*: {NUMBER}{RATE_UNIT}"
    yield find_in_text("capacity", "search: text", text_row, text)
    yield find_in_text("capacity", "search: page", rf"^Capacity\n{NUMBER}\n", page)
    yield find_in_text("capacity", "search: page, its sentence", page_sentence, page)
    yield find_in_text("tokens/s", "search: page", rf"^Throughput\n{NUMBER}\noutput", page)


def read_search_in_ui(case: Case) -> Iterator[ReportedValue]:
    """Yield what the table of results of `loadgen ui` shows of the search."""
    rows_by_result = parse_results_table(fetch_ui_page(case))
    row = rows_by_result["search"]
    source = "search: ui"
    yield find_in_text("capacity", source, rf"{NUMBER}{RATE_UNIT}", row["outcome"])
    yield find_in_text("tokens/s", source, f"^{NUMBER}", row["tokens/s"])
    yield find_in_text("ttft p99", source, f"^{NUMBER}", row["TTFT p99"])
    yield find_in_text("tpot p99", source, f"^{NUMBER}", row["TPOT p99"])


def fetch_ui_page(case: Case) -> str:
    """Start `loadgen ui` for the results of a case, and return its page."""
    server = case.start_loadgen("ui", ".")
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with urllib.request.urlopen(url, timeout=60) as response:
            page: str = response.read().decode()
        return page
    finally:
        server.terminate()
        server.wait()


def parse_results_table(page: str) -> dict[str, dict[str, str]]:
    """Return the table of results of a page: the cells by column, by the name of the result."""
    (table,) = re.findall(r'<table class="results\b.*?</table>', page, re.DOTALL)
    header_cells = re.findall(r"<th\b[^>]*>(.*?)</th>", table, re.DOTALL)
    columns = ["".join(extract_page_text(cell).split("\n")) for cell in header_cells]

    rows_by_result = {}
    for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL):
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
        if not cells:  # the row with the header
            continue
        texts = [" ".join(extract_page_text(cell).split()) for cell in cells]
        text_by_column = dict(zip(columns, texts, strict=True))
        rows_by_result[text_by_column["result"]] = text_by_column

    return rows_by_result


def read_search_in_comparison(case: Case) -> Iterator[ReportedValue]:
    """Yield what `compare` reports of the search when it is compared with the first run."""
    output = case.run_loadgen("compare", "search", case.run_names[0], "--json")
    comparison = json.loads(output)["comparison"]
    notes = "\n".join(comparison["notes"])
    value_by_metric = {
        difference["metric"]: difference["before"] for difference in comparison["differences"]
    }
    source = "search: compare"
    yield find_in_text("capacity", source, rf"at its capacity, {NUMBER} ", notes)
    yield value_from_json("ttft p99", source, value_by_metric["ttft_ms.p99"])
    yield value_from_json("tpot p99", source, value_by_metric["tpot_ms.p99"])
    yield value_from_json("tokens/s", source, value_by_metric["tokens.steady_output_per_s"])


def mean_requests_per_start(summary: dict[str, Any]) -> float:
    """Return the mean number of requests of one start in the run of a mix.

    A start is what the rate of a mix counts: a request, or a task of several requests.
    """
    classes = summary["classes"]
    requests: float = sum(class_summary["requests"]["scheduled"] for class_summary in classes)
    starts: float = sum(class_summary["starts"] for class_summary in classes)
    return requests / starts


# -- prices and machines for a search --


def read_prices_of_search(
    case: Case, capacity_per_s: float, requests_per_start: float
) -> Iterator[ReportedValue]:
    """Yield what `cost` and `size` compute from the capacity, and what it should be.

    The capacity counts starts: requests, or whole conversations or tasks. `cost` prices single
    requests of a mix, so its values are converted with `requests_per_start`, which is 1 for other
    workloads.
    """
    offer = read_price_offer(case, "search")
    size_command = ["size", case.workload, "search", "--users", str(USERS), *PRICE_OPTIONS]
    size_output = case.run_loadgen(*size_command, "--json", "-o", "search-size")
    size = json.loads(size_output)["sizes"][0]
    size_text = case.run_loadgen(*size_command, "-o", "search-size-text")

    yield from read_rates_of_cost(case, offer, requests_per_start)
    yield ReportedValue("capacity", "search: size", size["per_machine"]["mid"])
    yield from read_machine_counts(size, size_text, capacity_per_s)
    yield from read_monthly_prices(size, size_text)
    yield from read_unit_prices(case, offer, size, requests_per_start)


def priced_unit(case: Case) -> str:
    """Return what `cost` prices for a workload: a task or a request."""
    return "task" if case.workload in TASK_WORKLOADS else "request"


def read_rates_of_cost(
    case: Case, offer: dict[str, Any], requests_per_start: float
) -> Iterator[ReportedValue]:
    """Yield the rates for which `cost` computes prices, from its JSON and its text."""
    rates = offer["rates_per_s"]
    starts_per_s = float(rates[priced_unit(case)]) / requests_per_start
    yield ReportedValue("capacity", "search: cost", starts_per_s)

    tokens_per_s = float(rates["million_output_tokens"]) * 1e6
    yield ReportedValue("tokens/s", "search: cost", tokens_per_s)

    text = case.run_loadgen("cost", "search", *PRICE_OPTIONS, "--full")
    pattern = rf"capacity by search: {NUMBER} "
    yield find_in_text("capacity", "search: cost, text", pattern, text)


def read_machine_counts(
    size: dict[str, Any], size_text: str, capacity_per_s: float
) -> Iterator[ReportedValue]:
    """Yield the number of machines that `size` needs: those for the demand, and one spare."""
    expected = math.ceil(size["demand_per_s"] / capacity_per_s) + 1
    headline = rf": {NUMBER} machines \("
    yield ReportedValue("machines", "size: expected", expected)
    yield ReportedValue("machines", "size: JSON", size["machines"])
    yield find_in_text("machines", "size: headline", headline, size_text)


def read_monthly_prices(size: dict[str, Any], size_text: str) -> Iterator[ReportedValue]:
    """Yield the price of a month as `size` prints it, after what its machines cost."""
    expected = PRICE_PER_HOUR * HOURS_PER_MONTH * size["machines"]
    headline = rf"USD\s+{NUMBER}(?:\s+\[[^\]]*\])?\s+per\s+month"
    yield ReportedValue("USD a month", "size: expected", expected)
    yield ReportedValue("USD a month", "size: JSON", float(size["per_month"]["mid"]))
    yield find_in_text("USD a month", "size: headline", headline, size_text)


def read_unit_prices(
    case: Case, offer: dict[str, Any], size: dict[str, Any], requests_per_start: float
) -> Iterator[ReportedValue]:
    """Yield the price of 1,000 starts on fully used machines by `size` and by `cost`.

    `size` prices machines that are used in part, so its price is multiplied by the used share.
    `cost` rounds amounts of money to twelve decimal places, which gives its price an interval.
    """
    name = "USD per 1,000 at capacity"
    price_by_size = float(size["per_thousand"]["mid"]) * size["used"]
    yield ReportedValue(name, "size: JSON, times the used share", price_by_size)

    price_of_unit = float(offer["costs"][priced_unit(case)]["total"])
    price_by_cost = price_of_unit * 1000 * requests_per_start
    rounding = 0.51e-12 * 1000 * requests_per_start
    low = price_by_cost - rounding
    high = price_by_cost + rounding
    yield ReportedValue(name, "cost: JSON", price_by_cost, low, high)


# -- Prometheus --


def read_prometheus_values(case: Case, rate_per_s: float) -> Iterator[ReportedValue]:
    """Yield metrics of a run in real time, and those that Prometheus would have scraped.

    The last page that was scraped lacks the requests that ended in the three seconds after it.
    """
    page = scrape_run(case, "scraped", rate_per_s)
    summary = case.read_summary("scraped")
    yield from read_counters(summary, page, max_unseen_requests=3 * rate_per_s)

    for metric in LATENCY_METRICS:
        name = f"bucket of {metric} p99"
        p99 = value_from_json(name, "scraped: JSON", summary[f"{metric}_ms"]["p99"])
        yield p99
        bucket = find_bucket(page, f"loadgen_{metric}_seconds", 0.99)
        if bucket is None:
            yield ReportedValue(name, "scraped: Prometheus", None, caveat=p99.caveat)
            continue

        low_ms = bucket.low * 1e3
        high_ms = bucket.high * 1e3
        yield ReportedValue(name, "scraped: Prometheus", high_ms, low_ms, high_ms, p99.caveat)


def scrape_run(case: Case, name: str, rate_per_s: float) -> str:
    """Run a load with a metrics page, and return the last page that could be read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free_port = listener.getsockname()[1]

    load_options = ["--request-rate", f"{rate_per_s:.6g}", "--warmup", "0", "--seed", "99"]
    page_options = ["--prometheus", f":{free_port}"]
    run = case.start_loadgen(*case.load_command("run", name, *load_options, *page_options))

    page = ""
    while run.poll() is None:
        # There is no page before the load starts and after it ends.
        with contextlib.suppress(OSError):
            page = rig.read_url(f"http://127.0.0.1:{free_port}/metrics").decode()
        time.sleep(0.2)

    read_output(run)
    return page


def read_counters(
    summary: dict[str, Any], page: str, max_unseen_requests: float
) -> Iterator[ReportedValue]:
    """Yield requests and tokens of a run from its JSON and from the counters of its last page.

    At most `max_unseen_requests` ended after that page, so the counters may be lower by these
    requests and their tokens.
    """
    ok_requests = summary["requests"]["ok"]
    output_tokens = summary["tokens"]["output"]
    tokens_per_request = output_tokens / max(ok_requests, 1)

    request_counter = rf'^loadgen_requests_total\{{status="ok"\}} {NUMBER}'
    requests = find_in_text("requests ok", "scraped: Prometheus", request_counter, page)
    yield ReportedValue("requests ok", "scraped: JSON", ok_requests)
    yield add_unseen(requests, max_unseen_requests)

    token_counter = rf"^loadgen_output_tokens_total {NUMBER}"
    tokens = find_in_text("tokens", "scraped: Prometheus", token_counter, page)
    yield ReportedValue("tokens", "scraped: JSON", output_tokens)
    yield add_unseen(tokens, max_unseen_requests * tokens_per_request)


def add_unseen(counter: ReportedValue, max_unseen: float) -> ReportedValue:
    """Return a counter with an interval from its value to that plus what it may have missed."""
    if counter.value is None:
        return counter
    return counter._replace(low=counter.value, high=counter.value + max_unseen)


class Bucket(NamedTuple):
    """The bounds of a bucket of a Prometheus histogram, in the unit of the histogram."""

    low: float
    high: float


def find_bucket(page: str, histogram: str, quantile: float) -> Bucket | None:
    """Return the bucket of a histogram that contains a quantile.

    Returns None if the page has no such histogram, for example because the run ended too early.
    """
    pattern = rf'^{histogram}_bucket\{{le="([^"]+)"\}} ([\d.e+]+)'
    buckets = re.findall(pattern, page, re.MULTILINE)
    if not buckets:
        return None

    total_count = float(buckets[-1][1])  # the counts are cumulative
    low = 0.0
    for upper_bound, cumulative_count in buckets:
        high = float(upper_bound)
        if float(cumulative_count) >= quantile * total_count:
            return Bucket(low, high)
        low = high

    return None


# -- stopped searches --


StopKind = Literal["time", "SIGTERM", "SIGKILL"]
TRIALS_BEFORE_SIGNAL = 4


def read_stopped_searches(case: Case) -> Iterator[ReportedValue]:
    """Stop searches in several ways; yield what they report then, and when they are resumed.

    A stopped search must not report a capacity. When it is resumed, it has to end with the capacity
    of the search that was not stopped.
    """
    yield from read_final_capacity(case, "search", source="the search without a stop")
    yield ReportedValue("reports a capacity while stopped", "expected", False)

    stop_kinds: tuple[StopKind, ...] = ("time", "SIGTERM", "SIGKILL")
    if case.is_smoke:
        stop_kinds = ("time", "SIGKILL")

    for stop_kind in stop_kinds:
        name = f"by-{stop_kind}"
        stop_search(case, name, stop_kind)
        yield from read_reports_while_stopped(case, name, stop_kind)
        case.run_loadgen("search", "--resume", name, "--max-time", "300h", *QUIET_OPTIONS)
        yield from read_final_capacity(case, name, source=stop_kind)


def read_final_capacity(case: Case, name: str, source: str) -> Iterator[ReportedValue]:
    """Yield the capacity and the tokens/s with which a search ended."""
    capacity = case.read_json(f"{name}/capacity.json")
    yield ReportedValue("capacity when resumed", source, capacity["rate_per_s"])
    yield ReportedValue("tokens/s when resumed", source, capacity["output_tokens_per_s"])


def read_reports_while_stopped(
    case: Case, name: str, stop_kind: StopKind
) -> Iterator[ReportedValue]:
    """Yield whether a stopped search has a capacity: in its file, and for `cost` and `size`.

    The two commands exit with UNKNOWN_CAPACITY_EXIT_CODE if they know of none.
    """
    value_name = "reports a capacity while stopped"
    if (case.results_dir / name / "capacity.json").is_file():
        # "confirmed" is null if no trial had ended.
        is_confirmed = bool(case.read_json(f"{name}/capacity.json")["confirmed"])
        yield ReportedValue(value_name, f"{stop_kind}: capacity.json", is_confirmed)

    commands = (
        ("cost", name),
        ("size", case.workload, name, "--users", str(USERS), "-o", f"{name}-size"),
    )
    for command in commands:
        process = case.start_loadgen(*command, *PRICE_OPTIONS)
        process.communicate()
        has_capacity = process.returncode != UNKNOWN_CAPACITY_EXIT_CODE
        yield ReportedValue(value_name, f"{stop_kind}: {command[0]}", has_capacity)


def stop_search(case: Case, name: str, stop_kind: StopKind) -> None:
    """Start the search of a case and stop it before it ends.

    With "time", its limit is a third of the time that the complete search took. Otherwise it gets
    the signal as soon as TRIALS_BEFORE_SIGNAL trials have ended.
    """
    if stop_kind == "time":
        complete_search_s = case.read_json("search/search.json")["answer"]["spent_s"]
        time_limit = f"{complete_search_s / 3:.0f}s"
        case.run_loadgen(*case.search_command(name, "--max-time", time_limit))
        return

    search = case.start_loadgen(*case.search_command(name))
    trials_path = case.results_dir / name / "probes.jsonl"
    while search.poll() is None and count_lines(trials_path) < TRIALS_BEFORE_SIGNAL:
        time.sleep(0.02)

    search.send_signal(signal.Signals[stop_kind])
    search.communicate()


def count_lines(path: Path) -> int:
    """Return the number of complete lines of a file, 0 if there is no such file."""
    return path.read_bytes().count(b"\n") if path.is_file() else 0


# -- several ways to the same load --


def read_same_load(case: Case, rate_per_s: float) -> Iterator[ReportedValue]:
    """Yield the metrics at one load by several commands, which have to agree.

    The reference is the interval in which one more run at this load would lie. Compared with it are
    the run of the search, and a closed loop with as many requests in flight.
    """
    summaries = [case.read_summary(name) for name in case.run_names]
    yield from predict_next_run(summaries)

    evidence = case.read_json("search/capacity.json")["evidence"]
    search_run = case.read_summary(f"search/{evidence}")
    yield from read_metrics(search_run, "the run of the search", EMPTY_SERVER_CAVEAT)

    # Little's law: requests in flight = arrival rate * mean duration
    mean_duration_s = statistics.fmean(mean_start_duration_s(summary) for summary in summaries)
    concurrency = round(rate_per_s * mean_duration_s)
    options = ["-c", str(concurrency), *case.warm_up_options(), "--seed", "78"]
    case.run_loadgen(*case.load_command("run", "closed", *options))
    closed_loop_run = case.read_summary("closed")
    yield from read_metrics(closed_loop_run, f"closed loop of {concurrency}", CLOSED_LOOP_CAVEAT)


def predict_next_run(summaries: Sequence[dict[str, Any]]) -> Iterator[ReportedValue]:
    """Yield the mean of each metric over some runs, with the prediction interval of one more run.

    The interval is that of a normal distribution with unknown variance:
    mean +- t(1 - alpha / 2, n - 1) * s * sqrt(1 + 1 / n).
    """
    run_count = len(summaries)
    t_factor = t_quantile(0.5 + RUN_CONFIDENCE / 2, run_count - 1)
    source = f"{run_count} runs at that load"
    for name, read_metric in METRICS.items():
        values = [read_metric(summary) for summary in summaries]
        reported_values = [value for value in values if value is not None]
        if len(reported_values) < run_count:
            yield ReportedValue(name, source, None, caveat=WITHHELD_CAVEAT)
            continue

        mean = statistics.fmean(reported_values)
        deviation = statistics.stdev(reported_values)
        half_width = t_factor * deviation * math.sqrt(1 + 1 / run_count)
        yield ReportedValue(name, source, mean, mean - half_width, mean + half_width)


def mean_start_duration_s(summary: Mapping[str, Any]) -> float:
    """Return the mean duration of a start in a run.

    A start is a request, or a whole conversation or task. For a mix, it is the mean over its
    classes, weighted by their starts.
    """
    classes = summary["classes"]
    if not classes:
        sessions = summary.get("sessions")
        durations_ms = sessions["duration_ms"] if sessions else summary["e2e_ms"]
        mean_ms: float = durations_ms["mean"]
        return mean_ms / 1e3

    total_s = 0.0
    total_starts = 0
    for class_summary in classes:
        class_mean_s = mean_start_duration_s({**class_summary, "classes": ()})
        total_s += class_summary["starts"] * class_mean_s
        total_starts += class_summary["starts"]

    return total_s / total_starts


# -- capacity by search, sweep and contract --


def read_capacities(case: Case) -> Iterator[ReportedValue]:
    """Yield the capacity by the search with its interval, and that by a sweep of loads around it.

    The interval of the search is from the confirmed load to the highest load that may be sustained.
    """
    capacity = case.read_json("search/capacity.json")
    search_interval = case.read_json("search/search.json")["answer"]["interval"]
    rate_per_s = capacity["rate_per_s"]
    high_per_s = max(capacity["high_per_s"] or rate_per_s, search_interval["high"])
    caveat = "" if capacity["sustained"] else "not sustained"
    yield ReportedValue("capacity", "search", rate_per_s, rate_per_s, high_per_s, caveat)

    load_points = choose_load_points(case, rate_per_s)
    run_sweep(case, load_points)
    yield read_swept_capacity(case, load_points, explain_lower_capacity(case, capacity))


def choose_load_points(case: Case, capacity_per_s: float) -> list[float]:
    """Return the rates of a sweep around a capacity, in ascending order."""
    steps: Sequence[int] = SIMULATED_SWEEP_STEPS if case.is_simulated else REAL_SWEEP_STEPS
    if case.is_smoke:
        steps = steps[::3]
    return [capacity_per_s * SWEEP_STEP_FACTOR**step for step in steps]


def run_sweep(case: Case, load_points: Sequence[float]) -> None:
    """Run a sweep over these rates per second."""
    rates = ",".join(f"{rate:.4g}" for rate in load_points)
    options = ["--request-rate", rates, *case.warm_up_options(), "--seed", "5"]
    case.run_loadgen(*case.load_command("sweep", "sweep", *options))


def read_swept_capacity(
    case: Case, load_points: Sequence[float], caveat_if_lower: str
) -> ReportedValue:
    """Return the capacity by the sweep.

    It may be any rate up to the next higher load point, which failed. `caveat_if_lower` says why
    the sweep may have a lower capacity than the search.
    """
    if not (case.results_dir / "sweep/capacity.json").is_file():
        return ReportedValue("capacity", "sweep", None, caveat=caveat_if_lower)

    swept = case.read_json("sweep/capacity.json")
    rate_per_s = swept["rate_per_s"]

    # Rates are passed to the sweep with four digits, so its rate differs a little from the list.
    higher_load_points = [rate for rate in load_points if rate > 1.001 * rate_per_s]
    next_load_point = min(higher_load_points, default=rate_per_s)
    caveat = "a lower bound" if swept["lower_bound"] else caveat_if_lower

    return ReportedValue(
        "capacity", "sweep, to its next load point", rate_per_s, rate_per_s, next_load_point, caveat
    )


def explain_lower_capacity(case: Case, capacity: dict[str, Any]) -> str:
    """Return why longer runs may sustain less than the search found, or "" if they should not.

    The trials of the search are half as long as other runs. Its capacity may fail in longer runs if
    the search itself says that the load is not sustained, and if most of the runs at that load
    missed the SLO too.
    """
    summaries = [case.read_summary(name) for name in case.run_names]
    missed_runs = sum(not summary["goodput"]["met"] for summary in summaries)
    if capacity["sustained"] or missed_runs <= len(summaries) / 2:
        return ""

    return (
        f"{missed_runs} of {len(summaries)} runs of twice the length missed it too; not sustained: "
        f"{capacity['sustained_why']}"
    )


def read_contract_verdicts(case: Case, capacity_per_s: float) -> Iterator[ReportedValue]:
    """Yield whether contracts fail that demand 5 % less and 30 % more than the capacity.

    The first one must pass or stay undecided, the second one must fail.
    """
    is_sustained = case.read_json("search/capacity.json")["sustained"]
    caveat = "" if is_sustained else "the search says that the capacity may not be sustained"

    rates_per_s = {"below": 0.95 * capacity_per_s, "above": 1.3 * capacity_per_s}
    for name, rate_per_s in rates_per_s.items():
        contract = create_contract(case, name, rate_per_s)
        contract_path = case.results_dir / f"{name}.yaml"
        contract_path.write_text(json.dumps(contract) + "\n")  # JSON is YAML, too
        options = ("--seed", "41", "-o", name, *QUIET_OPTIONS)
        case.run_loadgen("validate", contract_path.name, *case.target_options, *options)
        verdict = case.read_json(f"{name}/verdict.json")["verdict"]

        value_name = f"a contract {name} the capacity fails"
        yield ReportedValue(value_name, "expected", name == "above")
        is_failed = verdict == "FAIL"
        yield ReportedValue(value_name, f"validate, {verdict}", is_failed, caveat=caveat)


def create_contract(case: Case, name: str, rate_per_s: float) -> dict[str, Any]:
    """Return the content of a contract with one load and the objectives of the workload.

    The load lasts for at least ten minutes, so that there are enough requests for a verdict.
    """
    level = {
        "name": "a",
        "workload": case.workload,
        "rate": f"{rate_per_s:.4g}/s",
        "duration": f"{max(600, 2 * case.trial_s):g}s",
        "must": list_contract_terms(case.workload),
    }
    return {"name": name, "horizon": "60s", "levels": [level]}


def list_contract_terms(workload: str) -> list[dict[str, dict[str, str]]]:
    """Return the objectives of a workload as terms of a contract; a mix has those of its classes.

    Each term is a dictionary with one key, its metric.
    """
    if workload != MIX:
        objectives = [objective.split(":") for objective in OBJECTIVES[workload]]
        return [{metric: {"limit": limit, "at": "p99"}} for metric, limit in objectives]

    terms = []
    for class_name, limits in MIX_OBJECTIVES.items():
        terms.append({"ttft": {"limit": limits.ttft, "at": "p95", "class": class_name}})
        terms.append({"tpot": {"limit": limits.tpot, "at": "p95", "class": class_name}})

    return terms


# -- all of it --


def measure_case(case: Case) -> Iterator[ComparedPair]:
    """Run all commands for one workload, and yield each pair of values that should agree."""
    (case.results_dir / "prices.yaml").write_text(PRICE_FILE)
    rate_per_s = search_capacity(case)
    run_at_capacity(case, rate_per_s)

    yield from compare_values(read_values_of_run(case, case.run_names[0]))
    yield from compare_values(read_values_of_search(case))

    if case.is_simulated:
        yield from compare_values(read_stopped_searches(case))

    yield from compare_values(read_same_load(case, rate_per_s))
    yield from compare_values(read_capacities(case))

    if case.is_simulated:
        yield from compare_values(read_contract_verdicts(case, rate_per_s))
    else:
        yield from compare_values(read_prometheus_values(case, rate_per_s))


def format_pair(pair: ComparedPair) -> str:
    """Return a pair as a row of the table."""
    outcome: str = pair.outcome
    if pair.outcome == "marked":
        outcome += f": {pair.other.caveat}"

    cells = [pair.other.name, format_value(pair.reference), format_value(pair.other), outcome]
    return f"| {' | '.join(cells)} |"


def format_value(reported: ReportedValue) -> str:
    """Return the source of a value, the value, and its interval if it has one."""
    if reported.value is None:
        return f"{reported.source}: none"

    text = f"{reported.source}: {reported.value:,.5g}"
    if reported.low is not None:
        text += f" [{reported.low:,.5g}, {reported.high:,.5g}]"
    return text


def create_case(workload: str, results_dir: Path, args: argparse.Namespace) -> Case:
    """Return how a workload is measured with the options of the command line."""
    slo_options: list[str] = []
    for objective in list_objectives(workload, args):
        slo_options += ["--slo", objective]

    return Case(
        workload=workload,
        target_options=("--url", args.url, *GPU_OPTIONS, *args.load_flags.split()),
        slo_options=tuple(slo_options),
        search_options=tuple(args.search_flags.split()),
        trial_s=seconds(args.length) * TRIAL_LENGTH_FACTORS.get(workload, 1),
        results_dir=results_dir,
        is_simulated=args.url.startswith("sim:"),
        run_count=args.repeats,
        is_smoke=args.smoke,
    )


def list_objectives(workload: str, args: argparse.Namespace) -> list[str]:
    """Return the objectives of a workload as options of `--slo`: those of the user, or its own."""
    return [f"{limit}:p99" for limit in args.slo or OBJECTIVES[workload]]


@contextlib.contextmanager
def create_results_dir(parent: Path | None, workload: str) -> Iterator[Path]:
    """Yield a folder for the results of a workload, a temporary one if no parent is given."""
    if parent is None:
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)
        return

    results_dir = parent / workload
    results_dir.mkdir(parents=True, exist_ok=True)
    yield results_dir


def print_workload(workload: str, args: argparse.Namespace) -> Counter[Outcome]:
    """Measure a workload, print its table and return how often each outcome occurred."""
    objectives = ", ".join(list_objectives(workload, args))
    print(f"\n{workload} on {args.url}, {objectives}\n")
    print("| name | reference | compared with it | outcome |\n|---|---|---|---|")

    outcome_counts: Counter[Outcome] = Counter()
    with create_results_dir(args.out, workload) as results_dir:
        for pair in measure_case(create_case(workload, results_dir, args)):
            outcome_counts[pair.outcome] += 1
            print(format_pair(pair), flush=True)

    return outcome_counts


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    parser.add_argument(
        "--cases", default=",".join(OBJECTIVES), help="workloads, separated by commas"
    )
    parser.add_argument("--length", default="120s", help="length of a trial of the search")
    parser.add_argument("--url", default="sim:gb300-vm")
    parser.add_argument("--slo", action="append", help="in place of the workload's limits")
    parser.add_argument(
        "--search-flags", default="", help="more options of the search: --precision 15%%"
    )
    parser.add_argument(
        "--load-flags", default="", help="more options of every load: --output-tokens 40"
    )
    parser.add_argument(
        "--repeats", type=int, default=DEFAULT_RUN_COUNT, help="runs at the load of the search"
    )
    parser.add_argument("--out", type=Path, help="a folder to keep the results in")

    # Trials that are shorter than this confirm no capacity.
    return rig.parse_arguments(parser, cases="qa", length="60s", repeats=2)


def main() -> int:
    """Measure each workload; return 1 if a pair disagrees."""
    args = parse_command_line()
    outcome_counts: Counter[Outcome] = Counter()
    for workload in args.cases.split(","):
        outcome_counts += print_workload(workload, args)

    counts = ", ".join(f"{outcome_counts[outcome]} {outcome}" for outcome in OUTCOMES)
    print(f"\n{outcome_counts.total()} pairs: {counts}")
    return 1 if outcome_counts["DISAGREES"] else 0


if __name__ == "__main__":
    sys.exit(main())
