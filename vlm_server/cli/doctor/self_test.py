"""The self-test: one question about an image, to the running daemon or one started for it."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from pathlib import Path
from typing import IO

import httpx

from vlm_server.cli import options
from vlm_server.cli.client.daemon import Daemon, running_daemon
from vlm_server.cli.client.questions import answer_to, questions_for, rankings, writes
from vlm_server.cli.doctor.daemon import admin_key, host_header, running, settings_at
from vlm_server.cli.doctor.findings import Finding, ok, problem, warning
from vlm_server.cli.doctor.situation import Situation
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.errors import VlmServerError

CHECK = "self-test"
ANSWER_SECONDS = 120.0
_STOP_SECONDS = 20.0
_MAX_SHOWN_CHARS = 80
_TRY_OTHERS = "try others: `vlm-server models check`; small models may be wrong, broken ones always"


def ask_running(situation: Situation) -> Finding:
    """The answer of the running daemon, else of the settings' model if it is on this machine."""
    if (url := running(situation)) is not None:
        server = settings_at(url, situation.settings.server)
        if host_header(server):
            advice = "add 127.0.0.1 to server.allowed_hosts: `ask` needs it, too"
            return warning(CHECK, "not done: the daemon refuses 127.0.0.1 as its name", advice)
        key = admin_key(server)
        if key is None and _needs_key(url):
            return warning(CHECK, "not done: the daemon needs an API key", "pass its --config")
        return _ask_daemon(url, key)
    if situation.fault:
        return ask_embedded(situation)
    path = situation.model.path
    if situation.model_fault or (path and not Path(path).is_dir()):
        return warning(CHECK, "not done: the model is not here", "see `model`, or try --embedded")
    return ask_own_daemon(situation.arguments, situation.settings.engine.start_timeout_seconds)


def ask_embedded(_: Situation) -> Finding:
    """The answer of the embedded model with the default settings, whatever runs here."""
    return ask_own_daemon(options.parse_settings([]), ANSWER_SECONDS)


def ask_own_daemon(arguments: argparse.Namespace, start_seconds: float) -> Finding:
    """The answer of a daemon with the settings of `arguments`, which is ended afterwards."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as log:
        try:
            key = admin_key(options.load_settings(arguments).server)
            new_daemon = running_daemon(options.settings_arguments(arguments), _STOP_SECONDS, log)
            with new_daemon as url, Daemon(url, key) as daemon:
                daemon.wait_ready(start_seconds)
                return _ask(daemon, f"loaded in {time.monotonic() - began:.1f} s, ")
        except VlmServerError as error:
            last_line = _last_line(log)
            text = f"{error}: {last_line}" if last_line else str(error)
            return problem(CHECK, text, "see the findings above")


def _needs_key(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (
            httpx.get(f"{url}/models", timeout=ANSWER_SECONDS, trust_env=False).status_code == 401
        )
    return False


def _ask_daemon(url: str, key: str | None) -> Finding:
    try:
        with Daemon(url, key) as daemon:
            if daemon.check_readiness().state != "ready":
                return warning(CHECK, "not done: the daemon is not ready", "see `daemon`")
            return _ask(daemon, "the running daemon ")
    except VlmServerError as error:
        return problem(CHECK, str(error), "see `daemon`, and its log")


def _ask(daemon: Daemon, introduction: str) -> Finding:
    """Whether the answer is right. Raises CommandFailed if there is none."""
    began = time.monotonic()
    if not writes(daemon):
        ranking = next(rankings(daemon))
        seconds = time.monotonic() - began
        text = (
            f"{introduction}put {ranking.first!r} nearest to {ranking.query!r} in {seconds:.1f} s"
        )
        is_right = ranking.first == ranking.expected
        return ok(CHECK, text) if is_right else warning(CHECK, text, _TRY_OTHERS)
    try:
        question = next(questions_for(daemon))
        answer = answer_to(question, daemon, ANSWER_SECONDS)
    except TimeoutError:
        raise CommandFailed(f"no answer within {ANSWER_SECONDS:.0f} s") from None
    seconds = time.monotonic() - began
    shown_answer = " ".join(answer.split())[:_MAX_SHOWN_CHARS]
    subject = question.subject[:1].lower() + question.subject[1:]
    text = f"{introduction}answered {shown_answer!r} about {subject} in {seconds:.1f} s"
    if question.expected in answer.lower():
        return ok(CHECK, text)
    return warning(CHECK, text, _TRY_OTHERS)


def _last_line(log: IO[bytes]) -> str:
    """The message with which the daemon ended."""
    log.seek(0)
    lines = log.read()[-8192:].decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("vlm-server: ")[:300] if lines else ""
