"""The backend `embedded`: a simulated server over HTTP that runs as long as the load."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from loadgen.core.execution.context import Context, KnownTarget
from loadgen.core.execution.plan import Settings
from loadgen.sim.presets.preset import load_preset
from loadgen.sim.server import embedded
from loadgen.sim.server.options import PHYSICAL, Options


@contextlib.contextmanager
def serve(settings: Settings) -> Iterator[Settings]:
    """Run a simulated server as long as the `with` block, and yield the settings with its URL.

    Raises TargetError if the server does not start.
    """
    server = embedded.start(Options(**_server_options(settings)))
    try:
        yield replace(settings, url=server.url)
    finally:
        server.stop()


def describe_target(settings: Settings) -> KnownTarget:
    """Return what is known of the simulated server from its options, without a request.

    A server with drawn latencies has only a name. Raises UserError if the options name a preset
    that does not exist.
    """
    name = _server_options(settings).get("preset")
    if not name:
        return KnownTarget("embedded simulation")
    preset = load_preset(name)
    note = (
        f"simulated in real time: {preset.description}; context length "
        f"{preset.limits.max_seq_len:,} tokens; with fewer than "
        f"{preset.valid_from_sequences.value:,.0f} sequences per replica the model extrapolates"
    )
    return KnownTarget(
        name=f"embedded simulation: {name}",
        description=preset.description,
        context=Context(preset.model.name, preset.limits.max_seq_len),
        notes=(note,),
        virtual_url=f"sim:{name}",
    )


def _server_options(settings: Settings) -> dict[str, Any]:
    return PHYSICAL if settings.embedded is None else settings.embedded
