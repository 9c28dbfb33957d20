"""A run on its way: made, followed by the log of pod 0 wherever that is, and its results brought here. IO."""

from __future__ import annotations

import secrets
import shutil
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from loadgen.core.errors import TargetError, UserError
from loadgen.core.results import checksums
from loadgen.kube import manifests, state
from loadgen.kube.kubectl import Kubectl
from loadgen.kube.manifests import CONTAINER, TOKEN_KEY, JobAsked, Manifest
from loadgen.kube.pod import CODE, ENDED, FETCHED
from loadgen.kube.state import PodState, State
from loadgen.shell.output import say

LOOK_S = 2.0  # between two looks at a Job that has no pod to follow
TRIES = 3  # kubectl can lose what a command in a pod has printed, and call that a success
END = bytes(1024)  # of an archive that is whole
RUNS = "runs"
PATIENCE_S = 60.0  # without an answer, while a run is followed: a cluster, or the way to it, may be away for a while


def make(
    kubectl: Kubectl, asked: JobAsked, files: Mapping[str, bytes], keys: Mapping[str, bytes]
) -> None:
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
    return _state(kubectl, kubectl.job(name))


def every(kubectl: Kubectl) -> list[State]:
    """The states of all runs."""
    return [_state(kubectl, job) for job in kubectl.jobs()]


def _state(kubectl: Kubectl, job: Manifest) -> State:
    name = job["metadata"]["name"]
    now = state.of(job, kubectl.pods(name))
    waits = not now.over and len(now.pods) < now.expected
    return now._replace(why=kubectl.warning(name)) if waits else now


def follow(kubectl: Kubectl, name: str) -> int:
    """Print what pod 0 prints until the run has ended; its exit code. A lead that is lost is followed in its next pod.

    Raises TargetError where the Job has failed, or ended without a result.
    """
    shown: dict[str, int] = {}
    told, heard_at = set[str](), time.monotonic()
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
            code, said = _log(
                kubectl, lead, shown, follows=now.whole
            )  # until then it waits, and so is looked at
            if code is not None:
                return code
            if (
                said and said not in told
            ):  # as of a node that is gone, until Kubernetes believes that
                say(said)
            told.add(said)
        if now.over:
            what = f"the Job has {now.phase} without a result{now.why and f': {now.why}'}"
            raise TargetError(
                "process_failed", what, name, kubectl.typed("loadgen kube logs", name)
            )
        why = now.waits_for
        words = f"{name}: {now.phase}, {len(now.pods)} of {now.expected} pods{why and f', {why}'}"
        if words not in told:  # an image is tried, and waited for, in turn
            say(words)
        told.add(words)
        time.sleep(LOOK_S)


def _log(
    kubectl: Kubectl, lead: PodState, shown: dict[str, int], *, follows: bool
) -> tuple[int | None, str]:
    """Print the lines of a pod that were not shown yet, to its end or to now. The exit code, if a line says it, and
    what kubectl says.
    """
    if shown and lead.name not in shown:
        say(f"the pod of the lead was lost: {lead.name} begins the run again")
    seen = shown.setdefault(lead.name, 0)
    words = ("logs", *(["-f"] if follows else []), lead.name, "-c", CONTAINER)
    with tempfile.TemporaryFile() as errors:
        with kubectl.stream(*words, to=errors) as lines:
            for number, line in enumerate(lines, start=1):
                text = line.decode(errors="replace")
                if text.startswith(ENDED):
                    return int(text.removeprefix(ENDED)), ""
                if number > seen:
                    shown[lead.name] = number
                    print(text, end="", flush=True)
        errors.seek(0)
        return None, errors.read().decode(errors="replace").strip()


def fetch(kubectl: Kubectl, name: str, folder: Path) -> int:
    """Bring the results of a run that has ended into a folder, and let its pod go; the exit code of the run.

    Raises UserError while it runs, TargetError where its results are gone or came damaged.
    """
    now = look(kubectl, name)
    if now.lead is None or now.lead.phase == "Pending":
        hint = kubectl.typed("loadgen kube status", name)
        raise UserError("no_result", f"the run has not begun: {now.phase}", name, hint)
    if now.lead.phase != "Running":
        what = f"its pod has ended ({now.lead.why or now.lead.phase}), and its results with it"
        raise TargetError("no_result", what, now.lead.name, "fetch them sooner, or give --hold")
    pod = now.lead.name
    code = _code(kubectl, name, pod)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".loadgen-", dir=folder.parent) as scratch:
        came = Path(scratch) / name
        _unpack(kubectl, kubectl.inside(pod, "tar", "-cf", "-", name), Path(scratch))
        if not came.is_dir():
            raise TargetError(
                "no_result",
                "the run has left no results",
                pod,
                kubectl.typed("loadgen kube logs", name),
            )
        if changed := checksums.changed(came):
            raise TargetError(
                "damaged_file",
                f"not as it was written: {', '.join(changed)}",
                pod,
                "fetch it again",
            )
        if folder.is_dir():
            folder.rmdir()  # it is empty: `check_empty`, and nothing else was there
        shutil.move(came, folder)
    kubectl.ask(*kubectl.inside(pod, "touch", FETCHED))
    return code


def _code(kubectl: Kubectl, name: str, pod: str) -> int:
    """The exit code of a run. Raises UserError while it goes on."""
    words = kubectl.inside(pod, "sh", "-c", f"cat {CODE} 2>/dev/null || echo {RUNS}")
    for _ in range(TRIES):
        said = kubectl.ask(*words).decode().strip()
        if said == RUNS:
            raise UserError(
                "no_result", "the run goes on", name, kubectl.typed("loadgen kube logs", name, "-f")
            )
        if said:
            return int(said)
    raise kubectl.failed(words, b"no answer from the pod")


def _unpack(kubectl: Kubectl, words: Sequence[str], into: Path) -> None:
    """Unpack the archive that a command in a pod prints. Raises TargetError where it did not come whole."""
    for _ in range(TRIES):
        with tempfile.TemporaryFile(dir=into) as archive, tempfile.TemporaryFile() as errors:
            with kubectl.stream(*words, to=errors) as came:
                shutil.copyfileobj(came, archive)
            size = archive.tell()
            archive.seek(max(0, size - len(END)))
            whole = archive.read() == END
            archive.seek(0)
            errors.seek(0)
            said = errors.read() or b"the results came in part"
            with suppress(tarfile.TarError):
                if whole:
                    with tarfile.open(fileobj=archive) as came_whole:
                        came_whole.extractall(into, filter="data")
                    return
    raise kubectl.failed(words, said)
