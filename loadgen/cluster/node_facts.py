"""What is compared between this machine and the nodes of a cluster before a run: what must be alike, and limits. IO."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import platform
import socket
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import loadgen_sdk

import loadgen
from loadgen import plugins
from loadgen.core.errors import Fault, UserError
from loadgen.core.execution import resource_limits, run_header
from loadgen.core.execution.plan import Job
from loadgen.core.workload import Replay, parts


class NodeFacts(NamedTuple):
    """Facts about a node.

    `same`: name -> value of what must be equal on every node. `loopback`: an id, equal where machines share a loopback
    interface. `files`: path -> digest of the requested files, "" for a file that is not there.
    """

    host: str
    same: dict[str, str]
    loopback: str
    room: resource_limits.Room
    files: dict[str, str]


def own_facts(paths: Sequence[str], packages: Sequence[str] = ()) -> NodeFacts:
    """Facts about this machine, with digests of the files at these paths and the versions of these packages."""
    return NodeFacts(
        host=socket.gethostname(),
        same={
            "loadgen": f"{run_header.version()} (source {_source_digest()})",
            "Python": ".".join(platform.python_version_tuple()[:2]),
            "numpy": metadata.version("numpy"),
        }
        | {package: plugins.version_of(package) for package in packages},
        loopback=_loopback_id(),
        room=resource_limits.room(),
        files={path: _digest(Path(path)) for path in paths},
    )


def _loopback_id() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _source_digest() -> str:
    digest = hashlib.blake2b(digest_size=4)
    for package in (loadgen, loadgen_sdk):
        root = Path(package.__file__ or "").parent
        for file in sorted(root.rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    try:
        files = (
            sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        )
        for file in files:
            with file.open("rb") as data:
                while block := data.read(1 << 20):
                    digest.update(block)
    except OSError:
        return ""
    return digest.hexdigest()


def elsewhere(local: NodeFacts, nodes: Iterable[tuple[str, NodeFacts]]) -> list[str]:
    """The places of the nodes that do not share this machine's loopback interface. `nodes`: place and facts of each."""
    return sorted({where for where, facts in nodes if facts.loopback != local.loopback})


def unreachable(job: Job, elsewhere: Sequence[str], where: str) -> Iterator[Fault]:
    """A fault if workers `elsewhere` cannot reach the target."""
    if elsewhere and job.simulated:
        what = f"the embedded simulation listens on this machine alone, and workers run on {elsewhere[0]}"
        yield UserError(
            "unsupported", what, where, "start `loadgen sim` with --host and name it with --url"
        )


def notes(job: Job, elsewhere: Sequence[str]) -> Iterator[str]:
    """A note for each target that is another server for workers `elsewhere`."""
    for probed in job.found:
        if elsewhere and _is_loopback(probed.target.host):
            yield (
                f"{probed.target.redacted} is the loopback address of each machine, and workers run on "
                f"{', '.join(elsewhere)}: each sends to its own machine"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def files_of(job: Job) -> list[str]:
    """Paths of existing files that every worker reads itself."""
    settings, several = job.settings, parts(job.workload.requests).values()
    values: list[Any] = [settings.tokenizer, settings.tls.ca, settings.tls.cert, settings.tls.key]
    values += [getattr(requests, name, None) for requests in several for name in ("path", "trace")]
    values += [
        stage.arrival.file for stage in job.workload.stages if isinstance(stage.arrival, Replay)
    ]
    paths = [os.fspath(path) for path in values if isinstance(path, str | os.PathLike)]
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def differences(local: NodeFacts, remote: NodeFacts, where: str) -> Iterator[Fault]:
    """Faults for differences between a node and this machine that would change the requests."""
    for name, value in local.same.items():
        if remote.same.get(name) != value:
            what = f"{name} {remote.same.get(name)} there, {value} here"
            hint = "the same on every node: the requests of a run depend on it"
            yield UserError("nodes_differ", what, where, hint, key=name)
    for path, digest in local.files.items():
        if remote.files.get(path) != digest:
            what = (
                "no such file there"
                if not remote.files.get(path)
                else "another file there than here"
            )
            hint = "put it on a shared folder, under the same absolute path"
            yield UserError("nodes_differ", f"{path}: {what}", where, hint, key=path)
