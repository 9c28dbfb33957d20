"""The command `loadgen sim`: serve a simulated model in the foreground."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from loadgen.cli import completion, signals
from loadgen.cli.options import add_options
from loadgen.core.errors import UserError, of_reading

if TYPE_CHECKING:
    from loadgen.sim.server.options import Options


def _failure_names() -> list[str]:
    """Return the names of the failures that can be injected, for completion."""
    from loadgen.sim.server.fault_injection import FAILURE_EFFECTS

    return list(FAILURE_EFFECTS)


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    """The options of the simulated server, and a file with injected failures."""

    host: Annotated[str, typer.Option(metavar="ADDRESS", help="IP address to listen on.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, typer.Option(metavar="N", help="Port; 0 picks a free one.", min=0, max=65535)
    ] = 8000
    api_flavor: Annotated[
        Literal["trtllm", "openai"],
        typer.Option("--dialect", metavar="API", help="Server to imitate: trtllm or openai."),
    ] = "trtllm"
    model: Annotated[str, typer.Option(metavar="NAME", help="Model name in /v1/models.")] = "sim"
    preset: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=(
                "Performance model: gb300-vm, b200x8, ... or a YAML file. Replaces --ttft, --itl "
                "and the other latency options."
            ),
            autocompletion=completion.complete_choice(completion.list_presets),
        ),
    ] = ""
    version: Annotated[
        str,
        typer.Option(
            "--trtllm-version",
            metavar="VERSION",
            help="Version in /version. Before 1.3, request timings are at /perf_metrics.",
        ),
    ] = "1.3.0"
    cores: Annotated[
        int, typer.Option(metavar="N", help="Server processes that share the port.", min=1, max=256)
    ] = 1
    ttft: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Time to first token: TIME, normal:MEAN,SD or lognormal:MEDIAN,SD_OF_LOGARITHM.",
        ),
    ] = "lognormal:120ms,0.25"
    itl: Annotated[
        str, typer.Option(metavar="TIME", help="Time between tokens, in the same format as --ttft.")
    ] = "5ms"
    per_input_token: Annotated[
        str, typer.Option(metavar="TIME", help="Additional TTFT for each prompt token.")
    ] = "0"
    stream_interval: Annotated[
        int, typer.Option(metavar="N", help="Tokens per event after the first.", min=1)
    ] = 1
    accepted_length: Annotated[
        float,
        typer.Option(
            metavar="N",
            help="Add counters of speculative decoding with N tokens per step to the metrics page.",
            min=0,
            max=65,
        ),
    ] = 0.0
    draft_tokens: Annotated[
        int,
        typer.Option(metavar="N", help="Tokens of each draft in these counters.", min=1, max=64),
    ] = 3
    slots: Annotated[
        int | None,
        typer.Option(metavar="N", help="Requests served at the same time; others queue.", min=1),
    ] = None
    lockstep: Annotated[
        bool, typer.Option("--lockstep", help="Send the tokens of all streams at the same times.")
    ] = False
    flood: Annotated[
        bool,
        typer.Option("--flood", help="Send tokens without delay, with many events per write."),
    ] = False
    max_seq_len: Annotated[
        int,
        typer.Option(metavar="TOKENS", help="Context length: prompt and output, in tokens.", min=2),
    ] = 131_072
    max_num_tokens: Annotated[
        int,
        typer.Option(metavar="TOKENS", help="Longest prompt; 0 for the context length.", min=0),
    ] = 0
    seed: Annotated[
        int,
        typer.Option(metavar="N", help="Seed of texts, lengths, latencies and failures.", min=0),
    ] = 0
    worse: Annotated[
        float,
        typer.Option(
            metavar="FRACTION",
            help="Fraction of output words to replace, to imitate a worse model.",
            min=0,
            max=1,
        ),
    ] = 0.0
    answers: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help=(
                "Answer the questions of this file rightly (chat and completions APIs), for "
                "loadgen run --check-answers FILE."
            ),
        ),
    ] = ""
    faults: Annotated[
        str,
        typer.Option(
            "--fault",
            metavar="NAME:FRACTION",
            help="Failures to inject and their fractions: truncate:0.05,http_429@2s:0.1.",
            autocompletion=completion.complete_choice(_failure_names),
        ),
    ] = ""
    faults_file: Annotated[
        str, typer.Option(metavar="FILE", help="YAML mapping from failures to fractions.")
    ] = ""
    api_key_file: Annotated[
        str, typer.Option(metavar="FILE", help="Accept only the API key in this file.")
    ] = ""
    cert: Annotated[
        str, typer.Option(metavar="FILE", help="Certificate (PEM) for TLS; needs --key.")
    ] = ""
    key: Annotated[str, typer.Option(metavar="FILE", help="Private key (PEM) of --cert.")] = ""
    log: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="Write the time of each sent event to this file at the end."
        ),
    ] = ""
    log_events: Annotated[
        Literal["none", "ends", "all"] | None,
        typer.Option(
            metavar="WHICH",
            help="Events to log: none, ends (first and last token), all. Default with --log: ends.",
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
    from loadgen.sim.server.process import serve

    exit_code = serve(_build_server_options(options))
    signals.ignore_signals()  # the server has stopped, and one more Ctrl-C changes nothing
    return exit_code


def _build_server_options(options: SimOptions) -> Options:
    """Return the options of the server for the options of the command.

    Both have the same fields, with two exceptions: the server has no `faults_file`, whose failures
    are added to `faults`, and the default of `log_events` depends on whether there is a log file.

    Raises:
        UserError: The file of failures cannot be used.
    """
    from loadgen.sim.server.options import Options

    server_values = asdict(options)
    del server_values["faults_file"]

    server_values["faults"] = _join_failures(options)
    if options.log_events is None:
        server_values["log_events"] = "ends" if options.log else "none"

    return Options(**server_values)


def _join_failures(options: SimOptions) -> str:
    """Return the failures of the option and of the file, for example `truncate:0.05,empty:0.1`."""
    failures = [options.faults] if options.faults else []
    if options.faults_file:
        fractions = _read_failures_file(options.faults_file)
        failures += [f"{name}:{fraction}" for name, fraction in fractions.items()]
    return ",".join(failures)


def _read_failures_file(path: str) -> dict[str, Any]:
    """Return the mapping from failures to their fractions in a YAML file.

    The server would find an invalid failure, too, but its error would name an option. So the
    failures are checked here, and the error names the file.

    Raises:
        UserError: The file cannot be read, or is not such a mapping.
        CombinedError: Some of the failures or fractions are not valid.
    """
    from loadgen.core.workload.yaml_marks import plain_yaml
    from loadgen.sim.server.fault_injection import parse_failure_fractions

    try:
        with open(path, encoding="utf-8") as file:
            fractions = plain_yaml(file.read(), path)
    except (OSError, UnicodeDecodeError) as error:
        error_code = of_reading(error, "invalid_syntax")
        hint = "write a YAML mapping, for example {truncate: 0.05}"
        raise UserError(error_code, f"cannot be read: {error}", path, hint) from None

    if not isinstance(fractions, dict):
        raise UserError(
            "wrong_type",
            "must be a mapping from failures to fractions",
            path,
            "for example {truncate: 0.05, http_429@2s: 0.1}",
        )

    parse_failure_fractions(fractions, where=path)
    return fractions
