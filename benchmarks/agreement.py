"""Do all commands and pages report the same number for the same machine?

    python benchmarks/agreement.py [--cases qa,rag,summarization,agentic,rag-pipeline,mixed]
    python benchmarks/agreement.py --cases qa --url http://127.0.0.1:8000 --length 60s --slo ttft:1s

For each workload on a simulated GB300 VM (SIMULATED, virtual time; the second command runs in real
time), with the workload's limits at p99 and those of the classes of a mix as they are:

- **One result, every place.** A search, and a run at the load that it found. The JSON of each is
  the reference; text, page, `ui`, JUnit, `cost`, `size` and `compare` have to print the same value,
  to the digits that they print. A run in virtual time exports nothing to Prometheus; one on a real
  endpoint is scraped until it ends, and its counters and histogram buckets have to hold the metrics
  of its JSON.
- **Cut short.** The same search stopped by time, by SIGTERM and by SIGKILL claims no capacity, and
  `cost` and `size` exit 3. Each of them, resumed, has to end with the capacity of the search that
  was not stopped.
- **Other ways to the same load.** Runs with other seeds give the interval of one more run. The
  search's own run, a load point of a sweep, a closed loop with the concurrency of Little's law and
  a contract are compared with it. A sweep around the capacity is compared with the interval of the
  search.

A pair is `equal`, `within` its intervals, `marked` if what is printed says why it differs, or
DISAGREES, which makes the exit code 1. A workload takes some minutes.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import rig

from loadgen.core.stats.students_t import t_quantile
from loadgen.core.units import seconds

NUMBER_PATTERN = r"~?([\d,.]+)"  # ~: rests on too few samples, and is said so in every place
PRICES = """currency: USD
rented:
  - {provider: made up, shape: gb300-vm, gpu: GB300, gpus: 4, per_hour: 56.00, commitment: none,
     as_of: 2026-11, source: made up}
"""
GPUS = ("--gpus", "4", "--shape", "gb300-vm")
QUIET = ("--progress", "off")
USERS = 20_000
REPEATS = 8
CONFIDENCE = 0.99  # of the interval of one run more
LEVEL_FACTOR = 1.06  # levels of a sweep about a capacity
STEPS = (-3, -2, -1, 0, 1, 2, 3, 4)  # of them, from below to above
REAL_STEPS = (
    -12,
    -9,
    -7,
    -5,
    -3,
    -1,
    0,
    1,
)  # trials of twice the length, and a server that may bear less by then
CASES = {  # limits of each workload at p99
    "qa": ("ttft:450ms", "tpot:40ms"),
    "rag": ("ttft:2s", "tpot:200ms"),
    "summarization": ("ttft:2s", "tpot:200ms"),
    "agentic": ("ttft:2s", "tpot:200ms"),
    "rag-pipeline": ("ttft:2s", "tpot:200ms"),
    "mixed": (),  # each class has its own
}
CLASSES = {  # of a mix: limits of TTFT and TPOT at p95, as its file has them
    "qa": ("450ms", "40ms"),
    "rag": ("2s", "200ms"),
    "summarization": ("2s", "200ms"),
    "agentic": ("2s", "200ms"),
}
MIX = "mixed"  # a rate is of starts, some of which are tasks
TRIAL_LENGTH_FACTORS = {  # probes that last longer than its requests
    "rag": 5,
    "summarization": 2,
    "agentic": 5,
    "rag-pipeline": 5,
    "mixed": 5,
}
TASK_WORKLOADS = ("agentic", "rag-pipeline")  # a rate is of tasks, so several requests each
FROM_EMPTY = "it began with an empty server"
CLOSED_LOOP = "closed loop"
NOT_REPORTED = "withheld: the client was too busy"


class Statement(NamedTuple):
    """A value that a place prints under a name.

    `low` and `high` are its interval if it is not exact; `mark` says why it may differ.
    """

    name: str
    source: str
    value: float
    low: float | None = None
    high: float | None = None
    mark: str = ""


class ComparedPair(NamedTuple):
    """A statement compared with the reference of its name."""

    reference: Statement
    statement: Statement
    outcome: str


class Case(NamedTuple):
    """How one workload is measured.

    `target` and `slo` are options of every command, `folder` is where results go.
    """

    workload: str
    target: tuple[str, ...]
    slo: tuple[str, ...]
    length_s: float
    folder: Path
    simulated: bool
    search_flags: tuple[str, ...] = ()
    repeats: int = REPEATS
    smallest: bool = False  # each way once, and short

    def search_command(self, name: str, *options: str) -> list[str]:
        """Return the arguments of a search."""
        length = f"{self.length_s:g}s"
        flags = (
            "-d",
            length,
            "--max-probes",
            "120",
            "--seed",
            "21",
            *self.search_flags,
            "-o",
            name,
        )
        return ["search", self.workload, *self.target, *self.slo, *flags, *options]

    def run_command_line(self, name: str, *options: str, lengths: float = 2) -> list[str]:
        """Return the arguments of a run of so many trial lengths."""
        length = f"{lengths * self.length_s:g}s"
        return ["run", self.workload, *self.target, *self.slo, "-d", length, "-o", name, *options]


def start_command(case: Case, *arguments: str) -> subprocess.Popen[str]:
    """Start a command of loadgen."""
    return subprocess.Popen(
        [sys.executable, "-m", "loadgen", *arguments],
        cwd=case.folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run_command(case: Case, *arguments: str, codes: tuple[int, ...] = (0, 1, 3, 4)) -> str:
    """Return what a command prints; exit if the command cannot be used at all."""
    return wait_for_command(start_command(case, *arguments), codes)


def wait_for_command(running: subprocess.Popen[str], codes: tuple[int, ...] = (0, 1, 3, 4)) -> str:
    """Wait for a command and return what it printed; exit if it could not be used at all.

    `codes` are the exit codes of a command that did its work, whatever it found.
    """
    output, errors = running.communicate()
    if running.returncode not in codes:
        sys.exit(f"{running.args!r}: exit {running.returncode}\n{errors[-2000:]}")
    return output


def parse_number(text: str) -> float:
    """Parse a number with thousands separators."""
    return float(text.replace(",", ""))


def find_in_text(name: str, source: str, pattern: str, text: str) -> Statement:
    """Return the number that a page or text prints where the pattern's group matches.

    The interval of the statement is what rounds to the printed number: "31.0" may stand for 30.95
    to 31.05. The value is NaN if the pattern is not found.
    """
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        return Statement(name, source, math.nan)
    printed = match[1].rstrip(".,")
    value = parse_number(printed)
    half_step = 0.5001 * find_last_digit(printed)
    return Statement(name, source, value, value - half_step, value + half_step)


def page_text(page: str) -> str:
    """Return the text of a page, one piece per line."""
    bare = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s*\n\s*", "\n", html.unescape(re.sub(r"<[^>]+>", "\n", bare)))


def compare_statements(statements: Iterable[Statement]) -> Iterator[ComparedPair]:
    """Compare each statement with the first one of its name."""
    references: dict[str, Statement] = {}
    for raw_statement in statements:
        statement = raw_statement
        if raw_statement.value is None:  # so no place says one
            statement = raw_statement._replace(
                value=math.nan, mark=raw_statement.mark or NOT_REPORTED
            )

        reference = references.setdefault(statement.name, statement)
        if reference is not statement:
            yield ComparedPair(reference, statement, compare_pair(reference, statement))


def compare_pair(reference: Statement, statement: Statement) -> str:
    """Return "equal", "within", "marked" or "DISAGREES" for two statements."""
    if math.isnan(reference.value) and math.isnan(statement.value):
        return "equal"
    if math.isclose(reference.value, statement.value, rel_tol=1e-9):
        return "equal"

    bounds = [
        (side.value if end is None else end)
        for side in (reference, statement)
        for end in (side.low, side.high)
    ]
    if not math.isnan(statement.value) and bounds[0] <= bounds[3] and bounds[2] <= bounds[1]:
        is_printed = reference.low is None and bounds[2] <= reference.value <= bounds[3]
        return "equal" if is_printed else "within"

    return "marked" if statement.mark else "DISAGREES"


# -- one result, every place --


def find_last_digit(printed: str) -> float:
    """Return the value of the last digit to which a number is rounded: 0.1 for "31.0".

    Whole numbers of more than three digits that end with zeros are rounded to the digit before
    these: 100 for "12,300".
    """
    decimals = len(printed.partition(".")[2])
    if decimals:
        return 10.0**-decimals

    digits = len(printed.replace(",", "").lstrip("0"))
    if digits <= 3:
        return 1.0

    trailing_zeros = len(printed) - len(printed.rstrip("0,"))
    return 10.0**trailing_zeros if printed.endswith("0") else 1.0


def read_run_statements(case: Case, name: str) -> Iterator[Statement]:
    """Yield what each place prints of a run; the JSON of the run comes first, as the reference."""
    text = run_command(case, "report", name, "--full", "--html", f"{name}.html")
    summary = json.loads(run_command(case, "report", name, "--json"))
    page = page_text((case.folder / f"{name}.html").read_text("utf-8"))
    junit = (case.folder / f"{name}.xml").read_text("utf-8")
    yield from read_rates_of_run(name, summary, text, page)
    yield from read_latencies_of_run(case, name, summary, text, page, junit)

    for class_summary in summary["classes"] or ():
        yield from read_latencies_of_class(name, class_summary, text, junit)

    yield from read_cost_of_run(case, name)


def read_rates_of_run(
    name: str, summary: dict[str, Any], text: str, page: str
) -> Iterator[Statement]:
    """Yield tokens/s, goodput and completed requests/s of a run from its JSON, text and page."""
    for metric in ("tokens/s", "goodput", "completed"):
        yield Statement(metric, f"{name}: JSON", METRICS[metric](summary))

    text_patterns = {
        "tokens/s": rf"^Throughput\s+{NUMBER_PATTERN}\s+output\s+tok/s",
        "goodput": rf"goodput\s+{NUMBER_PATTERN}\s+req/s",
        "completed": rf"completed\s+{NUMBER_PATTERN}/s",
    }
    for metric, pattern in text_patterns.items():
        yield find_in_text(metric, f"{name}: text", pattern, text)

    page_patterns = {
        "tokens/s": rf"^Output throughput\n{NUMBER_PATTERN}\ntok/s",
        "goodput": rf"goodput {NUMBER_PATTERN} req/s",
        "completed": rf"^Request throughput\n{NUMBER_PATTERN}\nreq/s",
    }
    for metric, pattern in page_patterns.items():
        yield find_in_text(metric, f"{name}: page", pattern, page)


def read_latencies_of_run(
    case: Case, name: str, summary: dict[str, Any], text: str, page: str, junit: str
) -> Iterator[Statement]:
    """Yield the p99 of TTFT and TPOT of a run from its JSON, text, page and JUnit file.

    The JUnit file of a mix has the terms of its classes instead.
    """
    for metric in ("ttft", "tpot"):
        yield Statement(f"{metric} p99", f"{name}: JSON", summary[f"{metric}_ms"]["p99"])
    for metric in ("ttft", "tpot"):
        title = metric.upper()
        text_row = rf"^{title}" + r" +[\d,.~]+" * 4 + rf" +{NUMBER_PATTERN}"
        yield find_in_text(f"{metric} p99", f"{name}: text", text_row, text)
        page_row = rf"^{title} p99\n{NUMBER_PATTERN}"
        yield find_in_text(f"{metric} p99", f"{name}: page", page_row, page)

        if case.workload != MIX:
            junit_test = rf'{title} p99 .*\n.*?[>"]{NUMBER_PATTERN} ms'
            yield find_in_text(f"{metric} p99", f"{name}: JUnit", junit_test, junit)


def read_latencies_of_class(
    name: str, class_summary: dict[str, Any], text: str, junit: str
) -> Iterator[Statement]:
    """Yield the p95 of TTFT and TPOT of one class of a mix from JSON, text and JUnit file."""
    class_name = class_summary["name"]
    for metric in ("ttft", "tpot"):
        value_name = f"{metric} p95 of {class_name}"
        label = rf"{class_name}:? {metric.upper()} p95"
        text_row = rf"^{label} at most \S+ m?s +{NUMBER_PATTERN} ms"
        junit_test = rf'{label} .*\n.*?[>"]{NUMBER_PATTERN} ms'
        yield Statement(value_name, f"{name}: JSON", class_summary[f"{metric}_ms"]["p95"])
        yield find_in_text(value_name, f"{name}: text", text_row, text)
        yield find_in_text(value_name, f"{name}: JUnit", junit_test, junit)


def read_cost_of_run(case: Case, name: str) -> Iterator[Statement]:
    """Yield the rates of a run for which `cost` computes a price."""
    output = run_command(case, "cost", name, "--prices", "prices.yaml", "--json")
    (price_offer,) = json.loads(output)["offers"]
    rates = price_offer["rates_per_s"]
    yield Statement("tokens/s", f"{name}: cost", float(rates["million_output_tokens"]) * 1e6)
    yield Statement("goodput", f"{name}: cost", float(rates["good_request"]))
    yield Statement("completed", f"{name}: cost", float(rates["request"]))


RATE_UNIT_PATTERN = r"(?: req| requests| conversations| tasks| starts)?/s"


def read_search_statements(
    case: Case, name: str, ui_rows: dict[str, dict[str, str]]
) -> Iterator[Statement]:
    """Yield what each place prints of a search.

    `ui_rows` is the table of `loadgen ui`: the cells of each result by column.
    """
    capacity = read_json(case.folder / name / "capacity.json")
    summary = read_summary(case, f"{name}/{capacity['evidence']}")
    yield from read_search_files(case, name, capacity, summary)
    yield from read_search_text_and_page(case, name)
    yield from read_search_row_of_ui(ui_rows[name])
    yield from read_search_in_comparison(case, name)

    # The rate of a mix counts starts, some of which are tasks of several requests.
    requests_of_start = requests_per_start(summary) if case.workload == MIX else 1.0
    yield from read_cost_statements(case, name, capacity["rate_per_s"], requests_of_start)


def read_search_files(
    case: Case, name: str, capacity: dict[str, Any], summary: dict[str, Any]
) -> Iterator[Statement]:
    """Yield what the files of a search say of the run that found the capacity, its evidence."""
    trials = read_json(case.folder / name / "search.json")["told"]
    (trial_metrics,) = [
        trial["figures"] for trial in trials if trial["folder"] == capacity["evidence"]
    ]
    yield Statement("capacity", "search: capacity.json", capacity["rate_per_s"])
    yield Statement("tokens/s", "search: capacity.json", capacity["output_tokens_per_s"])
    yield Statement("goodput", "search: its run", summary["goodput"]["steady_rps"])

    for metric in ("ttft", "tpot"):
        yield Statement(f"{metric} p99", "search: its run", summary[f"{metric}_ms"]["p99"])
        yield Statement(f"{metric} p99", "search: search.json", trial_metrics[f"{metric}_p99_ms"])

    yield Statement("tokens/s", "search: search.json", trial_metrics["output_tokens_per_s"])
    yield Statement("goodput", "search: search.json", trial_metrics["goodput_rps"])


def read_search_text_and_page(case: Case, name: str) -> Iterator[Statement]:
    """Yield what the text and the HTML page of `report` print of a search."""
    text = run_command(case, "report", name, "--html", f"{name}.html")
    page = page_text((case.folder / f"{name}.html").read_text("utf-8"))
    text_row = rf"^ *Capacity +{NUMBER_PATTERN}{RATE_UNIT_PATTERN}"
    page_sentence = rf"^Maximum load meeting the SLO[^:]*: {NUMBER_PATTERN}{RATE_UNIT_PATTERN}"
    yield find_in_text("capacity", "search: text", text_row, text)
    yield find_in_text("capacity", "search: page", rf"^Capacity\n{NUMBER_PATTERN}\n", page)
    yield find_in_text("capacity", "search: page, its sentence", page_sentence, page)
    yield find_in_text("tokens/s", "search: page", rf"^Throughput\n{NUMBER_PATTERN}\noutput", page)


def read_search_row_of_ui(row: dict[str, str]) -> Iterator[Statement]:
    """Yield what the table of `loadgen ui` shows of a search."""
    outcome_pattern = rf"{NUMBER_PATTERN}{RATE_UNIT_PATTERN}"
    yield find_in_text("capacity", "search: ui", outcome_pattern, row["outcome"])
    yield find_in_text("tokens/s", "search: ui", f"^{NUMBER_PATTERN}", row["tokens/s"])
    yield find_in_text("ttft p99", "search: ui", f"^{NUMBER_PATTERN}", row["TTFT p99"])
    yield find_in_text("tpot p99", "search: ui", f"^{NUMBER_PATTERN}", row["TPOT p99"])


def read_search_in_comparison(case: Case, name: str) -> Iterator[Statement]:
    """Yield what `compare` says of a search when it is compared with the run r1."""
    comparison = json.loads(run_command(case, "compare", name, "r1", "--json"))["comparison"]
    notes = "\n".join(comparison["notes"])
    before = {
        difference["metric"]: difference["before"] for difference in comparison["differences"]
    }
    capacity_note = rf"at its capacity, {NUMBER_PATTERN} "
    yield find_in_text("capacity", "search: compare", capacity_note, notes)
    yield Statement("ttft p99", "search: compare", before["ttft_ms.p99"])
    yield Statement("tpot p99", "search: compare", before["tpot_ms.p99"])
    yield Statement("tokens/s", "search: compare", before["tokens.steady_output_per_s"])


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    value: dict[str, Any] = json.loads(path.read_bytes())
    return value


def requests_per_start(summary: dict[str, Any]) -> float:
    """Return the mean number of requests of one start in the run of a mix.

    A start is what the rate of a mix counts: a request, or a task of several requests.
    """
    classes = summary["classes"]
    requests: float = sum(class_summary["requests"]["scheduled"] for class_summary in classes)
    starts: float = sum(class_summary["starts"] for class_summary in classes)
    return requests / starts


HOURS_PER_MONTH = 730


PRICE_PER_HOUR = 56.0  # of the offer in PRICES


def read_cost_statements(
    case: Case, name: str, rate: float, requests_of_start: float
) -> Iterator[Statement]:
    """Yield what `cost` and `size` compute from a capacity, and what it should be.

    `rate` is the capacity. `requests_of_start` is the number of requests of one start, where `cost`
    prices requests.
    """
    cost_output = run_command(case, "cost", name, "--prices", "prices.yaml", "--json")
    (offer,) = json.loads(cost_output)["offers"]
    size_command = ("size", case.workload, name, "--users", str(USERS), "--prices", "prices.yaml")
    size_output = run_command(case, *size_command, "--json", "-o", f"{name}-size")
    size = json.loads(size_output)["sizes"][0]
    size_text = run_command(case, *size_command, "-o", f"{name}-size-text")
    yield from read_capacity_of_cost(case, name, offer, requests_of_start)
    yield Statement("capacity", "search: size", size["per_machine"]["mid"])
    yield from read_machines(size, size_text, rate)
    yield from read_monthly_price(size, size_text)
    yield from read_price_per_thousand(case, offer, size, requests_of_start)


def price_unit(case: Case) -> str:
    """Return what `cost` prices for a workload."""
    return "task" if case.workload in TASK_WORKLOADS else "request"


def read_capacity_of_cost(
    case: Case, name: str, offer: dict[str, Any], requests_of_start: float
) -> Iterator[Statement]:
    """Yield the rates for which `cost` computes prices, from its JSON and its text."""
    rates = offer["rates_per_s"]
    capacity = float(rates[price_unit(case)]) / requests_of_start
    yield Statement("capacity", "search: cost", capacity)
    yield Statement("tokens/s", "search: cost", float(rates["million_output_tokens"]) * 1e6)
    text = run_command(case, "cost", name, "--prices", "prices.yaml", "--full")
    pattern = rf"capacity by search: {NUMBER_PATTERN} "
    yield find_in_text("capacity", "search: cost, text", pattern, text)


def read_machines(size: dict[str, Any], size_text: str, rate: float) -> Iterator[Statement]:
    """Yield the number of machines that `size` needs: for the demand, and one that may fail."""
    needed = math.ceil(size["demand_per_s"] / rate) + 1
    yield Statement("machines", "size: from the capacity", needed)
    yield Statement("machines", "size: JSON", size["machines"])
    headline = rf": {NUMBER_PATTERN} machines \("
    yield find_in_text("machines", "size: headline", headline, size_text)


def read_monthly_price(size: dict[str, Any], size_text: str) -> Iterator[Statement]:
    """Yield the price of a month, computed from the number of machines and as `size` prints it."""
    month = PRICE_PER_HOUR * HOURS_PER_MONTH * size["machines"]
    yield Statement("USD a month", "size: of its machines", month)
    yield Statement("USD a month", "size: JSON", float(size["per_month"]["mid"]))
    headline = rf"USD\s+{NUMBER_PATTERN}(?:\s+\[[^\]]*\])?\s+per\s+month"
    yield find_in_text("USD a month", "size: headline", headline, size_text)


def read_price_per_thousand(
    case: Case, offer: dict[str, Any], size: dict[str, Any], requests_of_start: float
) -> Iterator[Statement]:
    """Yield the price of 1,000 starts on fully used machines by `size` and by `cost`.

    `size` prices machines that are used in part, so its price is multiplied by that share. Amounts
    of money have twelve decimal places, which bounds the price by `cost`.
    """
    name = "USD per 1,000 at capacity"
    by_size = float(size["per_thousand"]["mid"]) * size["used"]
    yield Statement(name, "size: JSON, times the share used", by_size)
    price_of_one = float(offer["costs"][price_unit(case)]["total"])
    by_cost = price_of_one * 1000 * requests_of_start
    rounding = 1000 * 0.51e-12 * requests_of_start
    yield Statement(name, "cost: JSON", by_cost, by_cost - rounding, by_cost + rounding)


def read_ui_rows(case: Case) -> dict[str, dict[str, str]]:
    """Return the table of `loadgen ui`: the cells of each result by column."""
    return parse_results_table(fetch_ui_page(case))


def fetch_ui_page(case: Case) -> str:
    """Start `loadgen ui` for the results of a case, and return its page."""
    server = start_command(case, "ui", ".")
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
    """Return the rows of the results table of a page, by the name of the result."""
    (table,) = re.findall(r'<table class="results\b.*?</table>', page, re.DOTALL)
    header_cells = re.findall(r"<th\b[^>]*>(.*?)</th>", table, re.DOTALL)
    columns = ["".join(page_text(cell).split("\n")) for cell in header_cells]

    rows_by_result = {}
    for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL):
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
        if not cells:  # the row with the header
            continue
        texts = [" ".join(page_text(cell).split()) for cell in cells]
        values = dict(zip(columns, texts, strict=True))
        rows_by_result[values["result"]] = values

    return rows_by_result


def read_prometheus_statements(case: Case, rate: float) -> Iterator[Statement]:
    """Yield the metrics of a run in real time, and those that Prometheus would have scraped.

    The page is read until the run ends. The last one lacks what ended in the seconds after it.
    """
    page = scrape_run(case, "scraped", rate)
    summary = read_summary(case, "scraped")
    yield from read_counter_statements(summary, page, unseen_requests=3 * rate)

    for metric in ("ttft", "tpot"):
        name = f"{metric} p99, its bucket"
        p99_ms = summary[f"{metric}_ms"]["p99"]
        mark = NOT_REPORTED if p99_ms is None else ""
        yield Statement(name, "scraped: JSON", p99_ms, mark=mark)
        low_s, high_s = find_bucket(page, f"loadgen_{metric}_seconds", 0.99)
        yield Statement(name, "scraped: Prometheus", high_s * 1e3, low_s * 1e3, high_s * 1e3, mark)


def scrape_run(case: Case, name: str, rate: float) -> str:
    """Run a load with a metrics page, and return the last page that could be read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    rate_options = ("--request-rate", f"{rate:.6g}", "--warmup", "0", "--seed", "99")
    page_options = ("--prometheus", f":{port}", *QUIET)
    running = start_command(case, *case.run_command_line(name, *rate_options, *page_options))

    page = ""
    while running.poll() is None:
        with (
            suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response,
        ):
            page = response.read().decode()
        time.sleep(0.2)

    wait_for_command(running)
    return page


def read_counter_statements(
    summary: dict[str, Any], page: str, unseen_requests: float
) -> Iterator[Statement]:
    """Yield requests and tokens of a run from its JSON and from the counters of its last page.

    `unseen_requests` is how many requests may have ended after that page.
    """
    requests = summary["requests"]["ok"]
    counters = {
        "requests ok": (requests, 'requests_total{status="ok"}'),
        "tokens": (summary["tokens"]["output"], "output_tokens_total"),
    }
    for name, (value, counter) in counters.items():
        yield Statement(name, "scraped: JSON", value)
        pattern = rf"^loadgen_{re.escape(counter)} {NUMBER_PATTERN}"
        scraped = find_in_text(name, "scraped: Prometheus", pattern, page).value
        unseen = unseen_requests * value / max(requests, 1)
        yield Statement(name, "scraped: Prometheus", scraped, scraped, scraped + unseen)


def find_bucket(page: str, name: str, quantile: float) -> tuple[float, float]:
    """Return the lower and upper bound of the bucket of a histogram that holds a quantile.

    Both are NaN if the page has no such histogram, as of a run that ended before its page was read.
    """
    buckets = re.findall(rf'^{name}_bucket\{{le="([^"]+)"\}} ([\d.e+]+)', page, re.MULTILINE)
    if not buckets:
        return math.nan, math.nan

    total = float(buckets[-1][1])  # counts are cumulative
    lower = 0.0
    for upper, cumulative_count in buckets:
        if float(cumulative_count) >= quantile * total:
            return lower, float(upper)
        lower = float(upper)

    return math.nan, math.nan


# -- cut short --


StopKind = Literal["time", "SIGTERM", "SIGKILL"]


def read_stopped_searches(case: Case, spent_s: float) -> Iterator[Statement]:
    """Stop searches in several ways; yield what they claim, and their capacity when resumed.

    A search that was stopped must claim no capacity. When it is resumed, it must end with that of
    the search that was not stopped, which took `spent_s`.
    """
    complete = read_json(case.folder / "search" / "capacity.json")
    yield from capacity_when_resumed(complete, "search left alone")
    yield Statement("claims while stopped", "none", 0)

    stop_kinds: tuple[StopKind, ...] = ("time", "SIGTERM", "SIGKILL")
    if case.smallest:
        stop_kinds = ("time", "SIGKILL")

    for stop_kind in stop_kinds:
        name = f"by-{stop_kind}"
        stop_search(case, name, stop_kind, spent_s)
        yield from read_claims(case, name, stop_kind)
        run_command(case, "search", "--resume", name, "--max-time", "300h", *QUIET)
        resumed = read_json(case.folder / name / "capacity.json")
        yield from capacity_when_resumed(resumed, stop_kind)


def capacity_when_resumed(capacity: dict[str, Any], source: str) -> Iterator[Statement]:
    """Yield the capacity with which a search ended."""
    yield Statement("capacity when resumed", source, capacity["rate_per_s"])
    yield Statement("tokens/s when resumed", source, capacity["output_tokens_per_s"])


def read_claims(case: Case, name: str, stop_kind: StopKind) -> Iterator[Statement]:
    """Yield whether a stopped search claims a capacity: in its file, or by `cost` and `size`.

    The two commands exit with 3 if the capacity is not known.
    """
    capacity_path = case.folder / name / "capacity.json"
    if capacity_path.is_file():
        # "confirmed" is null if no trial had ended.
        is_confirmed = bool(read_json(capacity_path)["confirmed"])
        yield Statement("claims while stopped", f"{stop_kind}: capacity.json", is_confirmed)

    commands = (
        ("cost", name),
        ("size", case.workload, name, "--users", str(USERS), "-o", f"{name}-s"),
    )
    for command in commands:
        running = start_command(case, *command, "--prices", "prices.yaml")
        running.communicate()
        has_claim = running.returncode != 3
        yield Statement("claims while stopped", f"{stop_kind}: {command[0]}", has_claim)


TRIALS_BEFORE_STOP = 4


def stop_search(case: Case, name: str, stop_kind: StopKind, spent_s: float) -> None:
    """Start the search of a case and stop it before it ends.

    With "time", it has a third of `spent_s`, which the complete search took. Otherwise it gets the
    signal when some trials have ended.
    """
    if stop_kind == "time":
        time_limit = f"{spent_s / 3:.0f}s"
        run_command(case, *case.search_command(name, "--max-time", time_limit, *QUIET))
        return

    running = start_command(case, *case.search_command(name, *QUIET))
    trials_path = case.folder / name / "probes.jsonl"
    while running.poll() is None and count_lines(trials_path) < TRIALS_BEFORE_STOP:
        time.sleep(0.02)

    running.send_signal(signal.Signals[stop_kind])
    running.communicate()


# -- other ways to the same load --


def count_lines(path: Path) -> int:
    """Return the number of complete lines of a file, 0 if there is none."""
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def read_same_load(case: Case, rate: float) -> Iterator[Statement]:
    """Yield the metrics at one load by several commands, which have to agree.

    The reference is the interval in which one more run at this load would lie. Compared with it are
    the run of the search itself, and a closed loop with as many requests in flight.
    """
    runs = [read_summary(case, f"r{index + 1}") for index in range(case.repeats)]
    yield from predict_next_run(runs)
    evidence = read_json(case.folder / "search" / "capacity.json")["evidence"]
    search_run = read_summary(case, f"search/{evidence}")
    yield from read_metrics(search_run, "the search's own run", FROM_EMPTY)
    mean_duration_s = statistics.fmean(mean_start_duration_s(summary) for summary in runs)
    concurrency = round(rate * mean_duration_s)  # Little's law
    options = ("-c", str(concurrency), *warm_up_options(case), "--seed", "78", *QUIET)
    run_command(case, *case.run_command_line("closed", *options))
    closed_loop = read_summary(case, "closed")
    yield from read_metrics(closed_loop, f"closed loop of {concurrency}", CLOSED_LOOP)


def read_metrics(summary: dict[str, Any], source: str, mark: str = "") -> Iterator[Statement]:
    """Yield all metrics of a summary."""
    for name, read_metric in METRICS.items():
        yield Statement(name, source, read_metric(summary), mark=mark)


def steady_or_full(steady: float | None, full_run: float) -> float:
    """Return the rate of the steady-state window, or that of the measurement window."""
    return full_run if steady is None else steady


METRICS: dict[str, Callable[[dict[str, Any]], float]] = {
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


def warm_up_options(case: Case) -> tuple[str, str]:
    """Return the options of the warm-up."""
    return "--warmup", f"{max(case.length_s / 2, 20 if case.simulated else 8):g}s"


def read_summary(case: Case, name: str) -> dict[str, Any]:
    """Return the summary of a run."""
    summary: dict[str, Any] = json.loads((case.folder / name / "summary.json").read_bytes())
    return summary


def predict_next_run(runs: Sequence[dict[str, Any]]) -> Iterator[Statement]:
    """Yield the mean of each metric over some runs, with the prediction interval of one more run.

    The interval is that of a normal distribution with unknown variance:
    mean +- t(1 - alpha / 2, n - 1) * s * sqrt(1 + 1 / n).
    """
    run_count = len(runs)
    source = f"{run_count} runs at that load"
    for name, read_metric in METRICS.items():
        values = [read_metric(summary) for summary in runs]
        if None in values:
            yield Statement(name, source, math.nan, mark=NOT_REPORTED)
            continue

        mean_value = statistics.fmean(values)
        t_factor = t_quantile(0.5 + CONFIDENCE / 2, run_count - 1)
        half_width = t_factor * statistics.stdev(values) * math.sqrt(1 + 1 / run_count)
        yield Statement(name, source, mean_value, mean_value - half_width, mean_value + half_width)


def mean_start_duration_s(summary: dict[str, Any]) -> float:
    """Return the mean seconds from the begin to the end of a start in the run of a workload.

    A start is a request, or a whole conversation or task. Of a mix it is the mean over its classes,
    weighted by their starts.
    """
    classes = summary["classes"]
    if not classes:
        sessions = summary.get("sessions")
        durations = sessions["duration_ms"] if sessions else summary["e2e_ms"]
        mean_ms: float = durations["mean"]
        return mean_ms / 1e3

    total_s = 0.0
    starts = 0
    for class_summary in classes:
        class_mean_s = mean_start_duration_s({**class_summary, "classes": ()})
        total_s += class_summary["starts"] * class_mean_s
        starts += class_summary["starts"]

    return total_s / starts


def read_other_capacities(case: Case) -> Iterator[Statement]:
    """Yield the capacity by the search, and that by a sweep of loads around it."""
    capacity = read_json(case.folder / "search" / "capacity.json")
    interval = read_json(case.folder / "search" / "search.json")["answer"]["interval"]
    rate = capacity["rate_per_s"]
    high = max(capacity["high_per_s"] or rate, interval["high"])
    mark = "" if capacity["sustained"] else "not sustained"
    yield Statement("capacity", "search", rate, rate, high, mark)

    steps: tuple[int, ...] = STEPS if case.simulated else REAL_STEPS
    if case.smallest:
        steps = steps[::3]

    load_points = [rate * LEVEL_FACTOR**step for step in steps]
    sweep_loads(case, load_points)
    yield read_swept_capacity(case, load_points, explain_lower_capacity(case, capacity))


def sweep_loads(case: Case, load_points: Sequence[float]) -> None:
    """Run a sweep over these rates, each for twice the length of a trial."""
    run_command(
        case,
        "sweep",
        case.workload,
        *case.target,
        *case.slo,
        "--request-rate",
        ",".join(f"{rate:.4g}" for rate in load_points),
        "-d",
        f"{2 * case.length_s:g}s",
        *warm_up_options(case),
        "--seed",
        "5",
        "-o",
        "sweep",
        *QUIET,
    )


def read_swept_capacity(
    case: Case, load_points: Sequence[float], reason_if_lower: str
) -> Statement:
    """Return the capacity by a sweep; its interval ends at the next higher rate, which failed."""
    capacity_path = case.folder / "sweep" / "capacity.json"
    if not capacity_path.is_file():
        return Statement("capacity", "sweep", math.nan, mark=reason_if_lower)

    swept = read_json(capacity_path)
    swept_rate = swept["rate_per_s"]

    # The rates are passed with four digits, so the swept one differs a little from its load point.
    higher_rates = [rate for rate in load_points if rate > 1.001 * swept_rate]
    next_rate = higher_rates[0] if higher_rates else swept_rate
    mark = "a lower bound" if swept["lower_bound"] else reason_if_lower

    return Statement(
        "capacity", "sweep, to its next level", swept_rate, swept_rate, next_rate, mark
    )


def explain_lower_capacity(case: Case, capacity: dict[str, Any]) -> str:
    """Return why longer runs may sustain less than the search found, or "" if they should not.

    The search's trials are half as long as other runs. Its capacity may fail in longer runs if the
    search itself says that the load is not sustained, and most of the runs at that load missed the
    SLO too.
    """
    runs = [read_summary(case, f"r{index + 1}") for index in range(case.repeats)]
    missed = sum(not summary["goodput"]["met"] for summary in runs)
    is_mostly_missed = missed > case.repeats / 2
    if capacity["sustained"] or not is_mostly_missed:
        return ""

    return (
        f"{missed} of {case.repeats} runs of twice the length missed it too; not sustained: "
        f"{capacity['sustained_why']}"
    )


def read_contract_statements(case: Case, rate: float) -> Iterator[Statement]:
    """Yield the verdicts of contracts 5 % below and 30 % above the capacity.

    The first must pass or stay undecided, the second must fail.
    """
    is_sustained = read_json(case.folder / "search" / "capacity.json")["sustained"]
    mark = "" if is_sustained else "the capacity is not known to be sustained, and says so"
    for name, factor in (("below", 0.95), ("above", 1.3)):
        (case.folder / f"{name}.yaml").write_text(format_contract(case, name, rate * factor))
        options = ("--seed", "41", "-o", name, *QUIET)
        run_command(case, "validate", f"{name}.yaml", *case.target, *options)
        verdict = read_json(case.folder / name / "verdict.json")["verdict"]
        value_name = f"a contract {name} the capacity"
        yield Statement(value_name, "fails: expected", name == "above")
        source = f"fails: validate, {verdict}"
        yield Statement(value_name, source, verdict == "FAIL", mark=mark)


# -- all of it --


def format_contract(case: Case, name: str, rate: float) -> str:
    """Return a contract with one level at a rate, and the limits of the workload as its terms.

    JSON is YAML too.
    """
    level = {
        "name": "a",
        "workload": case.workload,
        "rate": f"{rate:.4g}/s",
        "duration": f"{max(600, 2 * case.length_s):g}s",
        "must": list_contract_terms(case.workload),
    }
    return json.dumps({"name": name, "horizon": "60s", "levels": [level]}) + "\n"


def list_contract_terms(workload: str) -> list[dict[str, dict[str, str]]]:
    """Return the limits of a workload as terms of a contract; a mix has those of its classes."""
    if workload != MIX:
        objectives = [objective.split(":") for objective in CASES[workload]]
        return [{metric: {"limit": limit, "at": "p99"}} for metric, limit in objectives]

    terms = []
    for class_name, (ttft_limit, tpot_limit) in CLASSES.items():
        terms.append({"ttft": {"limit": ttft_limit, "at": "p95", "class": class_name}})
        terms.append({"tpot": {"limit": tpot_limit, "at": "p95", "class": class_name}})

    return terms


def measure_case(case: Case) -> Iterator[ComparedPair]:
    """Run all commands for one workload, and yield each pair of statements that must agree."""
    (case.folder / "prices.yaml").write_text(PRICES)
    rate = search_capacity(case)
    for number in range(1, case.repeats + 1):
        run_at_capacity(case, rate, number)

    yield from compare_statements(read_run_statements(case, "r1"))
    yield from compare_statements(read_search_statements(case, "search", read_ui_rows(case)))

    if case.simulated:
        spent_s = read_json(case.folder / "search" / "search.json")["answer"]["spent_s"]
        yield from compare_statements(read_stopped_searches(case, spent_s))

    yield from compare_statements(read_same_load(case, rate))
    yield from compare_statements(read_other_capacities(case))

    if case.simulated:
        yield from compare_statements(read_contract_statements(case, rate))
    else:
        yield from compare_statements(read_prometheus_statements(case, rate))


def search_capacity(case: Case) -> float:
    """Run the search of a case and return its capacity; exit if it found none."""
    run_command(case, *case.search_command("search", *QUIET))
    rate: float = read_json(case.folder / "search" / "capacity.json")["rate_per_s"]
    if not rate:
        sys.exit(
            "the search knows no load that holds: longer trials (--length), --search-flags, a "
            "wider --slo"
        )

    return rate


def run_at_capacity(case: Case, rate: float, number: int) -> None:
    """Run the load that the search found, with a seed of its own, as the run rNUMBER."""
    name = f"r{number}"
    load_options = ("--request-rate", f"{rate:.6g}", *warm_up_options(case))
    run_options = ("--seed", str(10 + number), "--junit", f"{name}.xml", *QUIET)
    run_command(case, *case.run_command_line(name, *load_options, *run_options))


def format_pair(pair: ComparedPair) -> str:
    """Return a pair as a row of the table."""
    reason = f": {pair.statement.mark or pair.reference.mark}" if pair.outcome == "marked" else ""
    return (
        f"| {pair.statement.name} | {format_statement(pair.reference)} | "
        f"{format_statement(pair.statement)} | {pair.outcome}{reason} |"
    )


def format_statement(statement: Statement) -> str:
    """Return where a value is printed, the value, and its interval if it has one."""
    text = f"{statement.source}: {statement.value:,.5g}"
    if statement.low is not None:
        text += f" [{statement.low:,.5g}, {statement.high:,.5g}]"
    return text


def main() -> int:
    """Measure each workload; return 1 if a pair disagrees."""
    args = parse_command_line()
    outcome_counts: Counter[str] = Counter()
    for workload in args.cases.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) if args.out is None else args.out / workload
            folder.mkdir(parents=True, exist_ok=True)
            objectives = [f"{term}:p99" for term in args.slo or CASES[workload]]
            case = create_case(workload, objectives, folder, args)
            print(
                f"\n{workload} on {args.url}, {', '.join(objectives)}\n\n"
                f"| name | first | beside it | |\n|---|---|---|---|"
            )

            for pair in measure_case(case):
                outcome_counts[pair.outcome] += 1
                print(format_pair(pair), flush=True)

    counts = ", ".join(
        f"{outcome_counts[outcome]} {outcome}"
        for outcome in ("equal", "within", "marked", "DISAGREES")
    )
    print(f"\n{sum(outcome_counts.values())} pairs: {counts}")
    return 1 if outcome_counts["DISAGREES"] else 0


def create_case(
    workload: str, objectives: Sequence[str], folder: Path, args: argparse.Namespace
) -> Case:
    """Return how a workload is measured with these options."""
    slo_options = [option for objective in objectives for option in ("--slo", objective)]
    return Case(
        workload=workload,
        target=("--url", args.url, *GPUS, *args.load_flags.split()),
        slo=tuple(slo_options),
        length_s=seconds(args.length) * TRIAL_LENGTH_FACTORS.get(workload, 1),
        folder=folder,
        simulated=args.url.startswith("sim:"),
        search_flags=tuple(args.search_flags.split()),
        repeats=args.repeats,
        smallest=args.smoke,
    )


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="workloads, separated by commas")
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
        "--repeats", type=int, default=REPEATS, help="runs at the load that the search found"
    )
    parser.add_argument("--out", type=Path, help="a folder to keep the results in")

    # Shorter trials confirm no capacity.
    return rig.parse_arguments(parser, cases="qa", length="60s", repeats=2)


if __name__ == "__main__":
    sys.exit(main())
