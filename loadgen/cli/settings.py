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


def build_settings(options: Mapping[str, Any]) -> Settings:
    """Return the settings that the options of a run specify; other options have their defaults.

    The options of the load are read elsewhere, by `core/workload/flags.py`. Raises CombinedError
    with every error that was found.
    """
    errors: list[LoadgenError] = []
    values = _parse_values(options, errors)
    errors += _find_conflicts(values)

    # Some options are no fields of `Settings` themselves. They are removed from the values and
    # become other fields.
    urls: Sequence[str] = values.pop("url", ())
    targets_file: str | None = values.pop("targets", None)
    system: SystemDescription | None = values.pop("system", None)
    if system is not None:  # an option overrides the file
        values = system.target | values
    _set_implied_values(values)
    api_key = _pop_api_key(values, urls)

    endpoints: tuple[Endpoint, ...] = ()
    with collecting(errors):
        if targets_file is None and "embedded" not in values:
            targets.check_urls_are_specified(urls)
        common = _build_common_endpoint(values, api_key)
        endpoints = _load_endpoints(urls, targets_file, common, values.get("server", "auto"))
    api_keys = [api_key, *_list_api_keys(endpoints)]
    values["metadata"] = _build_metadata(values, system, api_keys, errors)
    if errors:
        raise CombinedError(errors)

    values["tls"] = _pop_tls(values)
    values |= _pop_output(values)
    url = endpoints[0].url if endpoints else next(iter(urls), None)
    return Settings(url=url, targets=endpoints, api_key=api_key, **values)


def _set_implied_values(values: dict[str, Any]) -> None:
    """Set the options that follow from others: workers on Ray, and no stream for some APIs."""
    if values.get("ray") is not None:
        values.setdefault("workers", 0)  # auto: as many as the nodes have cores
    if values.get("api") in NON_GENERATIVE_APIS:
        values["stream"] = False


def _pop_output(values: dict[str, Any]) -> dict[str, str | Path]:
    """Remove `out` from the values and return it as a folder or as the URL of an object store."""
    output: str | None = values.pop("out", None)
    if output is None:
        return {}
    is_url = "://" in output
    return {"store": output} if is_url else {"out": Path(output)}


def _parse_values(options: Mapping[str, Any], errors: list[LoadgenError]) -> dict[str, Any]:
    """Return the parsed values of the settings, and add errors for the others to `errors`."""
    values: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        value = options.get(name)
        if option.used_by != "settings" or value is None:
            continue
        with collecting(errors):
            try:
                values[name] = option.parse(value)
            except units.InvalidValueError as error:
                visible_value = "***" if name == "api_key" else value
                where = option.describe(name, visible_value)
                raise UserError(error.code, str(error), where, error.hint) from None
    return values


def _find_conflicts(values: Mapping[str, Any]) -> list[LoadgenError]:
    """Return an error for each two options that were specified but exclude each other."""
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


def _pop_api_key(values: dict[str, Any], urls: Sequence[str]) -> str | None:
    """Remove the options of the API key from the values and return the key.

    The key itself wins over a file, and a file over the environment.
    """
    key_in_file: str | None = values.pop("api_key_file", None)
    key: str | None = values.pop("api_key", None)
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
    """Return an endpoint with what the options say about all targets, and no URL."""
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
    """Return the endpoints of a targets file or of several URLs; () for a single URL or none.

    Raises LoadgenError or CombinedError for a URL or file that cannot be used.
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
    system: SystemDescription | None,
    api_keys: Sequence[str | None],
    errors: list[LoadgenError],
) -> tuple[tuple[str, str], ...]:
    """Return the metadata of the system file and of --metadata, and add errors to `errors`.

    A value that contains one of the API keys is an error, because metadata is shown to readers.
    """
    secrets = collect_secrets(api_keys, values.get("headers", ()))
    system_metadata = parse_metadata({} if system is None else system.metadata, secrets)
    option_metadata = parse_metadata(values.get("metadata", ()), secrets)
    errors += [*system_metadata.errors, *option_metadata.errors]
    return (*system_metadata.pairs, *option_metadata.pairs)


def _pop_tls(values: dict[str, Any]) -> Tls:
    """Remove the options of TLS from the values and return its settings."""
    return Tls(
        verify=not values.pop("insecure", False),
        ca=values.pop("cacert", None),
        cert=values.pop("cert", None),
        key=values.pop("key", None),
    )
