"""Apply the options for recorded sessions, and check them against the load."""

from __future__ import annotations

from collections.abc import Mapping

from loadgen.core.workload.diagnostics import DocumentErrors
from loadgen.core.workload.distributions import FixedTokens
from loadgen.core.workload.flags import Overrides
from loadgen.core.workload.stages import Closed, Stage
from loadgen.core.workload.trajectories import Trajectories

OPTION_OF_FIELD = {
    "start": "trajectory_start",
    "end": "trajectory_end",
    "salt": "trajectory_salt",
    "history": "trajectory_history",
    "idle_cap_ns": "idle_cap",
}
"""Maps a field of the requests to the option that sets it."""


def override_trajectories(
    requests: Trajectories, overrides: Overrides, errors: DocumentErrors
) -> Trajectories:
    """Return the requests of a workload with the values that command-line options set.

    The prompts are recorded conversations, so an option for their length is an error.
    """
    if overrides.input_tokens is not None:
        problem = "the prompts come from a data set, so their length cannot be set"
        option = f"--input-tokens {overrides.input_tokens}"
        errors.add_option("conflict", problem, option, "leave the option out")

    changes: dict[str, object] = _specified_fields(overrides)
    if overrides.output_tokens == "unlimited":
        changes["output_tokens"] = "unlimited"
    elif overrides.output_tokens is not None:
        changes["output_tokens"] = FixedTokens.model_construct(value=overrides.output_tokens)
    return requests.model_copy(update=changes)


def refuse_trajectory_options(overrides: Overrides, errors: DocumentErrors) -> None:
    """Add an error for each option that only has an effect on recorded sessions.

    Called for workloads whose requests are not recorded sessions.
    """
    for field in _specified_fields(overrides):
        problem = "the requests are not sessions of a data set"
        hint = "use --dataset FILE --set turns=all, or requests: {trajectories: FILE}"
        errors.add_option("no_effect", problem, f"--set {OPTION_OF_FIELD[field]}", hint)


def keep_trajectory_fields(
    requests_of_file: object, new_fields: Mapping[str, object]
) -> Mapping[str, object]:
    """Return fields that replace those of a workload file, so that settings of sessions are kept.

    A workload file may send recorded sessions with settings, such as their order. An option then
    replaces the requests:

    - by recorded sessions: only the data set is replaced, and the settings stay.
    - by other requests: the settings are lost. Their names become the additional field
      `lost_trajectory_keys`, from which a note for the user is written.

    Args:
        requests_of_file: The requests of the workload file.
        new_fields: The fields that options set, such as "requests".
    """
    new_requests = new_fields.get("requests")
    if new_requests is None or not isinstance(requests_of_file, Trajectories):
        return new_fields

    if isinstance(new_requests, Trajectories):
        data_set = {"trajectories": new_requests.trajectories}
        return {**new_fields, "requests": requests_of_file.model_copy(update=data_set)}
    return {**new_fields, "lost_trajectory_keys": _list_setting_keys(requests_of_file)}


def _list_setting_keys(requests: Trajectories) -> tuple[str, ...]:
    """Return the keys of the settings that a workload file has, in addition to the data set."""
    set_fields = requests.model_fields_set - {"trajectories"}
    return tuple(
        str(info.validation_alias or name)
        for name, info in Trajectories.model_fields.items()
        if name in set_fields
    )


def check_trajectory_stages(
    requests: Trajectories, stages: list[Stage], errors: DocumentErrors
) -> None:
    """Add an error if the stages of the load do not fit the start and the end of the sessions.

    Both settings are about virtual users (a closed loop), who send one session after the other:

    - `start: middle` lets the first session of each virtual user begin in the middle. So the first
      stage must have virtual users, and it must be measured.
    - `end: first` ends the load when the first virtual user finds no session left. So the last
      stage must have virtual users and a number of sessions.
    """
    if requests.start == "middle":
        first_stage = stages[0]
        begins_with_measured_users = first_stage.measured and isinstance(
            first_stage.arrival, Closed
        )
        if not begins_with_measured_users:
            problem = "sessions can only begin in the middle of a load of measured virtual users"
            hint = "use --concurrency 8 --warmup 0, because the cache is filled before the load"
            errors.add_file_error("conflict", problem, hint)

    if requests.end == "first":
        last_stage = stages[-1]
        ends_with_users = isinstance(last_stage.arrival, Closed)
        has_session_count = bool(last_stage.count)
        if not (ends_with_users and has_session_count):
            problem = "only a closed loop with a number of sessions can end with its first user"
            hint = (
                "remove end: first, or run it with --concurrency 8 --num-requests 100 and without "
                "a duration"
            )
            errors.add_file_error("conflict", problem, hint)


def _specified_fields(overrides: Overrides) -> dict[str, object]:
    """Return the fields that options for recorded sessions set, with their values."""
    values = {field: getattr(overrides, option) for field, option in OPTION_OF_FIELD.items()}
    return {field: value for field, value in values.items() if value is not None}
