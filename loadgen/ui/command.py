"""`loadgen ui`: a page over a folder of results, served to this machine alone. It reads, and writes nothing.

Every address begins with a secret word that is printed once, and the Host header has to be this server's: another page
in the same browser can neither guess the one nor forge the other.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable, Container
from contextlib import nullcontext
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
import typer

from loadgen import plugins, result_kinds
from loadgen.cli import signals
from loadgen.cli.options import PluginsOption
from loadgen.core.errors import OK, CombinedError, LoadgenError, UserError, nothing_there
from loadgen.core.results.files import refuse_links
from loadgen.render.page import policy
from loadgen.ui.results_list import kind_of, results_in

if TYPE_CHECKING:
    from loadgen.pricing.prices import Prices
    from loadgen.ui.charts import Choice

REFRESH_S = 2
_LEAF = re.compile(r"/(summary\.json|report\.html|verdict\.html)?$")


def ui(
    folder: Annotated[Path, typer.Argument(help="Folder of results.")] = Path("results"),
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="0: any free one.")
    ] = 0,
    prices: Annotated[
        Path | None,
        typer.Option("--prices", metavar="FILE", help="For costs: see docs/prices.example.yaml."),
    ] = None,
    currency: Annotated[
        str, typer.Option("--currency", metavar="CODE", help="Of the costs.")
    ] = "USD",
    with_plugins: PluginsOption = False,
) -> int:
    """Look at a folder of results in a browser: list, filter, lay systems over one Pareto chart, compare, follow a run.

    Serves 127.0.0.1 only, reads only, and needs the address that it prints. Ctrl-C ends it.

    Example: loadgen ui results --prices prices.yaml
    """
    from loadgen.pricing import price_file

    if not folder.is_dir():
        hint = "the folder that runs are in: -o of loadgen run, else results/"
        raise nothing_there(folder, hint)
    book = (
        None
        if prices is None
        else price_file.load_prices(prices, accept_sample=False, currency=currency)
    )
    try:
        server = Server(folder, port, book, with_plugins=with_plugins)
    except OSError as error:
        raise UserError(
            "cannot_listen",
            f"cannot listen: {error.strerror}",
            f"--port {port}",
            "--port 0 takes a free one",
        ) from None
    try:
        signals.interrupt_on_first_signal()
        print(server.address, flush=True)
        print("Ctrl-C ends it", file=sys.stderr)
        server.serve_forever()
    except KeyboardInterrupt:
        signals.ignore_signals()
    finally:
        server.server_close()
    return OK


class Server(ThreadingHTTPServer):
    """The server of one folder, which listens at once. `word`: the first part of every path. Raises OSError."""

    daemon_threads = True

    def __init__(
        self, folder: Path, port: int, prices: Prices | None, *, with_plugins: bool = False
    ) -> None:
        self.with_plugins = with_plugins
        self.folder, self.prices, self.word = folder.resolve(), prices, secrets.token_urlsafe(16)
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def address(self) -> str:
        """The address to open."""
        return f"http://127.0.0.1:{self.server_port}/{self.word}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        status, text = self._answer()
        body = text.encode()
        shared = urlsplit(self.path).path.endswith("/share") and status == HTTPStatus.OK
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if shared:
            self.send_header("Content-Disposition", 'attachment; filename="results.html"')
        self.send_header("Content-Security-Policy", f"{policy()}; frame-ancestors 'none'")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass  # a request line holds the secret word

    def _answer(self) -> tuple[HTTPStatus, str]:
        hosts = {f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")}
        if self.headers.get("Host", "") not in hosts:
            return HTTPStatus.FORBIDDEN, "this page answers to its own address only\n"
        parts = urlsplit(self.path)
        word, _, page = parts.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(word.encode(), self.server.word.encode()):
            return HTTPStatus.FORBIDDEN, "open the address that loadgen ui has printed\n"
        query = parse_qs(parts.query)
        pages: dict[str, Callable[[dict[str, list[str]]], str]] = {
            "": self._list,
            "result": self._result,
            "live": self._live,
            "compare": self._compare,
            "share": self._share,
        }
        if page.startswith("result/"):  # as the links of a result's page lead to its runs
            page, query = "result", {"r": [_LEAF.sub("", unquote(page.removeprefix("result/")))]}
        if page not in pages:
            return HTTPStatus.NOT_FOUND, "no such page\n"
        try:
            with (
                nullcontext() if self.server.with_plugins else plugins.without_plugins()
            ):  # the folder may be somebody else's
                return HTTPStatus.OK, pages[page](query)
        except (LoadgenError, CombinedError) as fault:
            return HTTPStatus.OK, self._plain("Cannot be shown", str(fault))
        except (
            Exception
        ) as error:  # files of somebody else: what a damaged one raises nobody can list
            return HTTPStatus.OK, self._plain(
                "Cannot be shown", f"a damaged file: {error or type(error).__name__}"
            )

    def _plain(self, title: str, text: str, *, refresh_s: int = 0) -> str:
        from loadgen.ui.page import plain

        return plain(
            title, text, f"/{self.server.word}/", version=version("loadgen"), refresh_s=refresh_s
        )

    def _list(self, query: dict[str, list[str]]) -> str:
        from loadgen.ui.page import render

        prices = self.server.prices
        return render(
            self.server.folder.name,
            results_in(self.server.folder, prices),
            _choice(query),
            version=version("loadgen"),
            wanted=query.get("q", [""])[0],
            currency=prices.currency if prices is not None else "",
            served=True,
        )

    def _share(self, query: dict[str, list[str]]) -> str:
        """What is drawn as a file that needs no server: its chart and its rows, without the rest of the folder."""
        from loadgen.ui.page import chosen, render

        prices, choice = self.server.prices, _choice(query)
        drawn = [
            msgspec.structs.replace(result, page="")
            for result in chosen(results_in(self.server.folder, prices), choice)
        ]
        if not drawn:
            raise UserError(
                "no_result",
                "no result with figures is chosen",
                "share",
                "tick one or more in the list",
            )
        currency = prices.currency if prices is not None else ""
        return render(
            self.server.folder.name, drawn, choice, version=version("loadgen"), currency=currency
        )

    def _chosen(self, query: dict[str, list[str]]) -> list[Path]:
        """The results that a request names. Raises UserError for what is not one of the list."""
        paths = [
            (self.server.folder / name.replace("\0", "")).resolve() for name in query.get("r", [])
        ]
        for path, name in zip(paths, query.get("r", []), strict=True):
            if self.server.folder not in path.parents or not kind_of(path):
                raise UserError(
                    "no_result", "no result of this folder", name, "go back to the list"
                )
            refuse_links(path)
        return paths

    def _result(self, query: dict[str, list[str]]) -> str:
        paths = self._chosen(query)
        if len(paths) != 1:
            raise UserError(
                "ambiguous",
                "one result at a time",
                ", ".join(path.name for path in paths),
                "go back to the list",
            )
        opened = result_kinds.opened(paths[0])
        page = opened.page
        return page if page is not None else self._plain(paths[0].name, opened.text)

    def _compare(self, query: dict[str, list[str]]) -> str:
        from loadgen.compare import comparison
        from loadgen.compare.compare_text import report
        from loadgen.compare.side_reader import read_sides
        from loadgen.render import html

        paths = self._chosen(query)
        if len(paths) < 2:
            raise UserError(
                "too_few",
                "fewer than two results are chosen",
                "compare",
                "tick two or more in the list",
            )
        return html.render(report(comparison.compare(read_sides(paths), anyway=True)))

    def _live(self, query: dict[str, list[str]]) -> str:
        """A run that goes on, drawn as on its terminal."""
        from loadgen.runs.dashboard import snapshot

        paths = self._chosen(query)
        if len(paths) != 1 or not (paths[0] / "spool").is_dir():
            return self._plain("Not going on", "This run has ended: go back to the list.")
        note = "Since the start: of the requests that are not yet in Parquet files."
        return self._plain(paths[0].name, f"{snapshot(paths[0])}\n{note}", refresh_s=REFRESH_S)


def _choice(query: dict[str, list[str]]) -> Choice:
    """What the address asks to draw; what it does not know counts as not asked."""
    from loadgen.ui.charts import ACROSS, COLORED_BY, UP, Choice

    def known(name: str, keys: Container[str]) -> str:
        value = query.get(name, [""])[0]
        return value if value in keys else ""

    return Choice(
        names=tuple(query.get("r", ())),
        work=query.get("w", [""])[0],
        color=known("c", COLORED_BY),
        x=known("x", ACROSS),
        y=known("y", UP),
    )
