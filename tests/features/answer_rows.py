"""Check features of results: metrics, validity, verdicts, evidence, costs, formats, operations."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import loadgen_sdk
import trustme
import yaml
from feature_bench import PLAIN, ROOT, Bench, CommandResult, Feature, MissingFieldError
from load_rows import TENANTS
from scripted_server import answer, events, serving
from servers import start

from loadgen import formats
from loadgen.commands import COMMANDS
from loadgen.core.errors import CombinedError
from loadgen.formats import FORMATS, ToolFile
from loadgen.pricing.price_file import load_prices
from loadgen.sim.server.options import Options

RIVALS = ROOT / "tests/data/rivals"
PRICES = ROOT / "docs/prices.example.yaml"
TALKS = "requests: {input_tokens: 40, output_tokens: 5, turns: {count: 3, tool_result_tokens: 20}}"
TASK = """requests:
  steps:
    plan: {input_tokens: 40, output_tokens: 5}
    write: {after: plan, input_tokens: 20, output_tokens: 5}
"""
AT = "--model m -c 2 --warmup 0 --server-metrics off --energy off"
CONTRACT = """name: short
horizon: 5s
levels:
  - {name: one, workload: w.yaml, concurrency: 2, duration: 60s,
     must: [{ttft: {limit: 1s, at: p50}}]}
"""
STEADY = "-c 4 -d 120s --warmup 10s"


def has(ran: CommandResult, *paths: str) -> bool:
    """Return whether a run has non-empty values at all paths."""
    try:
        return all(ran[path] not in ([], {}) for path in paths)
    except MissingFieldError:
        return False


def exported(bench: Bench, form: str) -> str:
    ran = bench.do(f"export {bench.run().folder} --as {form}")
    return "" if ran.code else ran.out


def within_a_run(bench: Bench) -> dict[str, bool]:
    """Check intervals from blocks of time in a comparison and in a report."""
    first_run, second_run = bench.run(STEADY).folder, bench.run(f"{STEADY} --seed 2").folder
    comparison = bench.do(f"compare {first_run} {second_run} --json")
    differences = comparison["comparison.differences"]
    return {
        "of a comparison": any(row["low"] is not None for row in differences),
        "of a report": has(bench.run(STEADY), "within"),
    }


def raw_gaps(bench: Bench) -> dict[str, bool]:
    """Check the gaps of each request in the formats of vLLM and AIPerf and in a table.

    There is one gap less than tokens.
    """
    folder = bench.run("-c 4 -n 24 --keep gaps").folder
    family, records, table = (
        bench.do(f"export {folder} --as {form}").out for form in ("vllm", "aiperf-records", "csv")
    )
    documents = [
        json.loads(line)["metrics"]["inter_chunk_latency"]["value"] for line in records.splitlines()
    ]
    cells = [json.loads(row["inter_chunk_ms"]) for row in csv.DictReader(io.StringIO(table))]
    gaps_by_format = {
        "vLLM's itls": json.loads(family).get("itls"),
        "AIPerf's records": documents,
        "csv": cells,
    }
    return {
        name: len(rows) == 24 and {len(gaps) for gaps in rows} == {4}
        for name, rows in gaps_by_format.items()
    }


def steps_of_connecting(bench: Bench) -> bool:
    """Check connection times over TLS at a host by name.

    These are the lookup before the load, TCP and the handshake of each connection.
    """
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(bench.folder / "ca.pem"))
    issued = authority.issue_cert("localhost")
    issued.private_key_pem.write_to_path(str(bench.folder / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(bench.folder / "cert.pem"))
    with start(
        Options(cert=str(bench.folder / "cert.pem"), key=str(bench.folder / "key.pem"))
    ) as server:
        flags = "-c 2 -n 6 --warmup 0 --server-metrics off --energy off --cacert ca.pem"
        ran = bench.run(flags, url=server.url.replace("127.0.0.1", "localhost"))
    return has(ran, "dns_ms", "figures.tcp_ms.p50", "figures.tls_ms.p50")


def read_back(_bench: Bench) -> dict[str, bool]:
    """Read each file that another tool wrote, with the reader of that tool."""
    read_tools = {}
    for file in sorted(RIVALS.glob("*.json*")):
        text = file.read_text("utf-8")
        with_lines = file.suffix == ".jsonl"
        value = json.loads(text.splitlines()[-1] if with_lines else text)
        tool_file = ToolFile(str(file), text, value, len(text.splitlines()) if with_lines else 0)
        row = next((row for row in FORMATS.rows() if formats.is_result(row, tool_file)), None)
        if row is not None:
            read_tools[row.tool] = bool(formats.read_result(row, tool_file).metrics)
    return read_tools


def written(bench: Bench) -> dict[str, bool]:
    written_formats = {
        row.tool or row.name: bool(exported(bench, row.name))
        for row in FORMATS.builtin_rows
        if row.write
    }
    return written_formats | {
        row.tool: row.send != "" for row in FORMATS.builtin_rows if row.name in ("mlflow", "wandb")
    }


def prices(bench: Bench, **changes: Any) -> bool:
    """Return whether a price file with these keys in its first rented machine can be read."""
    text = yaml.safe_load(PRICES.read_text("utf-8"))
    text["rented"][0] |= changes
    try:
        load_prices(bench.file("prices.json", json.dumps(text, default=str)))
    except CombinedError:
        return False
    return True


def cost(bench: Bench, flags: str = "") -> CommandResult:
    ran = bench.run(f"{STEADY} --shape ND128isr_GB300_v6")
    return bench.do(f"cost {ran.folder} --prices {PRICES} --json {flags}")


def search(bench: Bench) -> bool:
    bench.file("w.yaml", "name: w", PLAIN)
    completed = bench.do(
        "search w.yaml --url sim:gb300-vm --slo ttft:1s:p50 --over concurrency --low 1 --high 4 "
        "-d 20s "
        "--no-sustain --max-probes 3 --seed 1 -o search"
    )
    return completed.code in (0, 3) and "Capacity  " in completed.out


def contract(bench: Bench) -> bool:
    bench.file("w.yaml", "name: w", PLAIN)
    ran = bench.do(
        f"validate {bench.file('contract.yaml', CONTRACT).name} --url sim:gb300-vm --seed 1 "
        f"--json -o poc"
    )
    return ran["verdict"] in ("PASS", "FAIL", "INCONCLUSIVE")


def failures(bench: Bench) -> bool:
    """Check a run at an endpoint that refuses everything after a while."""
    response = events({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]})
    refusal = answer({"error": {"message": "too much"}}, "429 Too Many Requests")
    with serving(*[response] * 20, refusal) as server:
        ran = bench.run(f"{AT} --server openai -n 40", url=server.url)
    ok, refused = ran["requests.ok"], ran["requests.by_error.http_429.count"]
    return bool(ok + refused == 40 and refused >= 20 and ran["ttft_ms.count"] == ok)


def cache_writes(bench: Bench) -> bool:
    usage = {
        "input_tokens": 9,
        "cache_creation_input_tokens": 40,
        "cache_read_input_tokens": 1,
        "output_tokens": 1,
    }
    response = events(
        {"type": "message_start", "message": {"usage": usage}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn"},
            "usage": {"output_tokens": 1},
        },
        {"type": "message_stop"},
        done=False,
    )
    with serving(response) as writing:
        ran = bench.run(f"{AT} --api messages -n 4", url=writing.url)
    return bool(ran["tokens.cache_written"] == 160)


def declared_power(bench: Bench) -> bool:
    """Check that the power of a price is compared with the measured power.

    The summary has accelerators that drew a megawatt, and the price declares 7.2 kW a machine.
    """
    folder = bench.run(f"{STEADY} --shape ND128isr_GB300_v6 -n 300 --seed 3").folder
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    energy = {
        "watts": 1e6,
        "joules": 1e8,
        "error_j": 1e6,
        "joules_per_output_token": 1e3,
        "joules_per_request": 1e4,
    }
    copied = bench.folder / "drawn"
    copied.mkdir(exist_ok=True)
    (copied / "summary.json").write_text(json.dumps(summary | {"energy": energy}), "utf-8")
    return "power_understated" in bench.do(f"cost {copied} --prices {PRICES} --json").out


def size(bench: Bench) -> bool:
    ran = bench.run(f"{STEADY} --slo ttft:1s:p50")
    return (
        bench.do(
            f"size {bench.file('w.yaml', 'name: w', PLAIN).name} {ran.folder} --users 500 --json"
        ).code
        == 0
    )


def signed(bench: Bench) -> bool:
    bench.do(f"bundle {bench.run().folder} -o run.zip")
    return "VERIFIED" in bench.do("verify run.zip").out and "--sign" in bench.help("bundle")


def manifest(*kinds: str) -> bool:
    """Return whether deploy/ has Kubernetes objects of these kinds."""
    kinds_in_files = [
        document.get("kind")
        for file in (ROOT / "deploy").glob("*.yaml")
        for document in yaml.safe_load_all(file.read_text("utf-8"))
        if document
    ]
    return all(kind in kinds_in_files for kind in kinds)


METRICS = (
    Feature(
        "TTFT from the scheduled time and from the time of sending",
        lambda b: has(b.run(), "ttft_ms.p50", "ttft_from_sent_ms.p50"),
    ),
    Feature(
        "TPOT, ITL, E2E latency and max ITL",
        lambda b: has(b.run(), "tpot_ms.p50", "itl_ms.p50", "e2e_ms.p50", "max_gap_ms.p50"),
    ),
    Feature(
        "Normalised TPOT: E2E latency divided by output tokens",
        lambda b: has(b.run(), "figures.e2e_per_token_ms.p50"),
    ),
    Feature(
        "Time to the first output after reasoning", lambda b: has(b.run(), "first_answer_ms.p50")
    ),
    Feature(
        "Throughput in steady state and overall, also per GPU",
        lambda b: has(
            b.run(),
            "tokens.steady_output_per_s",
            "tokens.whole_output_per_s",
            "tokens.output_per_s_per_gpu",
        ),
    ),
    Feature(
        "Goodput",
        lambda b: b.run("-c 4 -n 24 --slo ttft:1s:p50")["goodput.share"] == 1.0,
    ),
    Feature(
        "Additional percentiles",
        lambda b: "p99.5" in b.report(b.run("-c 4 -n 24 --set percentiles=25,99.5")),
    ),
    Feature("Inter-chunk latencies of each request in an export", raw_gaps),
    Feature(
        "A record of every request, also as CSV",
        lambda b: len(list(csv.reader(io.StringIO(exported(b, "csv"))))) == 25,
    ),
    Feature("Finish reasons", lambda b: has(b.run(), "requests.by_finish")),
    Feature("Parts of TTFT and E2E latency", lambda b: has(b.run(), "splits.groups")),
    Feature("DNS and TLS times", steps_of_connecting),
    Feature(
        "Whole conversations and tasks",
        lambda b: has(b.run("-c 2 -n 4", TALKS), "sessions.duration_ms.p50"),
    ),
    Feature("Each step of a task", lambda b: has(b.run("-c 2 -n 4", TASK), "steps")),
    Feature("Cached prompt tokens", lambda b: has(b.run(), "tokens.cached_share")),
    Feature("Cache writes of Anthropic messages", cache_writes),
    Feature("Acceptance of speculative decoding", lambda b: "acceptance" in b.run()["figures"]),
    Feature(
        "Recovery time after a load spike",
        lambda b: has(
            b.run(
                "--slo ttft:1s:p50",
                f"{PLAIN}\nstages:\n  - {{arrival: {{constant: 10/s}}, duration: 4s}}\n"
                "  - spike: 3x for 2s\n  - {arrival: {constant: 10/s}, duration: 20s}",
            ),
            "recovery",
        ),
    ),
    Feature("Fairness between tenants", lambda b: has(b.run("-c 2 -n 8", TENANTS), "fairness")),
    Feature("Trends", lambda b: has(b.run(STEADY), "drift.blocks")),
    Feature("Confidence intervals within one run (batch means)", within_a_run),
    Feature("Differences between nodes", lambda b: has(b.run(STEADY), "between.variances")),
)

TRUTH = (
    Feature(
        "VALID or INVALID, with codes",
        lambda b: (
            b.run("--request-rate 50 -n 50 --max-in-flight 1")["verdict.valid"] is False
            and bool(b.run("--request-rate 50 -n 50 --max-in-flight 1")["verdict.codes"])
        ),
    ),
    Feature(
        "Marks for percentiles with too few samples",
        lambda b: "p99" not in b.run()["ttft_ms.supported"],
    ),
    Feature(
        "Send delay, receive delay and timestamp uncertainty",
        lambda b: has(b.http(), "send_lag_ms.p50", "stamp_error_ms.p50"),
    ),
    Feature("Timestamps from the kernel", lambda b: b.http()["client.kernel_stamp_share"] > 0),
    Feature(
        "A check that the delivered load is the requested one", lambda b: has(b.run(), "stimulus")
    ),
    Feature(
        "A test whether the load is sustained", lambda b: has(b.run(STEADY), "sustainable.parts")
    ),
    Feature("Failures by kind, not mixed with latencies", failures),
    Feature(
        "A preflight of the server and the host",
        lambda b: b.do("doctor --url sim:gb300-vm --json").code in (0, 3),
    ),
)

JUDGEMENT = (
    Feature(
        "An SLO decides the exit code",
        lambda b: (
            (
                b.run("-c 4 -n 24 --slo ttft:1s:p50").code,
                b.run("-c 4 -n 24 --slo ttft:1ms:p50").code,
            )
            == (0, 1)
        ),
    ),
    Feature(
        "Sweeps over several loads",
        lambda b: (
            len(
                b.do("sweep qa --url sim:gb300-vm -c 1,2 -n 4 --osl 5 --seed 1 --json -o sweep")[
                    "levels"
                ]
            )
            == 2
        ),
    ),
    Feature(
        "Sweeps over lengths and loads",
        lambda b: (
            b.do(
                "sweep qa --url sim:gb300-vm -c 1 --isl 20,40 --osl 5 -n 2 --seed 1 --json -o isl"
            ).code
            != 2
        ),
    ),
    Feature("The highest load that meets an SLO", search),
    Feature(
        "Repetitions with confidence intervals",
        lambda b: (
            b.do("run qa --url sim:gb300-vm -c 1 -n 3 --osl 5 --repeat 2 --seed 1 -o twice").code
            != 2
        ),
    ),
    Feature(
        "Comparisons with confidence intervals",
        lambda b: b.do(f"compare {b.run().folder} {b.run('-c 2 -n 24').folder} --json").code == 0,
    ),
    Feature("Named baselines", lambda b: b.do(f"compare {b.run().folder} --save base").code == 0),
    Feature("A contract: PASS, FAIL or INCONCLUSIVE", contract),
    Feature(
        "JUnit reports for CI",
        lambda b: b.run("-c 2 -n 4 --junit run.xml").code != 2 and (b.folder / "run.xml").exists(),
    ),
    Feature(
        "A GitHub action",
        lambda _: "runs" in yaml.safe_load((ROOT / "action.yml").read_text("utf-8")),
    ),
    Feature(
        "MLPerf's rules: Server, Interactive, Offline, accuracy",
        lambda b: {
            mode: mode in b.do("mlperf --help").out
            for mode in ("server", "interactive", "offline", "accuracy")
        },
    ),
    Feature("Quality scores of responses", lambda b: "--against" in b.help("answers")),
)

EVIDENCE = (
    Feature("Signed bundles that can be verified from their records", signed),
    Feature(
        "Reports that open without a network",
        lambda b: (
            b.do(f"report {b.run().folder} --html page.html").code != 2
            and "http://"
            not in "".join((b.folder / "page.html").read_text("utf-8").split("src=")[1:])[:200]
        ),
    ),
    Feature("Results in a browser", lambda _: "ui" in {row.name for row in COMMANDS.builtin_rows}),
    Feature(
        "JSON Schemas of files",
        lambda b: {
            kind: "$schema" in b.do(f"export --schema {kind}").out
            for kind in ("workload", "contract", "prices", "targets")
        },
    ),
)

MONEY = (
    Feature("Cost of requests and tokens", lambda b: has(cost(b), "offers")),
    Feature(
        "Prices of machines and tokens, with date and source",
        lambda b: not prices(b, source=None) and not prices(b, as_of=None) and prices(b),
    ),
    Feature(
        "Prices of cache writes",
        lambda b: "per_million_cache_write" in b.do("export --schema prices").out,
    ),
    Feature(
        "Storage, support, egress",
        lambda b: prices(b, storage_per_month=100, support_per_month=50, egress_per_gb=0.1),
    ),
    Feature(
        "Reserved and spot machines",
        lambda b: prices(b, commitment="spot", lost_share=0.1) and "commitments" in cost(b).out,
    ),
    Feature("Utilization over a day", lambda b: "14h@10%,10h@70%" in b.help("cost")),
    Feature("Prices of an earlier day", lambda b: "--as-of" in b.help("cost")),
    Feature(
        "By year, with a discount", lambda b: has(cost(b), "offers") and "by_year" in cost(b).out
    ),
    Feature("Declared and measured power", declared_power),
    Feature("Number of machines for a number of users", size),
    Feature(
        "The cost of a run before it starts, and a limit",
        lambda b: {flag: flag in b.help("run") for flag in ("--prices", "--max-cost")},
    ),
)

FOREIGN_FORMATS = (
    Feature("Results of other tools with their definitions", read_back),
    Feature("Export in the formats of other tools", written),
    Feature(
        "MLPerf LoadGen's log files",
        lambda _: any(row.name == "mlperf-log" and row.read for row in FORMATS.builtin_rows),
    ),
)

FLEETS = (
    Feature(
        "Prometheus and OpenTelemetry",
        lambda b: all(f in b.help("run") for f in ("--prometheus", "--otel")),
    ),
    Feature("Metrics pages of servers", lambda b: "--server-metrics" in b.help("run")),
    Feature("Energy of the GPUs", lambda b: "--energy" in b.help("run")),
    Feature("Workers on several machines with Ray", lambda b: "Ray cluster" in b.help("run")),
    Feature(
        "A container image",
        lambda _: (ROOT / "deploy/Dockerfile").read_text("utf-8").count("FROM ") > 0,
    ),
    Feature(
        "Kubernetes Jobs and a Helm chart",
        lambda _: {
            "a Job": manifest("Job"),
            "a chart": any((ROOT / "deploy").rglob("Chart.yaml")),
        },
    ),
    Feature("Results in object stores", lambda b: "s3://" in b.help("run")),
    Feature("A live view", lambda b: "--progress" in b.help("run")),
)

SDK = (
    Feature(
        "A client of its own",
        lambda _: all(
            name in loadgen_sdk.__all__ for name in ("Client", "BlockingClient", "Measurement")
        ),
    ),
    Feature("Measurement of existing clients", lambda _: "instrument" in loadgen_sdk.__all__),
    Feature(
        "Retries, throttles, budgets, fallbacks",
        lambda _: {
            name: name in loadgen_sdk.__all__
            for name in ("Retry", "Throttle", "Budget", "Fallback")
        },
    ),
    Feature("Recording of traffic without texts", lambda _: "record_shape" in loadgen_sdk.__all__),
    Feature("Plug-ins", lambda _: COMMANDS.plugins is not None),
)
