"""The options that the commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from loadgen.kube.kubectl import Kubectl


@dataclass(frozen=True, kw_only=True)
class Access:
    """The options that all commands share: whose answer is the user's kubectl."""

    kube_context: Annotated[str | None, typer.Option("--context", help="Of your kubeconfig.")] = (
        None
    )
    namespace: Annotated[str | None, typer.Option("--namespace", help="Where the pods run.")] = None
    kubeconfig: Annotated[
        Path | None, typer.Option("--kubeconfig", help="Instead of KUBECONFIG.")
    ] = None

    @property
    def kubectl(self) -> Kubectl:
        given = (
            ("context", self.kube_context),
            ("namespace", self.namespace),
            ("kubeconfig", self.kubeconfig),
        )
        return Kubectl(tuple(f"--{name}={value}" for name, value in given if value is not None))


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """The options of the pods."""

    pods: Annotated[
        int, typer.Option("--pods", min=1, max=1000, help="How many send the load.")
    ] = 1
    image: Annotated[
        str, typer.Option("--image", help="Of deploy/Dockerfile, where the nodes can fetch it.")
    ] = "loadgen:latest"
    cpus: Annotated[int, typer.Option("--cpus", min=1, max=256, help="Whole CPUs of each pod.")] = 2
    memory: Annotated[str, typer.Option("--memory", help="Of each pod.")] = "4Gi"
    name: Annotated[
        str | None, typer.Option("--name", help="Of the run and its Job; else made up.")
    ] = None
    secret: Annotated[
        str | None,
        typer.Option(
            "--secret", help="A Secret with the key under api-key; else OPENAI_API_KEY becomes one."
        ),
    ] = None
    hold: Annotated[
        int, typer.Option("--hold", min=0, help="Seconds that results wait to be fetched.")
    ] = 3600
