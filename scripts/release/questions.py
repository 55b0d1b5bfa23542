"""Asks a daemon about a picture, over HTTP or on its page in Chromium, and wants a true answer."""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import time
import urllib.request
from subprocess import Popen

from scripts.release.artifacts import CheckFailed
from tests.browser.files import ask, attach
from tests.support.images import encoded, one_shape

QUESTION, ANSWER = "What shape is this?", "square"
READY_SECONDS = 120.0


def wait_ready(port: int, process: Popen[bytes]) -> None:
    """Raises CheckFailed if it ends, or takes too long."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CheckFailed(f"the daemon ended with status {process.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    raise CheckFailed(f"the daemon was not ready within {READY_SECONDS:.0f} s")


def over_http(port: int) -> None:
    """Raises CheckFailed for an answer that is not true."""
    url = f"data:image/png;base64,{base64.b64encode(picture()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    body = {"model": "demo", "max_tokens": 20, "messages": [{"role": "user", "content": content}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        check(json.load(response)["choices"][0]["message"]["content"])


def in_browser(port: int) -> None:
    """Drops the picture on the page. Raises CheckFailed for an answer that is not true."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        raise CheckFailed("there is no Chromium: run scripts/install_chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        attach(page, "drop", (picture(), "square.png", "image/png"))
        answer = ask(page, QUESTION)
        check(str(answer.locator(".text").inner_text()))
        browser.close()


def picture() -> bytes:
    made: bytes = encoded(one_shape("square", "blue"))
    return made


def check(answer: str) -> None:
    if ANSWER not in answer.lower():
        raise CheckFailed(f"asked {QUESTION!r} of a {ANSWER}, it answered {answer!r}")
