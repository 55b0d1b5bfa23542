"""A small client of the daemon: is it there, which models, one streamed answer.

Knows HTTP and the shapes of `/v1`; knows nothing of how a daemon is started.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from vlm_server.cli.failure import CommandFailed
from vlm_server.settings import is_loopback

_POLL_SECONDS = 0.2
_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
)


class Client:
    """Talks to the daemon at `url`, which ends in `/v1`. Use as a context manager."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._root = self.url.removesuffix("/v1")
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(10.0, read=None),
            trust_env=not is_local(url),  # a proxy can't reach this machine's loopback
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def is_there(self) -> bool:
        """Whether a daemon answers, be its model loaded or not."""
        try:
            return self._http.get(f"{self._root}/health/live", timeout=5.0).is_success
        except httpx.HTTPError:
            return False

    def is_ready(self) -> bool:
        """Whether the model is loaded. Raises CommandFailed if it never will be."""
        response = self._get(f"{self._root}/health/ready")
        if response.status_code == 503 and response.json().get("status") == "failed":
            raise CommandFailed("the daemon can't load its model")
        return response.is_success

    def wait_ready(self, seconds: float) -> None:
        """Wait until the model is loaded. Raises CommandFailed after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.is_ready():
            if time.monotonic() > deadline:
                raise CommandFailed(f"the model was not ready within {seconds:.0f} seconds")
            time.sleep(_POLL_SECONDS)

    def models(self) -> list[str]:
        """The names that the daemon serves."""
        response = self._get(f"{self.url}/models")
        if not response.is_success:
            raise CommandFailed(_message(response.content, response.status_code))
        return [str(model["id"]) for model in response.json()["data"]]

    def ask(self, model: str, files: Sequence[Path], question: str) -> Iterator[str]:
        """The answer, piece by piece. Raises CommandFailed with the daemon's own message."""
        content = [*map(part_of, files), {"type": "text", "text": question}]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "stream": True,
        }
        try:
            yield from self._stream(body)
        except httpx.HTTPError as error:
            raise CommandFailed(f"the connection to {self.url} broke: {error}") from None

    def _stream(self, body: dict[str, Any]) -> Iterator[str]:
        with self._http.stream("POST", f"{self.url}/chat/completions", json=body) as response:
            if not response.is_success:
                raise CommandFailed(_message(response.read(), response.status_code))
            for line in response.iter_lines():
                name, _, data = line.partition(": ")
                if name == "data" and data != "[DONE]":
                    yield _text_of(json.loads(data))

    def _get(self, url: str) -> httpx.Response:
        try:
            return self._http.get(url, timeout=10.0)
        except httpx.HTTPError as error:
            raise CommandFailed(f"nothing answers at {self.url}: {error}") from None


def is_local(url: str) -> bool:
    """Whether `url` names this machine by a loopback address."""
    return is_loopback(urlsplit(url).hostname or "")


def is_video(path: Path) -> bool:
    """Whether the file's name is that of a video."""
    return (mimetypes.guess_type(path.name)[0] or "").startswith("video/")


def part_of(path: Path) -> dict[str, Any]:
    """The picture or video in the file, as a part of a message."""
    kind = "video_url" if is_video(path) else "image_url"
    return {"type": kind, kind: {"url": data_url(path)}}


def data_url(path: Path) -> str:
    """The file's bytes as they are, with the type that its first bytes name."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CommandFailed(f"can't read {path}: {error.strerror}") from None
    guesses = [kind for signature, kind in _SIGNATURES if data.startswith(signature)]
    kind = guesses[0] if guesses else mimetypes.guess_type(path.name)[0]
    return f"data:{kind or 'application/octet-stream'};base64,{base64.b64encode(data).decode()}"


def _text_of(chunk: dict[str, Any]) -> str:
    if "error" in chunk:
        raise CommandFailed(str(chunk["error"]["message"]))
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _message(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered with status {status}"
