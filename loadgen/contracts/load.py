"""Loads a contract file with its workloads and prices, and reports all faults in them at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from loadgen.answers.questions import read_questions
from loadgen.contracts import lint
from loadgen.contracts.schema import (
    Checked,
    Contract,
    ContractLevel,
    Draft,
    WrittenPromise,
    find,
    plain,
    read_document,
    text_of,
)
from loadgen.core.errors import Faults
from loadgen.core.workload.fields import Source
from loadgen.core.workload.messages import in_order, validated
from loadgen.core.workload.yaml_marks import Map
from loadgen.plain_reading import checked
from loadgen.pricing import price_file


def load_contract(
    path: Path,
    *,
    gpus: int | None = None,
    repeats: int | None = None,
    against: bool = False,
    longest_ns: int | None = None,
    env: Mapping[str, str] = os.environ,
) -> Checked:
    """Load and check a contract: the path of a file, or the bare name of a packaged one.

    `repeats`: the number of runs of every level, instead of what the file says. `longest_ns`: no level's load is
    longer; terms that then cannot pass are no faults, but named in the plan. `against`: whether another endpoint was
    given for the answers.

    Raises UserError for a file that cannot be read, and Faults with everything that is wrong in it: shape, units,
    unknown terms and workloads, contradictions, and samples too small for their terms.
    """
    file = find(path)
    label = str(path) if file == path else str(file)
    text = text_of(file, str(path))
    document, yaml_faults = read_document(text, label, env)
    levels = document.get("levels")
    written = [
        (i, level)
        for i, level in enumerate(levels if isinstance(levels, list) else ())
        if isinstance(level, Map)
    ]
    if repeats is not None:
        for _, level in written:
            level["repeats"] = repeats
    source = Source(file=label, folder=file.parent, faults=yaml_faults)
    contract = validated(Contract, document, source)
    scratch = Source(file=label, folder=file.parent)
    drafts = [_draft(i, level, scratch) for i, level in written]
    top, prices = _top(document, scratch), price_file.load_prices
    planned, contract_faults, other_faults = lint.check(
        top,
        drafts,
        document,
        label,
        file.parent,
        gpus=gpus,
        longest_ns=longest_ns,
        env=env,
        load_prices=prices,
        read_questions=read_questions,
        against=against,
    )
    faults = in_order([*source.faults, *contract_faults]) + other_faults
    if faults or contract is None:
        raise Faults(faults)
    plans = tuple(
        replace(plan, level=level) for plan, level in zip(planned, contract.levels, strict=True)
    )
    resolved = json.dumps(document, indent=2) + "\n" if "${" in text else ""  # JSON is YAML
    return Checked(
        contract=contract,
        levels=plans,
        text=text,
        resolved=resolved,
        file=label,
        folder=file.parent,
    )


def _top(document: Map, source: Source) -> Contract:
    """What can be parsed of the contract without its levels."""
    known = Contract.keys()
    written = {key: value for key, value in document.items() if key in known} | {
        "name": "c",
        "levels": (),
    }
    made, faults = checked(Contract, written, source)
    if faults:
        wrong = {detail["loc"][0] for detail in faults}
        made, _ = checked(Contract, {k: v for k, v in written.items() if k not in wrong}, source)
    return made  # type: ignore[no-any-return]


def _draft(index: int, written: Map, source: Source) -> Draft:
    """What can be parsed of a level, so that one mistake does not hide other faults."""
    name, workload = (plain(written.get(key)) for key in ("name", "workload"))
    terms = tuple(
        (kind, place, term)
        for kind in ("must", "should")
        for place, promise in enumerate(
            written[kind] if isinstance(written.get(kind), list) else ()
        )
        if (term := checked(WrittenPromise, promise, source)[0]) is not None
    )
    known = set(ContractLevel.keys()) - {"must", "should"}
    own = {key: value for key, value in written.items() if key in known}
    return Draft(
        index=index,
        name=name or "",
        workload=workload,
        level=checked(ContractLevel, own, source)[0],
        terms=terms,
    )
