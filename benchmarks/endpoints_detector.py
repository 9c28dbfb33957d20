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

DETECTOR_PATHS = (
    "src/inference_endpoint/metrics/steady_state_diagnostics.py",
    "scripts/steady_state_diagnostics.py",
)
"""Where the detector is in a checkout. It moved from `scripts` to `src` in September 2026."""


def find_detector(checkout: Path) -> Path | None:
    """Return the file of the detector in a checkout, None if there is none."""
    for path in DETECTOR_PATHS:
        if (checkout / path).is_file():
            return checkout / path
    return None


def load_detector(file: Path, checkout: Path) -> ModuleType:
    """Import the detector from its file. Newer versions import their package, too."""
    sys.path.insert(0, str(checkout / "src"))
    spec = importlib.util.spec_from_file_location("steady_state_diagnostics", file)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def count_words(texts: Sequence[str]) -> list[int]:
    """Return the words of each text. The logs have one word per token: no tokenizer is needed."""
    return [len(text.split()) for text in texts]


def detect(detector: ModuleType, job: dict[str, Any]) -> dict[str, Any]:
    """Return the result of the detector for one event log, as JSON objects and lists."""
    result = detector.run(job["events"], superpass_size=job["size"], count_tokens=count_words)
    steady_state = result["steady_state"]
    if not isinstance(steady_state, dict):  # newer versions return msgspec structs
        import msgspec

        steady_state = msgspec.to_builtins(steady_state)
    warmup = result["warmup"] if "warmup" in result else steady_state["warmup"]
    return {"steady_state": steady_state, "warmup": warmup}


def print_detections() -> None:
    """Print the detector's result for each event log on standard input."""
    checkout = Path(sys.argv[1])
    file = find_detector(checkout)
    if file is None:
        raise SystemExit(f"{checkout} has no {' or '.join(DETECTOR_PATHS)}")
    detector = load_detector(file, checkout)
    for line in sys.stdin:
        print(json.dumps(detect(detector, json.loads(line))), flush=True)


if __name__ == "__main__":
    print_detections()
