"""The command `loadgen ui`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli import signals
from loadgen.cli.options import PluginsOption
from loadgen.core.errors import OK, UserError, missing_result

if TYPE_CHECKING:
    from loadgen.pricing.prices import Prices
    from loadgen.ui.server import ResultsServer


def ui(
    folder: Annotated[Path, typer.Argument(help="The folder of results.")] = Path("results"),
    port: Annotated[
        int,
        typer.Option(
            "--port", metavar="N", min=0, max=65535, help="Port to listen on; 0 takes a free port."
        ),
    ] = 0,
    prices: Annotated[
        Path | None,
        typer.Option(
            "--prices", metavar="FILE", help="Price file; adds a chart of cost per million tokens."
        ),
    ] = None,
    currency: Annotated[
        str, typer.Option("--currency", metavar="CODE", help="Currency of the costs.")
    ] = "USD",
    with_plugins: PluginsOption = False,
) -> int:
    """Browse a folder of results: list, charts of several systems, comparisons and running runs.

    Listens on 127.0.0.1 only, changes no file, and answers only at the address that it prints.
    Press Ctrl-C to stop it.

    Exit: 0 stopped, 2 usage error.

    Example: loadgen ui results --prices prices.yaml
    """
    from loadgen.pricing import price_file

    if not folder.is_dir():
        raise missing_result(folder, "give the folder of your results; the default is results/")

    price_table = None
    if prices is not None:
        price_table = price_file.load_prices(prices, accept_sample=False, currency=currency)

    server = _listen(folder, port, price_table, with_plugins=with_plugins)
    try:
        signals.interrupt_on_first_signal()
        print(server.address, flush=True)
        print("Press Ctrl-C to stop.", file=sys.stderr)
        server.serve_forever()
    except KeyboardInterrupt:
        signals.ignore_signals()
    finally:
        server.server_close()

    return OK


def _listen(folder: Path, port: int, prices: Prices | None, *, with_plugins: bool) -> ResultsServer:
    """Return a server that listens on a port. Raises UserError if the port is not free."""
    from loadgen.ui.server import ResultsServer

    try:
        return ResultsServer(folder, port, prices, with_plugins=with_plugins)
    except OSError as error:
        raise UserError(
            "cannot_listen",
            f"cannot listen: {error.strerror}",
            f"--port {port}",
            "use another port, or --port 0 for a free one",
        ) from None
