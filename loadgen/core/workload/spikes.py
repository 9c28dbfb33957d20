"""Expands stages that are written as `spike: 3x for 60s`.

A spike multiplies the load of the stage before it for some time.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from loadgen.core import units
from loadgen.core.workload.yaml_marks import Map, Seq

SPIKE_PATTERN = rf"^{units.NUMBER} ?x for ({units.DURATION_PATTERN.strip('^$')})$"
_SPIKE = re.compile(rf"(?P<factor>{units.NUMBER}) ?x for (?P<duration>.+)")
_HINT = "write how many times the load before it, and for how long: spike: 3x for 60s"

LOAD_KEYS = {"constant": "rate", "poisson": "rate", "gamma": "rate", "closed": "concurrency"}
"""Maps an arrival process to the key of its load."""


def expand_spikes(stages: Seq) -> Seq:
    """Return the stages with each spike written as a stage with an arrival and a duration.

    For example, `spike: 3x for 60s` after a stage with 10 requests/s becomes a stage of 60 s with
    30 requests/s. Spikes without a name are called spike, spike-2, spike-3 and so on. A spike with
    a mistake becomes a stage with an `InvalidSpike`.
    """
    expanded_stages = Seq(stages.at)
    # Every stage stays at its index, so it also has the same position in the file.
    expanded_stages.values_at = stages.values_at

    unnamed_spikes = 0
    for stage in stages:
        is_spike = isinstance(stage, Map) and "spike" in stage
        if not is_spike:
            expanded_stages.append(stage)
            continue

        default_name = ""
        if "name" not in stage:
            unnamed_spikes += 1
            default_name = "spike" if unnamed_spikes == 1 else f"spike-{unnamed_spikes}"

        stage_before = expanded_stages[-1] if expanded_stages else None
        expanded_stages.append(_expand_spike(stage, stage_before, default_name))

    return expanded_stages


class InvalidSpike(NamedTuple):
    """The value of `spike` in a stage whose spike has a mistake.

    pydantic reports a mistake with its position in the file only if a model raises it while it is
    validated. So the error is stored here until the model `Stage` raises it.
    """

    error: units.InvalidValueError


def _expand_spike(spike_stage: Map, stage_before: object, default_name: str) -> Map:
    """Return a spike as a stage with a name, an arrival and a duration.

    A mistake in the spike is not raised here, because its position in the file would be lost.
    Instead, the stage gets an `InvalidSpike` as the value of its key `spike`. The model `Stage`
    raises the error when it validates the stage.

    Args:
        spike_stage: The stage with the key `spike`, as it is written.
        stage_before: The stage before it, whose load is multiplied, or None for the first stage.
        default_name: The name of the stage if it has none in the file.
    """
    try:
        expanded_stage = _stage_of_spike(spike_stage, stage_before)
    except units.InvalidValueError as error:
        invalid_stage = spike_stage.copy()
        invalid_stage["spike"] = InvalidSpike(error)
        return invalid_stage

    if "name" not in expanded_stage:
        # Errors need a position in the file for each key. The name is not in the file, so it gets
        # the position of the key `spike`.
        position_of_spike = spike_stage.keys_at["spike"]
        expanded_stage.add(
            "name", default_name, key_at=position_of_spike, value_at=position_of_spike
        )

    return expanded_stage


def _stage_of_spike(stage: Map, stage_before: object) -> Map:
    """Return a spike as a stage with an arrival and a duration.

    Both have the position of the key `spike`, for error messages. Raises `units.InvalidValueError`
    if the spike cannot be understood, or if the stage before it has no load to multiply.
    """
    spike = _parse_spike(stage)
    arrival_before = stage_before.get("arrival") if isinstance(stage_before, Map) else None
    expanded = stage.with_renamed_keys({"spike": "arrival"})
    expanded["arrival"] = _multiply_load(arrival_before, spike.factor)
    expanded.add(
        "duration",
        spike.duration,
        key_at=stage.keys_at["spike"],
        value_at=stage.values_at["spike"],
    )

    return expanded


class _Spike(NamedTuple):
    """How many times the load before a spike is sent, and for how long, such as `60s`."""

    factor: float
    duration: str


def _parse_spike(stage: Map) -> _Spike:
    """Return the spike of a stage, for example (3.0, "60s") for `spike: 3x for 60s`.

    Raises `units.InvalidValueError` if it is not of this form, or if the stage also has keys that a
    spike defines.
    """
    if "arrival" in stage or "duration" in stage or "count" in stage:
        raise units.InvalidValueError(
            "conflict", "has a spike together with an arrival, a duration or a count", _HINT
        )

    match = _SPIKE.fullmatch(str(stage["spike"]).strip())
    if match is None or float(match["factor"]) <= 1:
        raise units.InvalidValueError(
            "invalid_value", "has a spike that is not of the form 3x for 60s", _HINT
        )

    duration = match["duration"]
    units.duration_ns(duration)  # Raises the error of an invalid duration.
    return _Spike(float(match["factor"]), duration)


def _multiply_load(arrival: object, factor: float) -> dict[str, Any]:
    """Return an arrival process, as it is written in a file, with its load multiplied.

    The load is the rate, or the concurrency of a closed loop. For example, `{poisson: 10/s}` with
    the factor 3 becomes `{poisson: {rate: 30/s}}`. Raises `units.InvalidValueError` if the process
    has no such load.
    """
    process, parameters = _process_and_parameters(arrival)
    load_key = LOAD_KEYS.get(process, "")

    load = parameters.get(load_key)
    if load is None or load == "inf":
        hint = f"put a stage with arrival: {{poisson: 10/s}} (or {', '.join(LOAD_KEYS)}) before it"
        problem = "has a spike, but no load before it that it could multiply"
        raise units.InvalidValueError("conflict", problem, hint)

    if process == "closed":
        return {process: _multiply_concurrency(load, factor)}

    rate_per_s = units.rate_per_s(str(load)) * factor
    return {process: {**parameters, load_key: f"{rate_per_s:.12g}/s"}}


def _multiply_concurrency(concurrency: object, factor: float) -> dict[str, Any]:
    """Return the parameters of a closed loop with its number of virtual users multiplied.

    A ramp is the time over which the virtual users start. That of a spike is 0 s, so that its users
    start at once, even if the stage before has a ramp. Raises `units.InvalidValueError` if the
    concurrency is not an integer.
    """
    if not isinstance(concurrency, int):
        problem = "has a spike after a concurrency that is not an integer"
        raise units.InvalidValueError("wrong_type", problem, _HINT)
    return {"concurrency": round(concurrency * factor), "ramp": "0s"}


def _process_and_parameters(arrival: object) -> tuple[str, dict[str, Any]]:
    """Return the name of an arrival process as written in a file, and its parameters.

    `{poisson: 10/s}` is the short form of `{poisson: {rate: 10/s}}`; both give ("poisson",
    {"rate": "10/s"}). The name is empty if `arrival` is no arrival process.
    """
    if not isinstance(arrival, dict) or not arrival:
        return "", {}
    process, parameters = next(iter(arrival.items()))
    if isinstance(parameters, dict):
        return process, parameters
    load_key = LOAD_KEYS.get(process, "")
    return process, {load_key: parameters}
