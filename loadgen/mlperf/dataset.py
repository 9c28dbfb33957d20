"""The data set of a benchmark: synthetic lengths like the official ones, or the user's file.

Reads files and computes lengths; sends nothing. MLPerf's data sets may not be redistributed, so the
synthetic set is the default, and every result names it as synthetic. A pickle file is refused,
because reading one runs its code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.core import format, seeds
from loadgen.core.errors import CombinedError, LoadgenError, UserError, has_too_many
from loadgen.core.workload.dataset import read_located_rows
from loadgen.mlperf.rules import Benchmark, Test

SHAPE_SEED = 24576
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
    spec: Benchmark,
    *,
    benchmark: str,
    mean_input: float | None = None,
    mean_output: float | None = None,
) -> Lengths:
    """Return lengths for a data set of the benchmark's size with the given or default means.

    Lengths follow a gamma distribution of shape 2, clipped at the maxima of the rules. The reason:
    in the public run logs of Llama 2 70B, median latency over median TPOT gives responses whose
    median is 0.80 to 0.88 of the mean and whose 99th percentile is about 3.1 times the mean. This
    distribution has 0.84 and 3.3, or less where the maximum clips it.

    Length i is the (i + 1/2) / n quantile of the distribution, so nothing is random and the means
    are met to a hundredth. Inputs and outputs are then shuffled independently with a fixed seed.

    Raises:
        UserError: If no data set of the benchmark can have such a mean.
    """
    if mean_input is None:
        mean_input = spec.mean_input
    if mean_output is None:
        mean_output = spec.mean_output
    input_tokens = _shuffled_lengths(
        "input", benchmark, spec.samples, mean_input, (MIN_INPUT_TOKENS, spec.max_input)
    )
    output_tokens = _shuffled_lengths(
        "output", benchmark, spec.samples, mean_output, (MIN_OUTPUT_TOKENS, spec.max_output)
    )
    name = (
        f"synthetic, {spec.samples:,} samples with lengths like {benchmark}'s (gamma distribution, "
        f"mean {input_tokens.mean():.2f} in and {output_tokens.mean():.2f} out); "
        "not MLPerf's data"
    )
    return Lengths(input_tokens, output_tokens, name)


def _shuffled_lengths(
    kind: str, benchmark: str, count: int, mean: float, bounds: tuple[int, int]
) -> NDArray[np.int64]:
    """Return gamma lengths in a fixed random order. `kind` is "input" or "output"."""
    least, most = bounds
    if not least < mean < most:
        raise UserError(
            "out_of_range",
            f"no data set can have a mean {kind} of {mean:g} tokens",
            f"--mean-{kind} {mean:g}",
            f"give a mean between {least} and {most} tokens, the maximum of {benchmark}",
        )
    order = seeds.stream(SHAPE_SEED, "mlperf", benchmark, kind).permutation(count)
    return _gamma_lengths(count, mean, least, most)[order]


def _gamma_lengths(count: int, mean: float, least: int, most: int) -> NDArray[np.int64]:
    """Return rounded quantiles of a gamma distribution of shape 2, clipped to [least, most].

    The scale is chosen by bisection so that the clipped lengths have the mean.
    """
    unit_quantiles = _gamma_quantiles((np.arange(count) + 0.5) / count)

    def lengths(scale: float) -> NDArray[np.int64]:
        return np.clip(np.rint(unit_quantiles * scale), least, most).astype(np.int64)

    low = 0.0
    high = float(most)
    while lengths(high).mean() < mean:
        high *= 2
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        if lengths(middle).mean() < mean:
            low = middle
        else:
            high = middle
    return lengths(high)


def _gamma_quantiles(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the x with P(x) = 1 - exp(-x) (1 + x) for each probability, by bisection.

    P is the cumulative distribution of the gamma distribution of shape 2 and scale 1.
    """
    low = np.zeros_like(probabilities)
    high = np.full_like(probabilities, MAX_UNIT_QUANTILE)
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        is_below = 1 - np.exp(-middle) * (1 + middle) < probabilities
        low = np.where(is_below, middle, low)
        high = np.where(is_below, high, middle)
    return (low + high) / 2


# -- LoadGen's order of issue ----------------------------------------------------------------------


def issue_order(test: Test) -> list[int]:
    """Return the sample of each query of a pass in LoadGen's random order, bit for bit.

    Later passes repeat it. In Offline, LoadGen shuffles each pass; the order returned is then that
    in which samples are loaded. Source: loadgen.cc (`GenerateLoadableSets`,
    `SampleDistributionEqualIssue`), with fewer required queries than samples, as in the rules.
    """
    loaded = loaded_set(test)
    if test.scenario == "offline":
        return loaded
    twister = _MersenneTwister(test.seeds.sample_index)
    # LoadGen draws the first order for the accuracy mode, which comes before the performance mode.
    accuracy_order = list(range(test.samples))
    _shuffle(accuracy_order, twister)
    performance_order = list(range(test.samples))
    _shuffle(performance_order, twister)
    return [loaded[index] for index in performance_order]


def loaded_set(test: Test) -> list[int]:
    """Return the samples in the order in which LoadGen has them loaded into memory."""
    samples = list(range(test.samples))
    _shuffle(samples, _MersenneTwister(test.seeds.qsl))
    return samples


class _MersenneTwister:
    """The random number generator `std::mt19937`, which returns 32-bit numbers one by one."""

    _BLOCK_BYTES = 4 * 4096
    """So many bytes are drawn at once, for speed."""

    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed & 0xFFFFFFFF)
        self._numbers: list[int] = []

    def below(self, limit: int) -> int:
        """Return what libstdc++'s `uniform_int_distribution(0, limit - 1)` returns.

        It multiplies a random number by the limit and rejects biased draws (Lemire's method).
        """
        product = self._next_number() * limit
        if product & 0xFFFFFFFF < limit:
            threshold = (1 << 32) % limit
            while product & 0xFFFFFFFF < threshold:
                product = self._next_number() * limit
        return product >> 32

    def _next_number(self) -> int:
        if not self._numbers:
            block = np.frombuffer(self._state.bytes(self._BLOCK_BYTES), "<u4")
            self._numbers = block[::-1].tolist()
        return self._numbers.pop()


def _shuffle(values: list[int], twister: _MersenneTwister) -> None:
    """Shuffle values in place as libstdc++'s `std::shuffle` does: two swaps per random number."""
    count = len(values)
    if count > MAX_SHUFFLED:
        raise ValueError("libstdc++ shuffles so many values in another way")
    index = 1
    if count % 2 == 0 and count:
        other = twister.below(2)
        values[1], values[other] = values[other], values[1]
        index = 2
    while index < count:
        for other in divmod(twister.below((index + 1) * (index + 2)), index + 2):
            values[index], values[other] = values[other], values[index]
            index += 1


# -- the official file -----------------------------------------------------------------------------

Prompt = list[int] | str
"""A prompt as token IDs, with the chat template, or as a text."""


class File(Struct, frozen=True, kw_only=True):
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


def read_dataset(path: Path, spec: Benchmark, *, benchmark: str) -> File:
    """Return the data set in a JSONL or Parquet file.

    Rows beyond the benchmark's number of samples are left out, and the name says so.

    Raises:
        UserError: If the file cannot be read or has no prompts.
        CombinedError: With an error for each prompt that is not accepted.
    """
    if not path.is_file():
        raise UserError(
            "missing_file",
            "no such file",
            f"--dataset {path}",
            "give the official data set as a .jsonl or .parquet file",
        )
    _check_format(path)
    table = _read_columns(path)
    column = _find_prompt_column(table, path)
    row_count = len(table[column])
    if row_count == 0:
        raise UserError(
            "empty_file",
            "the data set has no rows",
            str(path),
            f"{benchmark} has {spec.samples:,} samples",
        )
    prompts = _read_prompts(
        table[column][: spec.samples],
        place=str(path),
        column=column,
        max_tokens=spec.max_input,
        benchmark=benchmark,
    )
    name = (
        f"{path.name}, {len(prompts):,} of {format.counted(row_count, 'row')}, "
        f"{spec.samples:,} in the official set"
    )
    references = _read_references(table, len(prompts))
    return File(prompts=tuple(prompts), name=name, references=references)


def _find_prompt_column(table: dict[str, Sequence[Any]], path: Path) -> str:
    """Return the name of the column with the prompts. Raises UserError if there is none."""
    for name in (*TOKEN_COLUMNS, *TEXT_COLUMNS):
        if name in table:
            return name
    raise UserError(
        "missing_key",
        f"no column of prompts among {', '.join(map(str, table)) or 'none'}",
        str(path),
        f"one column of token IDs ({', '.join(TOKEN_COLUMNS)}) "
        f"or of texts ({', '.join(TEXT_COLUMNS)})",
    )


def _read_prompts(
    values: Sequence[Any], *, place: str, column: str, max_tokens: int, benchmark: str
) -> list[Prompt]:
    """Return the prompts of a column. Raises CombinedError with an error for each wrong one."""
    prompts: list[Prompt] = []
    errors: list[LoadgenError] = []
    for row, value in enumerate(values):
        where = f"{place}: row {row}, column {column}"
        prompt = _parse_prompt(value)
        if prompt is None:
            problem = f"not a prompt: {type(value).__name__}"
            errors.append(UserError("wrong_type", problem, where, "give token IDs, or a text"))
        elif isinstance(prompt, list) and len(prompt) > max_tokens:
            problem = f"the prompt has {format.counted(len(prompt), 'token')}"
            hint = f"{benchmark} allows at most {max_tokens:,} input tokens"
            errors.append(UserError("out_of_range", problem, where, hint))
        elif prompts and isinstance(prompt, str) != isinstance(prompts[0], str):
            problem = "texts and token IDs in one column"
            errors.append(UserError("wrong_type", problem, where, "use one of them in all rows"))
        else:
            prompts.append(prompt)
        if has_too_many(errors, place):
            break
    if errors:
        raise CombinedError(errors)
    return prompts


def _read_references(table: dict[str, Sequence[Any]], count: int) -> tuple[str | None, ...]:
    """Return the first reference responses, None for each row without one."""
    for name in REFERENCE_COLUMNS:
        if name in table:
            values = table[name][:count]
            return tuple(value if isinstance(value, str) else None for value in values)
    return (None,) * count


def _check_format(path: Path) -> None:
    """Raise UserError for a file that is neither JSONL nor Parquet.

    For a pickle file, the error says how to convert it.
    """
    is_compressed = path.suffix == ".gz" and len(path.suffixes) > 1
    suffix = path.suffixes[-2] if is_compressed else path.suffix
    if suffix in PICKLE_SUFFIXES:
        parquet = path.with_name(path.name.partition(".")[0] + ".parquet")
        raise UserError(
            "unsafe_file",
            "a pickle file can run any code when it is read",
            f"--dataset {path}",
            "convert a file that you trust: "
            f"pandas.read_pickle({str(path)!r}).to_parquet({str(parquet)!r})",
        )
    if suffix not in TABLE_SUFFIXES:
        raise UserError(
            "wrong_format",
            f'"{path.suffix}" is not a format of data sets',
            f"--dataset {path}",
            f"known: {', '.join(TABLE_SUFFIXES)}",
        )


def _parse_prompt(value: Any) -> Prompt | None:
    """Return a cell as a prompt, or None if it is none."""
    if isinstance(value, str):
        return value or None
    if isinstance(value, np.ndarray):
        value = value.reshape(-1).tolist()
    if not isinstance(value, list | tuple) or not value:
        return None
    if len(value) == 1 and isinstance(value[0], list | tuple | np.ndarray):
        return _parse_prompt(value[0])  # some files store a batch of one sequence
    if not all(_is_token_id(token) for token in value):
        return None
    return list(value)


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_columns(path: Path) -> dict[str, Sequence[Any]]:
    """Return the columns of a file of rows, with None for a cell that a row does not have."""
    rows = [row for _, row in read_located_rows(path)]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
