"""The page in the engine of Safari."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.webkit import WebKit, is_installed, running_webkit
from tests.support import pdf, video_files
from tests.support.daemons import Daemon
from tests.support.images import encoded, one_shape

pytestmark = pytest.mark.skipif(not is_installed(), reason="apt-get install webkit2gtk-driver xvfb")
LAST = "[...document.querySelectorAll('.answer')].at(-1)"


@pytest.fixture(scope="module")
def window() -> Iterator[WebKit]:
    with running_webkit() as window:
        yield window


@pytest.fixture
def page(window: WebKit, daemon: Daemon) -> Iterator[WebKit]:
    """The page of a daemon; the test fails on errors of scripts."""
    window.open(f"{daemon.url}/")
    window.wait_for("document.querySelector('#sample button')")
    window.run("document.querySelector('#new').click()")
    yield window
    assert window.run("return faults") == []


def ask(page: WebKit, question: str) -> str:
    before = page.run("return document.querySelectorAll('.answer').length")
    page.type("#question", question + "\ue007")  # the protocol's Enter
    page.wait_for(f"document.querySelectorAll('.answer').length > {before}")
    return answer_of(page)


def answer_of(page: WebKit) -> str:
    page.wait_for(f"{LAST}?.querySelector('.figures')")
    return str(page.run(f"return {LAST}.querySelector('.text').innerText")).strip().lower()


def test_conversation_survives_reload_with_its_picture(page: WebKit) -> None:
    page.run("document.querySelector('#sample button').click()")
    assert "purple star" in answer_of(page)
    assert "square" in ask(page, "What shape is on the right?")
    assert page.run("return document.querySelector('#trouble').innerText") == ""
    page.wait_for(
        "document.querySelector('#history-list').innerText.includes('Describe the picture')"
    )
    page.reload()
    page.wait_for("document.querySelectorAll('.answer').length == 2")
    assert page.wait_for("document.querySelector('.asked .media img')?.naturalWidth") == 640
    assert ask(page, "How many blue squares are there?") == "2"


@pytest.mark.parametrize(
    ("name", "question", "wanted"),
    [
        ("square.png", "What shape is this?", "square"),
        ("report.pdf", "What does it say?", "cup"),
        ("clip.mp4", "Which way does it move?", "left"),
    ],
)
def test_chosen_file_is_answered(
    page: WebKit, tmp_path: Path, name: str, question: str, wanted: str
) -> None:
    contents = {
        "square.png": lambda: encoded(one_shape("square", "blue")),
        "report.pdf": lambda: pdf.write([pdf.Page((300, 300)).text(60, 130, 70, "CUP")]),
        "clip.mp4": lambda: video_files.encode(video_files.moving("left", 30)),
    }
    (tmp_path / name).write_bytes(contents[name]())
    page.type("#files", str(tmp_path / name))
    page.wait_for("document.querySelector('#attachments li')")
    assert ask(page, question) == wanted


@pytest.mark.parametrize("view", ["watch", "now", "models", "connect", "settings"])
def test_views_are_drawn(page: WebKit, view: str) -> None:
    page.run(f"location.hash = '#{view}'")
    words = {"watch": "Watch an example", "now": "Memory", "models": "qwen3_vl"}
    words |= {"connect": "Base URL", "settings": "TOML"}
    page.wait_for(f"document.querySelector('#{view}').innerText.includes('{words[view]}')")


def test_chosen_appearance_is_shown(page: WebKit) -> None:
    page.run("location.hash = '#settings'")
    page.wait_for("document.querySelector('#settings .card')")
    background = "getComputedStyle(document.documentElement).backgroundColor"
    for theme, colour in (("dark", "rgb(16, 16, 18)"), ("light", "rgb(245, 245, 247)")):
        page.run(
            f"""const select = document.querySelector("#theme");
            select.value = "{theme}";
            select.dispatchEvent(new Event("change"));"""
        )
        page.wait_for(f"{background} === '{colour}'")
    page.run("localStorage.removeItem('vlm_server theme')")
