"""The commands of docs/kubernetes.md on a real cluster, as somebody with the rights of deploy/role.yaml and no others.

python tests/kube/real_cluster.py python tests/kube/real_walk.py
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

from real_cluster import CONFIG, FOLDER

ROOT = Path(__file__).parents[2]
SECRET = "sk-never-written-4711"
RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/warn": "restricted",
}
ENDPOINT = {
    "name": "vllm",
    "image": "loadgen",
    "workingDir": "/tmp",
    "volumeMounts": [{"name": "key", "mountPath": "/key"}],
    "args": [
        "sim",
        "--port=8000",
        "--host=0.0.0.0",
        "--ttft=50ms",
        "--itl=5ms",
        "--api-key-file=/key/key",
    ],
}
SERVED = [  # http://vllm.serving:8000
    {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "key", "namespace": "serving"},
        "data": {"key": base64.b64encode(SECRET.encode()).decode()},
    },
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "vllm", "namespace": "serving"},
        "spec": {"clusterIP": "None", "selector": {"app": "vllm"}, "ports": [{"port": 8000}]},
    },
    {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "vllm", "namespace": "serving", "labels": {"app": "vllm"}},
        "spec": {
            "automountServiceAccountToken": False,
            "containers": [ENDPOINT],
            "volumes": [{"name": "key", "secret": {"secretName": "key"}}],
        },
    },
]
LOAD = ("--url=http://vllm.serving:8000", "--request-rate=4", "--seed=1", "--pods=2")
ENDED = (0, 3)  # 3: a busy host's senders are late


def kubectl(*words: str, given: object = None) -> str:
    """What kubectl answers the administrator."""
    data = None if given is None else json.dumps(given)
    return subprocess.run(
        ["kubectl", *words], input=data, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def loadgen(*words: str, codes: tuple[int, ...] = (0,)) -> str:
    """What `loadgen kube` prints, for a user with few rights."""
    env = {**os.environ, "KUBECONFIG": str(CONFIG.with_stem("dev")), "OPENAI_API_KEY": SECRET}
    line = [sys.executable, "-P", "-m", "loadgen", "kube", *words]
    done = subprocess.run(
        line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode in codes, (words, done)
    return " ".join(done.stdout.split())


def until(over: Callable[[], object], at_most_s: float = 60.0) -> None:
    deadline = monotonic() + at_most_s
    while not over():
        assert monotonic() < deadline, over
        sleep(0.2)


def kill(pod: str) -> None:
    """Kill the process of a pod outright, once it runs."""
    until(lambda: [*FOLDER.glob(f"node-*/{pod}-*/pid")])
    (file,) = FOLDER.glob(f"node-*/{pod}-*/pid")
    os.kill(int(file.read_text()), signal.SIGKILL)


def objects(kinds: str) -> list[str]:
    """Kind and name of what is there of the runs."""
    return kubectl(
        "get", kinds, "-n", "perf", "-l", "app.kubernetes.io/name=loadgen", "-o", "name"
    ).split()


def prepare() -> None:
    """An endpoint in one namespace, another that takes restricted pods, and somebody with the rights of the Role."""
    for name, labels in (("serving", {}), ("perf", RESTRICTED)):
        meta = {"name": name, "labels": labels}
        kubectl(
            "apply", "-f", "-", given={"apiVersion": "v1", "kind": "Namespace", "metadata": meta}
        )
        until(lambda name=name: "default" in kubectl("get", "serviceaccounts", "-n", name))  # type: ignore[misc]
    for one in SERVED:
        kubectl("apply", "-f", "-", given=one)
    kubectl("apply", "-n", "perf", "-f", str(ROOT / "deploy/role.yaml"))
    kubectl("create", "rolebinding", "loadgen", "-n", "perf", "--role=loadgen", "--user=dev")
    kubectl(
        "config",
        "set-context",
        "here",
        "--namespace=perf",
        "--kubeconfig",
        str(CONFIG.with_stem("dev")),
    )
    kubectl("wait", "-n", "serving", "--for=condition=Ready", "pod/vllm")


def the_server_takes_what_is_made() -> None:
    env = {**os.environ, "OPENAI_API_KEY": SECRET}
    words = [
        sys.executable,
        "-P",
        "-m",
        "loadgen",
        "kube",
        "run",
        "qa",
        *LOAD,
        "-d",
        "9s",
        "--manifests",
    ]
    made = subprocess.run(words, env=env, stdout=subprocess.PIPE, check=True).stdout
    for data in (made, (ROOT / "deploy/job.yaml").read_bytes()):
        line = [
            "kubectl",
            "apply",
            "-n",
            "perf",
            "--dry-run=server",
            "--validate=strict",
            "-f",
            "-",
        ]
        done = subprocess.run(line, input=data, capture_output=True, check=True)
        assert b"Warning" not in done.stderr, done


def the_page_is_typed() -> None:
    lines = [line.split() for line in (ROOT / "docs/kubernetes.md").read_text("utf-8").splitlines()]
    found = [words[2:] for words in lines if words[:2] == ["loadgen", "kube"] and "soak" in words]
    assert [words[0] for words in found] == ["run", "status", "logs", "results"]
    short = {"10m": "8s", "40": "4"}
    for words in found:
        said = loadgen(*(short.get(word, word) for word in words), codes=ENDED)
    assert "results in soak" in said and "2 workers on 2 nodes" in said
    assert (Path("soak") / "summary.json").is_file()
    told = kubectl("get", "pods,configmaps,jobs,services,events", "-A", "-o", "yaml")
    assert SECRET not in told and base64.b64encode(SECRET.encode()).decode() not in told
    kubectl("delete", "job", "soak", "-n", "perf")
    until(lambda: not objects("jobs,pods,configmaps,secrets,services"))


def a_pod_that_is_lost_before_the_load_is_replaced() -> None:
    loadgen("run", "qa", *LOAD, "-d", "8s", "--name", "early", "--detach")
    kill("early-1")
    assert "results in early" in loadgen("results", "early", "--wait", "-o", "early", codes=ENDED)
    assert "1 pod replaced" in loadgen("status", "early")


def a_pod_that_cannot_be_made_is_told() -> None:
    kubectl("create", "quota", "small", "-n", "perf", "--hard=requests.cpu=3")
    loadgen("run", "qa", *LOAD, "-d", "8s", "--name", "much", "--detach")
    until(lambda: "1 of 2 pods: Error creating" in loadgen("status", "much"))
    assert re.search(
        r"is forbidden: exceeded quota: small, requested: requests.cpu=2", loadgen("status", "much")
    )
    kubectl("delete", "quota", "small", "-n", "perf")
    kubectl("delete", "job", "much", "-n", "perf")


def what_the_server_refuses_leaves_nothing() -> None:
    kubectl("create", "configmap", "clash", "-n", "perf")
    assert 'configmaps "clash" already exists' in loadgen(
        "run", "qa", *LOAD, "-d", "9s", "--name=clash", codes=(3,)
    )
    until(lambda: [one for one in objects("jobs,secrets,services") if "clash" in one] == [])
    said = loadgen("run", "qa", *LOAD, "-d", "9s", "--name=no", "--namespace=default", codes=(3,))
    assert 'User "dev" cannot create resource "jobs"' in said


def main() -> None:
    prepare()
    folder = tempfile.mkdtemp(prefix="loadgen-walk-")
    os.chdir(folder)
    for step in (
        the_server_takes_what_is_made,
        the_page_is_typed,
        a_pod_that_is_lost_before_the_load_is_replaced,
        a_pod_that_cannot_be_made_is_told,
        what_the_server_refuses_leaves_nothing,
    ):
        step()
        print(step.__name__.replace("_", " "), flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
