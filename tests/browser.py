"""Drive a headless Chromium in tests, over its debugging pipe.

The pipe needs no port, no driver and no package. One page is open at a time. `Browser().open(path)`
loads a file and returns what the console printed and which network requests were made. `evaluate`,
`screenshot` and `pdf` inspect the page. `find` returns None if this machine has no Chromium, and
tests that need one are skipped.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--mute-audio",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # a page that asks for a name does not find it
]
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT_S = 60.0


def find() -> str | None:
    return next((executable for name in NAMES if (executable := shutil.which(name))), None)


class Browser:
    """A context manager around one Chromium process with one page."""

    def __init__(self) -> None:
        program = find()
        assert program is not None
        self._home = tempfile.mkdtemp(prefix="loadgen-chromium-")
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        script = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                script,
                "-",
                program,
                *FLAGS,
                f"--user-data-dir={self._home}",
                "--remote-debugging-pipe",
            ],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)  # Chromium leaves when its pipe ends
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        shutil.rmtree(self._home, ignore_errors=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and return its result.

        Events received meanwhile are appended to `events`.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result
            self.events.append(reply)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], WAIT_S)[0], "Chromium does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "Chromium ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def until(self, event: str) -> None:
        while not any(browser_event.get("method") == event for browser_event in self.events):
            self.events.append(self._read())

    def set_view(
        self, *, width: int = 1280, height: int = 900, dark: bool = False, media: str = "screen"
    ) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=media, features=scheme)

    def open(self, path: Path) -> None:
        """Load a file and wait until it is drawn."""
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.until("Page.loadEventFired")
        self.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        )

    def evaluate(self, script: str) -> Any:
        response = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in response, response
        return response["result"].get("value")

    @property
    def complaints(self) -> list[str]:
        """Console errors and warnings, uncaught exceptions, browser log entries since `open`."""
        problems = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                problems.append(
                    params["exceptionDetails"].get("exception", {}).get("description", "exception")
                )
            elif method == "Log.entryAdded":
                problems.append(params["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and params["type"] in (
                "error",
                "warning",
                "assert",
            ):
                problems.append(str(params["args"]))
        return problems

    @property
    def requests(self) -> list[str]:
        """What the page asked for besides itself since `open`; data URLs are no request."""
        urls = [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in urls[1:] if not url.startswith("data:")]

    def screenshot(self, path: Path, *, is_full_page: bool = True) -> None:
        response = self.call(
            "Page.captureScreenshot",
            captureBeyondViewport=is_full_page,
            **({"clip": self._page_area()} if is_full_page else {}),
        )
        path.write_bytes(base64.b64decode(response["data"]))

    def _page_area(self) -> dict[str, float]:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}

    def pdf(self) -> bytes:
        """As it comes from the printer: with the style for print, whatever `set_view` has set."""
        self.call("Emulation.setEmulatedMedia", media="print")
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])
