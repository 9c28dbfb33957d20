"""Texts about the servers: what their metrics pages reported, and the energy used. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from loadgen.core import format

if TYPE_CHECKING:
    from loadgen.core.server_metrics.energy import EnergyUse
    from loadgen.core.server_metrics.series import ServerTotals


def describe_energy(energy: EnergyUse) -> list[str]:
    """Return phrases about the energy used during steady load: per token and request, and power.

    The energy comes from the metrics pages of the servers, or from another source that the last
    phrase names. If nothing was measured, the only phrase is the reason.
    """
    if energy.joules is None or energy.watts is None:
        return [energy.missing_reason or "no page reports the power of the accelerators"]

    phrases = [
        *_energy_per_work(energy, energy.joules),
        _describe_power(energy, energy.watts),
        *_hardware_state(energy),
    ]
    devices = "" if energy.devices is None else f", {format.counted(energy.devices, 'GPU')}"
    return [*phrases, f"source: {energy.source}{devices}"]


def _energy_per_work(energy: EnergyUse, used_joules: float) -> Iterator[str]:
    """Yield the energy per output token and request, and the output per watt, where known.

    `used_joules` is the energy that the accelerators used during the measurement. It is known up to
    `energy.error_j` joules, which are stated as a percentage of it.
    """
    relative_error = (energy.error_j or 0.0) / used_joules if used_joules else 0.0
    if energy.joules_per_output_token is not None:
        per_token = format.quantity(energy.joules_per_output_token)
        yield f"{per_token} J/output token (± {format.percent(relative_error)})"

    if energy.joules_per_request is not None:
        yield f"{format.quantity(energy.joules_per_request)} J/request"

    if energy.output_tokens_per_s_per_watt is not None:
        yield f"{format.quantity(energy.output_tokens_per_s_per_watt)} output tok/s per W"


def _describe_power(energy: EnergyUse, watts: float) -> str:
    text = f"power {format.quantity(watts)} W on average"
    if energy.watts_max is not None:
        text += f", {format.quantity(energy.watts_max)} W maximum"
    if energy.declared_watts is not None:
        text += f" ({format.quantity(energy.declared_watts)} W declared)"
    return text


def _hardware_state(energy: EnergyUse) -> Iterator[str]:
    """Yield the clock of the GPUs, why it was lowered, their memory, and the power of the host."""
    if energy.clock_mhz is not None and energy.clock_min_mhz is not None:
        yield f"clock {energy.clock_mhz:,.0f} MHz on average, {energy.clock_min_mhz:,.0f} minimum"

    for reason, share in energy.throttled.items():
        yield f"{reason} in {format.percent(share)} of the readings"

    if energy.memory_used_gib is not None:
        yield f"memory {format.quantity(energy.memory_used_gib)} GiB maximum"

    if energy.host_joules is not None and energy.window_s:
        yield f"host {format.quantity(energy.host_joules / energy.window_s)} W"


def describe_server(server: ServerTotals) -> list[str]:
    """Return phrases about the metrics pages of the servers.

    The first one compares the number of output tokens that the servers counted with that of the
    client.
    """
    phrases = []
    if server.output_tokens is not None:
        counted = format.counted(server.output_tokens, "output token")
        phrases.append(f"{counted} counted by the server, {_describe_client_count(server)}")

    if server.running_max is not None:
        phrases.append(f"up to {format.count(server.running_max)} running")

    if server.waiting_max is not None:
        phrases.append(f"up to {format.count(server.waiting_max)} queued")

    if server.kv_use_max is not None:
        phrases.append(f"KV cache up to {format.percent(server.kv_use_max)} full")

    phrases.append(_describe_reads(server))
    return phrases


def _describe_client_count(server: ServerTotals) -> str:
    client_tokens = server.client_output_tokens
    if client_tokens is None:
        return "unknown to the client"
    if client_tokens == server.output_tokens:
        return "the same by the client"
    difference = format.difference(client_tokens, server.output_tokens)
    return f"{format.count(client_tokens)} by the client ({difference})"


def _describe_reads(server: ServerTotals) -> str:
    reads = sum(page.reads for page in server.pages)
    failed = sum(page.failed for page in server.pages)
    text = format.counted(reads, "read")
    return f"{text}, {format.count(failed)} failed" if failed else text
