"""The requests of a measurement point: their order, their salt and their load.

Section 6.5 of the rules draws samples with replacement, and section 2.9.5.1 puts a random salt in
front of each prompt. Both are drawn from the seed set.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from loadgen.core.errors import UserError
from loadgen.core.results.files import open_private
from loadgen.core.workload import (
    Closed,
    FromFile,
    ListedTokens,
    Stage,
    Synthetic,
    Workload,
)
from loadgen.mlperf import dataset
from loadgen.mlperf.endpoints import rules
from loadgen.mlperf.endpoints.points import CurvePoint
from loadgen.mlperf.endpoints.rules import SeedSet
from loadgen.mlperf.run import MAX_STALL_NS, MAX_WAIT_NS

MAX_REQUEST_FILE_BYTES = 8_000_000_000
"""The largest file of requests that is written for one point."""


class CurveData(Struct, frozen=True, kw_only=True):
    """The samples of a curve, from which the requests of each point are drawn.

    Attributes:
        benchmark: The name of the benchmark.
        name: The name of the data set for results.
        size: The number of samples.
        input_tokens: The length of each prompt, of a synthetic data set.
        output_tokens: The length of each response, of a synthetic data set.
        prompts: The texts, of a data set in a file.
        max_output: The longest response, of a data set in a file.
    """

    benchmark: str
    name: str
    size: int
    input_tokens: Sequence[int] = ()
    output_tokens: Sequence[int] = ()
    prompts: Sequence[str] = ()
    max_output: int = 0


def synthetic_data(
    benchmark_name: str, *, mean_input: float | None = None, mean_output: float | None = None
) -> CurveData:
    """Return a synthetic data set with the size and the lengths of the official one.

    Args:
        benchmark_name: The name of the benchmark.
        mean_input: The mean tokens of a prompt, or None for that of the benchmark.
        mean_output: The mean tokens of a response, or None for that of the benchmark.
    """
    lengths = dataset.synthetic_lengths(
        rules.dataset_lengths(benchmark_name),
        benchmark_name=benchmark_name,
        mean_input=mean_input,
        mean_output=mean_output,
    )
    return CurveData(
        benchmark=benchmark_name,
        name=lengths.name,
        size=len(lengths.input),
        input_tokens=lengths.input.tolist(),
        output_tokens=lengths.output.tolist(),
    )


def read_data(benchmark_name: str, path: Path) -> CurveData:
    """Return the samples of the user's copy of the data set.

    Raises UserError if it has token IDs: a salt in front of them would need the tokenizer and the
    chat template of the model. Raises UserError or CombinedError if the file cannot be used.
    """
    benchmark = rules.dataset_lengths(benchmark_name)
    dataset_file = dataset.read_dataset(path, benchmark, benchmark_name=benchmark_name)
    if dataset_file.has_token_ids:
        raise UserError(
            "unsupported",
            "prompts of token IDs cannot be salted as section 2.9.5.1 of the rules requires",
            f"--dataset {path}",
            "give a file with texts",
        )

    return CurveData(
        benchmark=benchmark_name,
        name=dataset_file.name,
        size=len(dataset_file.prompts),
        prompts=[prompt for prompt in dataset_file.prompts if isinstance(prompt, str)],
        max_output=benchmark.max_output,
    )


def draw_samples(seed_set: SeedSet, size: int, count: int) -> list[int]:
    """Return the sample of each request, drawn with replacement in the order of issue.

    It is the order of the reference client: `random.Random(seed).randint(0, size - 1)`.

    Args:
        seed_set: The seed set, whose `sample_index_rng_seed` decides the order.
        size: The number of samples.
        count: The number of requests.
    """
    random_numbers = random.Random(seed_set.sample_index_rng_seed)
    return [random_numbers.randint(0, size - 1) for _ in range(count)]


def draw_salts(seed_set: SeedSet) -> Iterator[str]:
    """Yield the salt of each request: 64 random bits as hexadecimal digits, without an end.

    The seed set has no seed for the salt alone, so they are drawn from `scheduler_rng_seed`, which
    a fixed concurrency does not use.
    """
    random_numbers = random.Random(seed_set.scheduler_rng_seed)
    while True:
        yield random_numbers.randbytes(rules.SALT_BYTES).hex()


def build_workload(
    point: CurvePoint, data: CurveData, seed_set: SeedSet, request_count: int, output_dir: Path
) -> Workload:
    """Return the load of a point: a fixed number of requests in flight until all are sent.

    An Offline run has as many in flight as the data set has samples, because all samples of a pass
    are available at once (section 5.7.1).

    Args:
        point: The point.
        data: The samples.
        seed_set: The seed set.
        request_count: The requests to send: a multiple of the size of the data set (section 6.4).
        output_dir: Where a file of requests is written, if the data set is a file.
    """
    samples = draw_samples(seed_set, data.size, request_count)
    requests: Synthetic | FromFile
    if data.prompts:
        requests = _requests_from_file(point, data, seed_set, samples, output_dir)
    else:
        requests = _synthetic_requests(data, samples)

    return Workload(
        name=f"mlperf-endpoints-{data.benchmark}-{point.name}",
        description=f"{rules.DISCLOSURE} Data: {data.name}.",
        requests=requests,
        stages=(
            Stage(
                name="load",
                arrival=Closed(concurrency=point.concurrency, ramp_ns=0),
                duration_ns=None,
                count=request_count,
            ),
        ),
        seed=seed_set.sample_index_rng_seed,
        salt=f"{point.name}-{next(draw_salts(seed_set))}",
        grace_ns=MAX_WAIT_NS,
        timeout_ns=MAX_WAIT_NS,
        stall_timeout_ns=MAX_STALL_NS,
        source_text=f"# loadgen mlperf endpoints run: {data.benchmark}, point {point.name}\n",
    )


def _synthetic_requests(data: CurveData, samples: Sequence[int]) -> Synthetic:
    """Return requests with the lengths of these samples.

    Each request has a random text of its own, so that two requests for one sample share no prefix,
    as a salt in front of the text would ensure.
    """
    input_tokens = tuple(data.input_tokens[sample] for sample in samples)
    output_tokens = tuple(data.output_tokens[sample] for sample in samples)
    return Synthetic(
        input_tokens=ListedTokens(values=input_tokens),
        output_tokens=ListedTokens(values=output_tokens),
    )


def _requests_from_file(
    point: CurvePoint,
    data: CurveData,
    seed_set: SeedSet,
    samples: Sequence[int],
    output_dir: Path,
) -> FromFile:
    """Write the salted prompts of these samples, and return requests that read them.

    Raises UserError if the file would be larger than MAX_REQUEST_FILE_BYTES.
    """
    _check_file_size(point, data, len(samples))
    path = output_dir / f"endpoints_requests_{point.name}.jsonl"
    with open(path, "wb", opener=open_private) as file:
        for sample, salt in zip(samples, draw_salts(seed_set), strict=False):
            prompt = f"[{salt}] {data.prompts[sample]}"
            request = {"prompt": prompt, "max_tokens": data.max_output, "temperature": 0}
            file.write(msgspec.json.encode(request) + b"\n")
    return FromFile(path=path.resolve())


def _check_file_size(point: CurvePoint, data: CurveData, request_count: int) -> None:
    """Raise UserError if the requests of a point would fill a file that is too large."""
    mean_bytes = sum(len(prompt) for prompt in data.prompts) / data.size
    expected_bytes = mean_bytes * request_count
    if expected_bytes > MAX_REQUEST_FILE_BYTES:
        raise UserError(
            "too_large",
            f"the requests of {point.name} would fill {expected_bytes / 1e9:,.0f} GB",
            "--dataset",
            "limit the time of a point with --max-point-time",
        )
