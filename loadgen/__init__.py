"""loadgen: a load generator for LLM inference endpoints.

The Python API is `loadgen.run`, `loadgen.arun`, `loadgen.load`, `loadgen.load_runs`,
`loadgen.Result` and the errors that they raise. It is imported on first use.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CombinedError", "LoadgenError", "Result", "arun", "load", "load_runs", "run"]


def __getattr__(name: str) -> Any:
    """Import the Python API, or read the version, when it is used for the first time (PEP 562).

    This keeps `import loadgen` fast, because the API imports numpy and msgspec.
    """
    if name in __all__:
        from loadgen import api

        return getattr(api, name)

    if name == "__version__":
        from importlib import metadata

        return metadata.version("loadgen")

    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, those that are not imported yet too."""
    return [*__all__, "__version__"]
