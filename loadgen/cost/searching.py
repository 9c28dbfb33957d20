"""The searches that `size` makes of simulated machines: where each is stored, and several of them at once. IO."""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loadgen.cli.output import say
from loadgen.core import child_process

if TYPE_CHECKING:
    from loadgen.core.execution.context import KnownTarget

SIMULATED = "sim:"


class SearchRequest(NamedTuple):
    """A search: its folder, and the words of its command line."""

    folder: Path
    words: list[str]


def asked(source: str, profile: str, slo: Sequence[str]) -> SearchRequest:
    """The search of a machine. Its folder is that of every search of the same workload, SLO and machine by the same
    version of loadgen: one that has ended is read, one that was stopped goes on.
    """
    from loadgen.core.execution.run_header import version

    folder = folder_of(source, profile, slo, version())
    words = ["search", profile, "--url", source, "--out", str(folder), "--seed", "1"]
    return SearchRequest(folder, words + [word for term in slo for word in ("--slo", term)])


def folder_of(
    source: str, profile: str, slo: Sequence[str], version: str, trial_ns: int = 0
) -> Path:
    """Where the search of a machine by a version of loadgen is stored. Raises Faults where what is asked is not valid.

    Its key has all that the answer is made from: also how long a trial lasts (0: as long as a search's own), and the
    files that the workload and the preset of the machine name.
    """
    from loadgen.core.workload import load, read_flags, request_fingerprint
    from loadgen.core.workload.loading import read_workload_text
    from loadgen.repeated import capacity

    asked = load(profile, read_flags(slo=tuple(slo), request_rate=1.0, warmup=0, duration="1s"))
    length = str(trial_ns or capacity.default_trial_ns(asked))
    words = [
        version,
        *slo,
        length,
        read_workload_text(profile),
        request_fingerprint(asked, ""),
        machine(source).identity,
    ]
    key = hashlib.sha256("\n".join(words).encode()).hexdigest()[:6]
    return (
        Path("results")
        / f"size-{Path(profile).stem}-{Path(source.removeprefix(SIMULATED)).stem}-{key}"
    )


def machine(source: str) -> KnownTarget:
    """What is known of a simulated machine before it is searched. Raises UserError for one that there is not."""
    from loadgen.core.execution import backend
    from loadgen.core.execution.plan import Settings

    found = backend.known(Settings(url=source))
    assert found is not None  # it is loadgen's own
    return found


def at_once(searches: Mapping[str, SearchRequest], call: Callable[[list[str]], int]) -> None:
    """Carry out several searches, by their sources, as many at once as there are cores, each in a copy of this process.

    What they found, or met, is in their folders: `call` with the same words takes it from there. Nothing is done where
    one after the other is as quick, or this process has threads. Their lines come with their source before them.
    """
    cores = len(os.sched_getaffinity(0))
    waiting = list({one.folder: (source, one) for source, one in searches.items()}.values())
    if min(cores, len(waiting)) < 2 or not child_process.forks():
        return
    running: dict[str, child_process.Forked] = {}
    begun: dict[str, bytes] = {}  # what a copy has said of its present line
    with selectors.DefaultSelector() as outputs:
        try:
            while waiting or running:
                while waiting and len(running) < cores:
                    source, one = waiting.pop(0)
                    running[source] = child_process.Forked(
                        "search", partial(_copy, one, call), files=True
                    )
                    running[source].stdin.close()
                    outputs.register(running[source].stdout, selectors.EVENT_READ, source)
                for key, _ in outputs.select():
                    source = key.data
                    data = os.read(key.fd, 1 << 16)
                    *lines, begun[source] = (begun.get(source, b"") + data).split(b"\n")
                    for line in lines:
                        say(f"{source}: {line.decode(errors='replace')}")
                    if not data:
                        outputs.unregister(key.fileobj)
                        running.pop(source).wait()
        finally:
            for copy in running.values():
                copy.kill()
                copy.wait()


def _copy(one: SearchRequest, call: Callable[[list[str]], int]) -> None:
    """In a copy: the search. Its lines go to the parent, and its report to nobody: the parent prints it."""
    with (
        open(1, "w", encoding="utf-8", buffering=1, closefd=False) as lines,
        open(os.devnull, "w", encoding="utf-8") as nobody,
        contextlib.redirect_stderr(lines),
        contextlib.redirect_stdout(nobody),
        contextlib.suppress(Exception),  # the parent meets it too, and tells it
    ):
        call(one.words)
