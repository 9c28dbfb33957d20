"""What runs in the pods of a Job: agents that listen, and in pod 0 the run, which waits for its results to be fetched.

What pod 0 prints is what `loadgen run` prints, and a last line for who follows it: ENDED and the exit code. It
starts in the folder that the results go to. IO.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from loadgen.cluster import channel, listeners, listening
from loadgen.core import child_process
from loadgen.core.errors import OK
from loadgen.kube.manifests import PORT

ENDED = "loadgen kube: the run has ended with exit code"
FETCHED = ".fetched"  # made in the folder of the results by who has fetched them
CODE = ".code"
LOOK_S = 1.0
AGENT_FAILED = 75  # none of the exit codes that end the Job: the pod is replaced


def carry_out(name: str, agents: str, hold_s: float, arguments: Sequence[str]) -> int:
    """Be the pod that the environment says; the exit code of its process."""
    if int(os.environ["JOB_COMPLETION_INDEX"]):
        # process 1 of a container gets no signal that it has no handler for
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            asyncio.run(listening.listen(os.environ["POD_IP"], PORT, channel.token()))
        except Exception:
            traceback.print_exc()
            return AGENT_FAILED
        return OK
    own = subprocess.Popen(
        child_process.command("loadgen.cluster.listening", f"{os.environ['POD_IP']}:{PORT}")
    )
    try:
        return _lead(name, agents, hold_s, arguments)
    finally:
        child_process.end(own)


def _lead(name: str, agents: str, hold_s: float, arguments: Sequence[str]) -> int:
    where = ("--ray", agents, "--out", name, "--force", "--progress", "plain")
    run = subprocess.Popen(
        child_process.command("loadgen", *arguments, *where), stderr=subprocess.STDOUT
    )

    def stop(*_: Any) -> None:  # the pod is taken away: the run stops and says what it has
        run.send_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, stop)
    code = run.wait()
    asyncio.run(listeners.dismiss(listeners.nodes(agents)[1:], channel.token()))
    Path(CODE).write_text(str(code), "utf-8")
    print(f"{ENDED} {code}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    until = monotonic() + hold_s
    while not Path(FETCHED).exists() and monotonic() < until:
        select.select([], [], [], LOOK_S)
    return code


if __name__ == "__main__":
    _name, _hold, _agents, *_arguments = sys.argv[1:]
    sys.exit(carry_out(_name, _agents, float(_hold), _arguments))
