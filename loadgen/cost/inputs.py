"""Folders of finished results, read as evidence: `summary.json` and `capacity.json`, and nothing else of a run.

Makes no judgement but one: a measurement that is not valid is refused unless it was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from loadgen.cost.evidence import Evidence
from loadgen.errors import UNSOUND, Fault, Faults, UserError
from loadgen.metrics import summary_json
from loadgen.metrics.summary import Summary
from loadgen.results import capacity


class UnsoundEvidence(Fault):
    """A measurement that cannot be trusted was to be used: exit 3."""

    exit_code = UNSOUND


def read_evidence(folders: Sequence[Path], *, allow_invalid: bool = False) -> tuple[Evidence, ...]:
    """The evidence of each folder, named after it. Raises Faults with everything that is wrong with them."""
    faults: list[Fault] = []
    found: list[Evidence] = []
    seen: set[Path] = set()
    for folder, name in zip(folders, _names(folders), strict=True):
        if folder.resolve() in seen:
            faults.append(UserError("the same folder twice", str(folder), "each result counts once"))
            continue
        seen.add(folder.resolve())
        try:
            found.append(_one(folder, name, allow_invalid))
        except Fault as fault:
            faults.append(fault)
        except Faults as several:
            faults.extend(several.faults)
    if faults:
        raise Faults(faults)
    return tuple(found)


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or as much of it as tells them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, 20):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _one(folder: Path, name: str, allow_invalid: bool) -> Evidence:
    if (folder / capacity.FILE).is_file():
        file = folder / capacity.FILE
        found = capacity.load_capacity(_bytes(file), str(file))
        run = folder / found.evidence
        summary = _summary(run, allow_invalid, f"named as the evidence of {file}")
        if not summary.goodput.slo:
            raise UserError("a capacity whose run had no SLO", str(file), "a capacity is a rate under limits: --slo")
        if found.unit == "conversations" and summary.sessions is None:
            what = "a capacity in conversations, and no conversations in its run"
            raise UserError(what, f"{file} (unit)", "unit: requests; or name the right run as evidence")
        return Evidence(name=name, folder=str(folder), summaries=(summary,), capacity=found)
    if (folder / "summary.json").is_file():
        return Evidence(name=name, folder=str(folder), summaries=(_summary(folder, allow_invalid),))
    runs = sorted(path.parent for path in folder.glob("*/summary.json"))
    if not runs:
        what = "no summary.json here" if folder.is_dir() else "no such folder"
        hint = "give the folder that a run has written; `loadgen report DIR --json > DIR/summary.json` makes it again"
        raise UserError(what, str(folder), hint)
    return Evidence(name=name, folder=str(folder), summaries=_repeats(folder, runs, allow_invalid))


def _repeats(folder: Path, runs: Sequence[Path], allow_invalid: bool) -> tuple[Summary, ...]:
    summaries = tuple(_summary(run, allow_invalid) for run in runs)
    first = summaries[0]
    for run, summary in zip(runs[1:], summaries[1:], strict=True):
        unlike = [
            what
            for what, a, b in (
                ("recipe", first.fingerprints.recipe, summary.fingerprints.recipe),
                ("load", first.load.arrival, summary.load.arrival),
                ("shape", first.target.shape, summary.target.shape),
                ("model", first.target.model, summary.target.model),
                ("GPUs", first.target.gpus, summary.target.gpus),
            )
            if a != b
        ]
        if unlike:
            what = (
                f"runs that are no repeats of each other: {runs[0].name} and {run.name} differ in {', '.join(unlike)}"
            )
            hint = f"name one run; a sweep or search that leaves a {capacity.FILE} makes one offer of many loads"
            raise UserError(what, str(folder), hint)
    return summaries


def _summary(folder: Path, allow_invalid: bool, why: str = "") -> Summary:
    """Raises UserError for what is no summary or counts no tokens, NotValid for one that cannot be trusted."""
    file = folder / "summary.json"
    if not file.is_file():
        raise UserError("no summary.json here", str(folder), why or "give the folder that a run has written")
    data = _bytes(file)
    summary = summary_json.load_summary(data, str(file))
    faults: list[Fault] = []
    if not summary.verdict.valid and not allow_invalid:
        reasons = "; ".join(summary.verdict.reasons)
        hint = "measure again; or --allow-invalid, and its rows will say so"
        faults.append(
            UnsoundEvidence(f"not a valid measurement: {reasons}", place(data, file, "verdict", "valid"), hint)
        )
    if summary.requests.ok == 0:
        what = "no request of this run was answered"
        faults.append(UserError(what, place(data, file, "requests", "ok"), "nothing was bought that could be priced"))
    else:
        faults.extend(_uncounted(summary, data, file))
    if faults:
        raise Faults(faults)
    return summary


def _uncounted(summary: Summary, data: bytes, file: Path) -> list[Fault]:
    faults: list[Fault] = []
    sources = summary.tokens.sources
    for key, total, by in (
        ("input", summary.tokens.input, sources.input),
        ("output", summary.tokens.output, sources.output),
    ):
        known = sum(count for source, count in by.items() if source != "none")
        if total is None or known < summary.requests.ok:
            what = f"{key} tokens were counted for {known:,} of {summary.requests.ok:,} answers"
            hint = "run against a server that reports usage, or with --tokenizer; nothing is estimated here"
            faults.append(UserError(what, place(data, file, "tokens", key), hint))
    return faults


def place(data: bytes, file: Path, *keys: str) -> str:
    """file:line (path) of a field in an indented JSON file, by the indentation of `dump`; the file alone where it is
    written otherwise."""
    lines = data.decode(errors="replace").splitlines()
    start = 0
    for depth, key in enumerate(keys):
        pattern = re.compile(rf'^ {{{2 * (depth + 1)}}}"{re.escape(key)}":')
        hit = next((i for i in range(start, len(lines)) if pattern.match(lines[i])), None)
        if hit is None:
            return f"{file} ({'.'.join(keys)})"
        start = hit
    return f"{file}:{start + 1} ({'.'.join(keys)})"


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", str(file)) from None
