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
    """Return the requests of a workload, with questions from a file mixed in.

    For example, 5 % of the requests become questions whose right response is known.

    Args:
        requests: The requests of the workload. They are returned unchanged without a file.
        overrides: The options of the command line, with the file and the share of the questions.
        errors: Receives an error for an option that cannot be applied.
    """
    share = DEFAULT_SHARE if overrides.check_share is None else overrides.check_share

    if overrides.check_answers is None:
        has_unused_share = overrides.check_share is not None
        if has_unused_share:
            problem = "there are no questions whose share it could be"
            hint = "add --check-answers FILE"
            errors.add_option("no_effect", problem, f"--check-share {share * 100:g}%", hint)
        return requests

    path = Path(overrides.check_answers)
    can_be_added = _check_options(requests, path, share, errors)
    if not can_be_added:
        return requests

    classes = _scale_classes(requests, 1 - share)
    questions = FromFile.model_construct(path=path, check_answers=True)
    classes[QUESTION_CLASS] = RequestClass.model_construct(weight=share, requests=questions)
    return Mix.model_construct(classes=classes)


def _check_options(requests: Requests, path: Path, share: float, errors: DocumentErrors) -> bool:
    """Return True if the questions of a file can be added to the requests of a workload.

    If the questions cannot be added, the reason is added to `errors`.
    """
    option = f"--check-answers {path}"
    if not path.is_file():
        hint = "give a JSONL file with a prompt and an answer in each row"
        errors.add_option("missing_file", "no such file", option, hint)
        return False

    if not 0 < share < 1:
        option_with_share = f"--check-share {share * 100:g}%"
        problem = f"{option_with_share} is not above 0 % and below 100 %"
        errors.add_option("out_of_range", problem, option_with_share, "use 5%")
        return False

    is_replay_of_sessions = isinstance(requests, FromTrace) and requests.replay == "sessions"
    if is_replay_of_sessions:
        problem = "questions cannot be added to the sessions of a trace"
        errors.add_option("unsupported", problem, option, "replay the trace without sessions")
        return False

    has_class_of_same_name = isinstance(requests, Mix) and QUESTION_CLASS in requests.classes
    if has_class_of_same_name:
        problem = f"the workload already has a class {QUESTION_CLASS}"
        errors.add_option("conflict", problem, option, "rename the class, or leave the option out")
        return False

    return True


def _scale_classes(requests: Requests, share: float) -> dict[str, RequestClass]:
    """Return the request classes of a workload with each weight multiplied by `share`.

    For example, weights of 0.75 and 0.25 and a share of 0.8 give weights of 0.6 and 0.2. Requests
    without classes become a single class with the weight `share`.
    """
    if not isinstance(requests, Mix):
        single_class = RequestClass.model_construct(weight=share, requests=requests)
        return {LOAD_CLASS: single_class}

    scaled_classes = {}
    for name, request_class in requests.classes.items():
        scaled_weight = float(request_class.weight) * share
        scaled_classes[name] = request_class.model_copy(update={"weight": scaled_weight})
    return scaled_classes
