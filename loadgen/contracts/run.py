"""Runs a contract: preflight, load runs, verdict. Everything goes into one folder, with the hash of every file.

IO. The folder holds `contract.yaml` (and `contract.resolved.yaml`), `prices.yaml` if it names one, `doctor.json`,
`target.json`, a folder per level with its runs, `repeats.json` where a level has several, `verdict.json`,
`verdict.html`, `junit.xml`, and `SHA256SUMS` in the format of `sha256sum -c`.
`stored_validation.again` recomputes the verdict from the records; `extend` adds runs to a stored validation.
"""

from __future__ import annotations

import datetime
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from loadgen.contracts import answer_scoring, level_plan, sections, stored_validation, verdict
from loadgen.contracts.schema import AnswerCheck, Checked, Contract, ContractLevel, Planned
from loadgen.contracts.sections import Measured, cases
from loadgen.contracts.stored_validation import CONTRACT, PLACE, PRICES, RESOLVED, ValidationFacts
from loadgen.contracts.verdict import LevelVerdict, Validation
from loadgen.core import format, run_folder
from loadgen.core.errors import CombinedError, LoadgenError, TargetError, UserError, codes
from loadgen.core.execution.folder_names import alone, run_id
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import Execute
from loadgen.core.metrics.summary import NamedSummary, Summary
from loadgen.core.results import checksums, store
from loadgen.core.workload import with_unique_prompts
from loadgen.doctor.target_checks import FAULT, WARNING, Finding
from loadgen.render import html, junit
from loadgen.render import text as as_text
from loadgen.render.section import Report
from loadgen.repeated import repeats
from loadgen.repeated.repeats import RepeatSummary, Repetition
from loadgen.runs.repetition import pause, seeded

if TYPE_CHECKING:
    from loadgen.core.workload import Workload

DOCTOR, VERDICT, PAGE, JUNIT = "doctor.json", "verdict.json", "verdict.html", "junit.xml"


def run(
    checked: Checked,
    settings: Settings,
    out: Path | None,
    *,
    perform: Execute,
    say: Callable[[str], None],
    seed: int | None = None,
    salt: str | None = None,
    repetition: Repetition | None = None,
    other: Settings | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> tuple[Validation, Path]:
    """Run a checked contract and judge it; returns the verdict and the folder. `say` gets lines of progress.

    `seed`, `salt`: of all its prompts, in the place of those in the workload files. `repetition`: how often each level
    is run, and with what pause, instead of what the contract says; a level's `apart` is the least pause. `other`: the
    endpoint that answers are compared with. The prompts of `answers` are asked after all loads.

    A level that could not be run makes its terms INCONCLUSIVE, with the reason.

    Raises UserError for a folder that is in use.
    """
    folder = _folder(out, checked.contract.name)
    with alone(folder):
        _folder(folder, checked.contract.name)  # nobody was quicker
        runs = partial(
            _runs_of_level, folder, perform=perform, say=say, seed=seed, salt=salt, wait=wait
        )
        return _carry_out(checked, settings, folder, say, repetition, other, runs), folder


class _Trouble(NamedTuple):
    """Why a level could not be run: in words, and the codes of the faults behind it."""

    words: str
    codes: tuple[str, ...] = ()


_BROKEN_OFF = _Trouble("the user broke it off")


def _of_faults(what: str, raised: LoadgenError | CombinedError) -> _Trouble:
    faults = raised.faults if isinstance(raised, CombinedError) else (raised,)
    return _Trouble(f"{what}: {'; '.join(fault.what for fault in faults)}", codes(raised))


def _of_findings(faults: Sequence[Finding]) -> _Trouble | None:
    if not faults:
        return None
    found = "; ".join(f"{finding.check}: {finding.found}" for finding in faults)
    return _Trouble(
        f"the target cannot be used: {found}",
        tuple(finding.code or "failed_check" for finding in faults),
    )


def _carry_out(
    checked: Checked,
    settings: Settings,
    folder: Path,
    say: Callable[[str], None],
    repetition: Repetition | None,
    other: Settings | None,
    runs: Callable[[Planned, Repetition, Settings], tuple[list[Summary], bool, _Trouble | None]],
) -> Validation:
    started = _now()
    (folder / CONTRACT).write_text(checked.text, encoding="utf-8")
    if checked.resolved:
        (folder / RESOLVED).write_text(checked.resolved, encoding="utf-8")
    if checked.contract.prices:
        (folder / PRICES).write_bytes((checked.folder / checked.contract.prices).read_bytes())
    say(f"folder: {folder}")
    settings = with_gpus(settings, checked.contract.gpus)
    findings = _preflight(settings, folder, say)
    unusable = _of_findings([finding for finding in findings if finding.state == FAULT])
    trouble: dict[str, _Trouble] = {}
    interrupted = False
    for planned in checked.levels:
        name = planned.level.name
        if unusable or interrupted:
            trouble[name] = unusable or _BROKEN_OFF
            continue
        how = _repetition(planned.level, repetition)
        summaries, interrupted, problem = runs(planned, how, settings)
        if problem:
            trouble[name] = problem
        elif interrupted and not how.is_complete(summaries):
            trouble[name] = _Trouble(
                f"the user broke it off after {len(summaries)} of {how.description} runs"
            )
    if checked.contract.answers is not None:
        problem = unusable or _BROKEN_OFF
        if not unusable and not interrupted:
            say(f"answers: the prompts of {checked.contract.answers.dataset}")
            interrupted, problem = _answers(
                checked, checked.contract.answers, settings, other, folder
            )
        if problem:
            trouble[answer_scoring.FOLDER] = problem
    facts = ValidationFacts(
        target=settings.shown,
        started=started,
        ended=_now(),
        interrupted=interrupted,
        trouble={level: one.words for level, one in trouble.items()},
        fault_codes={level: one.codes for level, one in trouble.items() if one.codes},
        preflight=_warnings(findings),
        metadata=dict(settings.metadata),
        findings=tuple(findings),
        shortened={
            planned.level.name: words
            for planned in checked.levels
            if (words := level_plan.shortened_words(planned))
        },
    )
    return _judge_and_write(folder, checked.contract, facts)


def _answers(
    checked: Checked, asked: AnswerCheck, settings: Settings, other: Settings | None, folder: Path
) -> tuple[bool, _Trouble | None]:
    """Ask the prompts. Returns whether the user broke it off, and why it could not be done (None when it was done)."""
    try:
        out, level = folder / answer_scoring.FOLDER, checked.contract.confidence
        answer_scoring.carry_out(asked, checked.folder / asked.dataset, settings, other, out, level)
    except KeyboardInterrupt:
        return True, _BROKEN_OFF
    except (LoadgenError, CombinedError) as raised:
        return False, _of_faults("the prompts could not be asked", raised)
    return False, None


def _runs_of_level(
    folder: Path,
    planned: Planned,
    how: Repetition,
    settings: Settings,
    *,
    perform: Execute,
    say: Callable[[str], None],
    seed: int | None,
    salt: str | None,
    wait: Callable[[float], None],
    before: int = 0,
) -> tuple[list[Summary], bool, _Trouble | None]:
    """The runs of a level, after the `before` that there are: their summaries, whether the user broke them off, and why
    one could not be done (None when all could).
    """
    name = planned.level.name
    summaries: list[Summary] = []
    while not how.is_complete(summaries):
        repeat = before + len(summaries) + 1
        if repeat > 1 and not pause(
            how, f"{name}, run {repeat}", virtual=settings.virtual, say=say, wait=wait
        ):
            return summaries, True, None
        say(
            f"level {name}, run {repeat} of {how.description if not before else f'{before} + {how.words}'}"
        )
        try:
            workload = _of_run(planned.workload, name, repeat, seed, salt)
            summary, _ = perform(workload, replace(settings, out=folder / name / f"r{repeat}"))
        except (TargetError, CombinedError) as raised:
            return summaries, False, _of_faults(f"run {repeat} could not be done", raised)
        summaries.append(summary)
        if summary.run.state == "interrupted":
            return summaries, True, None
    return summaries, False, None


def extend(
    folder: Path,
    checked: Checked,
    settings: Settings,
    *,
    add_ns: int | None,
    perform: Execute,
    say: Callable[[str], None],
    seed: int | None = None,
    salt: str | None = None,
    repetition: Repetition | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> Validation:
    """Add runs to the levels of a stored validation that have undecided terms, and judge all runs together.

    `add_ns`: the length of each added run; None: as in the contract. The others are as in `run`. A run that is broken
    off is deleted and counts for nothing.

    Raises UserError or Faults for a folder, contract or target that does not fit, and where nothing can be gained.
    """
    validation = stored_validation.again(folder)
    contract, facts = stored_validation.read(folder)
    _check_extension(folder, checked, settings, validation, facts)
    levels = [
        level for level in validation.levels if level.name != answer_scoring.FOLDER
    ]  # prompts are asked once
    undecided = {level.name: _undecided(contract, level) for level in levels if not level.trouble}
    against = {name for names in undecided.values() for name in names}
    chosen = [
        planned
        for planned in checked.levels
        if undecided.get(planned.level.name) or planned.level.name in against
    ]
    if not chosen:
        is_pass = validation.verdict == verdict.PASS
        what = "every term is decided" if is_pass else "no term is undecided for want of load"
        hint = "nothing is gained by more load; loadgen validate with a new folder runs anew"
        raise UserError("already_decided", what, str(folder), hint)
    settings = with_gpus(settings, contract.gpus)
    findings = _preflight(settings, folder, say)
    if faults := [finding for finding in findings if finding.state == FAULT]:
        checksums.write(folder)
        raise CombinedError(
            [
                UserError(
                    "failed_check",
                    f"{one.check}: {one.found}",
                    settings.shown,
                    one.meaning,
                    key=one.check,
                )
                for one in faults
            ]
        )
    runs = partial(
        _runs_of_level, folder, perform=perform, say=say, seed=seed, salt=salt, wait=wait
    )
    counts = {level.name: len(level.runs) for level in levels}
    added = dict(counts)
    for planned in chosen:
        name = planned.level.name
        longer = (
            planned
            if add_ns is None
            else replace(planned, workload=level_plan.lasting(planned.workload, add_ns))
        )
        how = _repetition(planned.level, repetition)
        summaries, interrupted, problem = runs(longer, how, settings, before=counts[name])
        finished = sum(summary.run.state != "interrupted" for summary in summaries)
        added[name] += finished
        for broken in (folder / name).glob("r*"):
            if int(broken.name[1:]) > added[name]:
                shutil.rmtree(broken)
        if interrupted or problem:
            say(
                f"level {name}: {problem.words if problem else 'broken off'}; {finished} of its added runs count"
            )
            break
    else:
        interrupted = False
    if added != counts:
        looks = (*(facts.looks or (counts,)), added)
        facts = msgspec.structs.replace(facts, ended=_now(), looks=looks, findings=tuple(findings))
    extended = _judge_and_write(folder, contract, facts)
    return msgspec.structs.replace(extended, interrupted=True) if interrupted else extended


def _check_extension(
    folder: Path,
    checked: Checked,
    settings: Settings,
    validation: Validation,
    facts: ValidationFacts,
) -> None:
    """Raises Faults for a contract or target other than that of the folder, and UserError for a broken promise."""
    faults: list[LoadgenError] = []
    if checked.text != (folder / CONTRACT).read_text("utf-8"):
        faults.append(
            UserError(
                "mismatch",
                f"is not the contract in {folder}",
                checked.file,
                f"extend with {folder / CONTRACT}",
            )
        )
    if settings.shown != facts.target:
        faults.append(
            UserError(
                "mismatch",
                f"this validation is of {facts.target}",
                settings.shown,
                "a new folder for this target",
            )
        )
    if validation.verdict == verdict.FAIL:
        what = "a promise is broken, and stays so: more load takes no verdict back"
        faults.append(
            UserError(
                "already_decided",
                what,
                str(folder),
                "after a change of the server: loadgen validate with a new folder",
            )
        )
    if faults:
        raise CombinedError(faults)


def _undecided(contract: Contract, level: LevelVerdict) -> set[str]:
    """The levels that the undecided terms of a level need: itself, and those that it is compared with."""
    of_contract = next(one for one in contract.levels if one.name == level.name)
    terms = zip(level.terms, (*of_contract.must, *of_contract.should), strict=True)
    open_terms = [term for judged, term in terms if judged.verdict == verdict.INCONCLUSIVE]
    return {level.name for _ in open_terms[:1]} | {term.level for term in open_terms if term.level}


def with_gpus(settings: Settings, gpus: int | None) -> Settings:
    """Return the settings with the contract's GPUs for each endpoint that has no number of its own.

    A simulated target keeps the number of its preset.
    """
    if settings.virtual:
        return settings
    targets = tuple(replace(target, gpus=target.gpus or gpus) for target in settings.targets)
    return replace(settings, gpus=settings.gpus or gpus, targets=targets)


def _warnings(findings: Sequence[Finding]) -> tuple[str, ...]:
    return tuple(
        f"{finding.check}: {finding.found}"
        for finding in findings
        if finding.state in (FAULT, WARNING)
    )


def _of_run(
    workload: Workload, level: str, repeat: int, seed: int | None, salt: str | None
) -> Workload:
    """The workload of one run. With a seed, repeats get seeds of their own, and no run sends another one's prompts."""
    given = {name: value for name, value in (("seed", seed), ("salt", salt)) if value is not None}
    return with_unique_prompts(
        seeded(workload.model_copy(update=given), repeat, level), f"{level}.r{repeat}"
    )


def _repetition(level: ContractLevel, asked: Repetition | None) -> Repetition:
    """How often a level is run: as the contract says, or as asked, with at least the contract's pause."""
    how = asked or Repetition(count=level.repeats)
    return replace(how, pause_ns=max(how.pause_ns, level.apart_ns or 0))


def _judge_and_write(folder: Path, contract: Contract, facts: ValidationFacts) -> Validation:
    (folder / PLACE).write_bytes(format.document(facts))
    validation = stored_validation.judge(folder, contract, facts)
    for name, data in _outputs(folder, validation, contract, facts).items():
        store.replace(folder / name, data, shared=name != VERDICT)
    if spread := _spread(folder, validation):
        store.replace(folder / repeats.FILE, msgspec.json.encode({"levels": spread}))
    checksums.write(folder)
    return validation


def _spread(folder: Path, validation: Validation) -> dict[str, RepeatSummary]:
    """How far the runs of each level that has several lie from each other."""
    return {
        level.name: repeats.summarize_repeats(
            [NamedSummary(run, run_folder.kept_summary(folder / run)) for run in level.runs]
        )
        for level in validation.levels
        if len(level.runs) > 1
    }


def outputs_again(folder: Path, version: str) -> dict[str, bytes]:
    """`verdict.json`, the page and JUnit of a stored validation, made again. `version`: of the loadgen that judged."""
    contract, facts = stored_validation.read(folder)
    return _outputs(
        folder,
        msgspec.structs.replace(stored_validation.judge(folder, contract, facts), version=version),
        contract,
        facts,
    )


def _outputs(
    folder: Path, validation: Validation, contract: Contract, facts: ValidationFacts
) -> dict[str, bytes]:
    return {
        VERDICT: format.document(validation),
        PAGE: html.render(
            sections.report(validation, _measured(folder, validation, contract, facts))
        ).encode(),
        JUNIT: junit.render(contract.name, cases(validation)).encode(),
    }


def report(folder: Path, validation: Validation) -> Report:
    """What is said of a stored validation, with what it rests on."""
    return sections.report(
        validation, _measured(folder, validation, *stored_validation.read(folder))
    )


def _measured(
    folder: Path, validation: Validation, contract: Contract, facts: ValidationFacts
) -> Measured:
    runs = {
        run: run_folder.kept_summary(folder / run)
        for level in validation.levels
        for run in level.runs
    }
    findings = [(one.state, one.check, one.found, one.meaning) for one in facts.findings]
    text = (folder / CONTRACT).read_text("utf-8")
    return Measured(contract, text, runs, findings, _spread(folder, validation))


def _preflight(settings: Settings, folder: Path, say: Callable[[str], None]) -> list[Finding]:
    """Examine every endpoint and write `doctor.json`. [] for a simulation in virtual time: nothing to examine."""
    if settings.virtual:
        return []
    from loadgen.doctor import doctor, host_checks, target_checks

    all_findings: list[Finding] = []
    reports = []
    for endpoint in settings.endpoints:
        title, findings = doctor.run(settings if not endpoint.url else settings.of(endpoint))
        reports.append({"title": title, "findings": findings})
        if (
            len(settings.endpoints) > 1
        ):  # name the endpoint in its findings; keep the findings about this host once
            of_host = [
                finding
                for finding in findings
                if finding.check in host_checks.HOST and not all_findings
            ]
            findings = [
                msgspec.structs.replace(finding, check=f"{finding.check} of {endpoint.shown}")
                for finding in findings
                if finding.check not in host_checks.HOST
            ] + of_host
        all_findings += findings
        if bad := [finding for finding in findings if finding.state in (FAULT, WARNING)]:
            say(as_text.render(target_checks.report(title, bad)).rstrip())
    (folder / DOCTOR).write_bytes(format.document(reports))
    return all_findings


# -- the folder --------------------------------------------------------------------------------------------------


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).astimezone().isoformat(timespec="seconds")


def _folder(out: Path | None, name: str) -> Path:
    if out is None:
        out = Path("results") / run_id(f"validate-{name}", datetime.datetime.now().astimezone())
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        hint = "a verdict has one folder: give a new one; or --force, which keeps this one under a dated name"
        raise UserError("folder_in_use", "this folder is in use", f"--out {out}", hint)
    return out
