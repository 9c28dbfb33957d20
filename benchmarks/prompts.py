"""What a prompt costs: CPU per 1,000 prompt tokens, from its number to JSON-ready text, and the start before the first.

    python benchmarks/prompts.py [tokenizer.json]

The limit is 0.2 ms per 1,000 tokens with the packaged words. With a tokenizer of one's own each text is counted as
well, which costs what that tokenizer costs. Each line is the best of five passes, in CPU time of this process.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import msgspec

from loadgen.core.requests import prompts
from loadgen.core.requests import tokenizer as tokens
from loadgen.core.requests.build import build
from loadgen.core.workload import Fixed, Synthetic, Turns, Uniform

START = """if True:
    import time, numpy, msgspec, hashlib, zlib
    begin = time.process_time()
    from types import SimpleNamespace as N
    from loadgen.core.requests.build import build
    from loadgen.core.requests.tokenizer import load_tokenizer
    laws = N(input_tokens=N(tag="fixed", value=1300), output_tokens=N(tag="fixed", value=500), shared_prefix_tokens=0,
             prefixes=1, system_tokens=0, turns=None)
    build(N(requests=laws), 1, 2, load_tokenizer())[0]
    print((time.process_time() - begin) * 1000)
"""


def cpu_s(work: Callable[[], object], passes: int = 5) -> float:
    best = float("inf")
    for _ in range(passes):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best


def main() -> None:
    tokenizer = tokens.load_tokenizer(sys.argv[1] if len(sys.argv) > 1 else None)
    turns = Turns(count=4, tool_result_tokens=Fixed(value=500))
    shapes = {
        "20 tokens": {"input_tokens": Fixed(value=20)},
        "150 tokens": {"input_tokens": Fixed(value=150)},
        "150 to 450 tokens": {"input_tokens": Uniform(min=150, max=450)},
        "1,302 tokens": {"input_tokens": Fixed(value=1302)},
        "1,302 tokens, 1,000 of them shared": {"input_tokens": Fixed(value=1302), "shared_prefix_tokens": 1000},
        "agentic task, 4 turns": {"input_tokens": Fixed(value=1125), "output_tokens": Fixed(value=250), "turns": turns},
        "10,000 tokens": {"input_tokens": Fixed(value=10_000)},
    }
    starts = [subprocess.run([sys.executable, "-c", START], check=True, capture_output=True) for _ in range(5)]
    print(f"start to first prompt, after numpy is imported: {min(float(one.stdout) for one in starts):.1f} ms CPU\n")
    print(f"{'prompts':36}{'ms / 1,000 tokens':>20}{'us / request':>15}{'us / digest':>15}")
    for name, shape in shapes.items():
        requests = Synthetic.model_construct(**{"output_tokens": Fixed(value=500), **shape})
        made = build(SimpleNamespace(requests=requests), 1, 2, tokenizer)
        total, n = 0, 0
        while total < 200_000:
            total, n = total + made.asked_input(n), n + 1
        built = [made[number] for number in range(n)]
        spent = cpu_s(lambda: [msgspec.json.encode(made[i].messages or made[i].prompt) for i in range(n)])  # noqa: B023
        digest = prompts.Digest()
        hashed = cpu_s(lambda: [digest.add(i, built[i]) for i in range(n)])  # noqa: B023
        print(f"{name:36}{spent / total * 1e6:20.4f}{spent / n * 1e6:15.1f}{hashed / n * 1e6:15.1f}")


if __name__ == "__main__":
    main()
