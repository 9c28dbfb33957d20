"""The contract file: its terms, levels and types, parsed from YAML and validated. All faults are reported at once.

`lint.py` finds contradictions and terms that no run could show; `verdict.py` judges what runs have shown. The keywords
of the file are documented in docs/validate.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    Strict,
    Tag,
    ValidationError,
)

from loadgen.errors import Fault, Faults, UserError
from loadgen.slo import Slo
from loadgen.units import Wrong
from loadgen.workload import Workload
from loadgen.workload.fields import Duration, FiniteRate, Part, Quantile, Share, Source, Tagged, Whole, choice
from loadgen.workload.messages import fault, in_order
from loadgen.workload.schema import checked_slo
from loadgen.workload.yaml_marks import Map, read_yaml

EXAMPLES = ("chatbot", "rag", "summarization", "agentic", "mlperf-server", "mlperf-interactive")
LATENCIES = ("ttft", "ttft_from_sent", "first_answer", "tpot", "itl", "inter_chunk", "e2e", "max_gap")
Of = Literal["ttft", "ttft_from_sent", "first_answer", "tpot", "e2e", "max_gap"]
_EXAMPLE = (
    "the smallest contract: name, and levels: [{name: load, workload: qa, rate: 10/s, requests: 700, must: [...]}]"
)

# --------------------------------------------------------------------------------------------------------------- terms


class _Latency(Tagged):
    """A time is at most `limit_ns` at `quantile` (0.99 is p99). Failed and dropped requests are over every limit."""

    short = "limit"
    limit_ns: Annotated[Duration, Field(gt=0)] = Field(validation_alias="limit")
    quantile: Quantile = Field(0.99, validation_alias="at")


class Ttft(_Latency):
    tag = "ttft"


class TtftFromSent(_Latency):
    tag = "ttft_from_sent"


class FirstAnswer(_Latency):
    tag = "first_answer"


class Tpot(_Latency):
    tag = "tpot"


class Itl(_Latency):
    tag = "itl"


class InterChunk(_Latency):
    tag = "inter_chunk"


class E2e(_Latency):
    tag = "e2e"


class MaxGap(_Latency):
    tag = "max_gap"


def _above_zero(value: float) -> float:
    if value == 0:
        raise Wrong("can be shown by no sample, however large", "allow a small share, like 0.1%")
    return value


def _between_zero_and_one(value: float) -> float:
    if value == 1:
        raise Wrong("can be shown by no sample, however large", "ask for a little less, like 99.9%")
    if value == 0:
        raise Wrong("promises nothing", "a share above zero, like 99%")
    return value


class Errors(Tagged):
    """At most this share of requests is not ok (failed, dropped at the in-flight cap, lost)."""

    tag = "errors"
    short = "limit"
    limit: Annotated[Share, AfterValidator(_above_zero)]


class GoodputTerm(Tagged):
    """At least this share of requests meets every limit of the `slo`."""

    tag = "goodput"
    short = "share"
    share: Annotated[Share, AfterValidator(_between_zero_and_one)]


class _AtLeast(Tagged):
    """A rate is at least so much."""

    short = "rate"
    rate: FiniteRate


class RequestsTerm(_AtLeast):
    """Ok requests per second, steady (metrics.md)."""

    tag = "requests"


class GoodRequests(_AtLeast):
    """Requests per second that meet every limit of the `slo`, steady."""

    tag = "good_requests"


class OutputPerGpu(_AtLeast):
    """Output tokens per second and GPU, steady."""

    tag = "output_per_gpu"


class TokensPerGpu(_AtLeast):
    """Input and output tokens per second and GPU, steady."""

    tag = "tokens_per_gpu"


def _amount_and_currency(value: Any) -> Any:
    match = (
        re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([A-Z]{3})", value.strip()) if isinstance(value, str) else None
    )
    if match is None or not Decimal(match[1]):
        raise Wrong("is not an amount of money", "a number above zero and a currency, like 0.45 USD")
    return Decimal(match[1]), match[2]


class CostTerm(Tagged):
    """A thousand good requests cost at most so much, by the contract's `prices`."""

    tag = "cost"
    short = "limit"
    limit: Annotated[tuple[Decimal, str], BeforeValidator(_amount_and_currency)]


class _Windowed(Tagged):
    """The last `window` of the measured load against the first."""

    window_ns: Annotated[Duration, Field(gt=0)] = Field(validation_alias="window")


class DriftTerm(_Windowed):
    """A latency at a percentile is at most this share higher in the last window than in the first."""

    tag = "drift"
    of: Of
    quantile: Quantile = Field(0.99, validation_alias="at")
    limit: Annotated[Share, AfterValidator(_above_zero)]


class Sustained(_Windowed):
    """Ok requests per second in the last window are at least this share of those in the first."""

    tag = "sustained"
    share: Annotated[Share, AfterValidator(_between_zero_and_one)]


class BetweenNodes(Tagged):
    """A latency at a percentile differs between any two nodes by at most this share of the smaller."""

    tag = "between_nodes"
    of: Of
    quantile: Quantile = Field(0.5, validation_alias="at")
    limit: Annotated[Share, AfterValidator(_above_zero)]


class Against(Tagged):
    """A latency at a percentile is at most this share of the same at another level: a warm cache against a cold one."""

    tag = "against"
    level: str
    of: Of
    quantile: Quantile = Field(0.5, validation_alias="at")
    limit: Annotated[Share, AfterValidator(_above_zero)]


_TERMS: dict[str, type[Tagged]] = {
    kind.tag: kind
    for kind in (
        Ttft, TtftFromSent, FirstAnswer, Tpot, Itl, InterChunk, E2e, MaxGap, Errors, GoodputTerm, RequestsTerm,
        GoodRequests, OutputPerGpu, TokensPerGpu, CostTerm, DriftTerm, Sustained, BetweenNodes, Against,
    )
}  # fmt: skip
Latency = Ttft | TtftFromSent | FirstAnswer | Tpot | Itl | InterChunk | E2e | MaxGap
AtLeast = RequestsTerm | GoodRequests | OutputPerGpu | TokensPerGpu
Term = Annotated[
    Annotated[Ttft, Tag("ttft")]
    | Annotated[TtftFromSent, Tag("ttft_from_sent")]
    | Annotated[FirstAnswer, Tag("first_answer")]
    | Annotated[Tpot, Tag("tpot")]
    | Annotated[Itl, Tag("itl")]
    | Annotated[InterChunk, Tag("inter_chunk")]
    | Annotated[E2e, Tag("e2e")]
    | Annotated[MaxGap, Tag("max_gap")]
    | Annotated[Errors, Tag("errors")]
    | Annotated[GoodputTerm, Tag("goodput")]
    | Annotated[RequestsTerm, Tag("requests")]
    | Annotated[GoodRequests, Tag("good_requests")]
    | Annotated[OutputPerGpu, Tag("output_per_gpu")]
    | Annotated[TokensPerGpu, Tag("tokens_per_gpu")]
    | Annotated[CostTerm, Tag("cost")]
    | Annotated[DriftTerm, Tag("drift")]
    | Annotated[Sustained, Tag("sustained")]
    | Annotated[BetweenNodes, Tag("between_nodes")]
    | Annotated[Against, Tag("against")],
    choice("term", _TERMS),
]
"""One promise, written as a mapping with one key."""

# -------------------------------------------------------------------------------------------------------------- levels


ContractSlo = Annotated[Slo | None, PlainValidator(checked_slo)]
Name = Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class ContractLevel(Part):
    """One load, and what was promised under it. What is left out is as in the workload."""

    synonyms: ClassVar[dict[str, str]] = {
        "request_rate": "rate",
        "count": "requests",
        "num_requests": "requests",
        "runs": "repeats",
        "terms": "must",
    }
    name: Name
    description: str = ""
    workload: Annotated[str, Field(min_length=1)]  # name of a packaged workload, or a path relative to the contract
    rate: FiniteRate | None = None
    concurrency: Whole | None = None
    duration_ns: Annotated[Duration, Field(gt=0)] | None = Field(None, validation_alias="duration")
    requests: Whole | None = None
    warmup_ns: Duration | None = Field(None, validation_alias="warmup")
    grace_ns: Duration | None = Field(None, validation_alias="grace")
    repeats: Annotated[int, Strict(), Field(ge=1, le=100)] = 1
    apart_ns: Annotated[Duration, Field(gt=0)] | None = Field(None, validation_alias="apart")
    cache: Literal["cold", "warm"] | None = None
    slo: ContractSlo = None
    must: tuple[Term, ...] = ()
    should: tuple[Term, ...] = ()


def _levels(value: Any) -> Any:
    if value == []:
        raise Wrong("is empty: nothing was promised", "levels: [{name: load, workload: qa, must: [{ttft: 2s}]}]")
    return value


class Contract(Part):
    """All that a contract file may say."""

    synonyms: ClassVar[dict[str, str]] = {"loads": "levels", "level": "levels"}
    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: str = ""
    confidence: Annotated[Share, Field(ge=0.5, le=0.999)] = 0.95
    horizon_ns: Annotated[Duration, Field(gt=0)] | None = Field(None, validation_alias="horizon")
    gpus: Whole | None = None
    prices: str | None = None
    slo: ContractSlo = None
    levels: Annotated[tuple[ContractLevel, ...], BeforeValidator(_levels)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A level and its load: `workload` is the level's workload with the level's own rate, bounds and SLO applied."""

    level: ContractLevel
    workload: Workload
    requests: int | None  # expected measured requests of one run; None: not known before (closed loop by time)
    rate: float | None  # expected measured requests per second
    duration_ns: int | None  # of the measured stages together


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A contract with its plan. `text` is the file as written."""

    contract: Contract
    levels: tuple[Planned, ...]
    text: str
    file: str
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The parts of one level that could be parsed, so that `lint` can report faults in the rest.

    `level` has no terms and is None where the level itself is wrong. Each entry of `terms` is the list it is in
    ("must" or "should"), its place in that list, and the term.
    """

    index: int
    name: str
    workload: str | None
    level: ContractLevel | None
    terms: tuple[tuple[str, int, Any], ...]


def parse(text: str, label: str, env: Mapping[str, str] = os.environ) -> Contract:
    """Parse the text of a contract that was checked before its runs. Checks shape and units only. Raises Faults."""
    document, faults = read_text(text, label, env)
    source = Source(file=label, folder=Path(), faults=faults)
    try:
        contract = Contract.model_validate(document, context=source)
    except ValidationError as invalid:
        source.faults.extend(fault(detail, document, label) for detail in invalid.errors(include_url=False))
        raise Faults(in_order(source.faults)) from None
    if source.faults:
        raise Faults(in_order(source.faults))
    return contract


def plain(value: Any) -> str | None:
    """A scalar of the file as text; a bare number counts as text. None for anything else."""
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None


def read_text(text: str, label: str, env: Mapping[str, str]) -> tuple[Map, list[Fault]]:
    return read_yaml(text, label, env, kind="contract", smallest=_EXAMPLE)


def shipped() -> dict[str, Path]:
    """The packaged contracts: bare name -> path."""
    package = Path(__file__).parent.parent
    in_wheel = package / "data" / "contracts"  # in a wheel; in a checkout the folder beside the package
    folder = in_wheel if in_wheel.is_dir() else package.parent / "contracts"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find(path: Path) -> Path:
    return path if path.is_file() else shipped().get(str(path), path)


def text_of(file: Path, as_given: str) -> str:
    """The text of a contract file. Raises Faults for a file that is missing, unreadable, too large or not UTF-8."""
    hint = f"the path of a YAML file, or one of {', '.join(shipped())}"
    try:
        data = file.read_bytes() if file.stat().st_size <= 1 << 20 else b"\xff"
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Faults([UserError("not a text file (UTF-8) of at most 1 MiB", as_given, hint)]) from None
    except OSError as error:
        what = "no such contract" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise Faults([UserError(what, as_given, hint)]) from None


def tag(term: Any) -> str:
    """The keyword of a term in the contract file: `ttft`, `errors`."""
    word: str = type(term).tag
    return word
