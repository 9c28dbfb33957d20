"""One command at a time loads from a cluster: a named actor on it says who has it. IO.

Two loads at once would measure each other. The actor belongs to its driver: Ray ends it with the driver, also where
that was killed.
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
    """The actor. `holder`: who has the cluster, in words."""

    def __init__(self, holder: str) -> None:
        self._holder = holder

    async def holder(self) -> str:
        return self._holder


def holder(command: Sequence[str]) -> str:
    """Who we are. Of the command its name alone: there may be keys in its flags."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may know no name for its user
        user = f"user {os.getuid()}"
    now = datetime.datetime.now(datetime.UTC)
    return f"{user} on {socket.gethostname()} (process {os.getpid()}), {' '.join(command[:2])}, since {now:%F %T} UTC"
