"""What became of a Job and its pods, by what Kubernetes says of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from loadgen.core import format
from loadgen.kube.manifests import REPLACED, Manifest, index
from loadgen.present.section import Report, Said, Section, Table, section


class PodState(NamedTuple):
    """The youngest pod of an index. `replaced`: how many were before it; `why`: what it waits for, or ended of."""

    number: int
    name: str
    node: str
    phase: str
    replaced: int
    why: str
    exit_code: int | None


class State(NamedTuple):
    """A Job. `phase`: waiting, running, ended or failed; `why`: of the Job, where it failed or makes no pods."""

    name: str
    phase: str
    pods: tuple[PodState, ...]
    expected: int
    why: str

    @property
    def lead(self) -> PodState | None:
        """Pod 0; None before it is made."""
        return next((pod for pod in self.pods if pod.number == 0), None)

    @property
    def whole(self) -> bool:
        """Whether every pod of it has begun."""
        return len(self.pods) == self.expected and all(pod.phase != "Pending" for pod in self.pods)

    @property
    def waits_for(self) -> str:
        """What a pod that has not ended waits for, as far as that is known."""
        return next(
            (pod.why for pod in self.pods if pod.phase in ("Pending", "Running") and pod.why),
            self.why,
        )

    @property
    def over(self) -> bool:
        """Whether no pod of it runs, or will."""
        return self.phase in ("ended", "failed")


def of(job: Manifest, pods: Sequence[Manifest]) -> State:
    """The state of a Job with these pods, the youngest of an index last."""
    status, spec = job.get("status", {}), job["spec"]
    failed = next((one for one in _true(status) if one["type"] == "Failed"), None)
    ended = any(one["type"] == "Complete" for one in _true(status))
    by_index: dict[int, list[Manifest]] = {}
    for pod in pods:
        by_index.setdefault(index(pod), []).append(pod)
    latest = tuple(
        _pod(of_index[-1], len(of_index) - 1) for _, of_index in sorted(by_index.items())
    )
    running = any(pod.phase == "Running" for pod in latest)
    phase = "failed" if failed else "ended" if ended else "running" if running else "waiting"
    why = "" if failed is None else failed.get("message") or failed.get("reason", "")
    return State(job["metadata"]["name"], phase, latest, spec["completions"], why)


def _true(status: Manifest) -> list[Manifest]:
    return [one for one in status.get("conditions", []) if one["status"] == "True"]


def _pod(pod: Manifest, replaced: int) -> PodState:
    status = pod.get("status", {})
    containers = status.get("containerStatuses", [])
    container: dict[str, Any] = containers[0].get("state", {}) if containers else {}
    ended, waits = container.get("terminated", {}), container.get("waiting", {})
    refuted = {
        one.get("type"): one.get("message", "")
        for one in status.get("conditions", [])
        if one["status"] == "False"
    }
    why = (
        waits.get("message")
        or waits.get("reason")
        or ended.get("reason")
        or status.get("reason")
        or ""
    )
    phase = status.get("phase", "Pending")
    if not why and phase == "Pending":
        why = next(filter(None, refuted.values()), "")
    if not why and phase == "Running" and "Ready" in refuted:  # it has no probe that could say so
        why = "its node does not answer"
    node = pod["spec"].get("nodeName", "")
    return PodState(
        index(pod), pod["metadata"]["name"], node, phase, replaced, why, ended.get("exitCode")
    )


def document(state: State) -> dict[str, Any]:
    """For `--json`."""
    return state._asdict() | {"pods": [pod._asdict() for pod in state.pods]}


def report(states: Sequence[State], made_by: str) -> Report:
    """One Job with its pods, or several Jobs."""
    if len(states) != 1:
        rows = [(one.name, one.phase, f"{len(one.pods)} of {one.expected}") for one in states]
        table = Table(("name", "state", "pods"), rows)
        answer = format.counted(len(states), "run in this namespace", "runs in this namespace")
        return Report(
            title="Runs on Kubernetes",
            made_by=made_by,
            answer=[Said(answer)],
            sections=[section("", table)],
        )
    (state,) = states
    words = (
        f"{state.name}: {state.phase}, {len(state.pods)} of {format.counted(state.expected, 'pod')}"
    )
    return Report(
        title=state.name,
        made_by=made_by,
        answer=[Said(f"{words}{state.why and f': {state.why}'}")],
        sections=[_pods(state)],
    )


def _pods(state: State) -> Section:
    rows = [
        (
            str(pod.number),
            pod.name,
            pod.node or "-",
            pod.phase,
            str(pod.replaced),
            pod.why if pod.exit_code is None else f"exit {pod.exit_code} {pod.why}".strip(),
        )
        for pod in state.pods
    ]
    replaced = sum(pod.replaced for pod in state.pods)
    remark = (
        f"{format.counted(replaced, 'pod')} replaced; a Job replaces a pod of an index {REPLACED} times."
        if replaced
        else ""
    )
    table = Table(("index", "pod", "node", "state", "replaced", "why"), rows, kind="remarks")
    return section("Pods", table, *([Said(remark, "soft")] if remark else []))
