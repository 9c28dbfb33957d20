"""The backend `embedded`: a simulated server over HTTP that runs as long as the load."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from loadgen.core.execution.context import Context, KnownTarget
from loadgen.core.execution.plan import Settings
from loadgen.sim.presets.preset import Preset, load_preset
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

    Of a server with a preset, the machine, the model and the context length are known. A server
    without a preset only draws latencies at random, and describes no machine.

    Raises:
        UserError: The preset does not exist or cannot be read.
        CombinedError: There are errors in the file of the preset.
    """
    preset_name = _server_options(settings).get("preset")
    if not preset_name:
        return KnownTarget("embedded simulation")

    preset = load_preset(preset_name)
    return KnownTarget(
        name=f"embedded simulation: {preset_name}",
        description=preset.description,
        context=Context(preset.model.name, preset.limits.max_seq_len),
        notes=(_describe_simulation(preset),),
        virtual_url=f"sim:{preset_name}",
    )


def _describe_simulation(preset: Preset) -> str:
    """Return the note for the manifest about what is simulated, and where the model is valid."""
    max_tokens = preset.limits.max_seq_len
    min_sequences = preset.valid_from_sequences.value
    return (
        f"simulated in real time: {preset.description}; context length {max_tokens:,} tokens; "
        f"with fewer than {min_sequences:,.0f} sequences per replica the model extrapolates"
    )


def _server_options(settings: Settings) -> dict[str, Any]:
    """Return the options of the simulated server, or those of a whole machine by default."""
    return PHYSICAL if settings.embedded is None else settings.embedded
