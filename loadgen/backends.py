"""The backends of a run, one row each: what answers at a target, who sends the load, what is known without asking.

A leaf, like every table: a row names its functions as text. `core/execution/backend.py` calls them.
"""

from __future__ import annotations

import re

from msgspec import Struct

from loadgen.core.errors import UserError
from loadgen.plugins import OpenTable

_SCHEME = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]*):(?!\d+(?:/|$))(.*)", re.DOTALL
)  # host:port has none


class BackendRow(Struct, frozen=True):
    """One backend. A function is text, `module:function`; what a backend does not have is left out.

    Of a target. schemes: of the URLs that ask for it; "": there is no URL. shown: the target in words, {} is what
    follows the scheme; "": the URL says it. simulated: a model of a server answers. virtual: in virtual time.
    known: (settings) `core.execution.context.KnownTarget`, without asking the target.
    fills: (workload, settings) the rate that about fills the target, without asking it; a search begins there.
    serve: (settings) a context manager of the settings with the URL of a target that it starts, and stops at its end.
    run: (workload, settings, folder, tell) carries out the whole run in its folder; returns the Summary. It
    is for targets that no HTTP reaches; without it the load is sent over HTTP.

    Of who sends over HTTP. flag: the field of the settings that asks for it; "": nothing has to.
    senders: (settings) a context manager of `core.execution.backend.Senders`.
    """

    name: str
    schemes: tuple[str, ...] = ()
    shown: str = ""
    simulated: bool = False
    virtual: bool = False
    known: str = ""
    fills: str = ""
    serve: str = ""
    run: str = ""
    flag: str = ""
    senders: str = ""


BACKENDS: OpenTable[BackendRow] = OpenTable(
    "loadgen.backends",
    BackendRow,
    (
        BackendRow(
            name="ray",
            flag="ray",
            senders="loadgen.cluster.ray:connected",
        ),
        BackendRow(
            name="http",
            schemes=("http", "https"),
            senders="loadgen.core.execution.backends.local:here",
        ),
        BackendRow(
            name="embedded",
            schemes=("",),
            shown="embedded simulation",
            simulated=True,
            known="loadgen.sim.embedded_backend:known",
            serve="loadgen.sim.embedded_backend:serve",
        ),
        BackendRow(
            name="sim",
            schemes=("sim",),
            shown="simulated: {}",
            simulated=True,
            virtual=True,
            known="loadgen.sim.virtual_backend:known",
            fills="loadgen.sim.roofline:filling_rate",
            run="loadgen.sim.virtual_backend:run",
        ),
    ),
)


def of_target(url: str | None) -> BackendRow:
    """The backend of a target. Raises UserError for a scheme that none has."""
    if (row := find(url)) is not None:
        if row not in BACKENDS.own and not (row.serve or row.run):
            what = f"the backend {row.name} does not say how a target of its scheme is reached"
            raise UserError(
                "plugin_failed", what, "--url", "its row has to name a function `serve` or `run`"
            )
        return row
    known = [f"{scheme}:" for row in BACKENDS.rows() for scheme in row.schemes if scheme]
    without = next(row.shown for row in BACKENDS.own if "" in row.schemes)
    what = f"no backend has the scheme {scheme_of(url)}:"
    raise UserError(
        "invalid_url", what, "--url", f"known: {', '.join(known)}; without --url: {without}"
    )


def find(url: str | None) -> BackendRow | None:
    """The backend of a target; None for a scheme that none has.

    A URL without a scheme, and a socket that is a file, are left to `http`, whose own check says what is wrong.
    """
    scheme = scheme_of(url)
    if scheme is None or "unix" in scheme:
        scheme = "http"
    mine = next((row for row in BACKENDS.own if scheme in row.schemes), None)
    return mine or next((row for row in BACKENDS.others() if scheme in row.schemes), None)


def shown(url: str | None) -> str:
    """What the backend calls a target; "": its URL says it, or no backend has its scheme."""
    row = find(url)
    return "" if row is None else row.shown.format(after_scheme(url))


def scheme_of(url: str | None) -> str | None:
    """The scheme of a URL, in small letters; "" without a URL; None for a URL that has none."""
    match = _SCHEME.match(url or "")
    return match[1].lower() if match else None if url else ""


def after_scheme(url: str | None) -> str:
    """What follows the scheme and its colon."""
    match = _SCHEME.match(url or "")
    return match[2] if match else url or ""
