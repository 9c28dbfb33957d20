"""Reads a targets file: the endpoints of one run, each with its name, key and machine. Pure after reading.

- name: vm-01
  url: http://10.0.0.1:8000
  api_key_env: VM_KEY        # or api_key_file: path, relative to this file
  gpus: 4
  shape: ND128isr_GB300_v6
  region: eastus2
  node: rack1-07             # the machine that it is on, where several targets share one
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.transport.target import Target

from loadgen.errors import Fault, Faults, Place, UserError, of_reading
from loadgen.execution.plan import Endpoint
from loadgen.workload.tasks import TARGET_NAME
from loadgen.workload.yaml_marks import Map, Seq, Spot, child, read_yaml, where

_TEXT = {"type": "string"}
_TARGET: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "url": _TEXT,
        "api_key_env": _TEXT,
        "api_key_file": _TEXT,
        "gpus": {"type": "integer", "minimum": 1},
        "shape": _TEXT,
        "region": _TEXT,
        "node": _TEXT,
    },
    "required": ["url"],
    "additionalProperties": False,
}
_LIST = {"type": "array", "items": _TARGET, "minItems": 1}
JSON_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "The targets of a run of loadgen",
    "anyOf": [_LIST, {"type": "object", "properties": {"targets": _LIST}, "required": ["targets"]}],
}
KEYS = tuple(_TARGET["properties"])


NOTHING = Endpoint(url="")


def load_targets(path: Path, env: Mapping[str, str] = os.environ, common: Endpoint = NOTHING) -> tuple[Endpoint, ...]:
    """The endpoints of a file, which is a list or a mapping with `targets:`. Raises Faults with all errors in it.

    `common`: the key, GPUs, shape and region of targets that give none of their own.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or "").lower() if isinstance(error, OSError) else "it is not UTF-8 text"
        hint = "give a YAML list: - {name: vm-01, url: http://...}"
        raise Faults(
            [UserError(of_reading(error), f"cannot read the targets: {reason}", f"--targets {path}", hint)]
        ) from None
    if text.lstrip().startswith("-"):  # `read_yaml` accepts only a mapping at the top level
        text = "targets:\n" + text
        shift = 1
    else:
        shift = 0
    try:
        top, faults = read_yaml(
            text, str(path), env, kind="targets file", smallest="write a list: - {name: vm-01, url: http://...}"
        )
    except Faults as error:
        raise Faults([_shift_line(fault, shift) for fault in error.faults]) from None
    faults = [_shift_line(fault, shift) for fault in faults]
    items = top.get("targets")
    if not isinstance(items, Seq) or not items:
        raise Faults(
            [
                *faults,
                UserError(
                    "empty_file", "no targets in it", str(path), "write a list: - {name: vm-01, url: http://...}"
                ),
            ]
        )
    endpoints: list[Endpoint] = []
    names: dict[str, int] = {}
    for i, item in enumerate(items):
        step = child("targets", i)

        def at(spot: Spot, step: str = step) -> Place:
            return where(str(path), Spot(spot.line - shift, spot.column), step)

        if not isinstance(item, Map):
            faults.append(
                UserError(
                    "wrong_type", "a target is a mapping", at(items.values_at[i]), "write - {name: ..., url: ...}"
                )
            )
            continue
        endpoint = _endpoint(item, path, env, at, faults, common)
        if endpoint.name in names:
            faults.append(
                UserError(
                    "duplicate", f"a second target named {endpoint.name!r}", at(item.at), "give each its own name"
                )
            )
        names[endpoint.name] = i
        duplicates = [other.name for other in endpoints if _is_same(other, endpoint)]
        if duplicates:
            what = f"the same endpoint and key as {duplicates[0]!r}"
            faults.append(
                UserError(
                    "duplicate", what, at(item.values_at["url"]), "name each once: its load would be counted as two"
                )
            )
        endpoints.append(endpoint)
    if faults:
        raise Faults(faults)
    return tuple(endpoints)


def _shift_line(fault: Fault, lines: int) -> Fault:
    """The fault with its line number moved up by `lines`, from the text as parsed to the file."""
    place = fault.place
    return UserError(
        fault.code, fault.what, place._replace(line=place.line - lines) if place else fault.where, fault.hint
    )


def _is_same(one: Endpoint, other: Endpoint) -> bool:
    """Whether two targets are the same: equal base URL and equal key."""
    try:
        return one.api_key == other.api_key and Target.parse(one.url).redacted == Target.parse(other.url).redacted
    except TargetUnusable:
        return False


def _endpoint(
    item: Map, path: Path, env: Mapping[str, str], at: Any, faults: list[Fault], common: Endpoint
) -> Endpoint:
    known = f"known: {', '.join(KEYS)}"
    faults += [
        UserError("unknown_key", f"unknown key {key!r}", at(item.keys_at[key]), known)
        for key in item
        if key not in KEYS
    ]
    for key in ("url", "name", "shape", "region", "node"):
        if key in item and not isinstance(item[key], str):
            faults.append(UserError("wrong_type", f"{key} is a text", at(item.values_at[key]), f'write {key}: "..."'))
    url = item.get("url")
    if not isinstance(url, str):
        if "url" not in item:
            faults.append(
                UserError("missing_key", "a target without url", at(item.at), "write url: http://host:8000", key="url")
            )
        return Endpoint(url="", name=str(item.get("name", "")))
    try:
        shown = Target.parse(url).address
    except TargetUnusable as error:
        faults.append(UserError(error.code, str(error), at(item.values_at["url"]), error.hint))
        shown = ""
    gpus = item.get("gpus", common.gpus)
    if "gpus" in item and (not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1):
        faults.append(
            UserError("out_of_range", "gpus is a whole number from 1", at(item.values_at["gpus"]), "write gpus: 4")
        )
        gpus = None
    return Endpoint(
        url=url,
        name=str(item.get("name") or shown),
        api_key=_key(item, path, env, at, faults, common.api_key),
        gpus=gpus,
        shape=str(item.get("shape", common.shape)),
        region=str(item.get("region", common.region)),
        node=str(item.get("node", "")),
    )


def _key(item: Map, path: Path, env: Mapping[str, str], at: Any, faults: list[Fault], common: str | None) -> str | None:
    """The API key, from the environment variable or the key file that the target names. A targets file holds no key."""
    if "api_key_env" in item:
        name = str(item["api_key_env"])
        if not env.get(name):
            faults.append(
                UserError(
                    "unset_variable",
                    f"{name} is not set",
                    at(item.values_at["api_key_env"]),
                    f"export {name}=...",
                    key=name,
                )
            )
        return env.get(name) or None
    if "api_key_file" in item:
        file = path.parent / str(item["api_key_file"])
        try:
            return file.read_text().strip() or None
        except OSError as error:
            faults.append(
                UserError(
                    of_reading(error),
                    f"{file}: {error.strerror}",
                    at(item.values_at["api_key_file"]),
                    "a file with the key",
                )
            )
    return common or env.get("OPENAI_API_KEY") or None


def named(url: str) -> tuple[str, str] | None:
    """The name and the URL of `NAME=URL`; None for a URL alone."""
    name, equals, rest = url.partition("=")
    return (name, rest) if equals and re.fullmatch(TARGET_NAME, name) else None


def from_urls(urls: list[str], api_key: str | None, gpus: int | None, shape: str, region: str) -> tuple[Endpoint, ...]:
    """Endpoints of a repeated `--url`; the other arguments apply to each that has no name. Raises Faults for a bad or
    repeated URL."""
    endpoints: list[Endpoint] = []
    faults: list[Fault] = []
    for text in urls:
        serves, url = named(text) or ("", text)
        if url.startswith("sim:"):
            faults.append(
                UserError("conflict", f"{url} runs in virtual time, beside no other target", "--url", "name it alone")
            )
            continue
        try:
            name = Target.parse(url).redacted
        except TargetUnusable as error:
            faults.append(UserError(error.code, str(error), "--url", error.hint))
            continue
        if any(name == endpoint.name and serves == endpoint.serves for endpoint in endpoints):
            faults.append(UserError("duplicate", f"{name} is given twice", "--url", "name each target once"))
        endpoint = Endpoint(url=url, name=name, api_key=api_key, gpus=gpus, shape=shape, region=region)
        if serves:
            endpoint = Endpoint(url=url, name=name, api_key=api_key, serves=serves)
        endpoints.append(endpoint)
    if faults:
        raise Faults(faults)
    return tuple(endpoints)
