"""What a prompt costs: CPU per 1,000 prompt tokens, from its number to JSON-ready text, and the start before the first.

    python benchmarks/prompts.py [--tokenizer tokenizer.json]

The limit is 0.2 ms per 1,000 tokens with the packaged words. With a tokenizer of one's own each text is counted as
well, which costs what that tokenizer costs. Each line is the best of five passes, in CPU time of this process.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import rig

from loadgen.core.requests import tokenizer as tokens
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.digest import Digest
from loadgen.core.workload import FixedTokens, Synthetic, Turns, UniformTokens

START = """if True:
    import time, numpy
    from loadgen.core.workload import FixedTokens, Synthetic
    requests = Synthetic(input_tokens=FixedTokens(value=1300), output_tokens=FixedTokens(value=500))
    begin = time.process_time()
    from types import SimpleNamespace
    from loadgen.core.requests.build import build_prompts
    from loadgen.core.requests.tokenizer import load_tokenizer
    build_prompts(SimpleNamespace(requests=requests), 1, 2, load_tokenizer())[0]
    print((time.process_time() - begin) * 1000)
"""


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--tokenizer", help="a tokenizer.json of one's own")
    parser.add_argument("--tokens", type=int, default=200_000, help="of prompts, in each pass")
    parser.add_argument("--rounds", type=int, default=5)
    given = rig.given(parser, tokens=20_000, rounds=1)
    tokenizer = tokens.load_tokenizer(given.tokenizer)
    turns = Turns(count=4, tool_result_tokens=FixedTokens(value=500))
    shapes: dict[str, dict[str, Any]] = {
        "20 tokens": {"input_tokens": FixedTokens(value=20)},
        "150 tokens": {"input_tokens": FixedTokens(value=150)},
        "150 to 450 tokens": {"input_tokens": UniformTokens(min=150, max=450)},
        "1,302 tokens": {"input_tokens": FixedTokens(value=1302)},
        "1,302 tokens, 1,000 of them shared": {
            "input_tokens": FixedTokens(value=1302),
            "shared_prefix_tokens": 1000,
        },
        "agentic task, 4 turns": {
            "input_tokens": FixedTokens(value=1125),
            "output_tokens": FixedTokens(value=250),
            "turns": turns,
        },
        "10,000 tokens": {"input_tokens": FixedTokens(value=10_000)},
    }
    starts = [
        subprocess.run([sys.executable, "-c", START], check=True, capture_output=True)
        for _ in range(given.rounds)
    ]
    print(
        f"start to first prompt, after the workload is read: {min(float(one.stdout) for one in starts):.1f} ms CPU\n"
    )
    rows = []
    for name, shape in shapes.items():
        requests = Synthetic.model_construct(**{"output_tokens": FixedTokens(value=500), **shape})
        made = build_prompts(SimpleNamespace(requests=requests), 1, 2, tokenizer)
        total, n = 0, 0
        while total < given.tokens:
            total, n = total + (made.requested_input_tokens(n) or 0), n + 1
        built = [made[number] for number in range(n)]
        digest = Digest()

        def encode(made: Any = made, n: int = n) -> None:
            for i in range(n):
                msgspec.json.encode(made[i].messages or made[i].prompt)

        def hash_all(built: Any = built, digest: Digest = digest) -> None:
            digest.add(enumerate(built))

        spent, hashed = (rig.cpu_s(work, rounds=given.rounds) for work in (encode, hash_all))
        rows.append(
            [
                name,
                f"{spent / total * 1e6:.4f}",
                f"{spent / n * 1e6:.1f}",
                f"{hashed / n * 1e6:.1f}",
            ]
        )
    print(rig.table(["prompts", "ms / 1,000 tokens", "µs / request", "µs / digest"], rows))


if __name__ == "__main__":
    main()
