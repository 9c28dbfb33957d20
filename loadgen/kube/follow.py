"""A run on its way: made, followed by the log of pod 0 wherever that is, and its results brought here. IO."""

from __future__ import annotations

import secrets
import shutil
import tarfile
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from loadgen.core.errors import TargetError, UserError
from loadgen.core.results import checksums
from loadgen.kube import manifests, state
from loadgen.kube.kubectl import Kubectl
from loadgen.kube.manifests import CONTAINER, TOKEN_KEY, JobAsked
from loadgen.kube.pod import CODE, ENDED, FETCHED
from loadgen.kube.state import PodState, State
from loadgen.shell.output import say

LOOK_S = 2.0  # between two looks at a Job that has no pod to follow
PATIENCE_S = 60.0  # without an answer, while a run is followed: a cluster, or the way to it, may be away for a while


def make(kubectl: Kubectl, asked: JobAsked, files: Mapping[str, bytes], keys: Mapping[str, bytes]) -> None:
    """Make the Job suspended, then what belongs to it and goes with it, then let it go. Raises TargetError.

    Keys go to kubectl on its standard input. Whatever fails takes the Job away again.
    """
    made = kubectl.json("create", "-f", "-", given=[manifests.job(asked)])
    owner = {"name": asked.name, "uid": made["metadata"]["uid"]}
    token = {TOKEN_KEY: secrets.token_hex(16).encode()}
    try:
        beside = manifests.beside(asked.name, files, {**keys, **token}, owner)
        kubectl.ask("create", "-f", "-", given=beside)
        kubectl.ask("patch", "job", asked.name, "--type=merge", "-p", '{"spec":{"suspend":false}}')
    except BaseException:
        kubectl.ask("delete", "job", asked.name, "--wait=false")
        raise


def look(kubectl: Kubectl, name: str) -> State:
    """The state of a run. Raises TargetError where there is none."""
    return state.of(kubectl.job(name), kubectl.pods(name))


def follow(kubectl: Kubectl, name: str) -> int:
    """Print what pod 0 prints until the run has ended; its exit code. A lead that is lost is followed in its next pod.

    Raises TargetError where the Job has failed, or ended without a result.
    """
    shown: dict[str, int] = {}
    told, heard_at = "", time.monotonic()
    while True:
        try:
            now = look(kubectl, name)
        except TargetError:
            if time.monotonic() > heard_at + PATIENCE_S:
                raise
            time.sleep(LOOK_S)
            continue
        heard_at = time.monotonic()
        lead = now.lead
        if lead is not None and lead.phase != "Pending":
            code = _log(kubectl, lead, shown)
            if code is not None:
                return code
        if now.over:
            what = f"the Job has {now.phase} without a result{now.why and f': {now.why}'}"
            raise TargetError("process_failed", what, name, f"loadgen kube logs {name}")
        words = f"{name}: {now.phase}, {len(now.pods)} of {now.expected} pods, {lead.why if lead else ''}".rstrip(", ")
        if words != told:
            say(words)
            told = words
        time.sleep(LOOK_S)


def _log(kubectl: Kubectl, lead: PodState, shown: dict[str, int]) -> int | None:
    """Print the lines of a pod that were not shown yet, until they end; the exit code, if the last one says it."""
    seen = shown.setdefault(lead.name, 0)
    if seen == 0 and len(shown) > 1:
        say(f"the pod of the lead was lost: {lead.name} begins the run again")
    with kubectl.stream("logs", "-f", lead.name, "-c", CONTAINER) as lines:
        for number, line in enumerate(lines, start=1):
            text = line.decode(errors="replace")
            if text.startswith(ENDED):
                return int(text.removeprefix(ENDED))
            if number > seen:
                shown[lead.name] = number
                print(text, end="", flush=True)
    return None


def fetch(kubectl: Kubectl, name: str, folder: Path) -> int:
    """Bring the results of a run that has ended into a folder, and let its pod go; the exit code of the run.

    Raises UserError while it runs, TargetError where its results are gone or came damaged.
    """
    now = look(kubectl, name)
    if now.lead is None or now.lead.phase == "Pending":
        raise UserError("no_result", f"the run has not begun: {now.phase}", name, f"loadgen kube status {name}")
    if now.lead.phase != "Running":
        what = f"its pod has ended ({now.lead.why or now.lead.phase}), and its results with it"
        raise TargetError("no_result", what, now.lead.name, "fetch them sooner, or give --hold")
    pod = now.lead.name
    try:
        code = int(kubectl.ask(*kubectl.inside(pod, "cat", CODE)))
    except TargetError:
        raise UserError("no_result", "the run goes on", name, f"loadgen kube logs {name} -f") from None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".loadgen-", dir=folder.parent) as scratch:
        came = Path(scratch) / name
        _unpack(kubectl, pod, name, Path(scratch))
        if not came.is_dir():
            raise TargetError("no_result", "the run has left no results", pod, f"loadgen kube logs {name}")
        if changed := checksums.changed(came):
            raise TargetError("damaged_file", f"not as it was written: {', '.join(changed)}", pod, "fetch it again")
        if folder.is_dir():
            folder.rmdir()  # it is empty: `check_empty`, and nothing else was there
        shutil.move(came, folder)
    kubectl.ask(*kubectl.inside(pod, "touch", FETCHED))
    return code


def _unpack(kubectl: Kubectl, pod: str, name: str, into: Path) -> None:
    words = kubectl.inside(pod, "tar", "-cf", "-", name)
    with tempfile.TemporaryFile() as errors:
        try:
            with kubectl.stream(*words, to=errors) as came, tarfile.open(fileobj=came, mode="r|") as archive:
                archive.extractall(into, filter="data")
        except tarfile.TarError as error:
            errors.seek(0)
            said = errors.read() or str(error).encode()
            raise kubectl.failed(words, said) from None
