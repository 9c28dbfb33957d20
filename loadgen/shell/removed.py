"""Spellings that there were once, and what says the same now. A leaf.

Each row is typed by a test: the old spelling is a usage error whose hint names the new one, and the new one is taken.
"""

from __future__ import annotations

COMMANDS = {
    "baseline": "loadgen compare --save NAME RESULT, and then loadgen compare --against NAME RESULT",
    "capacity": "loadgen size WORKLOAD RESULT --users N; the published table is in docs/published.md",
    "reference": "docs/published.md has the tables; loadgen size WORKLOAD published:SYSTEM takes a row",
    "selfcheck": "loadgen doctor, without --url",
}
"""A command -> what is typed in its place."""

CONTINUOUS = "loadgen search WORKLOAD --continuous"
OPTIONS = {
    "--adaptive": CONTINUOUS,
    "--window": CONTINUOUS,
    "--high": CONTINUOUS,
    "--max-time": CONTINUOUS,
}
"""An option, of a command that has none of this name -> what is typed in its place."""
