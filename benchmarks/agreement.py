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
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

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
    """Wait for a command and return what it printed; exit if it could not be used at all."""
    output, errors = running.communicate()
    if running.returncode not in codes:
        sys.exit(f"{running.args!r}: exit {running.returncode}\n{errors[-2000:]}")
    return output


def parse_number(text: str) -> float:
    """Parse a number with thousands separators."""
    return float(text.replace(",", ""))


def find_in_text(name: str, source: str, pattern: str, text: str) -> Statement:
    """Return the value that a page or text prints; its interval is the reach of the last digit.

    The value is NaN if the pattern is not found.
    """
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        return Statement(name, source, math.nan)
    printed = match[1].rstrip(".,")
    value = parse_number(printed)
    decimals = len(printed.partition(".")[2])
    digits = len(printed.replace(",", "").replace(".", "").lstrip("0"))
    last_digit = 10.0**-decimals
    if (
        not decimals and digits > 3 and printed.endswith("0")
    ):  # thousands are rounded to some digits
        last_digit = 10.0 ** (len(printed) - len(printed.rstrip("0,")))
    return Statement(name, source, value, value - 0.5001 * last_digit, value + 0.5001 * last_digit)


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


def read_run_statements(case: Case, name: str) -> Iterator[Statement]:
    """Yield what each place says of a run."""
    text = run_command(case, "report", name, "--html", f"{name}.html")
    summary = json.loads(run_command(case, "report", name, "--json"))
    for name_of_metric in ("tokens/s", "goodput", "completed"):
        yield Statement(name_of_metric, f"{name}: JSON", METRICS[name_of_metric](summary))
    for metric in ("ttft", "tpot"):
        yield Statement(f"{metric} p99", f"{name}: JSON", summary[f"{metric}_ms"]["p99"])
    yield find_in_text("tokens/s", f"{name}: text", rf"{NUMBER_PATTERN}/s output", text)
    yield find_in_text(
        "goodput",
        f"{name}: text",
        rf"within\s+every\s+limit[\w\s]*\(\S+\s%\),\s+goodput\s+{NUMBER_PATTERN}/s",
        text,
    )
    yield find_in_text("completed", f"{name}: text", rf"completed\s+{NUMBER_PATTERN}/s", text)
    page = page_text((case.folder / f"{name}.html").read_text("utf-8"))
    yield find_in_text("tokens/s", f"{name}: page", rf"^Output tokens\n{NUMBER_PATTERN}", page)
    yield find_in_text("goodput", f"{name}: page", rf"goodput {NUMBER_PATTERN}/s", page)
    yield find_in_text("completed", f"{name}: page", rf"^Completed\n{NUMBER_PATTERN}", page)
    junit = (case.folder / f"{name}.xml").read_text("utf-8")
    for metric in ("ttft", "tpot"):
        row = rf"^{metric.upper()}" + r" +[\d,.~]+" * 4 + rf" +{NUMBER_PATTERN}"
        yield find_in_text(f"{metric} p99", f"{name}: text", row, text)
        yield find_in_text(
            f"{metric} p99", f"{name}: page", rf"^{metric.upper()} p99\n{NUMBER_PATTERN}", page
        )
        if case.workload != MIX:
            yield find_in_text(
                f"{metric} p99",
                f"{name}: JUnit",
                rf'{metric.upper()} p99 .*\n.*?[>"]{NUMBER_PATTERN} ms',
                junit,
            )
    for class_summary in summary["classes"] or ():
        for metric in ("ttft", "tpot"):
            name_of_metric, label = (
                f"{metric} p95 of {class_summary['name']}",
                rf"{class_summary['name']}:? {metric.upper()} p95",
            )
            yield Statement(name_of_metric, f"{name}: JSON", class_summary[f"{metric}_ms"]["p95"])
            yield find_in_text(
                name_of_metric,
                f"{name}: text",
                rf"^{label} at most \S+ m?s +{NUMBER_PATTERN} ms",
                text,
            )
            yield find_in_text(
                name_of_metric, f"{name}: JUnit", rf'{label} .*\n.*?[>"]{NUMBER_PATTERN} ms', junit
            )
    (price_offer,) = json.loads(
        run_command(case, "cost", name, "--prices", "prices.yaml", "--json")
    )["offers"]
    rates = price_offer["rates_per_s"]
    yield Statement("tokens/s", f"{name}: cost", float(rates["million_output_tokens"]) * 1e6)
    yield Statement("goodput", f"{name}: cost", float(rates["good_request"]))
    yield Statement("completed", f"{name}: cost", float(rates["request"]))


def read_search_statements(
    case: Case, name: str, ui_rows: dict[str, dict[str, str]]
) -> Iterator[Statement]:
    """Yield what each place says of a search. `shown` holds the rows of the UI."""
    unit = r"(?: requests| conversations| tasks| starts)?/s"
    text = run_command(case, "report", name, "--html", f"{name}.html")
    capacity = json.loads((case.folder / name / "capacity.json").read_bytes())
    rate, evidence = capacity["rate_per_s"], capacity["evidence"]
    summary = json.loads((case.folder / name / evidence / "summary.json").read_bytes())
    trials = json.loads((case.folder / name / "search.json").read_bytes())["told"]
    (trial,) = [difference["figures"] for difference in trials if difference["folder"] == evidence]
    yield Statement("capacity", "search: capacity.json", rate)
    yield Statement("tokens/s", "search: capacity.json", capacity["output_tokens_per_s"])
    yield Statement("goodput", "search: its run", summary["goodput"]["steady_rps"])
    for metric in ("ttft", "tpot"):
        yield Statement(f"{metric} p99", "search: its run", summary[f"{metric}_ms"]["p99"])
        yield Statement(f"{metric} p99", "search: search.json", trial[f"{metric}_p99_ms"])
    yield Statement("tokens/s", "search: search.json", trial["output_tokens_per_s"])
    yield Statement("goodput", "search: search.json", trial["goodput_rps"])
    yield find_in_text("capacity", "search: text", rf"^Capacity +{NUMBER_PATTERN}{unit}", text)
    page = page_text((case.folder / f"{name}.html").read_text("utf-8"))
    yield find_in_text("capacity", "search: page", rf"^Capacity\n{NUMBER_PATTERN}\n", page)
    yield find_in_text(
        "capacity", "search: page, its sentence", rf"by search: {NUMBER_PATTERN}{unit}", page
    )
    yield find_in_text("tokens/s", "search: page", rf"^Output tokens\n{NUMBER_PATTERN}\n", page)
    row = ui_rows[name]
    yield find_in_text("capacity", "search: ui", rf"{NUMBER_PATTERN}{unit}", row["outcome"])
    yield find_in_text("tokens/s", "search: ui", f"^{NUMBER_PATTERN}", row["tokens/s"])
    yield find_in_text("ttft p99", "search: ui", f"^{NUMBER_PATTERN}", row["TTFT p99"])
    yield find_in_text("tpot p99", "search: ui", f"^{NUMBER_PATTERN}", row["TPOT p99"])
    comparison = json.loads(run_command(case, "compare", name, "r1", "--json"))["comparison"]
    yield find_in_text(
        "capacity",
        "search: compare",
        rf"at its capacity, {NUMBER_PATTERN} ",
        "\n".join(comparison["notes"]),
    )
    values_before = {
        difference["metric"]: difference["before"] for difference in comparison["differences"]
    }
    yield Statement("ttft p99", "search: compare", values_before["ttft_ms.p99"])
    yield Statement("tpot p99", "search: compare", values_before["tpot_ms.p99"])
    yield Statement("tokens/s", "search: compare", values_before["tokens.steady_output_per_s"])
    yield from read_cost_statements(
        case, name, rate, requests_per_start(summary) if case.workload == MIX else 1.0
    )


def requests_per_start(summary: dict[str, Any]) -> float:
    """Return the requests per start in the run of a mix."""
    request_count: float = sum(
        class_summary["requests"]["scheduled"] for class_summary in summary["classes"]
    )
    return float(
        request_count / sum(class_summary["starts"] for class_summary in summary["classes"])
    )


def read_cost_statements(
    case: Case, name: str, rate: float, each_start: float
) -> Iterator[Statement]:
    """Yield what is computed from a capacity.

    `each_start` is the number of requests of one start, where `cost` prices requests.
    """
    (offer,) = json.loads(run_command(case, "cost", name, "--prices", "prices.yaml", "--json"))[
        "offers"
    ]
    unit = "task" if case.workload in TASK_WORKLOADS else "request"
    yield Statement("capacity", "search: cost", float(offer["rates_per_s"][unit]) / each_start)
    yield Statement(
        "tokens/s", "search: cost", float(offer["rates_per_s"]["million_output_tokens"]) * 1e6
    )
    text = run_command(case, "cost", name, "--prices", "prices.yaml")
    yield find_in_text(
        "capacity", "search: cost, text", rf"capacity by search: {NUMBER_PATTERN} ", text
    )
    size_command = ("size", case.workload, name, "--users", str(USERS), "--prices", "prices.yaml")
    ((size_result, *_),) = (
        json.loads(run_command(case, *size_command, "--json", "-o", f"{name}-size"))["sizes"],
    )
    yield Statement("capacity", "search: size", size_result["per_machine"]["mid"])
    text = run_command(case, *size_command, "-o", f"{name}-size-text")
    machines, month = size_result["machines"], 56.0 * 730 * size_result["machines"]
    yield Statement(
        "machines", "size: from the capacity", math.ceil(size_result["demand_per_s"] / rate) + 1
    )
    yield Statement("machines", "size: JSON", machines)
    yield find_in_text("machines", "size: headline", rf"need\s+{NUMBER_PATTERN}\s+machines", text)
    yield Statement("USD a month", "size: of its machines", month)
    yield Statement("USD a month", "size: JSON", float(size_result["per_month"]["mid"]))
    yield find_in_text(
        "USD a month",
        "size: headline",
        rf"USD\s+{NUMBER_PATTERN}(?:\s+\[[^\]]*\])?\s+a\s+month",
        text,
    )
    per_thousand = float(offer["costs"][unit]["total"]) * 1000 * each_start
    price_per_thousand = float(size_result["per_thousand"]["mid"]) * size_result["used"]
    yield Statement(
        "USD per 1,000 at capacity", "size: JSON, times the share used", price_per_thousand
    )
    rounding = 1000 * 0.51e-12 * each_start  # money has twelve decimal places
    yield Statement(
        "USD per 1,000 at capacity",
        "cost: JSON",
        per_thousand,
        per_thousand - rounding,
        per_thousand + rounding,
    )


def read_ui_rows(case: Case) -> dict[str, dict[str, str]]:
    """Return the table of `loadgen ui`: the cells of each result by column."""
    server = start_command(case, "ui", ".")
    try:
        assert server.stdout is not None
        with urllib.request.urlopen(server.stdout.readline().strip(), timeout=60) as response:
            page = response.read().decode()
    finally:
        server.terminate()
        server.wait()
    (table,) = re.findall(r'<table class="results\b.*?</table>', page, re.DOTALL)
    columns = [
        "".join(page_text(cell).split("\n"))
        for cell in re.findall(r"<th\b[^>]*>(.*?)</th>", table, re.DOTALL)
    ]
    cells = [
        re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
        for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL)
    ]
    rows = [
        dict(zip(columns, (" ".join(page_text(cell).split()) for cell in row), strict=True))
        for row in cells
        if row
    ]
    return {row["result"]: row for row in rows}


def read_prometheus_statements(case: Case, rate: float) -> Iterator[Statement]:
    """Yield what a run in real time reports, and what was scraped last before it ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = (
        "--request-rate",
        f"{rate:.6g}",
        "--warmup",
        "0",
        "--seed",
        "99",
        "--prometheus",
        f":{port}",
        "--progress",
        "off",
    )
    running = start_command(case, *case.run_command_line("scraped", *options))
    page = ""
    while running.poll() is None:
        with (
            suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response,
        ):
            page = response.read().decode()
        time.sleep(0.2)
    wait_for_command(running)
    summary = read_summary(case, "scraped")
    unseen_requests = 3 * rate  # what ended after the last page: records are read once a second
    ok, tokens = summary["requests"]["ok"], summary["tokens"]["output"]
    for name, value, row in (
        ("requests ok", ok, 'requests_total{status="ok"}'),
        ("tokens", tokens, "output_tokens_total"),
    ):
        yield Statement(name, "scraped: JSON", value)
        scraped = find_in_text(
            name, "scraped: Prometheus", rf"^loadgen_{re.escape(row)} {NUMBER_PATTERN}", page
        ).value
        yield Statement(
            name,
            "scraped: Prometheus",
            scraped,
            scraped,
            scraped + unseen_requests * value / max(ok, 1),
        )
    for metric in ("ttft", "tpot"):
        p99 = summary[f"{metric}_ms"]["p99"]
        mark = NOT_REPORTED if p99 is None else ""
        yield Statement(f"{metric} p99, its bucket", "scraped: JSON", p99, mark=mark)
        low, high = find_bucket(page, f"loadgen_{metric}_seconds", 0.99)
        yield Statement(
            f"{metric} p99, its bucket",
            "scraped: Prometheus",
            high * 1e3,
            low * 1e3,
            high * 1e3,
            mark,
        )


def find_bucket(page: str, name: str, quantile: float) -> tuple[float, float]:
    """Return the bounds of the histogram bucket that holds a quantile."""
    buckets = re.findall(rf'^{name}_bucket\{{le="([^"]+)"\}} ([\d.e+]+)', page, re.MULTILINE)
    lower, total = (
        0.0,
        float(buckets[-1][1]) if buckets else 0.0,
    )  # a run that ended before its page was read
    for edge, count in buckets:
        if float(count) >= quantile * total:
            return lower, float(edge)
        lower = float(edge)
    return math.nan, math.nan


# -- cut short --


def read_stopped_searches(case: Case, spent_s: float) -> Iterator[Statement]:
    """Stop a search in three ways; yield what it claims, and its capacity when resumed."""
    complete = json.loads((case.folder / "search" / "capacity.json").read_bytes())
    yield Statement("capacity when resumed", "search left alone", complete["rate_per_s"])
    yield Statement("tokens/s when resumed", "search left alone", complete["output_tokens_per_s"])
    yield Statement("claims while stopped", "none", 0)
    for stop_kind in ("time", "SIGKILL") if case.smallest else ("time", "SIGTERM", "SIGKILL"):
        name = f"by-{stop_kind}"
        stop_search(case, name, stop_kind, spent_s)
        stored = case.folder / name / "capacity.json"
        if stored.is_file():
            claimed = bool(
                json.loads(stored.read_bytes())["confirmed"]
            )  # null where no trial had ended
            yield Statement("claims while stopped", f"{stop_kind}: capacity.json", claimed)
        for command in (
            ["cost", name],
            ["size", case.workload, name, "--users", str(USERS), "-o", f"{name}-s"],
        ):
            running = start_command(case, *command, "--prices", "prices.yaml")
            running.communicate()
            yield Statement(
                "claims while stopped", f"{stop_kind}: {command[0]}", running.returncode != 3
            )
        run_command(case, "search", "--resume", name, "--max-time", "300h", "--progress", "off")
        resumed = json.loads(stored.read_bytes())
        yield Statement("capacity when resumed", stop_kind, resumed["rate_per_s"])
        yield Statement("tokens/s when resumed", stop_kind, resumed["output_tokens_per_s"])


def stop_search(case: Case, name: str, stop_kind: str, spent_s: float) -> None:
    """Start the search of a case and stop it in the middle."""
    if stop_kind == "time":
        run_command(
            case,
            *case.search_command(name, "--max-time", f"{spent_s / 3:.0f}s", "--progress", "off"),
        )
        return
    running = start_command(case, *case.search_command(name, "--progress", "off"))
    trials_path = case.folder / name / "probes.jsonl"
    while running.poll() is None and (
        not trials_path.is_file() or trials_path.read_bytes().count(b"\n") < 4
    ):
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM if stop_kind == "SIGTERM" else signal.SIGKILL)
    running.communicate()


# -- other ways to the same load --


def read_same_load(case: Case, rate: float) -> Iterator[Statement]:
    """Yield runs at one load by other commands, with the interval of one more run of it."""
    runs = [read_summary(case, f"r{index + 1}") for index in range(case.repeats)]
    for name, read_metric in METRICS.items():
        values = [read_metric(summary) for summary in runs]
        if None in values:
            yield Statement(name, f"{len(runs)} runs at that load", math.nan, mark=NOT_REPORTED)
            continue
        mean_value = statistics.fmean(values)
        half_width = (
            t_quantile(0.5 + CONFIDENCE / 2, len(runs) - 1)
            * statistics.stdev(values)
            * math.sqrt(1 + 1 / len(runs))
        )
        yield Statement(
            name,
            f"{len(runs)} runs at that load",
            mean_value,
            mean_value - half_width,
            mean_value + half_width,
        )
    search = json.loads((case.folder / "search" / "capacity.json").read_bytes())["evidence"]
    yield from read_metrics(
        read_summary(case, f"search/{search}"), "the search's own run", FROM_EMPTY
    )
    concurrency = round(
        rate * statistics.fmean(mean_stay_s(summary) for summary in runs)
    )  # Little's law
    run_command(
        case,
        *case.run_command_line(
            "closed",
            "-c",
            str(concurrency),
            *warm_up_options(case),
            "--seed",
            "78",
            "--progress",
            "off",
        ),
    )
    yield from read_metrics(
        read_summary(case, "closed"), f"closed loop of {concurrency}", CLOSED_LOOP
    )


def mean_stay_s(summary: dict[str, Any]) -> float:
    """Return how long a start stays in the server: a request, or a whole conversation or task."""
    if parts := summary["classes"]:
        total_s: float = sum(
            class_summary["starts"] * mean_stay_s({**class_summary, "classes": ()})
            for class_summary in parts
        )
        return float(total_s / sum(class_summary["starts"] for class_summary in parts))
    mean_ms: float = (
        summary["sessions"]["duration_ms"] if summary.get("sessions") else summary["e2e_ms"]
    )["mean"]
    return mean_ms / 1e3


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


def read_other_capacities(case: Case) -> Iterator[Statement]:
    """Yield the capacity by a sweep around it."""
    capacity = json.loads((case.folder / "search" / "capacity.json").read_bytes())
    mark = "" if capacity["sustained"] else "not sustained"
    rate = capacity["rate_per_s"]
    interval = json.loads((case.folder / "search" / "search.json").read_bytes())["answer"][
        "interval"
    ]
    yield Statement(
        "capacity",
        "search",
        rate,
        rate,
        max(capacity["high_per_s"] or rate, interval["high"]),
        mark,
    )
    steps = (STEPS if case.simulated else REAL_STEPS)[:: 3 if case.smallest else 1]
    rates = [rate * LEVEL_FACTOR**step for step in steps]
    levels = ",".join(f"{rate_per_s:.4g}" for rate_per_s in rates)
    length = f"{2 * case.length_s:g}s"
    run_command(
        case,
        "sweep",
        case.workload,
        *case.target,
        *case.slo,
        "--request-rate",
        levels,
        "-d",
        length,
        *warm_up_options(case),
        "--seed",
        "5",
        "-o",
        "sweep",
        "--progress",
        "off",
    )
    if (stored := case.folder / "sweep" / "capacity.json").is_file():
        swept = json.loads(stored.read_bytes())
        swept_rate, bound = swept["rate_per_s"], "a lower bound" * swept["lower_bound"]
        next_rate = next(
            (rate_per_s for rate_per_s in rates if rate_per_s > 1.001 * swept_rate), swept_rate
        )  # levels are told to four digits
        yield Statement(
            "capacity",
            "sweep, to its next level",
            swept_rate,
            swept_rate,
            next_rate,
            bound or explain_lower_capacity(case, capacity),
        )
    else:
        yield Statement("capacity", "sweep", math.nan, mark=explain_lower_capacity(case, capacity))


def explain_lower_capacity(case: Case, capacity: dict[str, Any]) -> str:
    """Return why runs of twice the length sustain less than the search found, or ""."""
    missed = sum(
        not read_summary(case, f"r{index + 1}")["goodput"]["met"] for index in range(case.repeats)
    )
    if capacity["sustained"] or 2 * missed <= case.repeats:
        return ""
    return (
        f"{missed} of {case.repeats} runs of twice the length missed it too; not sustained: "
        f"{capacity['sustained_why']}"
    )


def read_contract_statements(case: Case, rate: float) -> Iterator[Statement]:
    """Yield what contracts 5 % below and 30 % above the capacity give.

    The first must pass or stay undecided, the second must fail.
    """
    terms = ", ".join(
        f"{{{metric}: {{limit: {limit}, at: p99}}}}"
        for metric, limit in (objective.split(":") for objective in CASES[case.workload])
    )
    if case.workload == MIX:
        class_terms = [
            (name, *objective)
            for name, limits in CLASSES.items()
            for objective in zip(("ttft", "tpot"), limits, strict=True)
        ]
        terms = ", ".join(
            f"{{{metric}: {{limit: {limit}, at: p95, class: {name}}}}}"
            for name, metric, limit in class_terms
        )
    sustained = json.loads((case.folder / "search" / "capacity.json").read_bytes())["sustained"]
    for name, share in (("below", 0.95), ("above", 1.3)):
        length = max(600, 2 * case.length_s)
        load = f"workload: {case.workload}, rate: {rate * share:.4g}/s, duration: {length:g}s"
        levels = f"{{name: a, {load}, must: [{terms}]}}"
        (case.folder / f"{name}.yaml").write_text(
            f"name: {name}\nhorizon: 60s\nlevels:\n  - {levels}\n"
        )
        run_command(
            case,
            "validate",
            f"{name}.yaml",
            *case.target,
            "--seed",
            "41",
            "-o",
            name,
            "--progress",
            "off",
        )
        verdict = json.loads((case.folder / name / "verdict.json").read_bytes())["verdict"]
        yield Statement(f"a contract {name} the capacity", "fails: expected", name == "above")
        mark = "" if sustained else "the capacity is not known to be sustained, and says so"
        yield Statement(
            f"a contract {name} the capacity",
            f"fails: validate, {verdict}",
            verdict == "FAIL",
            mark=mark,
        )


# -- all of it --


def measure_case(case: Case) -> Iterator[ComparedPair]:
    """Yield every pair of one workload."""
    (case.folder / "prices.yaml").write_text(PRICES)
    run_command(case, *case.search_command("search", "--progress", "off"))
    rate = json.loads((case.folder / "search" / "capacity.json").read_bytes())["rate_per_s"]
    if not rate:
        sys.exit(
            "the search knows no load that holds: longer trials (--length), --search-flags, a "
            "wider --slo"
        )
    for index in range(case.repeats):
        seeded = ("--seed", str(11 + index), "--junit", f"r{index + 1}.xml", "--progress", "off")
        run_command(
            case,
            *case.run_command_line(
                f"r{index + 1}", "--request-rate", f"{rate:.6g}", *warm_up_options(case), *seeded
            ),
        )
    yield from compare_statements(read_run_statements(case, "r1"))
    yield from compare_statements(read_search_statements(case, "search", read_ui_rows(case)))
    spent = json.loads((case.folder / "search" / "search.json").read_bytes())["answer"]["spent_s"]
    if case.simulated:
        yield from compare_statements(read_stopped_searches(case, spent))
    yield from compare_statements(read_same_load(case, rate))
    yield from compare_statements(read_other_capacities(case))
    yield from compare_statements(
        read_contract_statements(case, rate)
        if case.simulated
        else read_prometheus_statements(case, rate)
    )


def format_pair(pair: ComparedPair) -> str:
    """Return a pair as a row of the table."""
    values = [
        f"{side.value:,.5g}" + ("" if side.low is None else f" [{side.low:,.5g}, {side.high:,.5g}]")
        for side in (pair.reference, pair.statement)
    ]
    reason = f": {pair.statement.mark or pair.reference.mark}" if pair.outcome == "marked" else ""
    return (
        f"| {pair.statement.name} | {pair.reference.source}: {values[0]} | "
        f"{pair.statement.source}: {values[1]} | {pair.outcome}{reason} |"
    )


def main() -> int:
    """Measure each workload; return 1 if a pair disagrees."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--length", default="120s", help="of a probe")
    parser.add_argument("--url", default="sim:gb300-vm")
    parser.add_argument("--slo", action="append", help="in place of the workload's limits")
    parser.add_argument("--search-flags", default="", help="more of the search: --precision 15%%")
    parser.add_argument("--load-flags", default="", help="more of every load: --output-tokens 40")
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, help="runs at the load that the search found"
    )
    parser.add_argument("--out", type=Path, help="a folder to keep the results in")
    args = rig.parse_arguments(
        parser, cases="qa", length="60s", repeats=2
    )  # shorter ones confirm nothing
    outcome_counts: Counter[str] = Counter()
    for name in args.cases.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) if args.out is None else args.out / name
            folder.mkdir(parents=True, exist_ok=True)
            objectives = [f"{term}:p99" for term in args.slo or CASES[name]]
            target = ("--url", args.url, *GPUS, *args.load_flags.split())
            case = Case(
                name,
                target,
                tuple(word for term in objectives for word in ("--slo", term)),
                seconds(args.length) * TRIAL_LENGTH_FACTORS.get(name, 1),
                folder,
                args.url.startswith("sim:"),
                tuple(args.search_flags.split()),
                args.repeats,
                args.smoke,
            )
            print(
                f"\n{name} on {args.url}, {', '.join(objectives)}\n\n| name | first | beside it | "
                f"|\n|---|---|---|---|"
            )
            for pair in measure_case(case):
                outcome_counts[pair.outcome] += 1
                print(format_pair(pair), flush=True)
    counts = ", ".join(
        f"{outcome_counts[outcome]} {outcome}"
        for outcome in ("equal", "within", "marked", "DISAGREES")
    )
    print(f"\n{sum(outcome_counts.values())} pairs: {counts}")
    return 0 if args.smoke or not outcome_counts["DISAGREES"] else 1


if __name__ == "__main__":
    sys.exit(main())
