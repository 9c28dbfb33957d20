"""The backend of `embedded` in Python: a simulated server over HTTP, in real time, while the run goes."""

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
    """The settings with the URL of an endpoint that serves while inside. Raises TargetError if it does not start."""
    simulation = embedded.start(Options(**_options(settings)))
    try:
        yield replace(settings, url=simulation.url)
    finally:
        simulation.stop()


def known(settings: Settings) -> KnownTarget:
    """What its options say of it. Raises UserError for a preset that there is not."""
    name = _options(settings).get("preset")
    if not name:
        return KnownTarget("embedded simulation")
    preset = load_preset(name)
    return KnownTarget(
        name=f"embedded simulation: {name}",
        words=preset.words,
        context=Context(preset.model.name, preset.limits.max_seq_len),
        notes=(
            f"simulated in real time: {preset.words}; prompt and answer have {preset.limits.max_seq_len:,} tokens at "
            f"most; with fewer than {preset.valid_from_sequences.value:,.0f} sequences per replica the model "
            "extrapolates",
        ),
        virtual_url=f"sim:{name}",
    )


def _options(settings: Settings) -> dict[str, Any]:
    return PHYSICAL if settings.embedded is None else settings.embedded
