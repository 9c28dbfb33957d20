"""The pictures of the documentation: `python docs/screenshots.py` runs the tool and takes them with Chromium.

Everything is simulated in virtual time with a seed, so the same version makes the same pages. A picture is cut
to the part of the page that it shows.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

INTO = Path(__file__).parent / "images"
RAG = [
    "run",
    "rag",
    "--url",
    "sim:gb300-vm",
    "--request-rate",
    "30",
    "-d",
    "5m",
    "--seed",
    "1",
    "--gpus",
    "4",
]
RAG += ["--slo", "ttft:2s:p95", "--slo", "tpot:60ms:p95"]
SLO = ["--slo", "ttft:2s:p95", "--slo", "tpot:60ms:p95"]
SEARCH = [
    "search",
    "rag",
    "--url",
    "sim:gb300-vm",
    "--seed",
    "1",
    "--gpus",
    "4",
    *SLO,
]  # as in the tutorial
VALIDATE = ["validate", "chatbot", "--url", "sim:gb300-vm", "--seed", "1"]
PAGES = {  # what is run; width and height of the picture, px
    "run.png": (RAG, 1180, 1434),
    "search.png": (SEARCH, 1180, 1240),
    "validation.png": (VALIDATE, 1180, 980),
}


def main() -> None:
    browser = next(
        (
            path
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (path := shutil.which(name))
        ),
        "",
    )
    if not browser:
        raise SystemExit("no Chromium is installed: the pictures stay as they are")
    INTO.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name, (command, width, height) in PAGES.items():
            out = Path(scratch) / Path(name).stem
            subprocess.run(
                [sys.executable, "-m", "loadgen", *command, "--out", str(out)],
                check=True,
                stdout=sys.stderr,
            )
            page = out / "verdict.html"
            if not page.exists():
                page = out / "report.html"
                subprocess.run(
                    [sys.executable, "-m", "loadgen", "report", str(out)],
                    check=True,
                    stdout=sys.stderr,
                )
            flags = [
                "--headless",
                "--no-sandbox",
                "--hide-scrollbars",
                "--virtual-time-budget=3000",
            ]
            picture = [f"--window-size={width},{height}", f"--screenshot={INTO / name}"]
            subprocess.run(
                [browser, *flags, *picture, page.as_uri()], check=True, stderr=subprocess.DEVNULL
            )
            print(INTO / name)


if __name__ == "__main__":
    main()
