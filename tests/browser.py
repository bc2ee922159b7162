"""The system's Chromium, driven through chromedriver by plain HTTP, with the network off."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def find_browser() -> tuple[str, str]:
    """Paths of Chromium and chromedriver; skips (or fails, if it is required) without them."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        reason = "no Chromium with chromedriver (Debian: apt-get install chromium chromium-driver)"
        if os.environ.get("HC_LENS_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return browser, driver


class Browser:
    """One window of a running browser."""

    def __init__(self, address: str, session: str):
        self._base = f"{address}/session/{session}"

    def open(self, path: Path, until: str, seconds: float = 60) -> None:
        """Open a file and wait until a JavaScript expression is true."""
        call(f"{self._base}/url", {"url": path.resolve().as_uri()})
        end = time.monotonic() + seconds
        while not self.run(f"return Boolean({until})"):
            if time.monotonic() > end:
                raise AssertionError(f"{until} was not true after {seconds} s; {self.errors()}")
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """What a script returns."""
        return call(f"{self._base}/execute/sync", {"script": script, "args": []})

    def errors(self) -> list[str]:
        """Messages of the console since the last call, except plain notes."""
        entries = call(f"{self._base}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def screenshot(self, path: Path) -> Path:
        """Write what the window shows as a PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(call(f"{self._base}/screenshot")))
        return path


def call(address: str, body: dict | None = None, method: str | None = None) -> Any:
    """One WebDriver command."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(address, data, {"Content-Type": "application/json"}, method=method)
    with urlopen(request, timeout=120) as answer:
        return json.load(answer)["value"]


@contextlib.contextmanager
def running_browser(folder: Path, width: int = 1280, height: int = 2400) -> Iterator[Browser]:
    """A browser with an empty profile in `folder`; it and its driver end with the context."""
    browser, driver = find_browser()
    log = (folder / "chromedriver.log").open("w+")
    process = subprocess.Popen([driver, "--port=0"], stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{_port(folder / 'chromedriver.log', process)}"
        switches = [
            *SWITCHES,
            f"--window-size={width},{height}",
            f"--user-data-dir={folder}/profile",
        ]
        options = {
            "goog:chromeOptions": {"binary": browser, "args": switches},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        started = call(f"{address}/session", {"capabilities": {"alwaysMatch": options}})
        session = started["sessionId"]
        try:
            yield Browser(address, session)
        finally:
            call(f"{address}/session/{session}", method="DELETE")
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def _port(log: Path, process: subprocess.Popen) -> int:
    end = time.monotonic() + 30
    while time.monotonic() < end and process.poll() is None:
        for line in log.read_text().splitlines():
            if "started successfully on port" in line:
                return int(line.rstrip(".").split()[-1])
        time.sleep(0.05)
    raise AssertionError(f"chromedriver did not start: {log.read_text()}")
