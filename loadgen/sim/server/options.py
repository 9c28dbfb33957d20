"""The options of the simulated server as plain data, which a child process gets as JSON.

The command line and tests create them. All defaults are here.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PHYSICAL = {"preset": "gb300-vm"}
"""The options of a simulated server that uses the performance model of a whole machine."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulated server.

    Times are written as durations or distributions (`5ms`, `normal:5ms,1ms`,
    `lognormal:120ms,0.25`; see latency_model.py). `faults` are written as in fault_injection.py:
    `truncate:0.05,http_429@2s:0.1`.
    """

    host: str = "127.0.0.1"
    port: int = 0  # 0: the system picks a free port, and the ready line reports it
    api_flavor: Literal["trtllm", "openai"] = "trtllm"
    model: str = "sim"
    # Of TensorRT-LLM: returned by /version; decides where timings are (1.3: in the response).
    version: str = "1.3.0"
    # Physical engine (presets/); overrides ttft to lockstep, max_seq_len and max_num_tokens.
    preset: str = ""
    ttft: str = "lognormal:120ms,0.25"
    itl: str = "5ms"
    per_input_token: str = "0"  # added to the time to first token for each prompt token
    stream_interval: int = 1  # tokens per event after the first
    slots: int | None = None  # requests served at once, in order of arrival; None: no limit
    lockstep: bool = False  # all streams emit on multiples of `itl`, as a batching engine does
    flood: bool = False  # no time between tokens, many events in one write
    max_seq_len: int = 131_072
    max_num_tokens: int = 0  # longest prompt without chunked prefill; 0: only max_seq_len limits it
    seed: int = 0
    worse: float = 0.0  # share of output words that differ from those of a server without it
    watts: float = 0.0  # constant power that /energy_metrics counts; 0: not available
    # Counters of speculative decoding with this many tokens per step; 0: no such counters.
    accepted_length: float = 0.0
    draft_tokens: int = 3  # of each draft, with accepted_length
    answers: str = ""  # file of questions; those in it are answered rightly (chat, completions)
    faults: str = ""
    api_key_file: str = ""  # requests to /v1/ with another key than the one in this file get 401
    cert: str = ""  # PEM files; both given: TLS
    key: str = ""
    log_events: Literal["none", "ends", "all"] = "none"  # which sends are logged (see SendLog)
    log: str = ""  # file for the log, written at the end; if empty, GET /_log returns it
    log_bodies: bool = False  # the log contains the SHA-256 of every request body
    idle_close: str = "5s"  # uvicorn's keep-alive time, which trtllm-serve uses
    max_body_bytes: int = 64 << 20
    cores: int = 1  # processes that share the port; a preset's replicas are divided among them
    process_index: int = 0  # of this process, from 0
    # Response bytes buffered for a slow reader. Beyond it the connection is reset and counted.
    buffer_bytes: int = 8 << 20
