"""Certificates, proxies, names and addresses that fail or change, before and under load."""

from __future__ import annotations

import datetime
import select
import ssl
from collections.abc import Callable
from pathlib import Path

import trustme
from host_rows import hostile
from relay import Relay
from scene import FULL_RESULT, LENIENT, NOTHING, UNHARMED, Row, Scene, unhurried

RUN = (
    "run w.yaml --url {url} --request-rate 60/s -n 150 --warmup 0 --server-metrics off --energy "
    "off --out out"
)
TLS, SLOWLY = f"{RUN} --cacert ca.pem", f"{RUN} {LENIENT}"
TLS_SLOWLY = f"{TLS} {LENIENT}"
BAD_GATEWAY = (
    b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 15\r\nConnection: close\r\n\r\n<html>no</html>"
)
YESTERDAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)


def papers(
    folder: Path, authority: trustme.CA, *names: str, expired: bool = False
) -> Callable[[ssl.SSLContext], None]:
    """Return a function that gives a certificate of these names to a context."""
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return authority.issue_cert(*names, not_after=YESTERDAY if expired else None).configure_cert


def certificate(name: str, **how: bool) -> Callable[[Scene], None]:
    """Use a wrong certificate from the start."""

    def do(scene: Scene) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        papers(scene.folder, trustme.CA(), name, **how)(context)
        with Relay(scene.url, tls=context) as relay:
            scene.url = f"https://127.0.0.1:{relay.port}"
            scene.go(TLS)
            scene.ended()

    return do


def rotated(same_authority: bool, **how: bool) -> Callable[[Scene], None]:
    """Replace the server's certificate in mid-run and drop its connections, as a restart does."""

    def do(scene: Scene) -> None:
        authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        papers(scene.folder, authority, "127.0.0.1")(context)
        with Relay(scene.url, tls=context) as relay:
            scene.url = f"https://127.0.0.1:{relay.port}"
            scene.go(TLS_SLOWLY)
            scene.loading()
            later = authority if same_authority else trustme.CA()
            later.issue_cert("127.0.0.1", not_after=YESTERDAY if how else None).configure_cert(
                context
            )
            _breaks(relay)
            scene.ended()

    return do


def behind(
    change: Callable[[Relay], object], env: dict[str, str] | None = None, command: str = RUN
) -> Callable[[Scene], None]:
    """Change a relay under load."""

    def do(scene: Scene) -> None:
        with Relay(scene.url) as relay:
            scene.url = f"http://127.0.0.1:{relay.port}"
            scene.go(command, env)
            scene.loading()
            change(relay)
            scene.ended()

    return do


def _breaks(relay: Relay) -> None:
    """Drop all connections four times.

    About thirty requests are in flight at the slow server, and more than 1 % of all have to fail.
    """
    for _ in range(4):
        relay.drop()
        select.select([], [], [], 0.05)


def _fails(relay: Relay) -> None:
    relay.instead = BAD_GATEWAY
    relay.drop()


def _holds(relay: Relay) -> None:
    relay.hold = 4096


def named(under_load: str | None, command: str = RUN) -> Callable[[Scene], None]:
    """Change the address of a name under load, when the old one no longer responds.

    An empty `under_load` removes the address; None stands for no address from the start.
    """

    def do(scene: Scene) -> None:
        with Relay(scene.url, hosts=("127.0.0.1", "127.0.0.2")) as relay:
            scene.url = f"http://moves.test:{relay.port}"
            attack = hostile(scene)
            if under_load is not None:
                attack.tell("address", "127.0.0.1")
            scene.go(command, attack.env)
            scene.loading()
            if under_load:
                attack.tell("address", under_load)
                relay.close("127.0.0.1")
                relay.drop()
            elif under_load == "":
                attack.untell("address")
            scene.ended()

    return do


def over_ipv6(scene: Scene) -> None:
    """Use a server that listens on IPv6 only."""
    with Relay(scene.url, hosts=("::1",)) as relay:
        scene.url = f"http://[::1]:{relay.port}"
        scene.go(SLOWLY)
        scene.ended()


def ipv6_first(scene: Scene) -> None:
    """Use `localhost`, which is ::1 first on hosts with IPv6, for a server on 127.0.0.1 only."""
    scene.url = scene.url.replace("127.0.0.1", "localhost")
    scene.go(SLOWLY)


def rows() -> list[Row]:
    start, load = "before the load", "under load"
    return [
        Row(
            "tls-expired",
            "certificate expired",
            TLS,
            start,
            (3,),
            "expired",
            NOTHING,
            certificate("127.0.0.1", expired=True),
            True,
        ),
        Row(
            "tls-name",
            "certificate of another name",
            TLS,
            start,
            (3,),
            "mismatch",
            NOTHING,
            certificate("other.test"),
        ),
        Row(
            "tls-rotated",
            "new certificate of the same authority, connections break",
            TLS_SLOWLY,
            load,
            (1,),
            "truncated",
            FULL_RESULT,
            unhurried(rotated(True)),
        ),
        Row(
            "tls-stranger",
            "new certificate of a strange authority, connections break",
            TLS_SLOWLY,
            load,
            (1,),
            "tls",
            FULL_RESULT,
            unhurried(rotated(False)),
            True,
        ),
        Row(
            "tls-expires",
            "new certificate has expired, connections break",
            TLS_SLOWLY,
            load,
            (1,),
            "expired",
            FULL_RESULT,
            unhurried(rotated(True, expired=True)),
        ),
        Row(
            "proxy-502",
            "the proxy answers 502 from then on",
            SLOWLY,
            load,
            (1,),
            "http_5xx",
            FULL_RESULT,
            unhurried(behind(_fails, command=SLOWLY)),
        ),
        Row(
            "proxy-drops",
            "the proxy breaks all connections",
            SLOWLY,
            load,
            (1,),
            "truncated",
            FULL_RESULT,
            unhurried(behind(_breaks, command=SLOWLY)),
        ),
        Row(
            "proxy-holds",
            "the proxy holds answers back, 4 KiB at a time",
            SLOWLY,
            load,
            (0,),
            "not reported",
            UNHARMED,
            unhurried(behind(_holds, command=SLOWLY)),
        ),
        Row(
            "proxy-named",
            "`HTTP_PROXY` names a dead proxy",
            SLOWLY,
            start,
            (0,),
            "",
            UNHARMED,
            unhurried(
                behind(
                    lambda _: None,
                    dict.fromkeys(("HTTP_PROXY", "http_proxy"), "http://127.0.0.1:1"),
                    SLOWLY,
                )
            ),
        ),
        Row(
            "dns-none", "the name has no address", RUN, start, (3,), "resolve", NOTHING, named(None)
        ),
        Row(
            "dns-gone",
            "the name loses its address",
            SLOWLY,
            load,
            (0,),
            "was 127.0.0.1 before the load and no address at its end",
            UNHARMED,
            unhurried(named("", SLOWLY)),
        ),
        Row(
            "dns-moves",
            "the name moves to another address, the old one is dead",
            SLOWLY,
            load,
            (1,),
            "was 127.0.0.1 before the load and 127.0.0.2 at its end",
            FULL_RESULT,
            unhurried(named("127.0.0.2", SLOWLY)),
        ),
        Row(
            "ipv6",
            "the server has IPv6 alone",
            SLOWLY,
            start,
            (0,),
            "",
            UNHARMED,
            unhurried(over_ipv6),
        ),
        Row(
            "ipv6-dead",
            "the first address of the name, an IPv6 one, is dead",
            SLOWLY,
            start,
            (0,),
            "",
            UNHARMED,
            unhurried(ipv6_first),
        ),
    ]
