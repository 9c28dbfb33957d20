"""What the embedded endpoint can be told, as one value: written by the command line and by tests, read by the child.

Plain data that travels as JSON on a command line; no defaults hide elsewhere.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PHYSICAL = {"preset": "gb300-vm"}
"""What a run without a URL is held against: a whole machine's physics, not a fixed pace."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulated server. Texts of time are `duration` or `law` (see pace.py): `5ms`, `normal:5ms,1ms`,
    `lognormal:120ms,0.25`; `faults` as in faults.py, `truncate:0.05,http_429@2s:0.1`."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: the system picks one, the ready line names it
    dialect: Literal["trtllm", "openai"] = "trtllm"
    model: str = "sim"
    version: str = "1.3.0"  # of TensorRT-LLM: what /version says, and where timings are found (1.3: with the answer)
    preset: str = ""  # physical engine (presets/); replaces ttft to lockstep, max_seq_len and max_num_tokens
    ttft: str = "lognormal:120ms,0.25"
    itl: str = "5ms"
    per_input_token: str = "0"  # added to the time to first token for each prompt token
    stream_interval: int = 1  # tokens per event after the first
    slots: int | None = None  # requests served at once, others wait in order; None: no limit
    lockstep: bool = False  # all streams emit on multiples of `itl`, as a batching engine does
    flood: bool = False  # no time between tokens, FLOOD_EVENTS in one write
    max_seq_len: int = 131_072
    max_num_tokens: int = 0  # longest prompt as without chunked prefill; 0: only max_seq_len bounds it
    seed: int = 0
    faults: str = ""
    api_key_file: str = ""  # openai: any other key than the one in this file gets 401
    cert: str = ""  # PEM files; both given: TLS
    key: str = ""
    log_events: Literal["none", "ends", "all"] = "none"  # which sends are logged: none, first and last, all
    log: str = ""  # file to write the log to at the end; without one, GET /_log has it
    log_bodies: bool = False  # the log names the SHA-256 of every request body
    idle_close: str = "5s"  # uvicorn's keep-alive time, as trtllm-serve has it
    max_body_bytes: int = 64 << 20
    cores: int = 1  # processes behind the one port; a preset's replicas are dealt out among them
    core: int = 0  # which of them this one is
    buffer_bytes: int = 8 << 20  # unread answer kept for one slow reader; beyond, it is cut and counted

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return msgspec.json.encode(self).decode()


def from_json(text: str | bytes) -> Options:
    """The inverse of `to_json`; raises msgspec.ValidationError."""
    return msgspec.json.decode(text, type=Options)
