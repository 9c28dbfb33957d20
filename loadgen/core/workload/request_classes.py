"""Several classes of requests in one run, as a workload file describes them.

The comments at the fields are the descriptions of the keys in docs/reference/workload-file.md.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    PlainValidator,
    Strict,
    Tag,
    WithJsonSchema,
    field_validator,
)

from loadgen.core import units
from loadgen.core.slo import Slo
from loadgen.core.workload.file_models import Part
from loadgen.core.workload.request_kinds import FromFile, FromTrace, Synthetic
from loadgen.core.workload.slo_fields import SloField
from loadgen.core.workload.tasks import Task
from loadgen.core.workload.trajectories import Trajectories

MAX_CLASSES = 100
ROUNDING_TOLERANCE = 1e-9
"""Percentages add up to 100 % if they differ from it by less than rounding errors."""
MODEL_OF_KEY = {
    "classes": "Mix",
    "trace": "FromTrace",
    "trajectories": "Trajectories",
    "steps": "Task",
}
"""The model of requests that are written with a key which no other requests have."""
TENANT_HEADERS = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")
"""The headers that tell a gateway the tenant, so that it can share capacity among tenants.

The first is that of the Gateway API inference extension, the second that of llm-d from 0.8 on.
"""
CLIENT_HEADERS = {  # that the client writes itself
    "host",
    "content-length",
    "transfer-encoding",
    "content-type",
    "accept",
    "connection",
    "x-request-id",
}
SECRET_HEADERS = {"authorization", "proxy-authorization", "cookie", "api-key", "x-api-key"}


def _check_header_name(name: str) -> str:
    """Return the name of a header.

    Raises `InvalidValueError` for headers that hold secrets and for those that the client writes
    itself.
    """
    if name.lower() in SECRET_HEADERS:
        problem = "is a secret, and the workload is stored with its results"
        raise units.InvalidValueError("unsupported", problem, "--api-key-file")
    if name.lower() in CLIENT_HEADERS:
        raise units.InvalidValueError("unsupported", "is set by the client", "leave it out")
    return name


HeaderName = Annotated[
    str,
    Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}$"),
    AfterValidator(_check_header_name),
]
HeaderText = Annotated[str, Field(pattern=r"^[!-~](?:[ -~]{0,500}[!-~])?$")]


def select_request_model(value: object) -> str:
    """Return the name of the model that the requests of a workload are validated with.

    pydantic calls it as the discriminator of the union of all kinds of requests.

    Requests that were built in Python are an instance of the model. Those of a file are a mapping,
    whose keys decide. A mapping without a characteristic key is read as `Synthetic`, so that the
    error messages for it name the keys of generated prompts.
    """
    if isinstance(value, Part):
        return type(value).__name__

    keys = set(value) if isinstance(value, dict) else set()
    for key, model_name in MODEL_OF_KEY.items():
        if key in keys:
            return model_name
    if keys & {"from", "order", *FromFile.synonyms}:
        return "FromFile"

    return "Synthetic"


RequestsOfOneKind = (
    Annotated[Synthetic, Tag("Synthetic")]
    | Annotated[FromFile, Tag("FromFile")]
    | Annotated[FromTrace, Tag("FromTrace")]
    | Annotated[Trajectories, Tag("Trajectories")]
    | Annotated[Task, Tag("Task")]
)


def _validate_weight(value: Any) -> float | str:
    """Return the weight of a class: a number such as 6.0, or a percentage as text, such as "60%".

    A percentage stays a text, which distinguishes it from a relative number. It is converted when
    the weights of all classes are known. Raises `InvalidValueError` if the value is neither.
    """
    if isinstance(value, str):
        units.share(value)  # Raises InvalidValueError if the text is no percentage.
        return value

    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        hint = "use a number above zero, or a percentage: weight: 60%"
        raise units.InvalidValueError("invalid_value", "is not a weight", hint)

    return float(value)


Weight = Annotated[
    float | str,
    PlainValidator(_validate_weight),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": units.SHARE_PATTERN},
            ]
        }
    ),
]


class RequestClass(Part):
    """One class of what a run sends: requests, conversations or tasks, and their SLO."""

    # The share of all starts that belong to this class. The weights are percentages that add up to
    # 100, or relative numbers such as `6`.
    weight: Weight
    # The requests of the class: generated prompts, conversations, tasks, a file or a trace.
    requests: Annotated[RequestsOfOneKind, Discriminator(select_request_model)]
    # The SLO of the class. By default it is that of the workload.
    slo: SloField = None

    @field_validator("slo")
    @classmethod
    def _refuse_answers(cls, slo: Slo | None) -> Slo | None:
        """Refuse an objective on checked answers, which is judged for the whole load only."""
        if slo is not None and slo.answers_share is not None:
            problem = "has the objective answers, which only the SLO of the workload may have"
            raise units.InvalidValueError("unsupported", problem, "move it to the slo of the file")
        return slo

    @field_validator("requests")
    @classmethod
    def _refuse_sessions_of_a_trace(cls, requests: RequestsOfOneKind) -> RequestsOfOneKind:
        """Refuse a class that replays the sessions of a trace."""
        if isinstance(requests, FromTrace) and requests.replay == "sessions":
            problem = (
                "replays the sessions of a trace as one of several classes, which is not supported"
            )
            raise units.InvalidValueError("unsupported", problem, "replay: instants")
        return requests

    @field_validator("requests")
    @classmethod
    def _refuse_sessions_from_the_middle(cls, requests: RequestsOfOneKind) -> RequestsOfOneKind:
        """Refuse a class of sessions for which the cache of the server would have to be filled."""
        if isinstance(requests, Trajectories) and requests.start == "middle":
            problem = "begins sessions in the middle as one of several classes"
            raise units.InvalidValueError("unsupported", problem, "start: beginning")
        return requests

    # The model, or a LoRA adapter under the name that the server gives it. By default it is the
    # model of the target.
    model: Annotated[str, Field(min_length=1)] | None = None
    # The field `priority` of the request. vLLM serves lower numbers first.
    priority: Annotated[int, Strict()] | None = None
    # The tenant, for gateways that share capacity among tenants. It is sent in the headers
    # `x-gateway-inference-fairness-id` and, for llm-d from 0.8 on, `x-llm-d-inference-fairness-id`.
    tenant: HeaderText | None = None
    # Further headers, such as `{x-gateway-inference-objective: premium}`. API keys are refused,
    # because the workload is stored with the results.
    headers: dict[HeaderName, HeaderText] = Field(default_factory=dict)

    def sent_headers(self) -> dict[str, str]:
        """Return the headers of the requests by their names in lower case.

        A header of the file takes precedence over the one that names the tenant.
        """
        headers: dict[str, str] = {}
        if self.tenant is not None:
            headers.update(dict.fromkeys(TENANT_HEADERS, self.tenant))
        headers.update({name.lower(): value for name, value in self.headers.items()})
        return headers


class Mix(Part):
    """Several classes in one run.

    The class of the n-th start (of a request, a conversation or a task) is a pure function of the
    seed and n.
    """

    classes: Annotated[
        dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")], RequestClass],
        Field(min_length=1, max_length=MAX_CLASSES),
    ]

    @field_validator("classes")
    @classmethod
    def _convert_weights_to_shares(
        cls, classes: dict[str, RequestClass]
    ) -> dict[str, RequestClass]:
        """Return the classes with weights that add up to 1.

        The weight of a class is then its share of all requests, conversations and tasks.
        """
        weights = [request_class.weight for request_class in classes.values()]
        shares = _convert_to_shares(weights)
        return {
            name: request_class.model_copy(update={"weight": share})
            for (name, request_class), share in zip(classes.items(), shares, strict=True)
        }


def _convert_to_shares(weights: list[float | str]) -> list[float]:
    """Convert the weights of request classes to shares, which add up to 1.

    The share of a class says how many of all sessions (requests, conversations and tasks) belong to
    it. The weights 3 and 1 give the shares 0.75 and 0.25, and so do "75%" and "25%".

    Args:
        weights: Numbers above zero, or percentages such as "60%".

    Raises:
        InvalidValueError: Some weights are numbers and some percentages, or the percentages do not
            add up to 100 %.
    """
    percentages = [units.share(weight) for weight in weights if isinstance(weight, str)]
    if percentages and len(percentages) < len(weights):
        hint = "use weight: 60% in each class, or weight: 6 in each"
        raise units.InvalidValueError("conflict", "mix percentages and relative weights", hint)

    if percentages:
        _check_sum_of_percentages(percentages)

    numbers = percentages if percentages else [float(weight) for weight in weights]

    # Percentages are divided, too, because their sum may differ from 1 by a rounding error.
    total = math.fsum(numbers)
    return [number / total for number in numbers]


def _check_sum_of_percentages(fractions: list[float]) -> None:
    """Raise InvalidValueError unless percentages, as fractions such as 0.6, add up to 1."""
    total = math.fsum(fractions)
    if abs(total - 1) > ROUNDING_TOLERANCE:
        problem = f"have weights that add up to {total * 100:g} %, not 100 %"
        hint = "or use relative weights without %: weight: 6"
        raise units.InvalidValueError("out_of_range", problem, hint)


Requests = Synthetic | FromFile | FromTrace | Trajectories | Task | Mix
"""The requests of a workload: one of the kinds, or a mix of classes of these kinds."""


def requests_by_class(requests: Any) -> dict[str, Any]:
    """Return the requests of each class by the name of the class.

    Without classes, all requests have the name "".
    """
    if isinstance(requests, Mix):
        return {name: request_class.requests for name, request_class in requests.classes.items()}
    return {"": requests}


def list_question_classes(requests: Any) -> list[str]:
    """Return the names of the classes whose responses are checked (`check_answers`).

    Without classes, all requests have the name "".
    """
    return [
        name
        for name, requests_of_class in requests_by_class(requests).items()
        if isinstance(requests_of_class, FromFile) and requests_of_class.check_answers
    ]
