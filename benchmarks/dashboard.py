"""Whether every query of docs/grafana.json gives values in a real Prometheus: `python benchmarks/dashboard.py`.

Needs the program `prometheus` (Debian: apt-get install prometheus). A load of 40 s with some failures at the embedded
endpoint, scraped once a second; each query of each panel is asked in its middle. Grafana itself draws what these say.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parent.parent / "docs" / "grafana.json"
METRICS_PORT, PORT = 9477, 9478
CONFIG = f"""
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: loadgen
    static_configs: [{{targets: ["127.0.0.1:{METRICS_PORT}"]}}]
"""
WORKLOAD = """
name: dashboard
requests: {input_tokens: 40, output_tokens: 40}
stages: [{name: load, arrival: {constant: 20/s}, duration: 40s}]
"""


def queries(panels: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Title of the panel and query, of all panels."""
    for panel in panels:
        yield from queries(panel.get("panels", []))
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def ask(query: str) -> list[Any]:
    """The result of an instant query."""
    url = f"http://127.0.0.1:{PORT}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
    assert found["status"] == "success", found
    return list(found["data"]["result"])


def main() -> int:
    program = shutil.which("prometheus")
    if program is None:
        print("no prometheus on this machine (Debian: apt-get install prometheus)")
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        at = Path(scratch)
        (at / "prometheus.yml").write_text(CONFIG)
        (at / "load.yaml").write_text(WORKLOAD)
        server = subprocess.Popen(
            [program, f"--config.file={at / 'prometheus.yml'}", f"--storage.tsdb.path={at / 'data'}",
             f"--web.listen-address=127.0.0.1:{PORT}", "--log.level=error"]
        )  # fmt: skip
        faulty = subprocess.Popen(
            [sys.executable, "-m", "loadgen", "sim", "--port", "9479", "--ttft", "40ms", "--itl", "5ms",
             "--fault", "http_500:0.1"], stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            time.sleep(5)
            run = subprocess.Popen(
                [sys.executable, "-m", "loadgen", "run", str(at / "load.yaml"), "--url", "http://127.0.0.1:9479",
                 "--limit", "failure_share:50%", "--prometheus", f":{METRICS_PORT}", "--out", str(at / "run"),
                 "--progress", "off"], stdout=subprocess.DEVNULL,
            )  # fmt: skip
            time.sleep(30)
            empty = 0
            for title, query in queries(json.loads(DASHBOARD.read_text())["panels"]):
                values = [float(one["value"][1]) for one in ask(query)]
                known = [value for value in values if not math.isnan(value)]
                empty += not known
                print(f"{title:<28} {', '.join(f'{value:.4g}' for value in known) or 'NOTHING':<24} {query}")
            run.wait()
        finally:
            for process in (server, faulty):
                process.terminate()
                process.wait()
    print(f"{empty} queries without a value")
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
