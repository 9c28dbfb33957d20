"""Stands in for the kubelet of a node: pods that are bound to it are processes of this machine. IO.

    python tests/kube/node.py NODE FOLDER      inside the namespaces of real_cluster.py

What a pod sees is as a kubelet makes it: its root is this machine's, read-only where that is asked, with volumes
mounted; it has its user, groups, variables, hosts and tree of processes (in which it is process 1). Any image is there,
but those named `missing`. Names are those of EndpointSlices, in /etc/hosts. Logs and exec are served to the API server.
Not here: probes, limits, restarts, volumes but emptyDir, ConfigMap and Secret.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import sleep
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]
NAME, FOLDER = sys.argv[1], Path(sys.argv[2])
NUMBER = int(NAME.rpartition("-")[2])
ADDRESS, PORT = f"10.254.0.{NUMBER}", 10250
KEEP_S, RETRY_S = 10.0, 1.0
CONFIG = json.loads((FOLDER / "admin.yaml").read_text("utf-8"))
SERVER = CONFIG["clusters"][0]["cluster"]["server"]
TOKEN = CONFIG["users"][0]["user"]["token"]
TRUST = ssl.create_default_context(cafile=FOLDER / "apiserver.crt")
SHOWN = {  # folders of this machine that a pod's own /tmp would hide: the image
    Path(sys.prefix),
    Path(__file__).parents[2],
    *(
        found.resolve().parent
        for found in Path(sys.prefix).glob("lib/*/site-packages/*")
        if found.is_symlink()
    ),
}
WHOLE = {"cpu": "8", "memory": "16Gi", "pods": "20", "ephemeral-storage": "10Gi"}
PODS: dict[str, Pod] = {}  # by uid
PROTOCOL, OUT, ERR, STATUS = (
    "v5.channel.k8s.io",
    1,
    2,
    3,
)  # of exec: frames of a WebSocket, each with its channel
APART = """import ctypes, os, signal, sys
library = ctypes.CDLL(None)
assert library.unshare(0x20020000) == 0  # mounts and processes
child = os.fork()
if child == 0:
    library.prctl(1, 9)  # killed with its parent
    for number in (signal.SIGINT, signal.SIGPIPE):  # a shell or Python may ignore them, a container does not
        signal.signal(number, signal.SIG_DFL)
    os.execvp(sys.argv[1], sys.argv[1:])
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
os._exit(code if code >= 0 else 128 - code)"""  # unshare(1) forgets that its child was killed
VARIABLE = re.compile(r"\$(\$|\(([^)]*)\))")


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def opened(method: str, path: str, body: object = None, kind: str = "application/json") -> Any:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind}
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(
        urllib.request.Request(SERVER + path, data, headers, method=method), context=TRUST
    )


def ask(
    method: str, path: str, body: object = None, kind: str = "application/json"
) -> Object | None:
    """None where the server has no such thing; waits for a server that is away."""
    while True:
        try:
            with opened(method, path, body, kind) as answer:
                return json.load(answer)  # type: ignore[no-any-return]
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                if error.code not in (404, 409):
                    print(method, path, error.code, error.read().decode(), flush=True)
                return None
        except OSError:
            pass
        sleep(RETRY_S)


def watched(path: str) -> Iterator[Object]:
    """What is there, and then each change, for ever."""
    while True:
        with (
            suppress(OSError, ValueError),
            opened(
                "GET", f"{path}{'&' if '?' in path else '?'}watch=true&resourceVersion=0"
            ) as lines,
        ):
            yield from (one for one in map(json.loads, lines) if one["type"] != "ERROR")
        sleep(RETRY_S)


def register() -> None:
    """Be a node that is ready, and say so every KEEP_S."""
    labels = {"kubernetes.io/hostname": NAME, "kubernetes.io/os": "linux"}
    ask(
        "POST",
        "/api/v1/nodes",
        {"kind": "Node", "apiVersion": "v1", "metadata": {"name": NAME, "labels": labels}},
    )
    leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
    while True:
        condition = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "lastHeartbeatTime": now(),
        }
        status = {
            "capacity": WHOLE,
            "allocatable": WHOLE,
            "conditions": [condition],
            "addresses": [{"type": "InternalIP", "address": ADDRESS}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": PORT}},
            "declaredFeatures": ["ExtendWebSocketsToKubelet"],
        }
        ask(
            "PATCH",
            f"/api/v1/nodes/{NAME}/status",
            {"status": status},
            "application/strategic-merge-patch+json",
        )
        spec = {
            "holderIdentity": NAME,
            "leaseDurationSeconds": 40,
            "renewTime": now().replace("Z", ".000000Z"),
        }
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": NAME},
            "spec": spec,
        }
        if ask("PATCH", f"{leases}/{NAME}", lease, "application/merge-patch+json") is None:
            ask("POST", leases, lease)
        sleep(KEEP_S)


# -- names -----------------------------------------------------------------------------------------------------------


def hosts(namespace: str) -> Path:
    return FOLDER / NAME / f"hosts.{namespace}"


def name_them() -> None:
    """Keep the names of headless Services as EndpointSlices say them, as the DNS of a cluster does."""
    slices: dict[str, Object] = {}
    for change in watched("/apis/discovery.k8s.io/v1/endpointslices"):
        one = change["object"]
        if change["type"] == "DELETED":
            slices.pop(one["metadata"]["uid"], None)
        else:
            slices[one["metadata"]["uid"]] = one
        for file in (FOLDER / NAME).glob("hosts.*"):
            file.write_text(
                "127.0.0.1 localhost\n" + "".join(_lines(slices.values(), file.suffix[1:])), "utf-8"
            )


def _lines(slices: Any, namespace: str) -> Iterator[str]:
    for one in slices:
        service, of = (
            one["metadata"]["labels"].get("kubernetes.io/service-name"),
            one["metadata"]["namespace"],
        )
        for endpoint in one.get("endpoints") or []:
            if endpoint["conditions"].get("ready", True):
                short = [
                    service,
                    *([f"{endpoint['hostname']}.{service}"] if "hostname" in endpoint else []),
                ]
                names = [
                    f"{name}{tail}"
                    for name in short
                    for tail in (f".{of}", f".{of}.svc", f".{of}.svc.cluster.local")
                ]
                names += short if of == namespace else []
                yield f"{endpoint['addresses'][0]} {' '.join(names)}\n"


# -- pods ------------------------------------------------------------------------------------------------------------


class Pod:
    """A pod with one container, from its start to its end."""

    def __init__(self, made: Object, address: str) -> None:
        meta = made["metadata"]
        self.made, self.address = made, address
        self.path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        self.namespace, self.name, self.uid = meta["namespace"], meta["name"], meta["uid"]
        (self.container,) = made["spec"]["containers"]
        self.folder = FOLDER / NAME / self.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "log"
        self.log.touch()
        self.leaving = threading.Event()
        self.process: subprocess.Popen[bytes] | None = None
        self.env: dict[str, str] = {}
        self.tell("Pending", waiting={"reason": "ContainerCreating"})
        threading.Thread(target=self.live, daemon=True).start()

    def tell(self, phase: str, **state: Object) -> None:
        """Write the status. The state of the container is one of waiting, running, terminated."""
        ready = "True" if phase == "Running" else "False"
        states = dict.fromkeys(("waiting", "running", "terminated")) | state
        image = self.container["image"]
        container = {
            "name": self.container["name"],
            "image": image,
            "imageID": image,
            "restartCount": 0,
            "ready": phase == "Running",
            "started": phase == "Running",
            "state": states,
        }
        conditions = [
            {"type": kind, "status": ready, "lastTransitionTime": now()}
            for kind in ("Ready", "ContainersReady")
        ]
        status = {
            "phase": phase,
            "containerStatuses": [container],
            "conditions": conditions,
            "hostIP": ADDRESS,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
        }
        ask(
            "PATCH",
            f"{self.path}/status",
            {"status": status},
            "application/strategic-merge-patch+json",
        )

    def live(self) -> None:
        code, reason = self._started()
        ended = {"exitCode": code, "reason": reason, "finishedAt": now(), "startedAt": now()}
        self.tell("Failed" if code else "Succeeded", terminated=ended)
        if not self.leaving.is_set():
            return
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        ask("DELETE", self.path, {"kind": "DeleteOptions", "apiVersion": "v1", **options})

    def _started(self) -> tuple[int, str]:
        pulled = 0
        while "missing" in self.container["image"]:
            image = f'Back-off pulling image "{self.container["image"]}"'
            fault = (
                {"reason": "ErrImagePull", "message": "not found"}
                if pulled == 0
                else {"reason": "ImagePullBackOff", "message": image}
            )
            self.tell("Pending", waiting=fault)
            pulled += 1
            if self.leaving.wait(5.0):
                return 137, "ContainerStatusUnknown"
        while lacks := self._prepared():
            self.tell("Pending", waiting={"reason": "CreateContainerConfigError", "message": lacks})
            if self.leaving.wait(RETRY_S):
                return 137, "ContainerStatusUnknown"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while not (
            children := Path(
                f"/proc/{self.process.pid}/task/{self.process.pid}/children"
            ).read_text()
        ):
            sleep(0.01)
        (self.folder / "pid").write_text(children.strip())
        self.tell("Running", running={"startedAt": now()})
        threading.Thread(target=self._end, daemon=True).start()
        code = self.process.wait()
        return code, "Error" if code else "Completed"

    def _end(self) -> None:
        """SIGTERM, time, SIGKILL: when the pod is deleted."""
        self.leaving.wait()
        assert self.process is not None
        meta = self.made["metadata"]
        pid = int((self.folder / "pid").read_text())
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            try:
                self.process.wait(meta.get("deletionGracePeriodSeconds", 30))
            except subprocess.TimeoutExpired:
                os.kill(pid, signal.SIGKILL)

    def _prepared(self) -> str:
        """Fill volumes, find the values of variables; says what is not there."""
        spec, found = self.made["spec"], {}
        group = spec.get("securityContext", {}).get("fsGroup", 0)
        for volume in spec.get("volumes", []):
            folder = self.folder / volume["name"]
            folder.mkdir(exist_ok=True)
            for kind, named in (
                ("configmaps", volume.get("configMap", {}).get("name")),
                ("secrets", volume.get("secret", {}).get("secretName")),
            ):
                if named is None:
                    continue
                one = ask("GET", f"/api/v1/namespaces/{self.namespace}/{kind}/{named}")
                if one is None:
                    return f'MountVolume.SetUp failed for volume "{volume["name"]}": {kind[:-1]} "{named}" not found'
                values = {
                    key: base64.b64decode(value) for key, value in one.get("binaryData", {}).items()
                }
                for key, value in one.get("data", {}).items():
                    values[key] = base64.b64decode(value) if kind == "secrets" else value.encode()
                for key, value in values.items():
                    (folder / key).write_bytes(value)
                    (folder / key).chmod(
                        (volume.get("secret") or volume["configMap"]).get("defaultMode", 0o644)
                    )
                    os.chown(folder / key, 0, group)
            os.chown(folder, 0, group)
            folder.chmod(0o2777 if "emptyDir" in volume else 0o755)
        for variable in self.container.get("env", []):
            value = (
                variable.get("value", "")
                if "valueFrom" not in variable
                else self._value(variable["valueFrom"])
            )
            if value is None and not variable["valueFrom"].get("secretKeyRef", {}).get("optional"):
                return f"no value for {variable['name']}: secret or key not found"
            if value is not None:
                found[variable["name"]] = value
        self.env = found
        return ""

    def _value(self, where: Object) -> str | None:
        if "fieldRef" in where:
            path = where["fieldRef"]["fieldPath"]
            if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path):
                return str(self.made["metadata"][match[1]][match[2]])
            return {
                "status.podIP": self.address,
                "metadata.name": self.name,
                "metadata.namespace": self.namespace,
            }[path]
        one = ask(
            "GET", f"/api/v1/namespaces/{self.namespace}/secrets/{where['secretKeyRef']['name']}"
        )
        value = (one or {}).get("data", {}).get(where["secretKeyRef"]["key"])
        return None if value is None else base64.b64decode(value).decode()

    def _command(self) -> list[str]:
        root, work = self.folder / "root", self.folder / "work"
        for folder in (root, work, self.folder / "upper"):
            folder.mkdir()
        own, spec = (
            self.container.get("securityContext", {}),
            self.made["spec"].get("securityContext", {}),
        )
        user = own.get("runAsUser", spec.get("runAsUser", 0))
        layers = f"lowerdir=/,upperdir={self.folder}/upper,workdir={work}"
        lines = [
            "mount --make-rprivate /",
            f"mount -t overlay overlay -o {layers} {root}",
            f"mkdir -p {root}/home/loadgen",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
        ]
        mounts = {mount["mountPath"]: mount for mount in self.container.get("volumeMounts", [])}
        lines += [f"mkdir -p {root}{path}" for path in mounts]
        lines += [
            f"mount --bind {self.folder}/{mount['name']} {root}{path}"
            for path, mount in mounts.items()
        ]
        for shown in map(str, SHOWN):
            if any(shown.startswith(f"{path}/") for path in mounts):
                lines += [f"mkdir -p {root}{shown}", f"mount --bind {shown} {root}{shown}"]
        homes = {str(home) for home in Path(sys.base_prefix).parents if str(home) != "/"}
        lines += [
            f"chmod o+x {root}{home}" for home in homes
        ]  # a Python below /root is another user's here
        lines += [f"mount --bind {hosts(self.namespace)} {root}/etc/hosts"]
        lines += [
            f"mount -o remount,bind,ro {root}{path}"
            for path, mount in mounts.items()
            if mount.get("readOnly")
        ]
        if own.get("readOnlyRootFilesystem"):
            lines.append(f"mount -o remount,ro {root}")
        groups = str(spec.get("fsGroup", user))
        self.env = {
            "HOME": "/home/loadgen",
            "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
            "HOSTNAME": self.name,
            **self.env,
        }
        words = [*self.container.get("command", ["loadgen"]), *self.container.get("args", [])]
        inside = [
            "setpriv",
            f"--reuid={user}",
            f"--regid={user}",
            f"--groups={groups}",
            "--no-new-privs",
            "--inh-caps=-all",
            "--bounding-set=-all",
            "env",
            "-i",
            f"--chdir={self.container.get('workingDir', '/results')}",
            *(f"{key}={value}" for key, value in self.env.items()),
            *map(self._expanded, words),
        ]
        script = f'set -e; {"; ".join(lines)}; exec chroot {root} "$@"'
        return [sys.executable, "-c", APART, "sh", "-c", script, "sh", *inside]

    def _expanded(self, word: str) -> str:
        """$(NAME) is the value of a variable, if there is one, and $$ is a dollar."""
        return VARIABLE.sub(
            lambda found: "$" if found[1] == "$" else self.env.get(found[2], found[0]), word
        )

    def inside(self, words: list[str]) -> list[str]:
        """The command line that carries out a command in the container."""
        pid = (self.folder / "pid").read_text()
        status = Path(f"/proc/{pid}/status").read_text()
        user, group = (re.search(rf"{key}:\t(\d+)", status)[1] for key in ("Uid", "Gid"))  # type: ignore[index]
        env = [f"{key}={value}" for key, value in self.env.items()]
        return [
            "nsenter",
            "-t",
            pid,
            "-m",
            "-p",
            "-r",
            "-w",
            "-S",
            user,
            "-G",
            group,
            "env",
            "-i",
            *env,
            *words,
        ]

    def lives(self) -> bool:
        return self.process is not None and self.process.poll() is None


def carry_out() -> None:
    """Start what is bound to this node, end what is deleted."""
    count = 0
    for change in watched(f"/api/v1/pods?fieldSelector=spec.nodeName={NAME}"):
        made = change["object"]
        uid = made["metadata"].get("uid", "")
        if (
            change["type"] in ("ADDED", "MODIFIED")
            and uid not in PODS
            and made["status"]["phase"] == "Pending"
        ):
            count += 1
            if not hosts(made["metadata"]["namespace"]).exists():
                hosts(made["metadata"]["namespace"]).write_text("127.0.0.1 localhost\n")
            PODS[uid] = Pod(made, f"10.244.{NUMBER}.{count}")
        if uid in PODS and (change["type"] == "DELETED" or "deletionTimestamp" in made["metadata"]):
            PODS[uid].made = made
            if (
                PODS[uid].process is not None
                and not PODS[uid].lives()
                and change["type"] != "DELETED"
            ):
                options = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
                ask(
                    "DELETE",
                    PODS[uid].path,
                    {"kind": "DeleteOptions", "apiVersion": "v1", **options},
                )
            PODS[uid].leaving.set()


# -- what the API server asks ----------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        _, what, namespace, name, *_ = url.path.split("/")
        pod = [one for one in PODS.values() if (one.namespace, one.name) == (namespace, name)][-1:]
        if not pod:
            return self.send_error(404)
        asked = parse_qs(url.query)
        if what == "containerLogs":
            return self._log(pod[0], follows=asked.get("follow") == ["true"])
        return self._execute(pod[0], asked["command"])

    def _log(self, pod: Pod, *, follows: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with pod.log.open("rb") as log:
            while True:
                over = not follows or not pod.lives()
                while data := log.read(65536):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                if over:
                    break
                sleep(0.1)
        self.wfile.write(b"0\r\n\r\n")

    def _execute(self, pod: Pod, words: list[str]) -> None:
        known = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header(
            "Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(known.encode()).digest()).decode()
        )
        self.send_header("Sec-WebSocket-Protocol", PROTOCOL)
        self.end_headers()
        lock = threading.Lock()
        with subprocess.Popen(
            pod.inside(words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as run:
            streams = ((OUT, run.stdout), (ERR, run.stderr))
            readers = [threading.Thread(target=self._relay, args=(lock, *one)) for one in streams]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
        code = run.returncode
        status: Object = {"metadata": {}, "status": "Success"}
        if code:
            cause = [{"reason": "ExitCode", "message": str(code)}]
            what = f"command terminated with non-zero exit code: exit status {code}"
            status = {
                "metadata": {},
                "status": "Failure",
                "message": what,
                "reason": "NonZeroExitCode",
                "details": {"causes": cause},
            }
        self._frame(STATUS, json.dumps(status).encode())
        self.wfile.write(b"\x88\x02\x03\xe8")  # closed, 1000
        self.close_connection = True

    def _relay(self, lock: threading.Lock, channel: int, stream: Any) -> None:
        while data := stream.read1(32768):
            with lock:
                self._frame(channel, data)

    def _frame(self, channel: int, data: bytes) -> None:
        part = bytes([channel]) + data
        size = bytes([len(part)]) if len(part) < 126 else b"\x7e" + len(part).to_bytes(2, "big")
        self.wfile.write(b"\x82" + size + part)

    def log_message(self, *_: Any) -> None:
        """Nothing is said."""


def serve() -> None:
    server = ThreadingHTTPServer((ADDRESS, PORT), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(FOLDER / "apiserver.crt", FOLDER / "apiserver.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    (FOLDER / NAME).mkdir()
    for work in (serve, register, name_them):
        threading.Thread(target=work, daemon=True).start()
    carry_out()
