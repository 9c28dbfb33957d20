"""`loadgen run`: drive one workload at one endpoint and print what is true of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from loadgen.run import Settings
    from loadgen.workload.overrides import Overrides

LOAD, TARGET, REQUESTS, CONTROL, OUTPUT = "Load", "Target", "Requests", "Control", "Output"


def run(
    workload: Annotated[
        str, typer.Argument(help="A workload file, or the name of a packaged one: qa, rag, summarization, agentic.")
    ],
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            "-u",
            "--base-url",
            help="Endpoint, with or without a path prefix and /v1. Without it: the embedded simulation.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model name; without it the only one that the server lists.")
    ] = None,
    server: Annotated[
        str,
        typer.Option(
            "--server",
            "--backend",
            help="auto, trtllm, vllm, sglang, dynamo, llamacpp, transformers, openai, azure or generic.",
        ),
    ] = "auto",
    api: Annotated[str, typer.Option("--api", "--endpoint-type", help="chat or completions.")] = "chat",
    request_rate: Annotated[
        str | None, typer.Option("--request-rate", "--rate", help="Open loop: arrivals per second (10, 600/min, inf).")
    ] = None,
    burstiness: Annotated[
        str | None,
        typer.Option(
            "--burstiness", "--arrival-smoothness", help="Gamma shape of the gaps; 1 is Poisson, below 1 burstier."
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            "-c",
            "--max-concurrency",
            "--parallel",
            help="Closed loop: lanes. A list (1,2,4,8) runs one level after the other.",
        ),
    ] = None,
    max_in_flight: Annotated[
        str | None,
        typer.Option("--max-in-flight", help="Open loop: a start above this many in flight is dropped and counted."),
    ] = None,
    num_requests: Annotated[
        str | None,
        typer.Option("--num-requests", "--num-prompts", "--request-count", "-n", help="Stop after this many."),
    ] = None,
    duration: Annotated[
        str | None,
        typer.Option(
            "--duration", "--benchmark-duration", "-d", help="Stop after this long (30s, 5m; bare numbers are seconds)."
        ),
    ] = None,
    warmup: Annotated[
        str | None, typer.Option("--warmup", help="Unmeasured load before: a time (10s), a count (20req), or 0.")
    ] = None,
    num_warmups: Annotated[
        str | None,
        typer.Option(
            "--num-warmups", "--warmup-requests", "--warmup-request-count", help="Unmeasured requests before."
        ),
    ] = None,
    grace: Annotated[
        str | None, typer.Option("--grace", help="How long requests in flight may go on after the end of the load.")
    ] = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", help="Longest time for one request, from its due instant.")
    ] = None,
    stall_timeout: Annotated[
        str | None, typer.Option("--stall-timeout", help="Longest silence within a stream.")
    ] = None,
    slo: Annotated[
        list[str] | None, typer.Option("--slo", help="ttft:2s, tpot:200ms:p95, goodput:99%. Repeatable.")
    ] = None,
    goodput: Annotated[list[str] | None, typer.Option("--goodput", help="ttft:2000 tpot:200, in milliseconds.")] = None,
    input_tokens: Annotated[
        str | None,
        typer.Option("--input-tokens", "--isl", "--random-input-len", help="Prompt length, replacing the file's."),
    ] = None,
    output_tokens: Annotated[
        str | None,
        typer.Option("--output-tokens", "--osl", "--random-output-len", help="Output length, replacing the file's."),
    ] = None,
    seed: Annotated[
        str | None,
        typer.Option(
            "--seed", "--random-seed", help="Of lengths, texts and arrivals; without it a fresh one, printed."
        ),
    ] = None,
    schedule_seed: Annotated[
        str | None,
        typer.Option("--schedule-seed", help="Of Poisson arrivals alone, as MLPerf LoadGen's schedule_rng_seed."),
    ] = None,
    limit: Annotated[
        list[str] | None, typer.Option("--limit", help="Change a limit of the verdict: send_lag_share:10%. Stored.")
    ] = None,
    workers: Annotated[str, typer.Option("--workers", help="Worker processes on this machine, or auto.")] = "1",
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="A local tokenizer.json (or its folder) of the model.")
    ] = None,
    extra_body: Annotated[
        str | None,
        typer.Option("--extra-body", "--extra-request-body", help="JSON merged into every request body, last."),
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", help="NAME: VALUE or NAME=VALUE. Repeatable.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", help="A file with the key; else OPENAI_API_KEY (AZURE_OPENAI_API_KEY)."),
    ] = None,
    cacert: Annotated[Path | None, typer.Option("--cacert", help="PEM file of the authority to trust.")] = None,
    cert: Annotated[
        Path | None, typer.Option("--cert", help="PEM file of the client certificate, with its key.")
    ] = None,
    cert_key: Annotated[Path | None, typer.Option("--key", help="PEM file of its key, where it is apart.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", "-k", help="Do not verify the server's certificate.")] = False,
    no_stream: Annotated[
        bool, typer.Option("--no-stream", help="Ask for whole answers; TTFT is then the whole answer.")
    ] = False,
    client: Annotated[
        str, typer.Option("--client", help="wire (this project's), or openai: the openai package, for reference.")
    ] = "wire",
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="GPUs behind the endpoint, for per-GPU and cost figures.")
    ] = None,
    shape: Annotated[str, typer.Option("--shape", help="Its machine shape, as in a price list.")] = "",
    region: Annotated[str, typer.Option("--region", help="Its region.")] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            "--output-artifact-dir",
            "--result-dir",
            help="Results folder; without it a new one in results/.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json instead of the table.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, send nothing.")] = False,
) -> int:
    """Drive a workload at an endpoint; print latencies, throughput, goodput and a verdict.

    Exit: 0 done and SLO met, 1 SLO missed, 2 wrong usage, 3 unreachable or not valid, 70 bug, 130 interrupted.
    """
    from loadgen.errors import Faults, UserError
    from loadgen.workload import load
    from loadgen.workload.overrides import Overrides, levels

    overrides = Overrides(
        request_rate=request_rate, burstiness=burstiness, max_in_flight=max_in_flight, num_requests=num_requests,
        duration=duration, warmup=warmup, num_warmups=num_warmups, grace=grace, timeout=timeout,
        stall_timeout=stall_timeout, slo=tuple(slo or ()), goodput=tuple(goodput or ()), input_tokens=input_tokens,
        output_tokens=output_tokens, seed=seed, schedule_seed=schedule_seed, limit=tuple(limit or ()),
    )  # fmt: skip
    faults: list[Any] = []
    settings = None
    try:
        settings = _settings(
            url=url, model=model, server=server, api=api, headers=header or [], extra_body=extra_body,
            api_key_file=api_key_file, cacert=cacert, cert=cert, cert_key=cert_key, insecure=insecure,
            stream=not no_stream, client=client, tokenizer=tokenizer, workers=workers, gpus=gpus, shape=shape,
            region=region, out=out,
        )  # fmt: skip
    except Faults as found:
        faults += found.faults
    try:
        steps: list[int | None] = [*levels(concurrency)] if concurrency else [None]
        workloads = [load(workload, _with(overrides, level)) for level in steps]
    except Faults as found:
        faults += found.faults
    except UserError as fault:
        faults.append(fault)
    if faults or settings is None:
        raise Faults(faults)
    from loadgen.cli.show import Show

    show = Show(as_json=as_json)
    if dry_run:
        return show.plans(workloads, settings)
    return show.levels(workloads, settings) if len(workloads) > 1 else show.one(workloads[0], settings)


def _with(overrides: Overrides, level: int | None) -> Overrides:
    from dataclasses import replace

    return overrides if level is None else replace(overrides, concurrency=level)


def _settings(
    *,
    headers: list[str],
    extra_body: str | None,
    api_key_file: Path | None,
    cacert: Path | None,
    cert: Path | None,
    cert_key: Path | None,
    insecure: bool,
    workers: str,
    server: str,
    api: Any,
    client: Any,
    **rest: Any,
) -> Settings:
    """The flags that are about the target, checked together. Raises Faults."""
    import json

    from loadgen_sdk.dialects.quirks import APIS, NAMES
    from loadgen_sdk.wire import Tls

    from loadgen.errors import Faults, UserError
    from loadgen.run import Settings

    faults = []

    def one_of(value: str, known: tuple[str, ...], flag: str) -> None:
        if value not in known:
            faults.append(UserError(f"unknown value {value!r}", f"{flag} {value}", f"known: {', '.join(known)}"))

    one_of(server, NAMES, "--server")
    one_of(api, APIS, "--api")
    one_of(client, ("wire", "openai"), "--client")
    pairs = []
    for text in headers:
        colon, equals = text.find(":"), text.find("=")
        at = min((place for place in (colon, equals) if place > 0), default=-1)
        if at < 0:
            faults.append(UserError("a header without a value", "--header", "write NAME: VALUE"))
        else:
            pairs.append((text[:at].strip(), text[at + 1 :].strip()))
    body = None
    if extra_body is not None:
        try:
            body = json.loads(extra_body)
            if not isinstance(body, dict):
                raise ValueError("not an object")
        except ValueError as error:
            faults.append(
                UserError(f"not a JSON object: {error}", "--extra-body", "write --extra-body '{\"temperature\": 0}'")
            )
    count = 1
    if workers == "auto":
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    elif workers.isdigit() and int(workers) > 0:
        count = int(workers)
    else:
        faults.append(
            UserError(f"{workers!r} is no number of workers", f"--workers {workers}", "a number from 1, or auto")
        )
    for flag, path in (("--cacert", cacert), ("--cert", cert), ("--key", cert_key)):
        if path is not None and not path.is_file():
            faults.append(UserError("no such file", f"{flag} {path}", "give a PEM file"))
    key = None
    try:
        key = _key(api_key_file, server, rest.get("url"))
    except OSError as error:
        faults.append(UserError(f"cannot read the key: {error.strerror}", f"--api-key-file {api_key_file}", ""))
    if faults:
        raise Faults(faults)
    tls = Tls(
        verify=not insecure,
        ca=str(cacert) if cacert else None,
        cert=str(cert) if cert else None,
        key=str(cert_key) if cert_key else None,
    )
    return Settings(
        server=server,
        api=api,
        client=client,
        headers=tuple(pairs),
        extra_body=body,
        workers=count,
        api_key=key,
        tls=tls,
        command=tuple(_without_secrets(sys.argv, key)),
        **rest,
    )


def _key(file: Path | None, server: str, url: str | None) -> str | None:
    """From the file, else from the environment; never for the embedded endpoint."""
    if file is not None:
        return file.read_text().strip() or None
    if url is None:
        return None
    names = ["OPENAI_API_KEY"]
    if server == "azure" or "azure.com" in url:
        names.insert(0, "AZURE_OPENAI_API_KEY")
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _without_secrets(arguments: list[str], key: str | None) -> list[str]:
    from loadgen_sdk.target import redact

    shown: list[str] = ["loadgen", *arguments[1:]]
    for i, argument in enumerate(shown):
        if shown[i - 1] in ("--header", "-H"):
            name = argument.partition("=" if "=" in argument and ":" not in argument else ":")[0]
            shown[i] = f"{name}: ***"
        elif argument.startswith(("--header=", "-H=")):
            shown[i] = f"{argument.partition('=')[0]}=***"
        elif "://" in argument:
            shown[i] = _redacted_url(argument)
    return [redact(argument, [key] if key else []) for argument in shown]


def _redacted_url(argument: str) -> str:
    from loadgen_sdk.errors import TargetUnusable
    from loadgen_sdk.target import Target

    flag, equals, url = argument.rpartition("=") if argument.startswith("--") else ("", "", argument)
    try:
        return flag + equals + Target.parse(url).redacted
    except TargetUnusable:
        return flag + equals + "***"
