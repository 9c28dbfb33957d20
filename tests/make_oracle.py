"""Writes `tests/data/oracle/`: what this version prints, draws and stores, for `test_oracle.py` to hold every later one
to. `python tests/make_oracle.py` writes the expectations again, on purpose; with `--folders` the stored runs too, which
are otherwise left as an older version wrote them: reading those is what they are for.

Only the doors that stay are used: `loadgen.run`, `loadgen.load`, the command line, `__all__`, the files of a folder.
The words of helps and of wrong flags are in part those of typer, the form of the schema is that of pydantic: where a
new version of them says it otherwise, write them again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import loadgen_sdk
import pyarrow as pa
import pyarrow.parquet as pq

import loadgen

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data" / "oracle"
FOLDERS = DATA / "folders"
CALLS = """
import contextlib, io, json, sys
from loadgen.shell.app import main
sys.argv[0] = "loadgen"
told = []
for arguments in json.load(sys.stdin):
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as ending:
            code = ending.code or 0
    told.append([code, *(one.buffer.getvalue().decode() for one in (out, err))])
json.dump(told, sys.stdout)
"""


def calls(where: Path, *arguments: list[str]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each command line, one after the other in one process, in the folder `where`."""
    path = os.pathsep.join(str(Path(str(package.__file__)).parents[1]) for package in (loadgen, loadgen_sdk))
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "SYSTEMROOT") if name in os.environ}
    told = subprocess.run(
        [sys.executable, "-c", CALLS],
        input=json.dumps(arguments),
        env={**keep, "PYTHONPATH": path, "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"},
        cwd=where,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    return [(code, out, err) for code, out, err in json.loads(told.stdout)]


def sha(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def written(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


# -- runs in virtual time ----------------------------------------------------------------------------------------------

OPEN = {
    "name": "open",
    "requests": {"input_tokens": 300, "output_tokens": {"lognormal": {"median": 40, "sigma": 0.5, "max": 200}}},
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
    "requests": {"input_tokens": 200, "output_tokens": 5, "shared_prefix_tokens": 160, "prefixes": 3},
    "stages": [{"arrival": {"constant": "20/s"}, "count": 80}],
}
LEVELS = {
    "name": "levels",
    "requests": {"input_tokens": 100, "output_tokens": 20},
    "stages": [{"arrival": {"closed": lanes}, "count": 20 * lanes} for lanes in (1, 2, 4)],
}
PLAIN = {"name": "plain", "requests": {"input_tokens": 100, "output_tokens": 20}}
RUNS: dict[str, dict[str, Any]] = {
    "open": {"workload": OPEN, "url": "sim:gb300-vm"},
    "closed": {"workload": PLAIN, "url": "sim:h100x8", "concurrency": 8, "num_requests": 120, "slo": "ttft:1s"},
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
    "questions": {"workload": "qa", "url": "sim:gb300-rack", "request_rate": "40", "num_requests": 150, "warmup": "0"},
    "rag": {"workload": "rag", "url": "sim:gb300-vm", "num_requests": 60, "warmup": "5req", "goodput": "ttft:500"},
    "trace": {"trace": DATA / "trace.jsonl", "url": "sim:gb300-vm"},
    "crowded": {"workload": CROWDED, "url": "sim:gb300-vm"},
    "shared": {"workload": SHARED, "url": "sim:h200x8"},
    "cramped": {"workload": "agentic", "url": f"sim:{DATA / 'cramped.yaml'}", "request_rate": "1.5", "duration": "60s"},
    "stopped": {"workload": OPEN, "url": "sim:gb300-vm", "stop_when": ["errors:20%", "e2e:p90:1.45s"]},
    "values": {"workload": PLAIN, "url": "sim:gb300-vm", "api": "embeddings", "request_rate": "90", "num_requests": 99},
}


def run(name: str, where: Path) -> dict[str, Any]:
    """What is frozen of a run: its rows, a hash for every column, and its summary."""
    result = loadgen.run(**RUNS[name], seed=1, out=where / name)
    return {
        "exit": result.exit_code,
        "rows": rows(result.rows),
        "summary": steady(json.loads((where / name / "summary.json").read_bytes())),
    }


def rows(table: pa.Table) -> dict[str, Any]:
    """All columns are the same in every virtual run of a seed, so none is left out. Sorted by slot."""
    table = table.sort_by("slot")
    values = {name: table[name].to_pylist() for name in table.column_names}
    return {"count": table.num_rows, "columns": {name: sha(json.dumps(column)) for name, column in values.items()}}


def steady(summary: Any) -> Any:
    """A summary without what differs between two runs of one seed or between two machines: started and ended are the
    wall clock; host is the machine; version is the package's (of a target it is empty in virtual time); cpu_s,
    peak_rss_bytes and the CPU shares are of this process; command has the folder in it. Floats have 12 digits, as the
    last ones are those of the processor's summing.
    """
    moving = ("started", "ended", "host", "version", "command")
    spent = ("cpu_s", "peak_rss_bytes", "cpu_share_max", "waited_share_max")
    if isinstance(summary, dict):
        return {key: steady(value) for key, value in summary.items() if key not in (*moving, *spent)}
    return rounded(summary, steady)


def rounded(value: Any, inner: Callable[[Any], Any] | None = None) -> Any:
    inner = inner or rounded
    if isinstance(value, dict):
        return {key: inner(one) for key, one in value.items()}
    if isinstance(value, list):
        return [inner(one) for one in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value


def due(where: Path) -> dict[str, Any]:
    """The first 1,000 instants of a Poisson process, from the rows of a run."""
    flags: dict[str, Any] = {"request_rate": "100", "num_requests": 1000, "seed": 3, "schedule_seed": 11}
    table = loadgen.run(PLAIN, url="sim:gb300-vm", **flags, out=where / "poisson").rows.sort_by("slot")
    instants = table["due_ns"].to_pylist()
    return {"count": len(instants), "first": instants[:5], "last": instants[-1], "sha256": sha(json.dumps(instants))}


SENT = ("slot", "request", "session", "turn", "stage", "worker", "status", "kind", "finish_reason", "due_ns",
        "asked_output", "output_tokens", "output_source", "input_source", "target")  # fmt: skip
"""Columns that the clock has no part in."""


def sent(where: Path) -> dict[str, Any]:
    """A run over HTTP, in real time, to the embedded endpoint: what of its rows is the same each time."""
    flags: dict[str, Any] = {"request_rate": "100", "num_requests": 40, "seed": 5, "embedded": {"ttft": "3ms"}}
    table = loadgen.run({**PLAIN, "requests": OPEN["requests"]}, **flags, out=where / "sent").rows
    return rows(table.select([name for name in SENT if name in table.column_names]))


# -- sweep and search --------------------------------------------------------------------------------------------------

LADDER = ["--url", "sim:gb300-vm", "--seed", "1"]
SWEEP = ["sweep", "open.yaml", *LADDER, "--request-rate", "10,40", "-n", "40", "--warmup", "0", "--out", "sweep"]
SEARCH = ["search", "open.yaml", *LADDER, "--slo", "tpot:20.6ms:p90", "--low", "4", "--high", "64", "-d", "10s",
          "--precision", "0.3", "--max-probes", "5", "--out", "search"]  # fmt: skip


DAY = re.compile(r"\b20\d\d-\d\d-\d\d\b")
"""Today's, which the table of a sweep has in its head."""


def ladder(where: Path, call: list[str]) -> dict[str, Any]:
    """What a sweep or a search prints and leaves: its own files, and the rows and summary of every level."""
    shutil.copy(DATA / "open.yaml", where)
    folder = where / call[-1]
    (told,) = calls(where, [*call, "--json"])
    found: dict[str, Any] = {"exit": told[0], "printed": steady(json.loads(told[1]))}
    for file in sorted(folder.iterdir()):
        if file.suffix == ".json":
            found[file.name] = steady(json.loads(file.read_bytes()))
        elif file.suffix == ".jsonl":
            found[file.name] = [steady(json.loads(line)) for line in file.read_text().splitlines()]
        elif file.suffix in (".csv", ".md"):
            found[file.name] = DAY.sub("DAY", file.read_text()).splitlines()
        elif file.is_dir():
            summary = steady(json.loads((file / "summary.json").read_bytes()))
            found[file.name] = {"rows": rows(loadgen.load(file).rows), "summary": sha(written(summary))}
    return found


# -- words, names, forms -----------------------------------------------------------------------------------------------


def helps() -> dict[str, str]:
    """`--help` of every command: the ones that a help lists are asked in their turn."""
    found: dict[str, str] = {}
    asked: list[list[str]] = [[]]
    while asked:
        told = calls(ROOT, *([*path, "--help"] for path in asked))
        assert all((code, err) == (0, "") for code, _, err in told)
        found |= {"-".join(("loadgen", *path)): out for path, (_, out, _) in zip(asked, told, strict=True)}
        asked = [[*path, name] for path, (_, out, _) in zip(asked, told, strict=True) for name in commands(out)]
    return found


def commands(text: str) -> Iterator[str]:
    """Those of a help: two spaces, a name; continued descriptions have more spaces."""
    _, _, listed = text.partition("\nCommands:\n" if "\nCommands:\n" in text else "\nStart:\n")
    for line in listed.splitlines():
        if line.startswith("  ") and line[2:3] not in ("", " "):
            yield line.split()[0]


WRONG = [
    ["nonsense"],
    ["run", "qa", "--nope"],
    ["run", "no-such-workload"],
    ["run", "qa", "--gpus", "none"],
    ["run", "qa", "--slo", "ttft:2x", "--server", "unknown", "--workers", "0", "--extra-body", "[1]"],
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


def wrong(where: Path) -> list[dict[str, Any]]:
    told = calls(where, *WRONG)
    return [
        {"call": " ".join(call), "exit": code, "stdout": out.splitlines(), "stderr": err.splitlines()}
        for call, (code, out, err) in zip(WRONG, told, strict=True)
    ]


def fingerprints(where: Path) -> dict[str, list[str]]:
    """The plan of every packaged workload: stages, sizes, fingerprints of recipe and timetable."""
    names = ["qa", "rag", "summarization", "agentic"]
    told = calls(where, *(["run", name, "--dry-run", "--url", "http://127.0.0.1:9", "--seed", "1"] for name in names))
    assert all(code == 0 for code, _, _ in told)
    return {name: out.splitlines() for name, (_, out, _) in zip(names, told, strict=True)}


def names() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {
        "loadgen": list(loadgen.__all__),
        "loadgen_sdk": list(loadgen_sdk.__all__),
        "scripts": project["scripts"],
        "entry-points": project["entry-points"],
    }


def schema() -> str:
    ((code, out, _),) = calls(ROOT, ["schema"])
    assert code == 0
    return out


def reference() -> dict[str, str]:
    """The published figures that are shipped."""
    forms = [["reference"], ["reference", "--json"], ["reference", "--markdown"]]
    return {" ".join(form): sha(out) for form, (_, out, _) in zip(forms, calls(ROOT, *forms), strict=True)}


def columns(where: Path) -> dict[str, list[str]]:
    """Names and types of the Parquet file of a run, and of the table that Python gives."""
    result = loadgen.run(SHARED, url="sim:gb300-vm", seed=1, out=where / "columns")
    (file,) = (where / "columns").rglob("*.parquet")
    forms = {"stored": pq.read_schema(file), "loaded": result.rows.schema}
    return {name: [f"{field.name}: {field.type}" for field in form] for name, form in forms.items()}


# -- folders of an older version ---------------------------------------------------------------------------------------

READ: dict[str, list[list[str]]] = {
    "raw": [
        ["report", "raw", "--json"],
        ["report", "raw", "--no-html"],
        ["compare", "raw", "raw"],
        *(["export", "raw", "--as", form] for form in ("csv", "vllm", "aiperf", "guidellm", "mlcommons")),
        ["cost", "raw", "--accept-sample-prices", "--price", "raw=bedrock-llama-2-70b", "--json"],
        ["cost", "raw", "--accept-sample-prices", "--price", "raw=bedrock-llama-2-70b"],
        ["report", "raw", "--html", "raw.html"],
    ],
    "sample": [["report", "sample", "--json"], ["report", "sample", "--no-html"]],
    "histogram": [["report", "histogram", "--json"], ["report", "histogram", "--html", "histogram.html"]],
    "sweep": [["report", "sweep", "--json"], ["report", "sweep", "--html", "sweep.html"]],
    "search": [["report", "search", "--json"], ["search", "open.yaml", *SEARCH[2:-2], "--resume", "search"]],
    "contract": [["validate", "contract", "--json"], ["validate", "contract"]],
    "mlperf": [["mlperf", "verdict", "mlperf"], ["mlperf", "verdict", "mlperf", "--json"]],
}


def blocks(page: str) -> list[str]:
    """A hash for each part of a page: two changes of different parts do not touch the same line."""
    parts = re.split(r"(?=<(?:style|script|header|section|details|table|figure|svg|h[1-6]|footer)\b)", page)
    return [f"{re.split('[ >]', part, maxsplit=1)[0]} {sha(part)[:16]}" for part in parts if part.strip()]


def read(name: str, where: Path) -> list[dict[str, Any]]:
    """What the commands print of a folder, and `loadgen.load` gives: all of it, as nothing is measured here."""
    with tarfile.open(FOLDERS / f"{name}.tar.xz") as packed:
        packed.extractall(where, filter="data")
    shutil.copy(DATA / "open.yaml", where)
    told = calls(where, *READ[name])
    found: list[dict[str, Any]] = [
        {"call": " ".join(call), "exit": code, "stdout": shown(out), "stderr": err.splitlines()}
        for call, (code, out, err) in zip(READ[name], told, strict=True)
    ]
    found += [{"page": page.name, "blocks": blocks(page.read_text("utf-8"))} for page in where.glob("*.html")]
    for run in sorted(path.parent for path in (where / name).rglob("run.json")):
        result = loadgen.load(run)
        given: dict[str, Any] = {"load": run.relative_to(where).as_posix(), "exit": result.exit_code}
        made_here = run.name.endswith("-sustain")  # by the search that goes on: what it used varies
        given["text"] = [line for line in str(result).splitlines() if not (made_here and line.startswith("Client"))]
        if any(run.rglob("*.parquet")):
            given["rows"] = rows(result.rows)
        found.append(given)
    return found


def shown(out: str) -> Any:
    try:
        return rounded(json.loads(out))
    except ValueError:
        return out.splitlines()


CONTRACT = """\
name: carried
slo: {ttft: 1s, tpot: 60ms}
levels:
  - name: steady
    workload: open.yaml
    rate: 8/s
    requests: 120
    must:
      - tpot: {limit: 60ms, at: p50}
      - errors: 5%
    should:
      - ttft: {limit: 1ms, at: p50}
"""
HOST = {"name": "load-1", "kernel": "Linux 6.8.0", "python": "3.12.4", "cpu": "EPYC", "cpus": 16, "clock": "tsc"}


def store(where: Path) -> None:
    """Write the folders, take the machine out of them, and pack them."""
    shutil.copy(DATA / "open.yaml", where)
    (where / "carried.yaml").write_text(CONTRACT)
    words = "\n".join(json.dumps({"prompt": f"tell me {'more ' * (n % 7)}", "max_tokens": 50}) for n in range(40))
    (where / "set.jsonl").write_text(words)
    real = ["run", "open.yaml", "--seed", "1", "--gpus", "4", "-n", "60", "--limit", "cpu_share:100%"]
    told = calls(
        where,
        ["run", "open.yaml", *LADDER, "-n", "60", "--out", "raw"],
        [*real, "--keep", "sample", "--out", "sample"],
        [*real, "--keep", "histogram", "--out", "histogram"],
        SWEEP,
        SEARCH,
        ["validate", "carried.yaml", *LADDER[:2], "--out", "contract"],
        ["mlperf", "server", "-b", "llama2-70b", "--target-qps", "10", "--min-duration", "5", "--dataset", "set.jsonl",
         *LADDER[:2], "--out", "mlperf"],
    )  # fmt: skip
    for code, _, err in told:
        assert code not in (2, 70), err
    FOLDERS.mkdir(exist_ok=True)
    for name in READ:
        scrub(where / name)
        with tarfile.open(FOLDERS / f"{name}.tar.xz", "w:xz", preset=9) as packed:
            packed.add(where / name, name, filter=nobody)


def nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def scrub(folder: Path) -> None:
    """No host and no command in any JSON; pages are left out; the manifest is made anew."""
    for file in sorted(folder.rglob("*")):
        if file.name in ("run.json", "summary.json"):
            file.write_text(json.dumps(unnamed(json.loads(file.read_bytes())), indent=1, ensure_ascii=False))
        elif file.name == "report.html":
            file.unlink()
    manifest = folder / "manifest.sha256"
    if manifest.exists():
        files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file != manifest]
        manifest.write_text(
            "".join(f"{sha(one.read_bytes())}  {one.relative_to(folder).as_posix()}\n" for one in files)
        )


def unnamed(value: Any) -> Any:
    if isinstance(value, dict):
        clean = {"host": HOST, "command": ["loadgen", "run"]}
        return {key: clean[key] if key in clean else unnamed(one) for key, one in value.items()}
    return [unnamed(one) for one in value] if isinstance(value, list) else value


# -- all of it ---------------------------------------------------------------------------------------------------------

FROZEN: dict[str, Callable[[Path], Any]] = {
    **{f"runs/{name}": lambda where, name=name: run(name, where) for name in RUNS},
    "runs/sent": sent,
    "runs/poisson": due,
    "runs/sweep": lambda where: ladder(where, SWEEP),
    "runs/search": lambda where: ladder(where, SEARCH),
    "wrong": wrong,
    "fingerprints": fingerprints,
    "names": lambda _: names(),
    "columns": columns,
    "reference": lambda _: reference(),
    **{f"folders/{name}": lambda where, name=name: read(name, where) for name in READ},
}
"""File in `data/oracle/` without its ending -> what makes its content, in an empty folder."""


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        if "--folders" in sys.argv:
            store(Path(scratch))
    for name, make in FROZEN.items():
        with tempfile.TemporaryDirectory() as scratch:
            file = DATA / f"{name}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(written(make(Path(scratch))), "utf-8")
    (DATA / "schema.json").write_text(schema(), "utf-8")
    (DATA / "help").mkdir(exist_ok=True)
    for old in (DATA / "help").glob("*.txt"):
        old.unlink()
    for name, text in helps().items():
        (DATA / "help" / f"{name}.txt").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
