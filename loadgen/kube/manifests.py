"""What a run of several pods is to Kubernetes: an indexed Job, and beside it files, secrets and names. Pure.

Pod 0 leads: it carries out `loadgen run` with the agents of all pods, itself included. A pod that is lost is replaced
under its index and so under its name; an exit code of loadgen itself is an answer, and ends the Job.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Manifest = dict[str, Any]

PORT = 7077
USER = 10001  # of the image
FILES, KEYS, RESULTS = "/etc/loadgen/files", "/etc/loadgen/keys", "/results"
CONTAINER = "loadgen"
TOKEN_KEY, API_KEY = "token", "api-key"
ARGUMENT = "LOADGEN_ARGUMENT_"  # of variables with a secret of the command line
ANSWERS = (1, 2, 3, 70)
"""Exit codes of loadgen that another try would not change: the load is not repeated for them."""
REPLACED = 3  # times that a pod is replaced whose process was killed; one whose node is taken away does not count
LABELS = {"app.kubernetes.io/name": "loadgen", "app.kubernetes.io/managed-by": "loadgen"}
JOB_NAME = "batch.kubernetes.io/job-name"  # label that Kubernetes gives the pods of a Job
INDEX = "batch.kubernetes.io/job-completion-index"  # its annotation
MOST_NAME = 52  # characters of a name: with its index it is the name of a host


class JobAsked(NamedTuple):
    """A run of several pods.

    arguments: of `loadgen run`, with the paths that files have in the pods. secret: that has the key of the target
    under `api-key`; it may not be there. cpus: of each pod, whole ones. hold_s: how long pod 0 waits, behind the run,
    for its results to be fetched. hidden: keys of the Secret that arguments name as variables.
    """

    name: str
    image: str
    pods: int
    arguments: Sequence[str]
    secret: str
    cpus: int = 2
    memory: str = "4Gi"
    hold_s: int = 3600
    hidden: Sequence[str] = ()
    stop: bool = True  # the Job is made suspended, until what stands beside it is there


def agents(name: str, pods: int, cpus: int) -> str:
    """The address of all agents, as `--ray` takes it."""
    return "agents:" + ",".join(f"{name}-{i}.{name}:{PORT}*{cpus}" for i in range(pods))


def job(asked: JobAsked) -> Manifest:
    """The Job."""
    pod = {
        "restartPolicy": "Never",
        "subdomain": asked.name,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 30,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {JOB_NAME: asked.name}},
            }
        ],
        "containers": [_container(asked)],
        "volumes": [
            {"name": "results", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "files", "configMap": {"name": asked.name}},
            {"name": "keys", "secret": {"secretName": asked.name, "defaultMode": 0o440}},
        ],
    }
    spec = {
        "completionMode": "Indexed",
        "completions": asked.pods,
        "parallelism": asked.pods,
        "suspend": asked.stop,
        "backoffLimitPerIndex": REPLACED,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": list(ANSWERS)}},
            ]
        },
        "ttlSecondsAfterFinished": 86400,
        "template": {"metadata": {"labels": dict(LABELS)}, "spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _named(asked.name), "spec": spec}


def _container(asked: JobAsked) -> Manifest:
    whole = {
        "cpu": str(asked.cpus),
        "memory": asked.memory,
    }  # a load generator that is throttled measures itself
    return {
        "name": CONTAINER,
        "image": asked.image,
        "workingDir": RESULTS,
        "command": ["python", "-P", "-m", "loadgen.kube.pod"],
        "args": [
            asked.name,
            str(asked.hold_s),
            agents(asked.name, asked.pods, asked.cpus),
            *asked.arguments,
        ],
        "env": [
            {
                "name": "LOADGEN_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": asked.name, "key": TOKEN_KEY}},
            },
            {
                "name": "OPENAI_API_KEY",
                "valueFrom": {
                    "secretKeyRef": {"name": asked.secret, "key": API_KEY, "optional": True}
                },
            },
            *(
                {"name": key, "valueFrom": {"secretKeyRef": {"name": asked.name, "key": key}}}
                for key in asked.hidden
            ),
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "ports": [{"name": "agent", "containerPort": PORT}],
        "resources": {"requests": whole, "limits": whole},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "results", "mountPath": RESULTS},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "files", "mountPath": FILES, "readOnly": True},
            {"name": "keys", "mountPath": KEYS, "readOnly": True},
        ],
    }


def beside(
    name: str,
    files: Mapping[str, bytes],
    keys: Mapping[str, bytes],
    owner: Mapping[str, str] | None = None,
) -> list[Manifest]:
    """What stands beside a Job and goes with it: its files, its secrets (the token among them), the names of its pods.

    owner: name and uid of the Job.
    """
    meta = _named(name)
    if owner is not None:
        meta["ownerReferences"] = [{"apiVersion": "batch/v1", "kind": "Job", **owner}]
    ports = [{"name": "agent", "port": PORT}]
    names = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {JOB_NAME: name},
        "ports": ports,
    }
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "binaryData": _encoded(files)},
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": meta,
            "type": "Opaque",
            "data": _encoded(keys),
        },
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": names},
    ]


def _named(name: str) -> Manifest:
    return {"name": name, "labels": dict(LABELS)}


def _encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(data).decode() for name, data in files.items()}


def index(pod: Manifest) -> int:
    """Which of its Job a pod is."""
    return int(pod["metadata"].get("annotations", {}).get(INDEX, 0))
