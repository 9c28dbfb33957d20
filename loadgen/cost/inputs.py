"""Reads folders of finished results as evidence: the summaries of their runs, and what their kinds say that they held.

Refuses a measurement that is not valid unless the caller allows it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from loadgen_sdk.wire_formats.server_profiles import NON_GENERATIVE_APIS

from loadgen import result_kinds
from loadgen.core import format
from loadgen.core.errors import (
    UNSOUND,
    CombinedError,
    LoadgenError,
    UserError,
    collecting,
    nothing_there,
    of_reading,
)
from loadgen.core.limits import CONTRADICTING_SHARE
from loadgen.core.metrics.summary import FILE, Summary, load_summary
from loadgen.core.results.record import CONTRADICTORY_USAGE
from loadgen.core.workload.diagnostics import locate
from loadgen.core.workload.yaml_marks import place_at, read_yaml
from loadgen.pricing.evidence import Evidence
from loadgen.repeated import capacity
from loadgen.repeated.repeats import is_valid
from loadgen.runs.headline import promises


class UnsoundEvidence(LoadgenError):
    """A measurement that is not valid was given as evidence: exit code 3."""

    exit_code = UNSOUND


def read_evidence(folders: Sequence[Path], *, allow_invalid: bool = False) -> tuple[Evidence, ...]:
    """The evidence of each folder, named after it. Raises Faults with everything that is wrong with them."""
    faults: list[LoadgenError] = []
    evidence: list[Evidence] = []
    seen: set[Path] = set()
    for folder, name in zip(folders, format.short_names(folders), strict=True):
        if folder.resolve() in seen:
            faults.append(
                UserError(
                    "duplicate", "the same folder twice", str(folder), "each result counts once"
                )
            )
            continue
        seen.add(folder.resolve())
        with collecting(faults):
            evidence.append(_read_folder(folder, name, allow_invalid))
    if faults:
        raise CombinedError(faults)
    return tuple(evidence)


def _read_folder(folder: Path, name: str, allow_invalid: bool) -> Evidence:
    """Return the evidence of one result: its capacity, its run, or repeats of one run."""
    facts = result_kinds.capacity_facts(folder)
    if facts.none_because:
        raise UserError("mismatch", facts.none_because, str(folder), facts.hint)
    if facts.capacity is not None:
        return _read_capacity(folder, name, facts.capacity, allow_invalid)
    runs = result_kinds.runs_in(folder)
    run_folders = sorted(run for run in runs if (run / FILE).is_file())
    if run_folders == [folder]:
        summary = _summary(folder, allow_invalid)
        return Evidence(
            name=name,
            folder=str(folder),
            summaries=(summary,),
            at_once=_at_once(folder, summary),
            run_folders=(str(folder),),
        )
    if not run_folders:
        raise _no_summary(folder, runs)
    counted = run_folders if allow_invalid else _valid_or_all(run_folders)
    summaries = _repeats(folder, counted, allow_invalid)
    at_once = all(_at_once(run, summary) for run, summary in zip(counted, summaries, strict=True))
    return Evidence(
        name=name,
        folder=str(folder),
        summaries=summaries,
        at_once=at_once,
        run_folders=tuple(map(str, counted)),
        left_out=tuple(run.name for run in run_folders if run not in counted),
    )


def _valid_or_all(runs: Sequence[Path]) -> list[Path]:
    """Return the repeats that are valid measurements, or all of them if none is."""
    valid = [run for run in runs if is_valid(load_summary(_bytes(run / FILE), str(run / FILE)))]
    return valid or list(runs)


def _read_capacity(
    folder: Path, name: str, stored: capacity.Capacity, allow_invalid: bool
) -> Evidence:
    """Return a stored capacity with the run that shows it.

    Raises UnsoundEvidence for one that was not found, and UserError for a file that does not fit
    its run.
    """
    file = folder / capacity.CAPACITY_FILE
    if stored.unfinished:
        _refuse_unfinished(stored, file, allowed=allow_invalid)
    summary = _summary(folder / stored.evidence, allow_invalid, f"named as the evidence of {file}")
    if not promises(summary):
        what = "a capacity whose run had no SLO"
        raise UserError("no_slo", what, str(file), "a capacity is a rate under limits: --slo")
    if stored.unit != "requests" and summary.sessions is None:
        what = f"a capacity in {stored.unit}, and no conversations in its run"
        hint = "unit: requests; or name the right run as evidence"
        raise UserError("mismatch", what, f"{file} (unit)", hint)
    return Evidence(
        name=name,
        folder=str(folder),
        summaries=(summary,),
        capacity=stored,
        run_folders=(str(folder / stored.evidence),),
    )


def _no_summary(folder: Path, runs: Sequence[Path]) -> UserError:
    """Return the error for a folder without a summary. `runs` are the runs in it, if any."""
    hint = "give the folder that a run has written"
    if not folder.is_dir():
        return nothing_there(folder, hint)
    if tuple(runs) == (folder,):  # killed before its end
        named = shlex.quote(str(folder))
        hint = (
            f"loadgen report {named} --json > {named}/summary.json makes it of the rows that are "
            "there"
        )
    return UserError("no_result", "no summary.json here", str(folder), hint)


def _refuse_unfinished(stored: capacity.Capacity, file: Path, *, allowed: bool) -> None:
    """Raises UnsoundEvidence for a search that was stopped, or found nothing: its rate sizes no machines.

    `allowed`: a stopped one is taken for what it is, a load that held: at least so much, at most so many machines.
    """
    if stored.state == "none":
        raise UnsoundEvidence(
            "unsound",
            f"no capacity was found: {stored.lower_bound_reason}",
            str(file),
            "a slower load",
        )
    rate = f"{stored.rate_per_s:.4g} {stored.unit}/s"
    so_far = (
        f"; at least {rate} held so far"
        if stored.rate_per_s
        else "; no load was shown to hold so far"
    )
    if allowed and stored.rate_per_s:
        return
    hint = stored.resume_hint if _is_a_search(stored.resume_command) else _resume_hint(stored)
    if not stored.resume_command:
        hint = f"loadgen report {shlex.quote(str(file.parent))} says why it stopped, and what to do"
    if stored.rate_per_s:
        hint += "; or --allow-invalid: at least that rate, at most so many machines"
    raise UnsoundEvidence("unsound", f"{stored.lower_bound_reason}{so_far}", str(file), hint)


def _resume_hint(stored: capacity.Capacity) -> str:
    """Return how to resume what was stopped, where the stored command is missing or not trusted."""
    if stored.method == "sweep":
        return "the command of the sweep, with the same --out, resumes it"
    return "loadgen search --resume goes on with it"


def _is_a_search(command: str) -> bool:
    """Whether a command that stands in a result is one command of a search: whoever sent the folder may have written
    another, and what a hint says is typed.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        return False
    return (
        words[:1] == ["loadgen"]
        and words[1:2] in (["search"], ["sweep"], ["mlperf"])
        and shlex.join(words) == command
    )


def gpus_of(evidence: Evidence, said: int | None) -> int | None:
    """The GPUs that a result used: what its run recorded, or `said` where it recorded nothing.

    Raises UserError when the two differ: a figure of 72 GPUs must not be shown as one of 4.
    """
    recorded = evidence.summary.target.gpus
    if said is None or recorded is None or said == recorded:
        return recorded if said is None else said
    had = format.counted(recorded, "GPU")
    what = f"the run recorded {had}, and {said} are given: its rates are those of {recorded}"
    hint = "leave the flag out; a run that recorded a wrong number is run again"
    raise UserError("conflict", what, f"--gpus, {evidence.folder}", hint)


def _at_once(folder: Path, summary: Summary) -> bool:
    """Whether this is an Offline run, or one whose requests were all due at once."""
    at_once = result_kinds.capacity_facts(folder).at_once
    if at_once is not None:
        return at_once
    return not summary.window.steady.duration_s and summary.load.offered_rps is None


def _repeats(folder: Path, runs: Sequence[Path], allow_invalid: bool) -> tuple[Summary, ...]:
    summaries = tuple(_summary(run, allow_invalid) for run in runs)
    first = summaries[0]
    for run, summary in zip(runs[1:], summaries[1:], strict=True):
        compared = (
            ("recipe", first.fingerprints.recipe, summary.fingerprints.recipe),
            ("load", first.load.arrival, summary.load.arrival),
            ("shape", first.target.shape, summary.target.shape),
            ("model", first.target.model, summary.target.model),
            ("GPUs", first.target.gpus, summary.target.gpus),
        )
        if unequal := [what for what, a, b in compared if a != b]:
            if all(one.goodput.met is False for one in summaries):
                what = "no capacity was found: none of these loads kept its SLO"
                raise UnsoundEvidence(
                    "unsound", what, str(folder), "add a slower load; or name one run"
                )
            names = f"{runs[0].name} and {run.name}"
            what = f"runs that are no repeats of each other: {names} differ in {', '.join(unequal)}"
            hint = f"name one run; a sweep or search that leaves a {capacity.CAPACITY_FILE} makes one offer of many loads"
            raise UserError("mismatch", what, str(folder), hint)
    return summaries


def _summary(folder: Path, allow_invalid: bool, why: str = "") -> Summary:
    """The summary of a run. Raises Faults: no ok request, tokens not counted, UnsoundEvidence if not valid."""
    file = folder / FILE
    if not file.is_file():
        raise UserError(
            "no_result",
            "no summary.json here",
            str(folder),
            why or "give the folder that a run has written",
        )
    data = _bytes(file)
    summary = load_summary(data, str(file))
    faults: list[LoadgenError] = []
    if not summary.verdict.valid and not allow_invalid:
        reasons = "; ".join(summary.verdict.reasons)
        hint = "measure again; or --allow-invalid, and its rows will say so"
        at = place(data, file, "verdict", "valid")
        faults.append(UnsoundEvidence("unsound", f"not a valid measurement: {reasons}", at, hint))
    if summary.requests.ok == 0:
        what = "no request of this run was answered"
        faults.append(
            UserError(
                "no_figure",
                what,
                place(data, file, "requests", "ok"),
                "nothing was bought that could be priced",
            )
        )
    else:
        faults.extend(_uncounted(summary, data, file))
    if faults:
        raise CombinedError(faults)
    return summary


def _uncounted(summary: Summary, data: bytes, file: Path) -> list[LoadgenError]:
    faults: list[LoadgenError] = []
    sources = summary.tokens.sources
    if why := summary.unsound.get("tokens"):
        hint = "mend what the server says in its usage; nothing is estimated here"
        return [
            UnsoundEvidence(
                "unsound",
                f"output tokens withheld: {why}",
                place(data, file, "tokens", "output"),
                hint,
            )
        ]
    if contradicting := _contradicting_responses(summary):
        what = (
            f"the server's token counts of {contradicting:,} of {summary.requests.ok:,} responses "
            "contradict each other"
        )
        at = place(data, file, "verdict", "warnings")
        hint = "the warnings of the run say how; fix the usage that the server reports"
        return [UnsoundEvidence("unsound", what, at, hint)]
    for key, total, by in (
        ("input", summary.tokens.input, sources.input),
        ("output", summary.tokens.output, sources.output),
    ):
        known = sum(count for source, count in by.items() if source != "none")
        if key == "output" and summary.run.api in NON_GENERATIVE_APIS:
            continue  # numbers are answered: there are none, and what is paid by the request or the hour has its price
        if total is None or known < summary.requests.ok:
            what = f"{key} tokens were counted for {known:,} of {summary.requests.ok:,} answers"
            hint = "run against a server that reports usage, or with --tokenizer; nothing is estimated here"
            faults.append(UserError("no_figure", what, place(data, file, "tokens", key), hint))
    return faults


def _contradicting_responses(summary: Summary) -> int:
    """Return how many responses have counts that contradict each other, or 0 if they are few."""
    contradicting = sum(
        code.values["responses"]
        for code in summary.verdict.warning_codes
        if code.code == "responses_remarked"
        and code.values["remark"].startswith(CONTRADICTORY_USAGE)
    )
    if contradicting <= CONTRADICTING_SHARE * summary.requests.ok:
        return 0
    return int(contradicting)


def place(data: bytes, file: Path, *keys: str) -> str:
    """The place of a field in a JSON file, as "file:line:column (path)"; JSON is YAML."""
    top, _ = read_yaml(data.decode(errors="replace"), str(file), {})
    spot, path, _ = locate(top, keys)
    return str(place_at(str(file), spot, path))


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(of_reading(error), f"cannot be read: {error.strerror}", str(file)) from None
