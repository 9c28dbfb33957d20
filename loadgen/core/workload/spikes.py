"""Expands stages that are written as `spike: 3x for 60s`.

A spike multiplies the load of the stage before it for some time.
"""

from __future__ import annotations

import re
from typing import Any

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
    30 requests/s. In a spike with a mistake, the error takes the place of the value under the key
    `spike`. The model `Stage` raises it, because only pydantic reports it with its position.
    """
    expanded = Seq(stages.at)
    expanded.values_at = stages.values_at
    unnamed_spikes = 0  # They are called spike, spike-2, spike-3 and so on.
    for stage in stages:
        if not isinstance(stage, Map) or "spike" not in stage:
            expanded.append(stage)
            continue
        stage_before = expanded[-1] if expanded else None
        expanded.append(_expand_spike(stage, stage_before, unnamed_spikes + 1))
        if "name" not in stage:
            unnamed_spikes += 1
    return expanded


def _expand_spike(stage: Map, stage_before: Any, number: int) -> Map:
    """Return a spike as a stage with a name.

    If the spike has a mistake, return it with the error in place of its value. `number` counts the
    spikes without a name, from 1 on.
    """
    try:
        expanded = _stage_of_spike(stage, stage_before)
    except units.InvalidValueError as error:
        expanded = stage.with_renamed_keys({})
        expanded["spike"] = error
        return expanded
    if "name" not in expanded:
        expanded["name"] = "spike" if number == 1 else f"spike-{number}"
        expanded.keys_at["name"] = expanded.keys_at["arrival"]
        expanded.values_at["name"] = expanded.keys_at["arrival"]
    return expanded


def _stage_of_spike(stage: Map, stage_before: Any) -> Map:
    """Return a spike as a stage with an arrival and a duration.

    The new keys have the position of the key `spike`, for error messages. Raises
    `units.InvalidValueError` if the spike cannot be understood, or if the stage before it has no
    load that could be multiplied.
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
    # The duration stays a text, but an invalid one is reported as a mistake in the spike.
    units.duration_ns(match["duration"])
    arrival_before = stage_before.get("arrival") if isinstance(stage_before, Map) else None
    expanded = stage.with_renamed_keys({"spike": "arrival"})
    expanded["arrival"] = _multiply_load(arrival_before, float(match["factor"]))
    expanded["duration"] = match["duration"]
    expanded.keys_at["duration"] = stage.keys_at["spike"]
    expanded.values_at["duration"] = stage.values_at["spike"]
    return expanded


def _multiply_load(arrival: Any, factor: float) -> dict[str, Any]:
    """Return an arrival process, as it is written in a file, with its load multiplied.

    The load is the rate, or the concurrency of a closed loop. For example, `{poisson: 10/s}` with
    the factor 3 becomes `{poisson: 30/s}`. Raises `units.InvalidValueError` if the process has no
    such load.
    """
    process, parameters = _process_and_parameters(arrival)
    key = LOAD_KEYS.get(process, "")
    load = parameters.get(key) if isinstance(parameters, dict) else parameters
    if load is None or load == "inf":
        hint = f"put a stage with arrival: {{poisson: 10/s}} (or {', '.join(LOAD_KEYS)}) before it"
        problem = "has a spike, but no load before it that it could multiply"
        raise units.InvalidValueError("conflict", problem, hint)
    if process == "closed":
        if not isinstance(load, int):
            problem = "has a spike after a concurrency that is not an integer"
            raise units.InvalidValueError("wrong_type", problem, _HINT)
        # The users of a spike start at once.
        return {process: {"concurrency": round(load * factor), "ramp": "0s"}}
    rate = f"{units.rate_per_s(str(load)) * factor:.12g}/s"
    other_parameters = parameters if isinstance(parameters, dict) else {}
    return {process: {**other_parameters, key: rate}}


def _process_and_parameters(arrival: Any) -> tuple[str, Any]:
    """Return the only key of an arrival and its value, or an empty name if there is none."""
    if isinstance(arrival, dict) and arrival:
        return next(iter(arrival.items()))
    return "", None
