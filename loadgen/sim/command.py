"""`loadgen sim`: serve the simulated endpoint in the foreground."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from loadgen.cli import completion, signals
from loadgen.cli.options import add_options
from loadgen.core.errors import UserError, of_reading


def _failure_names() -> list[str]:
    """Return the names of the failures that can be injected, for completion."""
    from loadgen.sim.server.fault_injection import FAILURE_EFFECTS

    return list(FAILURE_EFFECTS)


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    """The options of the simulated server, and a file with injected failures."""

    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, typer.Option(metavar="N", help="Port; 0 takes any free one.", min=0, max=65535)
    ] = 8000
    dialect: Annotated[
        Literal["trtllm", "openai"],
        typer.Option(metavar="API", help="Whose API: trtllm, openai."),
    ] = "trtllm"
    model: Annotated[str, typer.Option(metavar="NAME", help="Name in /v1/models.")] = "sim"
    preset: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=(
                "Physical model: gb300-vm, b200x8, ... or a YAML file; replaces the flags of time."
            ),
            autocompletion=completion.complete_choice(completion.list_presets),
        ),
    ] = ""
    version: Annotated[
        str,
        typer.Option(
            "--trtllm-version",
            metavar="VERSION",
            help="What /version says. Before 1.3, timings of requests are at /perf_metrics.",
        ),
    ] = "1.3.0"
    cores: Annotated[
        int, typer.Option(metavar="N", help="Processes behind the one port.", min=1, max=256)
    ] = 1
    ttft: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Time to first token: 120ms, normal:120ms,20ms or lognormal:120ms,0.25.",
        ),
    ] = "lognormal:120ms,0.25"
    itl: Annotated[
        str, typer.Option(metavar="TIME", help="Time between tokens, written likewise.")
    ] = "5ms"
    per_input_token: Annotated[
        str, typer.Option(metavar="TIME", help="Added to the time to first token per prompt token.")
    ] = "0"
    stream_interval: Annotated[
        int, typer.Option(metavar="N", help="Tokens per event after the first.", min=1)
    ] = 1
    slots: Annotated[
        int | None,
        typer.Option(metavar="N", help="Requests served at once; others queue.", min=1),
    ] = None
    lockstep: Annotated[
        bool, typer.Option("--lockstep", help="All streams emit at the same instants.")
    ] = False
    flood: Annotated[
        bool, typer.Option("--flood", help="No time between tokens, many events per write.")
    ] = False
    max_seq_len: Annotated[
        int, typer.Option(metavar="TOKENS", help="Prompt and answer together, in tokens.", min=2)
    ] = 131_072
    max_num_tokens: Annotated[
        int,
        typer.Option(metavar="TOKENS", help="Longest prompt, 0 for no limit of its own.", min=0),
    ] = 0
    seed: Annotated[
        int, typer.Option(metavar="N", help="Decides texts, lengths, times and faults.", min=0)
    ] = 0
    worse: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Share of the words of its answers that are other ones, as of a worse model.",
            min=0,
            max=1,
        ),
    ] = 0.0
    faults: Annotated[
        str,
        typer.Option(
            "--fault",
            metavar="NAME:SHARE",
            help="Faults and shares: truncate:0.05,http_429@2s:0.1.",
            autocompletion=completion.complete_choice(_failure_names),
        ),
    ] = ""
    faults_file: Annotated[
        str, typer.Option(metavar="FILE", help="The same as a YAML mapping from fault to share.")
    ] = ""
    api_key_file: Annotated[
        str, typer.Option(metavar="FILE", help="Any other key than in this file gets 401.")
    ] = ""
    cert: Annotated[
        str, typer.Option(metavar="FILE", help="Certificate (PEM); with --key: TLS.")
    ] = ""
    key: Annotated[str, typer.Option(metavar="FILE", help="Its private key (PEM).")] = ""
    log: Annotated[
        str, typer.Option(metavar="FILE", help="Write the send log to this file at the end.")
    ] = ""
    log_events: Annotated[
        Literal["none", "ends", "all"] | None,
        typer.Option(
            metavar="WHICH",
            help="Sends to log: none, ends (first and last token), all; ends with --log.",
        ),
    ] = None
    log_bodies: Annotated[
        bool, typer.Option("--log-bodies", help="Log the SHA-256 of request bodies.")
    ] = False


@add_options()
def sim(options: SimOptions) -> int:
    """Serve a simulated model over HTTP until Ctrl-C.

    Example: loadgen sim --preset gb300-vm --port 8000
    """
    from loadgen.sim.server.options import Options
    from loadgen.sim.server.process import serve

    values = vars(options).copy()
    failures = [options.faults, _read_failures_file(values.pop("faults_file"))]
    values["faults"] = ",".join(text for text in failures if text)
    values["log_events"] = options.log_events or ("ends" if options.log else "none")
    exit_code = serve(Options(**values))
    signals.ignore_signals()  # the server has stopped, and one more Ctrl-C changes nothing
    return exit_code


def _read_failures_file(path: str) -> str:
    """Convert the mapping in a YAML file to the text form of --fault, "" without a file.

    So both are parsed in the same way later. The mapping is checked here, so that an error names
    the file and not the flag. Raises UserError if the file is not such a mapping.
    """
    if not path:
        return ""
    from loadgen.core.workload.yaml_marks import plain_yaml
    from loadgen.sim.server.fault_injection import parse_failure_shares

    try:
        with open(path, encoding="utf-8") as file:
            shares = plain_yaml(file.read(), path)
    except (OSError, UnicodeDecodeError) as error:
        hint = "a YAML mapping such as {truncate: 0.05}"
        raise UserError(
            of_reading(error, "invalid_syntax"), f"cannot read the faults: {error}", path, hint
        ) from None
    if not isinstance(shares, dict):
        raise UserError(
            "wrong_type",
            "not a mapping from fault to share",
            path,
            "for example {truncate: 0.05, http_429@2s: 0.1}",
        )
    parse_failure_shares(shares, where=path)
    return ",".join(f"{name}:{share}" for name, share in shares.items())
