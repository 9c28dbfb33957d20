"""Whether every query of docs/grafana.json gives values in a real Prometheus.

    python benchmarks/dashboard.py

Needs the program `prometheus` (Debian: apt-get install prometheus). A load with some failures at the embedded
endpoint, scraped once a second; each query of each panel is asked while it goes. Grafana itself draws what these say.
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

DASHBOARD = rig.HERE.parent / "docs" / "grafana.json"
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


def queries(panels: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Title of the panel and query, of all panels."""
    for panel in panels:
        yield from queries(panel.get("panels", []))
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def ask(port: int, query: str) -> list[Any]:
    """The result of an instant query."""
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
    assert found["status"] == "success", found
    return list(found["data"]["result"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def main() -> int:
    parser = rig.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of the load")
    given = rig.given(parser, seconds=12.0)
    program = shutil.which("prometheus")
    if program is None:
        rig.lacking("no prometheus on this machine (Debian: apt-get install prometheus)")
    port, metrics_port = free_port(), free_port()
    with contextlib.ExitStack() as stack:
        at = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(rig.endpoint(ttft="40ms", itl="5ms", faults="http_500:0.1")).url
        (at / "prometheus.yml").write_text(CONFIG.format(port=metrics_port))
        (at / "load.yaml").write_text(WORKLOAD)
        for command in (
            [
                program,
                f"--config.file={at / 'prometheus.yml'}",
                f"--storage.tsdb.path={at / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=error",
            ],
            [
                sys.executable,
                "-m",
                "loadgen",
                "run",
                str(at / "load.yaml"),
                "--url",
                url,
                "--set",
                "limit=failure_share:50%",
                "--prometheus",
                f":{metrics_port}",
                "--out",
                str(at / "run"),
                "--progress",
                "off",
                "--duration",
                f"{given.seconds}s",
            ],
        ):
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            stack.callback(process.terminate)
        time.sleep(given.seconds * 0.8)
        rows, empty = [], 0
        for title, query in queries(json.loads(DASHBOARD.read_text())["panels"]):
            values = [float(one["value"][1]) for one in ask(port, query)]
            known = [value for value in values if not math.isnan(value)]
            empty += not known
            rows.append(
                [title, ", ".join(f"{value:.4g}" for value in known) or "NOTHING", f"`{query}`"]
            )
    print(rig.table(["panel", "values", "query"], rows))
    print(f"\n{empty} queries without a value")
    return 1 if empty and not given.smoke else 0


if __name__ == "__main__":
    sys.exit(main())
