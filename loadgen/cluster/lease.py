"""The lease of a cluster: a named actor by which one command at a time sends a load from it. IO.

Two loads at once would measure each other. The actor belongs to its driver: Ray ends it with the
driver, also if the driver is killed.
"""

from __future__ import annotations

import datetime
import getpass
import os
import socket
from collections.abc import Sequence

NAME = "loadgen-lease"
NAMESPACE = "loadgen"


class Lease:
    """The actor that reserves a cluster for a command."""

    def __init__(self, holder: str) -> None:
        self._holder = holder

    async def holder(self) -> str:
        """Return a description of the command."""
        return self._holder


def holder(command: Sequence[str]) -> str:
    """Return a description of this command without its options, which may contain keys."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may know no name for its user
        user = f"user {os.getuid()}"
    now = datetime.datetime.now(datetime.UTC)
    process = f"process {os.getpid()}"
    name = " ".join(command[:2])
    return f"{user} on {socket.gethostname()} ({process}), {name}, since {now:%F %T} UTC"
