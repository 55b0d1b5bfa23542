"""Asks a daemon whether it runs, whether its model is loaded, and which models it serves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vlm_server.cli.client.keys import authorization
from vlm_server.cli.failure import CommandFailed

if TYPE_CHECKING:
    import httpx

_POLL_SECONDS = 0.2

OnProgress = Callable[[str, float], None]
"""Called with the stage, and the fraction of it that is done."""


class Daemon:
    """The daemon at `url`, which ends in `/v1`, or the Shepherd Model Gateway before several.

    Use as a context manager.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        import httpx  # takes a moment

        self.url = url.rstrip("/")
        self.api_key = api_key
        self._root = self.url.removesuffix("/v1")
        self._is_downloading = False
        self._failures = (httpx.HTTPError, httpx.InvalidURL)
        self._http = httpx.Client(
            headers=authorization(api_key),
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
            response = self._http.get(f"{self._root}/health/live", timeout=5.0)
            if response.status_code == 404:
                response = self._http.get(f"{self._root}/liveness", timeout=5.0)  # the gateway's
            return response.is_success
        except self._failures:
            return False

    def is_ready(self, on_progress: OnProgress | None = None) -> bool:
        """Whether the model is loaded. Raises CommandFailed if it can't be loaded."""
        response = self._get(f"{self._root}/health/ready")
        if response.status_code == 404:
            response = self._get(f"{self._root}/readiness")  # the gateway's
        body = _object(response) if response.status_code == 503 else {}
        state, progress = body.get("status"), body.get("progress")
        self._is_downloading = state == "downloading"
        if state == "failed":
            raise CommandFailed("the daemon can't load its model: its log says why")
        if progress and on_progress is not None:
            on_progress(str(progress["stage"]), float(progress["fraction"]))
        return response.is_success

    def wait_ready(self, seconds: float, on_progress: OnProgress | None = None) -> None:
        """Wait until the model is loaded. Raises CommandFailed after `seconds`, in which the time
        for downloading it does not count.
        """
        deadline = time.monotonic() + seconds
        while not self.is_ready(on_progress):
            if self._is_downloading:
                deadline = time.monotonic() + seconds
            if time.monotonic() > deadline:
                raise CommandFailed(f"the model was not ready within {seconds:.0f} seconds")
            time.sleep(_POLL_SECONDS)

    def models(self) -> list[str]:
        """The names of the models that it serves. Raises CommandFailed."""
        return [str(model["id"]) for model in self.listed()]

    def listed(self) -> list[dict[str, Any]]:
        """What it says of each of its models. Raises CommandFailed."""
        response = self._get(f"{self.url}/models")
        if not response.is_success:
            raise CommandFailed(refusal(response.status_code, response.content))
        try:
            return [model for model in response.json()["data"] if "id" in model]
        except (ValueError, LookupError, TypeError):
            raise CommandFailed(f"{self.url} lists no models: is it a URL of an API?") from None

    def status(self) -> dict[str, Any]:
        """What `/v1/status` says. Raises CommandFailed."""
        response = self._get(f"{self.url}/status")
        if not response.is_success:
            raise CommandFailed(refusal(response.status_code, response.content))
        if "models" not in (status := _object(response)):
            raise CommandFailed(f"{self.url} tells no status: is it a daemon of vlm-server?")
        return status

    def _get(self, url: str) -> httpx.Response:
        try:
            return self._http.get(url)
        except self._failures as error:
            raise CommandFailed(f"no answer from {self.url}: {error}") from None


def api_url(text: str) -> str:
    """The URL of the API at `text`, as people copy or type it: without `http://`, or `/v1`."""
    url = text if "://" in text else f"http://{text}"
    has_path = "/" in url.partition("://")[2].rstrip("/")
    return url.rstrip("/") if has_path else f"{url.rstrip('/')}/v1"


def is_local(url: str) -> bool:
    """Whether `url` names this machine by a loopback address. Raises CommandFailed."""
    from vlm_server.settings import is_loopback

    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError as error:
        raise CommandFailed(f"{url!r} is no URL: {error}") from None


def refusal(status: int, body: bytes) -> str:
    """What a response of `status` says is wrong."""
    from vlm_server.cli.client.answer import error_message

    try:
        return error_message(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered with status {status}"


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
