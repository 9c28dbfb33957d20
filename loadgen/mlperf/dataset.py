"""The data set of a benchmark: synthetic lengths of the same shape, or the official file where the user has it.

Reads files and computes lengths; sends nothing. MLPerf's data sets may not be redistributed, so the synthetic set is
the default, and every result names it as synthetic. A pickle is refused, because reading one runs its code.
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

SHAPE_SEED = 24576  # seeds the order of the synthetic set; part of its definition, not a setting
LEAST_INPUT = 4  # tokens that make prompts differ from each other
LEAST_OUTPUT = 2  # LoadGen's rules ask for more than one token
TABLE_SUFFIXES = (".jsonl", ".json", ".parquet")
PICKLE_SUFFIXES = (".pkl", ".pickle")


# -- the synthetic set -------------------------------------------------------------------------------------------------


class Lengths(NamedTuple):
    """Token counts of every sample of a data set, in its order, and the name of the set for results."""

    input: NDArray[np.int64]
    output: NDArray[np.int64]
    name: str


def synthetic(
    spec: Benchmark,
    *,
    benchmark: str,
    mean_input: float | None = None,
    mean_output: float | None = None,
) -> Lengths:
    """A data set of the benchmark's size: gamma lengths of shape 2, clipped at the rules' maxima, with the given means.

    Why gamma of shape 2: in the public run logs of Llama 2 70B, median latency over median TPOT gives answers with a
    median of 0.80 to 0.88 of the mean and a 99th percentile of about 3.1 times it; this law has 0.84 and 3.3 (less
    where the maximum clips it). Length i is the (i + 1/2) / n quantile of the law, so nothing is random and the means
    are met to a hundredth. Inputs and outputs are then shuffled independently with a fixed seed. Raises UserError for a
    mean that no such set can have.
    """
    n = spec.samples
    inputs = mean_input if mean_input is not None else spec.mean_input
    outputs = mean_output if mean_output is not None else spec.mean_output
    columns = []
    for kind, mean, least, most in (
        ("input", inputs, LEAST_INPUT, spec.max_input),
        ("output", outputs, LEAST_OUTPUT, spec.max_output),
    ):
        if not least < mean < most:
            hint = f"a mean {kind} between {least} and {most} tokens, the maximum of {benchmark}"
            raise UserError(
                "out_of_range",
                f"no set can have a mean {kind} of {mean:g} tokens",
                f"--mean-{kind} {mean:g}",
                hint,
            )
        order = seeds.stream(SHAPE_SEED, "mlperf", benchmark, kind).permutation(n)
        columns.append(_gamma(n, mean, least, most)[order])
    name = (
        f"synthetic, {n:,} samples in the shape of {benchmark}'s set (gamma lengths, mean {columns[0].mean():.2f} in "
        f"and {columns[1].mean():.2f} out); not MLPerf's data"
    )
    return Lengths(columns[0], columns[1], name)


def _gamma(count: int, mean: float, least: int, most: int) -> NDArray[np.int64]:
    """Quantiles of a gamma law of shape 2, rounded and clipped to [least, most], scaled to the given mean."""
    unit_scale_quantiles = _gamma_quantiles((np.arange(count) + 0.5) / count)

    def lengths(scale: float) -> NDArray[np.int64]:
        return np.clip(np.rint(unit_scale_quantiles * scale), least, most).astype(np.int64)

    low, high = 0.0, float(most)
    while lengths(high).mean() < mean:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths(middle).mean() < mean else (low, middle)
    return lengths(high)


def _gamma_quantiles(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x at which 1 - exp(-x) (1 + x) = p, by bisection."""
    low, high = np.zeros_like(p), np.full_like(p, 60.0)
    for _ in range(60):
        middle = (low + high) / 2
        below = 1 - np.exp(-middle) * (1 + middle) < p
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2


# -- LoadGen's order of issue ------------------------------------------------------------------------------------------


def issue_order(test: Test) -> list[int]:
    """The sample of each query of a pass: LoadGen's own random order, bit for bit. Later passes repeat it.

    Source: loadgen.cc (`GenerateLoadableSets`, `SampleDistributionEqualIssue`), with the minimum of queries below one
    pass, as in the rules. In Offline LoadGen shuffles each pass: the order returned is then that of the loaded set.
    """
    loaded = loaded_set(test)
    if test.scenario == "offline":
        return loaded
    twister = _MersenneTwister(test.seeds.sample_index)
    _shuffle(
        list(range(test.samples)), twister
    )  # LoadGen draws this one for the accuracy mode; not used here
    chosen = list(range(test.samples))
    _shuffle(chosen, twister)
    return [loaded[place] for place in chosen]


def loaded_set(test: Test) -> list[int]:
    """The samples in the order in which LoadGen asks for them to be loaded into memory, before the test."""
    loaded = list(range(test.samples))
    _shuffle(loaded, _MersenneTwister(test.seeds.qsl))
    return loaded


class _MersenneTwister:
    """The generator `std::mt19937`: 32-bit words one by one."""

    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed & 0xFFFFFFFF)
        self._words: list[int] = []

    def below(self, n: int) -> int:
        """libstdc++'s `uniform_int_distribution(0, n - 1)`: Lemire's multiplication with rejection of biased draws."""
        product = self._word() * n
        if product & 0xFFFFFFFF < n:
            threshold = (1 << 32) % n
            while product & 0xFFFFFFFF < threshold:
                product = self._word() * n
        return product >> 32

    def _word(self) -> int:
        if not self._words:
            self._words = np.frombuffer(self._state.bytes(4 * 4096), "<u4")[::-1].tolist()
        return self._words.pop()


def _shuffle(values: list[int], twister: _MersenneTwister) -> None:
    """libstdc++'s `std::shuffle`, which takes two swaps from one draw. For fewer than 65,536 values."""
    n = len(values)
    if n > 65_535:
        raise ValueError("libstdc++ shuffles so many in another way")
    i = 1
    if n % 2 == 0 and n:
        j = twister.below(2)
        values[1], values[j] = values[j], values[1]
        i = 2
    while i < n:
        for j in divmod(twister.below((i + 1) * (i + 2)), i + 2):
            values[i], values[j] = values[j], values[i]
            i += 1


# -- the official file -------------------------------------------------------------------------------------------------


IDS = ("tok_input", "tokenized_input", "input_ids", "tok_inputs", "token_ids", "input_tokens")
TEXTS = ("input", "text_input", "prompt", "question")
REFERENCES = ("output", "gt_output", "ref_output", "reference", "response")
"""Column names in the official files and in the tools around them; the first name that a file has is used."""


class File(Struct, frozen=True, kw_only=True):
    """The prompts of a file, as token ids (chat template included) or as texts, and its name for results."""

    prompts: tuple[list[int] | str, ...]
    name: str
    references: tuple[
        str | None, ...
    ] = ()  # the right answer of each sample, where the file has it

    @property
    def tokens(self) -> bool:
        """Whether the prompts are token ids, which only the completions API accepts."""
        return not isinstance(self.prompts[0], str)


def read_dataset(path: Path, spec: Benchmark, *, benchmark: str) -> File:
    """Read the data set in a JSONL or Parquet file. Raises UserError or Faults for everything else.

    Rows beyond the benchmark's number of samples are dropped, and the name says so.
    """
    if not path.is_file():
        hint = "the official data set: a .jsonl or .parquet file"
        raise UserError("missing_file", "no such file", f"--dataset {path}", hint)
    _check_format(path)
    table = _columns(path)
    column = next((name for name in (*IDS, *TEXTS) if name in table), None)
    if column is None:
        hint = f"one column of token ids ({', '.join(IDS)}) or of texts ({', '.join(TEXTS)})"
        raise UserError(
            "missing_key",
            f"no column of prompts among {', '.join(map(str, table)) or 'none'}",
            str(path),
            hint,
        )
    rows = len(table[column])
    if rows == 0:
        raise UserError(
            "empty_file",
            "the data set has no rows",
            str(path),
            f"{benchmark} has {spec.samples:,} samples",
        )
    prompts: list[list[int] | str] = []
    faults: list[LoadgenError] = []
    for row, value in enumerate(table[column][: spec.samples]):
        where = f"{path}: row {row}, column {column}"
        prompt = _prompt(value)
        if prompt is None:
            faults.append(
                UserError(
                    "wrong_type",
                    f"no prompt: {type(value).__name__}",
                    where,
                    "token ids, or a text",
                )
            )
        elif isinstance(prompt, list) and len(prompt) > spec.max_input:
            problem = f"a prompt of {format.counted(len(prompt), 'token')}"
            faults.append(
                UserError(
                    "out_of_range",
                    problem,
                    where,
                    f"{benchmark} has at most {spec.max_input:,} tokens in",
                )
            )
        else:
            prompts.append(prompt)
            if isinstance(prompt, str) != isinstance(prompts[0], str):
                faults.append(
                    UserError(
                        "wrong_type", "texts and token ids in one column", where, "one or the other"
                    )
                )
        if has_too_many(faults, str(path)):
            break
    if faults:
        raise CombinedError(faults)
    right = next((table[name] for name in REFERENCES if name in table), [None] * len(prompts))[
        : len(prompts)
    ]
    references = tuple(text if isinstance(text, str) else None for text in right)
    name = f"{path.name}, {len(prompts):,} of {format.counted(rows, 'row')}, {spec.samples:,} in the official set"
    return File(prompts=tuple(prompts), name=name, references=references)


def _check_format(path: Path) -> None:
    """Raise UserError for a file that is neither JSONL nor Parquet, with the way to convert a pickle."""
    has_inner_suffix = path.suffix == ".gz" and len(path.suffixes) > 1
    suffix = path.suffixes[-2] if has_inner_suffix else path.suffix
    if suffix in PICKLE_SUFFIXES:
        parquet = path.with_name(path.name.partition(".")[0] + ".parquet")
        raise UserError(
            "unsafe_file",
            "a pickle is a program that runs when it is read",
            f"--dataset {path}",
            f"convert a file that you trust: pandas.read_pickle({str(path)!r}).to_parquet({str(parquet)!r})",
        )
    if suffix not in TABLE_SUFFIXES:
        raise UserError(
            "wrong_format",
            f'"{path.suffix}" is no format of a data set',
            f"--dataset {path}",
            f"known: {', '.join(TABLE_SUFFIXES)}",
        )


def _prompt(value: Any) -> list[int] | str | None:
    if isinstance(value, str):
        return value or None
    if isinstance(value, np.ndarray):
        value = value.reshape(-1).tolist()
    if (
        isinstance(value, list | tuple)
        and len(value) == 1
        and isinstance(value[0], list | tuple | np.ndarray)
    ):
        return _prompt(value[0])  # some files store a batch of one sequence
    if not isinstance(value, list | tuple) or not value:
        return None
    if not all(
        isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in value
    ):
        return None
    return list(value)


def _columns(path: Path) -> dict[str, Sequence[Any]]:
    """The columns of a file of rows. None: the row has no such cell."""
    rows = [row for _, row in read_located_rows(path)]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
