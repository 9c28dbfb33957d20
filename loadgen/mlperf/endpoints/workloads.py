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
        prompts: The texts, of a data set in a file. Empty for a synthetic data set.
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
    """Return a data set of random texts, with the size and the lengths of the official data set.

    Args:
        benchmark_name: The name of the benchmark.
        mean_input: The mean number of tokens of a prompt. None for the mean of the benchmark.
        mean_output: The mean number of tokens of a response. None for the mean of the benchmark.
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
    """Read the samples of a benchmark from a file that the user has.

    Each prompt begins with a salt: random text that keeps it out of the server's prefix cache. So
    the prompts must be texts. A salt cannot be put before token IDs without the model's tokenizer.

    Raises:
        UserError: The file cannot be used, or its prompts are token IDs.
        CombinedError: Rows of the file have mistakes.
    """
    lengths = rules.dataset_lengths(benchmark_name)
    dataset_file = dataset.read_dataset(path, lengths, benchmark_name=benchmark_name)
    texts = [prompt for prompt in dataset_file.prompts if isinstance(prompt, str)]
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
        prompts=texts,
        max_output=lengths.max_output,
    )


def draw_samples(seed_set: SeedSet, size: int, count: int) -> list[int]:
    """Draw the index of the sample that each request sends, with replacement.

    The draws are the same as in the reference client: `random.Random(seed).randint(0, size - 1)`.

    Args:
        seed_set: The random seeds that MLCommons published.
        size: The number of samples of the data set.
        count: The number of requests.
    """
    random_numbers = random.Random(seed_set.sample_index_rng_seed)
    return [random_numbers.randint(0, size - 1) for _ in range(count)]


def draw_salts(seed_set: SeedSet) -> Iterator[str]:
    """Yield random salts of 64 bits as hexadecimal digits, without end.

    A salt stands before a prompt, so that the prompt is not in the cache of the server. The seed
    set has no seed for salts. The seed for random send times is used, because a load with a fixed
    concurrency does not need it.
    """
    random_numbers = random.Random(seed_set.scheduler_rng_seed)
    while True:
        yield random_numbers.randbytes(rules.SALT_BYTES).hex()


def build_workload(
    point: CurvePoint, data: CurveData, seed_set: SeedSet, request_count: int, output_dir: Path
) -> Workload:
    """Return the load of a measurement point: a fixed number of requests in flight.

    Args:
        point: The measurement point.
        data: The samples of the data set.
        seed_set: The random seeds that MLCommons published.
        request_count: How many requests are sent, a multiple of the size of the data set.
        output_dir: The directory for a file with the requests, if the data set is a file.
    """
    samples = draw_samples(seed_set, data.size, request_count)
    requests: Synthetic | FromFile
    if data.prompts:
        requests = _requests_from_file(point, data, seed_set, samples, output_dir)
    else:
        requests = _synthetic_requests(data, samples)

    stage = Stage(
        name="load",
        arrival=Closed(concurrency=point.concurrency, ramp_ns=0),
        duration_ns=None,
        count=request_count,
    )
    random_salt = next(draw_salts(seed_set))

    return Workload(
        name=f"mlperf-endpoints-{data.benchmark}-{point.name}",
        description=f"{rules.DISCLOSURE} Data: {data.name}.",
        # What is sent, and when.
        requests=requests,
        stages=(stage,),
        seed=seed_set.sample_index_rng_seed,
        salt=f"{point.name}-{random_salt}",
        # How long to wait for responses.
        grace_ns=MAX_WAIT_NS,
        timeout_ns=MAX_WAIT_NS,
        stall_timeout_ns=MAX_STALL_NS,
        source_text=f"# loadgen mlperf endpoints run: {data.benchmark}, point {point.name}\n",
    )


def _synthetic_requests(data: CurveData, samples: Sequence[int]) -> Synthetic:
    """Return requests of random texts, with the lengths of the drawn samples.

    Two requests for the same sample have different texts, so no salt is needed to keep the second
    one out of the server's prefix cache.
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
    """Write the prompt of each request to a file, and return requests that read the file.

    Each prompt begins with a random salt, so that it is not in the prefix cache of the server.

    Args:
        point: The measurement point, whose name is in the name of the file.
        data: The samples of the data set.
        seed_set: The random seeds that MLCommons published.
        samples: The index of the sample of each request.
        output_dir: The directory of the file.

    Raises:
        UserError: The file would be larger than MAX_REQUEST_FILE_BYTES.
    """
    _check_file_size(point, data, len(samples))
    path = output_dir / f"endpoints_requests_{point.name}.jsonl"
    with open(path, "wb", opener=open_private) as file:
        salts = draw_salts(seed_set)
        for sample in samples:
            prompt = f"[{next(salts)}] {data.prompts[sample]}"
            request = {"prompt": prompt, "max_tokens": data.max_output, "temperature": 0}
            file.write(msgspec.json.encode(request) + b"\n")
    return FromFile(path=path.resolve())


def _check_file_size(point: CurvePoint, data: CurveData, request_count: int) -> None:
    """Check that the file with the requests of a measurement point does not become too large.

    Raises:
        UserError: The file would be larger than MAX_REQUEST_FILE_BYTES.
    """
    total_bytes = sum(len(prompt) for prompt in data.prompts)
    mean_bytes = total_bytes / data.size
    expected_bytes = mean_bytes * request_count
    if expected_bytes > MAX_REQUEST_FILE_BYTES:
        raise UserError(
            "too_large",
            f"the requests of {point.name} would fill {expected_bytes / 1e9:,.0f} GB",
            "--dataset",
            "limit the time of a point with --max-point-time",
        )
