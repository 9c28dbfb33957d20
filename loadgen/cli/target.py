"""The flags about the target, equal for every command that uses one, and their conversion to `Settings`.

The types are for signatures (`url: target.Urls = None`). Commands that drive load call `given`, others `settings`.
Both check all flags and raise all faults together.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loadgen.execution.plan import Settings

_URL_FLAGS = ("--url", "-u", "--base-url", "--target")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        "-u",
        "--base-url",
        "--target",
        help="Endpoint, with or without a path prefix and /v1; or sim:PRESET, a simulated one in virtual time. "
        "Without it: an embedded simulation of a GB300 VM, in real time.",
    ),
]
Urls = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        "-u",
        "--base-url",
        "--target",
        help="Endpoint, with or without a path prefix and /v1; repeat it for several. sim:PRESET: a simulated one, in "
        "virtual time. Without it: an embedded simulation of a GB300 VM, in real time.",
    ),
]
TargetsFile = Annotated[
    Path | None,
    typer.Option("--targets", help="A YAML list of endpoints: name, url, api_key_env, gpus, shape, region."),
]
RouteTo = Annotated[
    str,
    typer.Option(
        "--route", help="With several targets: round-robin, least-in-flight, or sticky per conversation; auto chooses."
    ),
]
OnTargetFailure = Annotated[
    str, typer.Option("--on-target-failure", help="When a target stops answering: continue, or stop the run.")
]
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="Model name; without it the only one that the server lists.")
]
Server = Annotated[
    str,
    typer.Option(
        "--server",
        "--backend",
        help="auto, trtllm, vllm, sglang, dynamo, llamacpp, transformers, openai, azure or generic.",
    ),
]
Api = Annotated[str, typer.Option("--api", "--endpoint-type", help="chat or completions.")]
Workers = Annotated[
    str, typer.Option("--workers", help="Worker processes on this machine, or auto: as many as the load can use.")
]
ManyWorkers = Annotated[
    str | None,
    typer.Option(
        "--workers",
        help="Worker processes on this machine (1 without the flag), or auto: as many as the load can use. With --ray: "
        "on the nodes of the cluster, auto without the flag.",
    ),
]
Ray = Annotated[
    str | None,
    typer.Option("--ray", help="Run the workers on a Ray cluster: auto, or HOST:PORT of its head. docs/cluster.md."),
]
Keep = Annotated[
    str,
    typer.Option(
        "--keep",
        help="raw: a record of every request. sample, histogram: of some, of none, for runs of hours, with quantiles "
        "within 0.1 %.",
    ),
]
Sources = Annotated[
    list[str] | None,
    typer.Option("--source", help="Local address to send from. Repeatable: each has local ports of its own."),
]
Tokenizer = Annotated[
    str | None, typer.Option("--tokenizer", help="A local tokenizer.json (or its folder) of the model.")
]
ExtraBody = Annotated[
    str | None,
    typer.Option("--extra-body", "--extra-request-body", help="JSON merged into every request body, last."),
]
Header = Annotated[list[str] | None, typer.Option("--header", "-H", help="NAME: VALUE or NAME=VALUE. Repeatable.")]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option("--api-key-file", help="A file with the key; else OPENAI_API_KEY (AZURE_OPENAI_API_KEY)."),
]
CaCert = Annotated[Path | None, typer.Option("--cacert", help="PEM file of the authority to trust.")]
Cert = Annotated[Path | None, typer.Option("--cert", help="PEM file of the client certificate, with its key.")]
CertKey = Annotated[Path | None, typer.Option("--key", help="PEM file of its key, where it is apart.")]
Insecure = Annotated[bool, typer.Option("--insecure", "-k", help="Do not verify the server's certificate.")]
NoStream = Annotated[bool, typer.Option("--no-stream", help="Ask for whole answers; TTFT is then the whole answer.")]
ServerMetrics = Annotated[
    list[str] | None,
    typer.Option(
        "--server-metrics",
        help="The servers' own metrics pages, read once a second: auto (where they usually are), off, URLs "
        "(repeatable), or drain: trtllm-serve's JSON /metrics, which each read empties for everybody.",
    ),
]
Client = Annotated[
    str, typer.Option("--client", help="wire (this project's), or openai: the openai package, for reference.")
]
Gpus = Annotated[
    int | None, typer.Option("--gpus", min=1, help="GPUs behind the endpoint, for per-GPU and cost figures.")
]
Shape = Annotated[str, typer.Option("--shape", help="Its machine shape, as in a price list.")]
Region = Annotated[str, typer.Option("--region", help="Its region.")]


def given(flags: Mapping[str, Any], **rest: Any) -> Settings:
    """Return `settings` from the parameters (`locals()`) of a command that drives load, at one or several endpoints.

    rest: flags that only some of these commands have. Raises Faults.
    """
    target_flags = (
        "route", "on_target_failure", "model", "server", "api", "workers", "tokenizer", "extra_body", "api_key_file",
        "cacert", "cert", "cert_key", "insecure", "server_metrics", "gpus", "shape", "region",
    )  # fmt: skip
    return settings(
        urls=flags["url"], targets_file=flags["targets"], headers=flags["header"] or [], sources=flags["source"],
        **{name: flags[name] for name in target_flags}, **rest,
    )  # fmt: skip


def settings(
    *,
    headers: list[str],
    extra_body: str | None,
    api_key_file: Path | None,
    cacert: Path | None,
    cert: Path | None,
    cert_key: Path | None,
    insecure: bool,
    workers: str | None,
    server: str,
    api: Any,
    client: Any,
    url: str | None = None,
    urls: list[str] | None = None,
    targets_file: Path | None = None,
    route: Any = "auto",
    on_target_failure: Any = "continue",
    sources: list[str] | None = None,
    server_metrics: list[str] | None = None,
    **rest: Any,
) -> Settings:
    """Check all flags about the target and return the settings. Raises Faults."""
    import json

    from loadgen_sdk.dialects.quirks import APIS, NAMES
    from loadgen_sdk.transport.wire import Tls

    from loadgen.errors import Fault, Faults, UserError
    from loadgen.execution import targets
    from loadgen.execution.plan import Endpoint, Settings
    from loadgen.server_metrics import scraper

    faults: list[Fault] = []

    def check_choice(value: str, known: tuple[str, ...], flag: str) -> None:
        if value not in known:
            faults.append(UserError(f"unknown value {value!r}", f"{flag} {value}", f"known: {', '.join(known)}"))

    check_choice(server, NAMES, "--server")
    check_choice(api, APIS, "--api")
    check_choice(client, ("wire", "openai"), "--client")
    check_choice(rest.get("keep", "raw"), ("raw", "sample", "histogram"), "--keep")
    check_choice(route, ("auto", "round-robin", "least-in-flight", "sticky"), "--route")
    check_choice(on_target_failure, ("continue", "stop"), "--on-target-failure")
    if (fault := scraper.check(server_metrics or ())) is not None:
        faults.append(fault)
    if targets_file is not None and (urls or url):
        faults.append(UserError("--url and --targets exclude each other", "--targets", "put every url into the file"))
    if url and sum(flag in _URL_FLAGS for flag in (argument.partition("=")[0] for argument in sys.argv)) > 1:
        faults.append(
            UserError("this command takes one endpoint", "--url", "several: loadgen run, or one address for all")
        )
    urls = urls or ([url] if url else [])
    header_pairs = []
    for text in headers:
        colon, equals = text.find(":"), text.find("=")
        separator = min((index for index in (colon, equals) if index > 0), default=-1)
        if separator < 0:
            faults.append(UserError("a header without a value", "--header", "write NAME: VALUE"))
            continue
        name, value = text[:separator].strip(), text[separator + 1 :].strip()
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            flag_shown = "--header" if not _HEADER_NAME.fullmatch(name) else f"--header {name}: ***"
            problem = "a header with a character that HTTP cannot carry"
            faults.append(UserError(problem, flag_shown, "printable Latin-1 only"))
        elif name.lower() in ("content-length", "transfer-encoding"):
            problem = "a header that says how long the body is: only the client knows"
            faults.append(UserError(problem, f"--header {name}", "leave it out"))
        else:
            header_pairs.append((name, value))
    extra_fields = None
    if extra_body is not None:
        try:
            extra_fields = json.loads(extra_body)
            if not isinstance(extra_fields, dict):
                raise ValueError("not an object")
        except ValueError as error:
            faults.append(
                UserError(f"not a JSON object: {error}", "--extra-body", "write --extra-body '{\"temperature\": 0}'")
            )
    worker_count = 1
    ray = rest.get("ray")
    workers = workers or ("auto" if ray is not None else "1")
    if workers == "auto":
        worker_count = 0
    elif workers.isdigit() and int(workers) > 0:
        worker_count = int(workers)
    else:
        faults.append(
            UserError(f"{workers!r} is no number of workers", f"--workers {workers}", "a number from 1, or auto")
        )
    if sources and ray is not None:
        faults.append(UserError("local addresses differ from node to node", "--source", "leave out --source or --ray"))
    if sources and client == "openai":
        faults.append(UserError("the openai package does not choose its local address", "--source", "--client wire"))
    for flag, path in (("--cacert", cacert), ("--cert", cert), ("--key", cert_key)):
        if path is not None and not path.is_file():
            faults.append(UserError("no such file", f"{flag} {path}", "give a PEM file"))
    key = None
    try:
        key = _api_key(api_key_file, server, urls[0] if urls else None)
    except OSError as error:
        faults.append(UserError(f"cannot read the key: {error.strerror}", f"--api-key-file {api_key_file}", ""))
    endpoints: tuple[Endpoint, ...] = ()
    try:
        if targets_file is not None:
            defaults = Endpoint(
                url="",
                api_key=key,
                gpus=rest.get("gpus"),
                shape=rest.get("shape") or "",
                region=rest.get("region") or "",
            )
            endpoints = targets.load_targets(targets_file, common=defaults)
        elif len(urls) > 1:
            endpoints = targets.from_urls(
                urls, key, rest.get("gpus"), rest.get("shape") or "", rest.get("region") or ""
            )
    except Faults as several:
        faults += several.faults
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
        headers=tuple(header_pairs),
        extra_body=extra_fields,
        workers=worker_count,
        sources=tuple(sources or ()),
        server_metrics=tuple(server_metrics or ("auto",)),
        api_key=key,
        tls=tls,
        url=endpoints[0].url if endpoints else urls[0] if urls else None,
        targets=endpoints,
        route=route,
        on_target_failure=on_target_failure,
        command=tuple(_without_secrets(sys.argv, key)),
        **rest,
    )


def _api_key(file: Path | None, server: str, url: str | None) -> str | None:
    """The API key from the file, else from the environment; None for simulated endpoints unless a file is given."""
    if file is not None:
        return file.read_text().strip() or None
    if url is None or url.startswith("sim:"):
        return None
    names = ["OPENAI_API_KEY"]
    if server == "azure" or "azure.com" in url:
        names.insert(0, "AZURE_OPENAI_API_KEY")
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _without_secrets(arguments: list[str], key: str | None) -> list[str]:
    from loadgen_sdk.transport.target import redact

    safe: list[str] = ["loadgen", *arguments[1:]]
    for i, argument in enumerate(safe):
        if safe[i - 1] in ("--header", "-H"):
            name = argument.partition("=" if "=" in argument and ":" not in argument else ":")[0]
            safe[i] = f"{name}: ***"
        elif argument.startswith(("--header=", "-H=")):
            safe[i] = f"{argument.partition('=')[0]}=***"
        elif "://" in argument:
            safe[i] = _redacted_url(argument)
    return [redact(argument, [key] if key else []) for argument in safe]


def _redacted_url(argument: str) -> str:
    from loadgen_sdk.errors import TargetUnusable
    from loadgen_sdk.transport.target import Target

    flag, equals, url = argument.rpartition("=") if argument.startswith("--") else ("", "", argument)
    try:
        return flag + equals + Target.parse(url).redacted
    except TargetUnusable:
        return flag + equals + "***"
