"""The data set of a benchmark: synthetic lengths like the official ones, or the user's file.

Reads files and computes lengths; sends nothing. MLPerf's data sets may not be redistributed, so the
synthetic set is the default, and every result names it as synthetic. A pickle file is refused,
because reading one runs its code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.core import format, seeds
from loadgen.core.errors import CombinedError, LoadgenError, UserError, has_too_many
from loadgen.core.workload.dataset import read_located_rows
from loadgen.mlperf.rules import Benchmark, Test

ORDER_SEED = 24576
"""The seed of the order of lengths. It is part of the definition of the synthetic set."""

MIN_INPUT_TOKENS = 4
"""Enough tokens that prompts differ from each other."""

MIN_OUTPUT_TOKENS = 2
"""LoadGen's rules require more than one token."""

BISECTION_STEPS = 60
"""More steps change nothing: each one adds a bit, and a double has 53."""

MAX_UNIT_QUANTILE = 60.0
"""Above every quantile that occurs: exp(-60) is far below 1 over the number of samples."""

MAX_SHUFFLED = 65_535
"""libstdc++ takes two swaps from one random number only for so many values or fewer."""

TABLE_SUFFIXES = (".jsonl", ".json", ".parquet")
PICKLE_SUFFIXES = (".pkl", ".pickle")

TOKEN_COLUMNS = (
    "tok_input",
    "tokenized_input",
    "input_ids",
    "tok_inputs",
    "token_ids",
    "input_tokens",
)
TEXT_COLUMNS = ("input", "text_input", "prompt", "question")
REFERENCE_COLUMNS = ("output", "gt_output", "ref_output", "reference", "response")
"""Column names in official files and in tools for them. The first name that a file has is used."""


# -- the synthetic set -----------------------------------------------------------------------------


class Lengths(NamedTuple):
    """The token counts of every sample of a data set in its order, and its name for results."""

    input: NDArray[np.int64]
    output: NDArray[np.int64]
    name: str


def synthetic_lengths(
    benchmark: Benchmark,
    *,
    benchmark_name: str,
    mean_input: float | None = None,
    mean_output: float | None = None,
) -> Lengths:
    """Return prompt and response lengths for a synthetic data set of the benchmark's size.

    The lengths are fixed quantiles of a gamma distribution and not random, so their mean differs
    from the requested one by less than 0.01 tokens. Prompts and responses are then shuffled
    independently with a fixed seed.

    Args:
        benchmark: The size of the benchmark's data set and its lengths.
        benchmark_name: The name of the benchmark, for example "llama2-70b".
        mean_input: The mean tokens of a prompt, or None for that of the official data set.
        mean_output: The mean tokens of a response, or None for that of the official data set.

    Raises:
        UserError: No data set within the maxima of the rules can have such a mean.
    """
    input_tokens = _shuffled_lengths(
        "input",
        benchmark_name,
        benchmark.samples,
        benchmark.mean_input if mean_input is None else mean_input,
        (MIN_INPUT_TOKENS, benchmark.max_input),
    )

    output_tokens = _shuffled_lengths(
        "output",
        benchmark_name,
        benchmark.samples,
        benchmark.mean_output if mean_output is None else mean_output,
        (MIN_OUTPUT_TOKENS, benchmark.max_output),
    )
    name = _describe_synthetic_set(input_tokens, output_tokens, benchmark_name)
    return Lengths(input_tokens, output_tokens, name)


def _describe_synthetic_set(
    input_tokens: NDArray[np.int64], output_tokens: NDArray[np.int64], benchmark_name: str
) -> str:
    """Return the name of a synthetic data set for results, which says that it is not MLPerf's."""
    return (
        f"synthetic, {len(input_tokens):,} samples with lengths like {benchmark_name}'s "
        f"(gamma distribution, mean {input_tokens.mean():.2f} in and "
        f"{output_tokens.mean():.2f} out); not MLPerf's data"
    )


def _shuffled_lengths(
    kind: str, benchmark: str, count: int, mean: float, bounds: tuple[int, int]
) -> NDArray[np.int64]:
    """Return lengths with a gamma distribution in a random order that is always the same.

    The order depends on the benchmark and the kind only, so that every run of a benchmark has the
    same data set, and long prompts do not go with long responses.

    Args:
        kind: "input" or "output".
        benchmark: The name of the benchmark.
        count: The number of lengths.
        mean: Their mean in tokens.
        bounds: The shortest and the longest length in tokens.

    Raises:
        UserError: The mean is not between the bounds.
    """
    shortest, longest = bounds
    if not shortest < mean < longest:
        raise UserError(
            "out_of_range",
            f"no data set can have a mean {kind} of {mean:g} tokens",
            f"--mean-{kind} {mean:g}",
            f"give a mean between {shortest} and {longest} tokens, the maximum of {benchmark}",
        )

    order = seeds.generator(ORDER_SEED, "mlperf", benchmark, kind).permutation(count)
    return _gamma_lengths(count, mean, shortest, longest)[order]


def _gamma_lengths(count: int, mean: float, shortest: int, longest: int) -> NDArray[np.int64]:
    """Return lengths at equally spaced quantiles of a gamma distribution of shape 2, in order.

    They are rounded and clipped to [shortest, longest]. Clipping changes the mean, so the scale of
    the distribution is found by bisection: the lengths after clipping have the requested mean.
    """
    # Why shape 2: public run logs of Llama 2 70B give latency / TPOT, which is the length of
    # responses. Their median is 0.80 to 0.88 of the mean, and their p99 about 3.1 times the mean.
    # With shape 2, these ratios are 0.84 and 3.3.
    quantiles_at_scale_1 = _gamma_quantiles((np.arange(count) + 0.5) / count)

    def lengths_at(scale: float) -> NDArray[np.int64]:
        return np.clip(np.rint(quantiles_at_scale_1 * scale), shortest, longest).astype(np.int64)

    low_scale = 0.0
    high_scale = float(longest)
    while lengths_at(high_scale).mean() < mean:
        high_scale *= 2

    for _ in range(BISECTION_STEPS):
        middle_scale = (low_scale + high_scale) / 2
        if lengths_at(middle_scale).mean() < mean:
            low_scale = middle_scale
        else:
            high_scale = middle_scale

    return lengths_at(high_scale)


def _gamma_quantiles(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the quantiles of the gamma distribution of shape 2 and scale 1.

    Its cumulative distribution is P(x) = 1 - exp(-x) (1 + x). That has no inverse in elementary
    functions, so each quantile is found by bisection between 0 and MAX_UNIT_QUANTILE.
    """
    low = np.zeros_like(probabilities)
    high = np.full_like(probabilities, MAX_UNIT_QUANTILE)
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        cumulative = 1 - np.exp(-middle) * (1 + middle)
        is_below = cumulative < probabilities
        low = np.where(is_below, middle, low)
        high = np.where(is_below, high, middle)

    return (low + high) / 2


# -- LoadGen's order of issue ----------------------------------------------------------------------


def issue_order(test: Test) -> list[int]:
    """Return the samples in the order in which LoadGen issues them as queries.

    A sample is a prompt of the data set. LoadGen issues all samples in a random order, which its
    seeds determine, and repeats this order until the test is long enough. This function draws the
    same random numbers as LoadGen, so that this program sends the same prompts at the same times.

    In Offline, all samples belong to one query, which has them in the order of `loaded_set`.
    Source: `GenerateLoadableSets` and `SampleDistributionEqualIssue` in LoadGen's loadgen.cc.
    """
    loaded_samples = loaded_set(test)
    if test.scenario == "offline":
        return loaded_samples

    random_numbers = _MersenneTwister(test.seeds.sample_index)

    # LoadGen shuffles the samples for accuracy mode first, with numbers of the same generator.
    _shuffle(list(range(test.samples)), random_numbers)
    performance_order = list(range(test.samples))
    _shuffle(performance_order, random_numbers)

    return [loaded_samples[index] for index in performance_order]


def loaded_set(test: Test) -> list[int]:
    """Return the samples in the random order in which LoadGen has them loaded into memory.

    It is drawn with the seed of the QSL, the "query sample library" of LoadGen.
    """
    samples = list(range(test.samples))
    _shuffle(samples, _MersenneTwister(test.seeds.qsl))
    return samples


class _MersenneTwister:
    """The random number generator `std::mt19937`, which returns 32-bit numbers one by one."""

    _BLOCK_BYTES = 4 * 4096
    """So many bytes are drawn at once, for speed."""
    _LOW_32_BITS = 0xFFFFFFFF

    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed & self._LOW_32_BITS)
        self._numbers: list[int] = []

    def draw_below(self, limit: int) -> int:
        """Return a random integer from 0 to `limit - 1`, each with the same probability.

        It is the integer that libstdc++'s `uniform_int_distribution(0, limit - 1)` returns. Method:
        D. Lemire, "Fast Random Integer Generation in an Interval", 2019, algorithm 5.

        A random 32-bit number times `limit` is a product of 64 bits. Its upper 32 bits are the
        result. Each result would come from about 2**32 / limit numbers, but some from one more than
        others. To make all equally likely, a number is rejected, and the next one is drawn, if the
        lower 32 bits of its product are below `2**32 % limit`.
        """
        rejected_below = 2**32 % limit
        while True:
            product = self._next_number() * limit
            lower_half = product & self._LOW_32_BITS
            if lower_half >= rejected_below:
                return product >> 32  # the upper half

    def _next_number(self) -> int:
        """Return the next 32-bit number of the generator."""
        if not self._numbers:
            block = np.frombuffer(self._state.bytes(self._BLOCK_BYTES), "<u4")
            self._numbers = block[::-1].tolist()  # reversed, because pop() takes the last one
        return self._numbers.pop()


def _shuffle(values: list[int], twister: _MersenneTwister) -> None:
    """Shuffle values in place exactly as libstdc++'s `std::shuffle` does.

    It is a Fisher-Yates shuffle: the value at each index from 1 is swapped with a partner, which is
    at a random index up to its own. libstdc++ draws one random number for the partners of two
    consecutive values. With an even count, the value at index 1 is swapped alone first, so that the
    other values form pairs.

    Raises:
        ValueError: There are more than MAX_SHUFFLED values, for which libstdc++ draws one random
            number per swap.
    """
    count = len(values)
    if count > MAX_SHUFFLED:
        raise ValueError("libstdc++ shuffles so many values in another way")

    first_of_pair = 1
    has_single_swap = count > 0 and count % 2 == 0
    if has_single_swap:
        _swap(values, 1, twister.draw_below(2))
        first_of_pair = 2

    for index in range(first_of_pair, count, 2):
        # The value at `index` has index + 1 possible partners, and the next one has index + 2. A
        # random number below the product of both counts chooses one of each: its quotient is the
        # partner of the value, its remainder that of the next value. For example, at index 2 there
        # are 3 * 4 = 12 choices, and the number 7 gives the partners 7 // 4 = 1 and 7 % 4 = 3.
        partner_count = index + 1
        next_partner_count = index + 2
        pair_number = twister.draw_below(partner_count * next_partner_count)
        partner, next_partner = divmod(pair_number, next_partner_count)
        _swap(values, index, partner)
        _swap(values, index + 1, next_partner)


def _swap(values: list[int], first_index: int, second_index: int) -> None:
    values[first_index], values[second_index] = values[second_index], values[first_index]


# -- the official file -----------------------------------------------------------------------------

Prompt = list[int] | str
"""A prompt as token IDs, with the chat template, or as a text."""


class DatasetFile(Struct, frozen=True, kw_only=True):
    """A data set in a file.

    Attributes:
        prompts: The prompts.
        name: The name of the data set for results.
        references: The reference response of each sample, None if the file has none.
    """

    prompts: tuple[Prompt, ...]
    name: str
    references: tuple[str | None, ...] = ()

    @property
    def has_token_ids(self) -> bool:
        """Whether prompts are token IDs, which only the completions API accepts."""
        return not isinstance(self.prompts[0], str)


def read_dataset(path: Path, benchmark: Benchmark, *, benchmark_name: str) -> DatasetFile:
    """Return the data set in a JSONL or Parquet file.

    Rows beyond the benchmark's number of samples are left out, and the name of the data set says
    so.

    Args:
        path: The file.
        benchmark: The number of samples of the benchmark, and the limit on prompt lengths.
        benchmark_name: The name of the benchmark, which errors mention.

    Raises:
        UserError: The file cannot be read or has no prompts.
        CombinedError: Prompts are not accepted. It has an error for each of the first ones.
    """
    _check_format(path)
    table = _read_columns(path)
    prompt_column = _find_prompt_column(table, path)

    row_count = len(table[prompt_column])
    if row_count == 0:
        raise UserError(
            "empty_file",
            "the data set has no rows",
            str(path),
            f"{benchmark_name} has {benchmark.samples:,} samples",
        )

    prompts = _read_prompts(
        table[prompt_column][: benchmark.samples],
        place=str(path),
        column=prompt_column,
        max_tokens=benchmark.max_input,
        benchmark=benchmark_name,
    )
    dataset_name = (
        f"{path.name}, {len(prompts):,} of {format.counted(row_count, 'row')}, "
        f"{benchmark.samples:,} in the official set"
    )
    return DatasetFile(
        prompts=tuple(prompts),
        name=dataset_name,
        references=_read_references(table, len(prompts)),
    )


def _find_prompt_column(table: Mapping[str, Sequence[object]], path: Path) -> str:
    """Return the name of the column with the prompts, by the names that official files use.

    A column of token IDs is preferred to one of texts, because token IDs contain the chat template
    of the model already.

    Raises UserError if there is no such column.
    """
    for name in (*TOKEN_COLUMNS, *TEXT_COLUMNS):
        if name in table:
            return name

    columns_text = ", ".join(map(str, table)) or "none"
    raise UserError(
        "missing_key",
        f"no column of prompts among {columns_text}",
        str(path),
        f"one column of token IDs ({', '.join(TOKEN_COLUMNS)}) "
        f"or of texts ({', '.join(TEXT_COLUMNS)})",
    )


def _read_prompts(
    values: Sequence[object], *, place: str, column: str, max_tokens: int, benchmark: str
) -> list[Prompt]:
    """Return the prompts of a column, which are either all texts or all token IDs.

    Args:
        values: The cells of the column.
        place: The file, which errors name.
        column: The name of the column, which errors name.
        max_tokens: The most tokens that the rules allow in a prompt.
        benchmark: The name of the benchmark.

    Raises:
        CombinedError: Prompts cannot be used. It has an error for each of the first such cells.
    """
    prompts: list[Prompt] = []
    errors: list[LoadgenError] = []
    for row, value in enumerate(values):
        where = f"{place}: row {row}, column {column}"
        prompt = _parse_prompt(value)
        if prompt is None:
            problem = f"is not a prompt: {type(value).__name__}"
            errors.append(UserError("wrong_type", problem, where, "use token IDs or a text"))
        elif isinstance(prompt, list) and len(prompt) > max_tokens:
            errors.append(_too_long_error(prompt, where, max_tokens, benchmark))
        elif prompts and type(prompt) is not type(prompts[0]):
            problem = "has texts and token IDs in one column"
            errors.append(UserError("wrong_type", problem, where, "use one of them in all rows"))
        else:
            prompts.append(prompt)

        if has_too_many(errors, place):  # more than anyone reads
            break

    if errors:
        raise CombinedError(errors)

    return prompts


def _too_long_error(prompt: list[int], where: str, max_tokens: int, benchmark: str) -> UserError:
    """Return the error that a prompt has more tokens than the rules allow."""
    return UserError(
        "out_of_range",
        f"the prompt has {format.counted(len(prompt), 'token')}",
        where,
        f"{benchmark} allows at most {max_tokens:,} input tokens",
    )


def _read_references(table: Mapping[str, Sequence[object]], count: int) -> tuple[str | None, ...]:
    """Return the first reference responses, None for each row without one."""
    for name in REFERENCE_COLUMNS:
        if name in table:
            values = table[name][:count]
            return tuple(value if isinstance(value, str) else None for value in values)
    return (None,) * count


def _check_format(path: Path) -> None:
    """Raise UserError if there is no such file, or if it is neither JSONL nor Parquet.

    For a pickle file, the error says how to convert it.
    """
    if not path.is_file():
        raise UserError(
            "missing_file",
            "no such file",
            f"--dataset {path}",
            "give the official data set as a .jsonl or .parquet file",
        )

    # "a.jsonl.gz" and "a.jsonl" are both of the format ".jsonl".
    name_without_gz = path.with_suffix("") if path.suffix == ".gz" else path
    suffix = name_without_gz.suffix or path.suffix
    if suffix in PICKLE_SUFFIXES:
        parquet = path.with_name(path.name.partition(".")[0] + ".parquet")
        raise UserError(
            "unsafe_file",
            "a pickle file can run any code when it is loaded",
            f"--dataset {path}",
            (
                "if you trust the file, convert it: "
                f"pandas.read_pickle({str(path)!r}).to_parquet({str(parquet)!r})"
            ),
        )

    if suffix not in TABLE_SUFFIXES:
        raise UserError(
            "wrong_format",
            f'"{path.suffix}" is not a format of data sets',
            f"--dataset {path}",
            f"known: {', '.join(TABLE_SUFFIXES)}",
        )


def _parse_prompt(value: object) -> Prompt | None:
    """Return the prompt in a cell of the data set, or None if the cell does not contain one.

    A prompt is a text that is not empty, or a list of token IDs. Some files have a numpy array, or
    a batch of one sequence (a list in a list), in place of the list.
    """
    if isinstance(value, str):
        return value or None

    if isinstance(value, np.ndarray):
        value = value.reshape(-1).tolist()

    if not isinstance(value, list | tuple) or not value:
        return None
    if len(value) == 1 and isinstance(value[0], list | tuple | np.ndarray):
        return _parse_prompt(value[0])
    if not all(_is_token_id(token) for token in value):
        return None

    return list(value)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_columns(path: Path) -> dict[str, Sequence[object]]:
    """Return the columns of a file of rows, with None for a cell that a row does not have."""
    rows = [row for _, row in read_located_rows(path)]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
