"""Decide which endpoints serve which steps of the tasks of a workload.

Endpoints are given by `--url NAME=URL`, by `--targets`, or by the workload itself. The only input
besides these are environment variables with API keys that a workload names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from loadgen_sdk.wire_formats.server_profiles import Api
from msgspec.structs import replace

from loadgen.core.errors import CombinedError, LoadgenError, UserError, did_you_mean
from loadgen.core.execution.plan import Endpoint, Settings
from loadgen.core.requests.mix import class_and_step
from loadgen.core.requests.prompts import Prompts
from loadgen.core.workload import Task, Workload, requests_by_class
from loadgen.core.workload.tasks import TaskStep

StepKey = tuple[str, str]
"""The class and the name of a step."""

_API_BY_STEP_KIND: dict[str, Api] = {"embed": "embeddings", "rerank": "rerank"}
_OTHER_STEPS: StepKey = ("", "")  # the key of everything that is not a step of its own


class _Step(NamedTuple):
    """A step of the tasks of a request class."""

    class_name: str
    name: str
    step: TaskStep

    @property
    def key(self) -> StepKey:
        return self.class_name, self.name

    @property
    def differs_from_run(self) -> bool:
        """Return True if the step has an API, a target or a model of its own."""
        return (
            self.step.kind != "chat" or self.step.target is not None or self.step.model is not None
        )

    @property
    def target_name(self) -> str:
        """Return the name of its target, or its own name if the workload gives a URL or nothing."""
        return self.step.target if isinstance(self.step.target, str) else self.name


class _UserEndpoints(NamedTuple):
    """The endpoints that the user gave."""

    by_name: Mapping[str, Sequence[Endpoint]]
    """Endpoints whose names steps request."""
    unnamed: Sequence[Endpoint]
    """Endpoints for everything else."""


class _StepTargets:
    """Collects the endpoints of a run and which of them serve which steps."""

    def __init__(self) -> None:
        self.endpoints: list[Endpoint] = []
        self.indexes_by_step: dict[StepKey, tuple[int, ...]] = {}

    def add(self, key: StepKey, endpoints: Sequence[Endpoint]) -> None:
        """Let endpoints serve a step. An endpoint that serves several steps is added once."""
        for endpoint in endpoints:
            if endpoint not in self.endpoints:
                self.endpoints.append(endpoint)
        self.indexes_by_step[key] = tuple(self.endpoints.index(endpoint) for endpoint in endpoints)


def resolve_step_targets(
    workload: Workload, settings: Settings, env: Mapping[str, str] = os.environ
) -> Settings:
    """Return settings with an endpoint for each combination of target, API and model of steps.

    The steps of a task may go to different targets. The user gives all targets that steps request
    by name, or none. If none is given, one endpoint serves everything. If no step has a target, an
    API or a model of its own, the settings are returned unchanged.

    Args:
        workload: The workload, whose tasks have the steps.
        settings: The settings, with the endpoints that the user gives.
        env: Environment variables, of which some have API keys.

    Raises:
        CombinedError: Targets or API keys are missing, or no step requests a target.
    """
    steps = list(_steps(workload))
    endpoints_of_user = _separate_endpoints(steps, settings)
    errors = list(_name_errors(steps, endpoints_of_user))
    errors += _missing_key_errors(steps, env)
    if errors:
        raise CombinedError(errors)
    if not any(step.differs_from_run for step in steps):
        return settings
    targets = _StepTargets()
    if _has_other_requests(workload, steps):
        targets.add(_OTHER_STEPS, endpoints_of_user.unnamed)
    for step in steps:
        endpoints = _endpoints_of_step(step, endpoints_of_user, settings, env)
        targets.add(step.key, endpoints)
    return replace(
        settings,
        url=targets.endpoints[0].url,
        targets=tuple(targets.endpoints),
        step_targets=targets.indexes_by_step,
    )


def targets_by_request(
    settings: Settings, prompts: Prompts
) -> Callable[[int], Sequence[int]] | None:
    """Return a function from the id of a request to the indexes of the endpoints that serve it.

    Return None if each endpoint serves all requests.
    """
    indexes_by_step = settings.step_targets
    if not indexes_by_step:
        return None
    other_indexes = indexes_by_step.get(_OTHER_STEPS, ())
    return lambda request_id: indexes_by_step.get(
        class_and_step(prompts, request_id), other_indexes
    )


def _steps(workload: Workload) -> Iterator[_Step]:
    """Yield the steps of all tasks of a workload."""
    for class_name, requests in requests_by_class(workload.requests).items():
        if isinstance(requests, Task):
            for name, step in requests.steps.items():
                yield _Step(class_name, name, step)


def _separate_endpoints(steps: Sequence[_Step], settings: Settings) -> _UserEndpoints:
    """Separate the endpoints that steps request by name from those for everything else.

    An endpoint of `--url NAME=URL` is always one of the first kind, so that a name which no step
    requests is reported. An endpoint of `--targets` has a name anyway.
    """
    requested_names = _requested_names(steps)
    by_name: dict[str, list[Endpoint]] = {}
    unnamed: list[Endpoint] = []
    for endpoint in settings.endpoints:
        name = endpoint.serves or endpoint.name
        if endpoint.serves or name in requested_names:
            by_name.setdefault(name, []).append(endpoint)
        else:
            unnamed.append(endpoint)
    return _UserEndpoints(by_name, unnamed)


def _requested_names(steps: Sequence[_Step]) -> set[str]:
    """Return the names of targets that steps request."""
    return {step.step.target for step in steps if isinstance(step.step.target, str)}


def _has_other_requests(workload: Workload, steps: Sequence[_Step]) -> bool:
    """Return True if some requests of a workload have no target, API or model of their own."""
    requests_of_classes = requests_by_class(workload.requests).values()
    has_only_tasks = all(isinstance(requests, Task) for requests in requests_of_classes)
    return not has_only_tasks or not all(step.differs_from_run for step in steps)


def _endpoints_of_step(
    step: _Step, endpoints_of_user: _UserEndpoints, settings: Settings, env: Mapping[str, str]
) -> list[Endpoint]:
    """Return the endpoints that serve a step, with the API and the model of the step.

    The target of a step is a name that the user gives endpoints for, or a URL in the workload. A
    step without a target is served by the unnamed endpoints.
    """
    target = step.step.target
    endpoints: Sequence[Endpoint] = endpoints_of_user.unnamed
    if isinstance(target, str):
        endpoints = endpoints_of_user.by_name.get(step.target_name, endpoints_of_user.unnamed)
    elif target is not None:
        api_key = settings.api_key
        if target.api_key_env is not None:
            api_key = env[target.api_key_env]
        endpoints = [Endpoint(url=target.url, api_key=api_key)]
    if not step.differs_from_run:
        return list(endpoints)
    return [
        replace(
            endpoint,
            api=_API_BY_STEP_KIND.get(step.step.kind),
            model=step.step.model,
            serves=step.target_name,
            name=_endpoint_name(step, endpoint, number, len(endpoints)),
        )
        for number, endpoint in enumerate(endpoints, 1)
    ]


def _endpoint_name(step: _Step, endpoint: Endpoint, number: int, endpoint_count: int) -> str:
    """Return the name of an endpoint of a step, numbered if there are several without a name."""
    if endpoint_count == 1 or endpoint.name == step.target_name:
        return step.target_name
    return f"{step.target_name} {endpoint.name or number}"


def _missing_key_errors(steps: Sequence[_Step], env: Mapping[str, str]) -> Iterator[UserError]:
    """Yield an error for each environment variable with an API key that is not set."""
    for step in steps:
        target = step.step.target
        if target is None or isinstance(target, str) or target.api_key_env is None:
            continue
        variable = target.api_key_env
        if variable not in env:
            yield UserError(
                "unset_variable",
                message=f"{variable} is not set",
                where=f"requests.steps.{step.name}.target.api_key_env",
                hint=f"export {variable}=...",
                key=variable,
            )


def _name_errors(
    steps: Sequence[_Step], endpoints_of_user: _UserEndpoints
) -> Iterator[LoadgenError]:
    """Yield an error for each target that no step requests, and for each that is missing.

    Nothing is missing if the user names no target at all: then one endpoint serves every step.
    """
    requested_names = _requested_names(steps)
    unknown_names = endpoints_of_user.by_name.keys() - requested_names
    yield from _unknown_name_errors(unknown_names, requested_names)
    if not endpoints_of_user.by_name:
        return
    # A name with a typing error is reported once, not also as a missing target.
    if not unknown_names:
        missing_names = requested_names - endpoints_of_user.by_name.keys()
        yield from _missing_name_errors(steps, missing_names)
    steps_without_target = [step.name for step in steps if step.step.target is None]
    if not endpoints_of_user.unnamed and steps_without_target:
        yield UserError(
            "missing_option",
            message=(
                f'step "{steps_without_target[0]}" names no target, and there is no '
                "target without a name for it"
            ),
            where="--url",
            hint="add --url http://host:8000, without a name",
        )


def _unknown_name_errors(
    unknown_names: Iterable[str], requested_names: Collection[str]
) -> Iterator[UserError]:
    """Yield an error for each name of a target that the user gives and no step requests."""
    for name in unknown_names:
        hint = "leave out the name: --url http://host:8000"
        if requested_names:
            hint = did_you_mean(name, sorted(requested_names))
        yield UserError(
            "unknown_name",
            message=f'no step of this workload uses the target "{name}"',
            where=f"--url {name}=",
            hint=hint,
        )


def _missing_name_errors(
    steps: Sequence[_Step], missing_names: Iterable[str]
) -> Iterator[UserError]:
    """Yield an error for each name of a target that a step requests and the user does not give."""
    for name in sorted(missing_names):
        step_name = next(step.name for step in steps if step.step.target == name)
        yield UserError(
            "missing_option",
            message=f'step "{step_name}" uses the target "{name}", which is not given',
            where="--url",
            hint=f"--url {name}=http://...",
        )
