"""What `vlm-server serve` prints: log lines, loading progress, an example request."""

from __future__ import annotations

import base64
import io
import json
import logging
import shlex
import sys
from typing import TextIO

from PIL import Image, ImageDraw

from vlm_server import log_lines
from vlm_server.cli.log_rate import LogRate
from vlm_server.settings import Log, Settings

logger = logging.getLogger(__name__)

_CLEAR_LINE = "\r\x1b[K"
_LOG_STEP = 0.05
_EASILY_REPEATED = (
    "asyncio",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
    "uvicorn.error",
    "vlm_server.api.http.connection.exchange",
    "vlm_server.api.http.connection.protocol",
    "vlm_server.api.http.intake.intake",
)
"""Loggers of which any client could get any number of lines."""


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


class ProgressLine:
    """Loading progress: one updated line on a terminal, log lines elsewhere.

    A stage that advances in small steps, such as a download, gets a log line every 5 %.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._logged = -1.0

    def show(self, stage: str, fraction: float) -> None:
        """Show `stage`; `fraction` runs from 0 to 1."""
        text = f"{stage} ({fraction:.0%})"
        if self._is_terminal:
            self._write(f"{_CLEAR_LINE}{text}")
        elif not 0 <= fraction - self._logged < _LOG_STEP:
            self._logged = fraction
            logger.info("%s", text)

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._is_terminal:
            self._write(_CLEAR_LINE)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


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
