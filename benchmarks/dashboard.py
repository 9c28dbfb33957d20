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
from typing import Any, NamedTuple

import rig

DASHBOARD_PATH = rig.BENCHMARKS_DIR.parent / "docs" / "grafana.json"

# The configuration of Prometheus, with the port that it scrapes
PROMETHEUS_CONFIG = """
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

# Queries are sent after this fraction of the load: all metrics have values by then, and the load
# still runs.
QUERY_AFTER_FRACTION = 0.8
QUERY_TIMEOUT_S = 10

COLUMNS = ("panel", "values", "query")


class DashboardQuery(NamedTuple):
    """A query of the dashboard, in PromQL, and the title of the panel that shows it."""

    panel_title: str
    promql: str


class QueryResult(NamedTuple):
    """A query of the dashboard and its values, one per time series, without NaN."""

    query: DashboardQuery
    values: list[float]


def list_queries(panels: Sequence[dict[str, Any]]) -> Iterator[DashboardQuery]:
    """Yield the queries of panels of a Grafana dashboard, and of the panels nested in them."""
    for panel in panels:
        yield from list_queries(panel.get("panels", []))
        for target in panel.get("targets", []):
            yield DashboardQuery(panel["title"], target["expr"])


def query_prometheus(port: int, promql: str) -> list[float]:
    """Return the current value of each time series that a query selects, without NaN."""
    parameters = urllib.parse.urlencode({"query": promql})
    url = f"http://127.0.0.1:{port}/api/v1/query?{parameters}"
    with urllib.request.urlopen(url, timeout=QUERY_TIMEOUT_S) as response:
        reply: dict[str, Any] = json.load(response)
    assert reply["status"] == "success", reply

    values = []
    for time_series in reply["data"]["result"]:
        _time_s, value_text = time_series["value"]
        values.append(float(value_text))
    return [value for value in values if not math.isnan(value)]


def query_dashboard(port: int) -> list[QueryResult]:
    """Send each query of the dashboard to Prometheus and return the values."""
    dashboard = json.loads(DASHBOARD_PATH.read_text())
    return [
        QueryResult(query, query_prometheus(port, query.promql))
        for query in list_queries(dashboard["panels"])
    ]


def find_free_port() -> int:
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


def prepare_prometheus(program: str, folder: Path, port: int, metrics_port: int) -> list[str]:
    """Write the configuration of Prometheus and return the command that starts it.

    It serves queries on `port` and scrapes `metrics_port`.
    """
    config_path = folder / "prometheus.yml"
    config_path.write_text(PROMETHEUS_CONFIG.format(port=metrics_port))
    return [
        program,
        f"--config.file={config_path}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]


def prepare_load(folder: Path, url: str, metrics_port: int, duration_s: float) -> list[str]:
    """Write a workload file and return the command that runs it and serves its metrics."""
    workload_path = folder / "load.yaml"
    workload_path.write_text(WORKLOAD)
    return [
        sys.executable,
        "-m",
        "loadgen",
        "run",
        str(workload_path),
        f"--url={url}",
        f"--duration={duration_s}s",
        f"--prometheus=:{metrics_port}",
        f"--out={folder / 'run'}",
        "--progress=off",
        "--set=limit=failure_share:50%",  # the server makes requests fail on purpose
    ]


def measure_dashboard(prometheus: str, duration_s: float) -> list[QueryResult]:
    """Run a load and Prometheus, and return the values of all queries shortly before the end."""
    port = find_free_port()
    metrics_port = find_free_port()
    with (
        tempfile.TemporaryDirectory() as scratch,
        rig.serve_endpoint(ttft="40ms", itl="5ms", faults="http_500:0.1") as server,
    ):
        folder = Path(scratch)
        prometheus_command = prepare_prometheus(prometheus, folder, port, metrics_port)
        load_command = prepare_load(folder, server.url, metrics_port, duration_s)
        with run_in_background(prometheus_command), run_in_background(load_command):
            time.sleep(duration_s * QUERY_AFTER_FRACTION)
            return query_dashboard(port)


def format_result(result: QueryResult) -> list[str]:
    """Return the row of a query with its values."""
    values_text = ", ".join(f"{value:.4g}" for value in result.values)
    return [result.query.panel_title, values_text or "NOTHING", f"`{result.query.promql}`"]


def main() -> int:
    """Print the values of each query; return 1 if one has none."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of the load")
    smoke_defaults = {"seconds": 12.0}
    args = rig.parse_arguments(parser, **smoke_defaults)

    prometheus = shutil.which("prometheus")
    if prometheus is None:
        rig.skip_script("no prometheus on this machine (Debian: apt-get install prometheus)")

    results = measure_dashboard(prometheus, args.seconds)
    print(rig.format_table(COLUMNS, [format_result(result) for result in results]))

    empty_queries = sum(not result.values for result in results)
    print(f"\n{empty_queries} queries without a value")
    return 1 if empty_queries and not args.smoke else 0


if __name__ == "__main__":
    sys.exit(main())
