"""Does every query of docs/grafana.json return values in a real Prometheus?

    python benchmarks/dashboard.py

It needs the program `prometheus` (Debian: apt-get install prometheus). It runs a load with some
failures for 40 s, scrapes it once a second, and prints the values of every query of every panel.
Exit code 1 if a query has no value.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import rig

DASHBOARD = rig.BENCHMARKS_DIR.parent / "docs" / "grafana.json"
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: loadgen
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""
WORKLOAD = """
name: dashboard
requests: {input_tokens: 40, output_tokens: 40}
stages: [{name: load, arrival: {constant: 20/s}}]
"""


def list_queries(panels: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the panel title and the query of each target, nested panels included."""
    for panel in panels:
        yield from list_queries(panel.get("panels", []))
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def query_prometheus(port: int, query: str) -> list[Any]:
    """Return the result of an instant query."""
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=10) as response:
        result: dict[str, Any] = json.load(response)
    assert result["status"] == "success", result
    return list(result["data"]["result"])


def free_port() -> int:
    """Return a TCP port that is free at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextlib.contextmanager
def run_in_background(command: Sequence[str]) -> Iterator[None]:
    """Run a command during the `with` block, and terminate it at its end."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


def prometheus_command(program: str, folder: Path, port: int, metrics_port: int) -> list[str]:
    """Write the configuration of Prometheus; return the command that scrapes the metrics port."""
    config_path = folder / "prometheus.yml"
    config_path.write_text(CONFIG.format(port=metrics_port))
    return [
        program,
        f"--config.file={config_path}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]


def load_command(folder: Path, url: str, metrics_port: int, seconds: float) -> list[str]:
    """Write the workload; return the command that runs it and reports to the metrics port."""
    workload_path = folder / "load.yaml"
    workload_path.write_text(WORKLOAD)
    target = ["--url", url, "--set", "limit=failure_share:50%"]
    reports = ["--prometheus", f":{metrics_port}", "--out", str(folder / "run")]
    options = ["--progress", "off", "--duration", f"{seconds}s"]
    program = [sys.executable, "-m", "loadgen", "run", str(workload_path)]
    return [*program, *target, *reports, *options]


QUERY_AFTER = 0.8  # of the load, when all metrics have values and the load still runs


def query_dashboard(port: int) -> dict[tuple[str, str], list[float]]:
    """Return the values of each query of the dashboard, by the title of its panel and the query."""
    values_by_query = {}
    for title, query in list_queries(json.loads(DASHBOARD.read_text())["panels"]):
        # A sample is [time, value as text].
        values = [float(sample["value"][1]) for sample in query_prometheus(port, query)]
        values_by_query[title, query] = [value for value in values if not math.isnan(value)]
    return values_by_query


def main() -> int:
    """Print the values of each query; return 1 if one has none."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of the load")
    args = rig.parse_arguments(parser, seconds=12.0)

    program = shutil.which("prometheus")
    if program is None:
        rig.skip_script("no prometheus on this machine (Debian: apt-get install prometheus)")

    port, metrics_port = free_port(), free_port()
    with (
        tempfile.TemporaryDirectory() as scratch,
        rig.serve_endpoint(ttft="40ms", itl="5ms", faults="http_500:0.1") as server,
    ):
        folder = Path(scratch)
        prometheus = prometheus_command(program, folder, port, metrics_port)
        load = load_command(folder, server.url, metrics_port, args.seconds)
        with run_in_background(prometheus), run_in_background(load):
            time.sleep(args.seconds * QUERY_AFTER)
            values_by_query = query_dashboard(port)

    rows = [
        [title, ", ".join(f"{value:.4g}" for value in values) or "NOTHING", f"`{query}`"]
        for (title, query), values in values_by_query.items()
    ]
    empty_queries = sum(not values for values in values_by_query.values())
    print(rig.format_table(["panel", "values", "query"], rows))
    print(f"\n{empty_queries} queries without a value")

    return 1 if empty_queries and not args.smoke else 0


if __name__ == "__main__":
    sys.exit(main())
