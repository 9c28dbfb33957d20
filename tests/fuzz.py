"""Coverage-guided fuzzing of one parser.

Usage: `python tests/fuzz.py NAME [INPUTS]`. It needs `pip install atheris`.

Fuzzing begins with the stored inputs, tries INPUTS new ones (a million by default) and stops at the
first bug, whose input it prints. Half of the new inputs are damaged bytes. For parsers of documents
the other half are documents with a damaged value (`fuzz_documents.py`). If no bug is found, the
inputs are reduced to a small set that reaches the same code. At most KEPT of them are stored in
tests/data/fuzz/NAME.txt (one per line, in base 85), and `test_fuzz.py` replays them.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

INSTRUMENTED = [  # all else only slows it down
    "loadgen_sdk.wire_formats",
    "loadgen_sdk.transport.http1",
    "loadgen_sdk.transport.target",
    "loadgen_sdk.probe.server_info",
    "loadgen.core.workload",
    "loadgen.contracts",
    "loadgen.pricing.price_file",
    "loadgen.cli.targets",
    "loadgen.core.workload.dataset",
    "loadgen.interop",
    "loadgen.results",
    "loadgen.core.run_folder",
    "loadgen.core.server_metrics.series",
    "loadgen.sim.server.request_parser",
    "loadgen.bundle.archive",
    "loadgen.answers.questions",
    "loadgen.sim.presets.preset",
    "loadgen.render",
]
KEPT_BYTES = 120  # inputs per target
LONGEST = 2_000  # bytes of an input that is kept
WORD = re.compile(rb"[A-Za-z_][A-Za-z_0-9.-]{2,30}")


def fuzz(name: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from fuzz_targets import corpus, run_target
    from fuzz_documents import TREES, changed

    def run_input(data: bytes) -> None:
        run_target(name, data)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        if not documents or random.random() < 0.5:
            return bytes(atheris.Mutate(data, most))
        return changed(name, random.choice(documents) if random.random() < 0.2 else data, random)[
            :most
        ]

    documents = (
        [data for data in corpus(name) if run_target(name, data) == ""] if name in TREES else []
    )
    command = f"{sys.executable} {__file__} --one {name}"  # how a merge starts itself anew
    atheris.Setup([command, *arguments], run_input, custom_mutator=mutate)
    atheris.Fuzz()


def main(name: str, inputs: int) -> int:
    from fuzz_targets import CORPUS, corpus

    with tempfile.TemporaryDirectory() as scratch:
        tried, merged_dir = Path(scratch, "tried"), Path(scratch, "kept")
        tried.mkdir()
        merged_dir.mkdir()
        begin_with = corpus(name)
        for data in begin_with:
            (tried / hashlib.sha256(data).hexdigest()).write_bytes(data)
        tokens = {"null"} | {word.decode() for data in begin_with for word in WORD.findall(data)}
        Path(scratch, "words").write_text("".join(f'"{word}"\n' for word in sorted(tokens)))
        command = [sys.executable, __file__, "--one", name, f"-artifact_prefix={scratch}/"]
        limits = [
            "-timeout=60",
            "-rss_limit_mb=4096",
            f"-max_len={max(40_000, 2 * max(map(len, begin_with)))}",
            f"-dict={scratch}/words",
        ]
        if code := subprocess.run(
            [*command, *limits, f"-runs={inputs}", str(tried)], check=False
        ).returncode:
            for bug in Path(scratch).glob("*-*"):
                print(f"{bug.name}: {bug.read_bytes()!r}"[:2000])
            return code
        subprocess.run([*command, "-set_cover_merge=1", str(merged_dir), str(tried)], check=True)
        data = sorted((path.read_bytes() for path in merged_dir.iterdir()), key=len)
        lines = sorted(
            base64.b85encode(byte).decode()
            for byte in data[:KEPT_BYTES]
            if 0 < len(byte) <= LONGEST
        )
        (CORPUS / f"{name}.txt").write_text("\n".join(lines) + "\n")
        print(f"{name}: {inputs:,} inputs; kept {len(lines)} of {len(data)} with the same coverage")
    return 0


if __name__ == "__main__":
    os.chdir(Path(__file__).parent.parent)
    if sys.argv[1] == "--one":
        fuzz(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000))
