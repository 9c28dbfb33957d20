"""Add questions with known answers to the requests of a workload, as a request class of their own.

The questions are a part of the measured load: they are drawn, scheduled and recorded like all other
requests. `--check-answers` names their file, and `--check-share` their share of all requests.
"""

from __future__ import annotations

from pathlib import Path

from loadgen.core.workload.diagnostics import DocumentErrors
from loadgen.core.workload.flags import Overrides
from loadgen.core.workload.request_classes import Mix, RequestClass, Requests
from loadgen.core.workload.request_kinds import FromFile, FromTrace

DEFAULT_SHARE = 0.05
"""The share of the requests that are questions, unless the user specifies another one."""

QUESTION_CLASS = "answers"
"""The name of the class of questions."""
LOAD_CLASS = "load"
"""The name of the class of all other requests, if the workload has no classes."""


def add_questions(requests: Requests, overrides: Overrides, errors: DocumentErrors) -> Requests:
    """Return the requests with the class of questions that the options add.

    Without `--check-answers`, the requests are returned unchanged. Options that cannot be applied
    are added to `errors`.
    """
    share = DEFAULT_SHARE if overrides.check_share is None else overrides.check_share
    if overrides.check_answers is None:
        if overrides.check_share is not None:
            problem = "there are no questions whose share it could be"
            hint = "add --check-answers FILE"
            errors.add_option("no_effect", problem, f"--check-share {share * 100:g}%", hint)
        return requests

    path = Path(overrides.check_answers)
    if not _check_options(requests, path, share, errors):
        return requests

    questions = FromFile.model_construct(path=path, check_answers=True)
    classes = _scale_classes(requests, 1 - share)
    classes[QUESTION_CLASS] = RequestClass.model_construct(weight=share, requests=questions)
    return Mix.model_construct(classes=classes)


def _check_options(requests: Requests, path: Path, share: float, errors: DocumentErrors) -> bool:
    """Return True if questions can be added to requests. Otherwise an error is added."""
    option = f"--check-answers {path}"
    if not path.is_file():
        hint = "give a JSONL file with a prompt and an answer in each row"
        errors.add_option("missing_file", "no such file", option, hint)
        return False

    if not 0 < share < 1:
        problem = "is not between 0 % and 100 %"
        errors.add_option("out_of_range", problem, f"--check-share {share * 100:g}%", "use 5%")
        return False

    if isinstance(requests, FromTrace) and requests.replay == "sessions":
        problem = "questions cannot be added to the sessions of a trace"
        errors.add_option("unsupported", problem, option, "replay the trace without sessions")
        return False

    if isinstance(requests, Mix) and QUESTION_CLASS in requests.classes:
        problem = f"the workload already has a class {QUESTION_CLASS}"
        errors.add_option("conflict", problem, option, "rename the class, or leave the option out")
        return False

    return True


def _scale_classes(requests: Requests, share: float) -> dict[str, RequestClass]:
    """Return the classes of a workload with weights that add up to `share`.

    Requests without classes become the single class LOAD_CLASS.
    """
    if not isinstance(requests, Mix):
        return {LOAD_CLASS: RequestClass.model_construct(weight=share, requests=requests)}
    return {
        name: request_class.model_copy(update={"weight": float(request_class.weight) * share})
        for name, request_class in requests.classes.items()
    }
