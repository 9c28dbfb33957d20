"""A Kubernetes on this machine: its own etcd, API server, controllers, scheduler; nodes whose pods are processes.

    python tests/kube/real_cluster.py COMMAND ...

carries out a command in it, as root: `kubectl` reaches the cluster there, and no network else. It needs etcd,
kube-apiserver (1.36), kube-controller-manager, kube-scheduler and kubectl on the path. All of it lives in namespaces of
its own for processes, mounts and network, and ends with the command. A node is `node.py`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from time import monotonic, sleep

HERE = Path(__file__).parent
PROGRAMS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
    "unshare",
    "setpriv",
)
FOLDER = Path(
    "/run/loadgen-cluster"
)  # a file system of its own, which goes with the namespace of mounts
CONFIG = FOLDER / "admin.yaml"
ADDRESS = "10.255.0.1"
SERVER = f"https://{ADDRESS}:6443"
NODES = ("node-1", "node-2")
WAIT_S = 120.0
USERS = {  # -> groups
    "admin": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
    "dev": "",  # no rights but those that a test gives
}


def missing() -> list[str]:
    """What of PROGRAMS is not on the path, and root."""
    return [name for name in PROGRAMS if shutil.which(name) is None] + ["root"] * (
        os.geteuid() != 0
    )


def command(*words: str) -> list[str]:
    """The command line that carries out a command in a new cluster."""
    apart = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return [*apart, sys.executable, "-P", str(HERE / "real_cluster.py"), "--apart", *words]


def main(words: list[str]) -> int:
    """Bring the cluster up, carry out the command, and say its exit code."""
    FOLDER.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "cluster", str(FOLDER)], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["ip", "route", "add", "local", "10.0.0.0/8", "dev", "lo"], check=True)
    _control()
    for node in NODES:
        _start(f"node {node}", sys.executable, "-P", str(HERE / "node.py"), node, str(FOLDER))
    _until(lambda: all(_ready(node) for node in NODES), "the nodes are not ready")
    return subprocess.run(
        words, env={**os.environ, "KUBECONFIG": str(CONFIG)}, check=False
    ).returncode


def _control() -> None:
    tokens = {user: secrets.token_hex(16) for user in USERS}
    rows = [f'{tokens[user]},{user},{user},"{groups}"' for user, groups in USERS.items()]
    (FOLDER / "tokens").write_text("\n".join(rows), "utf-8")
    key = str(FOLDER / "account.key")
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    store = "http://127.0.0.1:2379"
    _start(
        "etcd",
        "etcd",
        "--data-dir",
        str(FOLDER / "etcd"),
        "--listen-client-urls",
        store,
        "--advertise-client-urls",
        store,
        "--listen-peer-urls",
        "http://127.0.0.1:2380",
    )
    start_server()
    for user in USERS:
        file = CONFIG.with_stem(user.rpartition(":")[2])
        cluster = {"server": SERVER, "certificate-authority": str(FOLDER / "apiserver.crt")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": cluster}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": user}}],
            "users": [{"name": user, "user": {"token": tokens[user]}}],
        }
        file.write_text(json.dumps(config), "utf-8")
    _until(lambda: ask("GET", "/readyz") is not None, "the API server is not ready")
    _start(
        "controllers",
        "kube-controller-manager",
        f"--kubeconfig={FOLDER}/kube-controller-manager.yaml",
        f"--service-account-private-key-file={key}",
        f"--root-ca-file={FOLDER}/apiserver.crt",
        "--use-service-account-credentials",
        "--leader-elect=false",
    )
    _start(
        "scheduler",
        "kube-scheduler",
        f"--kubeconfig={FOLDER}/kube-scheduler.yaml",
        "--leader-elect=false",
    )


def start_server() -> subprocess.Popen[bytes]:
    """Start the API server on the store that is there."""
    key = FOLDER / "account.key"
    return _start(
        "apiserver",
        "kube-apiserver",
        "--etcd-servers=http://127.0.0.1:2379",
        f"--cert-dir={FOLDER}",
        f"--advertise-address={ADDRESS}",
        "--service-cluster-ip-range=10.96.0.0/16",
        f"--token-auth-file={FOLDER}/tokens",
        "--authorization-mode=RBAC",
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
    )


def _start(name: str, *words: str) -> subprocess.Popen[bytes]:
    with (FOLDER / f"{name.replace(' ', '-')}.log").open("ab") as log:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    (FOLDER / f"{name.replace(' ', '-')}.pid").write_text(str(process.pid))
    return process


def _ready(node: str) -> bool:
    found = json.loads(ask("GET", f"/api/v1/nodes/{node}") or b"{}")
    return bool(found) and not found["spec"].get("taints")


def _until(over, what: str) -> None:  # type: ignore[no-untyped-def]
    deadline = monotonic() + WAIT_S
    while not over():
        if monotonic() > deadline:
            sys.exit(f"{what} after {WAIT_S:g} s: {FOLDER}/*.log")
        sleep(0.2)


def ask(method: str, path: str, body: object = None) -> bytes | None:
    """What the API server answers the administrator; None where it does not, or has no such thing."""
    config = json.loads(CONFIG.read_text("utf-8"))
    headers = {
        "Authorization": f"Bearer {config['users'][0]['user']['token']}",
        "Content-Type": "application/json",
    }
    asked = urllib.request.Request(
        SERVER + path, json.dumps(body).encode() if body else None, headers, method=method
    )
    try:
        with urllib.request.urlopen(asked, context=trust()) as answer:
            return answer.read()  # type: ignore[no-any-return]
    except (urllib.error.URLError, ConnectionError, FileNotFoundError):
        return None


def trust() -> ssl.SSLContext:
    """Of the certificate that the API server has made for itself."""
    return ssl.create_default_context(cafile=FOLDER / "apiserver.crt")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--apart"]:
        sys.exit(main(sys.argv[2:]))
    if absent := missing():
        sys.exit(f"not there: {', '.join(absent)}")
    os.execvp("unshare", command(*sys.argv[1:]))
