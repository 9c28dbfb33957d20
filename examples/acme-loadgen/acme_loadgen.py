"""What loadgen has to know about the servers, files and prices of Acme: one row for each table."""

import json
from contextlib import contextmanager

from loadgen_sdk.wire_formats.server_profiles import DetectionRule, ServerProfile
from loadgen_sdk.wire_formats.server_timing import ServerTiming
from msgspec.structs import replace

import loadgen
from loadgen.backends import BackendRow, after_scheme
from loadgen.commands import CommandRow
from loadgen.core.errors import UserError
from loadgen.figures import MetricDefinition
from loadgen.formats import ForeignResult, FormatRow
from loadgen.prices import PriceRow
from loadgen.render.section import Paragraph, Report, Table, section
from loadgen.result_kinds import ListRow, ResultFunctions, ResultKind

# a server: `--server acme`, and `auto` if its list of models says so


def parse_account(form):
    """Read an event `acme.metrics` in the stream of a response."""
    return ServerTiming(
        queue_ns=round(form["queued_s"] * 1e9), prefill_ns=round(form["prefill_s"] * 1e9)
    )


SERVER = ServerProfile(
    name="acme",
    title="Acme Serve",
    detection_rules=(DetectionRule("models", r'"owned_by"\s*:\s*"acme"'),),
    length_fields=("ignore_eos",),
    profiler_requirement="start it with --profile",
    timing_parsers={"acme.metrics": parse_account},
    metrics_paths=("/acme/metrics",),
    metrics={"running": ("acme_active",), "waiting": ("acme_queued",)},
)


# a format: reads and writes results of Acme Bench, replays its traces, sends its data sets


def is_result(file):
    """Recognize a result of Acme Bench."""
    return "acme_bench" in file.value


def read_result(file):
    """Read a result of Acme Bench."""
    metrics = {
        "ttft_ms.p50": file.value["ttft_s"] * 1e3,
        "requests.ok": float(file.value["requests"]),
    }
    return ForeignResult(file=file.where, metrics=metrics, called={"ttft_ms": "ttft_s"})


def write_result(summary, _stored):
    """Write a run as a result of Acme Bench. A statistic that is withheld is None."""
    ttft_ms = summary.ttft_ms.p50
    ttft_s = None if ttft_ms is None else ttft_ms / 1e3
    return {
        "acme_bench": 1,
        "ttft_s": ttft_s,
        "requests": summary.requests.ok,
        "simulated": summary.target.simulated,
    }


def trace_format(first):
    """Recognize a trace of Acme by its first line."""
    from loadgen.core.workload.trace_formats import TraceFormat, TraceRow, one_request_per_line

    def parse_line(line):
        return TraceRow(round(line["acme_s"] * 1e9), line["in"], line["out"])

    return TraceFormat("Acme", one_request_per_line(parse_line)) if "acme_s" in first else None


def read_dataset(path):
    """Yield the prompts in a file, one per line."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        yield f"{path}:{number}", {"prompt": line, "output_tokens": 4}


FORMAT = FormatRow(
    name="acme-bench",
    tool="Acme Bench",
    definitions="From sent. Percentiles are elements of the sample",
    files=("acme.json",),
    fits=is_result,
    read=read_result,
    write=write_result,
    simulated_mark="field `simulated`",
    trace=trace_format,
    suffixes=(".acme",),
    dataset=read_dataset,
)


# a command: loadgen brief FOLDER


def brief(folder: str) -> int:
    """Print a result in one sentence."""
    print(loadgen.load(folder).headline)
    return 0


COMMAND = CommandRow("brief", "tools", "A result in one sentence.", lambda: brief)


# a kind of result: a directory with soak.json


def load_soak(folder):
    """Read the result. Its value is passed to the functions below."""
    return json.loads((folder / "soak.json").read_text())


def soak_headline(value):
    """Return the result in one sentence."""
    return f"It held for {value['hours']} hours."


def soak_report(value):
    """Return the report, which is rendered as text, Markdown and page."""
    answer = Paragraph(soak_headline(value), "good" if value["hours"] >= 24 else "bad")
    figures = section("Figures", Table(("", "hours"), [("held", str(value["hours"]))]))
    return Report(title="Soak", generated_by="acme-loadgen", headline=[answer], sections=[figures])


def soak_document(value):
    """Return what `report --json` prints."""
    return json.dumps(value).encode() + b"\n"


def soak_exit_code(value, _strict):
    """Return 0 if the server survived a day."""
    return 0 if value["hours"] >= 24 else 1


def soak_list_row(folder):
    """Return the row in the list of results."""
    return ListRow(outcome=f"{load_soak(folder)['hours']} h", description="soak")


SOAK_FUNCTIONS = ResultFunctions(
    load=load_soak,
    headline=soak_headline,
    report=soak_report,
    document=soak_document,
    code=soak_exit_code,
    list_row=soak_list_row,
)
SOAK = ResultKind(name="soak", load_functions=lambda: SOAK_FUNCTIONS, markers=("soak.json",))


# a source of prices: `--prices acme:eu`


def read_prices(region):
    """Return the text of a price file for a region."""
    if region != "eu":
        raise UserError("no_price", f"Acme sells nothing in {region!r}", "--prices", "acme:eu")
    return """
currency: USD
rented:
  - {provider: Acme, shape: acme-8x, gpu: H200, gpus: 8, per_gpu_hour: 4,
     as_of: 2026-10, source: quote 7}
"""


PRICES = PriceRow("acme", read_prices)


# a backend: `--url acme:MODEL` starts a server and sends the load to it


def known_target(settings):
    """Return what is known of the server before it is started."""
    from loadgen.core.execution.context import KnownTarget

    return KnownTarget(name=f"Acme's {after_scheme(settings.url)}")


@contextmanager
def serve(settings):
    """Run the server inside the context."""
    from loadgen.sim.server.embedded import start
    from loadgen.sim.server.options import Options

    model = after_scheme(settings.url)
    if not model:
        raise RuntimeError("no model is named")
    with start(Options(ttft="2ms", itl="1ms", model=model)) as server:
        yield replace(settings, url=server.url)


def load_backend():
    """Import what only a run with this backend needs."""
    from loadgen.core.execution.backend import Backend

    return Backend(known=known_target, serve=serve)


BACKEND = BackendRow(name="acme", load=load_backend, schemes=("acme",), name_format="Acme's {}")


# a metric: a value of each request, and so of each run


def thinking(columns):
    """Return the time to think in ns, as an array with one value per request."""
    return columns["first_answer_ns"] - columns["first_token_ns"]


THINKING = MetricDefinition(
    name="thinking",
    label="Time to think",
    meaning="first token of the answer - first token",
    values=thinking,
    compared=("p50",),
    places=("slo", "contract", "latency", "requests", "prometheus"),
)
