"""Run the steady-state detector of mlcommons/endpoints over event logs, in its own Python.

    PYTHON benchmarks/endpoints_detector.py CHECKOUT < JOBS

`endpoints_steady.py` starts this program. Each line of the input is a JSON object with the path of
an event log (`events`) and its super-pass size (`size`). Each line of the output is the detector's
result. Only the standard library and what the detector itself imports are used.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# It moved from `scripts` to `src` in September 2026.
DETECTOR_PATHS = (
    "src/inference_endpoint/metrics/steady_state_diagnostics.py",
    "scripts/steady_state_diagnostics.py",
)


def find_detector(checkout: Path) -> Path | None:
    """Return the source file of the detector in a checkout of mlcommons/endpoints.

    Return None if the checkout has no detector.
    """
    for relative_path in DETECTOR_PATHS:
        path = checkout / relative_path
        if path.is_file():
            return path
    return None


def load_detector(path: Path, checkout: Path) -> ModuleType:
    """Import the detector from its source file.

    Newer versions import other modules of their package, so its `src` goes on the import path.
    """
    sys.path.insert(0, str(checkout / "src"))
    spec = importlib.util.spec_from_file_location("steady_state_diagnostics", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    # A module with dataclasses must be in sys.modules while it is executed.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def count_words(texts: Sequence[str]) -> list[int]:
    """Return the number of words of each text.

    The detector calls it to count tokens. The event logs have one word per token, so no tokenizer
    is needed.
    """
    return [len(text.split()) for text in texts]


def detect_steady_state(
    detector: ModuleType, log_path: str, super_pass_size: int
) -> dict[str, Any]:
    """Run the detector over an event log and return its result in a JSON form.

    The result has two keys: `steady_state`, with all findings, and `warmup`, the super-passes that
    are dropped at the start. Older versions of the detector return dicts, and newer ones return
    msgspec structs, in which `warmup` is a part of `steady_state`.
    """
    result = detector.run(log_path, superpass_size=super_pass_size, count_tokens=count_words)
    steady_state = result["steady_state"]
    if not isinstance(steady_state, dict):
        import msgspec

        steady_state = msgspec.to_builtins(steady_state)
    warmup = result["warmup"] if "warmup" in result else steady_state["warmup"]
    return {"steady_state": steady_state, "warmup": warmup}


def print_results() -> None:
    """Print the detector's result for each event log that a line of standard input names."""
    checkout = Path(sys.argv[1])
    detector_path = find_detector(checkout)
    if detector_path is None:
        raise SystemExit(f"{checkout} has no {' or '.join(DETECTOR_PATHS)}")

    detector = load_detector(detector_path, checkout)
    for line in sys.stdin:
        job = json.loads(line)
        result = detect_steady_state(detector, job["events"], super_pass_size=job["size"])
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    print_results()
