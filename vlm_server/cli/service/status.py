"""State of the service: what `vlm-server service status` prints, and its first answer."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from vlm_server.cli import exit_codes, text
from vlm_server.cli.client.chat import DaemonBusy
from vlm_server.cli.client.daemon import Daemon, Readiness, own_key, url_of
from vlm_server.cli.client.questions import answer_to, questions_for
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.serve.listener import is_at
from vlm_server.cli.service.manager import ServiceManager, join_address, split_address
from vlm_server.platform.terminal import columns_of
from vlm_server.settings import Settings
from vlm_server.sizes import memory_size

_LOOK_SECONDS = 5.0
_POLL_SECONDS = 0.3
_GRACE_SECONDS = 15.0
"""launchd starts a service at most every 10 seconds."""
_ANSWER_SECONDS = 120.0


def show(manager: ServiceManager, settings: Settings | None, fault: str, *, as_json: bool) -> int:
    """Print the state of an installed service, whose settings may have a `fault`; exit code."""
    facts = _facts(manager, settings, fault)
    if as_json:
        json.dump(facts, sys.stdout, indent=2)
        print()
    else:
        rows = [
            (
                name.removesuffix("_bytes").replace("_", " "),
                memory_size(value) if name == "memory_bytes" else str(value),
            )
            for name, value in facts.items()
            if value is not None
        ]
        print(text.facts(rows, columns_of(sys.stdout)))
    if facts["state"] not in ("running", "stopping"):
        return exit_codes.SERVICE_NOT_RUNNING
    return exit_codes.SERVICE_READY if facts["health"] == "ready" else exit_codes.SERVICE_NOT_READY


def _facts(manager: ServiceManager, settings: Settings | None, fault: str) -> dict[str, Any]:
    state = manager.state()
    address = manager.read_address()
    if not address and settings is not None:
        address = join_address(settings.server.host, settings.server.port)
    url = url_of(*split_address(address)) if address else None
    return {
        "state": state.state,
        "health": _health(url) if state.state == "running" else None,
        "address": url,
        "warning": _warning(address, settings, fault),
        "model": settings.model.name or settings.model.path or "demo" if settings else None,
        "pid": state.pid,
        "since": state.since if state.pid else None,
        "memory_bytes": state.memory_bytes,
        "last_exit": state.last_exit,
        "log": manager.log,
        "file": str(manager.path),
    }


def _warning(address: str, settings: Settings | None, fault: str) -> str | None:
    if fault:
        return f"the settings can't be used: {fault}"
    if settings is not None and address and not is_at(settings.server, [split_address(address)]):
        new_address = join_address(settings.server.host, settings.server.port)
        return f"the settings say {new_address}: 'vlm-server service install' moves the service"
    return None


def _health(url: str | None) -> str:
    """The state of loading, `ready`, or `no answer`."""
    if url is None:
        return "no answer"
    with Daemon(url, seconds=_LOOK_SECONDS, has_proxy=False) as daemon:
        readiness = _readiness(daemon)
    return readiness.stage or readiness.state or "no answer"


def _readiness(daemon: Daemon) -> Readiness:
    try:
        return daemon.readiness() if daemon.is_there() else Readiness("")
    except CommandFailed:
        return Readiness("")


def wait_for_answer(manager: ServiceManager, settings: Settings, say: Callable[[str], None]) -> str:
    """The answer of the service to a question about an image; `say` gets the stages of loading.

    Raises CommandFailed if the service ends, or takes longer than `engine.start_timeout_seconds`,
    without downloads.
    """
    seconds = settings.engine.start_timeout_seconds
    deadline = time.monotonic() + seconds
    latest = time.monotonic() + _GRACE_SECONDS
    url, last_stage = url_of(settings.server.host, settings.server.port), ""
    key = own_key(settings.server)
    with Daemon(url, key, seconds=_LOOK_SECONDS, has_proxy=False) as daemon:
        while True:
            _check_that_it_runs(manager, latest)
            readiness = _readiness(daemon)
            if readiness.state == "ready" and (answer := _answer(daemon)) is not None:
                return answer
            if readiness.state == "failed":
                raise CommandFailed("the model can't be loaded")
            if readiness.state == "downloading":
                deadline = time.monotonic() + seconds
            if time.monotonic() > deadline:
                raise CommandFailed(f"no answer within {seconds:.0f} seconds")
            stage = "" if readiness.state == "ready" else readiness.stage or readiness.state
            if stage not in ("", last_stage):
                last_stage = stage
                say(stage)
            time.sleep(_POLL_SECONDS)


def _check_that_it_runs(manager: ServiceManager, latest: float) -> None:
    """Raises CommandFailed if the service has ended, or has not started by `latest`."""
    service_state = manager.state()
    if service_state.state == "starting" and time.monotonic() < latest:
        return
    if service_state.state != "running":
        exit_text = f": it ended with {service_state.last_exit}" if service_state.last_exit else ""
        raise CommandFailed(f"the service is not running{exit_text}")


def _answer(daemon: Daemon) -> str | None:
    """The answer to a test question; None if the daemon is too busy. Raises CommandFailed."""
    try:
        return answer_to(next(questions_for(daemon)), daemon, _ANSWER_SECONDS)
    except DaemonBusy:
        return None
    except TimeoutError:
        raise CommandFailed(f"no answer within {_ANSWER_SECONDS:.0f} seconds") from None
