"""Write `tests/data/oracle/`: the structure and figures that `test_oracle.py` checks.

Run `python tests/make_oracle.py` after an intended change; it takes less than a minute. The stored
result directories stay as they are: `make_oracle_folders.py` renews them when the format of a
result changes.

The structure consists of names (in `__all__`, keywords, flags, keys of input files, error codes),
exit codes, the tree of keys and types of each command's JSON, and the keys and columns of result
files. The figures are those of runs in virtual time and of the stored directories. Sentences, help
texts and dates are left out: see `oracle_values.py`.

Only public interfaces are used: `loadgen.run`, `loadgen.load`, the command line, `__all__` and the
files of a result directory.
"""

from __future__ import annotations

import contextlib
import csv
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import oracle_values
import public_names
import pyarrow.parquet as pq
import repository_paths
from oracle_values import over, sha, shape, stable_values
from public_names import run_in_directory

import loadgen
from loadgen.sim.server import embedded
from loadgen.sim.server.options import Options

DATA = Path(__file__).parent / "data" / "oracle"
FOLDERS = DATA / "folders"


# -- runs in virtual time --------------------------------------------------------------------------

OPEN = {
    "name": "open",
    "requests": {
        "input_tokens": 300,
        "output_tokens": {"lognormal": {"median": 40, "sigma": 0.5, "max": 200}},
    },
    "stages": [
        {"name": "warm-up", "arrival": {"poisson": "20/s"}, "duration": "2s", "warmup": True},
        {"name": "load", "arrival": {"poisson": "40/s"}, "count": 200},
    ],
    "slo": {"ttft": "2s", "tpot": "21ms", "at": "p95"},
}
CROWDED = {
    "name": "crowded",
    "requests": {"input_tokens": 1000, "output_tokens": 1000},
    "stages": [{"arrival": {"poisson": "300/s"}, "duration": "3s"}],
    "grace": "3s",
    "max_in_flight": 500,
}
SHARED = {
    "name": "shared",
    "requests": {
        "input_tokens": 200,
        "output_tokens": 5,
        "shared_prefix_tokens": 160,
        "prefixes": 3,
    },
    "stages": [{"arrival": {"constant": "20/s"}, "count": 80}],
}
LEVELS = {
    "name": "levels",
    "requests": {"input_tokens": 100, "output_tokens": 20},
    "stages": [
        {"arrival": {"closed": concurrency}, "count": 20 * concurrency} for concurrency in (1, 2, 4)
    ],
}
PLAIN = {"name": "plain", "requests": {"input_tokens": 100, "output_tokens": 20}}
RUNS: dict[str, dict[str, Any]] = {
    "open": {"workload": OPEN, "url": "sim:gb300-vm"},
    "closed": {
        "workload": PLAIN,
        "url": "sim:h100x8",
        "concurrency": 8,
        "num_requests": 120,
        "slo": "ttft:1s",
    },
    "levels": {"workload": LEVELS, "url": "sim:gb200-vm"},
    "bursts": {
        "workload": PLAIN,
        "url": "sim:b200x8",
        "request_rate": "50",
        "burstiness": "0.3",
        "num_requests": 200,
        "schedule_seed": 7,
    },
    "conversations": {"workload": "agentic", "url": "sim:gb300-vm"},
    "questions": {
        "workload": "qa",
        "url": "sim:gb300-rack",
        "request_rate": "40",
        "num_requests": 150,
        "warmup": "0",
    },
    "rag": {
        "workload": "rag",
        "url": "sim:gb300-vm",
        "num_requests": 60,
        "warmup": "5req",
        "slo": "+ttft:500ms:p95",
    },
    "trace": {"trace": DATA / "trace.jsonl", "url": "sim:gb300-vm"},
    "crowded": {"workload": CROWDED, "url": "sim:gb300-vm"},
    "shared": {"workload": SHARED, "url": "sim:h200x8"},
    "cramped": {
        "workload": "agentic",
        "url": f"sim:{DATA / 'cramped.yaml'}",
        "request_rate": "1.5",
        "duration": "60s",
    },
    "stopped": {
        "workload": OPEN,
        "url": "sim:gb300-vm",
        "stop_when": ["errors:20%", "e2e:p90:1.45s"],
    },
    "values": {
        "workload": PLAIN,
        "url": "sim:gb300-vm",
        "api": "embeddings",
        "request_rate": "90",
        "num_requests": 99,
    },
}


def run(name: str, directory: Path) -> dict[str, Any]:
    """Return all records and all figures of a run in virtual time."""
    result = loadgen.run(**RUNS[name], seed=1, out=directory / name)
    summary = stable_values(json.loads((directory / name / "summary.json").read_bytes()))
    return {
        "exit": result.exit_code,
        "columns": oracle_values.columns(result.rows),
        "summary": summary,
    }


def due(directory: Path) -> dict[str, Any]:
    """Return the first 1,000 arrivals of a Poisson process, from the records of a run."""
    flags: dict[str, Any] = {
        "request_rate": "100",
        "num_requests": 1000,
        "seed": 3,
        "schedule_seed": 11,
    }
    table = loadgen.run(PLAIN, url="sim:gb300-vm", **flags, out=directory / "poisson").rows.sort_by(
        "slot"
    )
    instants = table["due_ns"].to_pylist()
    return {
        "count": len(instants),
        "first": instants[:5],
        "last": instants[-1],
        "all": sha(instants),
    }


SENT = (
    "slot",
    "request",
    "session",
    "turn",
    "stage",
    "worker",
    "status",
    "kind",
    "finish_reason",
    "due_ns",
    "asked_output",
    "output_tokens",
    "output_source",
    "input_source",
    "target",
)
"""Columns that the clock has no part in."""


def sent(directory: Path) -> dict[str, Any]:
    """Return the reproducible fields of a run over HTTP, in real time, to the embedded server."""
    flags: dict[str, Any] = {
        "request_rate": "100",
        "num_requests": 40,
        "seed": 5,
        "embedded": {"ttft": "3ms"},
    }
    table = loadgen.run(
        {**PLAIN, "requests": OPEN["requests"]}, **flags, out=directory / "sent"
    ).rows
    return oracle_values.columns(
        table.select([name for name in SENT if name in table.column_names])
    )


# -- commands --------------------------------------------------------------------------------------

SIM = ["--url", "sim:gb300-vm", "--seed", "1"]
SWEEP = [
    "sweep",
    "open.yaml",
    *SIM,
    "--request-rate",
    "10,40",
    "-n",
    "40",
    "--warmup",
    "0",
    "--out",
    "sweep",
]
SEARCH = [
    "search",
    "open.yaml",
    *SIM,
    "--slo",
    "ttft:2s:p95",
    "tpot:20.6ms:p90",
    "--low",
    "4",
    "--high",
    "64",
    "-d",
    "10s",
    "--precision",
    "0.3",
    "--max-probes",
    "5",
    "--out",
    "search",
]
MLPERF = [
    "-b",
    "llama2-70b",
    "--min-duration",
    "5",
    "--target-qps",
    "10",
    "--dataset",
    "set.jsonl",
    *SIM[:2],
]
ENDPOINTS = ["-b", "llama3.1-8b", *SIM[:2]]
ENDPOINTS_RUN = [
    "mlperf",
    "endpoints",
    "run",
    *ENDPOINTS,
    "--concurrency",
    "2,4,6,8,12,20,40",
    "--offline",
    "elected",
    "--dataset",
    "set.jsonl",
]


def priced(name: str) -> list[str]:
    return ["--accept-sample-prices", "--price", f"{name}=bedrock-llama-2-70b", "--json"]


TYPED: list[list[str]] = [
    ["run", "open.yaml", *SIM, "--json", "--out", "raw"],
    ["run", "open.yaml", *SIM, "-n", "20", "--repeat", "2", "--json", "--out", "repeats"],
    ["report", "raw", "--json"],
    ["report", "repeats", "--json"],
    ["run", "open.yaml", *SIM, "--out", "after"],
    ["compare", "raw", "after", "--json"],
    ["export", "after", "--as", "vllm", "-o", "vllm.json"],
    ["explain", "raw", "vllm.json", "--json"],
    ["cost", "raw", *priced("raw")],
    ["compare", "--save", "main", "raw"],
    ["compare", "--against", "main", "after", "--json"],
    ["bundle", "raw", "-o", "raw.zip"],
    ["verify", "raw.zip", "--json"],
    [*SWEEP, "--json"],
    [*SEARCH, "--json"],
    ["report", "search", "--json"],
    ["size", "open.yaml", "search", "--users", "500", *priced("search"), "--out", "size"],
    ["report", "size", "--json"],
    ["run", "qa", *SIM, "-n", "200", "--warmup", "0", "--out", "qa"],
    ["size", "qa", "qa", "--gpus", "4", "--users", "500", "--json", "--out", "sized"],
    ["validate", "carried.yaml", *SIM, "--json", "--out", "contract"],
    ["mlperf", "server", *MLPERF, "--json", "--out", "server"],
    ["mlperf", "interactive", *MLPERF, "--json", "--out", "interactive"],
    ["mlperf", "offline", *MLPERF, "--json", "--out", "offline"],
    ["mlperf", "verdict", "server", "--json"],
    ["mlperf", "endpoints", "plan", *ENDPOINTS, "--c-max", "40", "--json"],
    [*ENDPOINTS_RUN, "--out", "curve", "--json"],
    ["mlperf", "endpoints", "check", "curve", "--json"],
    ["doctor", *SIM[:2], "--json"],
    ["fit", "trace.jsonl", "--json"],
]
"""In virtual time, one after the other in one folder."""

ENDPOINT_COMMANDS: list[list[str]] = [
    ["answers", "set.jsonl", "--rows", "4", "--max-tokens", "4", "--json", "--out", "answers"],
    [
        "mlperf",
        "accuracy",
        "-b",
        "llama2-70b",
        "--dataset",
        "set.jsonl",
        "--json",
        "--out",
        "accuracy",
    ],
    ["report", "answers", "--json"],
]
"""These send requests to an endpoint over HTTP, or read the results."""


WRONG = [
    ["nonsense"],
    ["run", "qa", "--nope"],
    ["run", "no-such-workload"],
    ["run", "qa", "--gpus", "none"],
    [
        "run",
        "qa",
        "--slo",
        "ttft:2x",
        "--server",
        "unknown",
        "--workers",
        "0",
        "--extra-body",
        "[1]",
    ],
    ["run", "qa", "--trace", "nowhere.jsonl"],
    ["run", "qa", "--url", "sim:gb900"],
    ["run", "qa", "--duration", "soon", "--request-rate", "fast"],
    ["run", "qa", "--url", "http://127.0.0.1:1", "--seed", "1", "--out", "unreached"],
    ["report"],
    ["report", "nowhere"],
    ["sweep", "qa", "--concurrency", "4,2"],
    ["search", "qa", "--low", "9", "--high", "3"],
    ["compare", "nowhere"],
    ["export", "nowhere", "--as", "abacus"],
    ["validate", "nowhere.yaml"],
    ["mlperf", "server", "-b", "llama9", "--target-qps", "1"],
    ["mlperf", "verdict", "nowhere"],
    ["cost", "nowhere"],
    ["doctor", "--url", "sim:nope"],
]


CONTRACT = """\
name: carried
horizon: 12s
slo: {ttft: 1s, tpot: 60ms}
levels:
  - name: steady
    workload: open.yaml
    rate: 8/s
    requests: 400
    must:
      - tpot: {limit: 60ms, at: p50}
      - errors: 5%
    should:
      - ttft: {limit: 1ms, at: p50}
"""


def inputs(directory: Path) -> None:
    """Write the files that the command lines name."""
    for name in ("open.yaml", "trace.jsonl"):
        shutil.copy(DATA / name, directory)
    (directory / "carried.yaml").write_text(CONTRACT)
    rows = [
        {
            "prompt": f"tell me {'more ' * (n % 7)}",
            "max_tokens": 50,
            "reference": "there is no more",
        }
        for n in range(40)
    ]
    (directory / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))


def ended(directory: Path, call: Sequence[str], keep: Callable[[Any], Any]) -> dict[str, Any]:
    """How a command line ends, and what is kept of the JSON that it prints."""
    ending, out = run_in_directory(directory, *call)
    return ending | ({"json": keep(json.loads(out))} if "--json" in call and out else {})


def typed(directory: Path) -> dict[str, Any]:
    """Return what the commands print and write, and the figures of a sweep and a search."""
    inputs(directory)
    initial_paths = set(directory.iterdir())
    outputs: dict[str, Any] = {}
    for call in TYPED:
        outputs[" ".join(call)] = ended(
            directory, call, stable_values if call[:-1] in (SWEEP, SEARCH) else shape
        )
    for folder in ("sweep", "search"):
        levels = sorted(path.parent for path in (directory / folder).glob("*/run.json"))
        outputs[f"rows of {folder}"] = {
            path.name: sha(oracle_values.columns(loadgen.load(path).rows)) for path in levels
        }
    files = [
        file
        for path in directory.iterdir()
        if path not in initial_paths
        for file in (path, *path.rglob("*"))
        if file.is_file()
    ]
    outputs["files"] = {
        path.name: sorted(
            file.relative_to(path).as_posix() for file in files if path in file.parents
        )
        for path in sorted({directory / file.relative_to(directory).parts[0] for file in files})
    }
    return outputs | {"formats": formats(files)}


def formats(files: list[Path]) -> dict[str, Any]:
    """Return the keys and columns of result files by file name.

    Files with the same name are merged into one shape.
    """
    outputs: dict[str, Any] = {}
    for file in sorted(files):
        if file.suffix in OPENED:
            form = OPENED[file.suffix](file)
            outputs[file.name] = over(outputs[file.name], form) if file.name in outputs else form
    return outputs


OPENED: dict[str, Callable[[Path], Any]] = {
    ".json": lambda file: shape(json.loads(file.read_bytes())),
    ".jsonl": lambda file: reduce(
        over, [shape(json.loads(line)) for line in file.read_text("utf-8").splitlines()], {}
    ),
    ".csv": lambda file: next(csv.reader(file.read_text("utf-8").splitlines())),
    ".parquet": lambda file: {field.name: str(field.type) for field in pq.read_schema(file)},
}


def record_endpoint_commands(directory: Path) -> dict[str, Any]:
    """Return what the commands without virtual time print and write."""
    inputs(directory)
    with embedded.start(Options(ttft="1ms", itl="0", seed=3)) as server:
        url = {"answers": ["--url", server.url], "mlperf": ["--url", server.url]}
        outputs = {
            " ".join(call): ended(directory, [*call, *url.get(call[0], [])], shape)
            for call in ENDPOINT_COMMANDS
        }
    return outputs | {"formats": formats([*directory.glob("*/*")])}


def planned(directory: Path) -> dict[str, Any]:
    """Fingerprints of the plan of packaged workloads: the recipe of all requests, the schedule."""
    outputs = {}
    for name in ("qa", "rag", "summarization", "agentic"):
        ending, out = run_in_directory(
            directory, "run", name, "--dry-run", "--url", "http://127.0.0.1:9", "--seed", "1"
        )
        printed = dict(re.findall(r"(config|schedule) fingerprint: (\w+)", out))
        outputs[name] = ending | {"recipe": printed["config"], "timetable": printed["schedule"]}
    return outputs


def wrong(directory: Path) -> dict[str, Any]:
    return {" ".join(call): run_in_directory(directory, *call)[0] for call in WRONG}


# -- stored folders --------------------------------------------------------------------------------

READ: dict[str, list[list[str]]] = {
    "raw": [
        *(
            ["export", "raw", "--as", form]
            for form in ("csv", "vllm", "aiperf", "guidellm", "mlcommons")
        ),
        ["compare", "raw", "raw", "--json"],
        ["report", "raw", "--html", "raw.html"],
    ],
    "sweep": [["report", "sweep", "--html", "sweep.html"]],
    "search": [["search", "open.yaml", *SEARCH[2:-2], "--resume", "search", "--json"]],
    "contract": [["validate", "contract", "--json"]],
    "mlperf": [["mlperf", "verdict", "mlperf", "--json"]],
}
"""The folders, and what is asked of each beside `report`, `cost` and `load`."""


def read(name: str, directory: Path) -> dict[str, Any]:
    """Return what the commands print about a stored directory, and what `loadgen.load` returns.

    All figures are included, because nothing is measured here.
    """
    repository_paths.unpack(name, directory)
    shutil.copy(DATA / "open.yaml", directory)
    outputs: dict[str, Any] = {}
    for call in (["report", name, "--json"], ["cost", name, *priced(name)], *READ[name]):
        ending, out = run_in_directory(directory, *call)
        with contextlib.suppress(ValueError):
            ending["json"] = stable_values(json.loads(out))
        if "csv" in call:
            ending["csv"] = {"columns": next(csv.reader(out.splitlines())), "all": sha(out)}
        outputs[" ".join(call)] = ending
    for run in sorted(path.parent for path in (directory / name).rglob("run.json")):
        result = loadgen.load(run)
        document: dict[str, Any] = {"exit": result.exit_code, "ok": result.summary.requests.ok}
        if any(run.rglob("*.parquet")):
            document |= oracle_values.columns(result.rows)
        outputs[f"load {run.relative_to(directory).as_posix()}"] = document
    return outputs


# -- all of it -------------------------------------------------------------------------------------

FROZEN: dict[str, dict[str, Callable[[Path], Any]]] = {
    "names": {name: lambda _, make=make: make() for name, make in public_names.NAMES.items()},
    "commands": {
        "typed": typed,
        "asked": record_endpoint_commands,
        "wrong": wrong,
        "planned": planned,
    },
    "runs": {
        **{name: lambda where, name=name: run(name, where) for name in RUNS},
        "sent": sent,
        "poisson": due,
    },
    "folders": {name: lambda where, name=name: read(name, where) for name in READ},
}
"""The functions that make the entries of each file in `data/oracle/`, by file name without ending.

Each function works in an empty directory.
"""


def main() -> None:
    for name, entries in FROZEN.items():
        outputs = {}
        for entry, make in entries.items():
            with tempfile.TemporaryDirectory() as scratch:
                outputs[entry] = make(Path(scratch))
        (DATA / f"{name}.json").write_text(oracle_values.written(outputs) + "\n", "utf-8")


if __name__ == "__main__":
    main()
