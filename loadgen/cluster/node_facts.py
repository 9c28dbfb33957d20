"""Facts about a machine that the driver compares with those of the nodes before a run. IO.

The requests of a run depend on the version of loadgen, on Python, numpy and on files, so all nodes
must have the same ones.
"""

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
from loadgen.core.errors import LoadgenError, UserError
from loadgen.core.execution import host_facts, resource_limits
from loadgen.core.execution.plan import Job
from loadgen.core.workload import Replay, requests_by_class


class NodeFacts(NamedTuple):
    """Facts about a node.

    Attributes:
        host: Its host name.
        same: What must be equal on every node: versions by their names.
        loopback: An id that is equal for nodes that share a loopback interface.
        room: Its limits of open files and local ports.
        files: The digest of each file by its path; empty for a file that does not exist.
    """

    host: str
    same: dict[str, str]
    loopback: str
    room: resource_limits.MachineLimits
    files: dict[str, str]


def own_facts(paths: Sequence[str], packages: Sequence[str] = ()) -> NodeFacts:
    """Return the facts about this machine.

    Args:
        paths: Files and folders whose digests are included.
        packages: Python packages whose versions are included.
    """
    return NodeFacts(
        host=socket.gethostname(),
        same={
            "loadgen": f"{host_facts.loadgen_version()} (source {_source_digest()})",
            "Python": ".".join(platform.python_version_tuple()[:2]),
            "numpy": metadata.version("numpy"),
        }
        | {package: plugins.version_of(package) for package in packages},
        loopback=_loopback_id(),
        room=resource_limits.read_machine_limits(),
        files={path: _digest(Path(path)) for path in paths},
    )


def _loopback_id() -> str:
    """Return an id of the boot and the network namespace of this machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _source_digest() -> str:
    """Return a digest of the source of loadgen and its SDK."""
    digest = hashlib.blake2b(digest_size=4)
    for package in (loadgen, loadgen_sdk):
        root = Path(package.__file__ or "").parent
        for file in sorted(root.rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()


def _digest(path: Path) -> str:
    """Return the digest of a file or of all files in a folder; empty if it cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
        for file in files:
            with file.open("rb") as data:
                while block := data.read(1 << 20):
                    digest.update(block)
    except OSError:
        return ""
    return digest.hexdigest()


def elsewhere(local: NodeFacts, nodes: Iterable[tuple[str, NodeFacts]]) -> list[str]:
    """Return the places of the nodes that do not share the loopback interface of this machine.

    Args:
        local: The facts about this machine.
        nodes: The place and the facts of each node.
    """
    return sorted({where for where, facts in nodes if facts.loopback != local.loopback})


def unreachable(job: Job, elsewhere: Sequence[str], where: str) -> Iterator[LoadgenError]:
    """Yield an error if workers on other machines cannot reach the target.

    Args:
        job: The job of the run.
        elsewhere: The places of the workers on other machines.
        where: The option that the error names.
    """
    if elsewhere and job.simulated:
        yield UserError(
            "unsupported",
            "the embedded simulation listens on this machine alone, "
            f"and workers run on {elsewhere[0]}",
            where,
            "start `loadgen sim` with --host and name it with --url",
        )


def notes(job: Job, elsewhere: Sequence[str]) -> Iterator[str]:
    """Yield a note for each target that is another server for workers on other machines."""
    for probed in job.probe_results:
        if elsewhere and _is_loopback(probed.target.host):
            yield (
                f"{probed.target.redacted} is the loopback address of each machine, "
                f"and workers run on {', '.join(elsewhere)}: each sends to its own machine"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def files_of(job: Job) -> list[str]:
    """Return the paths of the existing files that every worker reads itself."""
    tls = job.settings.tls
    values: list[Any] = [job.settings.tokenizer, tls.ca, tls.cert, tls.key]
    for requests in requests_by_class(job.workload.requests).values():
        values += [getattr(requests, name, None) for name in ("path", "trace")]
    for stage in job.workload.stages:
        if isinstance(stage.arrival, Replay):
            values.append(stage.arrival.file)
    paths = [os.fspath(path) for path in values if isinstance(path, str | os.PathLike)]
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def differences(local: NodeFacts, remote: NodeFacts, where: str) -> Iterator[LoadgenError]:
    """Yield an error for each difference that would change the requests.

    Args:
        local: The facts about this machine.
        remote: The facts about the node.
        where: The place of the node.
    """
    for name, value in local.same.items():
        if remote.same.get(name) != value:
            yield UserError(
                "nodes_differ",
                f"has {name} {remote.same.get(name)}, but this machine has {value}",
                where,
                "install the same version on every node: the requests of a run depend on it",
                key=name,
            )
    for path, digest in local.files.items():
        remote_digest = remote.files.get(path)
        if remote_digest != digest:
            problem = "the file differs from the one here" if remote_digest else "no such file"
            yield UserError(
                "nodes_differ",
                f"{path}: {problem}",
                where,
                "put it on a shared folder, under the same absolute path",
                key=path,
            )
