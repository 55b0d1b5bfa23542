"""One question about one drawn picture: to the running daemon, or to one of our own."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import IO

from vlm_server.cli import options
from vlm_server.cli.client.daemon import Daemon
from vlm_server.cli.client.stream import stream_text
from vlm_server.cli.doctor.checks.daemon import admin_key
from vlm_server.cli.doctor.checks.port import host_header, listener
from vlm_server.cli.doctor.finding import Finding, ok, problem, warning
from vlm_server.cli.doctor.situation import Situation
from vlm_server.cli.failure import CommandFailed
from vlm_server.cli.models.pictures import drawn
from vlm_server.cli.own_daemon import running_daemon
from vlm_server.cli.serve import url_of
from vlm_server.errors import VlmServerError

CHECK = "self-test"
ANSWER_SECONDS = 120.0
_MAX_TOKENS = 64
_STOP_SECONDS = 20.0
_MAX_SHOWN_CHARS = 80
_EXPECTED = "circle"
_EMBEDDED = argparse.Namespace(
    config=None, set=[], model=None, chat_template=None, allow_unchecked=None
)


def look(situation: Situation) -> list[Finding]:
    """With the running daemon; else with the model of the settings if it is on this machine."""
    server = situation.settings.server
    if server.port and listener(server) == "ours":
        if host_header(server):
            advice = "add 127.0.0.1 to server.allowed_hosts: `ask` needs it, too"
            return [warning(CHECK, "not done: the daemon refuses 127.0.0.1 as its name", advice)]
        return [_of_running(url_of(server.host, server.port), admin_key(server))]
    if situation.fault:
        return [embedded()]
    path = situation.model.path
    if situation.model_fault or (path and not Path(path).is_dir()):
        return [warning(CHECK, "not done: the model is not here", "see `model`, or try --embedded")]
    return [of_own(situation.arguments, situation.settings.engine.start_timeout_seconds)]


def look_embedded(_: Situation) -> list[Finding]:
    """With the embedded model and the default settings, whatever runs here."""
    return [embedded()]


def embedded() -> Finding:
    """With the embedded model, in a daemon of our own."""
    return of_own(_EMBEDDED, ANSWER_SECONDS)


def of_own(arguments: argparse.Namespace, start_seconds: float) -> Finding:
    """In a daemon of our own with the settings of `arguments`, which is ended afterwards."""
    with tempfile.TemporaryFile() as log:
        try:
            words = options.settings_arguments(arguments)
            return _started(words, admin_key_of(arguments), start_seconds, log)
        except VlmServerError as error:
            said = _last_line(log)
            text = f"{error}: {said}" if said else str(error)
            return problem(CHECK, text, "see the findings above; --report has more")


def admin_key_of(arguments: argparse.Namespace) -> str | None:
    """The key that a daemon of these `arguments` takes. Raises ConfigError."""
    return admin_key(options.load_settings(arguments).server)


def _started(words: list[str], key: str | None, seconds: float, log: IO[bytes]) -> Finding:
    began = time.monotonic()
    with running_daemon(words, _STOP_SECONDS, log) as url, Daemon(url, key) as daemon:
        daemon.wait_ready(seconds)
        loaded = time.monotonic() - began
        return _asked(daemon, f"loaded in {loaded:.1f} s, ")


def _of_running(url: str, key: str | None) -> Finding:
    try:
        with Daemon(url, key) as daemon:
            if not daemon.is_ready():
                return warning(CHECK, "not done: the daemon is not ready", "see `daemon`")
            return _asked(daemon, "the running daemon ")
    except VlmServerError as error:
        return problem(CHECK, str(error), "see `daemon`, and its log")


def _asked(daemon: Daemon, before: str) -> Finding:
    """Raises CommandFailed if there is no answer."""
    picture = next(drawn())
    began = time.monotonic()
    try:
        answer = asyncio.run(asyncio.wait_for(_answer(daemon, picture.url), ANSWER_SECONDS))
    except TimeoutError:
        raise CommandFailed(f"no answer within {ANSWER_SECONDS:.0f} s") from None
    seconds = time.monotonic() - began
    shown = " ".join(answer.split())[:_MAX_SHOWN_CHARS]
    text = f"{before}answered {shown!r} about a red circle in {seconds:.1f} s"
    if _EXPECTED in answer.lower():
        return ok(CHECK, text)
    advice = "try others: `vlm-server models check`; small models may be wrong, broken ones always"
    return warning(CHECK, text, advice)


async def _answer(daemon: Daemon, url: str) -> str:
    image = {"type": "image_url", "image_url": {"url": url}}
    content = [image, {"type": "text", "text": "What shape is this?"}]
    body = {
        "model": "default",
        "stream": True,
        "max_tokens": _MAX_TOKENS,
        "messages": [{"role": "user", "content": content}],
    }
    return "".join([text async for text in stream_text(daemon, json.dumps(body).encode())])


def _last_line(log: IO[bytes]) -> str:
    """Of what the daemon said: the message that it ended with."""
    log.seek(0)
    lines = log.read()[-8192:].decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("vlm-server: ")[:300] if lines else ""
