"""Progress: one line that moves on a terminal, plain lines everywhere else."""

from __future__ import annotations

import io
import logging
import re
import time

import pytest

from tests.unit.cli.screen import Terminal
from vlm_server.cli import progress
from vlm_server.cli.progress import ProgressLine
from vlm_server.cli.text import shorten_stage

DOWNLOAD = "downloading model.safetensors: 1 GB of 2 GB"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    return Terminal()


def test_progress_on_terminal_is_one_line_that_clears(screen: Terminal) -> None:
    progress = ProgressLine(screen)
    progress.show("loading the weights", 0.1)
    progress.show("warming up on a picture", 0.7)
    progress.clear()
    progress.clear()
    shown = screen.getvalue()
    assert "loading the weights" in shown
    assert "warming up on a picture" in shown
    assert "70%" in shown
    assert shown.endswith("\x1b[1A\x1b[2K")  # the line is empty again
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h")  # and the cursor is back


def test_progress_line_restarts_after_empty_stage(screen: Terminal) -> None:
    progress = ProgressLine(screen)
    for number in (1, 2):
        progress.show("warming up", 0.5)
        progress.show("", 1.0)
        assert screen.getvalue().endswith("\x1b[1A\x1b[2K")
        assert screen.getvalue().count("\x1b[?25h") == number


def test_progress_line_is_cut_to_terminal_width(
    screen: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("NO_COLOR", "1")
    progress = ProgressLine(screen)
    progress.show("downloading " + "x" * 200, 0.5)
    progress.clear()
    lines = screen.getvalue().replace("\x1b[2K", "").replace("\r", "\n").split("\n")
    assert "\u2026" in screen.getvalue()  # cut, and marked as such
    assert max(map(len, lines)) <= 30 + len("\x1b[?25l")


@pytest.mark.parametrize(
    ("stage", "columns", "shown"),
    [
        (DOWNLOAD, 50, DOWNLOAD),
        (DOWNLOAD, 32, "downloading model\u2026: 1 GB of 2 GB"),
        (DOWNLOAD, 10, DOWNLOAD),
        ("warming up on a picture", 10, "warming up on a picture"),
    ],
)
def test_progress_shortens_file_name_before_figures(stage: str, columns: int, shown: str) -> None:
    """A stage that is still too long is left to be cut at its end."""
    assert shorten_stage(stage, columns) == shown


def test_progress_without_fraction_shows_no_percentage(screen: Terminal) -> None:
    progress = ProgressLine(screen)
    progress.show("waiting for the answer", None)
    progress.clear()
    assert "waiting for the answer" in screen.getvalue()
    assert "%" not in screen.getvalue()


@pytest.mark.parametrize("is_early", [True, False])
def test_progress_shows_time_left_once_rate_is_known(
    screen: Terminal, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    monkeypatch.setattr(progress, "_MIN_SECONDS_FOR_RATE", 60.0 if is_early else 0.0)
    line = progress.ProgressLine(screen)
    for fraction in (0.0, 0.1, 0.2, 0.3):
        line.show("loading", fraction)
        time.sleep(0.1)
    line.clear()
    assert bool(re.search(r"\d\d:\d\d", screen.getvalue())) is not is_early


def test_progress_shows_no_time_of_days(screen: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_MIN_SECONDS_FOR_RATE", 0.0)
    line = progress.ProgressLine(screen)
    for fraction in (0.0, 1e-8, 2e-8, 3e-8):
        line.show("loading", fraction)
        time.sleep(0.1)
    line.clear()
    assert not re.search(r"\d\d:\d\d", screen.getvalue())


def test_progress_honours_no_color(screen: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in (False, True):
        monkeypatch.setenv("NO_COLOR", "" if wanted else "1")
        progress = ProgressLine(screen)
        progress.show("loading", 0.5)
        progress.clear()
        assert ("\x1b[38;5;" in screen.getvalue()) is wanted


def test_progress_on_dumb_terminal_is_line_per_stage(
    screen: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    progress = ProgressLine(screen)
    for stage, fraction in (("loading", 0.1), ("loading", 0.12), ("warming up", 0.13)):
        progress.show(stage, fraction)
    progress.clear()
    assert screen.getvalue() == "loading (10%)\nwarming up (13%)\n"


def test_progress_without_terminal_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream)
    with caplog.at_level(logging.INFO):
        progress.show("loading", 0.1)
        progress.show("waiting", None)
        progress.clear()
    assert stream.getvalue() == ""
    assert caplog.messages == ["loading (10%)"]


def test_progress_of_download_logs_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    line = ProgressLine(io.StringIO())
    with caplog.at_level(logging.INFO):
        for number in range(1001):
            line.show(f"downloading {number}", number / 1000)
        line.show("loading the weights", 0.1)
    assert 20 <= len(caplog.messages) <= 22
    assert caplog.messages[-1] == "loading the weights (10%)"
