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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import loadgen_sdk

import loadgen
from loadgen import plugins
from loadgen.core.errors import LoadgenError, UserError
from loadgen.core.execution import host_facts, resource_limits
from loadgen.core.execution.plan import Job
from loadgen.core.workload import (
    FromFile,
    FromTrace,
    Replay,
    Trajectories,
    requests_by_class,
)
from loadgen.core.workload.request_classes import Requests

HOST_KEY = "host"
VERSIONS_KEY = "same"
LOOPBACK_ID_KEY = "loopback"
LIMITS_KEY = "room"
FILE_DIGESTS_KEY = "files"
"""The keys of the message with the facts about a node.

They never change, so that a driver with another version of loadgen can say that versions differ.
"""

READ_BYTES = 1 << 20
"""Bytes of a file that are read at a time, so that large data sets need little memory."""


class NodeFacts(NamedTuple):
    """Facts about a machine that decide whether it can run a worker.

    Attributes:
        host: Its host name.
        versions: Versions that must be equal on every node, by the names of what they describe.
        loopback_id: An id that is equal for nodes that share a loopback interface.
        limits: Its limits of open files and local ports.
        file_digests: The digest of each file by its path; empty for a file that does not exist.
    """

    host: str
    versions: dict[str, str]
    loopback_id: str
    limits: resource_limits.MachineLimits
    file_digests: dict[str, str]

    def to_message(self) -> dict[str, object]:
        """Return the facts in plain types, which a driver with another version can unpickle."""
        return {
            HOST_KEY: self.host,
            VERSIONS_KEY: self.versions,
            LOOPBACK_ID_KEY: self.loopback_id,
            LIMITS_KEY: (self.limits.open_files, self.limits.local_ports),
            FILE_DIGESTS_KEY: self.file_digests,
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> NodeFacts:
        """Return the facts that `to_message` put into a message on a node.

        The node may have another version of loadgen. Facts that it does not send are empty.
        """
        open_files, local_ports = message.get(LIMITS_KEY, (None, None))
        return cls(
            host=message.get(HOST_KEY, ""),
            versions=message.get(VERSIONS_KEY, {}),
            loopback_id=message.get(LOOPBACK_ID_KEY, ""),
            limits=resource_limits.MachineLimits(open_files=open_files, local_ports=local_ports),
            file_digests=message.get(FILE_DIGESTS_KEY, {}),
        )


class CheckedNode(NamedTuple):
    """The node of a worker: its label in messages, and the facts about it."""

    label: str
    facts: NodeFacts


def read_local_facts(paths: Sequence[str], packages: Sequence[str] = ()) -> NodeFacts:
    """Return the facts about this machine, to be compared with those of other machines.

    Args:
        paths: Files and folders whose digests are included.
        packages: Python packages, for example of plug-ins, whose versions are included.
    """
    versions = {
        "loadgen": f"{host_facts.loadgen_version()} (source {_source_digest()})",
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "numpy": metadata.version("numpy"),
    }
    for package in packages:
        versions[package] = plugins.version_of(package)

    return NodeFacts(
        host=socket.gethostname(),
        versions=versions,
        loopback_id=_loopback_id(),
        limits=resource_limits.read_machine_limits(),
        file_digests={path: _digest(Path(path)) for path in paths},
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
    """Return the digest of the content of a file, or of all files in a folder.

    Two machines compare the digests instead of the files. A file that cannot be read, for example
    because it does not exist, has an empty digest.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
        for file in files:
            with file.open("rb") as data:
                while block := data.read(READ_BYTES):
                    digest.update(block)
    except OSError:
        return ""

    return digest.hexdigest()


def find_remote_nodes(local: NodeFacts, nodes: Iterable[tuple[str, NodeFacts]]) -> list[str]:
    """Return the labels of the nodes that do not share the loopback interface of this machine.

    For workers on these nodes, `localhost` is another server than for this command.

    Args:
        local: The facts about this machine.
        nodes: The label and the facts of each node.
    """
    return sorted({label for label, facts in nodes if facts.loopback_id != local.loopback_id})


def unreachable_target_errors(
    job: Job, remote_nodes: Sequence[str], option: str
) -> Iterator[LoadgenError]:
    """Yield an error if the target is a simulated server that workers on nodes cannot reach.

    The simulated server that a run starts itself listens on the loopback address of this machine.
    Whether other targets can be reached is not checked here.

    Args:
        job: The job of the run.
        remote_nodes: The labels of the nodes on other machines that run workers.
        option: The option of the cluster, which the error names.
    """
    if remote_nodes and job.simulated:
        yield UserError(
            "unsupported",
            (
                "the embedded simulation listens only on this machine, but workers run "
                f"on {remote_nodes[0]}"
            ),
            option,
            "run `loadgen sim --host 0.0.0.0` and give its URL with --url",
        )


def loopback_notes(job: Job, remote_nodes: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each target at a loopback address, such as `localhost`.

    Workers on other machines would send to a server on their own machine, and not to the target
    that this command has checked.

    Args:
        job: The job of the run.
        remote_nodes: The labels of the nodes on other machines that run workers. Without any,
            there is no warning.
    """
    if not remote_nodes:
        return
    for probe_result in job.probe_results:
        target = probe_result.target
        if _is_loopback(target.host):
            yield (
                f"{target.redacted} is a loopback address, but workers run on "
                f"{', '.join(remote_nodes)}: each would send to its own machine. Use "
                "an address that all nodes can reach"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def list_input_files(job: Job) -> list[str]:
    """Return the paths of the existing files that every worker reads itself.

    These are the tokenizer, the certificates, data sets, traces and recorded arrivals. They must
    have the same content on every node. An option such as the tokenizer can also be a name instead
    of a path; names are left out, because no such file exists.
    """
    tls = job.settings.tls
    options = [job.settings.tokenizer, tls.ca, tls.cert, tls.key]
    workload = job.workload
    request_files = [
        path
        for requests in requests_by_class(workload.requests).values()
        for path in _request_files(requests)
    ]
    arrivals = [stage.arrival for stage in workload.stages]
    arrival_files = [arrival.file for arrival in arrivals if isinstance(arrival, Replay)]
    candidates = [*options, *request_files, *arrival_files]
    paths = [os.fspath(candidate) for candidate in candidates if candidate is not None]
    unique_paths = dict.fromkeys(paths)

    return [path for path in unique_paths if os.path.exists(path)]


def _request_files(requests: Requests) -> list[Path]:
    """Return the data set or the trace that requests are read from, or an empty list."""
    match requests:
        case FromFile():
            return [requests.path]
        case FromTrace():
            return [requests.trace]
        case Trajectories():
            return [requests.trajectories]
        case _:
            return []


def find_differences(
    local: NodeFacts, remote: NodeFacts, node_label: str
) -> Iterator[LoadgenError]:
    """Yield an error for each difference between two machines that would change the requests.

    Args:
        local: The facts about this machine.
        remote: The facts about the node.
        node_label: The node, as messages name it.
    """
    for name, local_version in local.versions.items():
        remote_version = remote.versions.get(name)
        if remote_version != local_version:
            yield UserError(
                "nodes_differ",
                f"has {name} {remote_version}, but this machine has {local_version}",
                node_label,
                (
                    "install the same version on every node, because it decides which "
                    "requests are sent"
                ),
                key=name,
            )
    for path, local_digest in local.file_digests.items():
        remote_digest = remote.file_digests.get(path)
        if remote_digest != local_digest:
            yield _file_error(path, node_label, exists_on_node=bool(remote_digest))


def _file_error(path: str, node_label: str, *, exists_on_node: bool) -> UserError:
    """Return the error that a node does not have the same file as this machine."""
    problem = "the file is not the same as on this machine" if exists_on_node else "no such file"
    return UserError(
        "nodes_differ",
        f"{path}: {problem}",
        node_label,
        "put it on a shared file system, at the same absolute path on every node",
        key=path,
    )
