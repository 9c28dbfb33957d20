"""`loadgen run`: run one workload against one or several endpoints and print the results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadgen.cli import target
from loadgen.cli.repeats import Repeat, RepeatMost, RepeatPause, RepeatWithin

if TYPE_CHECKING:
    from loadgen.workload.flags import Overrides

LOAD, TARGET, REQUESTS, CONTROL, OUTPUT = "Load", "Target", "Requests", "Control", "Output"


ConcurrencyRamp = Annotated[
    str | None,
    typer.Option(
        "--concurrency-ramp",
        "--concurrency-ramp-duration",
        help="Closed loop: lanes begin one after the other, evenly over this time; 0: all at once. "
        "Without it: over the length of an answer.",
    ),
]


def run(
    workload: Annotated[
        str | None,
        typer.Argument(help="A workload file, or the name of a packaged one: qa, rag, summarization, agentic."),
    ] = None,
    url: target.Urls = None,
    targets: target.TargetsFile = None,
    route: target.RouteTo = "auto",
    on_target_failure: target.OnTargetFailure = "continue",
    model: target.Model = None,
    server: target.Server = "auto",
    api: target.Api = "chat",
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            "--trace-path",
            help="Replay a trace: its arrivals, lengths and shared beginnings, in the place of the workload's.",
        ),
    ] = None,
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
    concurrency_ramp: ConcurrencyRamp = None,
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
    grace: target.Grace = None,
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
    salt: target.Salt = None,
    limit: Annotated[
        list[str] | None, typer.Option("--limit", help="Change a limit of the verdict: send_lag_share:10%. Stored.")
    ] = None,
    repeat: Repeat = None,
    repeat_most: RepeatMost = None,
    repeat_within: RepeatWithin = None,
    repeat_pause: RepeatPause = None,
    workers: target.ManyWorkers = None,
    ray: target.Ray = None,
    source: target.Sources = None,
    keep: target.Keep = "raw",
    tokenizer: target.Tokenizer = None,
    extra_body: target.ExtraBody = None,
    header: target.Header = None,
    api_key_file: target.ApiKeyFile = None,
    cacert: target.CaCert = None,
    cert: target.Cert = None,
    cert_key: target.CertKey = None,
    insecure: target.Insecure = False,
    no_stream: target.NoStream = False,
    client: target.Client = "wire",
    server_metrics: target.ServerMetrics = None,
    gpus: target.Gpus = None,
    shape: target.Shape = "",
    region: target.Region = "",
    metadata: target.Metadata = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            "--output-artifact-dir",
            "--result-dir",
            help="Results folder; without it a new one in results/. s3://, az://, gs://, file://...: copied there at "
            "the end.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json instead of the table.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="A progress line instead of the live view; also where no terminal is.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 3 where the run cannot decide the SLO; without it that exits 0.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, send nothing.")] = False,
) -> int:
    """Drive a workload at an endpoint; print latencies, throughput, goodput and a verdict.

    Exit: 0 done and SLO met (or undecided: see --strict), 1 SLO missed, 2 wrong usage, 3 unreachable or not valid,
    70 bug, 130 interrupted.
    """
    from loadgen.cli.repeats import repetition
    from loadgen.errors import Faults, UserError
    from loadgen.results.object_store import is_url
    from loadgen.workload.flags import Overrides, levels
    from loadgen.workload.loading import given as load
    from loadgen.workload.overrides import placed

    overrides = Overrides(
        request_rate=request_rate, burstiness=burstiness, max_in_flight=max_in_flight, num_requests=num_requests,
        concurrency_ramp=concurrency_ramp,
        duration=duration, warmup=warmup, num_warmups=num_warmups, grace=grace, timeout=timeout,
        stall_timeout=stall_timeout, slo=tuple(slo or ()), goodput=tuple(goodput or ()), input_tokens=input_tokens,
        output_tokens=output_tokens, seed=seed, schedule_seed=schedule_seed, salt=salt, limit=tuple(limit or ()),
    )  # fmt: skip
    faults: list[Any] = []
    settings = how = None
    try:
        how = repetition(repeat, repeat_most, repeat_within, repeat_pause)
    except Faults as found:
        faults += found.faults
    try:
        settings = target.given(
            locals(), stream=not no_stream, client=client, keep=keep, ray=ray,
            out=None if out is None or is_url(out) else Path(out), store=out if out and is_url(out) else None,
        )  # fmt: skip
    except Faults as found:
        faults += found.faults
    try:
        steps: list[int | None] = [*levels(concurrency)] if concurrency else [None]
        workloads = [load(workload, trace, _with_concurrency(overrides, level)) for level in steps]
        if len(steps) > 1:  # levels of one seed must not send each other's prompts
            workloads = [placed(one, f"c{level}") for one, level in zip(workloads, steps, strict=True)]
        if len(workloads) > 1 and repeat is not None:
            hint = "loadgen sweep ... --repeat runs several levels again and again; or give one level"
            raise UserError("several levels, each to be repeated", f"--repeat {repeat}", hint)
    except Faults as found:
        faults += found.faults
    except UserError as fault:
        faults.append(fault)
    if faults or settings is None or how is None:
        raise Faults(faults)
    from loadgen.cli.show import Show, say

    show = Show(as_json=as_json, plain=plain, strict=strict)
    if dry_run:
        if repeat is not None:
            say(f"runs: {how.words}")
        return show.plans(workloads, settings)
    if repeat is not None:
        return show.repeats(workloads[0], settings, how)
    return show.levels(workloads, settings) if len(workloads) > 1 else show.one(workloads[0], settings)


def _with_concurrency(overrides: Overrides, level: int | None) -> Overrides:
    from dataclasses import replace

    return overrides if level is None else replace(overrides, concurrency=level)
