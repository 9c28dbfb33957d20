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
from typing import NamedTuple

import msgspec
import rig

from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.digest import Digest
from loadgen.core.requests.prompts import Prompts
from loadgen.core.requests.tokenizer import Tokenizer, load_tokenizer
from loadgen.core.workload import FixedTokens, Synthetic, Turns, UniformTokens

SEED = 1
SALT = 2

# A program that prints the CPU-ms which its process spends from a workload to its first prompt. It
# is a process of its own, because this process has already imported what is measured here: the
# imports and the tables of words.
FIRST_PROMPT_PROGRAM = """
import time
import numpy
from loadgen.core.workload import FixedTokens, Synthetic

requests = Synthetic(input_tokens=FixedTokens(value=1300), output_tokens=FixedTokens(value=500))

started_s = time.process_time()
from types import SimpleNamespace
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.tokenizer import load_tokenizer

prompts = build_prompts(SimpleNamespace(requests=requests), 1, 2, load_tokenizer())
prompts[0]
print((time.process_time() - started_s) * 1000)
"""

OUTPUT_TOKENS = FixedTokens(value=500)
SHAPES: dict[str, Synthetic] = {
    "20 tokens": Synthetic(input_tokens=FixedTokens(value=20), output_tokens=OUTPUT_TOKENS),
    "150 tokens": Synthetic(input_tokens=FixedTokens(value=150), output_tokens=OUTPUT_TOKENS),
    "150 to 450 tokens": Synthetic(
        input_tokens=UniformTokens(min=150, max=450), output_tokens=OUTPUT_TOKENS
    ),
    "1,302 tokens": Synthetic(input_tokens=FixedTokens(value=1302), output_tokens=OUTPUT_TOKENS),
    "1,302 tokens, 1,000 of them shared": Synthetic(
        input_tokens=FixedTokens(value=1302),
        output_tokens=OUTPUT_TOKENS,
        shared_prefix_tokens=1000,
    ),
    "agentic task, 4 turns": Synthetic(
        input_tokens=FixedTokens(value=1125),
        output_tokens=FixedTokens(value=250),
        turns=Turns(count=4, tool_result_tokens=FixedTokens(value=500)),
    ),
    "10,000 tokens": Synthetic(input_tokens=FixedTokens(value=10_000), output_tokens=OUTPUT_TOKENS),
}

COLUMNS = ("prompts", "ms / 1,000 tokens", "µs / request", "µs / fingerprint")


def measure_first_prompt_ms(rounds: int) -> float:
    """Return how many CPU-ms a new process needs to build the first prompt of a workload.

    The smallest value of several processes counts, because other work of the machine only adds
    time.
    """
    durations_ms = []
    for _ in range(rounds):
        completed = subprocess.run(
            [sys.executable, "-c", FIRST_PROMPT_PROGRAM], check=True, capture_output=True
        )
        durations_ms.append(float(completed.stdout))
    return min(durations_ms)


class PromptCost(NamedTuple):
    """The CPU time that requests of one shape cost.

    Attributes:
        build_ms_per_1000_tokens: Building and encoding them as JSON, per 1,000 prompt tokens.
        build_us_per_request: The same per request.
        fingerprint_us_per_request: Adding them to the fingerprint of a run, per request.
    """

    build_ms_per_1000_tokens: float
    build_us_per_request: float
    fingerprint_us_per_request: float


def measure_prompt_cost(
    shape: Synthetic, tokenizer: Tokenizer, min_tokens: int, rounds: int
) -> PromptCost:
    """Measure what requests of a shape cost, with so many that they have `min_tokens` together."""
    prompts = build_prompts(SimpleNamespace(requests=shape), SEED, SALT, tokenizer)
    request_count, total_tokens = count_requests(prompts, min_tokens)

    def build_and_encode() -> None:
        for number in range(request_count):
            request = prompts[number]
            msgspec.json.encode(request.messages or request.prompt)

    built_requests = [prompts[number] for number in range(request_count)]

    def add_to_fingerprint() -> None:
        Digest().add(enumerate(built_requests))

    build_s = rig.measure_cpu_s(build_and_encode, rounds=rounds)
    fingerprint_s = rig.measure_cpu_s(add_to_fingerprint, rounds=rounds)
    return PromptCost(
        build_ms_per_1000_tokens=build_s * 1e3 / (total_tokens / 1_000),
        build_us_per_request=build_s * 1e6 / request_count,
        fingerprint_us_per_request=fingerprint_s * 1e6 / request_count,
    )


def count_requests(prompts: Prompts, min_tokens: int) -> tuple[int, int]:
    """Return how many requests have `min_tokens` prompt tokens together, and their real sum."""
    request_count = 0
    total_tokens = 0
    while total_tokens < min_tokens:
        total_tokens += prompts.requested_input_tokens(request_count) or 0
        request_count += 1
    return request_count, total_tokens


def format_cost(shape_name: str, cost: PromptCost) -> list[str]:
    """Return the row of a shape."""
    return [
        shape_name,
        f"{cost.build_ms_per_1000_tokens:.4f}",
        f"{cost.build_us_per_request:.1f}",
        f"{cost.fingerprint_us_per_request:.1f}",
    ]


def main() -> None:
    """Print the CPU cost of building prompts for each shape of a workload."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--tokenizer", help="a tokenizer.json of one's own")
    parser.add_argument("--tokens", type=int, default=200_000, help="of prompts, in each pass")
    parser.add_argument("--rounds", type=int, default=5)
    smoke_defaults = {"tokens": 20_000, "rounds": 1}
    args = rig.parse_arguments(parser, **smoke_defaults)

    first_prompt_ms = measure_first_prompt_ms(args.rounds)
    print(f"start to first prompt, after the workload is read: {first_prompt_ms:.1f} ms CPU\n")

    tokenizer = load_tokenizer(args.tokenizer)
    rows = []
    for shape_name, shape in SHAPES.items():
        cost = measure_prompt_cost(shape, tokenizer, args.tokens, args.rounds)
        rows.append(format_cost(shape_name, cost))
    print(rig.format_table(COLUMNS, rows))


if __name__ == "__main__":
    main()
