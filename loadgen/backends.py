"""The table of backends: how a target is reached, and where the load is sent from.

`core.execution.backend` calls the functions of the rows. A backend is imported when a run uses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from msgspec import Struct

from loadgen.core.errors import UserError
from loadgen.plugins import OpenTable

if TYPE_CHECKING:
    from loadgen.core.execution.backend import Backend

# The part before the first colon, unless a port follows: `host:8000` has no scheme.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?!\d+(?:/|$))(.*)", re.DOTALL)


class BackendRow(Struct, frozen=True, kw_only=True):
    """One backend.

    Attributes:
        name: Its name.
        load: Imports the functions of the backend.
        schemes: The schemes of the URLs that it serves. "" stands for a target without a URL.
        name_format: The name of a target, with {} for what follows the scheme. If empty, the URL is
            the name.
        simulated: Whether a performance model stands in for a server.
        virtual: Whether the run takes place in virtual time.
        flag: The field of the settings that chooses this backend to send the load. If empty, it
            sends the load to its own targets if no other backend was chosen.
    """

    name: str
    load: Callable[[], Backend]
    schemes: tuple[str, ...] = ()
    name_format: str = ""
    simulated: bool = False
    virtual: bool = False
    flag: str = ""


def _load_ray() -> Backend:
    from loadgen.cluster.ray import RAY

    return RAY


def _load_http() -> Backend:
    from loadgen.core.execution.backends.local import HTTP

    return HTTP


def _load_embedded() -> Backend:
    from loadgen.sim.backends import EMBEDDED

    return EMBEDDED


def _load_virtual() -> Backend:
    from loadgen.sim.backends import VIRTUAL

    return VIRTUAL


def _load_builtin_backends() -> tuple[BackendRow, ...]:
    """Return the built-in backends. A backend sends the load of a run to a target.

    - ray: sends the load to a real server from several machines, if the option `ray` is set.
    - http: sends the load to a real server from this machine.
    - embedded: a simulated server in this process, in real time. It has no URL, so its scheme is
      "".
    - sim: a simulated server in virtual time. The name of the server follows in the URL.
    """
    return (
        BackendRow(name="ray", load=_load_ray, flag="ray"),
        BackendRow(name="http", load=_load_http, schemes=("http", "https")),
        BackendRow(
            name="embedded",
            load=_load_embedded,
            schemes=("",),
            name_format="embedded simulation",
            simulated=True,
        ),
        BackendRow(
            name="sim",
            load=_load_virtual,
            schemes=("sim",),
            name_format="simulated: {}",
            simulated=True,
            virtual=True,
        ),
    )


BACKENDS: OpenTable[BackendRow] = OpenTable("loadgen.backends", BackendRow, _load_builtin_backends)


def load_backend(row: BackendRow) -> Backend:
    """Import the functions of a backend. Errors of a plug-in are reported as such."""
    return BACKENDS.guard(row, row.load)()


def get_backend_of_target(url: str | None) -> BackendRow:
    """Return the backend that serves the scheme of a target's URL, such as "https" or "sim".

    Without a URL, the target is the embedded simulation.

    Raises UserError for a scheme that no backend serves, and for the backend of a plug-in that has
    no function to reach its target.
    """
    backend = find_backend_of_target(url)
    if backend is None:
        raise _unknown_scheme(url)

    is_from_plugin = backend not in BACKENDS.builtin_rows
    if is_from_plugin and not provides_target(backend):
        raise UserError(
            "plugin_failed",
            f"the backend {backend.name} does not define how to reach its targets",
            where="--url",
            hint="it needs a function `serve` or `run`",
        )

    return backend


def provides_target(row: BackendRow) -> bool:
    """Return True if a backend starts or simulates its target, which must then be the only one."""
    backend = load_backend(row)
    return backend.serve is not None or backend.run is not None


def _unknown_scheme(url: str | None) -> UserError:
    """Return the error for a scheme that no backend serves, with the schemes that one serves."""
    schemes = [f"{scheme}:" for row in BACKENDS.rows() for scheme in row.schemes if scheme]
    return UserError(
        "invalid_url",
        f"no backend supports the scheme {scheme_of(url)}:",
        "--url",
        f"known: {', '.join(schemes)}",
    )


def find_backend_of_target(url: str | None) -> BackendRow | None:
    """Return the backend of a target, or None for a scheme that no backend serves.

    URLs without a scheme and those of Unix sockets belong to `http`, which reports their errors.
    Plug-ins are loaded only if no built-in backend serves the scheme.
    """
    scheme = scheme_of(url)
    if scheme is None or "unix" in scheme:
        scheme = "http"
    backend = _find_scheme(scheme, BACKENDS.builtin_rows)
    return backend or _find_scheme(scheme, BACKENDS.plugin_rows())


def _find_scheme(scheme: str, rows: Iterable[BackendRow]) -> BackendRow | None:
    """Return the first backend that serves a scheme, or None."""
    return next((row for row in rows if scheme in row.schemes), None)


def display_name(url: str | None) -> str:
    """Return the display name of a target, or "" if its URL is the name."""
    row = find_backend_of_target(url)
    return "" if row is None else row.name_format.format(after_scheme(url))


def scheme_of(url: str | None) -> str | None:
    """Return the scheme of a URL in lower case, "" without a URL, or None without a scheme."""
    if not url:
        return ""
    match = _SCHEME.match(url)
    return match[1].lower() if match else None


def after_scheme(url: str | None) -> str:
    """Return what follows the scheme of a URL and its colon: "vllm-h100" for "sim:vllm-h100"."""
    if not url:
        return ""
    match = _SCHEME.match(url)
    return match[2] if match else url
