"""The web server of `loadgen ui`. It reads a folder of results and writes nothing.

The server is protected from other web pages in the same browser in two ways. Every path begins with
a secret token that only the printed address has, and the Host header has to be that of this server.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from loadgen import plugins, result_kinds
from loadgen.core.errors import CombinedError, LoadgenError, UserError
from loadgen.core.results.files import refuse_links
from loadgen.render.page import build_security_policy
from loadgen.ui.results_list import listed_kind, results_in

if TYPE_CHECKING:
    from loadgen.pricing.prices import Prices
    from loadgen.ui.charts import Choice

Query: TypeAlias = Mapping[str, Sequence[str]]
"""The parameters of a URL: each name with its values."""

LIVE_REFRESH_S = 2
"""How often the page of a running run is loaded again."""

_FILE_OF_RESULT = re.compile(r"/(summary\.json|report\.html|verdict\.html)?$")
"""The end of a link from the page of a result to one of its runs, which leads to the run's page."""


class ResultsServer(ThreadingHTTPServer):
    """The server of one folder. It listens as soon as it is created, which may raise OSError."""

    daemon_threads = True

    def __init__(
        self, folder: Path, port: int, prices: Prices | None, *, with_plugins: bool = False
    ) -> None:
        """Listen on a port of 127.0.0.1, or on a free one if `port` is 0."""
        self.folder = folder.resolve()
        self.prices = prices
        self.with_plugins = with_plugins
        self.token = secrets.token_urlsafe(16)
        super().__init__(("127.0.0.1", port), _RequestHandler)

    @property
    def address(self) -> str:
        """The URL to open, with the secret token."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    @property
    def currency(self) -> str:
        """The currency of the prices, or "" without prices."""
        return "" if self.prices is None else self.prices.currency


class _RequestHandler(BaseHTTPRequestHandler):
    server: ResultsServer

    def do_GET(self) -> None:  # the name that http.server calls
        """Send the requested page, with headers that keep it from other sites and caches."""
        status, text = self._respond()
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))

        if status == HTTPStatus.OK and urlsplit(self.path).path.endswith("/share"):
            self.send_header("Content-Disposition", 'attachment; filename="results.html"')

        self.send_header(
            "Content-Security-Policy", f"{build_security_policy()}; frame-ancestors 'none'"
        )
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()

        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a request line contains the secret token."""

    def _respond(self) -> tuple[HTTPStatus, str]:
        """Return the status and the text of the response to a request.

        The path of the URL is "/TOKEN/PAGE". TOKEN is a secret of this server.
        """
        url = urlsplit(self.path)
        token, _, path = url.path.removeprefix("/").partition("/")
        if not self._is_own_host():
            return HTTPStatus.FORBIDDEN, "this server answers only requests to its own address\n"
        if not self._is_own_token(token):
            return HTTPStatus.FORBIDDEN, "open the address that `loadgen ui` printed\n"

        page_name, query = _parse_page(path, parse_qs(url.query))
        render = self._pages().get(page_name)
        if render is None:
            return HTTPStatus.NOT_FOUND, "no such page\n"

        return HTTPStatus.OK, self._render_or_explain(render, query)

    def _is_own_host(self) -> bool:
        """Return True if the Host header of the request is an address of this server.

        Another host name is refused, so that a web site cannot reach this server through a name of
        its own (DNS rebinding).
        """
        port = self.server.server_port
        return self.headers.get("Host", "") in (f"127.0.0.1:{port}", f"localhost:{port}")

    def _is_own_token(self, token: str) -> bool:
        """Return True for the secret token, without which no other user can read the results."""
        return secrets.compare_digest(token.encode(), self.server.token.encode())

    def _pages(self) -> dict[str, Callable[[Query], str]]:
        """Return the function that renders each page, by the path of the page."""
        return {
            "": self._list_page,
            "result": self._result_page,
            "live": self._live_page,
            "compare": self._comparison_page,
            "share": self._shared_page,
        }

    def _render_or_explain(self, render: Callable[[Query], str], query: Query) -> str:
        """Return a page, or a page with the reason why it cannot be shown.

        Plug-ins are loaded only with `--plugins`, because the folder may come from another author.
        """
        plugin_policy = nullcontext() if self.server.with_plugins else plugins.without_plugins()
        try:
            with plugin_policy:
                return render(query)
        except (LoadgenError, CombinedError) as error:
            return self._plain_page("Cannot be shown", str(error))
        except Exception as error:  # damaged files of another author can raise anything
            reason = str(error) or type(error).__name__
            return self._plain_page("Cannot be shown", f"the file is damaged: {reason}")

    def _plain_page(self, title: str, text: str, *, refresh_s: int = 0) -> str:
        from loadgen.ui.page import render_plain_page

        home_url = f"/{self.server.token}/"
        return render_plain_page(
            title, text, home_url, version=version("loadgen"), refresh_s=refresh_s
        )

    def _list_page(self, query: Query) -> str:
        """Return the page of the folder: charts, and the list of results as a form.

        What is drawn and the filter are parameters of the URL, so that a page can be bookmarked.
        """
        from loadgen.ui.page import render

        return render(
            self.server.folder.name,
            results_in(self.server.folder, self.server.prices),
            _parse_choice(query),
            version=version("loadgen"),
            filter_text=_first_value(query, "q"),
            currency=self.server.currency,
            served=True,
        )

    def _shared_page(self, query: Query) -> str:
        """Return a page with the charts and only the drawn results, to save and send to others.

        It needs no server. The pages of single results are not saved with it, so the list has no
        links to them.
        """
        from loadgen.ui.page import render, select_results_to_draw

        choice = _parse_choice(query)
        results = select_results_to_draw(results_in(self.server.folder, self.server.prices), choice)
        if not results:
            raise UserError(
                "no_result", "no result with metrics is selected", "share", "select one in the list"
            )

        results_without_links = [msgspec.structs.replace(result, page="") for result in results]
        return render(
            self.server.folder.name,
            results_without_links,
            choice,
            version=version("loadgen"),
            currency=self.server.currency,
        )

    def _result_page(self, query: Query) -> str:
        """Return the page of one result, or its report as text if it has no page."""
        path = self._selected_path(query)
        opened = result_kinds.opened(path)
        page = opened.page
        if page is not None:
            return page
        return self._plain_page(path.name, opened.render_text(color=False, full=True))

    def _comparison_page(self, query: Query) -> str:
        """Return the report of `loadgen compare`, which compares each result with the first one.

        Results of different workloads are compared as well; the report says how they differ.
        """
        from loadgen.compare import comparison
        from loadgen.compare.compare_text import build_report
        from loadgen.compare.side_reader import read_sides
        from loadgen.render import html

        paths = self._selected_paths(query)
        if len(paths) < 2:
            raise UserError(
                "too_few",
                "a comparison needs at least two results",
                "compare",
                "select them in the list",
            )

        result = comparison.compare(read_sides(paths), allow_different_work=True)
        return html.render(build_report(result))

    def _live_page(self, query: Query) -> str:
        """Return the current metrics of a running run, as on its terminal.

        The metrics are computed from the record log, to which a run appends its request records. A
        long run moves older records into Parquet files, which are not read here; a note on the page
        says so. The record log is deleted when the run ends.
        """
        from loadgen.runs import dashboard

        run_dir = self._selected_path(query)
        record_log_dir = run_dir / "spool"
        if not record_log_dir.is_dir():
            return self._plain_page("Not running", "This run has ended. Go back to the list.")

        metrics_text = dashboard.snapshot(run_dir)
        note = "Covers the requests that are not yet in Parquet files."
        return self._plain_page(run_dir.name, f"{metrics_text}\n{note}", refresh_s=LIVE_REFRESH_S)

    def _selected_path(self, query: Query) -> Path:
        """Return the folder of the one result that a request names. Raises UserError."""
        paths = self._selected_paths(query)
        if len(paths) != 1:
            names = ", ".join(path.name for path in paths)
            raise UserError("ambiguous", "one result is required", names, "go back to the list")
        return paths[0]

    def _selected_paths(self, query: Query) -> list[Path]:
        """Return the folders that a request names.

        The names are relative to the served folder. A zero byte in a name is removed, because the
        file system refuses it.

        Raises UserError for a name outside the served folder, and for one that is no result.
        """
        paths = []
        for name in query.get("r", []):
            path = (self.server.folder / name.replace("\0", "")).resolve()
            is_inside = self.server.folder in path.parents
            if not is_inside or listed_kind(path) is None:
                raise UserError(
                    "no_result", "no result in this folder", name, "go back to the list"
                )

            refuse_links(path)
            paths.append(path)

        return paths


def _parse_page(path: str, query: Query) -> tuple[str, Query]:
    """Return the name of the requested page, and its parameters.

    The path of most pages is their name. The page of a result has the name of the result in its
    path, so that its relative links work. Examples:

        "compare"                    -> "compare" with the parameters of the URL
        "result/NAME/"               -> "result" with {"r": ["NAME"]}
        "result/NAME/c8/report.html" -> "result" with {"r": ["NAME/c8"]}

    The last one is a link from the page of a sweep to the file of one of its runs, "c8".
    """
    if not path.startswith("result/"):
        return path, query
    result_path = unquote(path.removeprefix("result/"))
    result_name = _FILE_OF_RESULT.sub("", result_path)
    return "result", {"r": [result_name]}


def _parse_choice(query: Query) -> Choice:
    """Return what the reader has chosen to draw, from the parameters of a URL.

    The names of the parameters are those of the fields of the form in `page.py`: `r` for each
    result, `w` for the workload, `c` for the color, `x` and `y` for the axes. Unknown values are
    ignored.
    """
    from loadgen.ui.charts import COLOR_KEYS, X_METRICS, Y_METRICS, Choice

    return Choice(
        names=tuple(query.get("r", ())),
        workload_of=_first_value(query, "w"),
        color_by=_known_value(query, "c", COLOR_KEYS),
        x=_known_value(query, "x", X_METRICS),
        y=_known_value(query, "y", Y_METRICS),
    )


def _first_value(query: Query, name: str) -> str:
    """Return the first value of a parameter of a URL, or "" if the URL does not have it."""
    return query.get(name, [""])[0]


def _known_value(query: Query, name: str, known: Container[str]) -> str:
    """Return a parameter of a URL, or "" if its value is not a known one."""
    value = _first_value(query, name)
    return value if value in known else ""
