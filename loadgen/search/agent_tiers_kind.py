"""The result kind of searches at several tiers."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from loadgen.core import format
from loadgen.core.errors import INTERRUPTED, UNSOUND, UserError
from loadgen.result_kinds import ListRow, ResultFunctions
from loadgen.search import agent_tiers, agent_tiers_text
from loadgen.search.agent_tiers import DescribedTiers, StoredTiers


def code(stored: StoredTiers, _strict: bool) -> int:
    """Return the exit code when the folder is read: the highest one of its searches.

    A search that has not ended or was interrupted has shown nothing, so its exit code is UNSOUND.
    """
    codes = {UNSOUND if result.code is None else result.code for result in stored.tiers}
    return UNSOUND if INTERRUPTED in codes else max(codes)


def list_row(output_dir: Path) -> ListRow:
    """Return the row of searches at several tiers in the list of results.

    Its outcome is the number of sessions at each tier.
    """
    stored = agent_tiers.read_tiers(output_dir)
    return ListRow(
        outcome=agent_tiers_text.list_sessions(stored),
        description=stored.workload,
        target=stored.target,
        simulated=stored.simulated,
        started=stored.started,
    )


def compare_side(output_dir: Path) -> NoReturn:
    """Refuse several tiers as one side of a comparison.

    Raises:
        UserError: Always.
    """
    folders = [result.folder for result in agent_tiers.read_tiers(output_dir).tiers]
    raise UserError(
        "unsupported",
        "the folder has searches at several tiers",
        str(output_dir),
        f"compare the search at one tier: {', '.join(folders)}",
    )


def document(described: DescribedTiers) -> bytes:
    """Return the content of `tiers.json`, which `report --json` prints."""
    return format.document(described.to_stored())


FUNCTIONS = ResultFunctions(
    load=agent_tiers.load_described_tiers,
    headline=agent_tiers_text.describe_tiers,
    report=agent_tiers_text.create_report,
    document=document,
    code=code,
    list_row=list_row,
    compare_side=compare_side,
    schema=StoredTiers,
)
