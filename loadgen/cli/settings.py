"""The settings of a run, from its options. Reads the files that options name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen_sdk.transport.tls import Tls
from loadgen_sdk.wire_formats.server_profiles import NON_GENERATIVE_APIS

from loadgen import backends
from loadgen.cli import targets
from loadgen.cli.run_options import OPTIONS
from loadgen.cli.user_metadata import collect_secrets, parse_metadata
from loadgen.core import units
from loadgen.core.errors import CombinedError, LoadgenError, UserError, collecting
from loadgen.core.execution.plan import Endpoint, Settings
from loadgen.core.execution.system_file import SystemDescription

API_KEY_VARIABLE = "OPENAI_API_KEY"
AZURE_API_KEY_VARIABLE = "AZURE_OPENAI_API_KEY"

REQUEST_SETTINGS = (
    "model",
    "server",
    "api",
    "stream",
    "extra_body",
    "tokenizer",
    "route",
    "session_header",
    "slo_headers",
    "reset_cache",
)
"""The settings, apart from the target, that change what is sent or how responses are read."""

_CONVERTED_OPTIONS = frozenset(
    {
        "url",
        "targets",
        "api_key",
        "api_key_file",
        "system",
        "metadata",
        "out",
        "insecure",
        "cacert",
        "cert",
        "key",
    }
)
"""Options from which `build_settings` computes fields of `Settings`.

The value of every other option is a field of `Settings` with the same name.
"""


def build_settings(options: Mapping[str, Any]) -> Settings:
    """Return the settings of a run from its options. What no option specifies has its default.

    The settings are what a run needs to know besides its load: the target, the keys, the output and
    so on. Options that specify the load, such as --request-rate, are ignored here. They are read by
    `core/workload/flags.py`.

    Args:
        options: The values of the options as they were typed, by their names in `OPTIONS`.

    Raises:
        CombinedError: With every error that was found.
    """
    errors: list[LoadgenError] = []
    specified_values = _parse_values(options, errors)
    errors += _find_conflicts(specified_values)
    values = _add_implied_values(specified_values)

    urls: Sequence[str] = values.get("url", ())
    targets_file: str | None = values.get("targets")
    api_key = _choose_api_key(values, urls)

    # A program that calls `loadgen.run` may use a simulator in its own process, without a URL.
    uses_embedded_simulator = "embedded" in values

    endpoints: tuple[Endpoint, ...] = ()
    with collecting(errors):
        if targets_file is None and not uses_embedded_simulator:
            targets.check_urls_are_specified(urls)
        common = _build_common_endpoint(values, api_key)
        endpoints = _load_endpoints(urls, targets_file, common, values.get("server", "auto"))

    api_keys = [api_key, *_list_api_keys(endpoints)]
    metadata = _build_metadata(values, api_keys, errors)
    if errors:
        raise CombinedError(errors)

    first_url = endpoints[0].url if endpoints else next(iter(urls), None)
    unconverted_values = {
        name: value for name, value in values.items() if name not in _CONVERTED_OPTIONS
    }
    return Settings(
        url=first_url,
        targets=endpoints,
        api_key=api_key,
        metadata=metadata,
        tls=_build_tls(values),
        **_build_output(values),
        **unconverted_values,
    )


def _add_implied_values(specified_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options together with the values that follow from them.

    A system file describes the target like the options --gpus, --shape and --region, which override
    it. A run on Ray uses all cores of its nodes, unless --workers is specified. Responses of an API
    that generates no text, such as embeddings, are not streamed.
    """
    system: SystemDescription | None = specified_values.get("system")
    values: dict[str, Any] = {} if system is None else dict(system.target)
    values.update(specified_values)

    if values.get("ray") is not None:
        values.setdefault("workers", 0)  # 0 stands for auto

    if values.get("api") in NON_GENERATIVE_APIS:
        values["stream"] = False

    return values


def _build_output(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of `Settings` for --out: `out` for a folder, `store` for a URL.

    Without --out, there is neither, and the run creates a new folder.
    """
    output: str | None = values.get("out")
    if output is None:
        return {}
    is_url = "://" in output
    return {"store": output} if is_url else {"out": Path(output)}


def _parse_values(options: Mapping[str, object], errors: list[LoadgenError]) -> dict[str, object]:
    """Return the values of the specified options that are settings, converted by their parsers.

    An option whose value is not accepted is left out, and its error is added to `errors`.

    Args:
        options: The values of all options as they were typed, by name.
        errors: The errors found so far.
    """
    values: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        value = options.get(name)
        is_setting = option.used_by == "settings"
        if not is_setting or value is None:
            continue

        with collecting(errors):
            try:
                values[name] = option.parse(value)
            except units.InvalidValueError as error:
                visible_value = "***" if name == "api_key" else value
                where = option.describe(name, visible_value)
                raise UserError(error.code, str(error), where, error.hint) from None

    return values


def _find_conflicts(values: Mapping[str, object]) -> list[LoadgenError]:
    """Return an error for each pair of specified options that cannot be combined."""
    errors: list[LoadgenError] = []
    if values.get("targets") is not None and values.get("url"):
        errors.append(
            UserError(
                "conflict",
                "--url and --targets cannot be combined",
                "--targets",
                "put all URLs into the targets file",
            )
        )

    if values.get("ray") is not None and "sources" in values:
        errors.append(
            UserError(
                "unsupported",
                "sources cannot be used with --ray, because each node has other IP addresses",
                "--set sources",
                "leave out sources or --ray",
            )
        )

    return errors


def _choose_api_key(values: Mapping[str, Any], urls: Sequence[str]) -> str | None:
    """Return the API key of the run, or None if there is none.

    The key itself, which only the Python API accepts, wins over the content of a key file, and the
    file over the environment.
    """
    key: str | None = values.get("api_key")
    key_in_file: str | None = values.get("api_key_file")
    return key or key_in_file or _read_api_key_variable(values.get("server"), urls)


def _read_api_key_variable(server: str | None, urls: Sequence[str]) -> str | None:
    """Return the API key of the environment, or None if there is none.

    A simulated endpoint needs no key, so that none is stored where it could leak.
    """
    first_url = urls[0] if urls else None
    backend = backends.find_backend_of_target(first_url)
    if backend is not None and backend.simulated:
        return None

    is_azure = server == "azure" or (first_url is not None and "azure.com" in first_url)
    if is_azure:
        azure_key = os.environ.get(AZURE_API_KEY_VARIABLE)
        if azure_key:
            return azure_key

    return os.environ.get(API_KEY_VARIABLE) or None


def _build_common_endpoint(values: Mapping[str, Any], api_key: str | None) -> Endpoint:
    """Return an endpoint without a URL, with the key and the machine that all targets share."""
    return Endpoint(
        url="",
        api_key=api_key,
        gpus=values.get("gpus"),
        shape=values.get("shape", ""),
        region=values.get("region", ""),
    )


def _load_endpoints(
    urls: Sequence[str], targets_file: str | None, common: Endpoint, server: str
) -> tuple[Endpoint, ...]:
    """Return the endpoints of a run with several targets, or () for a single URL or none.

    A single URL is checked, but it needs no `Endpoint`: it becomes the `url` of the settings.

    Args:
        urls: The values of --url.
        targets_file: The path of the targets file, which replaces the URLs. None without one.
        common: The key and the machine of targets that specify none of their own.
        server: The kind of server of a single URL, or "auto".

    Raises:
        LoadgenError: For a URL or file that cannot be used.
        CombinedError: With several such errors.
    """
    if targets_file is not None:
        return targets.load_targets(Path(targets_file), common=common)

    has_named_url = any(targets.split_named_url(url) is not None for url in urls)
    if len(urls) > 1 or has_named_url:
        return targets.create_endpoints(urls, common)

    if urls:
        targets.check_url(urls[0], server=server)

    return ()


def _list_api_keys(endpoints: Sequence[Endpoint]) -> list[str | None]:
    """Return the API keys of endpoints and of the environment. Missing keys are None."""
    keys = [endpoint.api_key for endpoint in endpoints]
    keys.append(os.environ.get(AZURE_API_KEY_VARIABLE))
    keys.append(os.environ.get(API_KEY_VARIABLE))
    return keys


def _build_metadata(
    values: Mapping[str, Any],
    api_keys: Sequence[str | None],
    errors: list[LoadgenError],
) -> tuple[tuple[str, str], ...]:
    """Return the pairs of keys and values of the system file and of --metadata.

    Errors are added to `errors`. A value that contains an API key or the secret of a header is one,
    because metadata is shown to the readers of a report.
    """
    system: SystemDescription | None = values.get("system")
    secrets = collect_secrets(api_keys, values.get("headers", ()))
    system_metadata = parse_metadata({} if system is None else system.metadata, secrets)
    option_metadata = parse_metadata(values.get("metadata", ()), secrets)
    errors += [*system_metadata.errors, *option_metadata.errors]
    return (*system_metadata.pairs, *option_metadata.pairs)


def _build_tls(values: Mapping[str, Any]) -> Tls:
    """Return how connections are encrypted, from --insecure, --cacert, --cert and --key."""
    return Tls(
        verify=not values.get("insecure", False),
        ca=values.get("cacert"),
        cert=values.get("cert"),
        key=values.get("key"),
    )


def request_options(settings: Settings) -> dict[str, str]:
    """Return the settings that change the requests and differ from their default, as text.

    They are part of the plan of a command that can be resumed, because results of other requests
    must not be mixed with its own. Defaults are left out, so that a new setting does not make old
    plans differ.
    """
    defaults = type(settings)()
    options = {}
    for name in REQUEST_SETTINGS:
        value = getattr(settings, name)
        if value != getattr(defaults, name):
            options[name] = str(value)
    return options
