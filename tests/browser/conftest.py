"""Chromium, daemons to open, and pages of all sizes in light and dark."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hub.server import Hub, running_hub
from tests.support.daemons import SCRIPTED, Daemon, running_daemon
from vlm_server.models import EMBEDDED

NAMES = ("chromium", "chromium-browser", "google-chrome")
FAKE_CAMERA = (
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    "--auto-select-desktop-capture-source=Entire screen",
)
"""A camera that shows a moving picture."""
VIEWPORTS = {"desktop": (1280, 800), "phone": (390, 844)}
Open = Callable[..., Any]


@pytest.fixture(scope="session")
def tiny_daemon(keyed_tiny_daemon: Daemon) -> Daemon:
    """A daemon with keys, whose answers do not end by themselves."""
    return keyed_tiny_daemon


LONG_NAME = "captions-of-everything/Qwen3-VL-235B-A22B-Instruct-mixed-4bit-and-8bit-experts"


@dataclass
class ModelsDaemon:
    """A daemon with several models, its fake hub, and its folder of checkpoints."""

    daemon: Daemon
    hub: Hub
    folder: Path

    def copy_of_model(self, name: str) -> Path:
        """Put another checkpoint called `name` on the machine."""
        return Path(shutil.copytree(EMBEDDED, self.folder / name))

    def post(self, route: str, model: str) -> int:
        """The status of the answer."""
        url = f"{self.daemon.url}/v1/models/{route}"
        return httpx.post(url, json={"model": model}, timeout=60).status_code


@pytest.fixture(scope="session")
def models_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelsDaemon]:
    """A daemon of four models: one pinned, `second`, one with a long name, and one unloadable."""
    folder = tmp_path_factory.mktemp("several")
    disk, wrong = folder / "disk", folder / "wrong"
    wrong.mkdir()
    (wrong / "config.json").write_text('{"model_type": "qwen3_vl"}')
    (wrong / "model.safetensors").write_bytes(b"x")
    disk.mkdir()
    settings = folder / "several.toml"
    settings.write_text(
        f'''
[model]
name = "shapes"
path = "{EMBEDDED}"
search_folders = ["{disk}"]
[models.second]
path = "{EMBEDDED}"
[models."{LONG_NAME}"]
path = "{EMBEDDED}"
keep_alive_seconds = "forever"
[models.broken]
path = "{wrong}"
[memory]
max_bytes = 1_000_000_000
'''
    )
    with running_hub() as hub:
        environment = {"HOME": str(folder), "HF_HOME": str(folder / "hf"), "HF_ENDPOINT": hub.url}
        with running_daemon(folder, "--config", str(settings), environment=environment) as running:
            yield ModelsDaemon(running, hub, disk)


@pytest.fixture(scope="session")
def scripted_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon whose engine says what questions ask for: `tests.support.scripted_worker`."""
    with running_daemon(tmp_path_factory.mktemp("scripted"), program=SCRIPTED) as running:
        yield running


@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Chromium for one module: Playwright's loop would disturb async tests of others."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        reason = "no Chromium: run scripts/install_chromium"
        if request.config.getoption("--require-browser"):
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", *FAKE_CAMERA]
        )
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Open a daemon's page. Unless `is_quiet` is false, the test fails on requests to other hosts
    and on script errors."""
    faults: list[str] = []
    with ExitStack() as stack:

        def open_(
            daemon: Daemon,
            view: str = "",
            device: str = "desktop",
            scheme: str = "light",
            is_quiet: bool = True,
            motion: str = "reduce",
        ) -> Any:
            width, height = VIEWPORTS[device]
            is_phone = device == "phone"
            context = browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme=scheme,
                has_touch=is_phone,
                is_mobile=is_phone,
                reduced_motion=motion,
                permissions=["clipboard-read", "clipboard-write", "camera"],
            )
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(20_000)
            stack.callback(page.unroute_all, behavior="ignoreErrors")  # answers under way

            def note_request(request: Any) -> None:
                if not request.url.startswith((f"{daemon.url}/", "blob:", "data:")):
                    faults.append(f"asked {request.url}")

            if is_quiet:
                page.on("request", note_request)
                page.on("pageerror", lambda error: faults.append(f"script: {error}"))
                page.on(
                    "console",
                    lambda message: faults.append(message.text) if _is_fault(message) else None,
                )
            page.goto(f"{daemon.url}/{view}")
            page.locator("#state[data-state=ready]").wait_for()
            return page

        yield open_
    assert faults == []


def _is_fault(line: Any) -> bool:
    """Whether it is an error; browsers log error statuses of answers by themselves."""
    return line.type == "error" and "Failed to load resource" not in line.text
