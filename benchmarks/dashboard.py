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
from collections.abc import Iterator
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


def main() -> int:
    """Print the values of each query; return 1 if one has none."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of the load")
    args = rig.parse_arguments(parser, seconds=12.0)
    program = shutil.which("prometheus")
    if program is None:
        rig.skip_script("no prometheus on this machine (Debian: apt-get install prometheus)")
    port, metrics_port = free_port(), free_port()
    with contextlib.ExitStack() as stack:
        scratch_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(
            rig.serve_endpoint(ttft="40ms", itl="5ms", faults="http_500:0.1")
        ).url
        (scratch_dir / "prometheus.yml").write_text(CONFIG.format(port=metrics_port))
        (scratch_dir / "load.yaml").write_text(WORKLOAD)
        for command in (
            [
                program,
                f"--config.file={scratch_dir / 'prometheus.yml'}",
                f"--storage.tsdb.path={scratch_dir / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=error",
            ],
            [
                sys.executable,
                "-m",
                "loadgen",
                "run",
                str(scratch_dir / "load.yaml"),
                "--url",
                url,
                "--set",
                "limit=failure_share:50%",
                "--prometheus",
                f":{metrics_port}",
                "--out",
                str(scratch_dir / "run"),
                "--progress",
                "off",
                "--duration",
                f"{args.seconds}s",
            ],
        ):
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            stack.callback(process.terminate)
        time.sleep(args.seconds * 0.8)
        rows, empty_queries = [], 0
        for title, query in list_queries(json.loads(DASHBOARD.read_text())["panels"]):
            values = [float(sample["value"][1]) for sample in query_prometheus(port, query)]
            numbers = [value for value in values if not math.isnan(value)]
            empty_queries += not numbers
            rows.append(
                [title, ", ".join(f"{value:.4g}" for value in numbers) or "NOTHING", f"`{query}`"]
            )
    print(rig.format_table(["panel", "values", "query"], rows))
    print(f"\n{empty_queries} queries without a value")
    return 1 if empty_queries and not args.smoke else 0


if __name__ == "__main__":
    sys.exit(main())
