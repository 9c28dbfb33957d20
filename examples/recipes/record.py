"""Run the commands of the recipes against a server, and write what they print into the pages.

`python examples/recipes/record.py [PAGE...]` renews the console blocks of the pages in this folder,
in the way of `tests/make_guide_outputs.py`. SERVERS says which server answers at port 8000 while
the commands of a page run. Record on an idle machine.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

RECIPES = Path(__file__).parent
ROOT = RECIPES.parent.parent
URL = "http://localhost:8000/v1/models"
READY_TIMEOUT_S = 60.0

SIMULATED_CLOUD = [
    *(sys.executable, "-P", "-m", "loadgen", "sim", "--port", "8000", "--dialect", "openai"),
    *("--model", "example-large", "--ttft", "lognormal:300ms,0.2", "--itl", "15ms", "--seed", "1"),
    *("--slots", "16"),
]
SERVERS = {"azure-openai.md": SIMULATED_CLOUD, "hosted-api.md": SIMULATED_CLOUD}
"""The command that starts the server of each page."""


@contextlib.contextmanager
def running_server(command: list[str]) -> Iterator[None]:
    """Run a server within a `with` block, and wait until it lists its models.

    Raises:
        TimeoutError: The server is not ready after READY_TIMEOUT_S.
    """
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not _is_ready():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not ready: {' '.join(command)}")
            time.sleep(0.2)
        yield
    finally:
        server.terminate()
        server.wait()


def _is_ready() -> bool:
    """Return True if the server lists its models."""
    with contextlib.suppress(OSError), urllib.request.urlopen(URL, timeout=5):
        return True
    return False


def main() -> None:
    """Renew the pages that are named on the command line, or all of them."""
    sys.path.insert(0, str(ROOT / "tests"))
    from make_guide_outputs import render_page

    for name in sys.argv[1:] or SERVERS:
        page = RECIPES / Path(name).name
        with running_server(SERVERS[page.name]):
            text = render_page(page)
        page.write_text(text, "utf-8")
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
