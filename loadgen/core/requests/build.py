"""Build the requests of a workload, whatever kind of requests it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, assert_never

from loadgen_sdk.wire_formats.server_profiles import NON_GENERATIVE_APIS

from loadgen.core import seeds
from loadgen.core.errors import UserError
from loadgen.core.requests.file_prompts import FilePrompts
from loadgen.core.requests.mix import MixPrompts
from loadgen.core.requests.prompts import ANY_TARGET, Prompts, PromptTarget
from loadgen.core.requests.synthetic_prompts import SyntheticPrompts
from loadgen.core.requests.task_prompts import TaskPrompts
from loadgen.core.requests.tokenizer import Tokenizer

if TYPE_CHECKING:
    from loadgen.core.workload.request_classes import Mix, Requests
    from loadgen.core.workload.request_kinds import FromTrace
    from loadgen.core.workload.trace import Trace
    from loadgen.core.workload.trace_sessions import TraceSessions

APIS_WITH_IMAGES = ("chat", "responses", "messages")


RequestsKind = Literal["mix", "trace", "trajectories", "file", "task", "synthetic"]
"""The kinds of requests that a workload may have."""

DISTINCTIVE_FIELDS: dict[RequestsKind, str] = {
    "mix": "classes",
    "trace": "trace",
    "trajectories": "trajectories",
    "file": "path",
    "task": "steps",
}
"""For each kind of requests but "synthetic", a field that requests of no other kind have."""


class HasRequests(Protocol):
    """A workload, or one class of a mix."""

    @property
    def requests(self) -> Any:
        """The requests as the workload describes them."""


def build_prompts(
    workload: HasRequests,
    seed: int,
    salt: int,
    tokenizer: Tokenizer,
    target: PromptTarget = ANY_TARGET,
) -> Prompts:
    """Return an object that builds the requests of a workload, of the class for their kind.

    Args:
        workload: The workload, or one class of a mix. Only its `requests` are used.
        seed: Decides lengths and choices.
        salt: A number that decides the texts, together with the seed. Another salt gives texts that
            no cache of the server knows.
        tokenizer: Counts tokens and supplies words.
        target: What is known of the target that the requests are sent to.

    Raises:
        UserError: The API cannot serve such requests, or a file of the workload cannot be read.
    """
    requests = workload.requests
    kind = _kind_of(requests)
    _check_api_serves(requests, kind, target.api)

    match kind:
        case "mix":
            return _build_mix(requests, seed, salt, tokenizer, target)
        case "trace" | "trajectories":
            return _build_recorded_prompts(workload, kind, seed, salt, tokenizer, target)
        case "file" if requests.check_answers:
            # Workers without known answers do not need this module.
            from loadgen.core.requests.question_prompts import QuestionPrompts

            return QuestionPrompts(requests, seed, tokenizer, target.api)
        case "file":
            return FilePrompts(requests, seed, tokenizer, target.api)
        case "task":
            return TaskPrompts(requests, seed, salt, tokenizer, target)
        case "synthetic":
            return SyntheticPrompts(requests, seed, salt, tokenizer, target)
        case _:
            assert_never(kind)


def _build_recorded_prompts(
    workload: HasRequests,
    kind: Literal["trace", "trajectories"],
    seed: int,
    salt: int,
    tokenizer: Tokenizer,
    target: PromptTarget,
) -> Prompts:
    """Return the requests of a trace or of recorded sessions. `build_prompts` has the arguments.

    Workers without a recording do not need these modules, so they are imported here.
    """
    requests = workload.requests
    if kind == "trace":
        from loadgen.core.requests.trace_prompts import TracePrompts

        return TracePrompts(_read_trace(requests), seed, salt, tokenizer, target)

    from loadgen.core.requests.trajectory_prompts import TrajectoryPrompts
    from loadgen.core.workload.cache_fill import count_cache_fills

    return TrajectoryPrompts(requests, seed, salt, tokenizer, count_cache_fills(workload))


def _kind_of(requests: Requests) -> RequestsKind:
    """Return the kind of the requests of a workload.

    `isinstance` would need the classes of requests, which are models of pydantic. Importing them
    takes long, and workers need them for nothing else. So a kind is recognized by a field that only
    its class has.
    """
    for kind, field in DISTINCTIVE_FIELDS.items():
        if hasattr(requests, field):
            return kind

    return "synthetic"


def _check_api_serves(requests: Any, kind: RequestsKind, api: str) -> None:
    """Raise UserError if an API cannot serve requests of a workload.

    The classes of a mix are checked one by one when their requests are built.
    """
    if kind == "mix":
        return
    _check_api_returns_text(requests, kind, api)
    if kind in ("trace", "synthetic"):
        _check_documents(requests, api)
    if kind == "synthetic":
        _check_images(requests, api)


def _build_mix(
    requests: Mix, seed: int, salt: int, tokenizer: Tokenizer, target: PromptTarget
) -> MixPrompts:
    """Return the requests of a mix of classes. The texts of each class have another salt."""
    class_prompts = [
        build_prompts(
            request_class, seed, seeds.derive_seed(salt, "class", index), tokenizer, target
        )
        for index, request_class in enumerate(requests.classes.values())
    ]
    return MixPrompts(requests.classes, seed, class_prompts)


def _read_trace(requests: FromTrace) -> Trace | TraceSessions:
    """Return the trace that requests replay, or its sessions if they are replayed as such."""
    # Workers without a trace do not need these modules.
    from loadgen.core.workload import trace_sessions, traces

    trace = traces.read_replayed_trace(requests)
    if requests.replay == "sessions":
        return trace_sessions.build_sessions(trace)
    return trace


def _check_api_returns_text(requests: Any, kind: RequestsKind, api: str) -> None:
    """Raise UserError if requests continue earlier responses, but the API does not return text.

    Tasks and conversations do so: a later request contains the responses to earlier ones. The
    responses to embeddings and rankings are numbers, which no message can contain.
    """
    returns_text = api not in NON_GENERATIVE_APIS
    is_task = kind == "task"
    is_conversation = kind == "synthetic" and requests.turns is not None
    continues_responses = is_task or is_conversation or kind == "trajectories"
    if returns_text or not continues_responses:
        return

    problem = f"a response of the {api} API is not text, so no later request can continue it"
    hint = _hint_without_conversations(kind)
    raise UserError("unsupported", problem, f"--api {api}", hint)


def _hint_without_conversations(kind: RequestsKind) -> str:
    """Return what to do if an API cannot serve requests that continue earlier responses."""
    if kind == "task":
        return "use kind: embed or kind: rerank in a step of a task"
    if kind == "trajectories":
        return "use --api chat, responses or messages"
    return "leave out turns"


def _check_documents(requests: object, api: str) -> None:
    """Raise UserError if a ranking has no documents, as with requests of a trace."""
    if api == "rerank" and getattr(requests, "chunks", None) is None:
        hint = (
            "add chunks: {count: 20, tokens: 300} to requests, or use rows of a file "
            "with extra_body: {documents: [...]}"
        )
        raise UserError("missing_key", "the requests have no documents to rerank", "requests", hint)


def _check_images(requests: Any, api: str) -> None:
    """Raise UserError if requests have images that the API does not accept."""
    if requests.images is not None and api not in APIS_WITH_IMAGES:
        problem = f"images cannot be sent to the {api} API"
        hint = "use --api chat, responses or messages"
        raise UserError("unsupported", problem, "requests.images", hint)
