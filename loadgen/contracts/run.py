"""A contract carried out: preflight, runs, verdict, and one folder that holds all of it with the hash of every file.

IO. The folder: `contract.yaml` and what it names, `doctor.json`, a folder per level with its runs, `verdict.json`,
`verdict.html`, `junit.xml`, and `manifest.sha256` in the format of `sha256sum -c`. `again` judges it anew.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from loadgen.contracts import schema, verdict
from loadgen.contracts.evaluate import MeasuredLevel, Money
from loadgen.contracts.schema import Checked, Contract
from loadgen.contracts.steady_samples import RecordedRun
from loadgen.contracts.verdict import Validation
from loadgen.errors import Faults, TargetError, UserError
from loadgen.execution.plan import Settings, version
from loadgen.metrics import summary_json
from loadgen.metrics.summary import Summary
from loadgen.preflight.target_checks import FAULT, WARNING, Finding
from loadgen.report import junit
from loadgen.report import validation as verdict_page
from loadgen.report.validation import cases
from loadgen.results import store
from loadgen.stats.quantile_interval import Bounds
from loadgen.stats.quantiles import Histogram

if TYPE_CHECKING:
    from loadgen.cost.prices import Prices

CONTRACT, PRICES, DOCTOR, VERDICT = "contract.yaml", "prices.yaml", "doctor.json", "verdict.json"
PAGE, JUNIT, MANIFEST, PLACE = "verdict.html", "junit.xml", "manifest.sha256", "target.json"

_AS_HANDED = "take the folder as it was handed over; whoever holds the manifest can tell which file is the true one"

Perform = Callable[..., tuple[Summary, Path]]
"""`run.execute`, or the same with a live view around it: (workload, settings) -> (summary, folder)."""


class _Place(msgspec.Struct, frozen=True):
    """What the verdict says of the whole validation besides its levels."""

    target: str
    started: str
    ended: str
    interrupted: bool
    trouble: dict[str, str]  # level -> why it could not be run
    preflight: tuple[str, ...]


def run(
    checked: Checked, settings: Settings, out: Path | None, *, perform: Perform, say: Callable[[str], None]
) -> tuple[Validation, Path]:
    """Carry a checked contract out. What stands in the way of a level makes its terms INCONCLUSIVE, with the reason.

    Raises UserError for a folder that is in use.
    """
    started = _now()
    folder = _folder(out, checked.contract.name)
    (folder / CONTRACT).write_text(checked.text, encoding="utf-8")
    if checked.contract.prices:
        (folder / PRICES).write_bytes((checked.folder / checked.contract.prices).read_bytes())
    say(f"folder: {folder}")
    gpus = checked.contract.gpus  # as --gpus: of each endpoint that does not say its own
    targets = tuple(replace(one, gpus=one.gpus or gpus) for one in settings.targets)
    settings = replace(settings, gpus=settings.gpus or gpus, targets=targets)
    found = _preflight(settings, folder, say)
    faults = [f"{one.check}: {one.found}" for one in found if one.state == FAULT]
    trouble: dict[str, str] = {}
    interrupted = False
    for planned in checked.levels:
        name = planned.level.name
        if faults or interrupted:
            trouble[name] = f"the target cannot be used: {'; '.join(faults)}" if faults else "the user broke it off"
            continue
        for number in range(1, planned.level.repeats + 1):
            say(f"level {name}, run {number} of {planned.level.repeats}")
            try:
                summary, _ = perform(planned.workload, replace(settings, out=folder / name / f"r{number}"))
            except TargetError as error:
                trouble[name] = f"run {number} could not be done: {error.what}"
                break
            except Faults as several:
                trouble[name] = f"run {number} could not be done: {'; '.join(one.what for one in several.faults)}"
                break
            if summary.run.state == "interrupted":
                interrupted = True
                break
    warnings = tuple(f"{one.check}: {one.found}" for one in found if one.state in (FAULT, WARNING))
    place = _Place(settings.shown, started, _now(), interrupted, trouble, warnings)
    (folder / PLACE).write_bytes(msgspec.json.format(msgspec.json.encode(place)) + b"\n")
    return _judged(folder, checked.contract, place), folder


def again(folder: Path) -> Validation:
    """The verdict on a folder that is there already, from its records. Raises UserError for what is no such folder, or
    one whose files are not those of its manifest."""
    if not (folder / PLACE).is_file():
        what = "no validation in this folder" if folder.is_dir() else "no such folder"
        raise UserError(what, str(folder), "give the folder that `loadgen validate` named")
    changed = verify(folder)
    if changed:
        raise Faults([UserError(what, str(folder / name), _AS_HANDED) for name, what in changed.items()])
    contract = schema.parse(schema.text_of(folder / CONTRACT, str(folder / CONTRACT)), str(folder / CONTRACT))
    try:
        place = msgspec.json.decode((folder / PLACE).read_bytes(), type=_Place)
    except msgspec.DecodeError as error:
        raise UserError(f"not a file of a validation: {error}", str(folder / PLACE), _AS_HANDED) from None
    return _verdict(folder, contract, place)


def _judged(folder: Path, contract: Contract, place: _Place) -> Validation:
    validation = _verdict(folder, contract, place)
    store.replace(folder / VERDICT, msgspec.json.format(msgspec.json.encode(validation)) + b"\n")
    store.replace(folder / PAGE, verdict_page.render(validation).encode())
    store.replace(folder / JUNIT, junit.render(contract.name, cases(validation)).encode())
    store.replace(folder / MANIFEST, _manifest(folder).encode())
    return validation


def _verdict(folder: Path, contract: Contract, place: _Place) -> Validation:
    measured = {level.name: _measured(folder, level.name, place.trouble) for level in contract.levels}
    prices = _prices(folder, contract)
    found = verdict.levels(contract, measured, None if prices is None else money(prices))
    first = next((level.runs[0] for level in measured.values() if level.runs), None)
    target = first.summary.target if first is not None else None
    return Validation(
        contract=contract.name,
        contract_sha256=hashlib.sha256((folder / CONTRACT).read_bytes()).hexdigest(),
        verdict=verdict.together([level.verdict for level in found]),
        sentence=verdict.sentence(found),
        confidence=contract.confidence,
        target=place.target,
        model=target.model if target is not None else "",
        server=target.server if target is not None else "",
        simulated=target.simulated if target is not None else False,
        started=place.started,
        ended=place.ended,
        version=version(),
        levels=found,
        interrupted=place.interrupted,
        preflight=place.preflight,
    )


def _measured(folder: Path, level: str, trouble: dict[str, str]) -> MeasuredLevel:
    there = [path for path in (folder / level).glob("r*/run.json") if path.parent.name[1:].isdecimal()]
    runs = sorted(there, key=lambda path: int(path.parent.name[1:]))
    return MeasuredLevel(
        runs=tuple(read_run(path.parent, folder) for path in runs if (path.parent / "summary.json").is_file()),
        trouble=trouble.get(level, ""),
    )


def read_run(folder: Path, under: Path) -> RecordedRun:
    """One run of a validation from its records; `under` is the validation's own folder."""
    stored = store.read_run(folder)
    summary = summary_json.load_summary((folder / "summary.json").read_bytes(), str(folder / "summary.json"))
    pooled = Histogram()
    for stage, gaps in zip(stored.header.stages, stored.gaps, strict=False):
        if stage.measured:
            pooled.merge(gaps)
    rows: np.ndarray[tuple[int], np.dtype[np.void]] = stored.rows
    return RecordedRun(
        folder=str(folder.relative_to(under)), header=stored.header, summary=summary, rows=rows, gaps=pooled
    )


def _preflight(settings: Settings, folder: Path, say: Callable[[str], None]) -> list[Finding]:
    """The doctor's findings for every endpoint, kept; a simulation in virtual time has nothing to be examined."""
    if settings.url is not None and settings.url.startswith("sim:"):
        return []
    from loadgen.preflight import doctor, host_checks, target_checks

    everything: list[Finding] = []
    kept = []
    for endpoint in settings.endpoints:
        title, found = doctor.run(settings if not endpoint.url else settings.of(endpoint))
        kept.append({"title": title, "findings": found})
        if len(settings.endpoints) > 1:  # each by its name, this host once
            here = [] if everything else [one for one in found if one.check in host_checks.HOST]
            there = [one for one in found if one.check not in host_checks.HOST]
            found = [msgspec.structs.replace(one, check=f"{one.check} of {endpoint.shown}") for one in there] + here
        everything += found
        if any(one.state in (FAULT, WARNING) for one in found):
            say(target_checks.render(title, [one for one in found if one.state in (FAULT, WARNING)]).rstrip())
    (folder / DOCTOR).write_bytes(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
    return everything


# -- money -------------------------------------------------------------------------------------------------------


def _prices(folder: Path, contract: Contract) -> Prices | None:
    if not contract.prices:
        return None
    from loadgen.cost import price_file

    return price_file.load_prices(folder / PRICES, accept_sample=True)


def money(prices: Prices) -> Money:
    """Cost per thousand good requests under `prices`; of several that fit, the dearest."""

    def cost(run: RecordedRun, good: Bounds) -> tuple[Bounds, str]:
        from loadgen.cost import prices as pricing
        from loadgen.cost import unit_cost
        from loadgen.cost.evidence import Evidence

        evidence = Evidence(name=run.folder, folder=run.folder, summaries=(run.summary,))
        middle = unit_cost.basis(evidence)
        rate = Decimal(repr(good.value))
        basis = replace(
            middle,
            rates={**middle.rates, unit_cost.GOOD: rate},
            low=Decimal(repr(max(good.low, good.value / 1e6))) / rate,
            high=Decimal(repr(good.high)) / rate,
        )
        found = []
        for price in pricing.find(prices, run.summary.target):
            one = unit_cost.cost(basis, price, run.summary.target.gpus, unit_cost.GOOD)
            if one is None or one.low is None or one.high is None:
                raise UserError("nobody says how many GPUs there are", run.folder, "--gpus")
            found.append(Bounds(*(float(end * 1000) for end in (one.total, one.low, one.high))))
        return max(found), prices.currency

    return cost


# -- the folder --------------------------------------------------------------------------------------------------


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).astimezone().isoformat(timespec="seconds")


def _folder(out: Path | None, name: str) -> Path:
    if out is None:
        from loadgen.execution.folder_names import run_id

        out = Path("results") / run_id(f"validate-{name}", datetime.datetime.now().astimezone())
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError("this folder is in use", f"--out {out}", "give a new or empty one: a verdict has one folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot be made: {error.strerror}", f"--out {out}") from None
    return out


def _sums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return {path.relative_to(folder).as_posix(): _sha256(path) for path in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest(folder: Path) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in _sums(folder).items())


def verify(folder: Path) -> dict[str, str]:
    """What of a folder is not as its manifest says, by file; {} when all of it is."""
    try:
        lines = (folder / MANIFEST).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {MANIFEST: "there is no manifest: nothing vouches for this folder"}
    except UnicodeDecodeError:
        return {MANIFEST: "not a manifest: it is no text"}
    said = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    there = _sums(folder)
    changed = {name: "gone" for name in said if name not in there}
    changed |= {name: "not in the manifest" for name in there if name not in said}
    return changed | {name: "changed" for name in said if name in there and there[name] != said[name]}


__all__ = ["again", "money", "read_run", "run", "verify"]
