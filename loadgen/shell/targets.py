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
from typing import Annotated, Any

from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.transport.target import Target
from pydantic import AfterValidator, Field

from loadgen import backends
from loadgen.core.errors import Fault, Faults, Place, UserError, of_reading
from loadgen.core.execution.plan import Endpoint
from loadgen.core.units import Wrong
from loadgen.core.workload.diagnostics import locate, sort_faults, validate_document
from loadgen.core.workload.fields import Whole
from loadgen.core.workload.file_models import FileContext, Part
from loadgen.core.workload.loading import read_text
from loadgen.core.workload.tasks import TARGET_NAME
from loadgen.core.workload.yaml_marks import Map, read_yaml, where

_SMALLEST = "write a list: - {name: vm-01, url: http://...}"


def _usable(url: str) -> str:
    if url.startswith("sim:"):
        hint = "name it alone, by --url; to serve it here: loadgen sim --preset"
        raise Wrong("invalid_url", f"runs in virtual time, beside no other target: {url}", hint)
    try:
        Target.parse(url)
    except TargetUnusable as error:
        raise Wrong(error.code, f"cannot be used: {error}", error.hint) from None
    return url


class WrittenTarget(Part):
    """One endpoint. What is left out of its key and machine is what the flags say."""

    url: Annotated[str, AfterValidator(_usable)]
    name: str = ""  # "": its address
    api_key_env: str | None = None
    api_key_file: str | None = None  # relative to the targets file
    gpus: Whole | None = None
    shape: str | None = None
    region: str | None = None
    node: str = ""


class WrittenTargets(Part):
    """A list of endpoints, or a mapping with the list under `targets`."""

    targets: Annotated[tuple[WrittenTarget, ...], Field(json_schema_extra={"minItems": 1})]

    @classmethod
    def extend_json_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        return {"anyOf": [schema["properties"]["targets"], schema]}


NOTHING = Endpoint(url="")


def load_targets(
    path: Path, env: Mapping[str, str] = os.environ, common: Endpoint = NOTHING
) -> tuple[Endpoint, ...]:
    """The endpoints of a file, which is a list or a mapping with `targets:`.

    Raises UserError for a file that cannot be read, and Faults with all errors in it.

    `common`: the key, GPUs, shape and region of targets that give none of their own.
    """
    text = read_text(path, f"--targets {path}", "targets file", lambda: _SMALLEST, _SMALLEST)
    top, faults = read_yaml(
        text, str(path), env, kind="targets file", smallest=_SMALLEST, list_as="targets"
    )
    source = FileContext(file=str(path), directory=path.parent, faults=faults)
    written = validate_document(WrittenTargets, top, source)
    if written is None:
        raise Faults(sort_faults(source.faults))
    if not written.targets:
        source.faults.append(
            UserError("empty_file", "no targets in it", _place(top, source), _SMALLEST)
        )
    endpoints: list[Endpoint] = []
    for i, target in enumerate(written.targets):
        endpoint = _endpoint(target, i, top, source, env, common)
        if any(other.name == endpoint.name for other in endpoints):
            what = f"a second target named {endpoint.name!r}"
            source.faults.append(
                UserError("duplicate", what, _place(top, source, i), "give each its own name")
            )
        if (
            double := next((other for other in endpoints if _is_same(other, endpoint)), None)
        ) is not None:
            what = f"the same endpoint and key as {double.name!r}"
            hint = "name each once: its load would be counted as two"
            source.faults.append(UserError("duplicate", what, _place(top, source, i, "url"), hint))
        endpoints.append(endpoint)
    if source.faults:
        raise Faults(sort_faults(source.faults))
    return tuple(endpoints)


def _place(top: Map, source: FileContext, *loc: str | int) -> Place:
    spot, path, _ = locate(top, ("targets", *loc))
    return where(source.file, spot, path)


def _is_same(one: Endpoint, other: Endpoint) -> bool:
    """Whether two targets are the same: equal base URL and equal key."""
    return (
        one.api_key == other.api_key
        and Target.parse(one.url).redacted == Target.parse(other.url).redacted
    )


def _endpoint(
    target: WrittenTarget,
    i: int,
    top: Map,
    source: FileContext,
    env: Mapping[str, str],
    common: Endpoint,
) -> Endpoint:
    key = common.api_key or env.get("OPENAI_API_KEY")
    if target.api_key_env is not None:
        if not (key := env.get(target.api_key_env)):
            name, place = target.api_key_env, _place(top, source, i, "api_key_env")
            source.faults.append(
                UserError(
                    "unset_variable", f"{name} is not set", place, f"export {name}=...", key=name
                )
            )
    elif target.api_key_file is not None:
        file = source.directory / target.api_key_file
        try:
            key = file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            what = f"{file}: {error.strerror if isinstance(error, OSError) else 'not text'}"
            place = _place(top, source, i, "api_key_file")
            source.faults.append(
                UserError(of_reading(error), what, place, "a file with the key alone")
            )
    return Endpoint(
        url=target.url,
        name=target.name or Target.parse(target.url).address,
        api_key=key or None,
        gpus=target.gpus or common.gpus,
        shape=common.shape if target.shape is None else target.shape,
        region=common.region if target.region is None else target.region,
        node=target.node,
    )


def named(url: str) -> tuple[str, str] | None:
    """The name and the URL of `NAME=URL`; None for a URL alone."""
    name, equals, rest = url.partition("=")
    return (name, rest) if equals and re.fullmatch(TARGET_NAME, name) else None


def from_urls(
    urls: list[str], api_key: str | None, gpus: int | None, shape: str, region: str
) -> tuple[Endpoint, ...]:
    """Endpoints of a repeated `--url`; the other arguments apply to each that has no name. Raises Faults for a bad or
    repeated URL.
    """
    endpoints: list[Endpoint] = []
    faults: list[Fault] = []
    for text in urls:
        serves, url = named(text) or ("", text)
        try:
            row = backends.of_target(url)
        except UserError as fault:
            faults.append(fault)
            continue
        if backends.provides_target(row):
            because = (
                f"{url} runs in virtual time"
                if row.virtual
                else f"a target of {row.name} stands alone"
            )
            faults.append(
                UserError(
                    "conflict", f"{because}, beside no other target", "--url", "name it alone"
                )
            )
            continue
        try:
            name = Target.parse(url).redacted
        except TargetUnusable as error:
            faults.append(UserError(error.code, str(error), "--url", error.hint))
            continue
        if any(name == endpoint.name and serves == endpoint.serves for endpoint in endpoints):
            faults.append(
                UserError("duplicate", f"{name} is given twice", "--url", "name each target once")
            )
        endpoint = Endpoint(
            url=url, name=name, api_key=api_key, gpus=gpus, shape=shape, region=region
        )
        if serves:
            endpoint = Endpoint(url=url, name=name, api_key=api_key, serves=serves)
        endpoints.append(endpoint)
    if faults:
        raise Faults(faults)
    return tuple(endpoints)
