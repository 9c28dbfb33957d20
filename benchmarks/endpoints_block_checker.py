"""Check `steady_state` blocks with the submission checker of MLPerf Endpoints, in its own Python.

    PYTHON benchmarks/endpoints_block_checker.py < POINTS

`endpoints_steady.py` starts this program. Each line of the input is the content of a `point.yaml`
as a JSON object. Each line of the output is a JSON list with the checker's findings about its
steady state: the rule, the severity and the message.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

RULE_PREFIX = "steady-state"


def check_point(point: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the findings of the checker about the steady state of a point."""
    models: Any = importlib.import_module("submission_checker.models")
    config = models.PointConfig.model_validate(point)
    return [
        (finding.rule, finding.severity.value, finding.message)
        for finding in config._check_results
        if finding.rule.startswith(RULE_PREFIX)
    ]


def print_findings() -> None:
    """Print the findings about each point on standard input."""
    for line in sys.stdin:
        print(json.dumps(check_point(json.loads(line))), flush=True)


if __name__ == "__main__":
    print_findings()
