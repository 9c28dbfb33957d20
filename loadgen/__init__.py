"""loadgen: measures what users of an LLM endpoint feel. `loadgen.run`, `loadgen.arun`, `loadgen.load`,
`loadgen.load_runs`, `loadgen.Result`, and the faults that they raise; docs/reference/sdk.md.

Nothing is imported before it is used.
"""

from __future__ import annotations

from typing import Any

__all__ = ["LoadgenError", "CombinedError", "Result", "arun", "load", "load_runs", "run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from loadgen import api

        return getattr(api, name)
    if name == "__version__":
        from importlib import metadata

        return metadata.version("loadgen")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
