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
from loadgen.core.errors import (
    Code,
    CombinedError,
    LoadgenError,
    UserError,
    closest,
    collecting,
    of_reading,
)
from loadgen.core.execution.plan import Endpoint
from loadgen.core.units import InvalidValueError
from loadgen.core.workload.diagnostics import locate, sort_errors, validate_document
from loadgen.core.workload.fields import Count
from loadgen.core.workload.file_models import FileContext, Part
from loadgen.core.workload.tasks import TARGET_NAME
from loadgen.core.workload.workload_files import read_yaml_text
from loadgen.core.workload.yaml_marks import Map, place_at, read_yaml

_EXAMPLE = "write a list: - {name: vm-01, url: http://...}"
"""A hint with a small valid targets file, for every error about a file that has no targets."""

NO_ENDPOINT = Endpoint(url="")
URL_HINT = "use --url http://HOST:8000, or --url sim:gb300-vm to simulate a server"


def _validate_url(url: str) -> str:
    """Check the URL of a target in a targets file, and return it unchanged, as pydantic expects.

    Raises units.InvalidValueError for a simulated target, which cannot be one of several, and for a
    URL that cannot be parsed.
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
    gpus: Count | None = None
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
        context: The name and folder of the file, and the errors that were found in it so far. All
            functions that check the file append to this one list.
    """

    content: Map
    context: FileContext

    def add_error(
        self, code: Code, message: str, place: Sequence[str | int], hint: str, *, key: str = ""
    ) -> None:
        """Add an error to those of the file.

        Args:
            code: The code of the error.
            message: What is wrong.
            place: Where in the file: keys and indices below `targets`, such as `(0, "url")`.
            hint: What to do about it.
            key: The name that the error is about, for programs that read errors.
        """
        node, path, _ = locate(self.content, ("targets", *place))
        position = place_at(self.context.file, node, path)
        self.context.errors.append(UserError(code, message, position, hint, key=key))


def load_targets(
    path: Path, env: Mapping[str, str] = os.environ, common: Endpoint = NO_ENDPOINT
) -> tuple[Endpoint, ...]:
    """Return the endpoints of a targets file, which is a list or a mapping with `targets:`.

    Every error in the file is collected before one exception is raised with all of them.

    Args:
        path: The file.
        env: The environment, which the file may refer to.
        common: The key, GPUs, shape and region of targets that specify none of their own.

    Raises:
        UserError: If the file cannot be read.
        CombinedError: With every error in the file.
    """
    kind = "targets file"  # the word for the file in error messages
    text = read_yaml_text(
        path,
        f"--targets {path}",
        kind,
        hint_if_missing=lambda: _EXAMPLE,
        hint_if_too_large=_EXAMPLE,
    )

    # A list at the top level is read as a mapping with the list under `targets`.
    content, errors = read_yaml(
        text, str(path), env, kind=kind, example=_EXAMPLE, key_of_list="targets"
    )

    # From here on, each check appends its errors to this list, which `context` refers to.
    context = FileContext(file=str(path), directory=path.parent, errors=errors)
    document = validate_document(WrittenTargets, content, context)
    if document is None:
        raise CombinedError(sort_errors(errors))

    targets_file = _TargetsFile(content, context)
    if not document.targets:
        targets_file.add_error("empty_file", "the file has no targets", (), _EXAMPLE)

    endpoints: list[Endpoint] = []
    for index, target in enumerate(document.targets):
        endpoint = _create_endpoint(target, index, targets_file, env, common)
        _check_for_duplicates(endpoint, index, endpoints, targets_file)
        endpoints.append(endpoint)

    if errors:
        raise CombinedError(sort_errors(errors))

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
        file: The file, which collects the errors.
        env: The environment, in which the variable `api_key_env` is looked up.
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

    The key is that of the variable or file which the target names. A target that names neither has
    the common key, or else the key in OPENAI_API_KEY. A named variable that is not set and a named
    file that cannot be read are added to the errors of the targets file.
    """
    if target.api_key_env is not None:
        variable_name = target.api_key_env
        key = env.get(variable_name)
        if not key:
            file.add_error(
                "unset_variable",
                f"{variable_name} is not set",
                (index, "api_key_env"),
                f"export {variable_name}=...",
                key=variable_name,
            )

        return key or None

    if target.api_key_file is None:
        return common_key or env.get("OPENAI_API_KEY") or None

    key_file = file.context.directory / target.api_key_file
    try:
        return key_file.read_text("utf-8").strip() or None
    except (OSError, UnicodeDecodeError) as error:
        error_code = of_reading(error)  # "missing_file", "unreadable_file" or "wrong_encoding"
        reason = error.strerror if isinstance(error, OSError) else "not text"
        file.add_error(
            error_code,
            f"{key_file}: {reason}",
            (index, "api_key_file"),
            "the file must contain only the key",
        )

        return None


def _check_for_duplicates(
    endpoint: Endpoint, index: int, earlier_endpoints: Sequence[Endpoint], file: _TargetsFile
) -> None:
    """Add an error to the file if an earlier target has the same name, or the same URL and key.

    Args:
        endpoint: The endpoint to check.
        index: The index of its target in the file, for error messages.
        earlier_endpoints: The endpoints of the targets before it.
        file: The file, which collects the errors.
    """
    if any(earlier.name == endpoint.name for earlier in earlier_endpoints):
        message = f"two targets are named {endpoint.name!r}"
        file.add_error("duplicate", message, (index,), "give each target its own name")

    same_servers = [earlier for earlier in earlier_endpoints if _is_same_server(earlier, endpoint)]
    if same_servers:
        file.add_error(
            "duplicate",
            f"has the same URL and key as {same_servers[0].name!r}",
            (index, "url"),
            "list each server once; otherwise its load counts twice",
        )


def _is_same_server(first: Endpoint, second: Endpoint) -> bool:
    """Return True if two targets have the same base URL and the same key."""
    return (
        first.api_key == second.api_key
        and Target.parse(first.url).redacted == Target.parse(second.url).redacted
    )


def select_endpoint(endpoints: Sequence[Endpoint], name: str, option: str) -> Endpoint:
    """Return the endpoint of a targets file with a name.

    Args:
        endpoints: The endpoints of the file.
        name: The name of the endpoint to use.
        option: The option that names it, with its value, for an error message.

    Raises:
        UserError: The file has no endpoint of this name.
    """
    endpoint_by_name = {endpoint.name: endpoint for endpoint in endpoints}
    if name in endpoint_by_name:
        return endpoint_by_name[name]

    hint = closest(name, [*endpoint_by_name]) or f"known: {', '.join(endpoint_by_name)}"
    raise UserError("unknown_name", f"no target is called {name}", where=option, hint=hint)


class NamedUrl(NamedTuple):
    """A target of `--url NAME=URL`.

    A task of a workload has steps, for example a search and an answer, and a step may name the
    target that it is sent to. The target with this name receives the steps that name it.
    """

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

    An environment variable that is not set makes an empty URL, as in `--url "$URL"`. If a server
    were simulated then, a CI job would pass without a request to the real server.
    """
    if not urls:
        raise UserError("missing_option", "no target server is specified", "--url", URL_HINT)
    for text in urls:
        named_url = split_named_url(text)
        url = text if named_url is None else named_url.url
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

    A plain URL is one of several equal servers, so it has everything that `common` specifies. A
    target with a name receives only the steps of tasks that name it. It usually runs another model
    on another machine, so it has the API key of `common`, but not its GPUs, shape and region.

    Args:
        text: The value of the option.
        common: The API key, GPUs, shape and region that other options specify for all targets.

    Raises:
        UserError: For a URL that cannot be used, or that must be the only target.
    """
    named_url = split_named_url(text)
    url = text if named_url is None else named_url.url
    _check_can_be_combined(url)
    display_name = _redacted_url(url)
    if named_url is None:
        return replace(common, url=url, name=display_name)

    step_target_name = named_url.name
    return Endpoint(url=url, name=display_name, api_key=common.api_key, serves=step_target_name)


def _check_can_be_combined(url: str) -> None:
    """Raise UserError for a target that cannot be one of several, like a simulated one.

    A backend that starts or simulates its target does so for one target only.
    """
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
    """Return True if two endpoints have the same URL and serve the same steps of tasks.

    The name of an endpoint of `--url` is its URL without the password.
    """
    return first.name == second.name and first.serves == second.serves
