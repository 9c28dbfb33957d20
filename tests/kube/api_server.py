"""The few paths of the API of Kubernetes that `loadgen kube` needs, for a real kubectl, over the stand-in's objects.

A new object has to fit the published schema, as with a server that validates strictly. `exec` is spoken as kubectl
speaks it today: frames of a WebSocket, each with its channel.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema
from pods import HERE, check

KINDS = {
    "jobs": "Job",
    "pods": "Pod",
    "configmaps": "ConfigMap",
    "secrets": "Secret",
    "services": "Service",
    "events": "Event",
}
GROUPS = {
    "/api/v1": ["pods", "configmaps", "secrets", "services", "events"],
    "/apis/batch/v1": ["jobs"],
}
VERBS = ["create", "delete", "get", "list", "patch"]
PROTOCOL = "v5.channel.k8s.io"
OUT, ERR, STATUS = 1, 2, 3  # channels
HEAD = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"


def discovery(path: str) -> Any:
    """What kubectl asks first: groups, resources, and whether the server validates fields; None elsewhere."""
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        version = {"groupVersion": "batch/v1", "version": "v1"}
        group = {"name": "batch", "versions": [version], "preferredVersion": version}
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}
    if path in GROUPS:
        rows = [
            {
                "name": name,
                "singularName": name[:-1],
                "namespaced": True,
                "kind": KINDS[name],
                "verbs": VERBS,
            }
            for name in GROUPS[path]
        ]
        return {"kind": "APIResourceList", "groupVersion": path.split("/", 2)[2], "resources": rows}
    if path == "/openapi/v3":
        return {
            "paths": {one[1:]: {"serverRelativeURL": f"/openapi/v3{one}?hash=1"} for one in GROUPS}
        }
    if (of := path.removeprefix("/openapi/v3")) in GROUPS:
        group = "batch" if of.startswith("/apis") else ""
        paths = {}
        for name in GROUPS[of]:
            kind = {"group": group, "version": "v1", "kind": KINDS[name]}
            asks = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
            operation = {
                "x-kubernetes-group-version-kind": kind,
                "parameters": asks,
                "responses": {},
            }
            paths[f"{of}/namespaces/{{namespace}}/{name}/{{name}}"] = {"patch": operation}
        return {
            "openapi": "3.0.0",
            "info": {"title": "Kubernetes", "version": "v1.37"},
            "paths": paths,
        }
    return None


@contextmanager
def serving(folder: Path) -> Iterator[Path]:
    """Serve the objects of the stand-in that the environment names; gives a kubeconfig. Pods are looked after."""
    loader = importlib.machinery.SourceFileLoader("stand_in", str(HERE / "kubectl"))
    spec = importlib.util.spec_from_loader("stand_in", loader)
    assert spec is not None
    stand_in: Any = importlib.util.module_from_spec(spec)
    loader.exec_module(stand_in)
    handler = type("Handler", (_Handler,), {"stand_in": stand_in, "lock": threading.Lock()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    named = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
    context = {"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "perf"}}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [named],
        "contexts": [context],
        "users": [{"name": "me", "user": {}}],
        "current-context": "here",
    }
    file = folder / "kubeconfig"
    file.write_text(json.dumps(config))
    try:
        yield file
    finally:
        server.shutdown()
        server.server_close()
        for process in stand_in.STARTED:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stand_in: Any
    lock: threading.Lock

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        found = discovery(url.path)
        if found is not None:
            return self._answer(found)
        if "/namespaces/" not in url.path:
            return self._fail(404, url.path)
        resource, name, part = self._place(url.path)
        asked = parse_qs(url.query)
        if part == "log":
            return self._log(name)
        if part == "exec":
            return self._execute(name, asked["command"])
        with self.lock:
            for job in self.stand_in.every("Job"):
                self.stand_in.look_after(job)
            if name:
                one = self.stand_in.load(KINDS[resource], name)
                return (
                    self._answer(one)
                    if one
                    else self._fail(404, f'{resource}.batch "{name}" not found')
                )
            every = self.stand_in.every(KINDS[resource])
        wanted = dict(
            one.split("=") for one in ",".join(asked.get("labelSelector", [])).split(",") if one
        )
        items = [
            one for one in every if wanted.items() <= one["metadata"].get("labels", {}).items()
        ]
        of = {
            "apiVersion": "batch/v1" if resource == "jobs" else "v1",
            "kind": f"{KINDS[resource]}List",
        }
        return self._answer({**of, "metadata": {"resourceVersion": "1"}, "items": items})

    def do_POST(self) -> None:
        made = self._body()
        try:
            check(made)
        except jsonschema.ValidationError as error:
            return self._fail(400, f"strict decoding error: {error.message}")
        name = made["metadata"]["name"]
        with self.lock:
            if self.stand_in.load(made["kind"], name):
                return self._fail(409, f'{made["kind"]} "{name}" already exists')
            uid = hashlib.md5(f"{made['kind']} {name}".encode()).hexdigest()
            made["metadata"] |= {
                "namespace": "perf",
                "uid": uid,
                "creationTimestamp": self.stand_in.now(),
            }
            self.stand_in.save(made)
        return self._answer(made, 201)

    def do_PATCH(self) -> None:
        _, name, _ = self._place(urlsplit(self.path).path)
        with self.lock:
            self.stand_in.patch(["job", name, "-p", json.dumps(self._body())])
            self._answer(self.stand_in.load("Job", name))

    def do_DELETE(self) -> None:
        _, name, _ = self._place(urlsplit(self.path).path)
        self._body()
        with self.lock:
            self.stand_in.delete(["job", name])
        self._answer({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _place(self, path: str) -> tuple[str, str, str]:
        """Resource, name and part of it: /api/v1/namespaces/perf/pods/bench-0/log."""
        _, rest = path.split("/namespaces/", 1)
        _, resource, *more = rest.split("/")
        return resource, *[*more, "", ""][:2]  # type: ignore[return-value]

    def _body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")

    def _answer(self, value: Any, code: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _fail(self, code: int, message: str) -> None:
        reason = {400: "BadRequest", 404: "NotFound", 409: "AlreadyExists"}[code]
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
        self._answer({**status, "reason": reason, "message": message}, code)

    def _log(self, pod: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Connection", "close")
        self.end_headers()
        words = ["-f", pod] if "follow=true" in self.path else [pod]
        with subprocess.Popen(
            [str(HERE / "kubectl"), "logs", *words], stdout=self.wfile.fileno()
        ) as reader:
            reader.wait()
        self.close_connection = True

    def _execute(self, pod: str, command: list[str]) -> None:
        assert PROTOCOL in self.headers["Sec-WebSocket-Protocol"]
        known = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(known.encode()).digest()).decode()
        told = f"{HEAD}Sec-WebSocket-Accept: {accept}\r\nSec-WebSocket-Protocol: {PROTOCOL}\r\n\r\n"
        self.wfile.write(told.encode())
        done = subprocess.run(
            [str(HERE / "kubectl"), "exec", pod, "-c", "loadgen", "--", *command],
            capture_output=True,
            check=False,
        )
        self._frame(OUT, done.stdout)
        self._frame(ERR, done.stderr)
        code = {"reason": "ExitCode", "message": str(done.returncode)}
        failed = {
            "status": "Failure",
            "reason": "NonZeroExitCode",
            "details": {"causes": [code]},
            "message": "failed",
        }
        self._frame(
            STATUS, json.dumps(failed if done.returncode else {"status": "Success"}).encode()
        )
        self.wfile.write(b"\x88\x02\x03\xe8")  # closed, 1000
        self.close_connection = True

    def _frame(self, channel: int, data: bytes) -> None:
        for at in range(0, len(data), 32768):
            part = bytes([channel]) + data[at : at + 32768]
            size = bytes([len(part)]) if len(part) < 126 else b"\x7e" + len(part).to_bytes(2, "big")
            self.wfile.write(b"\x82" + size + part)

    def log_message(self, *_: Any) -> None:
        """Nothing is said."""
