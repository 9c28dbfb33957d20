"""Take the pictures of the documentation: `python docs/screenshots.py [NAME...]`.

The script runs loadgen on simulated servers in virtual time, opens the reports in Chromium and
stores the part of each page that the documentation shows. With a fixed seed, the same version of
loadgen always makes the same pages.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

IMAGES = Path(__file__).parent / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TARGET = ("--url", "sim:gb300-vm", "--gpus", "4", "--seed", "1")
SLO = ("--slo", "ttft:2s:p95", "--slo", "tpot:60ms:p95")
SEARCH = ("search", "rag", *TARGET, *SLO)


class Label(NamedTuple):
    """A numbered mark on a picture. The page that shows the picture explains the number."""

    number: int
    selector: str
    """The CSS selector of the element that the mark points at."""


class Picture(NamedTuple):
    """A part of the report of one command."""

    commands: tuple[tuple[str, ...], ...]
    """The arguments of the commands, without `--out`. The picture shows the last result."""
    width_px: int
    height_px: int
    labels: tuple[Label, ...] = ()


RUN = ("run", "rag", "--request-rate", "30", "--duration", "5m", *TARGET, *SLO)
PICTURES = {
    "run.png": Picture((RUN,), 1180, 1000),
    "run-annotated.png": Picture(
        (RUN,),
        1180,
        1380,
        (
            Label(1, ".mark.warn"),
            Label(2, "h1"),
            Label(3, "p.sentence"),
            Label(4, "dl.five"),
            Label(5, "figure[data-chart='0']"),
            Label(6, "figure[data-chart='1']"),
            Label(7, "#latency"),
        ),
    ),
    "search.png": Picture((SEARCH,), 1180, 1240),
    "sweep.png": Picture(
        (("sweep", "rag", "-c", "64,256,1024,2048,4096", "--duration", "5m", *TARGET, *SLO),),
        1180,
        1240,
    ),
    "validation.png": Picture(
        (("validate", "chatbot", "--url", "sim:gb300-vm", "--seed", "1"),), 1180, 980
    ),
}
LABEL_SCRIPT = """
document.querySelector("main").style.paddingLeft = "48px";
for (const [number, selector] of %s) {
  const element = document.querySelector(selector);
  if (!element) throw new Error(selector);
  const box = element.getBoundingClientRect();
  const label = document.createElement("div");
  label.textContent = number;
  const isAtEdge = box.left < 100;
  const left = isAtEdge ? box.left - 34 : box.left - 13;
  const top = isAtEdge ? box.top + 3 : box.top - 13;
  label.style.cssText = `position:absolute; left:${left}px; top:${top}px;
    width:26px; height:26px; border-radius:13px; background:#b3261e; color:white;
    font:bold 15px/26px sans-serif; text-align:center; z-index:1000`;
  document.body.append(label);
}
"""
CONTENT_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


def main() -> None:
    """Take the pictures that are named on the command line, or all of them."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise SystemExit("Chromium is not installed, so no picture was changed.")
    IMAGES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        with tempfile.TemporaryDirectory() as folder:
            take_picture(PICTURES[name], IMAGES / name, browser, Path(folder))
        print(IMAGES / name)


def take_picture(picture: Picture, file: Path, browser: str, folder: Path) -> None:
    """Run the command of a picture and store the picture of its page."""
    result = folder / "result"
    for arguments in picture.commands:
        _run_loadgen(*arguments, "--out", str(result))
    page = result / "verdict.html"
    if not page.exists():
        page = folder / "report.html"
        _run_loadgen("report", str(result), "--html", str(page))
    if picture.labels:
        _add_labels(page, picture.labels)
    subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            "--virtual-time-budget=3000",
            f"--user-data-dir={folder / 'browser'}",
            f"--window-size={picture.width_px},{picture.height_px}",
            f"--screenshot={file}",
            page.as_uri(),
        ],
        check=True,
        stderr=subprocess.DEVNULL,
    )


def _add_labels(page: Path, labels: tuple[Label, ...]) -> None:
    """Add the numbered marks to the page, which otherwise allows no script but its own."""
    script = LABEL_SCRIPT % [list(label) for label in labels]
    text = CONTENT_POLICY.sub("", page.read_text("utf-8"))
    page.write_text(text.replace("</body>", f"<script>{script}</script></body>"), "utf-8")


def _run_loadgen(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "loadgen", *arguments], check=True, stdout=subprocess.DEVNULL
    )


if __name__ == "__main__":
    main()
