"""`loadgen schema`: the JSON Schema of workload files, for editors that complete them.

`loadgen.workload` defines what a workload file can contain.
"""

from __future__ import annotations

import json


def schema() -> None:
    """Print the JSON Schema of a workload file (draft 2020-12) to stdout.

    Example: loadgen schema > workload.schema.json
    """
    from loadgen.workload import json_schema

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
