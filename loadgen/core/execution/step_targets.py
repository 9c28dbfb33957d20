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
from loadgen.core.workload.tasks import StepTarget, TaskStep

StepKey = tuple[str, str]
"""The class and the name of a step."""

_API_BY_STEP_KIND: dict[str, Api] = {"embed": "embeddings", "rerank": "rerank"}
_OTHER_REQUESTS: StepKey = ("", "")  # the key of all requests that belong to no step


class _WorkloadStep(NamedTuple):
    """A step of the tasks of a request class, as the workload defines it.

    Attributes:
        class_name: The class of the tasks.
        name: The name of the step.
        definition: What the workload says about the step.
    """

    class_name: str
    name: str
    definition: TaskStep

    @property
    def key(self) -> StepKey:
        return self.class_name, self.name

    @property
    def target(self) -> str | StepTarget | None:
        """Return the name of its target, or the URL in the workload, or None for any target."""
        return self.definition.target

    @property
    def differs_from_run(self) -> bool:
        """Return True if the step has an API, a target or a model of its own."""
        has_own_api = self.definition.kind != "chat"
        return has_own_api or self.target is not None or self.definition.model is not None

    @property
    def target_name(self) -> str:
        """Return the name of its target, or its own name if the workload gives a URL or nothing."""
        return self.target if isinstance(self.target, str) else self.name


class _SpecifiedEndpoints(NamedTuple):
    """The endpoints that the user specified.

    Attributes:
        by_name: Endpoints that serve only the steps which request them by this name.
        unnamed: Endpoints for everything else.
    """

    by_name: Mapping[str, Sequence[Endpoint]]
    unnamed: Sequence[Endpoint]


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
    """Return settings in which the endpoints of each step of tasks are decided.

    A task is a sequence of requests, its steps, such as an embedding and then a completion. The
    result lists all endpoints in `targets`, and `step_targets` has the indexes of those that serve
    a step: `{("agent", "embed"): (0,), ("agent", "answer"): (1, 2)}`. If no step has a target, an
    API or a model of its own, the settings are returned unchanged.

    Args:
        workload: The workload, whose tasks have the steps.
        settings: The settings, with the endpoints that the user specified.
        env: Environment variables, of which some have API keys.

    Raises:
        CombinedError: Endpoints or API keys are missing, or no step requests an endpoint.
    """
    steps = list(_iterate_steps(workload))
    specified = _separate_endpoints(steps, settings)
    errors = [*_name_errors(steps, specified), *_missing_key_errors(steps, env)]
    if errors:
        raise CombinedError(errors)
    if not any(step.differs_from_run for step in steps):
        return settings

    step_targets = _StepTargets()

    # Requests that do not belong to a step use the endpoints without a name. These endpoints are
    # added first, so that the first endpoint of the run is one of them.
    if _has_other_requests(workload, steps):
        step_targets.add(_OTHER_REQUESTS, specified.unnamed)

    for step in steps:
        step_targets.add(step.key, _endpoints_of_step(step, specified, settings, env))

    # `url` is the target of a run with a single endpoint. With several, it is the first of them.
    return replace(
        settings,
        url=step_targets.endpoints[0].url,
        targets=tuple(step_targets.endpoints),
        step_targets=step_targets.indexes_by_step,
    )


def targets_by_request(
    settings: Settings, prompts: Prompts
) -> Callable[[int], Sequence[int]] | None:
    """Return a function that selects the targets which can serve a request.

    The function takes the id of a request and returns the indexes of these targets in
    `settings.endpoints`. They depend on the step that the request belongs to: a task is a sequence
    of steps, such as an embedding and a completion. Return None if each target can serve all
    requests.
    """
    indexes_by_step = settings.step_targets
    if not indexes_by_step:
        return None

    indexes_of_other_requests = indexes_by_step.get(_OTHER_REQUESTS, ())

    def find_target_indexes(request_id: int) -> Sequence[int]:
        step_key = class_and_step(prompts, request_id)
        return indexes_by_step.get(step_key, indexes_of_other_requests)

    return find_target_indexes


def _iterate_steps(workload: Workload) -> Iterator[_WorkloadStep]:
    """Yield the steps of all tasks of a workload."""
    for class_name, requests in requests_by_class(workload.requests).items():
        if isinstance(requests, Task):
            for name, definition in requests.steps.items():
                yield _WorkloadStep(class_name, name, definition)


def _separate_endpoints(steps: Sequence[_WorkloadStep], settings: Settings) -> _SpecifiedEndpoints:
    """Separate the endpoints that serve only certain steps of tasks from those for everything else.

    A step may request a target by a name, and an endpoint can have a name for that:

    - `--url NAME=URL`: the endpoint serves only the steps that request NAME.
    - a file of `--targets`: the name of an endpoint may be meant for reports only. The endpoint
      serves only certain steps if at least one step requests its name.
    """
    requested_names = _requested_names(steps)
    by_name: dict[str, list[Endpoint]] = {}

    unnamed: list[Endpoint] = []
    for endpoint in settings.endpoints:
        step_target_name = endpoint.serves  # from `--url NAME=URL`, or ""
        if not step_target_name and endpoint.name in requested_names:
            step_target_name = endpoint.name  # from the file of `--targets`
        if step_target_name:
            by_name.setdefault(step_target_name, []).append(endpoint)
        else:
            unnamed.append(endpoint)

    return _SpecifiedEndpoints(by_name, unnamed)


def _requested_names(steps: Sequence[_WorkloadStep]) -> set[str]:
    """Return the names of targets that steps request."""
    return {step.target for step in steps if isinstance(step.target, str)}


def _has_other_requests(workload: Workload, steps: Sequence[_WorkloadStep]) -> bool:
    """Return True if some requests of a workload have no target, API or model of their own."""
    requests_of_classes = requests_by_class(workload.requests).values()
    has_only_tasks = all(isinstance(requests, Task) for requests in requests_of_classes)
    return not has_only_tasks or not all(step.differs_from_run for step in steps)


def _endpoints_of_step(
    step: _WorkloadStep,
    specified: _SpecifiedEndpoints,
    settings: Settings,
    env: Mapping[str, str],
) -> list[Endpoint]:
    """Return the endpoints that serve a step of a task, with the API and the model of the step.

    The workload may define a target, an API or a model for a step. Then the step gets copies of
    endpoints which have this API and model and serve only this step (their field `serves`). A step
    for which the workload defines none of these shares the endpoints of the run.

    Args:
        step: The step, as the workload defines it.
        specified: The endpoints that the user specified.
        settings: The settings of the run.
        env: Environment variables with API keys.
    """
    endpoints = _base_endpoints_of_step(step, specified, settings, env)
    if not step.differs_from_run:
        return list(endpoints)

    # None stands for the API of the run.
    api_of_step = _API_BY_STEP_KIND.get(step.definition.kind)
    return [
        replace(
            endpoint,
            api=api_of_step,
            model=step.definition.model,
            serves=step.target_name,
            name=_endpoint_name(step, endpoint, number, endpoint_count=len(endpoints)),
        )
        for number, endpoint in enumerate(endpoints, start=1)
    ]


def _base_endpoints_of_step(
    step: _WorkloadStep,
    specified: _SpecifiedEndpoints,
    settings: Settings,
    env: Mapping[str, str],
) -> Sequence[Endpoint]:
    """Return the endpoints to which the requests of a step are sent.

    The workload states the target of a step in one of three ways:

    - nothing (None): every endpoint without a name serves the step,
    - a name, such as "embedder": the endpoints that the user specified with this name serve it. If
      the user named none, the endpoints without a name do.
    - a `StepTarget`: the step has a URL, and perhaps an environment variable with its API key.

    The caller adds the API and the model of the step to the endpoints.
    """
    target = step.target
    if target is None:
        return specified.unnamed

    if isinstance(target, str):
        has_endpoints_of_name = target in specified.by_name
        return specified.by_name[target] if has_endpoints_of_name else specified.unnamed

    api_key = settings.api_key if target.api_key_env is None else env[target.api_key_env]
    return [Endpoint(url=target.url, api_key=api_key)]


def _endpoint_name(
    step: _WorkloadStep, endpoint: Endpoint, number: int, endpoint_count: int
) -> str:
    """Return the name of an endpoint of a step, numbered if there are several without a name."""
    if endpoint_count == 1 or endpoint.name == step.target_name:
        return step.target_name
    return f"{step.target_name} {endpoint.name or number}"


def _missing_key_errors(
    steps: Sequence[_WorkloadStep], env: Mapping[str, str]
) -> Iterator[UserError]:
    """Yield an error for each environment variable with an API key that is not set.

    Only a target that the workload gives as a URL may name such a variable. A target that is a name
    has the key that the user gives with its endpoint.
    """
    for step in steps:
        target = step.target
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
    steps: Sequence[_WorkloadStep], specified: _SpecifiedEndpoints
) -> Iterator[LoadgenError]:
    """Yield the errors in the names of endpoints that the user specified, if there are any names.

    With names, every step must find an endpoint: one with the name of its target, or an unnamed one
    for a step without a target. And every name must be requested by a step.
    """
    requested_names = _requested_names(steps)
    specified_names = specified.by_name.keys()
    if not specified_names:
        return

    unknown_names = specified_names - requested_names
    if unknown_names:
        # A misspelled name is reported once, and not also as a missing one.
        yield from _unknown_name_errors(unknown_names, requested_names)
    else:
        yield from _missing_name_errors(steps, requested_names - specified_names)

    if not specified.unnamed:
        yield from _missing_unnamed_errors(steps)


def _missing_unnamed_errors(steps: Sequence[_WorkloadStep]) -> Iterator[UserError]:
    """Yield an error if a step names no target, because it needs an endpoint without a name.

    This is called only if every endpoint has a name. The error quotes the first such step.
    """
    steps_without_target = [step.name for step in steps if step.target is None]
    if steps_without_target:
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
    steps: Sequence[_WorkloadStep], missing_names: Iterable[str]
) -> Iterator[UserError]:
    """Yield an error for each target that a step requests by name and the user did not specify.

    Args:
        steps: The steps.
        missing_names: The names, each of which is requested by a step.
    """
    for name in sorted(missing_names):
        requesting_steps = [step.name for step in steps if step.target == name]
        yield UserError(
            "missing_option",
            message=f'step "{requesting_steps[0]}" uses the target "{name}", which is not given',
            where="--url",
            hint=f"--url {name}=http://...",
        )
