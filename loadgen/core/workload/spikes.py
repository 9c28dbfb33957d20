"""Stages written as `spike: 3x for 60s`: the stage before at so many times its load. Pure."""

from __future__ import annotations

import re
from typing import Any

from loadgen.core import units
from loadgen.core.workload.yaml_marks import Map, Seq

SPIKE_PATTERN = rf"^{units.NUMBER} ?x for ({units.DURATION_PATTERN.strip('^$')})$"
_SPIKE = rf"(?P<times>{units.NUMBER}) ?x for (?P<duration>.+)"
_HINT = "write how many times the load before it, and for how long: spike: 3x for 60s"
_LOADS = {"constant": "rate", "poisson": "rate", "gamma": "rate", "closed": "concurrency"}


def written_out(stages: Seq) -> Seq:
    """The stages with each spike as a stage of its own kind; a bad one keeps `spike`, whose value is then the fault."""
    result = Seq(stages.at)
    result.values_at = stages.values_at
    for number, stage in enumerate(stages):
        if isinstance(stage, Map) and "spike" in stage:
            try:
                stage = _of_spike(stage, result[-1] if result else None)
                unnamed = sum(
                    "spike" in one and "name" not in one
                    for one in stages[:number]
                    if isinstance(one, Map)
                )
                if "name" not in stage:
                    stage["name"] = f"spike-{unnamed + 1}" if unnamed else "spike"
                    stage.keys_at["name"] = stage.values_at["name"] = stage.keys_at["arrival"]
            except units.Wrong as wrong:  # told by the stage, which knows its place
                stage = stage.renamed({})
                stage["spike"] = wrong
        result.append(stage)
    return result


def _of_spike(stage: Map, before: Any) -> Map:
    if "arrival" in stage or "duration" in stage or "count" in stage:
        raise units.Wrong("conflict", "has a spike and an arrival, a duration or a count", _HINT)
    match = re.fullmatch(_SPIKE, str(stage["spike"]).strip())
    if match is None or float(match["times"]) <= 1:
        raise units.Wrong("invalid_value", "has a spike that is none", _HINT)
    units.duration_ns(match["duration"])
    spike = stage.renamed({"spike": "arrival"})
    spike["arrival"] = _times(
        float(match["times"]), before.get("arrival") if isinstance(before, Map) else None
    )
    spike["duration"] = match["duration"]
    spike.keys_at["duration"], spike.values_at["duration"] = (
        stage.keys_at["spike"],
        stage.values_at["spike"],
    )
    return spike


def _times(times: float, arrival: Any) -> dict[str, Any]:
    """An arrival law at so many times its load, as it would be written."""
    law, value = (
        next(iter(arrival.items()), ("", None)) if isinstance(arrival, dict) else ("", None)
    )
    key = _LOADS.get(law, "")
    load = value.get(key) if isinstance(value, dict) else value
    if load is None or load == "inf":
        hint = f"a stage before it with arrival: {{poisson: 10/s}} (or {', '.join(list(_LOADS))})"
        raise units.Wrong(
            "conflict", "has a spike without a load before it that could be multiplied", hint
        )
    if law == "closed":
        if not isinstance(load, int):
            raise units.Wrong(
                "wrong_type", "has a spike over what is no number of requests in flight", _HINT
            )
        return {law: {"concurrency": round(load * times), "ramp": "0s"}}  # a spike begins at once
    rate = f"{units.rate_per_s(str(load)) * times:.12g}/s"
    return {law: {**value, key: rate} if isinstance(value, dict) else {key: rate}}
