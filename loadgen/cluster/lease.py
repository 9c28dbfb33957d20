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
    """The actor that reserves a cluster for a command, the holder of the lease."""

    def __init__(self, holder: str) -> None:
        self._holder = holder

    async def holder(self) -> str:
        """Return the description of the command, which `describe_holder` wrote."""
        return self._holder


def describe_holder(command: Sequence[str]) -> str:
    """Return who and what holds the lease: the user, host, process, command name and start time.

    Another command that finds the cluster reserved prints this text. It contains only the first
    two words of the command line, because options may contain API keys.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may know no name for its user
        user = f"user {os.getuid()}"

    now = datetime.datetime.now(datetime.UTC)
    process = f"process {os.getpid()}"
    command_name = " ".join(command[:2])

    return f"{user} on {socket.gethostname()} ({process}), {command_name}, since {now:%F %T} UTC"
