"""`loadgen doctor`: check a target and this host before a run, and explain what each finding means."""

from __future__ import annotations

from typing import Annotated

import typer

from loadgen.cli import target


def doctor(
    url: target.Url = None,
    model: target.Model = None,
    server: target.Server = "auto",
    api: target.Api = "chat",
    tokenizer: target.Tokenizer = None,
    extra_body: target.ExtraBody = None,
    header: target.Header = None,
    api_key_file: target.ApiKeyFile = None,
    cacert: target.CaCert = None,
    cert: target.Cert = None,
    cert_key: target.CertKey = None,
    insecure: target.Insecure = False,
    no_stream: target.NoStream = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Check reachability, TLS, key, model, token counts, forced lengths, streaming, metrics pages, and this host.

    About a dozen small requests. Exit: 0 a load can run (read the warnings), 2 wrong usage, 3 it cannot.
    """
    settings = target.settings(
        url=url, model=model, server=server, api=api, headers=header or [], extra_body=extra_body,
        api_key_file=api_key_file, cacert=cacert, cert=cert, cert_key=cert_key, insecure=insecure,
        stream=not no_stream, client="wire", tokenizer=tokenizer, workers="1",
    )  # fmt: skip
    from loadgen.errors import OK, UNSOUND
    from loadgen.preflight import doctor as checks
    from loadgen.preflight.target_checks import render

    title, findings = checks.run(settings)
    if as_json:
        import msgspec

        print(msgspec.json.encode({"title": title, "findings": findings}).decode())
    else:
        print(render(title, findings), end="")
    return UNSOUND if checks.failed(findings) else OK
