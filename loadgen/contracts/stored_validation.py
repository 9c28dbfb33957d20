"""The folder of a validation, read again: its contract, its runs, and the verdict on them. Writes nothing.

`run.py` makes the folder, and says which files are in it.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from loadgen.contracts import answer_scoring, schema, verdict
from loadgen.contracts.evaluate import MeasuredLevel, Money
from loadgen.contracts.schema import Contract
from loadgen.contracts.steady_samples import RecordedRun
from loadgen.contracts.verdict import Validation
from loadgen.core import run_folder
from loadgen.core.errors import CombinedError, UserError, nothing_there
from loadgen.core.execution.run_header import version
from loadgen.core.metrics.columns import measured_gaps
from loadgen.core.results import checksums, manifest, store
from loadgen.core.results.files import refuse_links
from loadgen.core.results.manifest import TargetFacts
from loadgen.core.stats.intervals import Interval
from loadgen.doctor.target_checks import Finding
from loadgen.figures import FIGURES

if TYPE_CHECKING:
    from loadgen.pricing.prices import Prices

CONTRACT, PRICES = "contract.yaml", "prices.yaml"
RESOLVED = (
    "contract.resolved.yaml"  # where the contract names environment variables: with their values
)
PLACE = "target.json"

_NAMED = "give the folder that `loadgen validate` named"
_USE_ORIGINAL = "take the folder as it was handed over; whoever holds SHA256SUMS can tell which file is the true one"


class ValidationFacts(msgspec.Struct, frozen=True):
    """The content of `target.json`: facts about the whole validation that its verdict repeats."""

    target: str
    started: str
    ended: str
    interrupted: bool
    trouble: dict[str, str]  # level -> why it could not be run
    preflight: tuple[str, ...]
    fault_codes: dict[str, tuple[str, ...]] = {}  # level -> codes of the faults behind its trouble
    metadata: dict[str, str] = {}
    findings: tuple[Finding, ...] = ()  # of the preflight, for the page
    shortened: dict[
        str, str
    ] = {}  # level -> by how much its load is shorter than in the contract, in words
    looks: tuple[
        dict[str, int], ...
    ] = ()  # level -> its runs at each look, where the validation was extended


def command_of(folder: Path) -> list[str]:
    """The command line that began a stored validation, without the program and its --bundle. Raises UserError.

    A run that was added later has the command that added it, so the first run of a level tells.
    """
    if not folder.is_dir():
        raise nothing_there(folder, _NAMED)
    refuse_links(folder)
    run_files = folder.glob("*/r*/run.json")
    run_file = min(
        run_files, key=lambda file: (len(file.parent.name), file.parent.name, file), default=None
    )
    if not (folder / PLACE).is_file() or run_file is None:
        raise UserError("no_result", "no validation with a run in this folder", str(folder), _NAMED)
    words = iter(manifest.decode(run_file.read_bytes(), str(run_file)).command[1:])
    kept = []
    for word in words:
        if word == "--bundle":
            next(words, None)
        elif not word.startswith("--bundle="):
            kept.append(word)
    return kept


def again(folder: Path) -> Validation:
    """The verdict on the folder of an earlier validation, recomputed from its records. Writes nothing.

    Raises UserError for a folder without a validation, Faults for files that differ from its hashes.
    """
    if not (folder / PLACE).is_file():
        if folder.is_dir():
            raise UserError("no_result", "no validation in this folder", str(folder), _NAMED)
        raise nothing_there(folder, _NAMED)
    refuse_links(folder)
    changed = verify(folder)
    if changed:
        raise CombinedError(
            [
                UserError(
                    "missing_file" if what == "gone" else "changed_file",
                    what,
                    str(folder / name),
                    _USE_ORIGINAL,
                )
                for name, what in changed.items()
            ]
        )
    return judge(folder, *read(folder))


def read(folder: Path) -> tuple[Contract, ValidationFacts]:
    """What a validation keeps beside its runs. Raises UserError or Faults for files that are none of one."""
    resolved = folder / RESOLVED
    file = resolved if resolved.is_file() else folder / CONTRACT
    contract = schema.parse(
        schema.text_of(file, str(file)), str(file), figures=_figures_of_others(folder)
    )
    place = folder / PLACE
    what = "a file of a validation"
    return contract, manifest.decoded(
        place.read_bytes(), ValidationFacts, str(place), what, _USE_ORIGINAL
    )


def _figures_of_others(folder: Path) -> tuple[str, ...]:
    """The figures of other packages that the runs of a validation used."""
    found: dict[str, None] = {}
    for file in sorted(folder.glob("*/r*/run.json")):
        with suppress(UserError):  # whoever reads the run says what is wrong with it
            used = manifest.decode(file.read_bytes(), str(file)).plugins
            found |= {one.name: None for one in used if one.table == FIGURES.group}
    return tuple(found)


def judge(folder: Path, contract: Contract, facts: ValidationFacts) -> Validation:
    measured = {
        level.name: _level_runs(folder, level.name, facts.trouble) for level in contract.levels
    }
    prices = _prices(folder, contract)
    level_verdicts = verdict.after_looks(
        contract, measured, facts.looks, None if prices is None else money(prices)
    )
    level_verdicts = tuple(
        msgspec.structs.replace(level, notes=(facts.shortened[level.name], *level.notes))
        if level.name in facts.shortened
        else level
        for level in level_verdicts
    )
    if contract.answers is not None:
        scored = answer_scoring.read(
            folder / answer_scoring.FOLDER,
            facts.trouble.get(answer_scoring.FOLDER, ""),
            contract.confidence,
        )
        level_verdicts = (*level_verdicts, verdict.of_answers(contract, contract.answers, scored))
    level_verdicts = tuple(
        msgspec.structs.replace(
            level, fault_codes=facts.fault_codes.get(level.name, ()) if level.trouble else ()
        )
        for level in level_verdicts
    )
    target = next(
        (level.runs[0].summary.target for level in measured.values() if level.runs), TargetFacts()
    )
    return Validation(
        contract=contract.name,
        contract_sha256=hashlib.sha256((folder / CONTRACT).read_bytes()).hexdigest(),
        verdict=verdict.together([level.verdict for level in level_verdicts]),
        sentence=verdict.sentence(level_verdicts),
        confidence=contract.confidence,
        horizon_s=contract.horizon_ns / 1e9,
        looks=max(len(facts.looks), 1),
        target=facts.target,
        model=target.model,
        server=target.server,
        region=target.region,
        metadata=facts.metadata,
        simulated=target.simulated,
        started=facts.started,
        ended=facts.ended,
        version=version(),
        levels=level_verdicts,
        interrupted=facts.interrupted,
        preflight=facts.preflight,
    )


def _level_runs(folder: Path, level: str, trouble: dict[str, str]) -> MeasuredLevel:
    run_files = [
        path for path in (folder / level).glob("r*/run.json") if path.parent.name[1:].isdecimal()
    ]
    ordered_files = sorted(run_files, key=lambda path: int(path.parent.name[1:]))
    return MeasuredLevel(
        runs=tuple(
            read_run(path.parent, folder)
            for path in ordered_files
            if (path.parent / "summary.json").is_file()
        ),
        trouble=trouble.get(level, ""),
    )


def read_run(folder: Path, under: Path, most: float = store.LAZY_ROWS) -> RecordedRun:
    """One run of a validation, read from its records. `under` is the folder of the validation; more rows than `most`
    stay in their file.
    """
    stored = store.read_run(folder, most=most, by_stage=False)
    summary = run_folder.kept_summary(folder)
    return RecordedRun(
        folder=str(folder.relative_to(under)),
        header=stored.header,
        summary=summary,
        rows=stored.rows,
        gaps=measured_gaps(stored.header, stored.gaps),
    )


def verify(folder: Path) -> dict[str, str]:
    """Check a folder against its list of hashes. Returns file -> what is wrong with it; {} when nothing is."""
    if checksums.read(folder) is None:
        return {checksums.FILE: "there is no list of hashes: nothing vouches for this folder"}
    return checksums.changed(folder) | dict.fromkeys(
        checksums.unlisted(folder), "not in the list of hashes"
    )


# -- money -------------------------------------------------------------------------------------------------------


def _prices(folder: Path, contract: Contract) -> Prices | None:
    if not contract.prices:
        return None
    from loadgen.pricing import price_file

    return price_file.load_prices(folder / PRICES, accept_sample=True)


def money(prices: Prices) -> Money:
    """The cost function under `prices`, per thousand good requests; the highest cost where several prices fit."""

    def cost(run: RecordedRun, good_rate: Interval) -> tuple[Interval, str]:
        from loadgen.pricing.cost_basis import compute_cost_basis
        from loadgen.pricing.evidence import Evidence
        from loadgen.pricing.prices import find_prices
        from loadgen.pricing.unit_cost import compute_unit_cost
        from loadgen.pricing.units import GOOD

        evidence = Evidence(name=run.folder, folder=run.folder, summaries=(run.summary,))
        measured_basis = compute_cost_basis(evidence)
        rate = Decimal(repr(good_rate.value))
        basis = replace(
            measured_basis,
            rates={**measured_basis.rates, GOOD: rate},
            low=Decimal(repr(max(good_rate.low, good_rate.value / 1e6))) / rate,
            high=Decimal(repr(good_rate.high)) / rate,
        )
        costs = []
        for price in find_prices(prices, run.summary.target):
            unit_price = compute_unit_cost(basis, price, run.summary.target.gpus, GOOD)
            if unit_price is None or unit_price.low is None or unit_price.high is None:
                raise UserError(
                    "missing_option", "nobody says how many GPUs there are", run.folder, "--gpus"
                )
            total, low, high = map(
                float, (unit_price.total * 1000, unit_price.low * 1000, unit_price.high * 1000)
            )
            costs.append(Interval(total, low, high))
        return max(costs, key=tuple), prices.currency

    return cost
