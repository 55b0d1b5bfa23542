"""WebKitGTK by the WebDriver protocol: the engine of Safari, as near as Linux has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.daemons import free_port

DRIVER = "WebKitWebDriver"
_BROWSER = next(Path("/usr/lib").glob("*/webkit2gtk-4.*/MiniBrowser"), None)
_SECONDS = 30
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The protocol's name of a reference to an element."""
_CATCH_FAULTS = """
window.faults = [];
addEventListener("error", (event) => faults.push(event.message));
addEventListener("unhandledrejection", (event) => faults.push(String(event.reason)));
"""


def is_installed() -> bool:
    """Debian has it in `webkit2gtk-driver`; a machine without a screen needs `xvfb` as well."""
    has_screen = "DISPLAY" in os.environ or shutil.which("xvfb-run")
    return bool(shutil.which(DRIVER) and _BROWSER and has_screen)


class WebKit:
    """A window, as in a private session of Safari: nothing is kept after it is closed."""

    def __init__(self, url: str) -> None:
        """`url`: that of the driver."""
        self._client = httpx.Client(base_url=url, timeout=_SECONDS)
        options = {"binary": str(_BROWSER), "args": ["--automation"]}
        wanted = {"capabilities": {"alwaysMatch": {"webkitgtk:browserOptions": options}}}
        self._path = ""
        self._path = f"/session/{self._post('/session', wanted)['sessionId']}"

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = self._client.post(self._path + path, json=body)
        assert response.status_code == 200, response.text
        return response.json()["value"]

    def open(self, url: str) -> None:
        self._post("/url", {"url": url})
        self.run(_CATCH_FAULTS)

    def run(self, script: str) -> Any:
        """The result of a function's body in JavaScript."""
        return self._post("/execute/sync", {"script": script, "args": []})

    def wait_for(self, expression: str) -> Any:
        """The value of an expression in JavaScript, once it is truthy."""
        deadline = time.monotonic() + _SECONDS
        while not (value := self.run(f"return {expression}")):
            assert time.monotonic() < deadline, f"never: {expression}"
            time.sleep(0.1)
        return value

    def type(self, selector: str, text: str) -> None:
        found = self._post("/element", {"using": "css selector", "value": selector})
        self._post(f"/element/{found[_ELEMENT]}/value", {"text": text})

    def reload(self) -> None:
        self._post("/refresh", {})
        self.run(_CATCH_FAULTS)

    def close(self) -> None:
        self._client.delete(self._path)
        self._client.close()


@contextmanager
def running_webkit() -> Iterator[WebKit]:
    """A window while the context lasts; needs `is_installed`."""
    port = free_port()
    screen = [] if "DISPLAY" in os.environ else ["xvfb-run", "--auto-servernum"]
    process = subprocess.Popen([*screen, DRIVER, f"--port={port}"], start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + _SECONDS
        while not _answers(url):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        window = WebKit(url)
        yield window
        window.close()
    finally:
        os.killpg(process.pid, 15)
        process.wait(_SECONDS)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/status").is_success
    except httpx.HTTPError:
        return False
