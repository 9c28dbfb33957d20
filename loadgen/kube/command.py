"""`loadgen kube run|status|logs|results`: a run on the pods of a Kubernetes cluster. Parses, makes calls, prints."""

from __future__ import annotations

import os
import re
import secrets
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from loadgen.core.errors import INTERRUPTED, OK, Fault, Faults, UserError, collecting
from loadgen.kube import sending
from loadgen.kube.kubectl import Kubectl
from loadgen.kube.manifests import API_KEY, CONTAINER
from loadgen.kube.options import Access, PodOptions
from loadgen.shell.given import Given
from loadgen.shell.help import Command, in_order
from loadgen.shell.options import OneWorkload, takes
from loadgen.shell.output import print_answer, say

NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
Name = Annotated[str, typer.Argument(metavar="name", help="Of the run: its Job.")]


app = typer.Typer(
    name="kube",
    help="A load from the pods of a Kubernetes cluster, by your kubectl: an indexed Job, followed and fetched.",
    rich_markup_mode=None,
    cls=in_order(("run", "status", "logs", "results")),
    no_args_is_help=True,
)


@app.command(cls=Command)
@takes(
    without=("ray", "sources", "prometheus", "otel"), out="Folder that the results are brought to."
)
def run(
    given: Given,
    access: Access,
    pods: PodOptions,
    workload: OneWorkload = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Do not follow: come back with status, logs, results.")
    ] = False,
    show: Annotated[
        bool,
        typer.Option(
            "--manifests", help="Print what would be made, without keys, and make nothing."
        ),
    ] = False,
) -> int:
    """Send a load from several pods: make the Job, follow it, bring its results here. Ctrl-C leaves it alone.

    Files that the command line names go along, keys as a Secret. A pod that is lost before the load is replaced by
    the Job and used; one that is lost under load is a lost worker, and the result says so.

    Exit: as loadgen run; 3 also where the Job failed or the cluster does not answer; 130 detached by Ctrl-C.

    Example: loadgen kube run rag --url http://vllm.serving:8000 --request-rate 200 -d 5m --pods 4
    """
    from loadgen.core.execution.folder_names import check_empty
    from loadgen.kube import follow

    faults: list[Fault] = []
    with collecting(faults):
        settings = given.settings()
    with collecting(faults):
        loaded = given.workload(workload)
    with collecting(faults):
        name = _name(pods.name, workload)
    if faults:
        raise Faults(faults)
    sending.check(given, settings, loaded)
    folder = settings.out or Path("results") / name
    if not given["force"]:
        check_empty(folder)
    package = sending.package(
        given,
        settings.command[1:],
        workload,
        own=sending.flags_of(Access, PodOptions) | {"--detach": 0, "--manifests": 0},
    )
    asked = sending.asked(pods, name, package, typed_workers=given["workers"] is not None)
    if show:
        print(sending.shown(asked, package), end="")
        return OK
    kubectl = access.kubectl
    key = os.environ.get("OPENAI_API_KEY", "") if pods.secret is None else ""
    follow.make(
        kubectl, asked, package.files, package.keys | ({API_KEY: key.encode()} if key else {})
    )
    if detach:
        again = kubectl.typed("loadgen kube results", name, "-o", folder)
        say(f"{name} goes on: {kubectl.typed('loadgen kube status', name)}, {again}")
        return OK
    given.make_room(settings.out)
    return _attached(kubectl, name, folder)


def _name(given: str | None, workload: str | None) -> str:
    from loadgen.kube.manifests import MOST_NAME

    plain = re.sub(r"[^a-z0-9]+", "-", Path(workload or "load").stem.lower()).lstrip("-0123456789")
    stem = plain[: MOST_NAME - 5].rstrip("-")
    name = given if given is not None else f"{stem or 'load'}-{secrets.token_hex(2)}"
    if not NAME.fullmatch(name) or len(name) > MOST_NAME:
        hint = f"a small letter, then letters, digits and dashes, at most {MOST_NAME}: it becomes the name of hosts"
        raise UserError(
            "invalid_value", "not the name of a Job with several pods", f"--name {name}", hint
        )
    return name


def _attached(kubectl: Kubectl, name: str, folder: Path) -> int:
    from loadgen.kube import follow

    try:
        follow.follow(kubectl, name)
        code = follow.fetch(kubectl, name, folder)
    except KeyboardInterrupt:
        again = kubectl.typed("loadgen kube results", name, "--wait -o", folder)
        say(
            f"\ndetached, and it goes on: {again}; {kubectl.typed('kubectl delete job', name)} ends it"
        )
        return INTERRUPTED
    say(f"results in {folder}")
    return code


@app.command(cls=Command)
@takes(only=())
def status(
    access: Access,
    name: Annotated[
        str | None, typer.Argument(metavar="name", help="Of a run; without it all are listed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> int:
    """What a run does: its Job, its pods, which were replaced, why one waits.

    Example: loadgen kube status rag-4f2a
    """
    from loadgen.kube import follow, state

    kubectl = access.kubectl
    states = follow.every(kubectl) if name is None else [follow.look(kubectl, name)]
    documents = [state.document(one) for one in states]
    made_by = f"loadgen {version('loadgen')} kube status"
    print_answer(
        documents if name is None else documents[0], state.report(states, made_by), as_json=as_json
    )
    return OK


@app.command(cls=Command)
@takes(only=())
def logs(
    access: Access,
    name: Name,
    pod: Annotated[int, typer.Option("--index", min=0, help="Of the pod; 0 leads the run.")] = 0,
    follows: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the pod ends.")
    ] = False,
) -> int:
    """What a pod of a run has printed.

    Example: loadgen kube logs rag-4f2a -f
    """
    from loadgen.kube import follow

    kubectl = access.kubectl
    found = next((one for one in follow.look(kubectl, name).pods if one.number == pod), None)
    if found is None:
        hint = kubectl.typed("loadgen kube status", name)
        raise UserError("no_result", "the pod is not there yet", f"--index {pod}", hint)
    try:
        with kubectl.stream(
            "logs", *(["-f"] if follows else []), found.name, "-c", CONTAINER
        ) as lines:
            for line in lines:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    return OK


@app.command(cls=Command)
@takes(only=())
def results(
    access: Access,
    name: Name,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for them; else results/NAME.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end first.")] = False,
) -> int:
    """Bring the results of a run here, check them against their hashes, and let its pod go.

    Exit: that of the run.

    Example: loadgen kube results rag-4f2a -o rag
    """
    from loadgen.core.execution.folder_names import check_empty
    from loadgen.kube import follow

    folder = out or Path("results") / name
    check_empty(folder)
    if wait:
        return _attached(access.kubectl, name, folder)
    code = follow.fetch(access.kubectl, name, folder)
    say(f"results in {folder}: loadgen report {folder}")
    return code
