"""What a server says of itself: its version, the engine behind it, the precision of the model. Pure.

Only what an answer states is taken. What no answer states stays "": nothing is concluded from names or file names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from ..wire_formats.server_profiles import ServerProfile

_INFO = re.compile(r"(?m)^[A-Za-z_:][\w:]*_info\{([^\n]*)\}\s")
_LABEL = re.compile(r'(\w+)="((?:[^"\\\n]|\\.){0,200})"')
_WEIGHTS = (
    "quantization",
    "quant_algo",
    "quant_method",
    "weights_dtype",
    "dtype",
    "torch_dtype",
    "model_ftype",
)
_KV_CACHE = ("kv_cache_dtype", "cache_dtype", "kv_cache_quant_algo")
_UNTOLD = ("", "none", "null", "auto", "unknown")


class ServerInfo(msgspec.Struct, frozen=True):
    """ "" for what the server does not say."""

    version: str = ""
    engine: str = ""
    precision: str = ""


def parse_server_info(server_profile: ServerProfile, version: str, page: str) -> ServerInfo:
    """The facts in the text of the server's page. `version`: by /version; the page's own is taken where that is ""."""
    values = _json_values(page) if page.lstrip().startswith("{") else _labels(page)
    engine = (
        re.search(server_profile.engine_pattern, page) if server_profile.engine_pattern else None
    )
    said = version or (
        values.get(server_profile.version_field, "") if server_profile.version_field else ""
    )
    return ServerInfo(_short(said), _short(engine[1] if engine else ""), _precision(values))


def _precision(values: Mapping[str, str]) -> str:
    weights, kv_cache = (
        next(
            (_short(values[name]) for name in names if values.get(name, "").lower() not in _UNTOLD),
            "",
        )
        for names in (_WEIGHTS, _KV_CACHE)
    )
    return ", ".join(filter(None, (weights, f"KV cache {kv_cache}" if kv_cache else "")))


def _labels(page: str) -> dict[str, str]:
    """The labels of all info metrics."""
    return {
        name: value for match in _INFO.finditer(page) for name, value in _LABEL.findall(match[1])
    }


def _json_values(page: str) -> dict[str, str]:
    try:
        value = msgspec.json.decode(page)
    except (ValueError, RecursionError):
        return {}
    return (
        {name: text for name, text in value.items() if isinstance(text, str)}
        if isinstance(value, dict)
        else {}
    )


def _short(text: str) -> str:
    return "".join(letter for letter in text[:60] if letter.isprintable())
