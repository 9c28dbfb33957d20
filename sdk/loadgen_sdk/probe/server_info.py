"""Read what a server says about itself: its version, the engine behind it, the precision. Pure.

Only statements of the server are used. What it does not state stays empty, and nothing is concluded
from the names of models or files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from ..redaction import escape_controls
from ..wire_formats.server_profiles import ServerProfile
from .http_types import HttpResponse

_MAX_VALUE_CHARS = 60
_INFO_METRIC = re.compile(r"(?m)^[A-Za-z_:][\w:]*_info\{([^\n]*)\}\s")
_LABEL = re.compile(r'(\w+)="((?:[^"\\\n]|\\.){0,200})"')
_VERSION = re.compile(r'"version"\s*:\s*"([^"]{1,60})"')
_WEIGHT_PRECISION_NAMES = (
    "quantization",
    "quant_algo",
    "quant_method",
    "weights_dtype",
    "dtype",
    "torch_dtype",
    "model_ftype",
)
_KV_CACHE_PRECISION_NAMES = ("kv_cache_dtype", "cache_dtype", "kv_cache_quant_algo")
_VALUES_WITHOUT_MEANING = ("", "none", "null", "auto", "unknown")


class ServerInfo(msgspec.Struct, frozen=True):
    """What a server says about itself. A field is empty if the server does not say it."""

    version: str = ""
    engine: str = ""
    precision: str = ""


def parse_version(response: HttpResponse) -> str:
    """Return the version on the page /version, or an empty string."""
    match = _VERSION.search(response.page_text)
    return escape_controls(match[1]) if match else ""


def parse_server_info(profile: ServerProfile, version: str, page: str) -> ServerInfo:
    """Read the version, the engine and the precision from the information page of a server.

    The page is JSON, or it has metrics in the text format of Prometheus. Both have texts by names.

    Args:
        profile: The server profile. Its `version_field` is the name of the text with the version,
            and its `engine_pattern` finds the engine anywhere on the page, such as in the name of a
            metric. Each is "" if the page does not have it.
        version: The version that the page /version gave. If it is "", the version on the
            information page is used.
        page: The text of the information page, or "" if the server has none.
    """
    is_json = page.lstrip().startswith("{")
    texts_by_name = _read_json_texts(page) if is_json else _read_info_labels(page)
    if not version and profile.version_field:
        version = texts_by_name.get(profile.version_field, "")

    engine = ""
    if profile.engine_pattern:
        engine_match = re.search(profile.engine_pattern, page)
        if engine_match is not None:
            engine = engine_match[1]

    return ServerInfo(
        version=_printable_start(version),
        engine=_printable_start(engine),
        precision=_describe_precision(texts_by_name),
    )


def _describe_precision(texts_by_name: Mapping[str, str]) -> str:
    """Return the number formats of weights and KV cache, for example "NVFP4, KV cache fp8".

    What a server does not state is left out.

    Args:
        texts_by_name: The texts of the information page. Each server has other names for the number
            formats.
    """
    weight_precision = _first_meaningful(texts_by_name, _WEIGHT_PRECISION_NAMES)
    kv_cache_precision = _first_meaningful(texts_by_name, _KV_CACHE_PRECISION_NAMES)

    precisions = []
    if weight_precision:
        precisions.append(weight_precision)

    if kv_cache_precision:
        precisions.append(f"KV cache {kv_cache_precision}")

    return ", ".join(precisions)


def _first_meaningful(texts_by_name: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the first of the named texts that says something, unlike "auto" or "none", or ""."""
    for name in names:
        text = texts_by_name.get(name, "")
        if text.lower() not in _VALUES_WITHOUT_MEANING:
            return _printable_start(text)
    return ""


def _read_info_labels(page: str) -> dict[str, str]:
    """Return the labels of all `_info` metrics of a page in the text format of Prometheus.

    Such a metric has its information in labels: `vllm:cache_config_info{cache_dtype="fp8"} 1.0`.
    """
    labels: dict[str, str] = {}
    for metric in _INFO_METRIC.finditer(page):
        labels.update(_LABEL.findall(metric[1]))
    return labels


def _read_json_texts(page: str) -> dict[str, str]:
    """Return the top-level fields of a JSON object that are texts.

    Return an empty dictionary if the page is not a JSON object.
    """
    try:
        value = msgspec.json.decode(page)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {name: text for name, text in value.items() if isinstance(text, str)}


def _printable_start(text: str) -> str:
    """Return the beginning of a server's text without control characters, for a terminal."""
    return "".join(letter for letter in text[:_MAX_VALUE_CHARS] if letter.isprintable())
