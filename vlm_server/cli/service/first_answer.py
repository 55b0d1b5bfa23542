"""Waits until the service has answered a question about a picture."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from vlm_server.cli import terminal
from vlm_server.cli.client.daemon import refusal
from vlm_server.cli.client.keys import authorization, own_key
from vlm_server.cli.failure import CommandFailed
from vlm_server.cli.serve import url_of
from vlm_server.cli.service.manager import ServiceManager
from vlm_server.settings import Settings

_LOOK_SECONDS = 0.3
_TIMEOUT_SECONDS = 5.0
_GRACE_SECONDS = 15.0
"""launchd starts a service at most every 10 seconds."""
_ANSWER_SECONDS = 120.0
_MAX_TOKENS = 16
_BUSY = (429, 503)


class FirstAnswer:
    """Waits for the service that `manager` runs with `settings`; `say` gets its progress."""

    def __init__(
        self, manager: ServiceManager, settings: Settings, say: Callable[[str], None]
    ) -> None:
        self._manager = manager
        self._settings = settings
        self._say = say
        self._said = ""
        key = own_key(settings.server)
        self._http = httpx.Client(
            base_url=url_of(settings.server.host, settings.server.port).removesuffix("/v1"),
            headers=authorization(key),
            timeout=_TIMEOUT_SECONDS,
            trust_env=False,
        )

    def wait(self) -> str:
        """The answer's text. Raises CommandFailed if the service ends, or does not answer within
        `engine.start_timeout_seconds`, in which the time for downloads does not count.
        """
        seconds = self._settings.engine.start_timeout_seconds
        deadline = time.monotonic() + seconds
        latest = time.monotonic() + _GRACE_SECONDS
        with self._http:
            while True:
                self._check_that_it_runs(latest)
                state = self._readiness()
                if state == "ready" and (answer := self._ask()) is not None:
                    return answer
                if state == "failed":
                    raise CommandFailed("the model can't be loaded")
                if state == "downloading":
                    deadline = time.monotonic() + seconds
                if time.monotonic() > deadline:
                    raise CommandFailed(f"no answer within {seconds:.0f} seconds")
                time.sleep(_LOOK_SECONDS)

    def _check_that_it_runs(self, latest: float) -> None:
        """Raises CommandFailed if it does not, or has not begun to by `latest`."""
        found = self._manager.state()
        if found.state == "starting" and time.monotonic() < latest:
            return
        if found.state != "running":
            exit_text = f": it ended with {found.last_exit}" if found.last_exit else ""
            raise CommandFailed(f"the service is not running{exit_text}")

    def _readiness(self) -> str:
        """The engine's state; `starting` also while nobody accepts."""
        try:
            response = self._http.get("/health/ready")
            told: dict[str, Any] = response.json()
        except (httpx.HTTPError, ValueError):
            return "starting"
        if response.is_success:
            return "ready"
        progress = told.get("progress") or {}
        text = str(progress.get("stage") or told.get("status", ""))
        if text and text != self._said:
            self._said = text
            self._say(text)
        return str(told.get("status", ""))

    def _ask(self) -> str | None:
        """The answer to a question about a red circle; None if it is too busy for one."""
        image = {"type": "image_url", "image_url": {"url": terminal.red_circle_url()}}
        content = [image, {"type": "text", "text": "What shape is this?"}]
        try:
            models = self._http.get("/v1/models").raise_for_status().json()["data"]
            body = {
                "model": models[0]["id"],
                "max_tokens": _MAX_TOKENS,
                "messages": [{"role": "user", "content": content}],
            }
            response = self._http.post("/v1/chat/completions", json=body, timeout=_ANSWER_SECONDS)
            if response.status_code in _BUSY:
                return None
            if not response.is_success:
                raise CommandFailed(refusal(response.status_code, response.content))
            text = response.json()["choices"][0]["message"]["content"]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise CommandFailed(f"it does not answer: {error}") from None
        return str(text or "").strip()
