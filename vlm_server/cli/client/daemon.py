"""Asks a daemon whether it runs, whether its model is loaded, and which models it serves."""

from __future__ import annotations

import json
import time
from urllib.parse import urlsplit

import httpx

from vlm_server.cli.client.answer import error_message
from vlm_server.cli.failure import CommandFailed
from vlm_server.settings import is_loopback

_POLL_SECONDS = 0.2


class Daemon:
    """The daemon at `url`, which ends in `/v1`. Use as a context manager."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key
        self._root = self.url.removesuffix("/v1")
        self._is_downloading = False
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=10.0,
            trust_env=not is_local(url),  # a proxy can't reach this machine's loopback
        )

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def is_there(self) -> bool:
        """Whether a daemon answers, even if its model is not loaded yet."""
        try:
            return self._http.get(f"{self._root}/health/live", timeout=5.0).is_success
        except httpx.HTTPError:
            return False

    def is_ready(self) -> bool:
        """Whether the model is loaded. Raises CommandFailed if it can't be loaded."""
        response = self._get(f"{self._root}/health/ready")
        state = response.json().get("status") if response.status_code == 503 else None
        self._is_downloading = state == "downloading"
        if state == "failed":
            raise CommandFailed("the daemon can't load its model")
        return response.is_success

    def wait_ready(self, seconds: float) -> None:
        """Wait until the model is loaded. Raises CommandFailed after `seconds`, in which the time
        for downloading it does not count.
        """
        deadline = time.monotonic() + seconds
        while not self.is_ready():
            if self._is_downloading:
                deadline = time.monotonic() + seconds
            if time.monotonic() > deadline:
                raise CommandFailed(f"the model was not ready within {seconds:.0f} seconds")
            time.sleep(_POLL_SECONDS)

    def models(self) -> list[str]:
        """The names of the models that it serves. Raises CommandFailed."""
        response = self._get(f"{self.url}/models")
        if not response.is_success:
            raise CommandFailed(refusal(response.status_code, response.content))
        return [str(model["id"]) for model in response.json()["data"]]

    def _get(self, url: str) -> httpx.Response:
        try:
            return self._http.get(url)
        except httpx.HTTPError as error:
            raise CommandFailed(f"no answer from {self.url}: {error}") from None


def is_local(url: str) -> bool:
    """Whether `url` names this machine by a loopback address."""
    return is_loopback(urlsplit(url).hostname or "")


def refusal(status: int, body: bytes) -> str:
    """What a response of `status` says is wrong."""
    try:
        return error_message(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered with status {status}"
