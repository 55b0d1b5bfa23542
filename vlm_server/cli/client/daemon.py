"""Client of a daemon, running or started here: address, API key, readiness, models."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import httpx

from vlm_server.cli.client import own_daemons
from vlm_server.cli.client.answer import error_message
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.text import say
from vlm_server.platform import backend
from vlm_server.platform.child import launch
from vlm_server.settings import Server, Settings, is_loopback
from vlm_server.settings.paths import expand_home

_LOOK_SECONDS = 10.0
_POLL_SECONDS = 0.2
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  shown, not listened on
_FAILURES = (httpx.HTTPError, httpx.InvalidURL)
_LOOK = {"X-VLM-Look": "1"}
"""Keeps a request for news out of the daemon's log."""

OnStage = Callable[[str, float], None]
"""Callback for the stage of loading, and its fraction from 0 to 1."""


class Readiness(NamedTuple):
    """The state in `/health/ready`, and the stage of loading with its fraction from 0 to 1."""

    state: str
    stage: str = ""
    fraction: float = 0.0


_ANSWER_SECONDS = 120.0


class Daemon:
    """The client of the daemon at `url`, which ends in `/v1`, or of a Shepherd Model Gateway.

    `seconds` limits each request for the state; `has_proxy` is False for a daemon started here.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        seconds: float = _LOOK_SECONDS,
        has_proxy: bool = True,
    ) -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key
        self._root = self.url.removesuffix("/v1")
        self.trust_env = has_proxy and not is_local(url)
        self._http = httpx.Client(
            headers=authorization(api_key), timeout=seconds, trust_env=self.trust_env
        )

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def is_there(self) -> bool:
        """Whether a daemon answers, even if its model is not loaded yet."""
        try:
            response = self._http.get(f"{self._root}/health/live", timeout=5.0)
            if response.status_code == 404:  # the gateway's
                return self._http.get(f"{self._root}/liveness", timeout=5.0).is_success
            return own_daemons.is_live(response) or _is_refusal(response)
        except (*_FAILURES, ValueError):
            return False

    def readiness(self) -> Readiness:
        """The state of the daemon's models. Raises CommandFailed if no daemon answers."""
        response = self._get(f"{self._root}/health/ready")
        if response.status_code == 404:
            response = self._get(f"{self._root}/readiness")  # the gateway's
        if response.is_success:
            return Readiness("ready")
        body = _object(response)
        progress = body.get("progress") or {}
        stage, fraction = str(progress.get("stage", "")), float(progress.get("fraction", 0))
        return Readiness(str(body.get("status", "")), stage, fraction)

    def wait_ready(self, seconds: float, on_progress: OnStage | None = None) -> None:
        """Wait for the model. Raises CommandFailed after `seconds`; downloads do not count."""
        deadline = time.monotonic() + seconds
        while (readiness := self.check_readiness(on_progress)).state != "ready":
            if readiness.state == "downloading":
                deadline = time.monotonic() + seconds
            if time.monotonic() > deadline:
                raise CommandFailed(f"the model was not ready within {seconds:.0f} seconds")
            time.sleep(_POLL_SECONDS)

    def check_readiness(self, on_progress: OnStage | None = None) -> Readiness:
        """`readiness`. Raises CommandFailed also if the model can't be loaded."""
        readiness = self.readiness()
        if readiness.state == "failed":
            raise CommandFailed("the daemon can't load its model: its log says why")
        if readiness.stage and on_progress is not None:
            on_progress(readiness.stage, readiness.fraction)
        return readiness

    def list_models(self) -> list[dict[str, Any]]:
        """The entries of `/v1/models`. Raises CommandFailed."""
        response = self._get_ok("models")
        try:
            return [model for model in response.json()["data"] if "id" in model]
        except (ValueError, LookupError, TypeError):
            raise CommandFailed(f"{self.url} lists no models: is it a URL of an API?") from None

    def capabilities(self) -> list[str]:
        """The default model's, or the usual ones if they are unknown. Raises CommandFailed."""
        models = self.list_models()
        capabilities = models[0].get("capabilities") if models else None
        return capabilities if isinstance(capabilities, list) else ["completion", "vision"]

    def status(self, model: str = "") -> dict[str, Any]:
        """Object at `/v1/status`, of `model` or of the default one. Raises CommandFailed."""
        query = f"?{urlencode({'model': model})}" if model else ""
        if "models" not in (status := _object(self._get_ok(f"status{query}"))):
            raise CommandFailed(f"{self.url} tells no status: is it a daemon of vlm-server?")
        return status

    def post(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """The object that a request of `name` is answered with. Raises CommandFailed."""
        try:
            response = self._http.post(f"{self.url}/{name}", json=body, timeout=_ANSWER_SECONDS)
        except _FAILURES as error:
            raise CommandFailed(why_silent(self.url, error)) from None
        if not response.is_success:
            raise CommandFailed(refusal(response.status_code, response.content))
        return _object(response)

    def _get_ok(self, name: str) -> httpx.Response:
        response = self._get(f"{self.url}/{name}")
        if not response.is_success:
            raise CommandFailed(refusal(response.status_code, response.content))
        return response

    def _get(self, url: str) -> httpx.Response:
        try:
            return self._http.get(url, headers=_LOOK)
        except _FAILURES as error:
            raise CommandFailed(why_silent(self.url, error)) from None


def is_daemon(url: str) -> bool:
    """Whether a daemon answers at `url`, which is sent no key."""
    with Daemon(url) as daemon:
        return daemon.is_there()


def url_of(host: str, port: int) -> str:
    """URL of the API, for a client on this machine, of a daemon that listens on `host`, `port`."""
    host = _EVERY_ADDRESS.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def api_url(text: str) -> str:
    """URL of the API at `text`, in which `http://` and `/v1` may be missing."""
    url = text if "://" in text else f"http://{text}"
    has_path = "/" in url.partition("://")[2].rstrip("/")
    return url.rstrip("/") if has_path else f"{url.rstrip('/')}/v1"


def is_local(url: str) -> bool:
    """Whether `url` names this machine by a loopback address. Raises CommandFailed."""
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError as error:
        raise CommandFailed(f"{url!r} is no URL: {error}") from None


def refusal(status: int, body: bytes) -> str:
    """The message of a response of `status` that is an error, with advice on a missing key."""
    try:
        message = error_message(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        message = f"the server answered with status {status}"
    return f"{message} (--api-key-file FILE gives one)" if status == 401 else message


def why_silent(url: str, error: Exception) -> str:
    """Why the server at `url` did not answer, in words where the cause is common."""
    cause = _system_error(error)
    if isinstance(error, httpx.ConnectError) and isinstance(cause, ConnectionRefusedError):
        return nobody_at(url)
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        reason = "it took too long"
    elif isinstance(error, httpx.RemoteProtocolError):
        reason = "it broke off; is the daemon still running?"
    elif isinstance(cause, ssl.SSLCertVerificationError):
        reason = f"its certificate can't be verified: {cause.verify_message}"
    elif isinstance(cause, socket.gaierror):
        reason = f"there is no host of this name ({cause.strerror})"
    elif cause is not None and not isinstance(cause, ssl.SSLError):
        reason = os.strerror(cause.errno or 0)
    return f"no answer from {url}: {reason}"


def nobody_at(url: str) -> str:
    """What to say if nobody answers at `url`: where other daemons do, how to start one."""
    others = " and ".join(own_daemons.others_than(url))
    hint = f", but one does at {others} (--url)" if others else ""
    return f"no daemon answers at {url}{hint}; 'vlm-server serve' starts one"


def _system_error(error: BaseException | None) -> OSError | None:
    """The error of the system that led to `error`; of several attempts, the last one's."""
    while error is not None and not (isinstance(error, OSError) and error.errno):
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[-1]
        else:
            error = error.__cause__ or error.__context__
    return error


def _is_refusal(response: httpx.Response) -> bool:
    """Whether a daemon answers, which refuses the host's name in the URL."""
    error = _object(response).get("error")
    is_ours = isinstance(error, dict) and error.get("code") == "forbidden"
    return response.status_code == 403 and is_ours


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def address_of(arguments: argparse.Namespace, settings: Settings) -> tuple[str, str | None]:
    """URL of the API and API key, from `options.add_daemon_options`, else as `find` has them.

    Says on stderr which daemon it is, if not that of the settings. Raises CommandFailed or
    ConfigError for a key that can't be read.
    """
    url = api_url(arguments.url) if arguments.url else find_and_say(settings.server)
    return url, key_for(url, arguments, settings)


def key_for(url: str, arguments: argparse.Namespace, settings: Settings) -> str | None:
    """The API key for the daemon at `url`; raises as `address_of`."""
    if arguments.api_key_file is not None:
        return read_key(arguments.api_key_file)
    key: str | None = arguments.api_key
    return key or (own_key(settings.server) if is_local(url) else None)


def find_and_say(server: Server) -> str:
    """`find`, which says on stderr which daemon was taken if it is not that of the settings, unless
    these have the default address, and there is no other."""
    configured, (url, *others) = url_of(server.host, server.port), find(server)
    usual = type(server)()
    is_chosen = server.port and (server.host, server.port) != (usual.host, usual.port)
    if url != configured and (is_chosen or others):
        taking = f"No daemon answers at {configured}: taking" if server.port else "Taking"
        rest = f", the newest; --url names others: {', '.join(others)}" if others else ""
        say(f"{taking} yours at {url}{rest}.")
    return url


def find(server: Server) -> list[str]:
    """The URL of the daemon of the settings, or, if none answers there, of this user's others.

    The newest is the first. Never empty: without any, it has the settings' URL. Port 0 is any.
    """
    configured = url_of(server.host, server.port)
    if server.port and is_daemon(configured):
        return [configured]
    return own_daemons.running() or [configured]


def read_key(path: Path) -> str:
    """API key in a file. Raises CommandFailed if it can't be read, or holds something else."""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise CommandFailed(f"can't read an API key from {path}") from None
    if not key.isprintable() or " " in key:
        raise CommandFailed(f"what {path} holds is not an API key alone")
    return key


def authorization(key: str | None) -> dict[bytes, bytes]:
    """The header with an API key, in UTF-8 as the daemon reads it."""
    return {b"Authorization": f"Bearer {key}".encode()} if key else {}


def own_key(server: Server) -> str | None:
    """First API key of the settings. Raises ConfigError if their key file can't be used."""
    from vlm_server.api.http.access import key_file  # slow to import, rarely needed

    if server.api_keys:
        return server.api_keys[0]
    if server.api_key_file:
        entries = key_file.read(expand_home(server.api_key_file))
        return next(iter(entries.values())).key
    return None


_LISTENING = re.compile(r"Listening on (http://\S+)")


@contextmanager
def running_daemon(
    arguments: Sequence[str], stop_seconds: float, log: IO[bytes] | None = None
) -> Iterator[str]:
    """URL of a daemon on a free port, started here and ended when the block is left.

    Its model may still be loading. It ends with this process, even a killed one. Its log goes to
    `log`, or where that of this process does. Raises CommandFailed if it does not start, and
    ModelLoadError if no model can run here.
    """
    backend.check()
    command = launch.command("vlm_server.cli", "serve", "--set", "log.level=warning")
    command += [*arguments, "--host", "127.0.0.1", "--port", "0", "--stop-at-eof"]
    process = subprocess.Popen(  # in this working folder: `arguments` may have relative paths
        command,
        env=launch.environment(with_preload=True),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    match = None
    with process:
        try:
            matches = filter(None, map(_LISTENING.match, process.stdout or ()))
            if (match := next(matches, None)) is None:
                raise CommandFailed("the daemon did not start")
            yield match[1]
        except CommandFailed as error:
            if log is not None or match is None or is_daemon(match[1]):
                raise
            text = "the daemon that was started for this has ended: see above, if it said why"
            raise CommandFailed(f"{text} ({error})") from None
        finally:
            process.terminate()
            try:
                process.wait(stop_seconds)
            finally:  # after the timeout, or at a second Ctrl-C
                process.kill()
