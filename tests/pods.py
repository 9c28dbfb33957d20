"""A cluster for tests: a kubectl that keeps objects in a folder, and starts pods as processes of this machine."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import jsonschema
import pytest
from command_line import exits

from loadgen.kube import manifests
from loadgen.kube.manifests import JobAsked

HERE = Path(__file__).parent / "kube"
SCHEMAS = json.loads((HERE / "schemas.json").read_text("utf-8"))


class StandIn:
    """The folder of the cluster."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def objects(self) -> list[dict[str, Any]]:
        """What was created, without the pods, which are Kubernetes' own."""
        found = [
            json.loads(path.read_text("utf-8"))
            for path in sorted(self.root.glob("objects/*/*.json"))
        ]
        return [one for one in found if one["kind"] != "Pod"]

    def hold(self, name: str) -> None:
        """Make a Job that is not let go, with a pod that waits."""
        job = manifests.job(JobAsked(name=name, image="i", pods=2, arguments=(), secret=name))
        pod = {
            "kind": "Pod",
            "spec": {},
            "status": {"phase": "Pending"},
            "metadata": {
                "name": f"{name}-0",
                "labels": {manifests.JOB_NAME: name},
                "annotations": {manifests.INDEX: "0"},
                "creationTimestamp": "0",
            },
        }
        for made in (job, pod):
            path = (
                self.root
                / "objects"
                / str(made["kind"]).lower()
                / f"{made['metadata']['name']}.json"
            )
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(made))

    def kill(self, pod: str) -> None:
        """Kill a pod outright."""
        os.killpg(int((self.root / "pods" / pod / "pid").read_text("utf-8")), signal.SIGKILL)

    def end(self) -> None:
        """End all pods."""
        for pod in self.root.glob("pods/*"):
            with suppress(OSError, ValueError):
                self.kill(pod.name)


@contextmanager
def cluster(folder: Path, **env: str) -> Iterator[StandIn]:
    """A cluster that this process reaches by `kubectl`; its pods end with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{HERE}:{os.environ['PATH']}")
        patch.setenv("STAND_IN", str(folder))
        patch.setenv("STAND_IN_PYTHON", sys.executable)
        for key, value in env.items():
            patch.setenv(key, value)
        made = StandIn(folder)
        try:
            yield made
        finally:
            made.end()


def typed(*words: str) -> int:
    """Carry out `loadgen kube ...`; its exit code."""
    return exits("kube", *words)


def wait(over: Callable[[], bool], at_most_s: float = 60.0) -> None:
    deadline = monotonic() + at_most_s
    while not over():
        assert monotonic() < deadline
        select.select([], [], [], 0.05)


def check(manifest: dict[str, Any]) -> None:
    """Raises jsonschema's ValidationError for what the API of Kubernetes does not know."""
    schema = SCHEMAS["kinds"][manifest["kind"]] | {"$defs": SCHEMAS["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(manifest)
