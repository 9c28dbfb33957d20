"""How much CPU time does it take to build prompts?

    python benchmarks/prompts.py [--tokenizer tokenizer.json]

It prints the time before the first prompt, and for each shape of a workload the CPU time per 1,000
prompt tokens from the request number to JSON-ready text. The limit is 0.2 ms with the packaged
words. With another tokenizer every text is also counted, which costs what that tokenizer costs.
Each line is the best of five passes, in CPU time of this process. It takes about a minute.
"""

from __future__ import annotations

import argparse
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


SHAPES: dict[str, dict[str, Any]] = {
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
        "turns": Turns(count=4, tool_result_tokens=FixedTokens(value=500)),
    },
    "10,000 tokens": {"input_tokens": FixedTokens(value=10_000)},
}


def measure_start_ms(rounds: int) -> float:
    """Return the CPU-ms from a read workload to its first prompt: the smallest of some starts."""
    starts = [
        subprocess.run([sys.executable, "-c", START], check=True, capture_output=True)
        for _ in range(rounds)
    ]
    return min(float(completed.stdout) for completed in starts)


def measure_shape(
    name: str, shape: dict[str, Any], tokenizer: tokens.Tokenizer, args: argparse.Namespace
) -> list[str]:
    """Return the row of a shape: what its prompts cost per token and per request.

    A digest is a hash over the prompts of a run.
    """
    requests = Synthetic.model_construct(**{"output_tokens": FixedTokens(value=500), **shape})
    prompts = build_prompts(SimpleNamespace(requests=requests), 1, 2, tokenizer)
    total_tokens = 0

    prompt_count = 0
    while total_tokens < args.tokens:
        total_tokens += prompts.requested_input_tokens(prompt_count) or 0
        prompt_count += 1

    built_prompts = [prompts[number] for number in range(prompt_count)]
    digest = Digest()

    def build_and_encode() -> None:
        """Build each prompt and encode it as JSON."""
        for number in range(prompt_count):
            prompt = prompts[number]
            msgspec.json.encode(prompt.messages or prompt.prompt)

    def hash_all() -> None:
        """Add all prompts to the digest."""
        digest.add(enumerate(built_prompts))

    encode_s = rig.measure_cpu_s(build_and_encode, rounds=args.rounds)
    hash_s = rig.measure_cpu_s(hash_all, rounds=args.rounds)
    return [
        name,
        f"{encode_s / total_tokens * 1e6:.4f}",
        f"{encode_s / prompt_count * 1e6:.1f}",
        f"{hash_s / prompt_count * 1e6:.1f}",
    ]


def main() -> None:
    """Print the CPU cost of building prompts for each shape of a workload."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--tokenizer", help="a tokenizer.json of one's own")
    parser.add_argument("--tokens", type=int, default=200_000, help="of prompts, in each pass")
    parser.add_argument("--rounds", type=int, default=5)
    args = rig.parse_arguments(parser, tokens=20_000, rounds=1)
    tokenizer = tokens.load_tokenizer(args.tokenizer)
    print(
        f"start to first prompt, after the workload is read: "
        f"{measure_start_ms(args.rounds):.1f} ms CPU\n"
    )
    rows = [measure_shape(name, shape, tokenizer, args) for name, shape in SHAPES.items()]
    print(rig.format_table(["prompts", "ms / 1,000 tokens", "µs / request", "µs / digest"], rows))


if __name__ == "__main__":
    main()
