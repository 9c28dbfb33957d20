"""Run the commands in the console blocks of the guides, and write what they print into the pages.

`python tests/make_guide_outputs.py [PAGE...]` renews the pages of `docs/get-started` and
`docs/guides`. A console block looks like this:

    ```console
    $ loadgen run qa --url sim:gb300-vm --seed 1 -o first
    (the output)
    ```

The commands of a page run in their order in one temporary folder, with bash, as a reader would type
them. Only standard output is shown. YAML blocks that begin with a comment such as `# contract.yaml`
are written to files of that name first. Dates are replaced by a fixed one, so that a page changes
only when the output does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "get-started").glob("*.md")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
]
CONSOLE_BLOCK = re.compile(r"(?m)^```console\n([\s\S]*?)^```$")
NAMED_YAML_BLOCK = re.compile(r"(?m)^```yaml\n# ([\w-]+\.yaml)\n([\s\S]*?)^```$")
FILES = {
    "docs": ROOT / "docs",
    "contracts": ROOT / "contracts",
    "prices.yaml": ROOT / "docs" / "prices.example.yaml",
    "questions.jsonl": ROOT / "examples" / "questions.jsonl",
    "trace.jsonl": ROOT / "tests" / "data" / "oracle" / "trace.jsonl",
}
"""Files that a reader is assumed to have, besides those that the page shows."""
TIMEOUT_S = 300
TIMESTAMP = re.compile(r"20\d\d-\d\d-\d\d([ T])\d\d:\d\d:\d\d(\.\d+)?")
"""A date and time of the output, for example of the start of a run."""
SHOWN_TIMESTAMP = r"2026-12-01\g<1>10:00:00"


def has_console_block(page: Path) -> bool:
    """Return True if the page shows the output of a command."""
    return CONSOLE_BLOCK.search(page.read_text("utf-8")) is not None


def render_page(page: Path) -> str:
    """Return the text of the page with the output that its commands print now."""
    with tempfile.TemporaryDirectory() as folder:
        return render_text(page.read_text("utf-8"), ReaderShell(Path(folder)))


def render_text(text: str, shell: ReaderShell) -> str:
    """Return the text of a page with the output that its commands print in a shell.

    The files that the page shows are written into the folder of the shell first.
    """
    for name, content in NAMED_YAML_BLOCK.findall(text):
        file = shell.folder / name
        file.unlink(missing_ok=True)  # a link to one of FILES, which must not be overwritten
        file.write_text(content, "utf-8")

    def render_block(block: re.Match[str]) -> str:
        lines: list[str] = []
        for command in commands_of(block[1]):
            lines += [f"$ {command}", *shell.run(command)]
        return "\n".join(["```console", *lines, "```"])

    return CONSOLE_BLOCK.sub(render_block, text)


def commands_of(block: str) -> list[str]:
    """Return the commands of a console block. A backslash continues one on the next line."""
    commands = []
    lines = iter(block.splitlines())
    for line in lines:
        if not line.startswith("$ "):
            continue
        command_lines = [line.removeprefix("$ ")]
        while command_lines[-1].endswith("\\"):
            command_lines.append(next(lines))
        commands.append("\n".join(command_lines))
    return commands


class ReaderShell:
    """Runs command lines in a folder, with `loadgen` of this source tree."""

    def __init__(self, folder: Path) -> None:
        programs = folder / ".bin"
        programs.mkdir()
        loadgen = programs / "loadgen"
        loadgen.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m loadgen "$@"\n')
        loadgen.chmod(0o755)
        for name, source in FILES.items():
            (folder / name).symlink_to(source)
        self.folder = folder
        self._exit_code = 0
        self.environment = os.environ | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "COLUMNS": "100",
            "NO_COLOR": "1",
        }

    def run(self, command: str) -> list[str]:
        """Run a command line and return the lines of its standard output."""
        script = f"(exit {self._exit_code}); {command}"  # so that the command can show `$?`
        process = subprocess.run(
            ["bash", "-o", "pipefail", "-c", script],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        self._exit_code = process.returncode
        if not process.stdout and process.returncode:
            raise SystemExit(f"{command}: exit code {process.returncode}\n{process.stderr}")
        output = TIMESTAMP.sub(SHOWN_TIMESTAMP, process.stdout)
        return [line.rstrip() for line in output.rstrip().splitlines()]


def main() -> None:
    """Renew the pages that are named on the command line, or all of them."""
    pages = [Path(argument).resolve() for argument in sys.argv[1:]] or PAGES
    for page in pages:
        if has_console_block(page):
            page.write_text(render_page(page), "utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
