"""The endpoints of a run with several targets: of a targets file, or of a repeated `--url`.

A targets file lists each endpoint with its name, key and machine::

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.transport.target import Target
from msgspec.structs import replace
from pydantic import AfterValidator, Field

from loadgen import backends
from loadgen.core.errors import Code, CombinedError, LoadgenError, UserError, collecting, of_reading
from loadgen.core.execution.plan import Endpoint
from loadgen.core.units import InvalidValueError
from loadgen.core.workload.diagnostics import locate, sort_errors, validate_document
from loadgen.core.workload.fields import Whole
from loadgen.core.workload.file_models import FileContext, Part
from loadgen.core.workload.tasks import TARGET_NAME
from loadgen.core.workload.workload_files import read_yaml_text
from loadgen.core.workload.yaml_marks import Map, place_at, read_yaml

_EXAMPLE = "write a list: - {name: vm-01, url: http://...}"
NO_ENDPOINT = Endpoint(url="")
URL_HINT = "use --url http://HOST:8000, or --url sim:gb300-vm to simulate a server"


def _validate_url(url: str) -> str:
    """Return the URL of a target unchanged, as pydantic expects of a validator.

    Raises units.InvalidValueError if no target can have this URL.
    """
    if url.startswith("sim:"):
        raise InvalidValueError(
            "invalid_url",
            f"a simulated target must be the only target: {url}",
            "use --url for it alone, or serve it over HTTP with loadgen sim --preset",
        )
    try:
        Target.parse(url)
    except TargetUnusable as error:
        raise InvalidValueError(error.code, f"cannot be used: {error}", error.hint) from None
    return url


class WrittenTarget(Part):
    """One endpoint of a targets file.

    The options of the command line apply to whatever the file does not specify.
    """

    url: Annotated[str, AfterValidator(_validate_url)]
    name: str = ""  # the default is the address
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
        """Return the schema of a list or a mapping."""
        return {"anyOf": [schema["properties"]["targets"], schema]}


class _TargetsFile(NamedTuple):
    """A targets file as it was parsed, with what is needed to report errors with their line.

    Attributes:
        content: The content of the file, with the line and column of each key.
        context: The name and folder of the file, and the errors that were found in it so far.
    """

    content: Map
    context: FileContext

    def add_error(
        self, code: Code, message: str, place: Sequence[str | int], hint: str, *, key: str = ""
    ) -> None:
        """Add an error at a place, which is a path of keys and indices below `targets`."""
        node, path, _ = locate(self.content, ("targets", *place))
        position = place_at(self.context.file, node, path)
        self.context.errors.append(UserError(code, message, position, hint, key=key))


def load_targets(
    path: Path, env: Mapping[str, str] = os.environ, common: Endpoint = NO_ENDPOINT
) -> tuple[Endpoint, ...]:
    """Return the endpoints of a targets file, which is a list or a mapping with `targets:`.

    Args:
        path: The file.
        env: The environment, which the file may refer to.
        common: The key, GPUs, shape and region of targets that specify none of their own.

    Raises:
        UserError: If the file cannot be read.
        CombinedError: With every error in the file.
    """
    text = read_yaml_text(path, f"--targets {path}", "targets file", lambda: _EXAMPLE, _EXAMPLE)
    # A list at the top level counts as a mapping with the list under `targets`.
    content, syntax_errors = read_yaml(
        text, str(path), env, kind="targets file", smallest=_EXAMPLE, list_as="targets"
    )
    context = FileContext(file=str(path), directory=path.parent, errors=syntax_errors)
    document = validate_document(WrittenTargets, content, context)
    if document is None:
        raise CombinedError(sort_errors(context.errors))

    file = _TargetsFile(content, context)
    if not document.targets:
        file.add_error("empty_file", "the file has no targets", (), _EXAMPLE)
    endpoints: list[Endpoint] = []
    for index, target in enumerate(document.targets):
        endpoint = _create_endpoint(target, index, file, env, common)
        _check_for_duplicates(endpoint, index, endpoints, file)
        endpoints.append(endpoint)
    if context.errors:
        raise CombinedError(sort_errors(context.errors))
    return tuple(endpoints)


def _create_endpoint(
    target: WrittenTarget,
    index: int,
    file: _TargetsFile,
    env: Mapping[str, str],
    common: Endpoint,
) -> Endpoint:
    """Return the endpoint of one target of a targets file.

    An API key that cannot be read is added to the errors of the file.

    Args:
        target: The target as it is written in the file.
        index: Its index in the file, for error messages.
        file: The file.
        env: The environment, which may have the key.
        common: The key, GPUs, shape and region of targets that specify none of their own.
    """
    return Endpoint(
        url=target.url,
        name=target.name or Target.parse(target.url).address,
        api_key=_read_api_key(target, index, file, env, common.api_key),
        gpus=target.gpus or common.gpus,
        shape=common.shape if target.shape is None else target.shape,
        region=common.region if target.region is None else target.region,
        node=target.node,
    )


def _read_api_key(
    target: WrittenTarget,
    index: int,
    file: _TargetsFile,
    env: Mapping[str, str],
    common_key: str | None,
) -> str | None:
    """Return the API key of a target, or None if there is none.

    A variable that is not set and a file that cannot be read are added to the errors of the file.
    """
    if target.api_key_env is not None:
        name = target.api_key_env
        key = env.get(name)
        if not key:
            file.add_error(
                "unset_variable",
                f"{name} is not set",
                (index, "api_key_env"),
                f"export {name}=...",
                key=name,
            )
        return key or None
    if target.api_key_file is None:
        return common_key or env.get("OPENAI_API_KEY") or None
    key_file = file.context.directory / target.api_key_file
    try:
        return key_file.read_text("utf-8").strip() or None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        file.add_error(
            of_reading(error),
            f"{key_file}: {reason}",
            (index, "api_key_file"),
            "the file must contain only the key",
        )
        return None


def _check_for_duplicates(
    endpoint: Endpoint, index: int, earlier: Sequence[Endpoint], file: _TargetsFile
) -> None:
    """Add an error if an earlier target has the same name, or the same URL and key."""
    if any(other.name == endpoint.name for other in earlier):
        message = f"two targets are named {endpoint.name!r}"
        file.add_error("duplicate", message, (index,), "give each target its own name")
    same_server = [other for other in earlier if _is_same_server(other, endpoint)]
    if same_server:
        file.add_error(
            "duplicate",
            f"has the same URL and key as {same_server[0].name!r}",
            (index, "url"),
            "list each server once; otherwise its load counts twice",
        )


def _is_same_server(first: Endpoint, second: Endpoint) -> bool:
    """Return True if two targets have the same base URL and the same key."""
    return (
        first.api_key == second.api_key
        and Target.parse(first.url).redacted == Target.parse(second.url).redacted
    )


class NamedUrl(NamedTuple):
    """A target of `--url NAME=URL`, which serves the steps of tasks that name it."""

    name: str
    url: str


def split_named_url(text: str) -> NamedUrl | None:
    """Return the parts of `NAME=URL`, or None for a URL alone."""
    name, equals, url = text.partition("=")
    if not equals or not re.fullmatch(TARGET_NAME, name):
        return None
    return NamedUrl(name, url)


def check_urls_are_specified(urls: Sequence[str]) -> None:
    """Raise UserError if there is no URL, or if one is empty.

    A variable of a build that is not set makes an empty URL. A simulation in its place would pass
    the build without sending a request to the server.
    """
    if not urls:
        raise UserError("missing_option", "no target server is specified", "--url", URL_HINT)
    for text in urls:
        named = split_named_url(text)
        url = text if named is None else named.url
        if not url.strip():
            reason = "the URL is empty; is an environment variable unset?"
            raise UserError("missing_value", reason, f"--url {text!r}", URL_HINT)


def check_url(url: str, *, server: str = "auto") -> None:
    """Raise UserError for a URL of a single target that no run could use. Sends nothing."""
    if re.fullmatch("[0-9]+", url):
        raise UserError(
            "invalid_url",
            f"must be the URL of a server, not {url}",
            f"--url {url}",
            f"for {url} concurrent requests, use -c {url}",
        )
    backend = backends.get_backend_of_target(url)
    if backend.name != "http":
        return
    try:
        Target.parse(url, server=server)
    except TargetUnusable as error:
        raise UserError(error.code, str(error), "--url", error.hint) from None


def create_endpoints(urls: Sequence[str], common: Endpoint) -> tuple[Endpoint, ...]:
    """Return the endpoints of a repeated `--url`.

    Args:
        urls: The values of `--url`: URLs, or names with a URL like `NAME=URL`.
        common: The key and the machine that other options specify for all targets.

    Raises:
        CombinedError: With every URL that cannot be used or is repeated.
    """
    endpoints: list[Endpoint] = []
    errors: list[LoadgenError] = []
    for url in urls:
        with collecting(errors):
            endpoint = _create_endpoint_of_url(url, common)
            if any(_is_same_endpoint(endpoint, other) for other in endpoints):
                message = f"{endpoint.name} is specified twice"
                errors.append(UserError("duplicate", message, "--url", "specify each target once"))
            endpoints.append(endpoint)
    if errors:
        raise CombinedError(errors)
    return tuple(endpoints)


def _create_endpoint_of_url(text: str, common: Endpoint) -> Endpoint:
    """Return the endpoint of one `--url`, which is a URL or `NAME=URL`.

    A URL gets the key and the machine of `common`. A target with a name gets only the key, because
    it serves other steps of a task than the other targets, usually on another machine.

    Raises UserError for a URL that cannot be used, or not with others.
    """
    named_url = split_named_url(text)
    url = text if named_url is None else named_url.url
    _check_can_be_combined(url)
    address = _redacted_url(url)
    if named_url is None:
        return replace(common, url=url, name=address)
    return Endpoint(url=url, name=address, api_key=common.api_key, serves=named_url.name)


def _check_can_be_combined(url: str) -> None:
    """Raise UserError for a target that cannot be one of several, like a simulated one."""
    backend = backends.get_backend_of_target(url)
    if not backends.provides_target(backend):
        return
    reason = f"a target of {backend.name} must be the only target"
    if backend.virtual:
        reason = f"{url} is simulated and must be the only target"
    raise UserError("conflict", reason, "--url", "leave out the other targets")


def _redacted_url(url: str) -> str:
    """Return a URL without its password, as it is shown. Raises UserError if it cannot be used."""
    try:
        return Target.parse(url).redacted
    except TargetUnusable as error:
        raise UserError(error.code, str(error), "--url", error.hint) from None


def _is_same_endpoint(first: Endpoint, second: Endpoint) -> bool:
    """Return True if two endpoints have the same URL and serve the same steps of tasks."""
    return first.name == second.name and first.serves == second.serves
