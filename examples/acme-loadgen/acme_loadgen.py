"""What loadgen has to know of Acme's servers, files and prices."""

import json
from contextlib import contextmanager

from loadgen_sdk.dialects.quirks import Quirk, Sign
from loadgen_sdk.dialects.server_account import ServerAccount
from msgspec.structs import replace

import loadgen
from loadgen.backends import BackendRow, after_scheme
from loadgen.commands import CommandRow
from loadgen.core.errors import UserError
from loadgen.figures import FigureRow
from loadgen.formats import ForeignResult, FormatRow
from loadgen.present.section import Report, Said, Table, section
from loadgen.prices import PriceRow
from loadgen.result_kinds import ListRow, ResultKind

# -- a server: `--server acme`, and `auto` where its list of models says so ------------------------------------------

SERVER = Quirk(
    name="acme",
    title="Acme Serve",
    signs=(Sign("models", r'"owned_by"\s*:\s*"acme"'),),
    forces=("ignore_eos",),
    profiler="start it with --profile",
    account=(("acme.metrics", "acme_loadgen:account"),),  # an event of this name in its stream
    metrics_paths=("/acme/metrics",),
    metrics={"running": ("acme_active",), "waiting": ("acme_queued",)},
)


def account(form):
    return ServerAccount(
        queue=round(form["queued_s"] * 1e9), prefill=round(form["prefill_s"] * 1e9)
    )


# -- a format: results of Acme Bench are read and written, its traces replayed, its data sets sent ---------------------

FORMAT = FormatRow(
    name="acme-bench",
    tool="Acme Bench",
    definitions="From sent. Percentiles are elements of the sample",
    files=("acme.json",),
    fits="acme_loadgen:is_result",
    read="acme_loadgen:read",
    write="acme_loadgen:write",
    trace="acme_loadgen:trace",
    suffixes=(".acme",),
    dataset="acme_loadgen:dataset",
)


def is_result(file):
    return "acme_bench" in file.value


def read(file):
    figures = {
        "ttft_ms.p50": file.value["ttft_s"] * 1e3,
        "requests.ok": float(file.value["requests"]),
    }
    return ForeignResult(file=file.where, figures=figures, called={"ttft_ms": "ttft_s"})


def write(summary, stored):
    return {"acme_bench": 1, "ttft_s": summary.ttft_ms.p50 / 1e3, "requests": summary.requests.ok}


def trace(first):
    from loadgen.core.workload.trace_formats import TraceFormat, TraceRow, each

    def row(line):
        return TraceRow(round(line["acme_s"] * 1e9), line["in"], line["out"])

    return TraceFormat("Acme", each(row)) if "acme_s" in first else None


def dataset(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        yield f"{path}:{number}", {"prompt": line, "output_tokens": 4}


# -- a command: loadgen brief FOLDER ---------------------------------------------------------------------------------

COMMAND = CommandRow("brief", "tools", "A result in one sentence.", "acme_loadgen:brief")


def brief(folder: str) -> int:
    """Print a result in one sentence."""
    print(loadgen.load(folder).headline)
    return 0


# -- a kind of result: a folder with soak.json -----------------------------------------------------------------------

SOAK = ResultKind(
    name="soak",
    markers=("soak.json",),
    value="acme_loadgen:soak",
    headline="acme_loadgen:soak_headline",
    report="acme_loadgen:soak_report",
    document="acme_loadgen:soak_document",
    code="acme_loadgen:soak_code",
    listed="acme_loadgen:soak_listed",
)


def soak(folder):
    return json.loads((folder / "soak.json").read_text())


def soak_headline(value):
    return f"It held for {value['hours']} hours."


def soak_report(value):  # text, Markdown and page are made of it
    answer = Said(soak_headline(value), "good" if value["hours"] >= 24 else "bad")
    figures = section("Figures", Table(("", "hours"), [("held", str(value["hours"]))]))
    return Report(title="Soak", made_by="acme-loadgen", answer=[answer], sections=[figures])


def soak_document(value):
    return json.dumps(value).encode() + b"\n"


def soak_code(value, strict):
    return 0 if value["hours"] >= 24 else 1


def soak_listed(folder):
    return ListRow(word=f"{soak(folder)['hours']} h", about="soak")


# -- a source of prices: `--prices acme:eu` ---------------------------------------------------------------------------

PRICES = PriceRow("acme", "acme_loadgen:prices")


def prices(region):
    if region != "eu":
        raise UserError("no_price", f"Acme sells nothing in {region!r}", "--prices", "acme:eu")
    return """
currency: USD
rented:
  - {provider: Acme, shape: acme-8x, gpu: H200, gpus: 8, per_gpu_hour: 4, as_of: 2026-10, source: quote 7}
"""


# -- a backend: `--url acme:MODEL` starts a server and sends the load to it --------------------------------------------

BACKEND = BackendRow(
    "acme",
    schemes=("acme",),
    shown="Acme's {}",
    known="acme_loadgen:known",
    serve="acme_loadgen:serve",
)


def known(settings):
    from loadgen.core.execution.context import KnownTarget

    return KnownTarget(name=f"Acme's {after_scheme(settings.url)}")


@contextmanager
def serve(settings):
    from loadgen.sim.server.embedded import start
    from loadgen.sim.server.options import Options

    if not (model := after_scheme(settings.url)):
        raise RuntimeError("no model is named")
    with start(Options(ttft="2ms", itl="1ms", model=model)) as server:
        yield replace(settings, url=server.url)


# -- a figure: of each request, and so of each run, beside ours --------------------------------------------------------

THINKING = FigureRow(
    name="thinking",
    words="Time to think",
    meaning="first token of the answer - first token",
    values="acme_loadgen:thinking",
    compared=("p50",),
    shown=("slo", "contract", "latency", "requests", "prometheus"),
)


def thinking(columns):  # ns of each request, as an array
    return columns["first_answer_ns"] - columns["first_token_ns"]
