"""How much CPU time does it take to build prompts?

    python benchmarks/prompts.py [--tokenizer tokenizer.json]

It prints the time before the first prompt, and for each shape of a workload the CPU time per 1,000
prompt tokens from the request number to JSON-ready text. The limit is 0.2 ms with the packaged
words. With another tokenizer every text is also counted, which costs what that tokenizer costs.
Each line is the best of five passes, in CPU time of this process. It takes about a minute.
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
    """Print the CPU cost of building prompts for each shape of a workload."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--tokenizer", help="a tokenizer.json of one's own")
    parser.add_argument("--tokens", type=int, default=200_000, help="of prompts, in each pass")
    parser.add_argument("--rounds", type=int, default=5)
    args = rig.parse_arguments(parser, tokens=20_000, rounds=1)
    tokenizer = tokens.load_tokenizer(args.tokenizer)
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
        for _ in range(args.rounds)
    ]
    print(
        f"start to first prompt, after the workload is read: "
        f"{min(float(completed.stdout) for completed in starts):.1f} ms CPU\n"
    )
    rows = []
    for name, shape in shapes.items():
        requests = Synthetic.model_construct(**{"output_tokens": FixedTokens(value=500), **shape})
        prompts = build_prompts(SimpleNamespace(requests=requests), 1, 2, tokenizer)
        total_tokens, prompt_count = 0, 0
        while total_tokens < args.tokens:
            total_tokens, prompt_count = (
                total_tokens + (prompts.requested_input_tokens(prompt_count) or 0),
                prompt_count + 1,
            )
        built_prompts = [prompts[number] for number in range(prompt_count)]
        digest = Digest()

        def encode(prompts: Any = prompts, prompt_count: int = prompt_count) -> None:
            for i in range(prompt_count):
                msgspec.json.encode(prompts[i].messages or prompts[i].prompt)

        def hash_all(built_prompts: Any = built_prompts, digest: Digest = digest) -> None:
            digest.add(enumerate(built_prompts))

        encode_s, hash_s = (
            rig.measure_cpu_s(work, rounds=args.rounds) for work in (encode, hash_all)
        )
        rows.append(
            [
                name,
                f"{encode_s / total_tokens * 1e6:.4f}",
                f"{encode_s / prompt_count * 1e6:.1f}",
                f"{hash_s / prompt_count * 1e6:.1f}",
            ]
        )
    print(rig.format_table(["prompts", "ms / 1,000 tokens", "µs / request", "µs / digest"], rows))


if __name__ == "__main__":
    main()
