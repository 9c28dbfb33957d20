"""Which endpoints serve which steps of a workload's tasks: by --url NAME=URL, by --targets, or by the workload itself.

Pure, but for the environment variables with keys that a workload names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from loadgen_sdk.wire_formats.server_profiles import Api
from msgspec.structs import replace

from loadgen.core.errors import CombinedError, LoadgenError, UserError, did_you_mean
from loadgen.core.execution.plan import Endpoint, Settings
from loadgen.core.requests.mix import class_and_step
from loadgen.core.requests.prompts import Prompts
from loadgen.core.workload import Task, Workload, requests_by_class
from loadgen.core.workload.tasks import TaskStep

APIS: dict[str, Api] = {"embed": "embeddings", "rerank": "rerank"}


class _Step(NamedTuple):
    of_class: str
    name: str
    step: TaskStep

    @property
    def own(self) -> bool:
        """Whether it is not asked as the rest of the run is."""
        return (
            self.step.kind != "chat" or self.step.target is not None or self.step.model is not None
        )

    @property
    def label(self) -> str:
        """The name of its target, or its own where the workload says the URL."""
        return self.step.target if isinstance(self.step.target, str) else self.name


def resolved(
    workload: Workload, settings: Settings, env: Mapping[str, str] = os.environ
) -> Settings:
    """The settings with an endpoint for each way in which steps are asked: target, API and model. Raises Faults.

    Targets that steps ask by name are given all or none; where none is, one endpoint serves everything.
    """
    steps = list(_steps(workload))
    wanted = {step.target for _, _, step in steps if isinstance(step.target, str)}
    given: dict[str, list[Endpoint]] = {}
    main: list[Endpoint] = []
    for endpoint in settings.endpoints:
        name = endpoint.serves or endpoint.name
        (given.setdefault(name, []) if endpoint.serves or name in wanted else main).append(endpoint)
    faults = list(_faults(steps, wanted, given, main))
    if not any(one.own for one in steps) and not faults:
        return settings
    endpoints: list[Endpoint] = []
    places: dict[tuple[str, str], tuple[int, ...]] = {}

    def add(those: Sequence[Endpoint]) -> tuple[int, ...]:
        for endpoint in those:
            if endpoint not in endpoints:
                endpoints.append(endpoint)
        return tuple(endpoints.index(endpoint) for endpoint in those)

    only_tasks = all(
        isinstance(part, Task) for part in requests_by_class(workload.requests).values()
    )
    if not only_tasks or not all(one.own for one in steps):
        places["", ""] = add(main)
    for one in steps:
        target = one.step.target
        those = main if target is None or not given else given.get(one.label, main)
        if target is not None and not isinstance(target, str):
            key = settings.api_key if target.api_key_env is None else env.get(target.api_key_env)
            if key is None and (variable := target.api_key_env) is not None:
                where, hint = (
                    f"requests.steps.{one.name}.target.api_key_env",
                    f"export {variable}=...",
                )
                faults.append(
                    UserError("unset_variable", f"{variable} is not set", where, hint, key=variable)
                )
            those = [Endpoint(url=target.url, api_key=key)]
        if one.own:
            api = APIS.get(one.step.kind)
            several = len(those) > 1
            those = [
                replace(
                    base,
                    api=api,
                    model=one.step.model,
                    serves=one.label,
                    name=f"{one.label} {base.name or number}"
                    if several and base.name != one.label
                    else one.label,
                )
                for number, base in enumerate(those, 1)
            ]
        places[one.of_class, one.name] = add(those)
    if faults:
        raise CombinedError(faults)
    return replace(settings, url=endpoints[0].url, targets=tuple(endpoints), step_targets=places)


def serving(settings: Settings, prompts: Prompts) -> Callable[[int], Sequence[int]] | None:
    """Number of a request -> the endpoints that may serve it; None where each serves all."""
    places = settings.step_targets
    if not places:
        return None
    rest = places.get(("", ""), ())
    return lambda number: places.get(class_and_step(prompts, number), rest)


def _steps(workload: Workload) -> Iterator[_Step]:
    for of_class, part in requests_by_class(workload.requests).items():
        if isinstance(part, Task):
            for name, step in part.steps.items():
                yield _Step(of_class, name, step)


def _faults(
    steps: Sequence[_Step],
    wanted: set[str],
    given: Mapping[str, Sequence[Endpoint]],
    main: Sequence[Endpoint],
) -> Iterator[LoadgenError]:
    for name in given.keys() - wanted:
        hint = (
            did_you_mean(name, sorted(wanted))
            if wanted
            else "leave out the name: --url http://host:8000"
        )
        yield UserError(
            "unknown_name",
            f'no step of this workload asks a target "{name}"',
            f"--url {name}=",
            hint,
        )
    for name in sorted(wanted - given.keys()) if given and not given.keys() - wanted else ():
        step = next(one.name for one in steps if one.step.target == name)
        what = f'step "{step}" asks the target "{name}", which is not given'
        yield UserError("missing_option", what, "--url", f"--url {name}=http://...")
    lacking = [one.name for one in steps if one.step.target is None]
    if given and not main and lacking:
        hint = "--url http://host:8000, without a name"
        yield UserError(
            "missing_option",
            f'step "{lacking[0]}" names no target, and none is given for the rest',
            "--url",
            hint,
        )
