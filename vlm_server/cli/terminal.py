"""What `vlm-server serve` prints: log lines, a greeting, an example request."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import msgspec
from PIL import Image, ImageDraw

from vlm_server import __version__
from vlm_server.cli.log_rate import LogRate
from vlm_server.platform import log_lines
from vlm_server.settings import Log, Settings, Sources

_CLEAR_LINE = "\r\x1b[K"
_DEFAULT_URL = "http://127.0.0.1:8000/v1"
_ACCESS_LOGGER = "vlm_server.api"
_LOADING_LOGGER = "vlm_server.supervisor.supervisor"
_EASILY_REPEATED = (
    "asyncio",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
    "uvicorn.error",
    "vlm_server.api.http.connection.exchange",
    "vlm_server.api.http.connection.protocol",
    "vlm_server.api.parsing.body_parser",
)
"""Loggers of which any client could get any number of lines."""


def for_a_person(settings: Settings, sources: Sources) -> Settings:
    """`settings` with a quieter log, if it goes to a terminal and its level was not chosen.

    Requests are logged all the same.
    """
    if not sys.stderr.isatty() or "log.level" in sources:
        return settings
    logging.getLogger(_ACCESS_LOGGER).setLevel(logging.INFO)
    logging.getLogger(_LOADING_LOGGER).addFilter(_is_no_error)
    return msgspec.structs.replace(
        settings, log=msgspec.structs.replace(settings.log, level="warning")
    )


def has_started() -> None:
    """Until here, an error of loading is the last thing that `serve` says: not in the log, too."""
    logging.getLogger(_LOADING_LOGGER).removeFilter(_is_no_error)


def _is_no_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


def set_up_logging(log: Log) -> None:
    """Send log lines to stderr; on a terminal they replace the progress line."""
    handler = logging.StreamHandler(sys.stderr)
    start = _CLEAR_LINE if sys.stderr.isatty() else ""
    handler.setFormatter(log_lines.formatter(log.format, "front", start))
    logging.basicConfig(level=log.level.upper(), handlers=[handler])
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.root.level))
    rate = LogRate()
    for name in _EASILY_REPEATED:
        logging.getLogger(name).addFilter(rate)


def first_words(url: str, model_name: str, stream: TextIO) -> str:
    """What is said while the model loads: to a program, the address in one line."""
    if not stream.isatty():
        return f"Listening on {url}"
    bold = _style(stream, "1")
    page = url.removesuffix("/v1")
    rows = (("model", model_name), ("address", url), ("page", page))
    lines = [f"  {name:<8} {bold(text)}" for name, text in rows]
    return "\n".join([f"vlm-server {__version__}", "", *lines, ""])


def invitation(url: str, seconds: float, settings: Settings, stream: TextIO) -> str:
    """What a person at a terminal is told when the model is ready."""
    words = [_program(), "ask"]
    if url != _DEFAULT_URL:
        words += ["--url", url]
    if settings.server.needs_key:
        words += ["--api-key-file", "FILE"]
    command = shlex.join([*words, "picture.png"]) + ' "What is in this picture?"'
    bold = _style(stream, "1")
    return (
        f"Ready after {seconds:.1f} s. Open the page, or ask from another terminal:\n\n"
        f"  {bold(command)}\n\nCtrl-C stops the daemon."
    )


def _program() -> str:
    """What a shell finds the program by."""
    return "vlm-server" if shutil.which("vlm-server") else str(Path(sys.prefix, "bin/vlm-server"))


def _style(stream: TextIO, code: str) -> Callable[[str], str]:
    """Puts text into a style, where `stream` is a terminal that has it."""
    has_styles = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if not has_styles or os.environ.get("NO_COLOR"):
        return str
    return lambda text: f"\x1b[{code}m{text}\x1b[0m"


def greeting(url: str, model_name: str, settings: Settings) -> str:
    """The text for when the model is ready: the address, and an example request."""
    return (
        f"Ready: {model_name} is served at {url}\n\n"
        f"Try it with a small image of a red circle:\n\n"
        f"{example_request(url, model_name, with_key=settings.server.needs_key)}\n"
    )


def example_request(url: str, model_name: str, *, with_key: bool) -> str:
    """A `curl` command with an image. API keys are never printed, only a placeholder."""
    image = {"type": "image_url", "image_url": {"url": red_circle_url()}}
    text = {"type": "text", "text": "What shape is this?"}
    messages = [{"role": "user", "content": [image, text]}]
    body = {"model": model_name, "max_tokens": 64, "messages": messages}
    headers = ["Content-Type: application/json"]
    if with_key:
        headers.append("Authorization: Bearer YOUR_KEY")
    words = ["curl", f"{url}/chat/completions"]
    for header in headers:
        words += ["-H", header]
    return shlex.join([*words, "-d", json.dumps(body)])


def red_circle_url() -> str:
    """A PNG of 96 by 96 pixels, two colours and under 300 bytes, as a data URL."""
    image = Image.new("P", (96, 96), 0)
    image.putpalette([255, 255, 255, 220, 30, 30])
    ImageDraw.Draw(image).ellipse((18, 18, 78, 78), fill=1)
    png = io.BytesIO()
    image.save(png, "PNG", optimize=True, bits=1)
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
