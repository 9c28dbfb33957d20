"""Add questions with known answers to the requests of a workload, as a request class of their own.

The questions are a part of the measured load: they are drawn, scheduled and recorded like all other
requests. `--check-answers` names their file, and `--check-share` their share of all requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from loadgen.core.errors import Code
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


class _OptionProblem(NamedTuple):
    """Why an option of the command line cannot be applied.

    Attributes:
        code: The kind of problem.
        problem: The problem as text.
        option: The option as it was typed.
        hint: What the user can do.
    """

    code: Code
    problem: str
    option: str
    hint: str


def add_questions(requests: Requests, overrides: Overrides, errors: DocumentErrors) -> Requests:
    """Return the requests of a workload, with questions from a file mixed in.

    For example, 5 % of the requests become questions whose right response is known.

    Args:
        requests: The requests of the workload, which are returned unchanged without a file.
        overrides: The options of the command line, with the file and the share of the questions.
        errors: Receives an error for an option that cannot be applied.
    """
    if overrides.check_answers is None:
        if overrides.check_share is not None:
            _add_unused_share_error(overrides.check_share, errors)
        return requests

    path = Path(overrides.check_answers)
    share = DEFAULT_SHARE if overrides.check_share is None else overrides.check_share
    invalid = _find_problem(requests, path, share)
    if invalid is not None:
        errors.add_option(invalid.code, invalid.problem, invalid.option, invalid.hint)
        return requests

    # All values are known to be valid, so the models are constructed without validation.
    classes = _scale_classes(requests, 1 - share)
    questions = FromFile.model_construct(path=path, check_answers=True)
    classes[QUESTION_CLASS] = RequestClass.model_construct(weight=share, requests=questions)
    return Mix.model_construct(classes=classes)


def _add_unused_share_error(share: float, errors: DocumentErrors) -> None:
    """Add the error that `--check-share` has no effect without a file of questions."""
    problem = "there are no questions whose share it could be"
    hint = "add --check-answers FILE"
    errors.add_option("no_effect", problem, f"--check-share {share * 100:g}%", hint)


def _find_problem(requests: Requests, path: Path, share: float) -> _OptionProblem | None:
    """Return why the questions of a file cannot be added to a workload, or None if they can."""
    option = f"--check-answers {path}"
    if not path.is_file():
        hint = "give a JSONL file with a prompt and an answer in each row"
        return _OptionProblem("missing_file", "no such file", option, hint)

    if not 0 < share < 1:
        option_with_share = f"--check-share {share * 100:g}%"
        problem = f"{option_with_share} is not above 0 % and below 100 %"
        return _OptionProblem("out_of_range", problem, option_with_share, "use 5%")

    is_replay_of_sessions = isinstance(requests, FromTrace) and requests.replay == "sessions"
    if is_replay_of_sessions:
        problem = "questions cannot be added to the sessions of a trace"
        return _OptionProblem("unsupported", problem, option, "replay the trace without sessions")

    has_class_of_same_name = isinstance(requests, Mix) and QUESTION_CLASS in requests.classes
    if has_class_of_same_name:
        problem = f"the workload already has a class {QUESTION_CLASS}"
        hint = "rename the class, or leave the option out"
        return _OptionProblem("conflict", problem, option, hint)

    return None


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
