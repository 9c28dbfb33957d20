"""Coverage-guided fuzzing of one parser: `python tests/fuzz.py NAME [SECONDS]`; needs `pip install atheris`.

It begins with the inputs that are kept, and stops at the first bug, whose input it prints. After a clean end the
shortest of the inputs that reached something new are kept too (tests/data/fuzz/NAME.txt, one per line, base 85);
`test_fuzz.py` replays them in CI.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

INSTRUMENTED = [  # all else only slows it down
    "loadgen_sdk.dialects", "loadgen_sdk.transport.http1", "loadgen_sdk.transport.target",
    "loadgen_sdk.probe.server_facts", "loadgen.workload", "loadgen.contracts", "loadgen.cost.price_file",
    "loadgen.execution.targets", "loadgen.workload.dataset", "loadgen.interop", "loadgen.results", "loadgen.run_folder",
    "loadgen.server_metrics.series", "loadgen.sim.server.request_parser",
]  # fmt: skip
KEPT = 120  # inputs per target: those that were there, then the shortest new ones
LONGEST = 2_000  # bytes of an input that is kept


def fuzz(name: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from fuzz_targets import told

    def one(data: bytes) -> None:
        told(name, data)

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def main(name: str, seconds: int) -> int:
    from fuzz_targets import CORPUS, corpus

    with tempfile.TemporaryDirectory() as scratch:
        inputs = Path(scratch, "inputs")
        inputs.mkdir()
        begun_with = set(corpus(name))
        for data in begun_with:
            (inputs / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
        limits = ["-timeout=20", "-rss_limit_mb=4096", "-max_len=40000", f"-max_total_time={seconds}"]
        command = [sys.executable, __file__, "--one", name, f"-artifact_prefix={scratch}/", *limits, str(inputs)]
        code = subprocess.run(command, check=False).returncode
        for crash in Path(scratch).glob("*-*"):
            print(f"{crash.name}: {crash.read_bytes()!r}"[:2000])
        if code:
            return code
        reached = sorted(
            (path.read_bytes() for path in inputs.iterdir()), key=lambda data: (data not in begun_with, len(data))
        )
        kept = [base64.b85encode(data).decode() for data in reached if 0 < len(data) <= LONGEST][:KEPT]
        CORPUS.mkdir(exist_ok=True)
        (CORPUS / f"{name}.txt").write_text("\n".join(sorted(kept)) + "\n")
        print(f"{len(kept)} inputs kept in {CORPUS / name}.txt")
    return 0


if __name__ == "__main__":
    os.chdir(Path(__file__).parent.parent)
    if sys.argv[1] == "--one":
        fuzz(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60))
