"""A headless Chromium, driven over its debugging protocol: enough to look at one page."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class Tab:
    """One tab. `requests` lists the URLs that it asked for."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._events: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Network", "Runtime"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = self._receive()
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def open(self, url: str) -> None:
        """Go to a URL and wait until it is loaded."""
        self._events.clear()
        self.command("Page.navigate", url=url)
        while "Page.loadEventFired" not in self._events:
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.command("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def show(self, width: int, scheme: str, height: int = 900) -> None:
        """Set the width of the screen and the colour scheme."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self) -> bytes:
        """What is on the screen, as a PNG."""
        return base64.b64decode(self.command("Page.captureScreenshot")["data"])

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._connection.recv(timeout=60))
        if "method" in message:
            self._events.append(message["method"])
            if message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
        return message


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """A running browser with one tab, its files in `folder`; it is ended with its children."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program is not None, "Chromium is needed: apt-get update && apt-get install -y chromium"
    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port_file = folder / "DevToolsActivePort"
        end = time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().strip()):
            assert process.poll() is None, "Chromium ended at its start"
            assert time.monotonic() < end, "Chromium did not start"
            time.sleep(0.05)
        port = int(port_file.read_text().split()[0])
        with httpx.Client(trust_env=False) as client:
            pages = [t for t in client.get(f"http://127.0.0.1:{port}/json/list").json() if t["type"] == "page"]
        with connect(pages[0]["webSocketDebuggerUrl"], max_size=None, proxy=None) as connection:
            yield Tab(connection)
            connection.send(json.dumps({"id": 10**6, "method": "Browser.close"}))
    finally:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
