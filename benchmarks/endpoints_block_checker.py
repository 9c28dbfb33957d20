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

STEADY_STATE_RULE_PREFIX = "steady-state"


def check_point(point: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return what the submission checker finds in the steady state of a point.

    `point` is the content of a point.yaml. Each finding is the name of the rule, the severity and
    the message. The checker also has rules about other parts of a point, which are left out.
    """
    # mypy runs in an environment without the checker, so this is no import statement.
    models: Any = importlib.import_module("submission_checker.models")
    config = models.PointConfig.model_validate(point)
    # Validation does not raise: the checker stores its findings in a private attribute.
    return [
        (finding.rule, finding.severity.value, finding.message)
        for finding in config._check_results
        if finding.rule.startswith(STEADY_STATE_RULE_PREFIX)
    ]


def print_findings() -> None:
    """Print the checker's findings about each point, which is a line of standard input."""
    for line in sys.stdin:
        point = json.loads(line)
        print(json.dumps(check_point(point)), flush=True)


if __name__ == "__main__":
    print_findings()
